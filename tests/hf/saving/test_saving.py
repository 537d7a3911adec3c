"""The swap in a config, and the specs that loading accepts."""

import json

import pytest
import torch
import transformers as hf

import attnzoo
from attnzoo.backends.feature_maps.base import get_feature_map
from attnzoo.errors import SpecError
from attnzoo.registry import available_backends, get_backend


@pytest.mark.parametrize("name", available_backends())
def test_a_spec_with_all_options_is_the_same_spec(name):
    spec = attnzoo.AttentionSpec(name, layers={"0": "flash"}, else_="softmax")
    data = json.loads(json.dumps(spec.to_dict(defaults=True)))
    assert set(data["options"]) == set(get_backend(name).config_class.default_options())
    assert "impl" in data["layers"]["0"]["options"]
    assert "impl" in data["else"]["options"]
    assert attnzoo.AttentionSpec.from_dict(data) == spec
    assert attnzoo.AttentionSpec.from_dict(spec.to_dict()) == spec  # files of earlier versions


def test_a_saved_model_keeps_every_option(llama, tmp_path):
    """A changed default in a later version does not change an old checkpoint."""
    model = attnzoo.swap(llama(), "linear")
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())["attnzoo"]
    assert saved == attnzoo.AttentionSpec("linear").to_dict(defaults=True)
    assert saved["options"]["feature_map"] == "elu+1"
    assert [row.options for row in attnzoo.describe(model)] == [{}, {}]


@pytest.mark.parametrize(
    ("name", "defaults"),
    [("hedgehog_exp", {"num_features": 256, "seed": 0}), ("dpfp", {"nu": 1})],
)
def test_a_saved_model_keeps_the_defaults_of_its_map(
    name, defaults, llama, ids, tmp_path, monkeypatch
):
    spec = attnzoo.AttentionSpec("linear", feature_map=name)
    assert attnzoo.AttentionSpec("linear", feature_map=name, **defaults) == spec
    model = attnzoo.swap(llama(), spec)
    expected = model(input_ids=ids).logits
    assert [row.options for row in attnzoo.describe(model)] == [{"feature_map": name}] * 2
    model.save_pretrained(tmp_path)
    changed = {key: value + 2 for key, value in defaults.items()}
    monkeypatch.setattr(get_feature_map(name), "options", changed)
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert {key: loaded.config.attnzoo["options"][key] for key in defaults} == defaults
    assert torch.equal(loaded(input_ids=ids).logits, expected)


def test_a_config_takes_a_spec_object(llama_config, tmp_path):
    config = llama_config()
    spec = config.attnzoo = attnzoo.AttentionSpec("linear", feature_map="relu")
    assert '"relu"' in repr(config)
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())["attnzoo"]
    assert saved == spec.to_dict(defaults=True)
    model = hf.AutoModelForCausalLM.from_config(config, attn_implementation="attnzoo")
    assert model.config.attnzoo == saved


def test_a_config_takes_the_name_of_a_backend(llama_config):
    config = llama_config()
    config.attnzoo = "linear"
    model = hf.AutoModelForCausalLM.from_config(config, attn_implementation="attnzoo")
    assert model.config.attnzoo == attnzoo.AttentionSpec("linear").to_dict(defaults=True)


@pytest.mark.parametrize("cls", [hf.AutoModelForCausalLM, hf.LlamaForCausalLM])
def test_error_of_from_pretrained_names_swap(cls, llama, tmp_path):
    llama().save_pretrained(tmp_path)
    with pytest.raises(SpecError, match=r"attnzoo\.swap\(model, 'linear'\)"):
        cls.from_pretrained(tmp_path, attnzoo="linear")


def test_describe_takes_a_folder(llama, tmp_path):
    attnzoo.swap(llama(), "linear", layers={"1": "flash"}).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()  # not read
    for path in (tmp_path, str(tmp_path)):
        assert [row.backend for row in attnzoo.describe(path)] == ["linear", "flash"]
    with pytest.raises(SpecError, match=r"no config\.json"):
        attnzoo.describe(tmp_path / "nothing")
    with pytest.raises(SpecError, match="int is not a transformers model"):
        attnzoo.describe(1)


def test_weights_of_other_shapes_raise_the_error_of_transformers(llama, llama_config, tmp_path):
    attnzoo.swap(llama(), "linear", feature_map="hedgehog").save_pretrained(tmp_path)
    config = hf.AutoConfig.from_pretrained(tmp_path)
    config.num_attention_heads = 8
    config.head_dim = 4
    with (
        pytest.warns(attnzoo.SwapWarning, match="saved under another swap"),
        pytest.raises(RuntimeError, match="ignore_mismatched_sizes"),
    ):
        hf.AutoModelForCausalLM.from_pretrained(tmp_path, config=config)
    with pytest.warns(attnzoo.SwapWarning, match="parameters of backends in other shapes"):
        model, info = hf.AutoModelForCausalLM.from_pretrained(
            tmp_path, config=config, ignore_mismatched_sizes=True, output_loading_info=True
        )
    assert any("attnzoo" in key[0] for key in info["mismatched_keys"])
    backend = model.model.layers[0].self_attn.attnzoo
    drawn = {name: x.clone() for name, x in backend.named_parameters()}
    backend.reset_parameters()
    assert all(torch.equal(x, drawn[name]) for name, x in backend.named_parameters())
