"""Canaries: each fails when transformers or PEFT changes what one of our patches relies on."""

import inspect
import json
import sys
import warnings
from importlib import import_module

import peft
import pytest
import torch
import transformers
from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.tuners_utils import BaseTuner
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

import attnzoo
from attnzoo.hf.names import LOADED, NAME
from attnzoo.hf.patches import PATCHES, TABLE

TINY = {
    "vocab_size": 16,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


@pytest.fixture
def config():
    config = transformers.LlamaConfig(**TINY)
    config.attnzoo = {"backend": "linear", "options": {"feature_map": "hedgehog"}}
    config._attn_implementation = NAME
    return config


def test_every_patched_module_exists():
    for name in PATCHES:
        assert inspect.ismodule(import_module(name)), name


def patched_attributes() -> dict[str, set[str]]:
    """Return the attributes of other packages whose code is ours, by module."""
    found: dict[str, set[str]] = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in ("transformers", "peft", "trl"):
            continue
        owners = [(f"{x.__name__}.", x) for x in vars(module).values() if inspect.isclass(x)]
        owners = [("", module), *(x for x in owners if x[1].__module__ == name)]
        for prefix, owner in owners:
            for key, value in list(vars(owner).items()):
                if inspect.ismodule(value):  # may import all of itself when an attribute is read
                    continue
                function = getattr(value, "__func__", value)
                while function is not None:  # ours may be in a decorator of the standard library
                    code = getattr(function, "__code__", None)
                    if "/attnzoo/hf/" in getattr(code, "co_filename", ""):
                        found.setdefault(name, set()).add(prefix + key)
                    function = vars(function).get("__wrapped__") if code else None
    return found


def test_every_patched_attribute_has_a_reason():
    for name in PATCHES:
        import_module(name)
    assert patched_attributes() == {name: set(patches) for name, patches in TABLE.items()}
    assert all(patch.reason for patches in TABLE.values() for patch in patches.values())
    counts = [name.partition(".")[0] for name, patches in TABLE.items() for _ in patches]
    assert counts.count("peft") <= 14
    assert len(counts) - counts.count("peft") <= 8


def test_configs_are_read_and_written_through_two_methods(config, tmp_path):
    """``_dict_from_json_file`` reads every config.json, ``to_diff_dict`` is written."""
    cls = transformers.PreTrainedConfig
    assert "to_diff_dict" in cls.to_json_string.__code__.co_names
    for reads in (cls._get_config_dict, cls.from_json_file):
        assert "_dict_from_json_file" in reads.__func__.__code__.co_names
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text("utf-8"))
    assert (saved["model_type"], saved["attn_implementation"]) == ("attnzoo_llama", NAME)
    plain = transformers.LlamaConfig(**TINY)
    plain.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text("utf-8"))
    assert written["rope_theta"] == 10_000.0  # the flat field beside rope_parameters
    assert "attn_implementation" not in written


def test_mask_function_is_registered_and_called(config):
    """A model under ``attn_implementation="attnzoo"`` asks our function for its mask."""
    assert NAME in AttentionMaskInterface._global_mapping
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.arange(6)[None]
    changed = ids.clone()
    changed[0, -1] = 9
    with torch.no_grad():
        assert torch.equal(model(ids).logits[:, :-1], model(changed).logits[:, :-1])  # causal
        left = torch.cat([torch.zeros(1, 3, dtype=torch.long), ids], 1)
        mask = torch.cat([torch.zeros(1, 3, dtype=torch.long), torch.ones_like(ids)], 1)
        padded = model(left, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
        torch.testing.assert_close(padded.logits[:, 3:], model(ids).logits)


def test_attention_function_is_registered():
    assert NAME in AttentionInterface._global_mapping


def test_models_are_built_with_their_backends(config):
    """``__new__`` of a stock class makes an object of the swapped one."""
    model = transformers.LlamaForCausalLM(config)
    layer = model.model.layers[0].self_attn
    assert isinstance(layer.attnzoo, attnzoo.AttentionBackend)


def test_missing_weights_are_initialised_by_the_backend(config, tmp_path):
    """``_initialize_weights`` runs once for each module that a checkpoint lacks."""
    stock = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY))
    stock.save_pretrained(tmp_path)
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path, config=config)
    backend = model.model.layers[0].self_attn.attnzoo
    loaded = {name: x.clone() for name, x in backend.named_parameters()}
    assert loaded
    backend.reset_parameters()
    for name, x in backend.named_parameters():
        assert torch.equal(x, loaded[name]), name


def test_adapter_configs_are_saved_and_loaded_through_three_methods(tmp_path):
    """A config without the key ``attnzoo`` is plain; PEFT warns of keys that it does not know."""
    config = peft.LoraConfig(r=2)
    config.save_pretrained(tmp_path)
    assert not hasattr(peft.LoraConfig.from_pretrained(tmp_path), NAME)
    vars(config)[NAME] = {"backend": "linear"}
    config.save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = peft.PeftConfig.from_pretrained(tmp_path)
    assert (vars(loaded)[NAME], loaded.r) == ({"backend": "linear"}, 2)
    assert vars(loaded)[LOADED]
    assert LOADED not in vars(peft.LoraConfig.from_peft_type(peft_type="LORA"))


def test_all_tuners_inject_and_merge_through_the_base_class():
    """A tuner with a method of its own calls the base class, whose methods are patched."""
    merging = ("merge_adapter", "merge_and_unload", "unload")
    tuners = [x for x in PEFT_TYPE_TO_TUNER_MAPPING.values() if issubclass(x, BaseTuner)]
    assert len(tuners) > 20
    for tuner in tuners:
        assert all(getattr(tuner, name) is getattr(BaseTuner, name) for name in merging), tuner
        if tuner.inject_adapter is not BaseTuner.inject_adapter:
            assert "super().inject_adapter(" in inspect.getsource(tuner.inject_adapter), tuner
    for name in ("inject_adapter", *merging):
        ours = TABLE["peft.tuners.tuners_utils"][f"BaseTuner.{name}"].function
        expected = list(inspect.signature(inspect.unwrap(getattr(BaseTuner, name))).parameters)
        given = list(inspect.signature(ours).parameters)[1:]
        named = [x for x in given if x not in ("args", "kwargs")]
        assert named == expected[: len(named)], name


def test_peft_models_add_prompts_through_add_adapter(config):
    """Prompts have no tuner: ``PeftModel`` sets them up, disables them and saves them."""
    model = transformers.LlamaForCausalLM(config)
    prompt = peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, prompt)
    assert prompt.modules_to_save == [NAME]
    wrapper = model.base_model.model.layers[0].self_attn.attnzoo
    with model.disable_adapter():
        assert wrapper.disable_adapters
    assert not wrapper.disable_adapters
    for name in ("add_adapter", "disable_adapter", "save_pretrained"):
        assert name in vars(peft.PeftModel)


def test_patches_are_applied_once():
    def patched():
        attention = AttentionInterface._global_mapping[NAME]
        return PreTrainedModel.__new__, attention

    before = patched()
    for name, patch in PATCHES.items():
        patch(import_module(name))
    assert patched() == before
