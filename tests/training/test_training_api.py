"""The names that ``attnzoo.training`` exports, in a loop of one's own and in Trainer."""

import inspect

import pytest
import torch
import transformers as hf

import attnzoo
from attnzoo import training
from attnzoo.training import Rows, distil_loss, evaluate_rows, rows_to_eval_batch, softmax_teacher

TOKENS = torch.randint(3, 300, (4, 32), generator=torch.Generator().manual_seed(2))


def test_exported_names_resolve_and_are_documented():
    assert {"Transfer", "softmax_teacher", "distil_loss", "evaluate_rows"} <= set(training.__all__)
    for name in training.__all__:
        assert inspect.getdoc(getattr(training, name)), name
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = training.no_such_name


def test_evaluation_needs_rows_only(model):
    rows = Rows(tokens=TOKENS, positions=torch.arange(32).expand(4, -1), bytes_per_token=2.0)
    found = evaluate_rows(model, rows_to_eval_batch(rows, 4))
    with torch.no_grad():
        loss = model(TOKENS, labels=TOKENS).loss.double()
    assert found.loss == pytest.approx(float(loss) / 2 / torch.tensor(2.0).log().item(), rel=1e-5)
    assert len(found.loss_rows) == 4


class DistilTrainer(hf.Trainer):
    """As docs/training_loop.md describes it."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return self.distil(model, {**inputs, "num_items_in_batch": num_items_in_batch})


def test_trainer_takes_the_steps_of_a_loop_of_ones_own(model, tmp_path):
    """With two micro-batches that have different numbers of labels."""
    attnzoo.swap(model, "linear", feature_map="hedgehog", window=4)
    start = {name: x.clone() for name, x in model.state_dict().items()}
    labels = TOKENS.clone()
    labels[:2, 5:] = -100
    loss = distil_loss(softmax_teacher(model, weights_change=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss(model, {"input_ids": TOKENS, "labels": labels}).backward()
    optimizer.step()
    expected = {name: x.clone() for name, x in model.state_dict().items()}
    model.load_state_dict(start)
    arguments = hf.TrainingArguments(
        str(tmp_path),
        max_steps=1,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=0.1,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0.0,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        train_sampling_strategy="sequential",
        disable_tqdm=True,
    )
    data = [{"input_ids": x, "labels": y} for x, y in zip(TOKENS, labels, strict=True)]
    trainer = DistilTrainer(model, arguments, train_dataset=data)
    trainer.distil = distil_loss(softmax_teacher(model, weights_change=True))
    trainer.train()
    for name, x in model.state_dict().items():
        torch.testing.assert_close(x, expected[name], rtol=1e-4, atol=1e-6)
    assert any(not torch.equal(x, start[name]) for name, x in expected.items())
