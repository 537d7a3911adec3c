"""A dense function in place of torch's kernel for varied lengths, which runs on CUDA only."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from itertools import pairwise
from typing import Any

import pytest
import torch

from attnzoo.backends.flash.impl import varlen


def dense_varlen_attn(
    q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1),
    enable_gqa=False,
):  # fmt: skip
    """Compute what torch.nn.attention.varlen.varlen_attn documents, one sequence after another.

    A query's position is counted from the end of its sequence's keys, as in FlashAttention.
    """
    assert enable_gqa or q.shape[1] == k.shape[1]
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert (cu_seq_q[0], cu_seq_k[0]) == (0, 0)
    assert (cu_seq_q[-1], cu_seq_k[-1]) == (len(q), len(k))
    outs = []
    for queries, keys in zip(pairwise(cu_seq_q.tolist()), pairwise(cu_seq_k.tolist()), strict=True):
        rows, k_rows, v_rows = q[slice(*queries)], k[slice(*keys)], v[slice(*keys)]
        assert 0 < len(rows) <= max_q
        assert 0 < len(k_rows) <= max_k
        groups = q.shape[1] // k.shape[1]
        k_rows, v_rows = (x.repeat_interleave(groups, 1) for x in (k_rows, v_rows))
        position = torch.arange(len(rows))[:, None] + len(k_rows) - len(rows)
        distance = torch.arange(len(k_rows)) - position
        left, right = window_size
        seen = torch.ones_like(distance, dtype=torch.bool)
        if left >= 0:
            seen &= distance >= -left
        if right >= 0:
            seen &= distance <= right
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = torch.einsum("thd,shd->hts", rows.to(wide), k_rows.to(wide)) * scale
        weights = scores.masked_fill(~seen, -1e30).softmax(-1) * seen
        outs.append(torch.einsum("hts,shd->thd", weights, v_rows.to(wide)).to(q.dtype))
    return torch.cat(outs)


@contextmanager
def replace_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Let calls on any device use the kernel, replaced; collects their tensors and options."""
    received = []

    @wraps(dense_varlen_attn)  # whose signature is read
    def attend(*tensors, **options):
        received.append((tensors, options))
        return dense_varlen_attn(*tensors, **options)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", attend)
    monkeypatch.setattr(varlen, "device_reasons", lambda device: [])
    varlen._parameters.cache_clear()
    yield received
    varlen._parameters.cache_clear()
