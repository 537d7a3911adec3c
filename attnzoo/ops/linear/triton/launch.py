"""Launch the Triton kernels of linear attention: block configs, splits, forward and backward pass.

Other letters: S sequences, F decays per token (1 or D).
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
    """The tensors of a call; without sequences, each row is one, and S is B."""

    q: Tensor  # before the feature map, [B, H, T, D]
    k: Tensor  # before the feature map, [B, Hkv, T, D]
    v: Tensor  # [B, Hkv, T, E]
    log_decay: Tensor | None = None  # [Hkv], [B, Hkv, T] or [B, Hkv, T, D]
    kv: Tensor | None = None  # the state before each sequence, [S, Hkv, D, E], float32; None: zeros
    z: Tensor | None = None  # its sum of keys, [S, Hkv, D], float32; given if kv is
    starts: Tensor | None = None  # first token of each sequence of one row, B = 1: [S] int64
    lengths: Tensor | None = None  # their tokens, [S] int64


class LinearOptions(NamedTuple):
    """The options of a call."""

    feature_map: str = "identity"  # of FIXED in attnzoo.ops.features.functional
    map_scale: float = 1.0  # multiplies the exponents of "exp"
    scale: float = 1.0  # multiplies the features of the queries
    normalize: bool = False  # whether to divide by the sum of weights
    eps: float = 0.0  # added to the sum of weights
    chunk_size: int = 0  # C, in tokens; 0 takes it from the config table
    split_size: int = 0  # tokens per split; 0 derives it from the number of heads and processors
    return_state: bool = True  # if not, states after the sequences are tensors without elements


class KernelLauncher:
    """Launches the kernels of one call of linear attention."""

    def __init__(
        self, tensors: LinearTensors, options: LinearOptions, needs_decay_grad: bool = False
    ) -> None:
        self.q, self.k, self.v = (contiguous_rows(x) for x in tensors[:3])
        self.batch, self.heads, self.tokens, self.d = self.q.shape
        self.key_heads, self.e = self.k.shape[1], self.v.shape[3]
        self.unused = self.q.new_empty(1, dtype=torch.float32)
        kv, z, starts, lengths = tensors[4:]
        self.has_state, self.return_state = kv is not None, options.return_state
        self.state = self.unused, self.unused
        if kv is not None and z is not None:
            self.state = kv.contiguous(), z.contiguous()
        self.is_varlen, self.num_sequences = starts is not None, 1
        self.starts = self.lengths = self.unused
        if starts is not None and lengths is not None:
            self.starts, self.lengths = starts.contiguous(), lengths.contiguous()
            self.num_sequences = len(starts)
        self.chunk_size, self.normalize = options.chunk_size, options.normalize
        self.needs_decay_grad = needs_decay_grad
        # scale n / (scale d + eps) is n / (d + eps / scale); else it multiplies the results
        scale, eps = options.scale, options.eps
        self.scale, self.eps = (1.0, eps / scale) if self.normalize else (scale, eps)
        self.gate, self.decay, gate_strides = gate_and_strides(tensors.log_decay, self.k)
        self.gate_shape = None if tensors.log_decay is None else tensors.log_decay.shape
        self.capability, processors = device_properties(self.q.device)
        self.float32_operands, precision = operand_precision(self.q, self.k, self.v)
        self.constants = {
            "D": self.d,
            "E": self.e,
            "G": self.heads // self.key_heads,
            "MAP": options.feature_map,
            "DECAY": self.decay,
            "NORMALIZE": self.normalize,
            "OPERAND": tl.float32 if self.float32_operands else tl.bfloat16,
            "PRECISION": precision,
            "VARLEN": self.is_varlen,
            "gate_token": gate_strides[2],
            "key_heads": self.key_heads,
        }
        launch, blocks = self._config("out")
        programs = self.batch * self.key_heads * blocks["TILES"]
        slots = processors * max(1, WARPS_PER_PROCESSOR // launch["num_warps"])
        self.split_size = options.split_size or choose_split_size(programs, self.tokens, slots)
        self.num_boundaries = max(self.tokens - 1, 0) // self.split_size
        if self.num_sequences == 0:
            self.num_boundaries = 0
        self.scalars = {
            "gate_batch": gate_strides[0],
            "gate_head": gate_strides[1],
            "tokens": self.tokens,
            "split_size": self.split_size,
            "num_splits": self.num_sequences + self.num_boundaries,
            "num_sequences": self.num_sequences,
            "scale": self.scale,
            "map_scale": options.map_scale,
        }
        self.boundary_sequences = self.unused
        if starts is not None and self.num_boundaries > 0:
            earliest = torch.arange(
                self.split_size, self.tokens, self.split_size, device=self.q.device
            )
            self.boundary_sequences = torch.searchsorted(
                self.starts[1:], earliest, right=True, out_int32=True
            )

    # -- passes ------------------------------------------------------------------------------------

    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output ``[B, H, T, E]``, and the state after each sequence."""
        out = self.new_rows(self.v, self.heads, self.e)
        last = self._forward(out, self.unused)
        return out.transpose(1, 2), *last

    def forward_sums(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return numerator and denominator of the output, and the state after each sequence.

        The weighted sums of values ``[B, T, H, E]`` and the sums of weights ``[B, H, T]``, float32.
        """
        assert not self.normalize
        out = self.new_rows(self.v, self.heads, self.e, torch.float32)
        shape = self.batch, self.heads, self.tokens
        weights = out.new_zeros(shape) if self.is_varlen else out.new_empty(shape)
        return out, weights, *self._forward(out, weights)

    def _forward(self, out: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        last = empty_states(self.q, self.k, self.v, self.count) if self.return_state else None
        with device_context(self.q.device):
            boundaries = self._boundary_states(self.state, self.k, self.v)
            written = last or (self.unused, self.unused)
            tensors = (out, *self.state, *boundaries, *written, weights, self.unused)
            self._launch(out_kernel, "out", tensors, self.v, WEIGHTS=weights is not self.unused)
        return last or (self.unused.new_empty(0), self.unused.new_empty(0))

    def backward(
        self, d_out: Tensor, d_kv: Tensor, d_z: Tensor, last: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return the gradients; ``last`` is the state that the forward pass returned."""
        dq, dk = (self.new_rows(x, x.shape[1], self.d) for x in (self.q, self.k))
        dv = self.new_rows(self.v, self.key_heads, self.e)
        rest = self._backward((dq, dk, dv), d_out, (d_kv, d_z), last, None)
        dq, dk, dv = (x.transpose(1, 2) for x in (dq, dk, dv))
        return dq, dk, dv, *rest

    def value_gradient(self, d_out: Tensor, d_kv: Tensor, d_z: Tensor) -> Tensor:
        """Return the gradient of v alone, ``[B, Hkv, T, E]``, of a call that does not divide."""
        assert not self.normalize
        d_out, unused = contiguous_rows(d_out), self.unused
        dv = self.new_rows(self.v, self.key_heads, self.e)
        d_last = self._scaled_gradient(d_kv, d_z)
        with device_context(self.q.device):
            ends = self._boundary_states(d_last, self.q, d_out, (unused, unused, unused))
            d_first = torch.empty_like(self.state[0])
            tensors = (dv, *d_last, *ends, d_first, *(unused,) * 9)
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
                contiguous. Tokens outside of sequences are not written.
            d_out: Gradient of the sums of values, ``[B, H, T, E]``: that of the output over the
                denominator.
            delta: Negative gradient of the sums of weights, ``[B, H, T]``.
            d_last: Gradient of the state after each sequence.
            last: That state.

        Returns:
            The gradients of ``log_decay`` and of the state before each sequence.
        """
        return self._backward(rows, d_out, d_last, last, (self.unused, delta, self.unused))

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
        first = tuple(torch.empty_like(x) for x in self.state)
        layout = (self._tiles("dq")["TILES"], 1) if self.decay != "vector" else (1, self.d)
        shape = (layout[0], self.batch, self.key_heads, self.tokens, layout[1])
        q_dq = self.unused.new_empty(shape if self.needs_decay_grad else 1)
        d_log = torch.zeros_like(q_dq) if self.is_varlen else torch.empty_like(q_dq)
        d_last = self._scaled_gradient(*d_last)
        with device_context(self.q.device):
            boundaries = self._boundary_states(self.state, self.k, self.v)
            statistics = statistics or self._row_statistics(d_out, boundaries)
            tensors: tuple[Tensor, ...] = (dq, *self.state, *boundaries, *statistics, q_dq)
            self._launch(query_gradient_kernel, "dq", tensors, d_out, DIVIDE=divide)
            ends = self._boundary_states(d_last, self.q, d_out, statistics, divide)
            rest = *last, *boundaries, *statistics, q_dq, d_log
            for of, d_rows, d_state in (("keys", dk, first[1]), ("values", dv, first[0])):
                tensors = (d_rows, *d_last, *ends, d_state, *rest)
                name = "d" + of[0]
                self._launch(key_gradient_kernel, name, tensors, d_out, OF=of, DIVIDE=divide)
        d_kv, d_z = (_scale(x, self.scale) if self.has_state else x.new_empty(0) for x in first)
        return self._reduce_log_decay_grad(d_log), d_kv, d_z

    def _scaled_gradient(self, d_kv: Tensor, d_z: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradient of the state after each sequence, divided by the scale."""
        if not self.return_state:
            return self.unused, self.unused
        return _scale(d_kv, 1 / self.scale).contiguous(), _scale(d_z, 1 / self.scale).contiguous()

    def _row_statistics(
        self, d_out: Tensor, boundaries: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``inv_denom``, ``delta`` and ``row_maxima``; placeholders if they are not read."""
        exp, unused = self.constants["MAP"] == "exp", self.unused
        if not (self.normalize or exp):
            return unused, unused, unused
        inv_denom = unused.new_empty(self.batch, self.heads, self.tokens)
        row_maxima = unused.new_empty((2, *inv_denom.shape) if exp else 1)
        parts = unused.new_empty(self._tiles("shared")["TILES"], *inv_denom.shape)
        tensors = (parts, *self.state, *boundaries, unused, unused, inv_denom, row_maxima)
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

    @property
    def count(self) -> int:
        """The number of states, one per sequence."""
        return self.num_sequences if self.is_varlen else self.batch

    def new_rows(
        self, like: Tensor, heads: int, size: int, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return :func:`empty_rows`, with zeros if there may be tokens outside of sequences."""
        rows = empty_rows(like, heads, size, dtype)
        return rows.zero_() if self.is_varlen else rows

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
        constants["HAS_STATE"] = self.has_state
        if kernel is out_kernel:
            constants["STATISTICS"] = name == "shared"
            constants["RETURN_STATE"] = self.return_state and name == "out"
        else:
            constants["DECAY_GRAD"] = self.needs_decay_grad
            constants["result_batch"] = tensors[0].stride(0)
        if kernel is key_gradient_kernel:
            constants["RETURN_STATE"] = self.return_state
        else:
            constants["eps"] = self.eps
        rows = {"q": self.q, "k": self.k, "v": self.v, "o": d_out}
        strides = [s for x in rows.values() for s in x.stride()[:2]]
        constants |= {f"{key}_token": x.stride(2) for key, x in rows.items()}
        kernel[self._grid(blocks)](
            self.q, self.k, self.v, d_out, tensors[0], self.gate, self.starts, self.lengths,
            self.boundary_sequences, *tensors[1:], *strides,
            **self.scalars, **self.constants, **blocks, **launch, **constants,
        )  # fmt: skip

    def _boundary_states(
        self,
        given: tuple[Tensor, Tensor],
        x: Tensor,
        y: Tensor,
        statistics: tuple[Tensor, Tensor, Tensor] | None = None,
        divide: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Return the state between the splits of sequences, or its gradient.

        Args:
            given: The state before each sequence, or its gradient after it.
            x: Keys, or queries.
            y: Values, or gradients of the output.
            statistics: As :meth:`_row_statistics` returns them, to compute gradients.
            divide: Whether gradients of the output must still be divided by the denominator.
        """
        if self.num_boundaries == 0:
            return self.unused, self.unused
        shape = self.batch, self.key_heads, self.num_boundaries, self.d
        kv, z = self.unused.new_empty(*shape, self.e), self.unused.new_empty(shape)
        width = self.d if self.decay == "vector" else 1
        split_decays = z.new_empty(*shape[:3], width)
        reverse = statistics is not None
        inv_denom, delta = z, z
        if statistics is not None:
            inv_denom, delta, _ = statistics
        launch, blocks = self._config("sums")
        table = self.starts, self.lengths, self.boundary_sequences
        heads = self.batch * self.key_heads
        split_sums_kernel[(heads * self.num_boundaries * blocks["TILES"],)](
            x, y, self.gate, *table, inv_denom, delta, kv, z, split_decays, *x.stride()[:2],
            *y.stride()[:2], **self.scalars, **self.constants, **blocks, **launch,
            x_token=x.stride(2), y_token=y.stride(2), REVERSE=reverse,
            DECAY_GRAD=self.needs_decay_grad, DIVIDE=divide,
        )  # fmt: skip
        blocks_of = [-(-self.d * e // SPLIT_SCAN_BLOCK) for e in (self.e, 1)]
        scans = heads * self.num_boundaries if self.is_varlen else heads
        names = ("tokens", "split_size", "num_splits", "num_sequences")
        split_scan_kernel[(scans, sum(blocks_of))](
            kv, given[0], z, given[1], split_decays, *table,
            **{name: self.scalars[name] for name in names}, key_heads=self.key_heads,
            D=self.d, E=self.e, F=width, BLOCK=SPLIT_SCAN_BLOCK, REVERSE=reverse,
            VARLEN=self.is_varlen, IS_GIVEN=self.return_state if reverse else self.has_state,
            num_warps=4,
        )  # fmt: skip
        return kv, z

    def _grid(self, blocks: dict[str, Any]) -> tuple[int]:
        num_splits = self.num_sequences + self.num_boundaries
        return (self.batch * self.key_heads * num_splits * blocks["TILES"],)

    def config_shape(self, kernel: str) -> Shape:
        """Return the key of a kernel's config."""
        inner = block_size(self.d if kernel not in ("dq", "dk") else self.e)
        return Shape(kernel, self.decay, self._kind(), inner)

    def _kind(self) -> str:
        """Return the kind of this call, one of ``configs.KINDS``."""
        if self.float32_operands:
            return "wide"
        filled = (self.d, self.e) == (block_size(self.d), block_size(self.e))
        if not filled:
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


def empty_states(q: Tensor, k: Tensor, v: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return empty sums of ``count`` states, ``[count, Hkv, D, E]`` and ``[count, Hkv, D]``."""
    z = q.new_empty(count, k.shape[1], q.shape[3], dtype=torch.float32)
    return z.new_empty(*z.shape, v.shape[3]), z


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
