"""Launch the Triton kernels of linear attention: block configs, splits, forward and backward pass.

Letters: B batch, H heads, Hkv key heads, T tokens, D key size, E value size, F decays per token
(1 or D).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnzoo.backends.linear.kernels.configs import TABLE, Shape, config
from attnzoo.backends.linear.kernels.scan import scan_kernel
from attnzoo.backends.linear.kernels.splits import split_scan_kernel, split_sums_kernel
from attnzoo.errors import ConfigError

MIN_SPLIT_SIZE = 512  # tokens; in shorter splits, the states cost more than parallelism gains
PROGRAMS_PER_PROCESSOR = 2  # that the number of splits aims for
SPLIT_SCAN_BLOCK = 1024  # elements of a state per program of split_scan_kernel


class LinearTensors(NamedTuple):
    """The tensor arguments of :func:`attnzoo.backends.linear.kernels.custom_op.linear_triton`."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    kv: Tensor
    z: Tensor
    segment_ids: Tensor | None
    padding_mask: Tensor | None


class KernelLauncher:
    """Launches the kernels of one call of linear attention."""

    def __init__(
        self,
        tensors: LinearTensors,
        feature_map: str,
        map_scale: float,
        scale: float,
        normalize: bool,
        eps: float,
        chunk_size: int,
        split_size: int,
        needs_decay_grad: bool = False,
    ) -> None:
        groups = tensors.q.shape[1] // tensors.k.shape[1]
        self.q = contiguous_rows(tensors.q, groups)
        self.k, self.v = contiguous_rows(tensors.k), contiguous_rows(tensors.v)
        self.kv, self.z = tensors.kv.contiguous(), tensors.z.contiguous()
        self.batch, self.heads, self.tokens, self.d = self.q.shape
        self.key_heads, self.e = self.k.shape[1], self.v.shape[3]
        self.chunk_size, self.normalize = chunk_size, normalize
        # scale n / (scale d + eps) is n / (d + eps / scale); else it multiplies the results
        self.scale, self.eps = (1.0, eps / scale) if normalize else (scale, eps)
        self.gate, self.decay, gate_strides = gate_and_strides(tensors.log_decay, self.k)
        self.gate_shape = None if tensors.log_decay is None else tensors.log_decay.shape
        segment_ids, padding_mask = tensors.segment_ids, tensors.padding_mask
        unused = self.q.new_empty(1, dtype=torch.int8)
        self.segment_ids = unused if segment_ids is None else segment_ids.contiguous()
        self.padding_mask = (
            unused if padding_mask is None else padding_mask.to(torch.int8).contiguous()
        )
        self.capability, processors = device_properties(self.q.device)
        self.float32_operands, precision = _operand_precision(self.q, self.k, self.v)
        self.constants = {
            "D": self.d,
            "E": self.e,
            "G": groups,
            "MAP": feature_map,
            "DECAY": self.decay,
            "NORMALIZE": normalize,
            "PACKED": segment_ids is not None,
            "PADDED": padding_mask is not None,
            "DECAY_GRAD": needs_decay_grad,
            "OPERAND": tl.float32 if self.float32_operands else tl.bfloat16,
            "PRECISION": precision,
            "gate_token": gate_strides[2],
            "key_heads": self.key_heads,
        }
        tiles = self._tiles("out")["TILES"]
        self.split_size = split_size or _split_size(
            self.batch * self.key_heads * tiles, self.tokens, processors
        )
        self.num_splits = max(1, -(-self.tokens // self.split_size))
        self.scalars = {
            "gate_batch": gate_strides[0],
            "gate_head": gate_strides[1],
            "tokens": self.tokens,
            "split_size": self.split_size,
            "num_splits": self.num_splits,
            "scale": self.scale,
            "map_scale": map_scale,
        }

    # -- passes ------------------------------------------------------------------------------------

    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output, and the state after the last token."""
        out = empty_rows(self.v, self.heads, self.e)
        last = torch.empty_like(self.kv), torch.empty_like(self.z)
        with device_context(self.q.device):
            starts = self._split_states((self.kv, self.z), self.k, self.v)
            self._launch_scan("out", out, starts, last=last)
        return out.transpose(1, 2), *last

    def backward(
        self, d_out: Tensor, d_kv: Tensor, d_z: Tensor, last: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return the gradients; ``last`` is the state that the forward pass returned."""
        d_out = contiguous_rows(d_out, self.constants["G"])
        needs_decay_grad = self.constants["DECAY_GRAD"]
        if self.decay == "scalar":
            check_equal_tiles(self._tiles("dq"), self._tiles("dk"))
        dq, dk = empty_rows(self.q, self.heads, self.d), empty_rows(self.k, self.key_heads, self.d)
        dv = empty_rows(self.v, self.key_heads, self.e)
        first = torch.empty_like(self.kv), torch.empty_like(self.z)
        layout = (self._tiles("dq")["TILES"], 1) if self.decay != "vector" else (1, self.d)
        shape = (layout[0], self.batch, self.key_heads, self.tokens, layout[1])
        q_dq = self.z.new_empty(shape if needs_decay_grad else 1)
        with device_context(self.q.device):
            starts = self._split_states((self.kv, self.z), self.k, self.v)
            statistics = self._row_statistics(d_out, starts)
            inputs = {"d_out": d_out, **statistics, "q_dq": q_dq}
            self._launch_scan("dq", dq, starts, **inputs)
            d_last = tuple(_scale(x, 1 / self.scale).contiguous() for x in (d_kv, d_z))
            ends = self._split_states(d_last, self.q, d_out, statistics)
            end_states = last
            if needs_decay_grad and self.num_splits > 1:
                end_states = tuple(
                    torch.cat([start[:, :, 1:], end.unsqueeze(2)], 2)
                    for start, end in zip(starts, last, strict=True)
                )
            d_log = torch.empty_like(q_dq)
            self._launch_scan(
                "dk", dk, ends, last=first, ends=end_states, d_log_decay=d_log, **inputs
            )
            self._launch_scan("dv", dv, ends, last=first, **inputs)
        dq, dk, dv = (x.transpose(1, 2) for x in (dq, dk, dv))
        d_first = (_scale(x, self.scale) for x in first)
        return dq, dk, dv, self._reduce_log_decay_grad(d_log), *d_first

    def _row_statistics(self, d_out: Tensor, starts: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """Return ``inv_denom``, ``delta`` and ``row_maxima``; placeholders if they are not read."""
        exp = self.constants["MAP"] == "exp"
        if not (self.normalize or exp):
            return {"inv_denom": self.z, "delta": self.z, "row_maxima": self.z}
        inv_denom = self.z.new_empty(self.batch, self.heads, self.tokens)
        row_maxima = self.z.new_empty((2, *inv_denom.shape) if exp else 1)
        parts = self.z.new_empty(self._tiles("shared")["TILES"], *inv_denom.shape)
        self._launch_scan(
            "shared", parts, starts, d_out=d_out, inv_denom=inv_denom, row_maxima=row_maxima
        )
        return {"inv_denom": inv_denom, "delta": parts.sum(0), "row_maxima": row_maxima}

    def _reduce_log_decay_grad(self, d_log: Tensor) -> Tensor:
        """Return the gradient of ``log_decay`` in its own shape and dtype."""
        if not self.constants["DECAY_GRAD"]:
            return self.q.new_empty(0)
        assert self.gate_shape is not None
        d_log = d_log.sum(0) if len(d_log) > 1 else d_log[0]
        if len(self.gate_shape) == 1:
            d_log = d_log.sum((0, 2, 3))
        return d_log.reshape(self.gate_shape).to(self.gate.dtype)

    # -- launches ----------------------------------------------------------------------------------

    def _launch_scan(
        self,
        mode: str,
        result: Tensor,
        states: tuple[Tensor, Tensor],
        *,
        last: tuple[Tensor, ...] | None = None,
        ends: tuple[Tensor, ...] | None = None,
        **inputs: Tensor,
    ) -> None:
        """Launch :func:`scan_kernel`; arguments that a mode does not read may be any tensor."""
        names = ("d_out", "inv_denom", "delta", "row_maxima", "q_dq", "d_log_decay")
        d_out, *rest = (inputs.get(name, self.z if name != "d_out" else self.v) for name in names)
        launch, blocks = self._config(mode)
        blocks["MODE"] = mode
        tensors = {"q": self.q, "k": self.k, "v": self.v, "o": d_out}
        strides = [s for x in tensors.values() for s in x.stride()[:2]]
        token_strides = {f"{name}_token": x.stride(2) for name, x in tensors.items()}
        scan_kernel[self._grid(blocks)](
            self.q, self.k, self.v, d_out, result, self.gate, self.segment_ids, self.padding_mask,
            *states, *(last or states), *(ends or states), *rest, *strides,
            **self.scalars, eps=self.eps, **token_strides, **self.constants, **blocks, **launch,
        )  # fmt: skip

    def _split_states(
        self,
        initial: tuple[Tensor, Tensor],
        x: Tensor,
        y: Tensor,
        statistics: dict[str, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the state at the start of each split, or its gradient at the end.

        Args:
            initial: The state before the first token, or its gradient after the last one.
            x: Keys, or queries.
            y: Values, or gradients of the output.
            statistics: As :meth:`_row_statistics` returns them, to compute gradients.
        """
        if self.num_splits == 1:
            return initial
        kv, z = (g.new_empty(*g.shape[:2], self.num_splits, *g.shape[2:]) for g in initial)
        width = self.d if self.decay == "vector" else 1
        split_decays = z.new_empty(*z.shape[:3], width)
        reverse = statistics is not None
        inv_denom, delta = z, z
        if statistics is not None:
            inv_denom, delta = statistics["inv_denom"], statistics["delta"]
        launch, blocks = self._config("sums")
        split_sums_kernel[self._grid(blocks)](
            x, y, self.gate, self.segment_ids, self.padding_mask, inv_denom, delta, kv, z,
            split_decays, *x.stride()[:2], *y.stride()[:2], **self.scalars, **self.constants,
            **blocks, **launch, x_token=x.stride(2), y_token=y.stride(2), REVERSE=reverse,
        )  # fmt: skip
        for sums, start, e in ((kv, initial[0], self.e), (z, initial[1], 1)):
            grid = (self.batch * self.key_heads, -(-self.d * e // SPLIT_SCAN_BLOCK))
            split_scan_kernel[grid](
                sums, start, split_decays, self.num_splits,
                D=self.d, E=e, F=width, BLOCK=SPLIT_SCAN_BLOCK, REVERSE=reverse, num_warps=4,
            )  # fmt: skip
        return kv, z

    def _grid(self, blocks: dict[str, Any]) -> tuple[int]:
        return (self.batch * self.key_heads * self.num_splits * blocks["TILES"],)

    def config_shape(self, kernel: str) -> Shape:
        """Return the key of a kernel's config."""
        inner = block_size(self.d if kernel not in ("dq", "dk") else self.e)
        return Shape(kernel, self.decay, self._kind(), inner)

    def _kind(self) -> str:
        """Return the kind of this call, one of ``configs.KINDS``."""
        if self.float32_operands:
            return "wide"
        filled = (self.d, self.e) == (block_size(self.d), block_size(self.e))
        masked = self.constants["PACKED"] or self.constants["PADDED"]
        if masked or not filled:
            return "any"
        return "mapped" if self.normalize or self.constants["MAP"] != "identity" else "bare"

    def _tiles(self, kernel: str) -> dict[str, int]:
        """Return the columns of x, the columns of a tile of u, and the number of tiles."""
        shape = self.config_shape(kernel)
        u = self.e if kernel not in ("dq", "dk") else self.d
        tile = min(config(shape, self.capability).tile, block_size(u))
        return {"BX": shape.size, "BU": tile, "TILES": -(-u // tile)}

    def _config(self, kernel: str) -> tuple[dict[str, int], dict[str, Any]]:
        """Return launch options and block constants."""
        blocks, chosen = self._tiles(kernel), config(self.config_shape(kernel), self.capability)
        blocks["C"] = self.chunk_size or chosen.chunk
        return {"num_warps": chosen.warps, "num_stages": chosen.stages}, blocks


def _scale(x: Tensor, factor: float) -> Tensor:
    """Return ``x * factor``; returns ``x`` itself if the factor is 1."""
    return x if factor == 1 else x * factor


def empty_rows(like: Tensor, heads: int, size: int) -> Tensor:
    """Return an empty tensor ``[B, T, heads, size]``, the layout of the output projection."""
    return like.new_empty(like.shape[0], like.shape[2], heads, size)


def _operand_precision(*inputs: Tensor) -> tuple[bool, str]:
    """Return whether operands are float32, and the input precision of their products.

    bfloat16 inputs stay bfloat16. float16 inputs use tf32, which has as many mantissa bits. float32
    inputs follow ``torch.set_float32_matmul_precision``.
    """
    dtypes = {x.dtype for x in inputs}
    full_precision = torch.float32 in dtypes and torch.get_float32_matmul_precision() == "highest"
    return dtypes != {torch.bfloat16}, "tf32x3" if full_precision else "tf32"


def check_equal_tiles(dq: dict[str, int], dk: dict[str, int]) -> None:
    """Raise ``ConfigError`` unless ``dk`` has the tiles in which ``dq`` wrote its products."""
    if dq != dk:
        raise ConfigError(
            f"the table that {TABLE} names has a tile of {dq['BU']} for dq and of {dk['BU']} for "
            "dk; with scalar decay both must be equal. Correct the table, or unset the variable."
        )


def contiguous_rows(x: Tensor, groups: int = 1) -> Tensor:
    """Return ``x`` with stride 1 in the last dimension; copies if necessary.

    Kernels compute the offset between the ``groups`` query heads of a key head in 32 bits. Where it
    does not fit, the copy is ``[B, T, H, D]`` in memory.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    if (groups - 1) * x.stride(1) < 2**31:
        return x
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def gate_and_strides(
    log_decay: Tensor | None, k: Tensor
) -> tuple[Tensor, str, tuple[int, int, int]]:
    """Return the log decays, their kind, and their strides over batch, key heads and tokens."""
    if log_decay is None:
        return k, "none", (0, 0, 0)
    if log_decay.dim() == 4:
        log_decay = contiguous_rows(log_decay)
        return log_decay, "vector", tuple(log_decay.stride()[:3])  # type: ignore[return-value]
    if log_decay.dim() == 3:
        return log_decay, "scalar", tuple(log_decay.stride())  # type: ignore[return-value]
    return log_decay, "scalar", (0, log_decay.stride(0), 0)


def _next_power_of_2(x: int) -> int:
    return int(triton.next_power_of_2(x))


def block_size(size: int) -> int:
    """Return the block size for ``size`` columns: a power of two, at least 16 for ``tl.dot``."""
    return max(16, _next_power_of_2(size))


def _split_size(programs: int, tokens: int, processors: int) -> int:
    """Return the tokens per split: all of them, unless that leaves processors idle."""
    parts = -(-PROGRAMS_PER_PROCESSOR * processors // max(programs, 1))
    split_size = _next_power_of_2(-(-tokens // parts))
    return max(split_size, MIN_SPLIT_SIZE)


@cache
def device_properties(device: torch.device) -> tuple[int, int]:
    """Return compute capability and number of processors; the interpreter gets those of an H200."""
    if device.type != "cuda":
        return 90, 132
    properties = torch.cuda.get_device_properties(device)
    return 10 * properties.major + properties.minor, properties.multi_processor_count


def device_context(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which ``device`` is the current GPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
