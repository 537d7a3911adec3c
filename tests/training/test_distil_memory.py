"""The memory of a step of distillation, computed and measured."""

import pytest
from transformers import LlamaConfig

import attnzoo
from attnzoo.errors import UnsupportedError
from attnzoo.evaluation.memory import MemoryCase, compute, measure
from attnzoo.hf import logits
from attnzoo.training import distil_memory

pytestmark = pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable.:FutureWarning")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A config.json whose vocabulary is much larger than the rest of the model."""
    config = LlamaConfig(
        vocab_size=4000,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(path := tmp_path_factory.mktemp("config"))
    return path


def case(folder, train="full"):
    spec = attnzoo.AttentionSpec("linear", feature_map="hedgehog").to_dict()
    return MemoryCase(path=str(folder), spec=spec, length=512, batch=4, train=train, loss="distil")


@pytest.mark.parametrize("train", ["full", "extras"])
def test_chunks_take_a_quarter_of_the_memory_of_all_logits(folder, monkeypatch, train):
    monkeypatch.setattr(logits, "CHUNK_LOGITS", 64 * 4000)
    use, _ = compute(case(folder, train))  # a chunk has 64 of 2,048 tokens
    if train == "full":  # a copy, without extras
        assert 0.9 * use.parameters < use.teacher < use.parameters
    else:
        assert use.teacher == 0
    real = measure(case(folder, train))
    assert use.training == pytest.approx(real.training, rel=0.1)
    assert use.teacher == real.teacher
    monkeypatch.setattr(distil_memory, "keeps_logits", lambda model: False)
    whole, _ = compute(case(folder, train))
    assert use.training <= whole.training / 4


def test_models_without_predictions_are_refused(tmp_path):
    from transformers import BertConfig

    config = BertConfig(hidden_size=32, num_attention_heads=2, num_hidden_layers=1)
    config.architectures = ["BertModel"]
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match="BertModel predicts no next tokens"):
        compute(MemoryCase(path=str(tmp_path), length=8, loss="distil"))
