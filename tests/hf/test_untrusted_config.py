"""Names in a config.json, which may come from anywhere, import nothing and call nothing."""

import json
import shutil
import sys
import textwrap

import pytest
import torch
import transformers as hf
import trl

import attnzoo
from attnzoo.backends.feature_maps import base as feature_maps
from attnzoo.errors import AttnzooError, ConfigError, SpecError
from attnzoo.evaluation.models import embedded_model_path
from attnzoo.hf.saving.files import empty_model, swap_files
from attnzoo.training.finetune import finetune
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
    known = dict(feature_maps.FEATURE_MAPS)  # with our own registered
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
    with pytest.raises(ConfigError, match=rf"No feature map is called '{name}'"):
        hf.AutoModelForCausalLM.from_pretrained(folder)
    config = hf.AutoConfig.from_pretrained(folder)
    for refuse in (
        lambda: hf.AutoModelForCausalLM.from_config(config),
        lambda: attnzoo.swap(llama(), config.attnzoo),
    ):
        with pytest.raises(ConfigError, match="No feature map is called"):
            refuse()
    assert "sentinel" not in sys.modules


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_plan_imports_nothing(sentinel, tmp_path, wrapped):
    spec = {"backend": "linear", "options": {"feature_map": sentinel}}
    (tmp_path / "plan.json").write_text(json.dumps({"spec": spec} if wrapped else spec))
    with pytest.raises(ConfigError, match="No feature map is called"):
        read_plan(tmp_path / "plan.json")
    assert "sentinel" not in sys.modules


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


DEEP = "[" * 99_000
DAMAGED = {  # changes of config.json, or a file and its content; and the message
    "layers": ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 10,000, got"),
    "no layers": ({"num_hidden_layers": -3}, "num_hidden_layers must be at least 0, got -3"),
    "heads": ({"num_attention_heads": 0}, "config.json' cannot be read: "),
    "rotary": ({"rope_parameters": {"rope_type": "x", "rope_theta": 9.0}}, "loaded: KeyError: 'x'"),
    "kernel": ({"attn_implementation": "a/b:c"}, "names a kernel of the Hub, 'a/b:c', which is"),
    "experts": ({"experts_implementation": "x"}, "cannot be loaded: ValueError: Specified"),
}
UNREADABLE = {
    "vocabulary": ({"vocab_size": 10**12}, "cannot be loaded"),
    "adapter": ("adapter_config.json", DEEP, "cannot be loaded: RecursionError"),
    "rank": ("adapter_config.json", '{"peft_type": "LORA", "r": 10000000000000}', "cannot be lo"),
    "tokenizer": ("tokenizer_config.json", DEEP, "tokenizer in .* cannot be loaded"),
    "template": (
        "tokenizer_config.json",
        '{"tokenizer_class": "ByT5Tokenizer", "chat_template": "{{ messages.__class__.x }}"}',
        "chat template cannot write the messages",
    ),
}


def change(folder, changes, *content):
    if content:
        (folder / changes).write_text(*content)
    else:
        rewrite(folder, **changes)


@pytest.mark.parametrize("kind", DAMAGED)
def test_configs_that_build_no_model_are_explained(llama, tmp_path, kind):
    llama().save_pretrained(tmp_path)
    *given, message = DAMAGED[kind]
    change(tmp_path, *given)
    with pytest.raises(AttnzooError, match=message):
        empty_model(tmp_path)


@pytest.mark.parametrize("kind", UNREADABLE)
def test_folders_that_cannot_be_loaded_are_explained(llama, tmp_path, kind):
    folder, data = tmp_path / "model", tmp_path / "data.jsonl"
    shutil.copytree(embedded_model_path(), folder)
    turns = [{"role": x, "content": "a few words"} for x in ("user", "assistant")]
    prompts = [[{"role": "user", "content": f"a word {x}"}] for x in range(40)]
    examples = [json.dumps({"prompt": x, "completion": turns[1:]}) for x in prompts]
    data.write_text("\n".join(examples))
    *given, message = UNREADABLE[kind]
    change(folder, *given)
    if kind in ("tokenizer", "template"):
        args = trl.SFTConfig(str(tmp_path / "out"), use_cpu=True, completion_only_loss=True)
        with pytest.raises(AttnzooError, match=message):
            finetune(folder, attnzoo.AttentionSpec("linear"), [data], args)
    else:
        with pytest.raises(AttnzooError, match=message):
            swap_files(folder, attnzoo.AttentionSpec("linear"), tmp_path / "out")
        assert not (tmp_path / "out").exists()
