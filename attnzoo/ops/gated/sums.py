"""The causal linear attention to which mLSTM and RWKV-6 reduce, and who computes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from attnzoo.contract.implementation import (
    CPP,
    TORCH,
    TRITON,
    Implementation,
    register_implementation,
)
from attnzoo.contract.sequences import Sequences
from attnzoo.contract.states import AttentionOutput, LinearState
from attnzoo.ops.gated.common import (
    GatedInputs,
    GatedResult,
    gated_cpp_reasons,
    gated_triton_reasons,
    gated_triton_verdict,
    on_slots,
    run_gated_step_cpp,
    run_gated_step_triton,
    run_gated_steps,
)
from attnzoo.ops.linear.api import linear_attention, recurrent_linear_attention
from attnzoo.ops.linear.cpu.linear import cpp_reasons
from attnzoo.ops.linear.triton.run import divide_sums, linear_sums, round_features, triton_reasons
from attnzoo.ops.linear.triton.verdicts import kernel_verdict

Divide = Callable[[Tensor, Tensor], Tensor]


class SumsCall(NamedTuple):
    """The call of ``linear_attention`` to which mLSTM and RWKV-6 reduce."""

    q: Tensor
    k: Tensor
    v: Tensor  # float32 or wider
    log_decay: Tensor
    state: LinearState | None
    sequences: Sequences | None
    return_state: bool
    chunk_size: int | None
    has_ones: bool  # whether the last channel of v is ones, and that of kv equals z
    v_dtype: torch.dtype  # of the values before they were made float32


# The sums that each query reads, [B, H, T, E], the state, and how to divide two of these sums
Sums = tuple[Tensor, LinearState | None, Divide]
ComputeSums = Callable[[SumsCall], Sums]


def op_sums(x: SumsCall, *, impl: str, op: Callable[..., AttentionOutput], **options: int) -> Sums:
    """Compute the sums by an implementation of a public op."""
    found = op(
        *(x.q, x.k, x.v),
        sequences=x.sequences,
        log_decay=x.log_decay,
        impl=impl,
        state=x.state,
        return_state=x.return_state,
        **options,
    )
    return found.out, found.state, torch.div


def chunk_sums(x: SumsCall, *, impl: str) -> Sums:
    """Compute the sums in chunks."""
    options = {} if x.chunk_size is None else {"chunk_size": x.chunk_size}
    return op_sums(x, impl=impl, op=linear_attention, **options)


def triton_sums(x: SumsCall) -> Sums:
    """Run the Triton kernels, which compute the sums of weights without a channel of ones."""
    values = (x.v[..., :-1] if x.has_ones else x.v).to(x.v_dtype)  # exact
    divide: Divide = torch.div
    if x.v_dtype == torch.bfloat16:
        divide = partial(divide_sums, dtype=x.v_dtype)
    q, k = round_features(x.q, values), round_features(x.k, values)
    if not x.has_ones:
        out, last, _ = chunk_sums(x._replace(q=q, k=k, v=values), impl="triton")
        return out, last, divide
    state = None if x.state is None else LinearState(x.state.kv[..., :-1], x.state.k)
    out, weights, last = linear_sums(
        *(q, k, values, x.log_decay, state, x.sequences, x.chunk_size, x.return_state)
    )
    if last is not None:
        last = LinearState(torch.cat([last.kv, last.k.unsqueeze(-1)], -1), last.k)
    return torch.cat([out, weights.unsqueeze(-1)], -1), last, divide


def wide_values(x: GatedInputs) -> Tensor:
    """Return the values in float32 or wider: 16-bit sums of weights would grow wrong."""
    dtype = torch.promote_types(torch.promote_types(x.q.dtype, x.v.dtype), torch.float32)
    return x.v.to(dtype)


# -- implementations -------------------------------------------------------------------------------


def _triton_verdict(x: GatedInputs) -> tuple[str, str]:
    """The check of the window hybrid covers sums without a division."""
    has_ones = x.normalize or x.is_mlstm
    return kernel_verdict("hybrid" if has_ones else "linear", x.log_decay, x.k, x.v)


def _cpp_reasons(x: GatedInputs) -> list[str]:
    return cpp_reasons(chunk_size=x.chunk_size)


def register_reduction(
    name: str,
    run: Callable[..., GatedResult],
    run_step: Callable[[GatedInputs], GatedResult],
) -> None:
    """Register the implementations of an op in chunks, of one token, and token by token.

    Args:
        name: The ops are ``NAME_attention``, ``NAME_step`` and ``recurrent_NAME_attention``.
        run: Computes all tokens; takes ``sums``.
        run_step: Computes one token in torch.
    """
    op, recurrent = f"{name}_attention", f"recurrent_{name}_attention"
    register_implementation(
        Implementation(
            op=op,
            **TRITON,
            run=partial(run, sums=triton_sums),
            reasons=lambda x: triton_reasons(x.q, x.k, x.v),
            form="chunk form",
            verdict=_triton_verdict,
        ),
        Implementation(
            op=op,
            **CPP,
            run=partial(run, sums=partial(chunk_sums, impl="cpp")),
            reasons=_cpp_reasons,
            form="chunk form",
        ),
        Implementation(
            op=op,
            **TORCH,
            run=partial(run, sums=partial(chunk_sums, impl="torch")),
            form="chunk form",
        ),
        Implementation(
            op=op,
            name="reference",
            form="chunk form",
            run=partial(run, sums=partial(chunk_sums, impl="reference")),
        ),
        Implementation(
            op=recurrent,
            name="reference",
            run=partial(
                run, sums=partial(op_sums, op=recurrent_linear_attention, impl="reference")
            ),
        ),
    )
    _register_steps(name, run_step)


def _register_steps(name: str, run_step: Callable[[GatedInputs], GatedResult]) -> None:
    """Register the implementations of one token, and token by token."""
    for step in (
        Implementation(
            op=f"{name}_step",
            **TRITON,
            run=run_gated_step_triton,
            reasons=gated_triton_reasons,
            form="one token",
            verdict=gated_triton_verdict,
        ),
        Implementation(
            op=f"{name}_step",
            **CPP,
            run=run_gated_step_cpp,
            reasons=gated_cpp_reasons,
            form="one token",
        ),
        Implementation(
            op=f"{name}_step",
            **TORCH,
            run=on_slots(run_step),
            form="one token",
        ),
    ):
        steps = replace(
            step,
            op=f"recurrent_{name}_attention",
            run=partial(run_gated_steps, step=step.run),
            form="token by token",
        )
        register_implementation(step, steps)
