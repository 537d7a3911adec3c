"""Swap and restore: what they change in a model, and that a failed swap changes nothing."""

import copy
import json
import pickle
import warnings
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

import attnzoo
from attnzoo.errors import AttnzooError, SpecError, UnsupportedError
from attnzoo.hf.attention.call import LayerHook


def snapshot(model: Any) -> tuple[Any, ...]:
    """Return everything in a model that a swap could change."""
    return (
        {name: x.clone() for name, x in model.state_dict().items()},
        json.dumps(model.config.to_dict(), sort_keys=True, default=str),
        model.config._attn_implementation,
        sorted(name for name, _ in model.named_modules()),
        sum(len(m._forward_pre_hooks) for m in model.modules()),
    )


def same(first: tuple[Any, ...], second: tuple[Any, ...]) -> bool:
    tensors = first[0].keys() == second[0].keys() and all(
        torch.equal(x, second[0][name]) for name, x in first[0].items()
    )
    return tensors and first[1:] == second[1:]


def backends(model: Any) -> list[str]:
    return [m.attnzoo.name for m in model.modules() if hasattr(m, "attnzoo")]


def logits(model: Any, ids: Any) -> Any:
    with torch.no_grad():
        return model(ids).logits


# -- swap, restore -------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("backend", ["softmax", "flash", "linear", "gated_linear"])
def test_restore_undoes_a_swap_bit_for_bit(backend, implementation, llama, ids):
    model = llama()
    model.set_attn_implementation(implementation)
    before, expected = snapshot(model), logits(model, ids)
    attnzoo.swap(model, backend)
    assert backends(model) == [backend] * 2
    assert not same(snapshot(model), before)
    attnzoo.restore(model)
    assert same(snapshot(model), before)
    assert torch.equal(logits(model, ids), expected)


def test_second_swap_replaces_the_first(llama, ids):
    once, twice = llama(), llama()
    attnzoo.swap(once, "linear", feature_map="relu")
    attnzoo.swap(twice, "gated_linear", gate="gla")
    attnzoo.swap(twice, "linear", feature_map="relu")
    assert same(snapshot(twice), snapshot(once))
    assert torch.equal(logits(twice, ids), logits(once, ids))
    attnzoo.restore(twice)
    assert torch.equal(logits(twice, ids), logits(llama(), ids))


def test_restoring_an_unswapped_model_warns_and_does_nothing(llama, ids):
    model = llama()
    before = snapshot(model)
    with pytest.warns(UserWarning, match="LlamaForCausalLM is not swapped"):
        attnzoo.restore(model)
    assert same(snapshot(model), before)
    attnzoo.swap(model, "linear")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attnzoo.restore(model)
    with pytest.warns(UserWarning, match="is not swapped"):
        attnzoo.restore(model)
    with pytest.warns(UserWarning, match="Linear is not swapped"):
        attnzoo.restore(nn.Linear(2, 2))


def test_restore_returns_to_the_implementation_before_the_swap(llama):
    model = llama()
    attnzoo.swap(model, "linear")
    attnzoo.restore(model)
    model.set_attn_implementation("sdpa")
    attnzoo.swap(model, "flash")
    attnzoo.swap(model, "linear")
    attnzoo.restore(model)
    assert model.config._attn_implementation == "sdpa"


def test_restore_gives_each_part_its_own_implementation(redraw, ids):
    text = {
        "vocab_size": 99,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "eos_token_id": 98,
    }
    vision = {**text, "image_size": 16, "patch_size": 4}
    del vision["vocab_size"], vision["eos_token_id"]
    model = redraw(hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=vision)))
    model.set_attn_implementation({"text_config": "sdpa", "vision_config": "eager"})
    attnzoo.swap(model, "flash")
    assert len(backends(model)) == 2
    for part in (model.config, model.config.text_config, model.config.vision_config):
        assert part._attn_implementation == "attnzoo"
    attnzoo.restore(copy.deepcopy(model))  # a copy's configs are others
    attnzoo.restore(model)
    assert model.config.text_config._attn_implementation == "sdpa"
    assert model.config.vision_config._attn_implementation == "eager"


def test_restore_changes_configs_that_parts_have_copied(redraw):
    config = hf.T5Config(
        vocab_size=99, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, pad_token_id=0
    )
    config.attnzoo = attnzoo.AttentionSpec("flash").to_dict()
    config._attn_implementation = "attnzoo"
    model = hf.T5ForConditionalGeneration(config)
    assert model.encoder.config is not config
    attnzoo.restore(model)
    assert not hasattr(model.encoder.config, "attnzoo")
    assert model.encoder.config._attn_implementation == "sdpa"


def test_layer_with_a_config_of_its_own_is_swapped_too(llama, ids):
    """Some models copy their config for a part; changes of the original do not reach it."""
    model, plain = llama(), llama()
    layer = model.model.layers[1].self_attn
    layer.config = copy.deepcopy(layer.config)
    for each in (model, plain):
        attnzoo.swap(each, "linear")
    assert torch.equal(logits(model, ids), logits(plain, ids))
    attnzoo.restore(model)
    assert layer.config._attn_implementation == "eager"
    assert torch.equal(logits(model, ids), logits(llama(), ids))


# -- specs ---------------------------------------------------------------------------------------


