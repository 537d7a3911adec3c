"""States as entries of a transformers cache: supported and refused operations."""

import copy
import pickle
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor
from torch.testing import assert_close

import attnzoo
from attnzoo.errors import UnsupportedError
from attnzoo.hf.cache.state_layer import StaticStateLayer, state_layer
from attnzoo.hf.seam import cache_argument
from tests.hf.conftest import RECURRENT, recording_cache

GRADIENTS: dict[str, tuple[str, dict[str, Any]]] = {
    **RECURRENT,
    "hedgehog": ("linear", {"feature_map": "hedgehog", "window": 4}),
    "rwkv6": ("gated_linear", {"gate": "rwkv6"}),
    "mlstm": ("gated_linear", {"gate": "mlstm"}),
    "mamba2": ("gated_linear", {"gate": "mamba2", "window": 4}),
    "kda": ("delta", {"window": 4, "gate": "vector", "short_convolution": 4, "output_gate": True}),
    "block_sparse": ("block_sparse", {"block_size": 4}),
}


@pytest.fixture
def linear(llama):
    return attnzoo.swap(llama(), "linear")


def step(model: Any, cache: Any, tokens: Tensor, **given: Any) -> Tensor:
    with torch.no_grad():
        return model(tokens, **cache_argument(cache), **given).logits


