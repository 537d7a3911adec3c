"""Evaluation at the length that a user means, and who wins at equal memory."""

import json

import pytest
import torch

from attnzoo.evaluation.equal_memory import EqualWindow
from attnzoo.evaluation.rows import Rows
from attnzoo.training import evaluator as evaluation
from attnzoo.training.evaluator import Evaluator, evaluate
from attnzoo.training.recover import recover
from attnzoo.training.verdict import equal_sentence
from tests.training.short_runs import arguments
from tests.training.test_verdict import made

WINDOW = EqualWindow(length=64, windows={0: 24, 1: 24}, swap_bytes=1, exact_bytes=8)


def rows(length, count):
    tokens = torch.arange(count * length).view(count, length)
    positions = torch.arange(length).expand(count, -1)
    return Rows(tokens=tokens, positions=positions, bytes_per_token=1.0)


def test_lengths_that_cannot_be_evaluated_are_named(saved):
    said = []
    load = lambda length: rows(length, 256 // length)  # noqa: E731
    options = {"rows": 8, "log": said.append}
    found = Evaluator(saved, rows(16, 16), load, target_length=64, **options)
    assert list(found.batches) == [16, 64]
    assert said[:-1] == [
        "128 tokens of held-out text are not evaluated: it has 2 rows of that length, and 4 are "
        "the least; give more text"
    ]
    assert list(Evaluator(saved, rows(16, 16), load, **options).batches) == [16]


def test_who_wins_at_equal_memory():
    lines = {"result": made(1.0, 0.5), "equal window": made(1.2, 0.3)}
    text = equal_sentence(lines, WINDOW, 64)
    assert text.startswith("Against the window of equal memory (24 tokens) on rows of 64 tokens: ")
    assert "the swap is better in loss" in text
    assert "the window is better in recall" in text
    assert "sees every key of rows of 16 tokens" in equal_sentence(lines, WINDOW, 16)
    whole = EqualWindow(length=64, windows={0: None}, swap_bytes=8, exact_bytes=8)
    assert "softmax is its baseline" in equal_sentence(lines, whole, 64)
    assert equal_sentence(lines, None, 64) == ""


@pytest.fixture(scope="module")
def recovered(saved, text, spec, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "out"
    args = arguments(out, transfer_steps=1, max_steps=0, max_length=16, target_length=32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation, "ROWS", 8)
        return out, recover(saved, spec, [text], args)


def test_recovery_has_the_window_of_equal_memory_and_longer_rows(recovered):
    out, results = recovered
    assert "equal window" in results["lines"]
    assert set(results["longer"]) == {"32", "64"}
    names = {"softmax", "window alone", "equal window", "result"}
    assert all(set(x) == names for x in results["longer"].values())
    assert results["equal_window"]["windows"] == {"0": 2, "1": 2}  # tests/training/short_runs.py
    written = json.loads((out / "recovery.json").read_text())
    assert all(results[key] == written[key] for key in ("longer", "lines", "equal_window"))
    assert (
        "Against the window of equal memory (2 tokens) on rows of 16 tokens" in results["verdict"]
    )
    text = (out / "README.md").read_text()
    assert "| window of equal memory (2) |" in text
    assert "on rows of 64 tokens" in text
    assert "| result @ 64 |" in text


def test_evaluation_has_the_same_lines(recovered, text):
    out, results = recovered
    found = evaluate(out, [text], row_length=16, rows=8, target_length=32)
    for name in ("softmax", "result", "window alone", "equal window"):
        assert found["lines"][name]["loss"] == pytest.approx(results["lines"][name]["loss"])
        for length in ("32", "64"):
            mine, theirs = (x["longer"][length][name] for x in (found, results))
            assert mine["loss"] == pytest.approx(theirs["loss"])
    assert found["verdict"] == results["verdict"]
