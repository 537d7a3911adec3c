"""Sequences of padded and packed rows, against the rows themselves, token by token."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from attnzoo.contract import sequences as module
from attnzoo.contract.masks import AttentionMask
from attnzoo.contract.sequences import Sequences, put, sequences_of_mask, take
from attnzoo.contract.states import LinearState, put_slots
from attnzoo.errors import UnsupportedError

B, H, T = 4, 2, 5
PADDING = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0] * 5, [1, 0, 1, 0, 0]]).bool()
IDS = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 2, 2], [3, 3, 3, 4, 5], [0, 0, 0, 0, 1]])
MASKS = {
    "padding": AttentionMask(causal=True, padding=PADDING),
    "segments": AttentionMask(causal=True, segment_ids=IDS),
    "both": AttentionMask(causal=True, padding=PADDING, segment_ids=IDS),
    "all padding": AttentionMask(causal=True, padding=torch.zeros(B, T, dtype=torch.bool)),
}


@pytest.fixture(params=["known", "unknown"])
def known(request, monkeypatch):
    """Whether the values of a mask are known; if not, as in a compiled graph."""
    if request.param == "unknown":
        monkeypatch.setattr(module, "values_are_known", lambda *_: False)
    return request.param == "known"


def of(name):
    mask = MASKS[name]
    fresh = AttentionMask(causal=True, padding=mask.padding, segment_ids=mask.segment_ids)
    return sequences_of_mask(fresh, (B, T), torch.device("cpu"))


def expected_sequences(name):
    """Return the rows and tokens of each sequence."""
    padding = MASKS[name].padding
    ids = MASKS[name].segment_ids
    found = {}
    for row in range(B):
        if ids is None:
            found[row, 0] = []
        for token in range(T):
            if padding is None or padding[row, token]:
                key = row, 0 if ids is None else int(ids[row, token])
                found.setdefault(key, []).append(token)
    return [(row, tokens) for (row, _), tokens in found.items()]


@pytest.mark.parametrize("name", MASKS)
def test_tokens_are_those_of_the_rows(name, known):
    sequences, layout = of(name)
    x = torch.randn(B, H, T, 3)
    row = layout.to_row(x)
    assert (row.shape[2] == B * T) or known
    found = []
    for start, length in zip(sequences.starts.tolist(), sequences.lengths.tolist(), strict=True):
        assert length <= sequences.longest
        found.append(row[0, :, start : start + length])
    expected = expected_sequences(name)
    if sequences.rows is not None:  # an upper bound: the others are empty
        assert all(y.shape[1] == 0 for y in found[len(expected) :])
        found = found[: len(expected)]
    for ours, (b, tokens) in zip(found, expected, strict=True):
        assert torch.equal(ours, x[b, :, tokens])
    real = PADDING if MASKS[name].padding is not None else torch.ones(B, T).bool()
    real = MASKS[name].padding if name == "all padding" else real
    assert torch.equal(layout.to_rows(row), x * real[:, None, :, None])


@pytest.mark.parametrize("name", MASKS)
def test_what_padding_holds_has_no_effect_and_gets_no_gradient(name, known):
    _, layout = of(name)
    real = MASKS[name].padding
    real = torch.ones(B, T).bool() if real is None else real
    x = torch.randn(B, H, T, 3).masked_fill(~real[:, None, :, None], torch.nan).requires_grad_()
    out = layout.to_rows(layout.to_row(x))
    (out * torch.full_like(out, 2.0)).sum().backward()
    assert torch.equal(out, x.detach().nan_to_num() * real[:, None, :, None])
    assert torch.equal(x.grad, 2.0 * real[:, None, :, None].expand(x.shape))


@pytest.mark.parametrize("name", MASKS)
def test_states_belong_to_the_first_and_the_last_sequence_of_a_row(name, known):
    sequences, layout = of(name)
    state = LinearState(torch.rand(B, 2, 3) + 1, torch.rand(B, 2) + 1)
    by_sequence = layout.state_to_sequences(state, sequences.count)
    by_row = layout.state_to_rows(by_sequence, sequences.count)
    expected = expected_sequences(name)
    rows = [row for row, _ in expected]
    for i, row in enumerate(rows):
        is_first = row not in rows[:i]
        assert torch.equal(by_sequence.k[i], state.k[row] * is_first)
    for row in range(B):
        own = [i for i, other in enumerate(rows) if other == row]
        last = by_sequence.k[own[-1]] if own else torch.zeros(2)
        assert torch.equal(by_row.k[row], last)


def test_layers_that_share_a_mask_count_once():
    mask = AttentionMask(causal=True, padding=PADDING)
    first = sequences_of_mask(mask, (B, T), torch.device("cpu"))
    assert sequences_of_mask(mask, (B, T), torch.device("cpu")) is first


def test_rows_of_sequences_with_gaps():
    sequences = Sequences(torch.tensor([1, 4, 4, 9]), torch.tensor([2, 0, 4, 1]), 4)
    x = torch.arange(11.0)[None, None, :, None].expand(1, H, 11, 1)
    x = x.masked_fill(torch.tensor([1, 0, 0, 1, 0, 0, 0, 0, 1, 0, 1]).bool()[:, None], torch.nan)
    rows = sequences.to_rows(x)
    assert rows[:, 0, :, 0].tolist() == [[1, 2, 0, 0], [0] * 4, [4, 5, 6, 7], [9, 0, 0, 0]]
    assert torch.equal(sequences.to_row(rows, 11), x.nan_to_num())
    assert sequences.index(11).tolist() == [4, 0, 0, 4, 2, 2, 2, 2, 4, 3, 4]
    inside = sequences.index(11) < 4
    assert sequences.positions(11)[inside].tolist() == [0, 1, 0, 1, 2, 3, 0]
    assert (sequences.is_first(11) & inside).nonzero()[:, 0].tolist() == [1, 4, 9]
    assert sequences.without_first(3).lengths.tolist() == [0, 0, 1, 0]
    by_token = sequences.to_rows(x.transpose(1, 2), token_dim=1)
    assert torch.equal(by_token.transpose(1, 2), rows)


def test_moving_tokens_is_differentiable_twice_and_by_vmap():
    index, where = torch.tensor([3, 0, 2]), torch.tensor([True, False, True])
    x = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    for chosen in (None, where):
        for call in (
            lambda x, w=chosen: take(x, index, w) ** 2,
            lambda x, w=chosen: put(x[:3] ** 2, index, 5, w),
        ):
            assert gradcheck(call, x)
            assert gradgradcheck(call, x)
        batch = torch.randn(3, 4, 2, dtype=torch.float64)
        mapped = torch.vmap(lambda x, w=chosen: take(x, index, w))(batch)
        assert torch.equal(mapped, torch.stack([take(x, index, chosen) for x in batch]))


@pytest.mark.parametrize("name", MASKS)
def test_compiles_to_one_graph(name):
    padding, ids = MASKS[name].padding, MASKS[name].segment_ids

    def call(x):
        mask = AttentionMask(causal=True, padding=padding, segment_ids=ids)
        sequences, layout = sequences_of_mask(mask, (B, T), x.device)
        return sequences.lengths, layout.to_rows(layout.to_row(x))

    x = torch.randn(B, H, T, 3)
    lengths, out = torch.compile(call, fullgraph=True, backend="eager")(x)
    expected, same = call(x)
    assert torch.equal(lengths[: len(expected)], expected)
    assert torch.equal(out, same)


def test_cumulative_lengths():
    sequences = Sequences.from_cu_seqlens(torch.tensor([0, 3, 3, 7], dtype=torch.int32))
    assert sequences.starts.tolist() == [0, 3, 3]
    assert sequences.lengths.tolist() == [3, 0, 4]
    assert (sequences.longest, sequences.count) == (4, 3)
    for wrong in (torch.tensor([0.0, 3.0]), torch.tensor([0]), torch.zeros(2, 2).long()):
        with pytest.raises(UnsupportedError, match=r"cu_seqlens must be \[sequences \+ 1\] integ"):
            Sequences.from_cu_seqlens(wrong)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize(
    "slots", [[4, 0, 2], [-1, 3, -1], [-1, -1, -1], [0, -1, 1], [-1, 0, -1]], ids=str
)
def test_slots_of_a_pool(slots, in_place):
    pool, rows = torch.randn(5, 2), torch.randn(3, 2)
    expected = pool.clone()
    for slot, row in zip(slots, rows, strict=True):
        if slot >= 0:
            expected[slot] = row
    before = pool.clone()
    (found,) = put_slots([pool], torch.tensor(slots), [rows], in_place=in_place)
    assert torch.equal(found, expected)
    assert (found is pool) == in_place
    assert in_place or torch.equal(pool, before)


def test_values_on_the_meta_device_are_unknown():
    mask = AttentionMask(causal=True, padding=PADDING.to("meta"))
    sequences, layout = sequences_of_mask(mask, (B, T), torch.device("meta"))
    x = torch.empty(B, H, T, 3, device="meta")
    assert layout.to_rows(layout.to_row(x)).shape == x.shape
    assert sequences.longest == T
