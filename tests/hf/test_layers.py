"""Attention modules: which modules they are, their layer numbers and geometry."""

from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

import attnzoo
from attnzoo.errors import UnsupportedError
from attnzoo.hf.layers import (
    attention_layers,
    layer_number,
    read_geometry,
    unwrap_model,
)
from tests.helpers import MODEL_SIZES


def geometries(model: nn.Module) -> dict[str, Any]:
    return {layer.name: layer.geometry for layer in attention_layers(model)}


def test_grouped_heads_and_scale():
    config = hf.GraniteConfig(**MODEL_SIZES, num_key_value_heads=2, attention_multiplier=0.2)
    found = geometries(hf.GraniteForCausalLM(config))
    assert list(found) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert found["model.layers.1.self_attn"] == attnzoo.Geometry(
        num_heads=4,
        num_key_heads=2,
        head_dim=8,
        hidden_size=32,
        scale=0.2,
        max_length=2048,
        layer=1,
        name="model.layers.1.self_attn",
    )


def test_head_size_may_differ_from_the_quotient():
    config = hf.Qwen3Config(**MODEL_SIZES, num_key_value_heads=2, head_dim=16)
    assert all(g.head_dim == 16 for g in geometries(hf.Qwen3ForCausalLM(config)).values())


def test_windows_caps_and_sinks():
    sizes = {**MODEL_SIZES, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 5}
    kinds = ["sliding_attention", "full_attention"]
    gemma = geometries(
        hf.Gemma2ForCausalLM(
            hf.Gemma2Config(**sizes, layer_types=kinds, attn_logit_softcapping=30.0)
        )
    )
    assert [g.window for g in gemma.values()] == [5, None]
    exaone = geometries(hf.Exaone4ForCausalLM(hf.Exaone4Config(**sizes, layer_types=kinds)))
    assert [g.window for g in exaone.values()] == [5, None]
    assert [g.softcap for g in gemma.values()] == [30.0, 30.0]
    oss = geometries(
        hf.GptOssForCausalLM(hf.GptOssConfig(**sizes, layer_types=kinds, num_local_experts=2))
    )
    assert [g.window for g in oss.values()] == [5, None]
    assert all(g.sinks for g in oss.values())
    layer = hf.LlamaModel(hf.LlamaConfig(**MODEL_SIZES)).layers[0].self_attn
    assert not read_geometry(layer, "layers.0.self_attn", layer).sinks
    layer.sink_proj = nn.Linear(4, 4)  # Inkling 2 makes them of each query's token
    assert read_geometry(layer, "layers.0.self_attn", layer).sinks
    mistral = hf.MistralForCausalLM(
        hf.MistralConfig(**{k: v for k, v in sizes.items() if k != "head_dim"})
    )
    assert [g.window for g in geometries(mistral).values()] == [5, 5]


def test_longest_sequences_of_whisper():
    config = hf.WhisperConfig(
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        max_source_positions=20,
        max_target_positions=32,
    )
    found = geometries(hf.WhisperModel(config))
    assert {name: g.max_length for name, g in found.items()} == {
        "encoder.layers.0.self_attn": 20,
        "decoder.layers.0.self_attn": 32,
        "decoder.layers.0.encoder_attn": 20,
    }


def test_position_bias():
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    found = geometries(hf.T5Model(hf.T5Config(vocab_size=99, **sizes)))
    assert len(found) == 6
    for name, geometry in found.items():  # all layers have that of the first one
        assert geometry.position_bias == ("EncDecAttention" not in name)
    for kind, expected in (("relative", True), ("relative_key", True), ("rotary", False)):
        sizes = {**MODEL_SIZES, "num_hidden_layers": 1, "vocab_size": None}
        config = hf.Wav2Vec2BertConfig(**sizes)
        config.position_embeddings_type = kind
        (geometry,) = geometries(hf.Wav2Vec2BertModel(config)).values()
        assert geometry.position_bias == expected
    assert not any(
        g.position_bias for g in geometries(hf.BertModel(hf.BertConfig(**MODEL_SIZES))).values()
    )


def test_layer_numbers():
    module = nn.Module()
    assert layer_number("encoder.layer.3.attention.self", module) == 3
    assert layer_number("attention", module) == 0
    module.layer_idx = 5
    assert layer_number("encoder.layer.3.attention.self", module) == 5


def test_heads_that_cannot_be_found_are_refused():
    with pytest.raises(UnsupportedError, match=r"blocks\.0\.attn: the number of heads .* Module"):
        read_geometry(nn.Module(), "blocks.0.attn", nn.Module())


def test_models_are_unwrapped():
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**MODEL_SIZES))
    assert unwrap_model(model) is model
    assert unwrap_model(nn.Sequential(model)) is model
    assert unwrap_model(torch.compile(model)) is model
    assert unwrap_model(nn.Linear(2, 2)) is None


def test_layers_with_chunks_are_kept_exact():
    """A backend that would ignore Llama 4's chunks is refused when it is built."""
    sizes = {
        **MODEL_SIZES,
        "num_hidden_layers": 4,
        "head_dim": 8,
        "num_local_experts": 2,
        "num_key_value_heads": 2,
    }
    config = hf.Llama4TextConfig(**sizes, attention_chunk_size=4, intermediate_size_mlp=32)
    model = hf.Llama4ForCausalLM(config).eval()
    assert [x.chunk_size for x in geometries(model).values()] == [4, 4, 4, None]
    with pytest.raises(UnsupportedError, match="the layer attends in chunks of 4 tokens"):
        attnzoo.swap(model, "linear")
    attnzoo.swap(model, "linear", else_="flash")
    assert [row.backend for row in attnzoo.describe(model)] == ["flash"] * 3 + ["linear"]
    model(torch.arange(12)[None])
