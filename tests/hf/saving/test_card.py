"""Cards of swapped models that Trainer and PEFT write."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import transformers as hf
from huggingface_hub import ModelCard
from transformers.utils import hub

import attnzoo
from attnzoo.hf.saving.card import FILE, HEADING, complete_card, kept_metadata


@pytest.fixture
def trainer(llama, tmp_path):
    """A function that returns a Trainer of a model."""

    def make(model):
        arguments = hf.TrainingArguments(str(tmp_path / "out"), report_to=[], use_cpu=True)
        (tmp_path / "out").mkdir(exist_ok=True)
        return hf.Trainer(model, arguments)

    return make


def read(folder):
    return ModelCard((folder / FILE).read_text("utf-8"))


def test_the_card_of_trainer_has_the_tag_and_the_install_line(llama, trainer, tmp_path):
    made = trainer(attnzoo.swap(llama(), "linear"))
    for _ in range(2):  # the section stands once
        made.create_model_card(tags="mine", model_name="a model")
    card = read(tmp_path / "out")
    assert set(card.data.tags) >= {"mine", "attnzoo"}
    assert card.text.count(HEADING) == 1
    assert "pip install attnzoo" in card.text
    assert 'AutoModelForCausalLM.from_pretrained("out")' in card.text
    assert "# a model" in card.text


def test_the_card_of_a_stock_model_is_unchanged(llama, trainer, tmp_path):
    made = trainer(llama())
    made.create_model_card(tags=["mine"])
    card = read(tmp_path / "out")
    assert set(card.data.tags) == {"mine", "generated_from_trainer"}
    assert "attnzoo" not in card.content.replace(str(tmp_path), "")


def test_the_card_of_an_adapter_loads_it_on_its_base(llama, tmp_path):
    llama().save_pretrained(tmp_path / "base")
    base = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    attnzoo.swap(base, "gated_linear", window=4)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, config)
    model.save_pretrained(tmp_path / "adapter")
    card = read(tmp_path / "adapter")
    assert "attnzoo" in card.data.tags
    assert "lora" in card.data.tags
    assert card.data.library_name == "peft"
    assert 'AutoPeftModelForCausalLM.from_pretrained("adapter")' in card.text


def test_push_to_hub_uploads_the_id_and_the_install_line(llama, monkeypatch):
    """Without a network: the calls to the Hub do nothing, and the card is new."""
    model: Any = attnzoo.swap(llama(), "linear")
    cards = []

    class Hub:
        def create_repo(self, *_, **__):
            return SimpleNamespace(repo_id="org/name")

        def create_commit(self, *, operations, **_):
            (readme,) = (x for x in operations if x.path_in_repo == "README.md")
            cards.append(ModelCard(Path(readme.path_or_fileobj).read_text("utf-8")))

        def create_branch(self, *_, **__):
            raise AssertionError

    monkeypatch.setattr(hub, "hf_api", Hub)
    new = lambda *_, **__: ModelCard("---\ntags: [x]\n---\n# Card")  # noqa: E731
    monkeypatch.setattr(hub, "create_and_tag_model_card", new)
    model.push_to_hub("name")
    (card,) = cards
    assert card.data.tags == ["x", "attnzoo"]
    assert 'AutoModelForCausalLM.from_pretrained("org/name")' in card.text


def test_license_and_language_of_the_base_model_are_kept(tmp_path):
    assert kept_metadata(tmp_path) == {}
    (tmp_path / FILE).write_text("---\nlicense: other\nlicense_name: x\ntags: [a]\n---\ntext")
    assert kept_metadata(tmp_path) == {"license": "other", "license_name": "x"}
    complete_card(tmp_path / "absent", "x", "AutoModel")
    assert not (tmp_path / "absent").exists()
    assert torch.get_default_dtype() == torch.float32
