"""A dense function in place of torch's varlen kernel, which runs on CUDA only."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from itertools import pairwise
from typing import Any

import pytest
import torch

from attnzoo.ops.flash import varlen, varlen_kernel
from tests.helpers import change_implementation


def dense_varlen_attn(
    q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None,
    window_size=(-1, -1), enable_gqa=False,
):  # fmt: skip
    """Compute what torch.nn.attention.varlen.varlen_attn documents, one sequence after another.

    A query's position is counted from the end of its sequence's keys, as in FlashAttention. The
    log-sum-exp is ``[H, N]``, as that of the kernel.
    """
    assert enable_gqa or q.shape[1] == k.shape[1]
    outs, lses = [], []
    for rows, k_rows, v_rows, seen in _each_sequence(
        q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, window_size
    ):
        scores = torch.einsum("thd,shd->hts", rows, k_rows) * scale
        scores = scores.masked_fill(~seen, -1e30)
        lses.append(scores.logsumexp(-1))
        weights = scores.softmax(-1) * seen
        outs.append(torch.einsum("hts,shd->thd", weights, v_rows).to(q.dtype))
    out = torch.cat(outs)
    return (out, torch.cat(lses, 1)) if return_aux is not None and return_aux.lse else out


def dense_varlen_backward(
    d_out, q, k, v, out, lse, cu_seq_q, cu_seq_k, max_q, max_k, dropout, is_causal, _generator,
    _unused, *, scale, window_size_left, window_size_right,
):  # fmt: skip
    """Compute the gradients as FlashAttention does, from the given output and log-sum-exp."""
    window = window_size_left, window_size_right
    assert (dropout, is_causal) == (0, window == (-1, 0))
    assert lse.shape == (q.shape[1], len(q))
    d_out, out = (x.to(lse.dtype) for x in (d_out, out))
    delta, begin, grads = (d_out * out).sum(2).T, 0, []
    for rows, k_rows, v_rows, seen in _each_sequence(
        q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, window
    ):
        at = slice(begin, begin + len(rows))
        begin += len(rows)
        scores = torch.einsum("thd,shd->hts", rows, k_rows) * scale
        weights = (scores - lse[:, at, None]).exp() * seen
        d_weights = torch.einsum("thd,shd->hts", d_out[at], v_rows)
        d_scores = weights * (d_weights - delta[:, at, None]) * scale
        grads.append(
            (
                torch.einsum("hts,shd->thd", d_scores, k_rows),
                _sum_groups(torch.einsum("hts,thd->shd", d_scores, rows), k.shape[1]),
                _sum_groups(torch.einsum("hts,thd->shd", weights, d_out[at]), k.shape[1]),
            )
        )
    return tuple(torch.cat(each).to(q.dtype) for each in zip(*grads, strict=True))


def _sum_groups(x, key_heads):
    return x.unflatten(1, (key_heads, -1)).sum(2)


def _each_sequence(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, window_size):
    """Yield queries, keys and values of each sequence, and which keys the queries see."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert (cu_seq_q[0], cu_seq_k[0]) == (0, 0)
    assert (cu_seq_q[-1], cu_seq_k[-1]) == (len(q), len(k))
    for queries, keys in zip(pairwise(cu_seq_q.tolist()), pairwise(cu_seq_k.tolist()), strict=True):
        rows, k_rows, v_rows = q[slice(*queries)], k[slice(*keys)], v[slice(*keys)]
        assert 0 < len(rows) <= max_q
        assert 0 < len(k_rows) <= max_k
        groups = q.shape[1] // k.shape[1]
        wide = torch.promote_types(q.dtype, torch.float32)
        k_rows, v_rows = (x.repeat_interleave(groups, 1).to(wide) for x in (k_rows, v_rows))
        position = torch.arange(len(rows))[:, None] + len(k_rows) - len(rows)
        distance = torch.arange(len(k_rows)) - position
        left, right = window_size
        seen = torch.ones_like(distance, dtype=torch.bool)
        if left >= 0:
            seen &= distance >= -left
        if right >= 0:
            seen &= distance <= right
        yield rows.to(wide), k_rows, v_rows, seen


@contextmanager
def replace_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Let calls on any device use the kernel, replaced; collects their tensors and options."""
    received = []

    @wraps(dense_varlen_attn)  # whose signature is read
    def attend(*tensors, **options):
        received.append((tensors, options))
        return dense_varlen_attn(*tensors, **options)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", attend)
    monkeypatch.setattr("torch.ops.aten._flash_attention_backward", dense_varlen_backward)
    monkeypatch.setattr(varlen, "device_reasons", lambda device: [])
    for op in ("flash_attention", "longformer_attention"):
        change_implementation(monkeypatch, op, "varlen", interpreted_on=("cpu",))
    varlen_kernel._parameters.cache_clear()
    yield received
    varlen_kernel._parameters.cache_clear()
