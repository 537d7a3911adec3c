"""What vLLM cannot serve is refused by name before an engine starts, and never run as softmax."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import models
import pytest
import torch
from attnzoo_vllm import config as prepared
from attnzoo_vllm import register, versions
from attnzoo_vllm.layer import KeysLayer
from transformers import (
    AutoConfig,
    BertConfig,
    BertForMaskedLM,
    CohereConfig,
    Gemma2Config,
    GraniteConfig,
    MistralConfig,
    MixtralConfig,
    ModernBertDecoderConfig,
    OPTConfig,
    RecurrentGemmaConfig,
)
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs

import attnzoo

register()


def engine_config(folder, **options):
    """Return what vLLM makes of a folder before it starts."""
    return EngineArgs(model=str(folder), max_model_len=512, **options).create_engine_config()


@pytest.fixture
def spec_folder(tmp_path):
    """Return a function that saves the embedded model's config with a spec, without weights."""

    def save(**spec):
        config = json.loads((models.EMBEDDED / "config.json").read_text())
        config["attnzoo"] = {"version": 1, "backend": "flash"} | spec
        (tmp_path / "config.json").write_text(json.dumps(config))
        return models.finish(tmp_path)

    return save


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"backend": "reformer"}, "does not serve backend 'reformer'"),
        ({"backend": "longformer"}, "does not serve backend 'longformer'"),
        (
            {"backend": "block_sparse", "options": {"query_block": 4}},
            "'block_sparse' continues without an indexer and with query_block=1 only",
        ),
        ({"backend": "block_sparse", "options": {"score": "indexer"}}, "without an indexer"),
        (
            {"backend": "block_sparse", "options": {"decoding": "exact"}},
            "prefix caching, preemption.*Set decoding='sparse'",
        ),
        ({"backend": "linformer", "options": {"block": 64}}, "does not serve backend 'linformer'"),
        ({"layers": {"2": {"backend": "reformer"}}}, r"layers\.2.*Give the layer 'flash'"),
    ],
)
def test_backends(spec, words, spec_folder):
    with pytest.raises(ValueError, match=words):
        engine_config(spec_folder(**spec))


def test_first_tokens_outside_of_a_window_of_the_model(tmp_path):
    config = MistralConfig(sliding_window=8, num_hidden_layers=1).to_dict()
    config["architectures"] = ["MistralForCausalLM"]
    options = {"window": 4, "num_sinks": 2}
    config["attnzoo"] = {"version": 1, "backend": "flash", "options": options}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"sliding window of the model.*Leave num_sinks out"):
        engine_config(models.finish(tmp_path))


def test_keys_in_another_dtype(spec_folder):
    """A backend that reads vLLM's pages reads no quantised keys."""
    config = AutoConfig.from_pretrained(spec_folder(options={"window": 8, "num_sinks": 2}))
    backend = prepared.find_backends(config)[0]
    engine = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={}))
    with set_current_vllm_config(engine):
        layer = KeysLayer(backend, "layer", torch.bfloat16, 0.3)
    for dtype in ("auto", "bfloat16", "fp8"):
        engine.cache_config = SimpleNamespace(cache_dtype=dtype, block_size=32)
        if dtype == "fp8":
            with pytest.raises(ValueError, match="leave out --kv-cache-dtype"):
                layer.get_kv_cache_spec(engine)
        else:
            assert layer.get_kv_cache_spec(engine).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tensor_parallel_size": 2}, "with tensor parallelism"),
        ({"pipeline_parallel_size": 2}, "with pipeline parallelism"),
        ({"enable_lora": True}, "with LoRA"),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2,
                                    "prompt_lookup_max": 3}},
            "with speculative decoding",
        ),
    ],
)  # fmt: skip
def test_settings(options, words, spec_folder):
    with pytest.raises(ValueError, match=words):
        engine_config(spec_folder(backend="linear"), **options)


def test_versions(monkeypatch, spec_folder):
    monkeypatch.setattr("vllm.__version__", "0.9.1")
    with pytest.raises(
        ValueError, match=f"tested with vLLM {versions.OLDEST} to {versions.NEWEST}.*0.9.1"
    ):
        engine_config(spec_folder(backend="linear"))


def test_encoders_and_pruned_heads(tmp_path, spec_folder):
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    model = BertForMaskedLM(BertConfig(num_hidden_layers=1, vocab_size=384, **sizes))
    attnzoo.swap(model, "linear")
    model.save_pretrained(tmp_path / "bert")
    with pytest.raises(ValueError, match="BertForMaskedLM is not a causal language model"):
        engine_config(models.finish(tmp_path / "bert"))
    config = AutoConfig.from_pretrained(spec_folder(backend="linear"))
    config.attnzoo_pruned_heads = {"0": [1]}
    with pytest.raises(ValueError, match="have lost heads"):
        prepared.prepare(config)


@pytest.mark.parametrize("is_old", [False, True], ids=["own class name", "class name of softmax"])
def test_folders_of_all_versions_get_one_class(is_old, spec_folder):
    folder = models.finish(spec_folder(layers={"1": {"backend": "linear"}}), is_old=is_old)
    found = engine_config(folder).model_config
    assert found.architecture == "AttnzooLlamaForCausalLM"
    assert found.is_hybrid
    types = found.hf_config.layer_types
    assert types == ["full_attention", "linear_attention", "full_attention", "full_attention"]
    restored = prepared.restore(found.hf_config)
    assert restored.architectures == ["LlamaForCausalLM"]
    assert not hasattr(restored, "layer_types")


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        (GraniteConfig(logits_scaling=0.37), 1 / 0.37),
        (CohereConfig(logit_scale=0.3), 0.3),
        (Gemma2Config(final_logit_softcapping=11.0), 1.0),
        (MixtralConfig(num_local_experts=2), 1.0),
        (OPTConfig(), 1.0),
        (RecurrentGemmaConfig(logits_soft_cap=11.0), None),
        (ModernBertDecoderConfig(), None),
    ],
    ids=lambda x: getattr(x, "model_type", ""),
)
def test_what_classes_compute_beside_their_heads(config, scale):
    """A factor of the logits is found, and what vLLM does not compute is refused."""
    config.attnzoo = attnzoo.AttentionSpec("softmax")
    if scale is None:
        with pytest.raises(ValueError, match="computes its logits otherwise than by one head"):
            prepared.logits_scale(config)
    else:
        assert prepared.logits_scale(config) == pytest.approx(scale)


def test_a_model_without_states_is_not_hybrid(spec_folder):
    assert not engine_config(spec_folder(options={"window": 8})).model_config.is_hybrid


WITHOUT_PLUGIN = """
import sys
from vllm.engine.arg_utils import EngineArgs
for impl in ("auto", "vllm", "transformers"):
    try:
        EngineArgs(model=sys.argv[1], model_impl=impl).create_engine_config()
    except ValueError as error:
        assert "AttnzooLlamaForCausalLM" in str(error), error
    else:
        raise SystemExit(impl)
"""


def test_without_the_plugin_vllm_refuses_the_folder(spec_folder):
    command = [sys.executable, "-c", WITHOUT_PLUGIN, str(spec_folder(backend="linear"))]
    environment = os.environ | {"VLLM_PLUGINS": "none"}
    subprocess.run(command, env=environment, check=True, timeout=300)


def test_a_plain_model_is_left_alone():
    found = engine_config(models.EMBEDDED, dtype=torch.float32).model_config
    assert found.architecture == "LlamaForCausalLM"