def test_layers_may_differ(llama, ids):
    model = llama(num_hidden_layers=4)
    attnzoo.swap(
        model,
        "linear",
        feature_map="relu",
        layers={"0": "flash", "2-3": {"backend": "gated_linear", "options": {"gate": "retnet"}}},
    )
    assert backends(model) == ["flash", "linear", "gated_linear", "gated_linear"]
    assert model.model.layers[1].self_attn.attnzoo.config.feature_map == "relu"
    assert model.model.layers[2].self_attn.attnzoo.config.gate == "retnet"
    assert logits(model, ids).isfinite().all()


@pytest.mark.parametrize("form", [dict, attnzoo.AttentionSpec.from_dict])
def test_swap_accepts_a_spec_and_its_data(form, llama, ids):
    data = attnzoo.AttentionSpec("linear", layers={"1": "flash"}).to_dict()
    model = llama()
    attnzoo.swap(model, form(data))
    assert backends(model) == ["linear", "flash"]
    assert model.config.attnzoo == attnzoo.AttentionSpec.from_dict(data).to_dict(defaults=True)
    with pytest.raises(SpecError, match="feature_map"):
        attnzoo.swap(model, form(data), feature_map="relu")


@pytest.mark.parametrize("backend", ["linear", "gated_linear"])
def test_config_goes_through_json(backend, llama, tmp_path):
    model = llama()
    attnzoo.swap(model, backend, layers={"0": "flash"})
    model.config.save_pretrained(tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())
    assert text["attn_implementation"] == "attnzoo"
    assert text["attnzoo"]["backend"] == backend
    config = hf.AutoConfig.from_pretrained(tmp_path)
    assert config.attnzoo == model.config.attnzoo
    assert config._attn_implementation == "attnzoo"
    config._name_or_path = model.config._name_or_path
    assert config.to_diff_dict() == model.config.to_diff_dict()
    config.save_pretrained(tmp_path / "again")  # without building a model
    assert json.loads((tmp_path / "again" / "config.json").read_text()) == text
    attnzoo.restore(model)
    assert "attn_implementation" not in model.config.to_diff_dict()


# -- failures change nothing ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        ("linar", {}),
        ("linear", {"feature_mapp": "relu"}),
        ("linear", {"chunk_size": "many"}),
        ("linear", {"layers": {"7": "flash"}}),
        ({"version": 9, "backend": "linear"}, {}),
        ("linear", {}),  # a sliding window in layer 1 only
    ],
)
@pytest.mark.parametrize("swapped", [False, True])
def test_failed_swap_does_not_change_the_model(spec, options, swapped, llama, ids):
    model = llama()
    if swapped:
        attnzoo.swap(model, "gated_linear")
    model.model.layers[1].self_attn.sliding_window = 3  # linear refuses it
    before, expected = snapshot(model), logits(model, ids)
    with pytest.raises(AttnzooError):
        attnzoo.swap(model, spec, **options)
    assert same(snapshot(model), before)
    assert torch.equal(logits(model, ids), expected)


# -- operations on a swapped model ---------------------------------------------------------------


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_are_independent(copied, llama, ids):
    model = llama()
    attnzoo.swap(model, "gated_linear", feature_map="hedgehog")
    expected = logits(model, ids)
    other = copied(model)
    assert torch.equal(logits(other, ids), expected)
    hooks = [
        [h for m in x.modules() for h in m._forward_pre_hooks.values() if isinstance(h, LayerHook)]
        for x in (model, other)
    ]
    assert [len(found) for found in hooks] == [2, 2]
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if "attnzoo" in name:
                parameter.add_(1.0)
    assert not torch.equal(logits(other, ids), expected)
    assert torch.equal(logits(model, ids), expected)
    attnzoo.restore(other)
    assert other.config._attn_implementation == "eager"
    assert model.config._attn_implementation == "attnzoo"
    assert torch.equal(logits(other, ids), logits(llama(), ids))
    assert torch.equal(logits(model, ids), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_extras_follow_their_layer(dtype, device, llama):
    model = llama().to(device=device, dtype=dtype).train()
    attnzoo.swap(model, "gated_linear")
    for layer in model.model.layers:
        for extra in layer.self_attn.attnzoo.parameters():
            assert extra.dtype == dtype
            assert extra.device.type == device
            assert extra.requires_grad
        assert layer.self_attn.attnzoo.training
    attnzoo.swap(model.eval(), "linear")
    assert not any(layer.self_attn.attnzoo.training for layer in model.model.layers)


def test_wrapped_models(llama, ids):
    model = llama()
    expected = logits(model, ids)
    wrapper = nn.Sequential(model)
    attnzoo.swap(wrapper, "linear")
    assert backends(model) == ["linear"] * 2
    attnzoo.restore(wrapper)
    assert torch.equal(logits(model, ids), expected)


def test_models_sharing_a_config_do_not_run_unswapped(llama_config, ids):
    config = llama_config()
    swapped, other = hf.LlamaForCausalLM(config), hf.LlamaForCausalLM(config)
    attnzoo.swap(swapped, "linear")
    with pytest.raises(UnsupportedError, match="no backend"):
        other(ids)


def test_no_transformers_model():
    with pytest.raises(SpecError, match="Linear is not a transformers model"):
        attnzoo.swap(nn.Linear(2, 2), "linear")
