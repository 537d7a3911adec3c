from dataclasses import replace

import pytest
import torch

import attnzoo
from attnzoo.evaluation.generation import with_reference
from attnzoo.evaluation.quality import Quality, evaluate_rows
from attnzoo.evaluation.rows import Rows
from attnzoo.hf.swap import original_attention
from attnzoo.training.evaluator import as_dicts, rows_to_eval_batch, widest_window


def lines(softmax, window, result, raw=(3.0, 3.0)):
    names = ("softmax", "window alone", "raw swap", "result")
    pairs = zip(names, (softmax, window, raw, result), strict=True)
    return {
        name: Quality(loss=loss, recall=recall, loss_rows=[loss] * 4, recall_rows=[recall] * 4)
        for name, (loss, recall) in pairs
    }


def rows(length=300, count=3):
    tokens = torch.randint(3, 300, (count, length), generator=torch.Generator().manual_seed(3))
    place = torch.arange(length).expand(count, -1)
    return Rows(tokens=tokens, positions=place, bytes_per_token=1.0)


def test_recovered_fraction_of_the_gap_between_window_and_softmax():
    found = as_dicts(lines((1.0, 0.5), (1.5, 1.5), (1.125, 1.25)))
    assert found["result"]["loss_share"] == pytest.approx(0.75)
    assert found["result"]["recall_share"] == pytest.approx(0.25)
    assert found["softmax"]["loss_share"] == 1.0
    assert found["window alone"]["loss_share"] == 0.0
    assert found["raw swap"]["loss_share"] == pytest.approx(-3.0)


def test_generation_is_compared_with_the_original_model(model):
    attnzoo.swap(model, "flash", window=4)
    batch = rows_to_eval_batch(rows(), 2, generates=True)
    with original_attention(model):
        batch = replace(batch, generation=with_reference(batch.generation, model))
        original = evaluate_rows(model, batch)
    swapped = evaluate_rows(model, batch)
    assert original.agreement == 1
    assert swapped.agreement < 0.9
    assert evaluate_rows(model, rows_to_eval_batch(rows(), 2)).agreement is None


def test_short_rows_have_no_recall(model):
    batch = rows_to_eval_batch(rows(length=100), 2)
    assert not batch.repeats
    assert evaluate_rows(model, batch).recall is None
    assert len(rows_to_eval_batch(rows(), 2).repeats) == 2


def test_softmax_quality_of_a_swapped_model(model):
    batch = rows_to_eval_batch(rows(), 2)
    exact = evaluate_rows(model, batch)
    attnzoo.swap(model, "linear", window=4)
    assert widest_window(model) == 4
    swapped = evaluate_rows(model, batch)
    with original_attention(model):
        assert evaluate_rows(model, batch).loss == pytest.approx(exact.loss, rel=1e-5)
    assert evaluate_rows(model, batch) == swapped
    assert swapped.loss != pytest.approx(exact.loss, rel=1e-4)
    attnzoo.swap(model, "linear")
    assert widest_window(model) == 32
