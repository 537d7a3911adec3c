"""Launch the Triton kernels of linear attention: block configs, splits, forward and backward pass.

Letters: B batch, H heads, Hkv key heads, T tokens, D key size, E value size, F decays per token
(1 or D).
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from attnzoo.errors import ConfigError
from attnzoo.ops.linear.triton.configs import TABLE, Shape, config
from attnzoo.ops.linear.triton.key_gradient import key_gradient_kernel
from attnzoo.ops.linear.triton.out import out_kernel
from attnzoo.ops.linear.triton.query_gradient import query_gradient_kernel
from attnzoo.ops.linear.triton.splits import split_scan_kernel, split_sums_kernel
from attnzoo.runtime.triton_products import (
    block_size,
    contiguous_rows,
    device_context,
    operand_precision,
)

MIN_SPLIT_SIZE = 512  # tokens; in shorter splits, the states cost more than parallelism gains
SPLIT_MULTIPLE = 64  # tokens, a multiple of every chunk
SPLIT_COST = 1.5  # relative time of a call with splits, which reads keys and values twice
STATE_COST = 128  # time for one state per split, in tokens
WARPS_PER_PROCESSOR = 8  # with 255 registers each
SPLIT_SCAN_BLOCK = 1024  # elements of a state per program of split_scan_kernel


class LinearTensors(NamedTuple):
    """The tensor arguments of :func:`attnzoo.ops.linear.triton.custom_op.linear_triton`."""

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
        self.q, self.k, self.v = (contiguous_rows(x) for x in tensors[:3])
        self.kv, self.z = tensors.kv.contiguous(), tensors.z.contiguous()
        self.batch, self.heads, self.tokens, self.d = self.q.shape
        self.key_heads, self.e = self.k.shape[1], self.v.shape[3]
        self.chunk_size, self.normalize = chunk_size, normalize
        self.needs_decay_grad = needs_decay_grad
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
        self.float32_operands, precision = operand_precision(self.q, self.k, self.v)
        self.constants = {
            "D": self.d,
            "E": self.e,
            "G": self.heads // self.key_heads,
            "MAP": feature_map,
            "DECAY": self.decay,
            "NORMALIZE": normalize,
            "PACKED": segment_ids is not None,
            "PADDED": padding_mask is not None,
            "OPERAND": tl.float32 if self.float32_operands else tl.bfloat16,
            "PRECISION": precision,
            "gate_token": gate_strides[2],
            "key_heads": self.key_heads,
        }
        launch, blocks = self._config("out")
        programs = self.batch * self.key_heads * blocks["TILES"]
        slots = processors * max(1, WARPS_PER_PROCESSOR // launch["num_warps"])
        self.split_size = split_size or choose_split_size(programs, self.tokens, slots)
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
        last = self._forward(out, self.z)
        return out.transpose(1, 2), *last

    def forward_sums(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return numerator and denominator of the output, and the state after the last token.

        The weighted sums of values ``[B, T, H, E]`` and the sums of weights ``[B, H, T]``, float32.
        """
        assert not self.normalize
        out = empty_rows(self.v, self.heads, self.e, torch.float32)
        weights = out.new_empty(self.batch, self.heads, self.tokens)
        return out, weights, *self._forward(out, weights)

    def _forward(self, out: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        last = torch.empty_like(self.kv), torch.empty_like(self.z)
        with device_context(self.q.device):
            starts = self._split_states((self.kv, self.z), self.k, self.v)
            tensors = (out, *starts, *last, weights, self.z)
            self._launch(out_kernel, "out", tensors, self.v, WEIGHTS=weights is not self.z)
        return last

    def backward(
        self, d_out: Tensor, d_kv: Tensor, d_z: Tensor, last: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return the gradients; ``last`` is the state that the forward pass returned."""
        dq, dk = empty_rows(self.q, self.heads, self.d), empty_rows(self.k, self.key_heads, self.d)
        dv = empty_rows(self.v, self.key_heads, self.e)
        rest = self._backward((dq, dk, dv), d_out, (d_kv, d_z), last, None)
        dq, dk, dv = (x.transpose(1, 2) for x in (dq, dk, dv))
        return dq, dk, dv, *rest

    def value_gradient(self, d_out: Tensor, d_kv: Tensor, d_z: Tensor) -> Tensor:
        """Return the gradient of v alone, ``[B, Hkv, T, E]``, of a call that does not divide."""
        assert not self.normalize
        d_out, z = contiguous_rows(d_out), self.z
        dv = empty_rows(self.v, self.key_heads, self.e)
        scaled = tuple(_scale(x, 1 / self.scale).contiguous() for x in (d_kv, d_z))
        with device_context(self.q.device):
            ends = self._split_states((scaled[0], scaled[1]), self.q, d_out, (z, z, z))
            tensors = (dv, *ends, torch.empty_like(self.kv), self.kv, *(z,) * 6)
            self._launch(key_gradient_kernel, "dv", tensors, d_out, OF="values", DIVIDE=False)
        return dv.transpose(1, 2)

    def backward_sums(
        self,
        rows: tuple[Tensor, Tensor, Tensor],
        d_out: Tensor,
        delta: Tensor,
        d_last: tuple[Tensor, Tensor],
        last: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the gradients of :meth:`forward_sums`; the launcher has ``normalize=True``.

        Args:
            rows: Receives the gradients of q, k and v, ``[B, T, heads, size]``; heads and sizes are
                contiguous.
            d_out: Gradient of the sums of values, ``[B, H, T, E]``: that of the output over the
                denominator.
            delta: Negative gradient of the sums of weights, ``[B, H, T]``.
            d_last: Gradient of the state after the last token.
            last: That state.

        Returns:
            The gradients of ``log_decay`` and of the state before the first token.
        """
        return self._backward(rows, d_out, d_last, last, (self.z, delta, self.z))

    def _backward(
        self,
        rows: tuple[Tensor, Tensor, Tensor],
        d_out: Tensor,
        d_last: tuple[Tensor, Tensor],
        last: tuple[Tensor, Tensor],
        statistics: tuple[Tensor, Tensor, Tensor] | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Write the gradients of q, k and v into ``rows``, and return the others.

        ``statistics`` are what :meth:`_row_statistics` returns, if ``d_out`` is already divided.
        """
        d_out, divide = contiguous_rows(d_out), self.normalize and statistics is None
        if self.decay == "scalar":
            check_equal_tiles(self._tiles("dq"), self._tiles("dk"))
        dq, dk, dv = rows
        first = torch.empty_like(self.kv), torch.empty_like(self.z)
        layout = (self._tiles("dq")["TILES"], 1) if self.decay != "vector" else (1, self.d)
        shape = (layout[0], self.batch, self.key_heads, self.tokens, layout[1])
        q_dq = self.z.new_empty(shape if self.needs_decay_grad else 1)
        with device_context(self.q.device):
            starts = self._split_states((self.kv, self.z), self.k, self.v)
            statistics = statistics or self._row_statistics(d_out, starts)
            tensors: tuple[Tensor, ...] = (dq, *starts, *statistics, q_dq)
            self._launch(query_gradient_kernel, "dq", tensors, d_out, DIVIDE=divide)
            scaled = tuple(_scale(x, 1 / self.scale).contiguous() for x in d_last)
            ends = self._split_states((scaled[0], scaled[1]), self.q, d_out, statistics, divide)
            end_states = last
            if self.needs_decay_grad and self.num_splits > 1:
                end_states = tuple(
                    torch.cat([start[:, :, 1:], end.unsqueeze(2)], 2)
                    for start, end in zip(starts, last, strict=True)
                )
            d_log = torch.empty_like(q_dq)
            rest = *end_states, *statistics, q_dq, d_log
            for of, d_rows, d_state in (("keys", dk, first[1]), ("values", dv, first[0])):
                tensors = (d_rows, *ends, d_state, *rest)
                name = "d" + of[0]
                self._launch(key_gradient_kernel, name, tensors, d_out, OF=of, DIVIDE=divide)
        d_kv, d_z = (_scale(x, self.scale) for x in first)
        return self._reduce_log_decay_grad(d_log), d_kv, d_z

    def _row_statistics(
        self, d_out: Tensor, starts: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``inv_denom``, ``delta`` and ``row_maxima``; placeholders if they are not read."""
        exp = self.constants["MAP"] == "exp"
        if not (self.normalize or exp):
            return self.z, self.z, self.z
        inv_denom = self.z.new_empty(self.batch, self.heads, self.tokens)
        row_maxima = self.z.new_empty((2, *inv_denom.shape) if exp else 1)
        parts = self.z.new_empty(self._tiles("shared")["TILES"], *inv_denom.shape)
        tensors = (parts, *starts, self.kv, self.z, inv_denom, row_maxima)
        self._launch(out_kernel, "shared", tensors, d_out, WEIGHTS=False)
        return inv_denom, parts.sum(0), row_maxima

    def _reduce_log_decay_grad(self, d_log: Tensor) -> Tensor:
        """Return the gradient of ``log_decay`` in its own shape and dtype."""
        if not self.needs_decay_grad:
            return self.q.new_empty(0)
        assert self.gate_shape is not None
        d_log = d_log.sum(0) if len(d_log) > 1 else d_log[0]
        if len(self.gate_shape) == 1:
            d_log = d_log.sum((0, 2, 3))
        return d_log.reshape(self.gate_shape).to(self.gate.dtype)

    # -- launches ----------------------------------------------------------------------------------

    def _launch(
        self, kernel: Any, name: str, tensors: tuple[Tensor, ...], d_out: Tensor, **constants: Any
    ) -> None:
        """Launch a kernel with its config and constants.

        Args:
            kernel: The kernel.
            name: Its name in the config table.
            tensors: Its result, and its arguments from the states on.
            d_out: Gradient of the output; any tensor if the kernel does not read it.
            constants: Constants that the launcher does not have.
        """
        launch, blocks = self._config(name)
        if kernel is out_kernel:
            constants["STATISTICS"] = name == "shared"
        else:
            constants["DECAY_GRAD"] = self.needs_decay_grad
            constants["result_batch"] = tensors[0].stride(0)
        if kernel is not key_gradient_kernel:
            constants["eps"] = self.eps
        rows = {"q": self.q, "k": self.k, "v": self.v, "o": d_out}
        strides = [s for x in rows.values() for s in x.stride()[:2]]
        constants |= {f"{key}_token": x.stride(2) for key, x in rows.items()}
        kernel[self._grid(blocks)](
            self.q, self.k, self.v, d_out, tensors[0], self.gate, self.segment_ids,
            self.padding_mask, *tensors[1:], *strides,
            **self.scalars, **self.constants, **blocks, **launch, **constants,
        )  # fmt: skip

    def _split_states(
        self,
        initial: tuple[Tensor, Tensor],
        x: Tensor,
        y: Tensor,
        statistics: tuple[Tensor, Tensor, Tensor] | None = None,
        divide: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Return the state at the start of each split, or its gradient at the end.

        Args:
            initial: The state before the first token, or its gradient after the last one.
            x: Keys, or queries.
            y: Values, or gradients of the output.
            statistics: As :meth:`_row_statistics` returns them, to compute gradients.
            divide: Whether gradients of the output must still be divided by the denominator.
        """
        if self.num_splits == 1:
            return initial
        kv, z = (g.new_empty(*g.shape[:2], self.num_splits, *g.shape[2:]) for g in initial)
        width = self.d if self.decay == "vector" else 1
        split_decays = z.new_empty(*z.shape[:3], width)
        reverse = statistics is not None
        inv_denom, delta = z, z
        if statistics is not None:
            inv_denom, delta, _ = statistics
        launch, blocks = self._config("sums")
        split_sums_kernel[self._grid(blocks)](
            x, y, self.gate, self.segment_ids, self.padding_mask, inv_denom, delta, kv, z,
            split_decays, *x.stride()[:2], *y.stride()[:2], **self.scalars, **self.constants,
            **blocks, **launch, x_token=x.stride(2), y_token=y.stride(2), REVERSE=reverse,
            DECAY_GRAD=self.needs_decay_grad, DIVIDE=divide,
        )  # fmt: skip
        blocks_of = [-(-self.d * e // SPLIT_SCAN_BLOCK) for e in (self.e, 1)]
        split_scan_kernel[(self.batch * self.key_heads, sum(blocks_of))](
            kv, initial[0], z, initial[1], split_decays, self.num_splits,
            D=self.d, E=self.e, F=width, BLOCK=SPLIT_SCAN_BLOCK, REVERSE=reverse, num_warps=4,
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


def empty_rows(like: Tensor, heads: int, size: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return an empty tensor ``[B, T, heads, size]``, the layout of the output projection."""
    return like.new_empty(like.shape[0], like.shape[2], heads, size, dtype=dtype)


def check_equal_tiles(dq: dict[str, int], dk: dict[str, int]) -> None:
    """Raise ``ConfigError`` unless ``dk`` has the tiles in which ``dq`` wrote its products."""
    if dq != dk:
        raise ConfigError(
            f"the table that {TABLE} names has a tile of {dq['BU']} for dq and of {dk['BU']} for "
            "dk; with scalar decay both must be equal. Correct the table, or unset the variable."
        )


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


@lru_cache(maxsize=1024)
def choose_split_size(programs: int, tokens: int, slots: int) -> int:
    """Return the number of tokens per split that minimises the estimated time.

    The time is the number of rounds in which the programs of all splits run, times the tokens of a
    split; splits also read keys and values twice. Of equally fast sizes, the largest is returned.

    Args:
        programs: Programs per split.
        tokens: T.
        slots: Programs that run at the same time.
    """
    best = tokens * -(-programs // slots), max(tokens, 1)
    for splits in range(2, tokens // MIN_SPLIT_SIZE + 1):
        size = SPLIT_MULTIPLE * -(-tokens // (splits * SPLIT_MULTIPLE))
        rounds = -(-programs * -(-tokens // size) // slots)
        cost = SPLIT_COST * rounds * (size + STATE_COST)
        best = min(best, (cost, size), key=lambda x: (x[0], -x[1]))
    return -(-best[1] // SPLIT_MULTIPLE) * SPLIT_MULTIPLE


@cache
def device_properties(device: torch.device) -> tuple[int, int]:
    """Return compute capability and number of processors; the interpreter gets those of an H200."""
    if device.type != "cuda":
        return 90, 132
    properties = torch.cuda.get_device_properties(device)
    return 10 * properties.major + properties.minor, properties.multi_processor_count
