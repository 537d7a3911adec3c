"""An error in the middle of a change leaves the model as it was."""

import copy
import pydoc

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, BartConfig, BartForConditionalGeneration

import attnzoo
from attnzoo.hf.seam import all_configs
from tests.helpers import MODEL_SIZES, run_torch_functions, tiny_llama

CONVERT = "attnzoo.hf.swap"


@pytest.fixture(autouse=True)
def torch_functions(monkeypatch):
    run_torch_functions(monkeypatch, "qwen3_5_text")


def bart():
    sizes = {"decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 32}
    config = BartConfig(d_model=32, vocab_size=99, max_position_embeddings=32, **sizes)
    return BartForConditionalGeneration(config).eval()


def hybrid():
    """Two recurrent layers, so that a change of the second one can fail."""
    config = AutoConfig.for_model("qwen3_5_text", **MODEL_SIZES, head_dim=8)
    config.layer_types = ["linear_attention"] * config.num_hidden_layers
    return AutoModelForCausalLM.from_config(config).eval()


def adapted(model):
    config = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    return get_peft_model(model, config)


def swapped(backend="gated_linear", **options):
    return lambda: attnzoo.swap(tiny_llama(), backend, **options)


# the model, the change, and the function that fails when it is called for the second time
CHANGES = {
    "swap": (tiny_llama, lambda x: attnzoo.swap(x, "linear"), f"{CONVERT}.write_config", 1),
    "swap, a layer": (
        tiny_llama,
        lambda x: attnzoo.swap(x, "linear"),
        "attnzoo.hf.attach.add_hook",
        2,
    ),
    "swap again": (
        swapped(),
        lambda x: attnzoo.swap(x, {"backend": "delta"}),
        f"{CONVERT}.seam.set_implementation",
        1,
    ),
    "restore": (swapped(), attnzoo.restore, f"{CONVERT}._clear", 1),
    "prune": (
        tiny_llama,
        lambda x: attnzoo.prune_heads(x, {0: [0, 1], 1: [2, 3]}),
        "attnzoo.hf.heads.keep_inputs",
        2,
    ),
    "extend": (
        bart,
        lambda x: attnzoo.extend_positions(x, 80),
        "attnzoo.hf.models.positions._resize",
        2,
    ),
    "speed up": (hybrid, attnzoo.speed_up, "attnzoo.hf.models.speed_up.FastForward.__init__", 2),
    "convert": (
        tiny_llama,
        lambda x: attnzoo.convert(x, "llama", attnzoo.AttentionSpec("flash")),
        "attnzoo.hf.stock.convert._prove",
        1,
    ),
    "adapter": (swapped(), adapted, "peft.utils.other.ModulesToSaveWrapper.update", 2),
}


def snapshot(model):
    modules = {name: id(x) for name, x in model.named_modules()}
    modules |= {f"{name}.requires_grad": x.requires_grad for name, x in model.named_parameters()}
    tensors = {name: x.clone() for name, x in model.state_dict().items()}
    attributes = [
        {k: v for k, v in vars(x).items() if isinstance(v, int | float | str)}
        for x in model.modules()
    ]
    hooks = [len(x._forward_pre_hooks) for x in model.modules()]
    configs = [(copy.deepcopy(x.to_dict()), x._attn_implementation) for x in all_configs(model)]
    return modules, attributes, hooks, configs, tensors


@pytest.mark.parametrize("name", CHANGES)
def test_an_error_in_the_middle_changes_nothing(name, monkeypatch):
    make, change, path, times = CHANGES[name]
    model = make()
    ids = torch.arange(3, 20)[None]
    out = model(ids, use_cache=False).logits
    before = snapshot(model)
    calls = []
    function = pydoc.locate(path)

    with monkeypatch.context() as patched:

        def fail(*args, **kwargs):
            calls.append(1)
            if len(calls) == times:
                raise RuntimeError("on purpose")
            return function(*args, **kwargs)

        patched.setattr(path, fail)
        with pytest.raises(RuntimeError, match="on purpose"):
            change(model)

    *same, tensors = before
    *now, values = snapshot(model)
    assert now == same
    assert tensors.keys() == values.keys()
    assert all(torch.equal(x, values[key]) for key, x in tensors.items())
    assert torch.equal(model(ids, use_cache=False).logits, out)
    change(model)  # and it can still be changed
