"""Conclusions in words: what is claimed, and what is not claimed, from rows of losses."""

import random

import pytest

from attnzoo.evaluation.equal_memory import EqualWindow
from attnzoo.evaluation.quality import Quality
from attnzoo.training.verdict import equal_sentence, verdict

ROWS = 32
EQUAL = EqualWindow(length=300, windows={1: 20}, swap_bytes=40, exact_bytes=600)


def made(loss, recall=None, agreement=None, *, seed=0, noise=0.02, unigram=5.0, own=None):
    """Return a quality whose rows scatter around its means; rows of one seed are equally hard."""
    hard = random.Random(seed)
    scatter = random.Random(own if own is not None else repr((loss, recall, agreement)))
    difficulty = [hard.gauss(0, 0.3) for _ in range(ROWS)]

    def rows(mean, spread):
        if mean is None:
            return ()
        values = [mean + d + scatter.gauss(0, spread) for d in difficulty]
        shift = mean - sum(values) / ROWS if own is None else 0
        return tuple(x + shift for x in values)

    losses, recalls, equal = rows(loss, noise), rows(recall, noise), rows(agreement, 3 * noise)
    mean = lambda x: sum(x) / ROWS if x else None  # noqa: E731
    return Quality(
        loss=mean(losses),
        recall=mean(recalls),
        agreement=mean(equal),
        unigram=unigram,
        loss_rows=losses,
        recall_rows=recalls,
        agreement_rows=equal,
    )


def lines(softmax, window, result, **options):
    names = ("softmax", "window alone", "result")
    given = zip(names, (softmax, window, result), strict=True)
    return {name: made(*values, **options) for name, values in given}


def test_a_clear_result_states_fractions_with_errors():
    text = verdict(lines((1.0, 0.5, 1.0), (1.5, 1.5, 0.3), (1.25, 0.75, 0.7)))
    assert text.startswith("Of the tokens that the result generates, 70% ± ")
    assert "(the window alone: 30% ± " in text
    assert "closes the gap between the window alone and softmax by 50% ± " in text
    assert " in loss and 75% ± " in text
    assert "Warning" not in text


def test_a_result_worse_than_its_window_comes_first():
    text = verdict(lines((1.0, 0.5), (1.5, 1.5), (1.4, 1.6)))
    assert text.startswith("The result is worse than its window alone in recall (0.100 ± 0.0")
    assert " loss (" not in text
    text = verdict(lines((1.0, 0.5), (1.5, 1.5), (1.7, 1.6)))
    assert "alone in loss (0.200 ± " in text
    text = verdict(lines((1.0, 0.5, 1.0), (1.5, 1.5, 0.5), (1.2, 0.7, 0.2)))
    assert text.startswith("The result is worse than its window alone in equal tokens (-30% ± ")
    assert "Do not use it" in text


def test_noise_is_no_verdict():
    """0.959 against 0.957, where softmax itself has 0.959."""
    text = verdict(lines((0.959, 0.4), (0.957, 0.9), (0.959, 0.5), noise=0.01))
    assert "Do not use" not in text
    assert "in recall" in text
    assert "No difference from the window alone is certain in loss (0.002 ± " in text
    assert " bits per byte; 32 rows show 0.0" in text


CLAIMS = ("worse", "Do not use", "closes", "Warning", " is better in ")


@pytest.mark.parametrize("gap", [0.0, 0.5])
def test_equal_models_of_100_seeds_make_no_claim(gap):
    """The result and the window are equal; softmax is equal too, or clearly better."""
    claimed = []
    for seed in range(100):
        options = {"seed": seed, "noise": 0.05}
        found = {
            "softmax": made(1.0, 0.8, 1.0, own=f"{seed}: softmax", **options),
            "window alone": made(1.0 + gap, 0.8 + gap, 0.6, own=f"{seed}: window", **options),
            "result": made(1.0 + gap, 0.8 + gap, 0.6, own=f"{seed}: result", **options),
        }
        pair = {"result": found["result"], "equal window": found["window alone"]}
        text = verdict(found) + equal_sentence(pair, EQUAL, 300)
        claimed += [word for word in CLAIMS if word in text]
    assert claimed == []


def test_better_than_the_teacher_is_a_warning():
    text = verdict(lines((1.0, 0.5, 1.0), (1.5, 1.5, 0.3), (0.8, 0.75, 0.42)))
    assert text.startswith("Of the tokens that the result generates, 42% ± ")
    assert "Warning: the result predicts better than softmax (loss: -0.200 ± " in text
    assert "rows that begin in the middle of its sequences" in text


def test_a_model_that_predicts_nothing_is_not_judged():
    text = verdict(lines((8.1, None), (8.9, None), (8.2, None), unigram=4.6))
    assert text.startswith("Recovery cannot be judged: with softmax the model has 8.10 bits")
    assert "closes" not in text


def test_no_gap():
    text = verdict(lines((1.0, None), (1.001, None), (1.0005, None)))
    assert text.startswith("On this text no difference between the window alone and softmax")
    assert "longer or more rows" in text


def test_results_without_rows_claim_nothing():
    bare = Quality(loss=1.0, recall=0.5, unigram=5.0)
    text = verdict({"softmax": bare, "window alone": Quality(loss=2.0, recall=2.0), "result": bare})
    assert not any(word in text for word in CLAIMS)


def test_comparison_of_two_models():
    pair = {"result": made(1.0, 0.5, 0.4), "equal window": made(1.2, 0.3, 0.4, seed=0)}
    text = equal_sentence(pair, EQUAL, 300)
    assert "on rows of 300 tokens: the swap is better in loss (-0.2" in text
    assert "the window is better in recall (0.2" in text
    assert "no difference is certain in equal tokens (-0% ± 1.3%; 32 rows show 6% or" in text
