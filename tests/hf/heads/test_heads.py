"""Pruned heads: the model equals one in which the outputs of these heads are set to zero."""

import json

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertModel,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import attnzoo
from attnzoo.errors import SpecError, UnsupportedError
from attnzoo.hf.heads import head_projections
from attnzoo.hf.layers import attention_layers
from attnzoo.hf.seam import cache_argument, output_cache
from tests.helpers import add_noise

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64}
OPT = {"ffn_dim": 40, "word_embed_proj_dim": 32, "intermediate_size": None}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**GROUPED)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**GROUPED, head_dim=16)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**GPT2, bos_token_id=1, eos_token_id=2)),
    "bert": lambda: BertForMaskedLM(BertConfig(**SIZES)),
    "opt": lambda: OPTForCausalLM(OPTConfig(**{**SIZES, **OPT})),
}
GROUP, ONE_EACH = {0: [0, 1], 1: [1, 2]}, {0: [0, 3], 1: [2, 3]}
UNEVEN = {0: [1], 1: [0, 1, 3]}


def noisy_model(name):
    torch.manual_seed(0)
    model = MODELS[name]().double().eval()
    add_noise(model, 0.05)
    return model


IDS = torch.arange(3, 21).view(2, 9)


@torch.no_grad()
def masked(model, heads):
    """Return the logits with the outputs of some heads set to zero."""
    hooks = []
    for layer in attention_layers(model):
        mask = torch.ones(layer.geometry.num_heads, dtype=torch.float64)
        mask[heads[layer.geometry.layer]] = 0

        def hook(_, args, mask=mask):
            return (args[0].unflatten(-1, (len(mask), -1)) * mask[:, None]).flatten(-2), *args[1:]

        hooks.append(head_projections(model, layer).output.register_forward_pre_hook(hook))
    found = model(IDS)[0]
    for one in hooks:
        one.remove()
    return found


def equal(found, expected):
    """Compare weights bit by bit; matrix products may depend on the position in memory."""
    weights = found.state_dict()
    assert set(weights) == set(expected.state_dict())
    assert all(torch.equal(weights[name], x) for name, x in expected.state_dict().items())
    torch.testing.assert_close(found(IDS)[0], expected(IDS)[0])


@pytest.mark.parametrize(
    ("name", "heads"),
    [
        ("llama", GROUP),
        ("llama", ONE_EACH),
        ("gpt2", UNEVEN),
        ("bert", UNEVEN),
        pytest.param("qwen3", GROUP, marks=pytest.mark.exhaustive),
        pytest.param("opt", UNEVEN, marks=pytest.mark.exhaustive),
    ],
)
@torch.no_grad()
def test_a_pruned_model_equals_a_masked_one(name, heads, tmp_path):
    model = noisy_model(name)
    expected, before = masked(model, heads), sum(p.numel() for p in model.parameters())
    assert attnzoo.prune_heads(model, heads) is model
    pruned = model(IDS)[0]
    torch.testing.assert_close(pruned, expected)
    per_head = before - sum(p.numel() for p in model.parameters())
    assert per_head >= sum(map(len, heads.values())) * 2 * 8 * 32
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    equal(again, model)
    counts = [layer.geometry.num_heads for layer in attention_layers(again)]
    assert counts == [4 - len(heads[0]), 4 - len(heads[1])]
    assert again.config.to_dict()["attnzoo_pruned_heads"] == {
        layer.name: heads[layer.geometry.layer] for layer in attention_layers(again)
    }


@pytest.mark.parametrize("attention", ["softmax", "linear"])
@torch.no_grad()
def test_a_pruned_model_is_swapped(attention):
    expected = masked(attnzoo.swap(noisy_model("llama"), attention), GROUP)
    model = attnzoo.swap(attnzoo.prune_heads(noisy_model("llama"), GROUP), attention)
    torch.testing.assert_close(model(IDS)[0], expected)
    attnzoo.restore(model)
    torch.testing.assert_close(model(IDS)[0], masked(noisy_model("llama"), GROUP))


@torch.no_grad()
def test_extras_of_a_pruned_model_are_saved(tmp_path):
    spec = {"backend": "linear", "options": {"feature_map": "hedgehog", "window": 4}}
    model = attnzoo.prune_heads(noisy_model("llama"), GROUP)
    attnzoo.swap(model, {**spec, "layers": {"1": "delta"}})
    for layer in attention_layers(model):
        add_noise(layer.module.attnzoo, 0.1)
    model.save_pretrained(tmp_path)
    equal(LlamaForCausalLM.from_pretrained(tmp_path).eval(), model)


