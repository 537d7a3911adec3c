"""The causal linear attention to which mLSTM and RWKV-6 reduce, and who computes it.

Letters: B batch, H heads, Hkv key heads, T tokens, D key size, E value size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from attnzoo.contract.masks import AttentionMask
from attnzoo.contract.states import AttentionOutput, LinearState
from attnzoo.ops.linear.api import linear_attention
from attnzoo.ops.linear.gated_step import GatedInputs
from attnzoo.ops.linear.triton.run import divide_sums, linear_sums, round_features, triton_reasons

Divide = Callable[[Tensor, Tensor], Tensor]


class SumsCall(NamedTuple):
    """The call of ``linear_attention`` to which mLSTM and RWKV-6 reduce."""

    q: Tensor
    k: Tensor
    v: Tensor  # float32 or wider
    log_decay: Tensor
    state: LinearState
    segment_ids: Tensor | None
    chunk_size: int | None
    has_ones: bool  # whether the last channel of v is ones, and that of kv equals z
    v_dtype: torch.dtype  # of the values before they were made float32


class Sums(NamedTuple):
    """The sums that each query reads, the state, and how to divide two of these sums."""

    out: Tensor  # [B, H, T, E]
    state: LinearState
    divide: Divide


ComputeSums = Callable[[SumsCall], Sums]


def op_sums(x: SumsCall, *, impl: str, op: Callable[..., AttentionOutput], **options: int) -> Sums:
    """Compute the sums by an implementation of a public op."""
    found = op(
        *(x.q, x.k, x.v),
        mask=AttentionMask(causal=True, segment_ids=x.segment_ids),
        log_decay=x.log_decay,
        impl=impl,
        state=x.state,
        return_state=True,
        **options,
    )
    assert found.state is not None
    return Sums(found.out, found.state, torch.div)


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
        found = chunk_sums(x._replace(q=q, k=k, v=values), impl="triton")
        return found._replace(divide=divide)
    state = LinearState(x.state.kv[..., :-1], x.state.k)
    out, weights, last = linear_sums(q, k, values, x.log_decay, state, x.segment_ids, x.chunk_size)
    kv = torch.cat([last.kv, last.k.unsqueeze(-1)], -1)
    return Sums(torch.cat([out, weights.unsqueeze(-1)], -1), LinearState(kv, last.k), divide)


def sums_triton_reasons(x: GatedInputs) -> list[str]:
    """Return every reason why the kernels do not compute a call."""
    return triton_reasons(x.q, x.k, x.v) + (["there is no token"] * (not x.q.shape[2]))


def wide_values(x: GatedInputs) -> Tensor:
    """Return the values in float32 or wider: 16-bit sums of weights would grow wrong."""
    dtype = torch.promote_types(torch.promote_types(x.q.dtype, x.v.dtype), torch.float32)
    return x.v.to(dtype)
