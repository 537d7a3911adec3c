"""The delta rule on a GPU as custom operators of torch, with fake tensors and autograd.

They launch the kernels of the errors, and linear attention with the errors as values.

``torch.compile`` traces the operators without graph breaks. Launches do not synchronise with the
device, so CUDA graphs can capture them.

Other letters: S sequences (B if rows are sequences).
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from attnzoo.contract.sequences import Sequences
from attnzoo.ops.delta.triton.errors import errors_kernel, inverse_kernel
from attnzoo.ops.linear.triton.launch import (
    KernelLauncher,
    LinearOptions,
    LinearTensors,
    empty_rows,
    gate_and_strides,
)
from attnzoo.runtime.kernel_calls import refuse_derivative
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
        state: The state before the first token, ``[S, Hkv, D, E]``, float32; ``None`` means zeros.
        starts: First token of each sequence of one row, ``[S]`` int64; ``None``: rows are these.
        lengths: Tokens of each, ``[S]`` int64.
    """

    def __init__(
        self,
        k: Tensor,
        v: Tensor,
        beta: Tensor,
        log_decay: Tensor | None,
        state: Tensor | None,
        starts: Tensor | None,
        lengths: Tensor | None,
    ) -> None:
        self.k, self.v, self.beta = contiguous_rows(k), v, beta
        self.log_decay, self.state = log_decay, None if state is None else state.contiguous()
        self.starts, self.lengths = starts, lengths
        self.batch, self.key_heads, self.tokens, self.d = k.shape
        self.e = v.shape[3]
        self.gate, decay, strides = gate_and_strides(log_decay, self.k)
        self.chunk = CHUNK[decay]
        self.count = self.batch if starts is None else starts.shape[0]
        num_sequences = 1 if starts is None else starts.shape[0]  # in a row
        self.num_chunks = num_sequences + (self.tokens - 1) // self.chunk
        self.unused = k.new_empty(1, dtype=torch.float32)
        wide, precision = operand_precision(self.k, v)
        self.scalars = {
            **dict(zip(("k_batch", "k_head"), self.k.stride(), strict=False)),
            **dict(zip(("beta_batch", "beta_head"), beta.stride(), strict=False)),
            **dict(zip(("gate_batch", "gate_head"), strides, strict=False)),
            "tokens": self.tokens,
        }
        self.chunk_scalars = {"num_chunks": self.num_chunks, "num_sequences": num_sequences}
        self.bounds, self.boundary_sequences = (self.unused, self.unused), self.unused
        if starts is not None and lengths is not None:
            self.bounds = starts.contiguous(), lengths.contiguous()
            end = max(self.tokens, self.chunk)
            earliest = torch.arange(self.chunk, end, self.chunk, device=k.device)
            self.boundary_sequences = torch.searchsorted(
                self.bounds[0][1:], earliest, right=True, out_int32=True
            )
        self.constants: dict[str, Any] = {
            "k_token": self.k.stride(2),
            "beta_token": beta.stride(2),
            "gate_token": strides[2],
            "key_heads": self.key_heads,
            "D": self.d,
            "BD": block_size(self.d),
            "C": self.chunk,
            "DECAY": decay,
            "VARLEN": starts is not None,
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
        rows = self.tokens if self.starts is not None else self.num_chunks * self.chunk
        inverse = self.unused.new_empty(self.batch, self.key_heads, rows, self.chunk)
        written = empty_rows(self.v, self.key_heads, self.e)
        errors = empty_rows(self.v, self.key_heads, self.e, torch.float32)
        if self.starts is not None:  # there may be tokens outside of sequences
            written.zero_(), errors.zero_()
        state = self.unused if self.state is None else self.state
        block = block_size(self.e)
        block = min(block, max(16, STATE_ELEMENTS // self.constants["BD"]))
        tiles = -(-self.e // block)
        with device_context(x.device):
            inverse_kernel[(self.batch * self.key_heads * self.num_chunks,)](
                self.k, self.beta, self.gate, *self.bounds, self.boundary_sequences, inverse,
                **self.scalars, **self.chunk_scalars, **self.constants, **LAUNCH,
            )  # fmt: skip
            errors_kernel[(self.count * self.key_heads * tiles,)](
                self.k, x, self.beta, self.gate, *self.bounds, inverse, state, errors, written,
                x_batch=x.stride(0), x_head=x.stride(1), x_token=x.stride(2), E=self.e, BE=block,
                TILES=tiles, REVERSE=reverse, HAS_STATE=self.state is not None, **self.scalars,
                **self.constants, **LAUNCH,
            )  # fmt: skip
        return errors.transpose(1, 2), written.transpose(1, 2)

    def linear(
        self, q: Tensor, u: Tensor, scale: float, *, return_state: bool, decay_grad: bool
    ) -> KernelLauncher:
        """Return the launcher of linear attention with the values u."""
        state = (None, None) if self.state is None else (self.state, self.zeros())
        return KernelLauncher(
            LinearTensors(q, self.k, u, self.log_decay, *state, self.starts, self.lengths),
            LinearOptions(scale=scale, return_state=return_state),
            decay_grad,
        )

    def zeros(self) -> Tensor:
        """Return zeros like the sum of keys of linear attention, ``[S, Hkv, D]``."""
        return self.unused.new_zeros(self.count, self.key_heads, self.d)

    def backward(
        self,
        d_out: Tensor,
        d_state: Tensor,
        q: Tensor,
        errors: Tensor,
        u: Tensor,
        last: Tensor,
        scale: float,
        return_state: bool,
        needs_decay_grad: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return the gradients of q, k, v, beta, log_decay (empty if not needed) and the state.

        Without ``return_state``, the last state and its gradient are not read.

        The prediction of a token is linear attention with its key as the query, without the token
        itself. So the keys are one more query head per key head, whose output has the gradient
        ``-d_v``.
        """
        z = self.zeros()
        linear = self.linear(q, u, scale, return_state=return_state, decay_grad=False)
        d_u = linear.value_gradient(d_out, d_state, z)
        w, d_v = self.transposed_errors(d_u)
        d_beta = (errors * w).sum(3).to(self.beta.dtype)
        groups = q.shape[1] // self.key_heads
        # Division by a small scale can overflow float16; its products have float32 operands anyway
        wide = d_out.float() if d_out.dtype == torch.float16 else d_out
        rows = _with_keys(q, self.k, groups), _with_keys(wide, d_v.float() / -scale, groups)
        linear = self.linear(
            rows[0], u, scale, return_state=return_state, decay_grad=needs_decay_grad
        )
        grads = linear.backward(rows[1], d_state, z, (last, z))
        dq, dk, _, d_log, d_first, _ = grads
        dq = dq.unflatten(1, (self.key_heads, groups + 1))
        k = self.k.float()
        if self.starts is not None and self.lengths is not None:
            place = Sequences(self.starts, self.lengths, self.tokens).index(self.tokens)
            k = torch.where((place < self.count)[:, None], k, 0)
        own = 2 * (d_v.float() * u.float()).sum(3, keepdim=True) * k
        dk = (dk.float() + dq[:, :, -1].float() + own).to(self.k.dtype)
        return dq[:, :, :-1].flatten(1, 2), dk, d_v, d_beta, d_log, d_first


def _with_keys(x: Tensor, of_keys: Tensor, groups: int) -> Tensor:
    """Return ``[B, H, T, W]`` with one more head per key head, ``[B, Hkv (G + 1), T, W]``."""
    x = x.unflatten(1, (-1, groups))
    return torch.cat([x, of_keys.unsqueeze(2).to(x.dtype)], 2).flatten(1, 2)


@torch.library.custom_op("attnzoo::delta_triton", mutates_args=())
def delta_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    state: Tensor | None,
    starts: Tensor | None,
    lengths: Tensor | None,
    scale: float,
    return_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the output ``[B, H, T, E]``, the last state, the errors e (float32) and u = beta e.

    Args:
        q: Queries, ``[B, H, T, D]``.
        k: Keys, ``[B, Hkv, T, D]``.
        v: Values, ``[B, Hkv, T, E]``.
        beta: Write strengths, ``[B, Hkv, T]``.
        log_decay: ``[Hkv]``, ``[B, Hkv, T]`` or ``[B, Hkv, T, D]``, or ``None``.
        state: The state before the first token, ``[S, Hkv, D, E]``, float32; ``None`` means zeros.
        starts: First token of each sequence of one row, ``[S]``; ``None``: rows are sequences.
        lengths: Tokens of each, ``[S]``.
        scale: Multiplies q; not 0.
        return_state: Whether to return the state; otherwise it has no elements.
    """
    launcher = DeltaLauncher(k, v, beta, log_decay, state, starts, lengths)
    errors, u = launcher.errors()
    linear = launcher.linear(q, u, scale, return_state=return_state, decay_grad=False)
    out, last, _ = linear.forward()
    return out, last, errors, u


@torch.library.custom_op("attnzoo::delta_triton_backward", mutates_args=())
def delta_triton_backward(
    d_out: Tensor,
    d_last: Tensor,
    q: Tensor,
    k: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    state: Tensor | None,
    starts: Tensor | None,
    lengths: Tensor | None,
    last: Tensor,
    errors: Tensor,
    u: Tensor,
    scale: float,
    return_state: bool,
    needs_decay_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, beta, log_decay and state, the last two or empty ones."""
    launcher = DeltaLauncher(k, u, beta, log_decay, state, starts, lengths)
    options = (scale, return_state, needs_decay_grad)
    return launcher.backward(d_out, d_last, q, errors, u, last, *options)


@delta_triton.register_fake
def _delta_triton_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    state: Tensor | None,
    starts: Tensor | None,
    lengths: Tensor | None,
    scale: float,
    return_state: bool,
) -> tuple[Tensor, ...]:
    out = empty_rows(v, q.shape[1], v.shape[3]).transpose(1, 2)
    u = empty_rows(v, v.shape[1], v.shape[3]).transpose(1, 2)
    errors = empty_rows(v, v.shape[1], v.shape[3], torch.float32).transpose(1, 2)
    count = k.shape[0] if starts is None else starts.shape[0]
    shape = (count, k.shape[1], k.shape[3], v.shape[3]) if return_state else (0,)
    return out, v.new_empty(shape, dtype=torch.float32), errors, u


@delta_triton_backward.register_fake
def _delta_triton_backward_fake(*args: Any) -> tuple[Tensor, ...]:
    q, k, beta, log_decay, state, *_, u = args[2:12]
    d_log = q.new_empty(0) if not args[-1] else log_decay.new_empty(log_decay.shape)
    dv = empty_rows(u, u.shape[1], u.shape[3]).transpose(1, 2)
    dq, dk, d_beta = (x.new_empty(x.shape) for x in (q, k, beta))
    d_state = q.new_empty(0 if state is None else state.shape, dtype=torch.float32)
    return dq, dk, dv, d_beta, d_log, d_state


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, _, beta, log_decay, state, starts, lengths, *ctx.options = inputs
    ctx.save_for_backward(q, k, beta, log_decay, state, starts, lengths, *output[1:])


def _backward(ctx: Any, d_out: Tensor, d_last: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    needed = ctx.needs_input_grad
    grads = delta_triton_backward(d_out, d_last, *ctx.saved_tensors, *ctx.options, needed[4])
    wanted = [g if need else None for g, need in zip(grads, needed, strict=False)]
    return *wanted, None, None, None, None


delta_triton.register_autograd(_backward, setup_context=_setup_context)
refuse_derivative(delta_triton_backward, "delta_attention")
