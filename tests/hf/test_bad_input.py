"""User errors raise a ValueError that gives the place, the value and the accepted values.

``test_install.py`` has broken files, ``test_cache.py`` caches. ``test_convert.py`` tests that a
failed swap changes nothing.
"""

import math
from typing import Any

import pytest
import torch
import transformers as hf

import attnzoo
from attnzoo.errors import (
    AttnzooError,
    ConfigError,
    SpecError,
    UnknownBackendError,
    UnsupportedError,
)
from attnzoo.hf import seam
from attnzoo.hf.attention.call import layer_backend
from attnzoo.hf.layers import attention_layers
from tools.family_sweep.build import make_model

# (spec, options, class of the error, parts of its message)
SPECS: list[tuple[Any, dict[str, Any], type[Exception], list[str]]] = [
    ("linaer", {}, UnknownBackendError, ["'linaer'", "Did you mean 'linear'", "gated_linear"]),
    ("xyz", {}, UnknownBackendError, ["'xyz'", "Available: ", "flash", "softmax"]),
    (7, {}, AttnzooError, ["7"]),
    ("linear", {"feture_map": "relu"}, ConfigError, ["'linear'", "Did you mean 'feature_map'"]),
    ("linear", {"feature_map": "elu1"}, ConfigError, ["'elu1'", "Did you mean 'elu+1'", "relu"]),
    ("linear", {"chunk_size": "64"}, ConfigError, ["'linear'", "chunk_size", "'64'", "int"]),
    ("linear", {"chunk_size": 2.5}, ConfigError, ["chunk_size", "2.5"]),
    ("linear", {"chunk_size": True}, ConfigError, ["chunk_size", "True"]),
    ("linear", {"chunk_size": -1}, ConfigError, ["chunk_size", "-1", "at least 1"]),
    ("linear", {"eps": math.nan}, ConfigError, ["eps", "nan"]),
    ("linear", {"eps": math.inf}, ConfigError, ["eps", "inf"]),
    ("linear", {"normalize": "yes"}, ConfigError, ["normalize", "'yes'", "bool"]),
    ("gated_linear", {"gate": "glaa"}, ConfigError, ["'glaa'", "Did you mean 'gla'", "retnet"]),
    ("flash", {"window": 0}, ConfigError, ["'flash'", "window", "0", "at least 1"]),
    ("flash", {"window": math.nan}, ConfigError, ["window", "nan"]),
    ("flash", {"impl": "cudnn"}, ConfigError, ["impl", "'cudnn'", "'sdpa'", "'xformers'"]),
    ("softmax", {"chunk_size": 4}, ConfigError, ["'softmax'", "'chunk_size'", "window"]),
    ("linear", {"layers": {"0-5": "flash"}}, SpecError, ["layer 2, 3, 4, 5", "0 to 1"]),
    ("linear", {"layers": {"1-0": "flash"}}, SpecError, ["'1-0'", "0-1,11"]),
    ("linear", {"layers": {"last": "flash"}}, SpecError, ["'last'", "0-1,11"]),
    ("linear", {"layers": {"0": "flash", "0-1": "flash"}}, SpecError, ["Layer 0", "twice"]),
    ("linear", {"layers": ["0"]}, SpecError, ["layers", "['0']"]),
    ("linear", {"layers": {"0": "flahs"}}, UnknownBackendError, ["Did you mean 'flash'"]),
    ("linear", {"else_": "sofmax"}, UnknownBackendError, ["Did you mean 'softmax'"]),
    ({"version": 2, "backend": "linear"}, {}, SpecError, ["version 2", "upgrade attnzoo"]),
    ({"version": "1", "backend": "linear"}, {}, SpecError, ["'1'", "integer"]),
    ({"backend": "linear", "optoins": {}}, {}, SpecError, ["'optoins'", "Did you mean 'options'"]),
    ({"options": {}}, {}, SpecError, ["backend"]),
    (["linear"], {}, SpecError, ["['linear']"]),
]


@pytest.mark.parametrize(("spec", "options", "kind", "parts"), SPECS)
def test_specs(spec, options, kind, parts, llama):
    with pytest.raises(kind) as error:
        attnzoo.swap(llama(), spec, **options)
    assert isinstance(error.value, ValueError)
    for part in parts:
        assert part in str(error.value)


def test_refused_layers_are_named_with_an_alternative(redraw):
    config = hf.MistralConfig(
        vocab_size=99,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        sliding_window=5,
    )
    with pytest.raises(ValueError, match=r"Layer 0 \(model\.layers\.0\.self_attn\)") as error:
        attnzoo.swap(hf.MistralForCausalLM(config), "linear")
    for part in ("'linear'", "sliding window of 5 tokens", "else", "2 more layers"):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("model_class", "config"),
    [
        (
            hf.MambaForCausalLM,
            hf.MambaConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, state_size=2),
        ),
        (
            hf.XLNetModel,
            hf.XLNetConfig(vocab_size=9, d_model=8, n_layer=1, n_head=2, d_inner=8),
        ),
    ],
)
def test_models_without_layers_of_the_interface(model_class, config):
    with pytest.raises(SpecError) as swapped:
        attnzoo.swap(model_class(config), "linear")
    config.attnzoo = attnzoo.AttentionSpec("linear").to_dict()
    config._attn_implementation = "attnzoo"
    with pytest.raises(ValueError, match=model_class.__name__) as built:
        model_class(config)
    for part in (model_class.__name__, "attention interface", "Llama", "Whisper"):
        assert part in str(swapped.value)
    assert "attention interface" in str(built.value)


