"""Cost as a function of length: exponents, crossovers, predictions.

Costs are per row, so that cases with many short rows and with one long row are comparable. Times in
tables, plots and fits are those of the fastest round, which has the least noise.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from attnzoo.compare.workers import OK
from attnzoo.evaluation.margins import Difference, combined, speedup
from attnzoo.evaluation.results import Row

FITTED = 4  # longest lengths that enter a fit; short ones are dominated by overhead
HORIZON = 4  # predictions reach this multiple of the longest length


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Costs of one attention by length, at one level and mode.

    Attributes:
        attention: Name in tables.
        exact: Whether it computes softmax attention over all keys.
        ms: Milliseconds per row of the fastest round.
        peak_bytes: Peak memory per row.
        cache_bytes: Memory kept between decoding steps, per row.
        spread: Longest minus shortest round, divided by the median.
        slowest_ms: Milliseconds per row of the slowest round.
        missing: Why a length has no cost.
        gain: Logarithm of the baseline's time divided by this one's, over alternating rounds.
        busy: Lengths whose times contradict those of others: the machine was busy.
    """

    attention: str
    exact: bool
    ms: dict[int, float] = field(default_factory=dict)
    peak_bytes: dict[int, float] = field(default_factory=dict)
    cache_bytes: dict[int, float] = field(default_factory=dict)
    spread: dict[int, float] = field(default_factory=dict)
    slowest_ms: dict[int, float] = field(default_factory=dict)
    missing: dict[int, str] = field(default_factory=dict)
    gain: dict[int, Difference] = field(default_factory=dict)
    busy: list[int] = field(default_factory=list)

    @property
    def exponent(self) -> float | None:
        """Exponent of the length in the time at the longest lengths; 2 is quadratic."""
        return exponent(self.ms)

    def predicted_ms(self, length: int) -> float | None:
        """Return the time that the fitted power law predicts; ``None`` without a fit."""
        return predict(self.ms, length)


def make_curves(rows: Iterable[Row]) -> list[Curve]:
    """Return the curves of one level and mode, in the order of measurement."""
    curves: dict[str, Curve] = {}
    for row in sorted(rows, key=lambda row: row["T"]):
        curve = curves.setdefault(
            row["attention"], Curve(attention=row["attention"], exact=row["exact"])
        )
        length, count = row["T"], row["B"]
        if row["status"] != OK:
            curve.missing[length] = ": ".join(filter(None, [row["status"], row.get("reason")]))
            continue
        curve.ms[length] = row["min_ms"] / count
        curve.peak_bytes[length] = row["peak_bytes"] / count
        curve.spread[length] = row["spread"]
        curve.slowest_ms[length] = (row["min_ms"] + row["spread"] * row["median_ms"]) / count
        if row.get("baseline_ms"):
            curve.gain[length] = speedup(row["baseline_ms"], row["rounds_ms"])
        if row.get("busy"):
            curve.busy.append(length)
        if row.get("kept_bytes") is not None:
            curve.cache_bytes[length] = row["kept_bytes"] / count
    return list(curves.values())


def exponent(costs: Mapping[int, float]) -> float | None:
    """Fit a power law to the longest lengths by least squares; ``None`` below three lengths."""
    lengths = sorted(costs)[-FITTED:]
    if len(lengths) < 3:
        return None
    x = [math.log(length) for length in lengths]
    y = [math.log(max(costs[length], 1e-12)) for length in lengths]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return slope / sum((a - mean_x) ** 2 for a in x)


def predict(costs: Mapping[int, float], length: int) -> float | None:
    """Extrapolate the fitted power law from the longest length."""
    power = exponent(costs)
    if power is None:
        return None
    last = max(costs)
    return float(costs[last] * (length / last) ** power)


def interpolate(costs: Mapping[int, float], length: float) -> float:
    """Return the cost at a length: interpolated in logarithms, or predicted beyond the longest."""
    below = [n for n in costs if n <= length]
    above = [n for n in costs if n > length]
    if not above or not below:
        return predict(costs, round(length)) or costs[max(costs)]
    low, high = max(below), min(above)
    share = math.log(length / low) / math.log(high / low)
    return float(costs[low] * (costs[high] / costs[low]) ** share)


def best_exact(curves: Iterable[Curve]) -> dict[int, float]:
    """Return the least time of any exact attention by length, in milliseconds per row."""
    best: dict[int, float] = {}
    for curve in curves:
        if curve.exact:
            for length, ms in curve.ms.items():
                best[length] = min(ms, best.get(length, math.inf))
    return best


def clearly_faster(curve: Curve, curves: Sequence[Curve]) -> list[int]:
    """Return the lengths at which a curve is clearly below the best exact one."""
    gains = {n: clear_gain(curve, curves, n) for n in curve.ms}
    return [n for n, gain in gains.items() if gain is not None and gain.is_positive]


def clear_gain(curve: Curve, curves: Iterable[Curve], length: int) -> Difference | None:
    """Return the logarithm of the best exact attention's time divided by a curve's.

    ``None`` if the two were not timed in the same rounds, or the machine was busy.

    Args:
        curve: The curve of an approximation.
        curves: All curves of its group.
        length: In tokens.
    """
    exact = [x for x in curves if x.exact and length in x.ms]
    if length in curve.busy or length not in curve.gain or not exact:
        return None
    best = min(exact, key=lambda x: x.ms[length])
    if length not in best.gain:  # the baseline itself
        return None if length in best.busy else curve.gain[length]
    other = best.gain[length]
    if other.mean <= 0:
        return curve.gain[length]
    return combined(curve.gain[length], replace(other, mean=-other.mean))


@dataclass(frozen=True, kw_only=True)
class Crossover:
    """Length from which on an attention is faster than the best exact one.

    Attributes:
        length: In tokens, interpolated between two measured lengths.
        predicted: Whether it is beyond the measured lengths, where the fitted power laws meet.
        at_most: Whether the attention is already faster at the shortest measured length.
    """

    length: float
    predicted: bool = False
    at_most: bool = False


def crossover(
    costs: Mapping[int, float],
    exact: Mapping[int, float],
    clear: Collection[int] | None = None,
) -> Crossover | None:
    """Return the length from which on ``costs`` stay below ``exact``; ``None`` without one.

    Args:
        costs: Milliseconds by length.
        exact: Those of the best exact attention.
        clear: The lengths at which ``costs`` are clearly below ``exact``; others do not count as
            faster. All when ``None``.
    """
    lengths = sorted(set(costs) & set(exact))
    if not lengths:
        return None
    gap = {n: math.log(costs[n] / exact[n]) for n in lengths}  # negative where it is faster
    slower = [n for n in lengths if gap[n] >= 0 or (clear is not None and n not in clear)]
    if not slower:
        return Crossover(length=lengths[0], at_most=True)
    last = slower[-1]
    if last != lengths[-1]:
        after = lengths[lengths.index(last) + 1]
        if gap[last] < 0:  # faster, but not clearly
            return Crossover(length=after)
        share = gap[last] / (gap[last] - gap[after])
        return Crossover(length=last * (after / last) ** share)
    own, other = exponent(costs), exponent(exact)
    if own is None or other is None or own >= other or gap[last] < 0:
        return None
    distance = gap[last] / (other - own)  # a logarithm, as nearly equal slopes meet very far away
    if distance > math.log(HORIZON):
        return None
    return Crossover(length=last * math.exp(distance), predicted=True)
