"""PEFT adapters and the Trainer on top of a swapped model."""

import copy
import json
from typing import Any

import peft
import pytest
import torch
import transformers as hf
from torch.testing import assert_close

import attnzoo
from attnzoo.errors import SpecError, UnsupportedError
from attnzoo.hf import seam
from attnzoo.hf.attention.call import layer_backend
from attnzoo.hf.layers import attention_layers

pytestmark = pytest.mark.filterwarnings("ignore:.*checkpointing. is deprecated:FutureWarning")
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]
GATED = {"backend": "gated_linear", "options": {"gate": "gla"}}
BACKENDS = [
    ("linear", {"feature_map": "hedgehog"}),
    ("gated_linear", {"gate": "gated_retention"}),
    ("delta", {"window": 4}),
]


@pytest.fixture(params=BACKENDS, ids=["linear", "gated_linear", "delta"])
def base(request, llama):
    model = llama()
    attnzoo.swap(model, request.param[0], **request.param[1])
    return model


def adapted(model: Any, **options: Any) -> Any:
    config = peft.LoraConfig(r=4, target_modules=TARGETS, task_type="CAUSAL_LM", **options)
    return peft.get_peft_model(model, config)


def train(model: Any, ids: Any) -> list[float]:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-2)
    losses = []
    model.train()
    for _ in range(3):
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    return losses


def extras(model: Any) -> dict[str, torch.Tensor]:
    named = model.named_parameters()
    return {name: p.detach().clone() for name, p in named if "attnzoo" in name}


