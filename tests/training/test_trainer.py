"""Training of a swapped model by transformers' Trainer, with and without PEFT."""

import datasets
import pytest
import torch
import transformers as hf
from peft import LoraConfig, get_peft_model

import attnzoo
from attnzoo.errors import AttnzooError, ConfigError
from attnzoo.hf.lora import with_adapters
from attnzoo.training.data import pack
from attnzoo.training.trainer import DivergenceError, LogitDistillationTrainer, TransferTrainer
from attnzoo.training.transfer import extras
from tests.training.short_runs import arguments


@pytest.mark.exhaustive
@pytest.mark.parametrize("adapters", [False, True], ids=["all weights", "lora"])
def test_trainer_trains_a_swapped_model(model, saved, tmp_path, adapters):
    attnzoo.swap(model, "gated_linear", feature_map="hedgehog", window=4)
    before = {name: p.detach().clone() for name, p in extras(model).items()}
    trained = model
    if adapters:
        trained = get_peft_model(model, LoraConfig(r=4, task_type="CAUSAL_LM"))
    tokenizer = hf.AutoTokenizer.from_pretrained(saved)
    rows = pack(datasets.Dataset.from_dict({"text": ["to and fro and " * 40] * 8}), tokenizer, 48)
    arguments = hf.TrainingArguments(
        output_dir=str(tmp_path / "out"),
        max_steps=30,
        learning_rate=1e-2,
        per_device_train_batch_size=4,
        logging_steps=5,
        save_steps=30,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = hf.Trainer(model=trained, args=arguments, train_dataset=rows)
    trainer.train()
    logged = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert logged[-1] < 0.7 * logged[0]
    after = extras(trained.merge_and_unload() if adapters else model)
    assert all(not torch.equal(before[name], after[name]) for name in before)
    if not adapters:
        again = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "checkpoint-30")
        ids = rows.tokens[:2]
        torch.testing.assert_close(again(ids).logits, trained.eval()(ids).logits)


def test_a_run_whose_steps_all_overflow_stops(model, tmp_path, monkeypatch):
    """In float16 each is skipped, so the loss alone does not tell."""
    attnzoo.swap(model, "linear", feature_map="hedgehog")
    ids = torch.arange(3, 27)
    rows = [{"input_ids": ids, "labels": ids}] * 200
    args = arguments(tmp_path, max_steps=50, learning_rate=1e-3, save_strategy="no")
    trainer = TransferTrainer(model, args, train_dataset=rows)
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", enabled=False)
    norms = iter([1.0, *[torch.inf] * 49])
    monkeypatch.setattr(hf.Trainer, "_clip_grad_norm", lambda *_: torch.tensor(next(norms)))
    with pytest.raises(DivergenceError, match="norm of the last 40 gradients is inf"):
        trainer.train()
    assert trainer.state.global_step == 40


def test_adapters_are_outside_backends(model):
    attnzoo.swap(model, "gated_linear", feature_map="hedgehog", window=4)
    trained = with_adapters(model, 4, "CAUSAL_LM")
    names = [name for name, _ in trained.named_parameters() if "lora_" in name]
    assert any("q_proj" in name for name in names)
    assert any("down_proj" in name for name in names)
    assert not any("attnzoo" in name for name in names)


IDS = torch.arange(3, 27)
ROWS = [{"input_ids": IDS, "labels": IDS}] * 4


def test_stages_by_themselves(model, tmp_path):
    """What transfer froze is trained by distillation; a finished stage takes no step more."""
    attnzoo.swap(model, "gated_linear", feature_map="hedgehog", window=4)
    args = arguments(tmp_path, train="full", max_steps=2, learning_rate=1e-3, save_steps=1)
    TransferTrainer(model, args, train_dataset=ROWS).train()
    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if ".attnzoo." not in n}
    trainer = LogitDistillationTrainer(model, args, train_dataset=ROWS)
    with pytest.raises(ConfigError, match=r"checkpoint-2.* other parameters"):
        trainer.train(True)
    args.output_dir = str(tmp_path / "distil")
    LogitDistillationTrainer(model, args, train_dataset=ROWS).train()
    assert len(frozen) == 21
    assert not [n for n, x in frozen.items() if torch.equal(x, model.get_parameter(n))]
    expected = {n: x.clone() for n, x in model.state_dict().items()}
    trainer = LogitDistillationTrainer(model, args, train_dataset=ROWS)
    trainer.train(True)
    assert trainer.state.global_step == 2
    assert all(torch.equal(x, expected[n]) for n, x in model.state_dict().items())
    with pytest.raises(ConfigError, match="evaluate_rows"):
        trainer.evaluate()


@pytest.mark.parametrize(
    ("backend", "changes", "message"),
    [
        ("linear", None, "takes RecoveryArguments, got NoneType"),
        ("linear", {"max_steps": 0}, "at least one step"),
        ("linear", {"train": "lora"}, "without adapters"),
        ("softmax", {"train": "extras"}, "no parameters"),
        (None, {"train": "full"}, "is not swapped"),
    ],
)
def test_stages_that_cannot_train_are_refused(model, tmp_path, backend, changes, message):
    if backend is not None:
        attnzoo.swap(model, backend, **{"linear": {"feature_map": "hedgehog"}}.get(backend, {}))
    args = None if changes is None else arguments(tmp_path, **{"train": "full", **changes})
    for kind in (TransferTrainer, LogitDistillationTrainer):
        if kind is LogitDistillationTrainer or "train" not in (changes or {}):
            with pytest.raises(AttnzooError, match=message):
                kind(model, args, train_dataset=ROWS)
    if message == "without adapters":
        model = with_adapters(model, 2, "CAUSAL_LM")
        args.train = "full"
        with pytest.raises(ConfigError, match="with adapters"):
            LogitDistillationTrainer(model, args)
