"""The memory of a step of distillation, computed and measured."""

import pytest
from transformers import LlamaConfig

import attnzoo
from attnzoo.errors import ConfigError, UnsupportedError
from attnzoo.evaluation.memory import compute, measure
from attnzoo.evaluation.memory_case import MemoryCase
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


def case(folder, train="full", **changes):
    spec = attnzoo.AttentionSpec("linear", feature_map="hedgehog").to_dict()
    options = {"length": 512, "batch": 4, "train": train, "loss": "distil", **changes}
    return MemoryCase(path=str(folder), spec=spec, **options)


@pytest.mark.parametrize("train", ["full", "lora", "extras"])
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


@pytest.mark.parametrize(("train", "teacher"), [("lora", "shared"), ("full", "copy")])
def test_autocast_is_computed_as_measured(folder, train, teacher):
    chosen = case(folder, train, precision="bf16", teacher=teacher, length=64, lora_rank=8)
    use, real = compute(chosen)[0], measure(chosen)
    for name in ("parameters", "gradients", "optimizer", "activations", "training", "teacher"):
        assert getattr(use, name) == pytest.approx(getattr(real, name), rel=0.1), name
    assert use.training < compute(case(folder, train, teacher=teacher, length=64))[0].training


def test_a_copy_of_frozen_weights_counts(folder):
    shared, copied = (
        compute(case(folder, "lora", length=32, teacher=x))[0] for x in ("shared", "copy")
    )
    assert (shared.teacher, copied.teacher > 0) == (0, True)
    assert compute(case(folder, "lora", length=32))[0].teacher == 0


@pytest.mark.parametrize("options", [{}, {"teacher_dtype": "bfloat16"}])
def test_an_offloaded_teacher_is_in_memory_layer_by_layer(folder, options):
    copied, offloaded = (
        case(folder, length=64, teacher=x, precision="bf16", **options)
        for x in ("copy", "offloaded")
    )
    use, real = compute(offloaded)[0], measure(offloaded)
    assert use.teacher == real.teacher == 0
    assert use.training == pytest.approx(real.training, rel=0.1)
    whole = compute(copied)[0]
    assert use.training < whole.training
    itemsize = 2 if options else 4
    assert whole.teacher == pytest.approx(itemsize / 4 * use.parameters, rel=0.1)


def test_a_teacher_in_4_bits_counts_as_bitsandbytes_keeps_it(folder):
    """Linear layers in NF4 (arXiv:2305.14314, 4.127 bits a weight), the rest in bfloat16."""
    tiny = {"length": 8, "batch": 1}
    half, small = (compute(case(folder, **tiny, teacher_dtype=x))[0] for x in ("bfloat16", "nf4"))
    count = 32 * (32 + 2 * 16 + 32) + 3 * 32 * 48
    assert half.teacher - small.teacher == pytest.approx(count * (2 - 4.127 / 8), rel=1e-3)
    assert small.optimizer == half.optimizer
    with pytest.raises(ConfigError, match="not offloaded"):
        case(folder, teacher="offloaded", teacher_dtype="nf4")
    with pytest.raises(ConfigError, match="compute the memory only"):
        measure(case(folder, teacher_dtype="nf4"))


def test_the_head_of_an_offloaded_teacher_is_in_memory_while_it_runs(folder):
    """With few tokens, and few gradients, it is the largest of all."""
    copied, offloaded = (
        compute(case(folder, "extras", length=4, batch=1, teacher=x))[0]
        for x in ("copy", "offloaded")
    )
    head = 4 * 4000 * 32
    assert copied.backward < head < offloaded.backward < head + copied.backward