def logits(model: Any, ids: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


def swapped(llama: Any, spec: Any) -> Any:
    model = llama()
    attnzoo.swap(model, spec)
    return model


def test_extras_train_and_are_saved_with_the_adapter(base, llama, ids, tmp_path):
    spec, raw = base.config.attnzoo, logits(base, ids)
    model = adapted(base)
    before = extras(model)
    losses = train(model, ids)
    assert losses[-1] < losses[0]
    for name, x in extras(model).items():
        assert torch.equal(x, before[name]) == ("original_module" in name), name
    expected = logits(model, ids)
    tokens = model.generate(input_ids=ids, max_new_tokens=4, do_sample=False)
    plain = model.generate(input_ids=ids, max_new_tokens=4, do_sample=False, use_cache=False)
    assert torch.equal(tokens, plain)
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(swapped(llama, spec), tmp_path)
    assert torch.equal(logits(again, ids), expected)
    with model.disable_adapter():
        assert torch.equal(logits(model, ids), raw)
    assert torch.equal(logits(model, ids), expected)
    assert torch.equal(logits(again.unload(), ids), raw)
    merged = model.merge_and_unload()
    assert_close(logits(merged, ids), expected, atol=1e-4, rtol=1e-4)
    assert isinstance(merged.model.layers[0].self_attn.attnzoo, attnzoo.AttentionBackend)


def test_empty_modules_to_save_freezes_the_extras(base, llama, ids, tmp_path):
    spec = base.config.attnzoo
    model = adapted(base, modules_to_save=[])
    before = extras(model)
    train(model, ids)
    assert all(torch.equal(x, before[name]) for name, x in extras(model).items())
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(swapped(llama, spec), tmp_path)
    assert torch.equal(logits(again, ids), logits(model, ids))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("attnzoo" in name)
    with pytest.raises(UnsupportedError, match="not part of the adapter"):
        model.save_pretrained(tmp_path)


def test_adapter_is_refused_under_another_attention(base, llama, ids, tmp_path):
    spec = base.config.attnzoo
    model = adapted(base)
    model.save_pretrained(tmp_path)
    for other in (llama(), swapped(llama, "performer")):
        names = [name for name, _ in other.named_parameters()]
        with pytest.raises(SpecError, match=r"swap the model: attnzoo\.swap\(model, \{'version'"):
            peft.PeftModel.from_pretrained(other, tmp_path)
        with pytest.raises(SpecError, match="trained under another attention"):
            other.load_adapter(str(tmp_path))  # transformers' own method
        assert [name for name, _ in other.named_parameters()] == names
    reference = attnzoo.AttentionSpec.from_dict(spec).to_dict()
    reference.setdefault("options", {})["impl"] = "reference"
    again = peft.PeftModel.from_pretrained(swapped(llama, reference), tmp_path)
    assert_close(logits(again, ids), logits(model, ids), atol=1e-4, rtol=1e-4)
    config = peft.PeftConfig.from_pretrained(tmp_path)
    assert config.attnzoo == json.loads((tmp_path / "adapter_config.json").read_text())["attnzoo"]


WITHOUT_ATTNZOO = """
import sys, peft, transformers as hf
base, adapter = sys.argv[1:]
model = hf.AutoModelForCausalLM.from_pretrained(base)
for load in (hf.PreTrainedModel.load_adapter, peft.PeftModel.from_pretrained):
    try:
        load(model, adapter)
        print("loaded")
    except ValueError as error:
        print(error)
"""


def test_an_adapter_of_a_swap_is_refused_without_attnzoo(llama, tmp_path, fresh_python):
    """Nor by vLLM, which knows the same values: it would run the adapter on softmax."""
    llama().save_pretrained(tmp_path / "base")
    model = adapted(swapped(llama, "linear"), init_lora_weights="gaussian")
    model.save_pretrained(tmp_path / "adapter")
    done = fresh_python(WITHOUT_ATTNZOO, tmp_path / "base", tmp_path / "adapter")
    assert done.stdout.splitlines() == ["Unknown initialization init_lora_weights='attnzoo'"] * 2
    assert peft.PeftConfig.from_pretrained(tmp_path / "adapter").init_lora_weights == "gaussian"
    assert model.peft_config["default"].init_lora_weights == "gaussian"


def test_adapter_of_a_model_without_a_swap_loads_onto_a_swap(base, llama, ids, tmp_path):
    model = adapted(llama())
    model.save_pretrained(tmp_path)
    assert "attnzoo" not in (tmp_path / "adapter_config.json").read_text()
    expected = logits(base, ids)  # the adapter starts at zero
    assert_close(logits(peft.PeftModel.from_pretrained(base, tmp_path), ids), expected)


def test_each_adapter_has_its_own_extras(llama, ids, tmp_path):
    spec = {"backend": "linear", "options": {"feature_map": "hedgehog"}}
    base = swapped(llama, spec)
    raw = logits(base, ids)
    model = adapted(base)
    train(model, ids)
    first = logits(model, ids)
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=TARGETS))
    model.set_adapter("second")
    assert torch.equal(logits(model, ids), raw)
    train(model, ids)
    second = logits(model, ids)
    model.set_adapter("default")
    assert torch.equal(logits(model, ids), first)
    with pytest.raises(UnsupportedError, match="Call set_adapter first"):
        model.merge_adapter(["second"])
    with pytest.raises(UnsupportedError, match="cannot be merged with each other"):
        model.merge_and_unload(adapter_names=["default", "second"])
    assert torch.equal(logits(model, ids), first)
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(swapped(llama, spec), tmp_path)
    again.load_adapter(tmp_path / "second", "second")
    assert torch.equal(logits(again, ids), first)
    again.set_adapter("second")
    assert torch.equal(logits(again, ids), second)
    merged = model.merge_and_unload(adapter_names=["second"])
    assert_close(logits(merged, ids), second, atol=1e-4, rtol=1e-4)