@torch.no_grad()
def test_a_part_of_a_pruned_model_is_swapped(tmp_path):
    sizes = {**GROUPED, "head_dim": 8, "layer_types": ["full_attention"] * 2}
    vision = {**SIZES, "image_size": 28, "patch_size": 14}
    del vision["vocab_size"]
    config = Gemma3Config(text_config=sizes, vision_config=vision, mm_tokens_per_image=4)
    model = Gemma3ForConditionalGeneration(config).eval()
    name = "model.language_model.layers.0.self_attn"
    attnzoo.prune_heads(model, {name: [0, 1]})
    attnzoo.swap(model, {"text_config": "delta"})
    for layer in attention_layers(model.model.language_model):
        add_noise(layer.module.attnzoo, 0.1)
    model.save_pretrained(tmp_path)
    again = Gemma3ForConditionalGeneration.from_pretrained(tmp_path).eval()
    equal(again.model.language_model, model.model.language_model)


def test_a_swapped_model_is_not_pruned():
    model = attnzoo.swap(noisy_model("llama"), "linear")
    with pytest.raises(UnsupportedError, match=r"LlamaForCausalLM is swapped.*original model"):
        attnzoo.prune_heads(model, GROUP)
    assert model.model.layers[0].self_attn.q_proj.out_features == 32


@pytest.mark.parametrize("attention", [None, "linear"])
@torch.no_grad()
def test_decoding_with_a_cache(attention):
    model = attnzoo.prune_heads(noisy_model("llama"), {0: [0, 1]})
    if attention:
        attnzoo.swap(model, attention)
    expected = model(IDS).logits
    out = model(IDS[:, :4], use_cache=True)
    found = [out.logits]
    for t in range(4, 9):
        out = model(IDS[:, t : t + 1], **cache_argument(output_cache(out)), use_cache=True)
        found.append(out.logits)
    torch.testing.assert_close(torch.cat(found, 1), expected)
    assert model.generate(IDS, max_new_tokens=2, do_sample=False).shape == (2, 11)


@torch.no_grad()
def test_pruning_again_counts_heads_as_before():
    once = attnzoo.prune_heads(noisy_model("bert"), {0: [0, 2], 1: [3]})
    twice = attnzoo.prune_heads(noisy_model("bert"), {0: [0]})
    attnzoo.prune_heads(twice, {0: [0, 2], 1: [3]})
    equal(once, twice)
    assert once.config.attnzoo_pruned_heads == twice.config.attnzoo_pruned_heads


@torch.no_grad()
def test_a_base_model_of_a_pruned_model(tmp_path):
    model = attnzoo.prune_heads(noisy_model("llama"), GROUP)
    model.save_pretrained(tmp_path / "whole")
    base = LlamaModel.from_pretrained(tmp_path / "whole").eval()
    equal(base, model.model)
    base.save_pretrained(tmp_path / "base")
    again = LlamaModel.from_pretrained(tmp_path / "base").eval()
    equal(again, base)
    encoder = attnzoo.prune_heads(noisy_model("bert"), UNEVEN)
    encoder.save_pretrained(tmp_path / "encoder")
    inner = BertModel.from_pretrained(tmp_path / "encoder", add_pooling_layer=False).eval()
    equal(inner, encoder.bert)


def test_gradients_reach_the_smaller_weights():
    model = attnzoo.prune_heads(noisy_model("llama"), GROUP)
    model(IDS, labels=IDS).loss.backward()
    assert model.model.layers[0].self_attn.q_proj.weight.grad.shape == (16, 32)


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ({0: [0]}, r"whole groups \(\[\[0, 1\], \[2, 3\]\]\), or the same number"),
        ({0: [0, 1, 2, 3]}, "would have no heads"),
        ({0: [4]}, "has heads 0 to 3"),
        ({2: [0, 1]}, "there is no layer 2; name one of model.layers.0.self_attn"),
        ({"layers": [0, 1]}, "there is no layer 'layers'"),
    ],
)
def test_choices_of_heads_that_are_refused(heads, message):
    model = noisy_model("llama")
    with pytest.raises((SpecError, UnsupportedError), match=message):
        attnzoo.prune_heads(model, {1: [0, 1], **heads})
    assert not hasattr(model.config, "attnzoo_pruned_heads")
    assert model.model.layers[1].self_attn.q_proj.out_features == 32


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: T5ForConditionalGeneration(T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1,
                                                     num_heads=2, vocab_size=9)), "not found"),
        (lambda: Phi3ForCausalLM(Phi3Config(**GROUPED, pad_token_id=0)), "not found"),
    ],
)  # fmt: skip
def test_families_that_are_refused(model, message):
    model = model()
    name = attention_layers(model)[0].name
    with pytest.raises(UnsupportedError, match=f"{name}.*{message}.*Llama, Mistral"):
        attnzoo.prune_heads(model, {name: [0]})


@pytest.mark.parametrize("record", [["0"], {"model.layers.0.self_attn": "0"}, {"x": [True]}])
def test_a_config_is_data(record, tmp_path):
    attnzoo.prune_heads(noisy_model("llama"), GROUP).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["attnzoo_pruned_heads"] = record
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SpecError, match="attnzoo_pruned_heads must be lists of head numbers"):
        LlamaForCausalLM.from_pretrained(tmp_path)
