import pytest

from attnzoo.compare.report import best_exact, crossover, exponent, make_curves

LENGTHS = [1024, 2048, 4096, 8192, 16384]


def power(factor, exponent):
    return {n: factor * (n / 1024) ** exponent for n in LENGTHS}


@pytest.mark.parametrize("true", [1.0, 1.19, 2.0])
def test_the_exponent_is_recovered(true):
    assert exponent(power(3.0, true)) == pytest.approx(true)


def test_short_lengths_do_not_count():
    """A fixed cost at short lengths does not change the exponent of the longest ones."""
    costs = power(1.0, 2.0) | {1024: 500.0}
    assert exponent(costs) == pytest.approx(2.0)


def test_two_lengths_are_too_few():
    assert exponent({1024: 1.0, 2048: 2.0}) is None


def test_crossover_lies_where_the_powers_meet():
    """20 n meets 4 n^2 at n = 5, in units of 1024 tokens."""
    found = crossover(power(20.0, 1.0), power(4.0, 2.0), LENGTHS)
    assert found == pytest.approx(5 * 1024)
    assert crossover(power(32.0, 1.0), power(1.0, 2.0), LENGTHS) is None  # at 32k
    assert crossover(power(0.5, 1.0), power(1.0, 2.0), LENGTHS) == 1024  # faster everywhere
    assert crossover({}, power(1.0, 2.0), []) is None


def test_crossover_is_the_last_one():
    exact = power(1.0, 2.0)
    costs = {
        n: ms * factor for (n, ms), factor in zip(exact.items(), [0.5, 2, 0.5, 2, 0.5], strict=True)
    }
    assert 8192 < crossover(costs, exact, LENGTHS) < 16384


def test_crossover_counts_clear_lengths_only():
    exact, costs = power(4.0, 2.0), power(20.0, 1.0)  # meet at 5k
    assert crossover(costs, exact, [8192, 16384]) == pytest.approx(5 * 1024)
    assert crossover(costs, exact, [16384]) == 16384
    assert crossover(costs, exact, []) is None
    assert crossover(power(0.5, 1.0), power(1.0, 2.0), LENGTHS[1:]) == 2048


def row(attention, T, ms, *, exact=False, B=1, status="ok"):
    return {
        "attention": attention,
        "T": T,
        "B": B,
        "median_ms": ms,
        "min_ms": ms,
        "spread": 0.01,
        "peak_bytes": 8 * T * B,
        "kept_bytes": None,
        "mode": "forward",
        "exact": exact,
        "status": status,
    }


def test_curves_are_of_one_row():
    curves = make_curves(
        [row("flash", 1024, 40.0, B=4, exact=True), row("softmax", 1024, 12.0, exact=True)]
    )
    flash, softmax = curves
    assert flash.ms == {1024: 10.0}
    assert flash.memory == {1024: 8192.0}
    assert best_exact(curves) == {1024: 10.0}
    assert softmax.ms == {1024: 12.0}


def test_failed_cases_are_missing():
    failed = row("linear", 2048, None, status="timed out") | {"reason": "slow"}
    (curve,) = make_curves([row("linear", 1024, 1.0), failed])
    assert curve.ms == {1024: 1.0}
    assert curve.missing == {2048: "timed out"}
