"""Names in a config.json, which may come from anywhere, import nothing and call nothing."""

import json
import sys
import textwrap

import pytest
import torch
import transformers as hf

import attnzoo
from attnzoo.backends.feature_maps import base as feature_maps
from attnzoo.backends.feature_maps import config as feature_map_config
from attnzoo.errors import ConfigError, SpecError
from attnzoo.hf.saving.files import empty_model
from attnzoo.training.plan import read_plan

SCRIPT = """
import sys
import torch
import attnzoo
from transformers import AutoModelForCausalLM

@attnzoo.register_feature_map("square")
def square(x):
    return x * x

model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
print(model(torch.arange(9)[None]).logits.sum().item())
"""


@pytest.fixture
def sentinel(monkeypatch, tmp_path):
    """A module on the path that nothing has imported; the maps are restored after the test."""
    known = dict(feature_map_config.FEATURE_MAPS)  # with our own registered
    monkeypatch.setattr(feature_maps, "FEATURE_MAPS", known)
    (tmp_path / "sentinel.py").write_text("def square(x):\n    return x * x\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "sentinel:square"
    sys.modules.pop("sentinel", None)


def swapped(llama, feature_map):
    model = llama()
    attnzoo.swap(model, attnzoo.AttentionSpec("linear", feature_map=feature_map))
    return model


def rewrite(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize("name", ["sentinel:square", "os:system"])
def test_a_config_file_imports_nothing(llama, sentinel, tmp_path, name):
    folder = tmp_path / "model"
    swapped(llama, "relu").save_pretrained(folder)
    rewrite(folder, attnzoo={"backend": "linear", "options": {"feature_map": name}})
    with pytest.raises(ConfigError, match=rf"{name}' is not registered.*does not import code"):
        hf.AutoModelForCausalLM.from_pretrained(folder)
    config = hf.AutoConfig.from_pretrained(folder)
    for refuse in (
        lambda: hf.AutoModelForCausalLM.from_config(config),
        lambda: attnzoo.swap(llama(), config.attnzoo),
    ):
        with pytest.raises(ConfigError, match="does not import code"):
            refuse()
    assert "sentinel" not in sys.modules


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_plan_imports_nothing(sentinel, tmp_path, wrapped):
    spec = {"backend": "linear", "options": {"feature_map": sentinel}}
    (tmp_path / "plan.json").write_text(json.dumps({"spec": spec} if wrapped else spec))
    with pytest.raises(ConfigError, match="does not import code"):
        read_plan(tmp_path / "plan.json")
    assert "sentinel" not in sys.modules


def test_a_model_swapped_from_python_loads_once_python_registers_the_map(llama, sentinel, tmp_path):
    model = swapped(llama, sentinel)
    model.save_pretrained(tmp_path / "model")
    sys.modules.pop("sentinel")
    feature_maps.FEATURE_MAPS.pop(sentinel)  # as in another process
    with pytest.raises(ConfigError, match="If you trust the module"):
        hf.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    config = hf.AutoConfig.from_pretrained(tmp_path / "model")
    config.attnzoo = attnzoo.AttentionSpec("linear", feature_map=sentinel).to_dict()
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "model", config=config)
    ids = torch.arange(9)[None]
    assert torch.equal(again(ids).logits, model(ids).logits)


def test_a_registered_name_loads_in_another_process(llama, sentinel, tmp_path, fresh_python):
    attnzoo.register_feature_map("square")(lambda x: x * x)
    model = swapped(llama, "square")
    model.save_pretrained(tmp_path / "model")
    done = fresh_python(textwrap.dedent(SCRIPT), tmp_path / "model")
    assert done.returncode == 0, done.stderr
    expected = model(torch.arange(9)[None]).logits.sum().item()
    assert float(done.stdout) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("name", ["pipeline", "logging", "LlamaConfig", "NoSuchModel"])
def test_a_config_names_model_classes_only(llama, tmp_path, name):
    llama().save_pretrained(tmp_path)
    rewrite(tmp_path, architectures=[name])
    with pytest.raises(SpecError, match=f"does not name a model class .*{name}"):
        empty_model(tmp_path)