METHODS = {
    "IA3": lambda: peft.IA3Config(
        target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
    "layer norms": lambda: peft.LNTuningConfig(target_modules=["input_layernorm"]),
    "all linear layers": lambda: peft.LoraConfig(r=2, target_modules="all-linear"),
    "attention": lambda: peft.LoraConfig(
        r=2, target_modules=["down_proj"], modules_to_save=["self_attn"]
    ),
}


@pytest.mark.parametrize("method", METHODS)
def test_other_methods(method, llama, ids, tmp_path):
    """PEFT's methods unwrap saved modules differently when they merge."""
    spec = {"backend": "linear", "options": {"feature_map": "hedgehog"}}
    model = peft.get_peft_model(swapped(llama, spec), METHODS[method]())
    assert not any("attnzoo" in name and "lora_" in name for name, _ in model.named_parameters())
    before = extras(model)
    train_logits(model, ids)
    assert any(not torch.equal(x, before[name]) for name, x in extras(model).items())
    expected = logits(model, ids)
    model.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(swapped(llama, spec), tmp_path / "adapter")
    assert torch.equal(logits(again, ids), expected)
    merged = model.merge_and_unload()
    assert not any("modules_to_save" in name for name in merged.state_dict())
    assert_close(logits(merged, ids), expected, atol=1e-4, rtol=1e-4)
    merged.save_pretrained(tmp_path / "merged")
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert_close(logits(again, ids), expected, atol=1e-4, rtol=1e-4)


def train_logits(model: Any, ids: Any) -> None:
    """Train without ``labels``, which models without a task type do not take."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-2)
    model.train()
    for _ in range(2):
        optimizer.zero_grad()
        model(input_ids=ids).logits.square().mean().backward()
        optimizer.step()


def test_methods_that_cannot_save_the_extras_are_refused(base, llama, ids):
    config = peft.TrainableTokensConfig(token_indices=[1, 2], task_type="CAUSAL_LM")
    with pytest.raises(UnsupportedError, match="TrainableTokensConfig has no modules_to_save"):
        peft.get_peft_model(base, config)
    for module in base.modules():
        if isinstance(module, attnzoo.AttentionBackend):
            module.requires_grad_(False)
    before = extras(base)
    train(model := peft.get_peft_model(base, config), ids)
    assert all(torch.equal(x, y) for x, y in zip(extras(model).values(), before.values(), strict=1))


def test_rows_shared_by_layers_are_refused_before_the_model_changes():
    config = hf.BertConfig(
        vocab_size=9, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8
    )
    model = hf.BertModel(config)
    attnzoo.swap(model, "linformer", sharing="layerwise", num_rows=2)
    with pytest.raises(UnsupportedError, match=r"sharing='kv'.* or modules_to_save=\[\]"):
        peft.get_peft_model(model, peft.LoraConfig(target_modules=["query"]))
    assert not any("lora_" in name for name, _ in model.named_parameters())
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["query"], modules_to_save=[]))


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        BACKENDS[0],
        ("linformer", {"block": 5, "sharing": "kv"}),
        ("linformer", {"block": 5, "sharing": "layerwise"}),
    ],
    ids=lambda x: x if isinstance(x, str) else x.get("sharing", ""),
)
def test_a_copy_has_its_own_adapter(backend, options, llama, ids, tmp_path):
    """As EMA makes it; a backend is found through PEFT's wrapper around it."""
    base = attnzoo.swap(llama(), backend, **options)
    before = logits(base, ids)
    frozen = {"modules_to_save": []} if options.get("sharing") == "layerwise" else {}
    model = adapted(base, **frozen)
    train(model, ids)
    expected = logits(model, ids)
    copied = copy.deepcopy(model)
    names = [[name for name, _ in x.named_parameters()] for x in (model, copied)]
    assert names[0] == names[1]
    assert torch.equal(logits(copied, ids), expected)
    with copied.disable_adapter():
        assert torch.equal(logits(copied, ids), before)
    copied.save_pretrained(tmp_path)
    assert_close(logits(copied.unload(), ids), before)
    train(model, ids)
    assert torch.equal(logits(copied, ids), before)


PROMPT = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}


@pytest.mark.filterwarnings("ignore:Position ids are not supported:UserWarning")
@pytest.mark.parametrize(
    ("backend", "method"),
    [
        ("linear", peft.PromptTuningConfig),
        ("delta", peft.PromptTuningConfig),
        ("flash", peft.PrefixTuningConfig),
    ],
)
def test_prompts(backend, method, llama, ids, tmp_path):
    exact = backend == "flash"
    options = {} if exact else {"feature_map": "hedgehog", "window": 4}
    spec = {"backend": backend, "options": options}
    base = swapped(llama, spec)
    raw = logits(base, ids)
    model = peft.get_peft_model(base, method(**PROMPT))
    losses = train(model, ids)
    assert losses[-1] < losses[0]
    expected = logits(model, ids)
    if seam.names_cache(peft.PeftModelForCausalLM.prepare_inputs_for_generation):
        tokens = model.generate(input_ids=ids, max_new_tokens=3, do_sample=False)
        assert torch.equal(tokens[:, -1], logits(model, tokens[:, :-1])[:, -1].argmax(-1))
    else:
        with pytest.raises(UnsupportedError, match=r"peft \d.*add the virtual tokens again"):
            model.generate(input_ids=ids, max_new_tokens=3, do_sample=False)
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(swapped(llama, spec), tmp_path)
    assert_close(logits(again, ids), expected)
    with model.disable_adapter():
        assert torch.equal(logits(model, ids), raw)
    with pytest.raises(SpecError, match="trained under another attention"):
        peft.PeftModel.from_pretrained(llama(), tmp_path)


