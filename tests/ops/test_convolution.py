"""The causal convolution of sequences in one row, against each sequence alone."""

import pytest
import torch
from torch.testing import assert_close

from attnzoo.ops.convolution import causal_convolution, last_tokens
from tests.ops.delta.ragged import make_sequences, outside, row_length

X, W = 3, 4
LENGTHS = [0, 1, 2, 3, 0, 4, 9, 0]


@pytest.mark.parametrize("has_before", [False, True])
def test_sequences_equal_each_alone(has_before):
    """Outputs, last tokens and gradients; other tokens are NaN, and their results zeros."""
    sequences = make_sequences(LENGTHS)
    x = torch.randn(1, row_length(sequences), X, dtype=torch.float64)
    nowhere = outside(sequences, x.shape[1])
    x[:, nowhere] = torch.nan
    weight = torch.randn(X, W, dtype=torch.float64)
    before = torch.randn(len(LENGTHS), W - 1, X, dtype=torch.float64) if has_before else None
    leaves = [y.requires_grad_() for y in (x, weight, before) if y is not None]
    alone, last = torch.zeros_like(x), []
    for i, (start, end) in enumerate(zip(sequences.starts, sequences.ends, strict=True)):
        part, earlier = x[:, start:end], torch.zeros(1, W - 1, X, dtype=x.dtype)
        earlier = before[i : i + 1] if has_before else earlier
        together = torch.cat([earlier, part], 1)
        convolved = sum(together[:, j : j + len(part[0])] * weight[:, j] for j in range(W))
        alone = torch.cat([alone[:, :start], convolved, alone[:, end:]], 1)
        last.append(together[:, part.shape[1] :])
    ours = (
        causal_convolution(x, weight, before=before, sequences=sequences),
        last_tokens(x, W - 1, before=before, sequences=sequences),
    )
    exact = (alone, torch.cat(last))
    assert_close(ours, exact, rtol=1e-12, atol=1e-12)
    d_results = [torch.randn_like(y) for y in ours]
    grads = [torch.autograd.grad(found, leaves, d_results) for found in (ours, exact)]
    assert_close(*grads, rtol=1e-12, atol=1e-12)
    assert not ours[0][:, nowhere].any()
    assert not grads[0][0][:, nowhere].any()


def test_rows_continue_from_earlier_tokens():
    x, weight = torch.randn(2, 9, X), torch.randn(X, W)
    whole = causal_convolution(x, weight)
    for cut in (1, 2, 5):
        before = last_tokens(x[:, :cut], W - 1)
        rest = causal_convolution(x[:, cut:], weight, before=before)
        assert_close(rest, whole[:, cut:])
