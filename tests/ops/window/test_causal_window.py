"""Causal softmax over a window: sequences, states and slots against each sequence alone."""

from functools import partial

import pytest
import torch

from attnzoo.contract.sequences import Sequences
from attnzoo.ops.window.causal_window import WindowState, causal_window_attention

H, HKV, D, E, WINDOW = 4, 2, 5, 3, 6
STARTS, LENGTHS, TOTAL = (2, 22, 25, 26, 33), (20, 0, 1, 6, 70), 105  # gaps before, between, after
IMPLS = ("torch", "cpp", "compiled")

attend = partial(causal_window_attention, window=WINDOW, scale=0.4)


@pytest.fixture
def impl(request, monkeypatch):
    """An implementation; ``compiled`` is the path of torch under ``torch.compile``."""
    if request.param == "compiled":
        monkeypatch.setattr("torch.compiler.is_compiling", lambda: True)
        return "torch"
    return request.param


def make(length, batch=1):
    q = torch.randn(batch, H, length, D, dtype=torch.float64)
    return q, *(torch.randn(batch, HKV, length, n, dtype=torch.float64) for n in (D, E))


def row_of_sequences():
    """Return q, k and v with NaN outside of sequences, and the sequences."""
    sequences = Sequences(torch.tensor(STARTS), torch.tensor(LENGTHS), max(LENGTHS))
    tensors = make(TOTAL)
    for x in tensors:
        x[:, :, sequences.index(TOTAL) == sequences.count] = torch.nan
    return tensors, sequences


def each_alone(tensors, states, num_sinks):
    """Return output, log-sum-exp and states, each sequence run alone with a dense mask."""
    out, lse = tensors[2].new_zeros(1, H, TOTAL, E), tensors[2].new_zeros(1, H, TOTAL, 1)
    after = []
    for i, (start, length) in enumerate(zip(STARTS, LENGTHS, strict=True)):
        part = slice(start, start + length)
        state = None if states is None else WindowState(*(x[i : i + 1] for x in states))
        found = attend(
            *(x[:, :, part] for x in tensors),
            state=state,
            return_state=True,
            impl="reference",
            num_sinks=num_sinks,
        )
        out[:, :, part], lse[:, :, part] = found[:2]
        after.append(found[2])
    return out, lse, WindowState(*map(torch.cat, zip(*after, strict=True)))


def test_the_reference_sees_the_window_and_the_first_tokens():
    q, k, v = make(12, batch=2)
    distance = torch.arange(12)[:, None] - torch.arange(12)
    seen = (distance >= 0) & ((distance < WINDOW) | (torch.arange(12) < 2))
    k, v = (x.repeat_interleave(H // HKV, 1) for x in (k, v))
    scores = (0.4 * q @ k.mT).masked_fill(~seen, -torch.inf)
    out, lse, *_ = attend(q, k[:, ::2], v[:, ::2], impl="reference", num_sinks=2)
    torch.testing.assert_close(out, scores.softmax(-1) @ v)
    torch.testing.assert_close(lse, scores.logsumexp(-1, keepdim=True))


@pytest.mark.parametrize("num_sinks", [0, 2])
@pytest.mark.parametrize("impl", [*IMPLS, "reference"], indirect=True)
def test_sequences_equal_each_alone(impl, num_sinks):
    """Without and then with states, of which some are not full."""
    states = None
    for _ in range(2):
        tensors, sequences = row_of_sequences()
        exact = each_alone(tensors, states, num_sinks)
        found = attend(
            *tensors,
            sequences=sequences,
            state=states,
            return_state=True,
            impl=impl,
            num_sinks=num_sinks,
        )
        for ours, theirs in zip(found[:3], exact, strict=True):
            torch.testing.assert_close(ours, theirs)
        states = exact[2]


@pytest.mark.parametrize("num_sinks", [0, 2])
@pytest.mark.parametrize("impl", IMPLS, indirect=True)
def test_gradients_of_sequences_are_those_of_each_alone(impl, num_sinks):
    tensors, sequences = row_of_sequences()
    weights = torch.randn(1, H, TOTAL, E), torch.randn(1, H, TOTAL, 1)
    gradients = []
    for alone in (False, True):
        leaves = [x.clone().requires_grad_() for x in tensors]
        if alone:
            found = each_alone(leaves, None, num_sinks)
        else:
            found = attend(*leaves, sequences=sequences, impl=impl, num_sinks=num_sinks)
        total = sum((x * w).sum() for x, w in zip(found, weights, strict=False))
        gradients.append(torch.autograd.grad(total, leaves))
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("num_sinks", [0, 2])
@pytest.mark.parametrize("impl", ["torch", "cpp"])
def test_slots_are_rows_of_a_pool(impl, num_sinks):
    tensors, _ = row_of_sequences()
    pool = each_alone(tensors, None, num_sinks)[2]
    slots, token = torch.tensor([4, -1, 0, 2]), make(1, batch=4)
    for x in token:
        x[1] = torch.nan
    out, lse, after, _ = attend(
        *token, state=pool, slots=slots, return_state=True, impl=impl, num_sinks=num_sinks
    )
    exact = WindowState(*(x.clone() for x in pool))
    for i, slot in enumerate(slots.tolist()):
        if slot < 0:
            assert not out[i].any()
            assert not lse[i].any()
            continue
        alone = attend(
            *(x[i : i + 1] for x in token),
            state=WindowState(*(x[slot : slot + 1] for x in pool)),
            return_state=True,
            impl="reference",
            num_sinks=num_sinks,
        )
        torch.testing.assert_close(out[i : i + 1], alone[0])
        torch.testing.assert_close(lse[i : i + 1], alone[1])
        for x, new in zip(exact, alone[2], strict=True):
            x[slot] = new[0]
    torch.testing.assert_close(after, exact)