def test_heads_not_divisible_by_key_heads(llama_config):
    model = hf.LlamaForCausalLM(llama_config())
    for layer in model.model.layers:
        layer.self_attn.num_key_value_heads = 3
    with pytest.raises(ConfigError, match=r"layers\.0\.self_attn: 4 query heads over 3 key heads"):
        attnzoo.swap(model, "linear")


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64])
def test_dtypes(dtype, llama):
    model = llama()
    attnzoo.swap(model, "linear")
    backend = model.model.layers[1].self_attn.attnzoo
    q = torch.ones(1, 4, 3, 8, dtype=dtype)
    with pytest.raises(ValueError, match=r"layers\.1.*'linear'") as error:
        backend(q, q[:, :2], q[:, :2])
    for part in (str(dtype)[6:], "bfloat16, float16, float32, float64"):
        assert part in str(error.value)


def test_xformers_on_a_cpu_raises_with_the_reason(llama, ids):
    model = llama()
    attnzoo.swap(model, "flash", impl="xformers")
    where = r"model\.layers\.0\.self_attn: backend 'flash'"
    with pytest.raises(ValueError, match=rf"{where}.*impl='xformers'.*(sdpa|auto)"):
        model(ids)


def test_messages_are_short(llama):
    for spec, options, kind, _ in SPECS:
        with pytest.raises(kind) as error:
            attnzoo.swap(llama(), spec, **options)
        assert len(str(error.value)) < 400


@pytest.mark.parametrize(
    ("backend", "options"), [("flash", {}), ("flash", {"window": 4}), ("longformer", {"window": 4})]
)
def test_a_cache_of_another_dtype(backend, options, llama, ids):
    model = attnzoo.swap(llama(), backend, **options)
    with torch.no_grad():
        cache = seam.output_cache(model(ids))
        model.bfloat16()
        with pytest.raises(UnsupportedError, match="float32 and the queries are bfloat16"):
            model(ids[:, :1], **seam.cache_argument(cache))
        with torch.autocast("cpu", torch.bfloat16):  # converts what it computes with
            model.float()(ids)


@pytest.mark.exhaustive
def test_growing_states_of_a_compiled_forward_are_named(llama, ids):
    model = attnzoo.swap(llama(num_hidden_layers=1), "block_sparse")
    cache = hf.StaticCache(model.config, max_cache_len=20)
    torch._dynamo.reset()
    with torch.no_grad(), pytest.raises(UnsupportedError, match=r"under torch\.compile"):
        torch.compile(model, backend="eager")(ids, **seam.cache_argument(cache))
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", ["linear", "longformer", "block_sparse"])
def test_bidirectional_layers_with_a_cache(backend, llama, ids):
    model = attnzoo.swap(llama(is_causal=False), backend)
    with pytest.raises(UnsupportedError, match=rf"'{backend}'.*bidirectional.*use_cache=False"):
        model(ids)
    model(ids, use_cache=False)


@pytest.mark.filterwarnings("ignore:.*in every attention layer")
@pytest.mark.parametrize("backend", ["linear", "longformer"])
@pytest.mark.parametrize(
    ("family", "masks"),
    [
        ("t5gemma2", ["the decoder's and the encoder's tokens", "by a function of its own"]),
        ("parakeet_encoder", ["relative positions"]),
    ],
)
def test_masks_of_the_model_are_refused_when_swapping(family, masks, backend):
    model = make_model(family, 1.0)
    options = {} if backend == "linear" else {"window": 4}
    with pytest.raises(UnsupportedError, match="cannot serve it"):
        attnzoo.swap(model, backend, **options)
    attnzoo.swap(model, backend, else_="flash", **options)
    layers = attention_layers(model)
    for mask in masks:
        own = [x for x in layers if mask in x.geometry.own_mask]
        assert own, mask
        assert {layer_backend(x.module).name for x in own} == {"flash"}


def test_a_gate_of_joined_hidden_states(ids):
    """Layers of Zamba 2 get two hidden states, joined."""
    model = attnzoo.swap(make_model("zamba2", 1.0), "delta")
    assert {x.geometry.hidden_size for x in attention_layers(model)} == {64}
    assert model(ids, use_cache=False).logits.isfinite().all()


def test_a_renamed_argument_of_transformers_is_named(monkeypatch):
    monkeypatch.setattr(seam, "create_causal_mask", lambda config, brand_new: None)
    with pytest.raises(UnsupportedError, match=r"takes config, brand_new \(known: cache"):
        seam._cache_argument()
