"""AttentionMask: its dense form, key by key, and the functions that return a changed mask."""

import pytest
import torch

from attnzoo.contract.masks import AttentionMask

CPU = torch.device("cpu")
PADDING = torch.tensor([[True] * 9, [False] * 2 + [True] * 5 + [False, True]])
SEGMENTS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2], [3] * 9])


def is_visible(mask: AttentionMask, row: int, query: int, key: int) -> bool:
    """Return whether a query attends to a key, computed from the fields of the mask."""
    before, after = mask.window or (99, 99)
    earlier = [
        other
        for other in range(key)
        if (mask.padding is None or mask.padding[row, other])
        and (mask.segment_ids is None or mask.segment_ids[row, other] == mask.segment_ids[row, key])
    ]
    return bool(
        (not mask.causal or key <= query)
        and (query - before <= key <= query + after or len(earlier) < mask.num_sinks)
        and (mask.padding is None or mask.padding[row, key])
        and (mask.segment_ids is None or mask.segment_ids[row, key] == mask.segment_ids[row, query])
    )


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, (0, 0), (3, 1), (2, 99)])
@pytest.mark.parametrize("offset", [0, 4])
@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"padding": PADDING},
        {"segment_ids": SEGMENTS},
        {"num_sinks": 2},
        {"num_sinks": 1, "padding": PADDING},
        {"num_sinks": 2, "padding": PADDING, "segment_ids": SEGMENTS},
    ],
    ids=list,
)
def test_dense_equals_the_fields_of_the_mask(causal, window, offset, extra):
    mask = AttentionMask(causal=causal, window=window, q_offset=offset, **extra)
    dense = mask.dense(9 - offset, 9, CPU)
    if dense is None:
        dense = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    dense = dense.expand(2, 1, 9 - offset, 9)
    for row in range(2):
        for query in range(offset, 9):
            for key in range(9):
                expected = is_visible(mask, row, query, key)
                assert bool(dense[row, 0, query - offset, key]) is expected, (row, query, key)


def test_no_tensor_is_built_if_all_keys_are_visible():
    assert AttentionMask().dense(5, 5, CPU) is None
    assert AttentionMask().is_plain
    assert AttentionMask(causal=True, q_offset=3).is_plain
    for limit in ({"padding": PADDING}, {"segment_ids": SEGMENTS}, {"window": (1, 1)}):
        assert not AttentionMask(**limit).is_plain
    assert not AttentionMask(function=lambda: PADDING[:, None, None]).is_plain


def test_an_offset_may_be_a_tensor():
    fixed = AttentionMask(causal=True, window=(2, 0), q_offset=4)
    moving = AttentionMask(causal=True, window=(2, 0), q_offset=torch.tensor(4))
    assert torch.equal(fixed.dense(3, 9, CPU), moving.dense(3, 9, CPU))


def test_query_padding_is_that_of_the_last_keys():
    assert AttentionMask().query_padding(3, 9) is None
    mask = AttentionMask(padding=PADDING, q_offset=6)
    assert torch.equal(mask.query_padding(3, 9), PADDING[:, 6:])
    assert torch.equal(AttentionMask(padding=PADDING).query_padding(9, 9), PADDING)
    assert mask.query_padding(2, 9) is None  # those queries are not the last
    assert AttentionMask(padding=PADDING, q_offset=torch.tensor(6)).query_padding(3, 9) is None


@pytest.mark.parametrize("own", [None, (1, 5), (5, 1)])
def test_a_window_narrows(own):
    mask = AttentionMask(padding=PADDING, window=own)
    narrow = mask.with_window((3, 3), 9, 9)
    both = AttentionMask(padding=PADDING, window=(3, 3)).dense(9, 9, CPU)
    if own is not None:
        both = both & mask.dense(9, 9, CPU)
    assert torch.equal(narrow.dense(9, 9, CPU), both)


@pytest.mark.parametrize("causal", [True, False])
def test_a_window_narrows_a_function(causal):
    whole = torch.rand(2, 1, 4, 9) < 0.5
    mask = AttentionMask(causal=causal, padding=PADDING, q_offset=5, function=lambda: whole)
    narrow = mask.with_window((2, 1), 4, 9)
    band = AttentionMask(causal=causal, window=(2, 1), q_offset=5).dense(4, 9, CPU)
    assert torch.equal(narrow.dense(4, 9, CPU), whole & band)


def test_mask_of_new_tokens_omits_the_earlier_ones():
    for offset in (6, torch.tensor(6)):
        mask = AttentionMask(causal=True, padding=PADDING, q_offset=offset).of_new_tokens(2)
        assert mask.q_offset == 0
        assert torch.equal(mask.padding, PADDING[:, 6:8])
    assert AttentionMask(causal=True, q_offset=6).of_new_tokens(2) == AttentionMask(causal=True)
