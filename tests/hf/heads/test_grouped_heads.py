"""Conversion of multi-head to grouped-query attention."""

import json
import sys

import pytest
import torch
import transformers as hf

import attnzoo
from attnzoo.cli import main
from attnzoo.errors import SpecError
from attnzoo.evaluation.models import embedded_model_path
from attnzoo.hf.seam import output_cache
from tests.helpers import add_noise

SIZES = {
    "vocab_size": 384,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
FAMILIES = {
    "llama": lambda heads: hf.LlamaConfig(num_key_value_heads=heads, **SIZES),
    "biases": lambda heads: hf.Qwen2Config(num_key_value_heads=heads, **SIZES),
    "norms of heads": lambda heads: hf.Qwen3Config(num_key_value_heads=heads, head_dim=16, **SIZES),
}
TOKENS = torch.randint(2, 384, (2, 24), generator=torch.Generator().manual_seed(0))


def noisy_model(config):
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config).eval()
    add_noise(model, 0.1)
    return model


def with_equal_heads(grouped, config):
    """Return the multi-head model that computes what a model with two key heads does."""
    state = dict(grouped.state_dict())
    for name, x in state.items():
        if ".k_proj." in name or ".v_proj." in name:
            heads = x.view(2, len(x) // 2, *x.shape[1:])
            state[name] = heads.repeat_interleave(4, 0).flatten(0, 1)
    model = noisy_model(config)
    model.load_state_dict(state)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_heads_are_merged_exactly(family):
    grouped = noisy_model(FAMILIES[family](2))
    dense = with_equal_heads(grouped, FAMILIES[family](8))
    with torch.no_grad():
        expected = grouped(TOKENS).logits
        torch.testing.assert_close(dense(TOKENS).logits, expected)
        converted = attnzoo.convert_heads(dense, 2)
        torch.testing.assert_close(converted(TOKENS).logits, expected)
    assert converted.config.num_key_value_heads == 2
    assert dense.config.num_key_value_heads == 8
    cache = output_cache(converted(TOKENS, use_cache=True))
    assert cache.layers[0].keys.shape[1] == 2


def test_heads_are_means_of_neighbours():
    model = noisy_model(FAMILIES["llama"](8)).to(torch.bfloat16)
    converted = attnzoo.convert_heads(model, 4)
    weight = model.model.layers[1].self_attn.v_proj.weight
    found = converted.model.layers[1].self_attn.v_proj.weight
    for head in range(4):
        pair = weight.double()[8 * head : 8 * head + 8]
        mean = ((pair[:4] + pair[4:]) / 2).to(torch.bfloat16)
        assert torch.equal(found[4 * head : 4 * head + 4], mean)
    for name, x in converted.state_dict().items():
        if "k_proj" not in name and "v_proj" not in name:
            assert torch.equal(x, model.state_dict()[name]), name


@pytest.mark.parametrize(
    ("model", "heads", "message"),
    [
        (
            lambda: noisy_model(FAMILIES["llama"](8)),
            3,
            "8 key and value heads, got 3; give one of 1, 2, 4",
        ),
        (lambda: noisy_model(FAMILIES["llama"](8)), 8, r"got 8; give one of 1, 2, 4$"),
        (lambda: noisy_model(FAMILIES["llama"](1)), 1, r"none: it has one"),
        (
            lambda: noisy_model(hf.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64)),
            1,
            "gpt2 has no integer num_key_value_heads",
        ),
        (
            lambda: noisy_model(hf.Phi3Config(num_key_value_heads=8, **SIZES)),
            2,
            "qkv_proj.weight has 96 rows, .* queries, keys and values in one weight",
        ),
        (
            lambda: noisy_model(hf.Olmo2Config(num_key_value_heads=8, **SIZES)),
            2,
            "k_norm.weight of olmo2 depends on the number of key heads",
        ),
    ],
)
def test_unsupported_models_are_refused(model, heads, message):
    with pytest.raises(SpecError, match=message):
        attnzoo.convert_heads(model(), heads)


def test_a_swapped_model_is_refused():
    model = noisy_model(FAMILIES["llama"](8))
    attnzoo.swap(model, "linear")
    with pytest.raises(SpecError, match="convert the heads of the original model, then swap it"):
        attnzoo.convert_heads(model, 2)
    attnzoo.restore(model)
    attnzoo.swap(attnzoo.convert_heads(model, 2), "linear")


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["attnzoo", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code or 0


def test_a_converted_folder_is_recovered(tmp_path, monkeypatch, capsys):
    source, out = tmp_path / "source", tmp_path / "out"
    noisy_model(FAMILIES["llama"](8)).save_pretrained(source)
    hf.AutoTokenizer.from_pretrained(embedded_model_path()).save_pretrained(source)
    assert run(monkeypatch, "convert-heads", source, "--kv-heads", 2, "--out", out) == 0
    assert "8 key and value heads are now 2" in " ".join(capsys.readouterr().out.split())
    assert json.loads((out / "config.json").read_text())["num_key_value_heads"] == 2
    assert run(monkeypatch, "convert-heads", source, "--kv-heads", 2, "--out", out) == 2
    text = tmp_path / "text.txt"
    text.write_text("alpha beta gamma delta " * 60)
    train = ["--data", text, "--length", 32, "--batch", 2, "--out", tmp_path / "new"]
    steps = ["--transfer-steps", 1, "--distil-steps", 1]
    attention = ["--attention", "linear:feature_map=hedgehog"]
    assert run(monkeypatch, "recover", out, *train, *steps, *attention) == 0
    model = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "new")
    assert model.model.layers[0].self_attn.attnzoo.geometry.num_key_heads == 2