def whole(model: Any, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return model(tokens, use_cache=False).logits


def state_bytes(cache: Any) -> int:
    tensors = [x for layer in cache.layers for x in layer.state]
    return sum(x.untyped_storage().nbytes() for x in tensors)


def test_prompt_cut_anywhere(model, cache, ids):
    expected = whole(model, ids)
    for lengths in ((7, 5), (1, 5, 6), (4, 1, 1, 6)):
        cache.reset()
        logits = [step(model, cache, tokens) for tokens in ids.split(lengths, 1)]
        assert_close(torch.cat(logits, 1), expected, atol=1e-4, rtol=1e-4)
        assert int(cache.get_seq_length()) == 12


def test_reorder_follows_beams(model, cache, ids):
    step(model, cache, ids[:, :8])
    order = torch.tensor([2, 2, 0])
    cache.reorder_cache(order)
    found = step(model, cache, ids[:, 8:])
    mixed = torch.cat([ids[order, :8], ids[:, 8:]], 1)
    assert_close(found, whole(model, mixed)[:, 8:], atol=1e-4, rtol=1e-4)


def test_rows_selected_and_repeated(model, ids):
    cache = hf.DynamicCache()
    step(model, cache, ids[:, :8])
    cache.batch_select_indices(torch.tensor([0, 2]))
    cache.batch_repeat_interleave(2)
    assert cache.batch_size == 4
    rows = torch.tensor([0, 0, 2, 2])
    found = step(model, cache, ids[rows, 8:])
    assert_close(found, whole(model, ids[rows])[:, 8:], atol=1e-4, rtol=1e-4)


def test_reset_and_reuse(model, cache, ids):
    step(model, cache, ids)
    for rows in (3, 1):  # the same batch, and another
        cache.reset()
        assert (int(cache.get_seq_length()), cache.batch_size) == (0, -1)
        logits = [step(model, cache, tokens) for tokens in ids[:rows].flip(1).split((8, 4), 1)]
        assert_close(torch.cat(logits, 1), whole(model, ids[:rows].flip(1)), atol=1e-4, rtol=1e-4)
        assert cache.batch_size == cache.layers[0].keys.shape[0] == rows


@pytest.mark.parametrize("name", ["hybrid", "window", "linformer", "block_sparse"])
def test_a_state_that_grows_is_no_layer_of_a_smaller_cache(name, llama, ids):
    """A state of fixed size takes the place of a layer that is quantised or offloaded."""
    backend, options = GRADIENTS[name]
    model = attnzoo.swap(llama(), backend, layers={"0": "flash"}, **options)
    offloaded = hf.DynamicCache()
    vars(offloaded)["offloading"] = True  # the option needs a GPU
    try:
        cache = hf.QuantizedCache("fp8", model.config)
    except ValueError:
        pytest.skip("this release of transformers quantises a cache by other packages only")
    swapped = model.model.layers[1].self_attn.attnzoo
    if name in ("linformer", "block_sparse"):
        with pytest.raises(UnsupportedError, match=r"layers\.1\.self_attn: the cache is quantized"):
            step(model, cache, ids)
        with pytest.raises(UnsupportedError, match=r"layers\.1\.self_attn: the cache is offloaded"):
            state_layer(offloaded, 1, swapped)
    else:
        assert state_layer(offloaded, 1, swapped).state is None
        first, _ = (step(model, cache, tokens) for tokens in ids.split(6, 1))
        assert_close(first, whole(model, ids)[:, :6], atol=1e-4, rtol=1e-4)  # read unrounded
        assert cache.layers[0]._quantized_keys[0].shape[2] == 12


def test_static_state_stays_in_place(model, ids):
    cache = hf.StaticCache(config=model.config, max_cache_len=20)
    step(model, cache, ids[:, :8])

    def addresses() -> list[int]:
        tensors = [x for layer in cache.layers for x in (*layer.state, layer.cumulative_length)]
        return [x.data_ptr() for x in tensors]

    expected = addresses()
    step(model, cache, ids[:, 8:9])
    cache.reset()
    step(model, cache, ids[:, :8])
    assert addresses() == expected


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("backend", ["linear", "gated_linear", "performer"])
def test_static_decoding_computes_the_state_in_its_place(backend, window, llama, ids, monkeypatch):
    model, stored, store = llama(), [], StaticStateLayer.store
    attnzoo.swap(model, backend, window=window)
    cache = hf.StaticCache(config=model.config, max_cache_len=20)

    def recorded(layer, state):
        stored.append(all(x is y for x, y in zip(state, layer._buffers or (), strict=False)))
        store(layer, state)

    with torch.no_grad():
        logits = [model(ids[:, :8], **cache_argument(cache)).logits]
        monkeypatch.setattr(StaticStateLayer, "store", recorded)
        for i in (8, 9):
            logits.append(model(ids[:, i : i + 1], **cache_argument(cache)).logits)
        assert_close(torch.cat(logits, 1), model(ids[:, :10]).logits, atol=1e-4, rtol=1e-4)
    assert len(stored) == 2 * len(cache.layers)
    assert all(stored)


def test_bytes_do_not_grow(model, cache, ids):
    sizes = set()
    for tokens in (ids[:, :8], *ids[:, 8:].split(1, 1)):
        step(model, cache, tokens)
        sizes.add(state_bytes(cache))
    finished = 2 if cache.layers[0].owner[0] == "linformer" else 1  # blocks of 5 among 8 to 12
    assert len(sizes) == finished
    assert all(layer.keys.untyped_storage().nbytes() < 16 for layer in cache.layers)


def test_crop_removes_recorded_tokens(model, ids, padding):
    mask = padding("left", (12, 9, 8))
    cache = recording_cache()
    step(model, cache, ids[:, :2], attention_mask=mask[:, :2])
    cache.crop(0)
    for begin, end in ((2, 7), (7, 8), (8, 12)):
        step(model, cache, ids[:, begin:end], attention_mask=mask[:, :end])
    for removed in (0, 1, 4, 6, 10):
        cropped, kept = copy.deepcopy(cache), 12 - removed
        cropped.crop(-removed)
        assert cropped.get_seq_length() == kept
        other = torch.cat([ids[:, :kept], ids.flip(1)[:, :5]], 1)
        longer = torch.cat([mask[:, :kept], mask.new_ones(3, 5)], 1)
        found = step(model, cropped, other[:, kept:], attention_mask=longer)
        with torch.no_grad():
            expected = model(
                other,
                attention_mask=longer,
                position_ids=(longer.cumsum(1) - 1).clamp(min=0),
                use_cache=False,
            ).logits
        assert_close(found, expected[:, kept:], atol=1e-4, rtol=1e-4)


def test_crop_refuses_tokens_that_were_not_recorded(linear, ids):
    model, cache = linear, hf.DynamicCache()
    step(model, cache, ids)
    with pytest.raises(UnsupportedError, match=r"last 3 tokens .* 0 are recorded"):
        cache.crop(-3)
    with pytest.raises(UnsupportedError, match="negative number, got 3"):
        cache.crop(3)
    assert cache.get_seq_length() == 12


def pickled(cache: Any) -> Any:
    return pickle.loads(pickle.dumps(cache))


@pytest.mark.parametrize(("save", "kept"), [(copy.deepcopy, 10), (pickled, 8), (pickled, 10)])
def test_a_copy_of_a_recording_cache_continues_and_is_cropped(save, kept, model, ids, padding):
    """A pickle does not contain the model, which the state without earlier tokens needs."""
    mask = padding("left", (12, 9, 8))
    cache = recording_cache()
    step(model, cache, ids[:, :3], attention_mask=mask[:, :3])
    step(model, cache, ids[:, 3:8], attention_mask=mask[:, :8])
    other = save(cache)
    for each in (cache, other):
        step(model, each, ids[:, 8:], attention_mask=mask)
        each.crop(kept - 12)
    found = step(model, other, ids[:, kept:], attention_mask=mask)
    assert torch.equal(found, step(model, cache, ids[:, kept:], attention_mask=mask))


def test_a_pickle_has_no_recorded_calls(model, ids):
    cache = recording_cache()
    step(model, cache, ids[:, :8])
    other = pickled(cache)
    assert copy.deepcopy(cache).crop(-3) is None
    with pytest.raises(UnsupportedError, match=r"last 3 tokens .* 0 are recorded"):
        other.crop(-3)
    assert other.get_seq_length() == 8


def gradients(model, cache, ids, mode):
    """Return the gradients of the last four tokens after a prefill of the others in a mode."""
    model.zero_grad()
    with mode():
        model(ids[:, :8], **cache_argument(cache))
    for tokens in (ids[:, 8:9], ids[:, 9:]):
        logits = model(tokens, **cache_argument(cache)).logits
    logits.square().mean().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("spec", GRADIENTS)
def test_a_prefill_without_gradients_is_continued_with_them(spec, llama, ids):
    backend, options = GRADIENTS[spec]
    model = attnzoo.swap(llama(), backend, **options)
    expected = gradients(model, hf.DynamicCache(), ids, torch.no_grad)
    assert any("attnzoo" in name for name in expected) == any(
        "attnzoo" in name for name, _ in model.named_parameters()
    )
    static = hf.StaticCache(config=model.config, max_cache_len=20)
    for cache, mode in ((hf.DynamicCache(), torch.inference_mode), (static, torch.no_grad)):
        found = gradients(model, cache, ids, mode)
        assert found.keys() == expected.keys()
        for name, x in found.items():
            assert_close(x, expected[name], msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("spec", GRADIENTS)
def test_calls_in_inference_mode_are_replayed_outside_it(spec, llama, ids):
    backend, options = GRADIENTS[spec]
    model = attnzoo.swap(llama(), backend, **options)
    caches = recording_cache(), recording_cache()
    for cache, mode in zip(caches, (torch.no_grad, torch.inference_mode), strict=True):
        with mode():
            model(ids, **cache_argument(cache))
        cache.crop(-3)
    expected, found = (model(ids[:, 9:], **cache_argument(cache)).logits for cache in caches)
    assert torch.equal(found, expected)
    found.sum().backward()


@pytest.mark.parametrize("layers", [{"0": "flash"}, {"1": "flash"}])
def test_a_refused_crop_changes_no_layer(layers, llama, ids):
    model = attnzoo.swap(llama(), "linear", layers=layers)
    cache = hf.DynamicCache()
    step(model, cache, ids[:, :9])
    with pytest.raises(UnsupportedError, match="last 3 tokens"):
        cache.crop(-3)
    assert [layer.get_seq_length() for layer in cache.layers] == [9, 9]
    found = step(model, cache, ids[:, 9:])
    assert_close(found, whole(model, ids)[:, 9:], atol=1e-4, rtol=1e-4)


def test_a_refused_crop_resets_states_in_a_dictionary(llama, ids):
    """As those of stock convolutions, which a crop replaces by item."""

    class Convolution(hf.cache_utils.DynamicLayer):
        def crop(self, tokens_to_remove):
            self.conv_states[0] = self.conv_states[0][..., :tokens_to_remove]

    model, layer = attnzoo.swap(llama(), "linear"), Convolution()
    cache = hf.DynamicCache()
    step(model, cache, ids[:, :9])
    layer.conv_states = {0: torch.randn(1, 3, 9)}
    before = layer.conv_states[0]
    cache.layers.insert(0, layer)
    with pytest.raises(UnsupportedError, match="last 3 tokens"):
        cache.crop(-3)
    assert layer.conv_states[0] is before


def test_shapes_of_keys_count_tokens(llama, ids):
    """The shape of the keys has the number of tokens; reading the keys raises an error."""
    models = llama(), attnzoo.swap(llama(), "linear", layers={"1": "flash"})
    for make in (hf.DynamicCache, lambda: hf.StaticCache(models[0].config, max_cache_len=20)):
        stock, cache = make(), make()
        for model, each in zip(models, (stock, cache), strict=True):
            step(model, each, ids)
        for layer, other in zip(cache.layers, stock.layers, strict=True):
            assert layer.keys.shape == other.keys.shape
            assert layer.values.shape == other.values.shape
            assert layer.keys.dtype == other.keys.dtype
        keys = cache.layers[0].keys
        assert (len(keys), keys.ndim, keys.device) == (3, 4, stock.layers[0].keys.device)
        assert "'linear'" in repr(keys)
        for read in (torch.isnan, torch.clone, lambda x: torch.cat([x, x], 2), lambda x: x[0]):
            with pytest.raises(UnsupportedError, match="backend 'linear', which keeps a state"):
                read(keys)
        assert int(cache.get_seq_length()) == 12


def test_static_cache_cannot_be_cropped(linear, ids):
    cache = hf.StaticCache(config=linear.config, max_cache_len=20)
    step(linear, cache, ids)
    with pytest.raises(UnsupportedError, match="DynamicCache"):
        cache.crop(-1)


def test_cache_of_another_backend_is_refused(linear, cache, ids):
    step(linear, cache, ids)
    attnzoo.swap(linear, "linear", feature_map="relu")
    with pytest.raises(UnsupportedError, match="cannot continue"):
        step(linear, cache, ids[:, :1])


def test_state_is_not_read_as_keys(linear, cache, ids):
    step(linear, cache, ids)
    for change in (
        lambda: attnzoo.swap(linear, "flash"),
        lambda: linear.set_attn_implementation("sdpa"),
        lambda: attnzoo.restore(linear),
    ):
        change()
        with pytest.raises(UnsupportedError, match="holds the state of backend"):
            step(linear, cache, ids[:, :1])


def test_keys_in_another_entry_of_the_cache(model, ids, monkeypatch):
    """A model that runs its layers in cycles may cache the keys of each cycle separately."""
    cache = hf.DynamicCache()
    update = cache.update
    monkeypatch.setattr(cache, "update", lambda k, v, i, **rest: update(k, v, i + 2, **rest))
    parts = [step(model, cache, ids[:, :8])]
    if model.model.layers[0].self_attn.attnzoo.capabilities.needs_hidden_states:
        with pytest.raises(UnsupportedError, match=r"keys of all 11 tokens.*hidden states of all"):
            step(model, cache, ids[:, 8:11])
        return
    parts += [step(model, cache, tokens) for tokens in ids[:, 8:].split((3, 1), 1)]
    assert_close(torch.cat(parts, 1), whole(model, ids), atol=1e-4, rtol=1e-4)


def test_copied_cache_continues_with_several_prompts(model, cache, ids):
    """The usual way to reuse the cache of a long common prompt."""
    step(model, cache, ids[:, :8])
    for rest in (ids[:, 8:], ids[:, 8:].flip(1)):
        found = step(model, copy.deepcopy(cache), rest)
        expected = whole(model, torch.cat([ids[:, :8], rest], 1))[:, 8:]
        assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert int(cache.get_seq_length()) == 8


def test_mixed_layers_share_one_cache(llama, ids, padding):
    """Masks are sized by the first layer of the cache, whichever kind it is."""
    mask = padding("left")
    for layers in ({"0": "flash"}, {"1": "flash"}):
        model = llama()
        attnzoo.swap(model, "linear", layers=layers)
        for cache in (
            hf.DynamicCache(),
            hf.StaticCache(config=model.config, max_cache_len=20),
        ):
            place = (mask.cumsum(1) - 1).clamp(min=0)
            logits = []
            for begin, end in ((0, 8), (8, 9), (9, 12)):
                given = {
                    "attention_mask": mask[:, :end],
                    "position_ids": place[:, begin:end],
                }
                logits.append(step(model, cache, ids[:, begin:end], **given))
            with torch.no_grad():
                expected = model(ids, attention_mask=mask, position_ids=place, use_cache=False)
            real = mask.bool()
            found = torch.cat(logits, 1)[real]
            assert_close(found, expected.logits[real], atol=1e-4, rtol=1e-4)


def test_keys_from_before_a_swap_are_refused(llama, ids):
    model, cache = llama(), hf.DynamicCache()
    model(ids[:, :5], **cache_argument(cache))
    for spec in ("linear", "longformer", "gated_linear"):
        attnzoo.swap(model, spec)
        with pytest.raises(UnsupportedError, match=r"already holds 5 tokens .*'flash' without"):
            model(ids[:, 5:], **cache_argument(cache))
    attnzoo.swap(model, "flash")
    found = model(ids[:, 5:], **cache_argument(cache)).logits
    torch.testing.assert_close(found, model(ids).logits[:, 5:], atol=1e-4, rtol=1e-4)
