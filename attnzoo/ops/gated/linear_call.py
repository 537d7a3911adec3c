"""The call of linear attention to which mLSTM and RWKV-6 reduce, and what computes it.

Letters: B batch, H heads, Hkv key heads, T tokens, D key size, E value size.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from attnzoo.contract.implementation import Implementation, select
from attnzoo.contract.masks import AttentionMask
from attnzoo.contract.states import AttentionOutput, ImplChoice, LinearState
from attnzoo.ops.linear.api import (
    divide_sums,
    kernel_verdict,
    linear_attention,
    linear_sums,
    round_features,
    triton_reasons,
)
from attnzoo.ops.linear.cpu.linear import cpp_reasons


class LinearCall(NamedTuple):
    """The call of ``linear_attention`` to which mLSTM and RWKV-6 reduce."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    state: LinearState
    segment_ids: Tensor | None
    form: str
    chunk_size: int | None
    return_state: bool
    has_ones: bool  # whether the last channel of v is ones, and that of kv equals z
    v_dtype: torch.dtype  # of the values before they were made float32


def _run_linear(x: LinearCall, impl: str) -> AttentionOutput:
    return linear_attention(
        x.q,
        x.k,
        x.v,
        mask=AttentionMask(causal=True, segment_ids=x.segment_ids),
        log_decay=x.log_decay,
        form=x.form,
        impl=impl,
        state=x.state,
        return_state=x.return_state,
        chunk_size=x.chunk_size,
    )


def _run_triton(x: LinearCall) -> AttentionOutput:
    """Run the kernels; they compute the sums of weights without a channel of ones."""
    values = _values(x).to(x.v_dtype)  # exact
    q, k = round_features(x.q, values), round_features(x.k, values)
    if not x.has_ones:
        return _run_linear(x._replace(q=q, k=k, v=values), impl="triton")
    state = LinearState(x.state.kv[..., :-1], x.state.k)
    out, weights, last = linear_sums(q, k, values, x.log_decay, state, x.segment_ids, x.chunk_size)
    kv = torch.cat([last.kv, last.k.unsqueeze(-1)], -1)
    out = torch.cat([out, weights.unsqueeze(-1)], -1)
    return AttentionOutput(out, LinearState(kv, last.k) if x.return_state else None)


def _values(x: LinearCall) -> Tensor:
    """Return the values without the channel of ones."""
    return x.v[..., :-1] if x.has_ones else x.v


def _triton_reasons(x: LinearCall) -> list[str]:
    reasons = triton_reasons(x.q, x.k, _values(x), form=x.form)
    return reasons + (["there is no token"] * (not x.q.shape[2]))


def _skip_triton(x: LinearCall) -> list[str]:
    return ["one token is a few torch operations"] if x.q.shape[2] == 1 else []


def _triton_verdict(x: LinearCall) -> tuple[str, str]:
    """The check of the window hybrid covers sums without a division."""
    return kernel_verdict("hybrid" if x.has_ones else "linear", x.log_decay, x.k, _values(x))


def divide(numerator: Tensor, denominator: Tensor, impl: str, x: LinearCall) -> Tensor:
    """Return the quotient of the sums that an implementation has computed."""
    if impl == "triton" and x.v_dtype == torch.bfloat16:
        return divide_sums(numerator, denominator, x.v_dtype)
    return numerator / denominator


def _cpp_reasons(x: LinearCall) -> list[str]:
    return cpp_reasons(x.q, form=x.form, chunk_size=x.chunk_size)


def _cpp_auto_reasons(x: LinearCall) -> list[str]:
    return (
        ["the recurrent form is a few torch operations per token"] if x.form == "recurrent" else []
    )


IMPLEMENTATIONS: tuple[Implementation[LinearCall, AttentionOutput], ...] = (
    Implementation(
        name="triton",
        run=_run_triton,
        reasons=_triton_reasons,
        automatic="compiled for this GPU",
        auto_reasons=_skip_triton,
        verdict=_triton_verdict,
    ),
    Implementation(
        name="cpp",
        run=partial(_run_linear, impl="cpp"),
        reasons=_cpp_reasons,
        automatic="compiled for this CPU",
        auto_reasons=_cpp_auto_reasons,
    ),
    Implementation(
        name="torch", run=partial(_run_linear, impl="torch"), automatic="runs on every device"
    ),
    Implementation(name="reference", run=partial(_run_linear, impl="reference")),
)
# What impl="auto" selects from, by whether the tensors are on a GPU; the interpreter is for tests
AUTOMATIC = {True: IMPLEMENTATIONS, False: IMPLEMENTATIONS[1:]}


def select_linear(
    op: str, call: LinearCall, impl: str
) -> tuple[Implementation[LinearCall, AttentionOutput], ImplChoice]:
    """Return the implementation that computes a call, and why."""
    table = AUTOMATIC[call.q.device.type == "cuda"] if impl == "auto" else IMPLEMENTATIONS
    return select(op, table, call, impl)
