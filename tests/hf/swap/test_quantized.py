"""Dtype and device of extras in models with quantized weights, which are swapped after loading."""

from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

import attnzoo
from tests.helpers import MODEL_SIZES

BACKENDS: dict[str, dict[str, Any]] = {
    "gated_linear": {},
    "delta": {"window": 4},
    "linear": {"window": 4, "feature_map": "hedgehog"},
    "performer": {"num_features": 8},
    "linformer": {"block": 4, "num_rows": 2},
}
STORAGES = [torch.float8_e4m3fn, torch.uint8, torch.int8]


class QuantizedLinear(nn.Linear):
    """A linear layer that stores its weight in 8 bits.

    The scale of float8 is a float32 parameter, as in FP8Linear; that of integers is an attribute,
    as in bitsandbytes.
    """

    def __init__(self, linear: nn.Linear, storage: torch.dtype) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        weight = linear.weight.detach().float()
        scale, self.low = weight.abs().amax() / 100, 128 if storage == torch.uint8 else 0
        stored = (weight / scale + self.low).to(storage)
        self.scale = nn.Parameter(scale) if storage.is_floating_point else scale
        self.store(stored)

    def store(self, weight: Tensor) -> None:
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        weight = (self.weight.float() - self.low) * self.scale
        return F.linear(x, weight.to(x.dtype))


class BufferLinear(QuantizedLinear):
    """The same with the integers in a buffer, as in AWQ."""

    def store(self, weight: Tensor) -> None:
        del self.weight
        self.register_buffer("weight", weight)


def quantize(model: Any, storage: torch.dtype, cls: type[QuantizedLinear] = QuantizedLinear) -> Any:
    """Quantize all linear layers but the head."""
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and "lm_head" not in name and "attnzoo" not in name:
            model.set_submodule(name, cls(module, storage))
    return model


def extras(model: Any) -> dict[str, Tensor]:
    return {name: x for name, x in model.state_dict().items() if "attnzoo" in name}


@pytest.fixture
def bf16(llama):
    return lambda: llama().to(torch.bfloat16)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_quantized_model_is_swapped_as_one_that_is_quantized_later(backend, storage, bf16, ids):
    expected = quantize(attnzoo.swap(bf16(), backend, **BACKENDS[backend]), storage)
    model = attnzoo.swap(quantize(bf16(), storage), backend, **BACKENDS[backend])
    found = extras(model)
    for name, x in extras(expected).items():
        assert found[name].dtype == x.dtype, name
        assert torch.equal(found[name], x), name
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected(ids).logits)


@pytest.mark.parametrize(
    ("storage", "cls"), [*((x, QuantizedLinear) for x in STORAGES), (torch.int8, BufferLinear)]
)
def test_extras_take_the_device_of_the_layer(storage, cls, bf16):
    """The meta device stands in for an accelerator."""
    model = quantize(bf16(), storage, cls).to("meta")
    attnzoo.swap(model, "gated_linear")
    found = {(x.dtype, x.device.type) for x in extras(model).values()}
    assert found == {(torch.bfloat16, "meta")}


@pytest.mark.parametrize("storage", STORAGES)
def test_extras_train(storage, bf16, ids):
    model = attnzoo.swap(quantize(bf16(), storage), "gated_linear")
    trained = {
        name: p for name, p in model.named_parameters() if name.endswith("attnzoo.gate.bias")
    }
    before = {name: p.detach().clone() for name, p in trained.items()}
    model(input_ids=ids, labels=ids).loss.backward()
    torch.optim.AdamW(trained.values(), lr=0.1).step()
    assert len(trained) == 2
    for name, p in trained.items():
        assert p.isfinite().all()
        assert not torch.equal(p, before[name])


def test_adapters_on_quantized_weights_do_not_set_the_dtype(bf16):
    """Adapters are float32 there (QLoRA)."""
    model = quantize(bf16(), torch.uint8)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    dtypes = {p.dtype for name, p in adapted.named_parameters() if "lora_" in name}
    assert dtypes == {torch.float32}
    attnzoo.swap(adapted, "gated_linear")
    assert {x.dtype for x in extras(model).values()} == {torch.bfloat16}


def test_parts_of_a_composite_model_have_their_own_dtypes():
    parts = {
        "text_config": hf.LlamaConfig(**MODEL_SIZES),
        "vision_config": hf.CLIPVisionConfig(**MODEL_SIZES),
    }
    model = hf.LlavaForConditionalGeneration(hf.LlavaConfig(**parts))
    model.model.vision_tower.half()
    quantize(model.model.language_model.to(torch.bfloat16), torch.uint8)
    attnzoo.swap(model, "linear", feature_map="hedgehog")
    found = {("vision" in name, x.dtype) for name, x in extras(model).items()}
    assert found == {(True, torch.float16), (False, torch.bfloat16)}
