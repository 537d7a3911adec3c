"""Launch the Triton kernels of linear attention: tiles, forward and backward pass.

Other letters: S sequences, F decays per token (1 or D).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from attnzoo.ops.linear.triton.configs import tile_columns
from attnzoo.ops.linear.triton.key_gradient import key_gradient_kernel
from attnzoo.ops.linear.triton.out import out_kernel
from attnzoo.ops.linear.triton.query_gradient import query_gradient_kernel
from attnzoo.runtime.triton_products import (
    block_size,
    contiguous_rows,
    device_context,
    operand_precision,
)


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
        self.normalize, self.needs_decay_grad = options.normalize, needs_decay_grad
        # scale n / (scale d + eps) is n / (d + eps / scale); else it multiplies the results
        scale, eps = options.scale, options.eps
        self.scale, self.eps = (1.0, eps / scale) if self.normalize else (scale, eps)
        self.gate, self.decay, gate_strides = gate_and_strides(tensors.log_decay, self.k)
        self.gate_shape = None if tensors.log_decay is None else tensors.log_decay.shape
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
        self.scalars = {
            "gate_batch": gate_strides[0],
            "gate_head": gate_strides[1],
            "tokens": self.tokens,
            "num_sequences": self.num_sequences,
            "scale": self.scale,
            "map_scale": options.map_scale,
        }

    # -- passes ------------------------------------------------------------------------------------

    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output ``[B, H, T, E]``, and the state after each sequence."""
        out = self.new_rows(self.v, self.heads, self.e)
        last = empty_states(self.q, self.k, self.v, self.count) if self.return_state else None
        with device_context(self.q.device):
            written = last or (self.unused, self.unused)
            tensors = (out, *self.state, *written, self.unused, self.unused)
            options = {"STATISTICS": False, "RETURN_STATE": self.return_state}
            self._launch(out_kernel, tensors, self.v, **options)
        return out.transpose(1, 2), *(last or (self.unused.new_empty(0), self.unused.new_empty(0)))

    def backward(
        self, d_out: Tensor, d_kv: Tensor, d_z: Tensor, last: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return the gradients; ``last`` is the state that the forward pass returned."""
        d_out, divide = contiguous_rows(d_out), self.normalize
        dq, dk = (self.new_rows(x, x.shape[1], self.d) for x in (self.q, self.k))
        dv = self.new_rows(self.v, self.key_heads, self.e)
        first = tuple(torch.empty_like(x) for x in self.state)
        tiles = self._tiles(of_keys=True)["TILES"]
        layout = (tiles, 1) if self.decay != "vector" else (1, self.d)
        shape = (layout[0], self.batch, self.key_heads, self.tokens, layout[1])
        q_dq = self.unused.new_empty(shape if self.needs_decay_grad else 1)
        d_log = torch.zeros_like(q_dq) if self.is_varlen else torch.empty_like(q_dq)
        d_last = self._scaled_gradient(d_kv, d_z)
        with device_context(self.q.device):
            statistics = self._row_statistics(d_out)
            tensors: tuple[Tensor, ...] = (dq, *self.state, *statistics, q_dq)
            self._launch(query_gradient_kernel, tensors, d_out, of_keys=True, DIVIDE=divide)
            rest = *last, *statistics, q_dq, d_log
            for of, d_rows, d_state in (("keys", dk, first[1]), ("values", dv, first[0])):
                self._launch(
                    key_gradient_kernel, (d_rows, *d_last, d_state, *rest), d_out,
                    of_keys=of == "keys", OF=of, DIVIDE=divide, RETURN_STATE=self.return_state,
                )  # fmt: skip
        d_kv, d_z = (_scale(x, self.scale) if self.has_state else x.new_empty(0) for x in first)
        dq, dk, dv = (x.transpose(1, 2) for x in (dq, dk, dv))
        return dq, dk, dv, self._reduce_log_decay_grad(d_log), d_kv, d_z

    def _scaled_gradient(self, d_kv: Tensor, d_z: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradient of the state after each sequence, divided by the scale."""
        if not self.return_state:
            return self.unused, self.unused
        return _scale(d_kv, 1 / self.scale).contiguous(), _scale(d_z, 1 / self.scale).contiguous()

    def _row_statistics(self, d_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``inv_denom``, ``delta`` and ``row_maxima``; placeholders if they are not read."""
        exp, unused = self.constants["MAP"] == "exp", self.unused
        if not (self.normalize or exp):
            return unused, unused, unused
        inv_denom = unused.new_empty(self.batch, self.heads, self.tokens)
        row_maxima = unused.new_empty((2, *inv_denom.shape) if exp else 1)
        parts = unused.new_empty(self._tiles()["TILES"], *inv_denom.shape)
        tensors = (parts, *self.state, unused, unused, inv_denom, row_maxima)
        options = {"STATISTICS": True, "RETURN_STATE": False}
        self._launch(out_kernel, tensors, d_out, **options)
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

    def new_rows(self, like: Tensor, heads: int, size: int) -> Tensor:
        """Return :func:`empty_rows`, with zeros if there may be tokens outside of sequences."""
        rows = empty_rows(like, heads, size)
        return rows.zero_() if self.is_varlen else rows

    # -- launches ----------------------------------------------------------------------------------

    def _launch(
        self,
        kernel: Any,
        tensors: tuple[Tensor, ...],
        d_out: Tensor,
        *,
        of_keys: bool = False,
        **constants: Any,
    ) -> None:
        """Launch a kernel.

        Args:
            kernel: The kernel.
            tensors: Its result, and its arguments from the states on.
            d_out: Gradient of the output; any tensor if the kernel does not read it.
            of_keys: As in :meth:`_tiles`.
            constants: Constants that the launcher does not have.
        """
        constants["HAS_STATE"] = self.has_state
        if kernel is not out_kernel:
            constants["DECAY_GRAD"] = self.needs_decay_grad
            constants["result_batch"] = tensors[0].stride(0)
        if kernel is not key_gradient_kernel:
            constants["eps"] = self.eps
        rows = {"q": self.q, "k": self.k, "v": self.v, "o": d_out}
        strides = [s for x in rows.values() for s in x.stride()[:2]]
        constants |= {f"{key}_token": x.stride(2) for key, x in rows.items()}
        tiles = self._tiles(of_keys=of_keys)
        programs = self.batch * self.key_heads * self.num_sequences * tiles["TILES"]
        kernel[(programs,)](
            self.q, self.k, self.v, d_out, tensors[0], self.gate, self.starts, self.lengths,
            *tensors[1:], *strides, **self.scalars, **self.constants, **tiles, **constants,
        )  # fmt: skip

    def _tiles(self, *, of_keys: bool = False) -> dict[str, int]:
        """Return the columns of x, the columns of a tile of u, and the number of tiles.

        x are queries or keys, and u are values; with ``of_keys``, u are queries or keys.
        """
        x, u = (self.e, self.d) if of_keys else (self.d, self.e)
        tile = tile_columns(block_size(x), u, wide=self.float32_operands)
        return {"BX": block_size(x), "BU": tile, "TILES": -(-u // tile)}


def _scale(x: Tensor, factor: float) -> Tensor:
    """Return ``x * factor``; returns ``x`` itself if the factor is 1."""
    return x if factor == 1 else x * factor


def empty_rows(like: Tensor, heads: int, size: int) -> Tensor:
    """Return an empty tensor ``[B, T, heads, size]``, the layout of the output projection."""
    return like.new_empty(like.shape[0], like.shape[2], heads, size)


def empty_states(q: Tensor, k: Tensor, v: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return empty sums of ``count`` states, ``[count, Hkv, D, E]`` and ``[count, Hkv, D]``."""
    z = q.new_empty(count, k.shape[1], q.shape[3], dtype=torch.float32)
    return z.new_empty(*z.shape, v.shape[3]), z


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
