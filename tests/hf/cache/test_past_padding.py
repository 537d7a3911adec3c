"""Masks that change for tokens in a state are refused, because a state cannot be corrected."""

from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor
from torch.testing import assert_close

import attnzoo
from attnzoo.errors import UnsupportedError
from attnzoo.hf.cache import past_padding
from attnzoo.hf.seam import cache_argument
from tests.hf.conftest import recording_cache


@pytest.fixture
def linear(llama):
    model = llama()
    attnzoo.swap(model, "linear")
    return model


@pytest.fixture
def mask(padding) -> Tensor:
    return padding("left", (12, 9, 5))


def step(model: Any, cache: Any, ids: Tensor, mask: Tensor | None, begin: int, end: int) -> Tensor:
    seen = None if mask is None else mask[:, :end]
    places = torch.arange(begin, end).expand(len(ids), -1)
    with torch.no_grad():
        given = {"attention_mask": seen, "position_ids": places, **cache_argument(cache)}
        return model(ids[:, begin:end], **given).logits


def whole(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    places = torch.arange(ids.shape[1]).expand(len(ids), -1)
    with torch.no_grad():
        return model(ids, attention_mask=mask, position_ids=places, use_cache=False).logits


def changed(mask: Tensor, *entries: tuple[int, int]) -> Tensor:
    other = mask.clone()
    for row, column in entries:
        other[row, column] = 1 - other[row, column]
    return other


CHANGES = {
    "hidden": ([(1, 6)], "row 1, token 6 is 0 now and was 1"),
    "shown": ([(2, 1)], "row 2, token 1 is 1 now and was 0"),
    "swapped": ([(1, 0), (1, 7)], r"row 1, token 0 is 1 now and was 0 .*\(2 such entries\)"),
    "swapped between rows": ([(0, 7), (1, 2)], "row 0, token 7 is 0 now and was 1"),
}


@pytest.mark.parametrize(
    ("change", "end"),  # one new token, several
    [("hidden", 9), ("shown", 12), ("swapped", 12), ("swapped between rows", 9)],
)
def test_a_changed_mask_is_refused(linear, cache, ids, mask, change, end):
    entries, message = CHANGES[change]
    step(linear, cache, ids, mask, 0, 8)
    with pytest.raises(UnsupportedError, match=rf"layers\.0\.self_attn.*{message}"):
        step(linear, cache, ids, changed(mask, *entries), 8, end)


def test_the_cache_is_usable_after_a_refusal(linear, cache, ids, mask):
    step(linear, cache, ids, mask, 0, 8)
    with pytest.raises(UnsupportedError, match="unchanged"):
        step(linear, cache, ids, changed(mask, (1, 6)), 8, 9)
    found = torch.cat([step(linear, cache, ids, mask, n, n + 1) for n in range(8, 12)], 1)
    assert_close(found, whole(linear, ids, mask)[:, 8:], atol=1e-4, rtol=1e-4)


def test_a_change_at_any_step_is_refused(linear, cache, ids, mask):
    step(linear, cache, ids, mask, 0, 8)
    for n in (8, 9, 10):
        step(linear, cache, ids, mask, n, n + 1)
    with pytest.raises(UnsupportedError, match="row 0, token 9 is 0 now"):
        step(linear, cache, ids, changed(mask, (0, 9)), 11, 12)


def test_without_a_mask_every_token_counts_as_real(linear, cache, ids, mask):
    step(linear, cache, ids, None, 0, 8)
    step(linear, cache, ids, torch.ones_like(mask), 8, 9)
    step(linear, cache, ids, None, 9, 10)
    with pytest.raises(UnsupportedError, match="row 1, token 0 is 0 now"):
        step(linear, cache, ids, mask, 10, 12)
    cache.reset()
    step(linear, cache, ids, mask, 0, 8)
    with pytest.raises(UnsupportedError, match="row 1, token 0 is 1 now"):
        step(linear, cache, ids, None, 8, 9)


def test_a_mask_of_the_new_tokens_alone_is_refused(linear, cache, ids, mask):
    step(linear, cache, ids, None, 0, 8)
    with pytest.raises(UnsupportedError, match="over all tokens so far"):
        linear(ids[:, 8:], attention_mask=mask[:, 8:] * 0 + 1, **cache_argument(cache))


def test_exact_backends_apply_a_changed_mask(llama, ids, mask):
    logits = []
    for backend in (None, "flash", "softmax"):
        model = llama()
        if backend is not None:
            attnzoo.swap(model, backend)
        cache = hf.DynamicCache()
        step(model, cache, ids, mask, 0, 8)
        logits.append(step(model, cache, ids, changed(mask, (1, 6), (0, 2)), 8, 12))
    assert_close(logits[1], logits[0], atol=1e-5, rtol=1e-5)
    assert_close(logits[2], logits[0], atol=1e-5, rtol=1e-5)


def test_reordered_rows_keep_their_padding(linear, cache, ids, mask):
    step(linear, cache, ids, mask, 0, 8)
    rows = torch.tensor([2, 2, 0])
    cache.reorder_cache(rows)
    other = torch.cat([ids[rows, :8], ids[:, 8:]], 1)
    found = step(linear, cache, other, mask[rows], 8, 10)
    assert_close(found, whole(linear, other, mask[rows])[:, 8:10], atol=1e-4, rtol=1e-4)
    with pytest.raises(UnsupportedError, match="row 1, token 6 is 1 now"):
        step(linear, cache, other, changed(mask[rows], (1, 6)), 10, 12)


def test_selected_and_repeated_rows_keep_their_padding(linear, ids, mask):
    cache = hf.DynamicCache()
    step(linear, cache, ids, mask, 0, 8)
    cache.batch_select_indices(torch.tensor([0, 2]))
    cache.batch_repeat_interleave(2)
    rows = torch.tensor([0, 0, 2, 2])
    step(linear, cache, ids[rows], mask[rows], 8, 9)
    with pytest.raises(UnsupportedError, match="row 3, token 8 is 0 now"):
        step(linear, cache, ids[rows], changed(mask[rows], (3, 8)), 9, 12)


def test_cropped_tokens_may_be_replaced_by_others(linear, ids, mask):
    cache = recording_cache()
    step(linear, cache, ids, mask, 0, 8)
    step(linear, cache, ids, mask, 8, 12)
    cache.crop(-3)
    other = changed(mask, (0, 10))
    step(linear, cache, ids, other, 9, 11)
    with pytest.raises(UnsupportedError, match="row 0, token 10 is 1 now"):
        step(linear, cache, ids, mask, 11, 12)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_masks_of_a_sliding_window(kind, redraw, llama_config, ids):
    """A mask then covers the window only, so the earlier tokens in it are compared."""
    sizes = llama_config().to_dict()
    names = ("vocab_size", "hidden_size", "num_attention_heads", "intermediate_size")
    config = hf.MistralConfig(
        **{name: sizes[name] for name in names},
        num_key_value_heads=2,
        num_hidden_layers=2,
        sliding_window=5,
    )
    model = redraw(hf.MistralForCausalLM(config))
    attnzoo.swap(model, "flash", window=3)
    cache: Any = hf.DynamicCache(config=config)
    if kind == "static":
        cache = hf.StaticCache(config=config, max_cache_len=20)
    mask = changed(torch.ones_like(ids), (0, 0), (2, 6))
    step(model, cache, ids, mask, 0, 4)
    for n in range(4, 10):
        step(model, cache, ids, mask, n, n + 1)
    with pytest.raises(UnsupportedError, match="row 2, token 6 is 1 now and was 0"):
        step(model, cache, ids, changed(mask, (2, 6)), 10, 11)


def test_a_call_compares_once_for_all_layers(linear, cache, ids, mask, monkeypatch):
    compare, compared = past_padding._changed_entries, []
    monkeypatch.setattr(
        past_padding, "_changed_entries", lambda *args: compared.append(args) or compare(*args)
    )
    step(linear, cache, ids, mask, 0, 8)
    for n in range(8, 12):
        compared.clear()
        step(linear, cache, ids, mask, n, n + 1)
        assert len(compared) == 1
