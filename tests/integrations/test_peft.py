"""PEFT adapters and the Trainer on top of a swapped model."""

from typing import Any

import peft
import pytest
import torch
import transformers as hf
from torch.testing import assert_close

import attnzoo
from attnzoo.integrations.attention import layer_backend

pytestmark = pytest.mark.filterwarnings("ignore:.*checkpointing. is deprecated:FutureWarning")
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]
BACKENDS = [("linear", {"feature_map": "hedgehog"}), ("gated_linear", {"gate": "gated_retention"})]


@pytest.fixture(params=BACKENDS, ids=["linear", "gated_linear"])
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


def test_lora_trains_beside_frozen_extras(base, ids, tmp_path):
    model = adapted(base)
    assert not any(p.requires_grad for name, p in model.named_parameters() if "attnzoo" in name)
    before = extras(model)
    losses = train(model, ids)
    assert losses[-1] < losses[0]
    assert all(torch.equal(x, before[name]) for name, x in extras(model).items())
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        model.save_pretrained(tmp_path)
        again = peft.PeftModel.from_pretrained(model.unload(), tmp_path).eval()
        assert torch.equal(again(input_ids=ids).logits, expected)
        assert_close(again.merge_and_unload()(ids).logits, expected, atol=1e-4, rtol=1e-4)


def test_extras_train_and_are_saved_with_the_adapter(base, llama, ids, tmp_path):
    attention = {"attention": base.config.attnzoo}
    model = adapted(base, modules_to_save=["attnzoo"])
    before = extras(model)
    losses = train(model, ids)
    assert losses[-1] < losses[0]
    for name, x in extras(model).items():
        assert torch.equal(x, before[name]) == ("original_module" in name), name
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        tokens = model.generate(input_ids=ids, max_new_tokens=4, do_sample=False)
        plain = model.generate(input_ids=ids, max_new_tokens=4, do_sample=False, use_cache=False)
        assert torch.equal(tokens, plain)
        model.save_pretrained(tmp_path)
        other = llama()
        attnzoo.swap(other, **attention)
        again = peft.PeftModel.from_pretrained(other, tmp_path).eval()
        assert_close(again(input_ids=ids).logits, expected)
        with model.disable_adapter():
            assert_close(model(input_ids=ids).logits, other_logits(llama, attention, ids))
        merged = model.merge_and_unload()
        assert_close(merged(ids).logits, expected, atol=1e-4, rtol=1e-4)
    assert isinstance(merged.model.layers[0].self_attn.attnzoo, attnzoo.AttentionBackend)


def other_logits(llama: Any, attention: Any, ids: Any) -> Any:
    model = llama()
    attnzoo.swap(model, **attention)
    return model(ids).logits


@pytest.mark.parametrize("kept", [None, ["attnzoo"]])
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


def test_model_with_an_adapter_can_be_swapped(llama, ids):
    model = adapted(llama())
    attnzoo.swap(model, "gated_linear", gate="gated_retention")
    losses = train(model, ids)
    assert losses[-1] < losses[0]
    found = {name for name, p in model.named_parameters() if p.requires_grad and "attnzoo" in name}
    assert len(found) == 4  # extras made after the adapter are free


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self, ids: Any) -> None:
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def test_trainer(base, ids, tmp_path):
    before = {name: p.detach().clone() for name, p in base.named_parameters()}
    arguments = hf.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=2,
        per_device_train_batch_size=3,
        learning_rate=1e-2,
        gradient_checkpointing=True,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
    )
    trainer = hf.Trainer(model=base, args=arguments, train_dataset=Rows(ids))
    trainer.train()
    changed = {name for name, p in base.named_parameters() if not torch.equal(p, before[name])}
    assert any("attnzoo" in name for name in changed)
    trainer.save_model(str(tmp_path / "saved"))
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    with torch.no_grad():
        assert torch.equal(again(ids).logits, base.eval()(ids).logits)
