"""Standard errors and margins, against tables and against many pairs of equal things."""

import math
import random

import pytest

from attnzoo.evaluation.margins import (
    FALSE_CLAIM,
    closed_gap,
    combined,
    mean_of,
    paired,
    plus_minus,
    speedup,
    t_quantile,
)


@pytest.mark.parametrize(
    ("freedom", "probability", "value"),
    [  # of scipy.stats.t.ppf(1 - probability / 2, freedom)
        (1, 1e-4, 6366.197671316637),
        (2, 1e-4, 99.99249984374996),
        (7, 0.05, 2.3646242510102993),
        (8, 1e-4, 7.1200038827346495),
        (31, 1e-4, 4.4609891407839815),
        (1000, 1e-4, 3.9063437367014084),
    ],
)
def test_quantiles_of_students_distribution(freedom, probability, value):
    assert t_quantile(freedom, probability) == pytest.approx(value, rel=1e-6)


def test_mean_and_standard_error_of_pairs():
    found = paired([1.0, 2.0, 4.0], [0.0, 2.0, 1.0])  # differences 1, 0, 3
    assert found.mean == pytest.approx(4 / 3)
    assert found.error == pytest.approx(math.sqrt((1 / 9 + 16 / 9 + 25 / 9) / 6))
    assert str(found) == "1.333 ± 0.882"
    assert not found.is_clear
    assert paired([1.0], [0.0]).margin == math.inf
    assert paired([], []).count == 0
    assert not paired([], []).is_clear


def test_small_differences_are_not_stated():
    """Rounding errors of equal models have the same sign in every row."""
    exact = paired([1 + 1e-7] * 8, [1.0] * 8)
    assert exact.error < 1e-9
    assert exact.is_clear
    assert not paired([1 + 1e-7] * 8, [1.0] * 8, least=1e-3).is_clear
    assert paired([1.1] * 8, [1.0] * 8, least=1e-3).is_positive


def test_equal_models_are_never_called_different():
    """10,000 pairs of equal models of 8 to 64 rows; at 2 standard errors, one in 20 would be."""
    draw = random.Random(0)
    clear = two_errors = 0
    for number in range(10_000):
        count = (8, 16, 32, 64)[number % 4]
        ours, theirs = ([draw.gauss(1.0, 0.3) for _ in range(count)] for _ in "ab")
        found = paired(ours, theirs)
        clear += found.is_clear
        two_errors += abs(found.mean) > 2 * found.error
    assert clear <= 2  # 0.2 are expected
    assert FALSE_CLAIM < 1e-4
    assert two_errors > 400


def test_different_models_are_called_different():
    draw = random.Random(1)
    rows = [draw.gauss(1.0, 0.3) for _ in range(32)]
    found = paired([x + draw.gauss(0.05, 0.02) for x in rows], rows)
    assert found.is_positive
    assert found.mean == pytest.approx(0.05, abs=3 * found.error)


def test_closed_gap_and_its_error():
    """The error of the fraction is the spread over repeated draws of the rows."""
    draw, shares, errors = random.Random(2), [], []
    for _ in range(400):
        best = [draw.gauss(1.0, 0.2) for _ in range(24)]
        worst = [x + draw.gauss(0.5, 0.1) for x in best]
        ours = [x + 0.25 * (y - x) + draw.gauss(0, 0.05) for x, y in zip(best, worst, strict=True)]
        found = closed_gap(ours, best, worst)
        shares.append(found.mean)
        errors.append(found.error)
    mean = sum(shares) / 400
    spread = math.sqrt(sum((x - mean) ** 2 for x in shares) / 399)
    assert mean == pytest.approx(0.75, abs=0.01)
    assert sum(errors) / 400 == pytest.approx(spread, rel=0.15)
    assert closed_gap(worst, best, best) is None


def test_speedups_are_paired_by_round():
    """Load that slows both calls of a round cancels."""
    draw = random.Random(3)
    load = [draw.uniform(1, 3) for _ in range(9)]
    theirs, ours = [4 * x for x in load], [2 * x * draw.uniform(0.99, 1.01) for x in load]
    found = speedup(theirs, ours)
    assert found.is_positive
    assert math.exp(found.mean) == pytest.approx(2, rel=0.01)
    both = combined(found, mean_of([0.0, 1.0]))
    assert both.count == 2
    assert both.error == pytest.approx(math.hypot(found.error, 0.5))


def test_text():
    assert plus_minus(0.742, 0.031, percent=True) == "74% ± 3.1%"
    assert plus_minus(0.742, None, percent=True) == "74%"
    assert plus_minus(0.742, math.inf) == "0.742"