def test_a_prefix_is_refused_by_a_state(llama, ids):
    model = peft.get_peft_model(swapped(llama, "linear"), peft.PrefixTuningConfig(**PROMPT))
    with pytest.raises(UnsupportedError, match=r"holds 3 tokens .*a prefix that PEFT trains"):
        model(input_ids=ids)


@pytest.mark.filterwarnings("ignore:this swap drops the trained extras:UserWarning")
@pytest.mark.parametrize("kept", [None, []])
def test_swap_and_restore_under_an_adapter(kept, base, llama, ids):
    model = adapted(base, modules_to_save=kept)
    layer = base.model.layers[0].self_attn
    assert layer_backend(layer).name == base.config.attnzoo["backend"]
    attnzoo.swap(model, "flash")
    assert layer_backend(layer).name == "flash"
    with torch.no_grad():
        expected = llama()(ids).logits  # the adapter starts at zero
        assert_close(model(input_ids=ids).logits, expected, atol=1e-5, rtol=1e-5)
        attnzoo.restore(model)
        assert not hasattr(layer, "attnzoo")
        assert torch.equal(model(input_ids=ids).logits, expected)


def test_model_with_an_adapter_can_be_swapped(llama, ids, tmp_path):
    model = adapted(llama())
    attnzoo.swap(model, "gated_linear", gate="gated_retention")
    losses = train(model, ids)
    assert losses[-1] < losses[0]
    found = {name for name, p in model.named_parameters() if p.requires_grad and "attnzoo" in name}
    assert len(found) == 4  # extras made after the adapter are free
    with pytest.raises(UnsupportedError, match="next time, swap the model before get_peft_model"):
        model.save_pretrained(tmp_path)
    expected = logits(model, ids)
    assert_close(logits(model.merge_and_unload(), ids), expected, atol=1e-4, rtol=1e-4)


def test_adapters_with_equal_extras_can_be_merged(llama, ids):
    model = adapted(swapped(llama, GATED), init_lora_weights=False)
    torch.manual_seed(1)
    model.add_adapter(
        "second", peft.LoraConfig(r=2, target_modules=TARGETS, init_lora_weights=False)
    )
    deltas = {name: (first + second) for name, first, second in lora_deltas(model)}
    merged = model.merge_and_unload(adapter_names=["default", "second"])
    plain = swapped(llama, GATED)
    for name, module in plain.named_modules():
        if name in deltas:
            module.weight.data += deltas[name]
    assert deltas
    assert_close(logits(merged, ids), logits(plain, ids), atol=1e-5, rtol=1e-5)


def lora_deltas(model: Any) -> Any:
    for name, module in model.base_model.model.named_modules():
        if hasattr(module, "get_delta_weight"):
            yield name, module.get_delta_weight("default"), module.get_delta_weight("second")


def test_a_conversion_to_lora_without_the_extras_is_not_loaded(llama, ids, tmp_path):
    """PEFT keeps the last part of a parameter's name only."""
    config = {"r": 2, "target_modules": TARGETS, "task_type": "CAUSAL_LM"}
    model = peft.get_peft_model(swapped(llama, GATED), peft.GraloraConfig(**config))
    peft.save_as_lora(tmp_path, model, rank=16)
    with pytest.raises(SpecError, match="same parameters of backends"):
        peft.PeftModel.from_pretrained(swapped(llama, GATED), tmp_path)


@pytest.mark.parametrize("name", ["gated_linear", "linear"])
def test_auto_peft_model_applies_the_swap_of_the_adapter(llama, tmp_path, name):
    """And loads the trained extras; a base that is saved with another swap is refused."""
    options = {"gated_linear": {"window": 4}, "linear": {"feature_map": "hedgehog"}}[name]
    llama().save_pretrained(tmp_path / "base")
    base = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    attnzoo.swap(base, name, **options)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "adapter")
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    layers = attention_layers(loaded.get_base_model())
    assert {layer_backend(layer.module).name for layer in layers} == {name}
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        assert torch.equal(loaded.eval()(ids).logits, model.eval()(ids).logits)
    stock = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    with pytest.raises(SpecError, match="The adapter was trained under another attention"):
        peft.PeftModel.from_pretrained(stock, tmp_path / "adapter")
    other = attnzoo.swap(hf.AutoModelForCausalLM.from_pretrained(tmp_path / "base"), "flash")
    other.save_pretrained(tmp_path / "base")
    with pytest.raises(SpecError, match="The adapter was trained under another attention"):
        peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
