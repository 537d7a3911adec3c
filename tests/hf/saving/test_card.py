"""Cards of swapped models that transformers, TRL and PEFT write: they have the tag of the model."""

from typing import Any

import peft
import pytest
import transformers as hf
from huggingface_hub import ModelCard
from transformers.utils import hub

import attnzoo
from tests.helpers import tiny_llama


@pytest.mark.parametrize("loaded", [False, True])
def test_models_have_the_tag_while_they_are_swapped(loaded, tmp_path):
    model: Any = attnzoo.swap(tiny_llama(), "linear")
    model.add_model_tags("mine")
    if loaded:
        model.save_pretrained(tmp_path)
        model = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert "attnzoo" in model.model_tags
    assert hf.LlamaForCausalLM.model_tags is None
    attnzoo.restore(model)
    assert "attnzoo" not in model.model_tags


def test_push_to_hub_uploads_the_tag(monkeypatch, tmp_path):
    """Without a network: a new card is made, and nothing else runs."""
    model: Any = attnzoo.swap(tiny_llama(), "linear")

    class MadeError(Exception):
        """Ends the test where the card has its tags."""

    def new(repo: str, tags: Any = None, **_: Any) -> None:
        raise MadeError(tags)

    monkeypatch.setattr(hub, "create_and_tag_model_card", new)
    monkeypatch.setattr(hub, "hf_api", lambda: _Hub)
    with pytest.raises(MadeError, match="attnzoo"):
        model.push_to_hub("name")


class _Hub:
    @staticmethod
    def create_repo(*_: Any, **__: Any) -> Any:
        return type("Url", (), {"repo_id": "org/name"})


def test_the_card_of_an_adapter_has_the_tag(tmp_path):
    base = attnzoo.swap(tiny_llama(), "gated_linear", window=4)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    peft.get_peft_model(base, config).save_pretrained(tmp_path)
    card = ModelCard((tmp_path / "README.md").read_text("utf-8"))
    assert {"attnzoo", "lora"} <= set(card.data.tags)
