"""Launch the Triton kernels of the delta rule: errors, and linear attention with them as values.

Letters: B batch, H heads, Hkv key heads, G = H / Hkv, T tokens, D key size, E value size.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from attnzoo.ops.delta.triton.errors import errors_kernel, inverse_kernel
from attnzoo.ops.linear.triton.launch import (
    KernelLauncher,
    LinearTensors,
    empty_rows,
    gate_and_strides,
)
from attnzoo.runtime.triton_products import (
    block_size,
    contiguous_rows,
    device_context,
    operand_precision,
)

CHUNK = {"none": 32, "scalar": 32, "vector": 16}  # tokens of a triangular system
STATE_ELEMENTS = 8192  # of a tile of the state, in registers
LAUNCH = {"num_warps": 4, "num_stages": 2}


class DeltaLauncher:
    """Launches the kernels of one call of the delta rule.

    Args:
        k: Keys, ``[B, Hkv, T, D]``.
        v: Values, ``[B, Hkv, T, E]``.
        beta: Write strengths, ``[B, Hkv, T]``.
        log_decay: ``[Hkv]``, ``[B, Hkv, T]`` or ``[B, Hkv, T, D]``, or ``None``.
        state: The state before the first token, ``[B, Hkv, D, E]``, float32.
        segment_ids: ``[B, T]``, or ``None``.
    """

    def __init__(
        self,
        k: Tensor,
        v: Tensor,
        beta: Tensor,
        log_decay: Tensor | None,
        state: Tensor,
        segment_ids: Tensor | None,
    ) -> None:
        self.k, self.v, self.beta = contiguous_rows(k), v, beta
        self.log_decay, self.state, self.segment_ids = log_decay, state.contiguous(), segment_ids
        self.batch, self.key_heads, self.tokens, self.d = k.shape
        self.e = v.shape[3]
        self.gate, decay, strides = gate_and_strides(log_decay, self.k)
        self.chunk = CHUNK[decay]
        self.num_chunks = -(-self.tokens // self.chunk)
        wide, precision = operand_precision(self.k, v)
        self.ids = k.new_empty(1, dtype=torch.int8) if segment_ids is None else segment_ids
        self.ids = self.ids.contiguous()
        self.scalars = {
            **dict(zip(("k_batch", "k_head"), self.k.stride(), strict=False)),
            **dict(zip(("beta_batch", "beta_head"), beta.stride(), strict=False)),
            **dict(zip(("gate_batch", "gate_head"), strides, strict=False)),
            "tokens": self.tokens,
            "num_chunks": self.num_chunks,
        }
        self.constants: dict[str, Any] = {
            "k_token": self.k.stride(2),
            "beta_token": beta.stride(2),
            "gate_token": strides[2],
            "key_heads": self.key_heads,
            "D": self.d,
            "BD": block_size(self.d),
            "C": self.chunk,
            "DECAY": decay,
            "PACKED": segment_ids is not None,
            "OPERAND": tl.float32 if wide else tl.bfloat16,
            "PRECISION": precision,
        }

    def errors(self) -> tuple[Tensor, Tensor]:
        """Return the prediction errors e in float32, and u = beta e in the dtype of v.

        Both are ``[B, Hkv, T, E]``. e is float32 because the gradient of beta is a sum of products
        of e that cancel.
        """
        return self._scan(self.v, reverse=False)

    def transposed_errors(self, d_u: Tensor) -> tuple[Tensor, Tensor]:
        """Return w in float32, and beta w: the solution of the transposed system for u's gradient.

        The dtype of beta w is that of v.
        """
        return self._scan(d_u, reverse=True)

    def _scan(self, x: Tensor, *, reverse: bool) -> tuple[Tensor, Tensor]:
        x = contiguous_rows(x)
        heads = self.batch * self.key_heads
        size = self.num_chunks, self.chunk, self.chunk
        inverse = self.state.new_empty(self.batch, self.key_heads, *size)
        written = empty_rows(self.v, self.key_heads, self.e)
        errors = empty_rows(self.v, self.key_heads, self.e, torch.float32)
        block = block_size(self.e)
        block = min(block, max(16, STATE_ELEMENTS // self.constants["BD"]))
        tiles = -(-self.e // block)
        with device_context(x.device):
            inverse_kernel[(heads * self.num_chunks,)](
                self.k, self.beta, self.gate, self.ids, inverse,
                **self.scalars, **self.constants, **LAUNCH,
            )  # fmt: skip
            errors_kernel[(heads * tiles,)](
                self.k, x, self.beta, self.gate, self.ids, inverse, self.state, errors, written,
                x_batch=x.stride(0), x_head=x.stride(1), x_token=x.stride(2), E=self.e, BE=block,
                TILES=tiles, REVERSE=reverse, **self.scalars, **self.constants, **LAUNCH,
            )  # fmt: skip
        return errors.transpose(1, 2), written.transpose(1, 2)

    def linear(self, q: Tensor, u: Tensor, scale: float, *, decay_grad: bool) -> KernelLauncher:
        """Return the launcher of linear attention with the values u."""
        z = self.state.new_zeros(self.state.shape[:3])
        tensors = (q, self.k, u, self.log_decay, self.state, z, self.segment_ids, None)
        return KernelLauncher(
            LinearTensors(*tensors), "identity", 1.0, scale, False, 0.0, 0, 0, decay_grad
        )

    def backward(
        self,
        d_out: Tensor,
        d_state: Tensor,
        q: Tensor,
        errors: Tensor,
        u: Tensor,
        last: Tensor,
        scale: float,
        needs_decay_grad: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return the gradients of q, k, v, beta, log_decay (empty if not needed) and the state.

        The prediction of a token is linear attention with its key as the query, without the token
        itself. So the keys are one more query head per key head, whose output has the gradient
        ``-d_v``.
        """
        z = self.state.new_zeros(self.state.shape[:3])
        d_u = self.linear(q, u, scale, decay_grad=False).value_gradient(d_out, d_state, z)
        w, d_v = self.transposed_errors(d_u)
        d_beta = (errors * w).sum(3).to(self.beta.dtype)
        groups = q.shape[1] // self.key_heads
        # Division by a small scale can overflow float16; its products have float32 operands anyway
        wide = d_out.float() if d_out.dtype == torch.float16 else d_out
        rows = _with_keys(q, self.k, groups), _with_keys(wide, d_v.float() / -scale, groups)
        linear = self.linear(rows[0], u, scale, decay_grad=needs_decay_grad)
        grads = linear.backward(rows[1], d_state, z, (last, z))
        dq, dk, _, d_log, d_first, _ = grads
        dq = dq.unflatten(1, (self.key_heads, groups + 1))
        own = 2 * (d_v.float() * u.float()).sum(3, keepdim=True) * self.k.float()
        dk = (dk.float() + dq[:, :, -1].float() + own).to(self.k.dtype)
        return dq[:, :, :-1].flatten(1, 2), dk, d_v, d_beta, d_log, d_first


def _with_keys(x: Tensor, of_keys: Tensor, groups: int) -> Tensor:
    """Return ``[B, H, T, W]`` with one more head per key head, ``[B, Hkv (G + 1), T, W]``."""
    x = x.unflatten(1, (-1, groups))
    return torch.cat([x, of_keys.unsqueeze(2).to(x.dtype)], 2).flatten(1, 2)
