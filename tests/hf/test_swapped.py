"""The class of a swapped model, where other packages read or change the class of a model."""

from typing import Any

import pytest
import torch
import transformers as hf
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard

import attnzoo
from attnzoo.errors import UnsupportedError
from attnzoo.hf.mixins import stock_class
from attnzoo.hf.seam import family_uses_interface
from attnzoo.hf.swapped import SwappedModel
from tests.helpers import tiny_llama


@pytest.fixture
def process_group():
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def shard(model: Any) -> Any:
    mesh = distributed.device_mesh.init_device_mesh("cpu", (1,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@pytest.mark.parametrize("first", ["swap", "shard"])
def test_fsdp_changes_the_class_too(first, ids, tmp_path, process_group):
    torch.manual_seed(2)
    steps = {"swap": lambda m: attnzoo.swap(m, "linear", feature_map="hedgehog"), "shard": shard}
    model = tiny_llama()
    steps.pop(first)(model)
    (second,) = steps.values()
    second(model)
    assert isinstance(model, FSDPModule)
    assert isinstance(model, SwappedModel)
    assert model._get_name() == "LlamaForCausalLM"
    expected = model(ids).logits
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    model.save_pretrained(tmp_path, state_dict=whole)  # as Accelerate does
    saved = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert saved.config.architectures == ["AttnzooLlamaForCausalLM"]
    assert stock_class(type(saved)) is hf.LlamaForCausalLM
    assert torch.equal(saved(ids).logits, expected)


@pytest.mark.parametrize("swapped", [False, True])
def test_a_trainer_shifts_smoothed_labels(swapped, ids, tmp_path):
    """It looks the name of the model's class up, which FSDP2 changes."""
    stock = tiny_llama()
    options: Any = {"output_dir": tmp_path, "use_cpu": True, "report_to": "none"}
    arguments = hf.TrainingArguments(**options, label_smoothing_factor=0.15)
    inputs = {"input_ids": ids, "labels": ids}
    logits = stock(ids).logits[:, :-1].log_softmax(-1)
    picked = logits.gather(-1, ids[:, 1:, None]).mean()
    expected = -(0.85 * picked + 0.15 * logits.mean())
    model: Any = attnzoo.swap(stock, "softmax") if swapped else stock
    if swapped:
        model.__class__ = type(f"FSDP{type(model).__name__}", (type(model),), {})
    loss = hf.Trainer(model, arguments).compute_loss(model, dict(inputs))
    torch.testing.assert_close(loss, expected)


def test_a_trainer_loads_the_best_checkpoint(ids, tmp_path):
    model: Any = attnzoo.swap(tiny_llama(), "linear", feature_map="hedgehog")
    rows: Any = [{"input_ids": row, "labels": row} for row in ids]
    arguments = hf.TrainingArguments(
        output_dir=str(tmp_path),
        use_cpu=True,
        report_to="none",
        max_steps=2,
        learning_rate=1e-2,
        eval_strategy="steps",
        eval_steps=1,
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=True,  # the first
        disable_tqdm=True,
    )
    hf.Trainer(model, arguments, train_dataset=rows, eval_dataset=rows).train()
    first, last = (
        hf.AutoModelForCausalLM.from_pretrained(tmp_path / f"checkpoint-{step}") for step in (1, 2)
    )
    name = "model.layers.0.self_attn.attnzoo.feature_map.query_residual"
    assert torch.equal(model.get_parameter(name), first.get_parameter(name))
    assert not torch.equal(first.get_parameter(name), last.get_parameter(name))


def test_another_process_reads_a_pickled_model(ids, tmp_path, fresh_python):
    model: Any = attnzoo.swap(tiny_llama(), "gated_linear", feature_map="hedgehog").eval()
    torch.save((model, ids, model(ids).logits), tmp_path / "model.pt")
    done = fresh_python(
        "import sys, torch\n"
        "model, ids, logits = torch.load(sys.argv[1], weights_only=False)\n"
        "assert torch.equal(model(ids).logits, logits)\n"
        "print(type(model).__qualname__)",
        tmp_path / "model.pt",
    )
    assert done.stdout.split() == ["AttnzooLlamaForCausalLM"], done.stderr


def test_the_pipeline_that_compares_classes_has_no_swapped_models():
    """That of text to audio gives these classes a vocoder, by the class and not by its name."""
    classes = hf.models.auto.modeling_auto.MODEL_FOR_TEXT_TO_SPECTROGRAM_MAPPING_NAMES
    assert classes
    assert not [family for family in classes if family_uses_interface(family)]


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_parts_of_encoder_decoders_are_refused(family):
    """The config of T5's encoder is a copy; that of BART's is the decoder's too."""
    sizes: dict[str, Any] = {"vocab_size": 40, "d_model": 16, "num_heads": 2, "num_layers": 1}
    if family == "bart":
        sizes = {f"{part}_{x}": 2 for part in ("encoder", "decoder") for x in ("layers", "ffn_dim")}
        sizes |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
        sizes |= {"vocab_size": 40, "d_model": 16}
    config = hf.AutoConfig.for_model(family, **sizes)
    model = hf.AutoModelForSeq2SeqLM.from_config(config)
    part: nn.Module = model.get_encoder()
    with pytest.raises(UnsupportedError, match="whole model"):
        attnzoo.swap(part, "softmax")
    assert not isinstance(part, SwappedModel)
    attnzoo.swap(model, "softmax")
