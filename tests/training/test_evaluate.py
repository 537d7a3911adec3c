import pytest
import torch

import attnzoo
from attnzoo.training.data import Rows
from attnzoo.training.evaluate import (
    Quality,
    as_data,
    branch_qualities,
    judged_rows,
    quality,
    softmax_quality,
    verdict,
    window_of,
)


def lines(softmax, window, result, raw=(3.0, 3.0)):
    names = ("softmax", "window alone", "raw swap", "result")
    pairs = zip(names, (softmax, window, raw, result), strict=True)
    return {name: Quality(loss=loss, recall=recall) for name, (loss, recall) in pairs}


def rows(length=300, count=3):
    tokens = torch.randint(3, 300, (count, length), generator=torch.Generator().manual_seed(3))
    place = torch.arange(length).expand(count, -1)
    return Rows(tokens=tokens, positions=place, bytes_per_token=1.0)


def test_shares_are_of_the_distance_from_the_window_to_softmax():
    found = as_data(lines((1.0, 0.5), (1.5, 1.5), (1.125, 1.25)))
    assert found["result"]["loss_share"] == pytest.approx(0.75)
    assert found["result"]["recall_share"] == pytest.approx(0.25)
    assert found["softmax"]["loss_share"] == 1.0
    assert found["window alone"]["loss_share"] == 0.0
    assert found["raw swap"]["loss_share"] == pytest.approx(-3.0)


def test_what_is_worse_than_its_window_is_said_first():
    told = verdict(lines((1.0, 0.5), (1.5, 1.5), (1.4, 1.6)))
    assert told.startswith("The result is worse than its window alone: recall is 1.600")
    assert "loss is" not in told
    told = verdict(lines((1.0, 0.5), (1.5, 1.5), (1.7, 1.6)))
    assert "loss is 1.700 bits per byte, the window's 1.500 and recall" in told
    told = verdict(lines((1.0, 0.5), (1.5, 1.5), (1.25, 0.75)))
    assert told == (
        "Of the distance from the window alone to softmax, the result covers 50% in loss and 75% "
        "in recall."
    )
    told = verdict(lines((1.0, None), (1.001, None), (1.0005, None)))
    assert told.startswith("On this text the window alone is as good as softmax")


def test_rows_too_short_for_a_repeat_have_no_recall(model):
    judged = judged_rows(rows(length=100), 2)
    assert judged.repeats == []
    assert quality(model, judged).recall is None
    assert quality(model, judged_rows(rows(), 2)).recall is not None


def test_softmax_is_judged_inside_a_swapped_model(model):
    judged = judged_rows(rows(), 2)
    exact = quality(model, judged)
    attnzoo.swap(model, "linear", window=4)
    swapped = quality(model, judged)
    assert softmax_quality(model, judged).loss == pytest.approx(exact.loss, rel=1e-5)
    assert quality(model, judged) == swapped
    assert swapped.loss != pytest.approx(exact.loss, rel=1e-4)


def test_branches_are_judged_alone(model):
    judged = judged_rows(rows(), 2)
    attnzoo.swap(model, "flash", window=4)
    window = quality(model, judged).loss
    attnzoo.swap(model, "linear", window=4, far_weight=3.0)
    assert window_of(model) == 4
    whole = quality(model, judged).loss
    found = branch_qualities(model, lambda model: quality(model, judged))
    assert found["near branch alone"].loss == pytest.approx(window, rel=1e-5)
    far = found["far branch alone"].loss
    assert len({round(x, 4) for x in (whole, window, far)}) == 3
    assert quality(model, judged).loss == whole  # what was changed for it is back
    attnzoo.swap(model, "linear")
    assert branch_qualities(model, lambda model: quality(model, judged)) == {}
    assert window_of(model) == 32
