"""The class names in a saved swap's config: no engine may take it for the stock model."""

import json

import pytest
import torch
import transformers as hf

import attnzoo
from attnzoo.errors import SpecError
from attnzoo.hf.mixins import stock_class
from attnzoo.hf.saving.files import empty_model, read_config

SAVED = ["AttnzooLlamaForCausalLM"]


def saved_names(folder):
    data = json.loads((folder / "config.json").read_text())
    is_own = data["architectures"][0].startswith("Attnzoo")
    assert data["model_type"].startswith("attnzoo_") == is_own  # other loaders go by the type
    return data["architectures"]


@pytest.fixture
def folder(llama, tmp_path):
    attnzoo.swap(llama(), "linear").save_pretrained(tmp_path / "swapped")
    return tmp_path / "swapped"


def test_a_saved_swap_names_no_class_of_transformers(folder):
    assert saved_names(folder) == SAVED
    assert read_config(folder).architectures == SAVED  # engines read it in this process too
    assert read_config(folder).model_type == "llama"
    assert json.loads((folder / "config.json").read_text())["model_type"] == "attnzoo_llama"
    assert hf.LlamaConfig.from_json_file(folder / "config.json").model_type == "llama"  # Trainer
    assert stock_class(type(empty_model(folder))) is hf.LlamaForCausalLM


def test_stock_loaders_find_the_class(folder, ids):
    expected = hf.LlamaForCausalLM.from_pretrained(folder)(ids).logits
    auto = hf.AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(auto(ids).logits, expected)
    looked_up = getattr(hf, read_config(folder).architectures[0])  # serve, pipelines, TRL
    assert looked_up is hf.LlamaForCausalLM
    assert not hasattr(hf, "AttnzooNoSuchModel")


def test_a_swap_that_is_undone_or_disabled_has_its_stock_name(folder, tmp_path):
    model = hf.AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path / "again")
    assert saved_names(tmp_path / "again") == SAVED
    model.set_attn_implementation("sdpa")
    assert model.config.to_diff_dict()["architectures"] == ["LlamaForCausalLM"]
    model.save_pretrained(tmp_path / "disabled")
    assert saved_names(tmp_path / "disabled") == ["LlamaForCausalLM"]
    model.set_attn_implementation("attnzoo")
    attnzoo.restore(model)
    model.save_pretrained(tmp_path / "restored")
    assert saved_names(tmp_path / "restored") == ["LlamaForCausalLM"]


def test_a_folder_of_an_earlier_version_loads(folder, ids, tmp_path):
    expected = hf.AutoModelForCausalLM.from_pretrained(folder)(ids).logits
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = "llama"
    (folder / "config.json").write_text(json.dumps(config | {"architectures": []}))
    assert torch.equal(hf.AutoModelForCausalLM.from_pretrained(folder)(ids).logits, expected)
    stock = config | {"architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(stock))
    model = hf.AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(model(ids).logits, expected)
    model.save_pretrained(tmp_path / "now")
    assert saved_names(tmp_path / "now") == SAVED


def test_a_part_of_a_composite_model_names_the_whole(tmp_path):
    tiny = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    text = {**tiny, "vocab_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    vision = {**tiny, "image_size": 8, "patch_size": 4, "num_attention_heads": 2}
    config = hf.LlavaConfig(
        text_config=hf.LlamaConfig(**text), vision_config=hf.CLIPVisionConfig(**vision)
    )
    model = hf.LlavaForConditionalGeneration(config)
    attnzoo.swap(model.model.language_model, "linear")
    model.save_pretrained(tmp_path)
    assert saved_names(tmp_path) == ["AttnzooLlavaForConditionalGeneration"]
    assert stock_class(type(empty_model(tmp_path))) is hf.LlavaForConditionalGeneration


def test_an_auto_class_with_several_models_takes_the_named_one(tmp_path):
    """DeiT classifies with a head for a teacher, or without, as ``architectures`` says."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = hf.DeiTConfig(**sizes, intermediate_size=16, image_size=8, patch_size=4)
    model = attnzoo.swap(hf.DeiTForImageClassificationWithTeacher(config), "softmax")
    model.save_pretrained(tmp_path)
    assert saved_names(tmp_path) == ["AttnzooDeiTForImageClassificationWithTeacher"]
    again = hf.AutoModelForImageClassification.from_pretrained(tmp_path)
    assert stock_class(type(again)) is hf.DeiTForImageClassificationWithTeacher


@pytest.mark.parametrize("build", ["from_pretrained", "from_config"])
def test_the_attention_of_another_package_is_refused(build, folder, monkeypatch):
    """As vLLM does, which would run softmax in place of the swap."""

    def engine_attention(*args, **kwargs):
        raise AssertionError

    engine_attention.__module__ = "engine.attention"
    monkeypatch.setitem(hf.AttentionInterface._global_mapping, "engine", engine_attention)
    source = folder if build == "from_pretrained" else read_config(folder)
    with pytest.raises(SpecError, match="'engine', which another package has registered"):
        getattr(hf.AutoModelForCausalLM, build)(source, attn_implementation="engine")


@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_an_attention_of_transformers_disables_the_swap(name, folder):
    with pytest.warns(attnzoo.SwapWarning, match="is disabled"):
        hf.AutoModelForCausalLM.from_pretrained(folder, attn_implementation=name)


def test_no_implementation_in_the_call_runs_the_swap_of_the_file(llama, ids, tmp_path):
    """As `transformers serve` loads every model."""
    model = attnzoo.swap(llama(), "linear")
    model.save_pretrained(tmp_path)
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=None)
    assert loaded.config._attn_implementation == "attnzoo"
    assert torch.equal(loaded(input_ids=ids).logits, model(input_ids=ids).logits)
    expected = model.generate(ids, max_new_tokens=3)
    assert torch.equal(loaded.generate(ids, max_new_tokens=3), expected)
    with torch.no_grad():  # the server passes its tokenizer to generate, which reaches the layers
        assert torch.equal(loaded(ids, tokenizer=object()).logits, loaded(ids).logits)
