"""Curves of cost over length: exponents, crossovers, predictions.

All costs are of one row, so that cases with many short rows compare with one long row. Tables show
medians; what is derived from them rests on the rounds that were disturbed least.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from attnzoo.compare.measure import OK
from attnzoo.compare.results import Row

FITTED = 4  # of the longest lengths: short ones are overhead
AHEAD = 4  # times the longest length, up to which costs are predicted


@dataclass(frozen=True, kw_only=True)
class Curve:
    """What one attention costs at every length that was measured, at one level and mode.

    Attributes:
        attention: As tables call it.
        exact: Whether it is softmax attention over all keys.
        ms: Milliseconds a row, by length: the median of the rounds.
        least_ms: The shortest round.
        peak_bytes: Of memory, a row.
        kept_bytes: Between steps of decoding, a row.
        spread: Of the rounds, as a share of the median.
        missing: Why a length has no cost.
    """

    attention: str
    exact: bool
    ms: dict[int, float] = field(default_factory=dict)
    least_ms: dict[int, float] = field(default_factory=dict)
    peak_bytes: dict[int, float] = field(default_factory=dict)
    kept_bytes: dict[int, float] = field(default_factory=dict)
    spread: dict[int, float] = field(default_factory=dict)
    missing: dict[int, str] = field(default_factory=dict)

    @property
    def exponent(self) -> float | None:
        """With which power of the length time grows at the longest ones; 2 is quadratic."""
        return exponent(self.least_ms)

    def predicted_ms(self, length: int) -> float | None:
        """Extend the fitted power from the longest length; ``None`` where nothing was fitted."""
        return predict(self.least_ms, length)


def make_curves(rows: Iterable[Row]) -> list[Curve]:
    """Gather the rows of one level and mode into curves, in the order they were measured in."""
    curves: dict[str, Curve] = {}
    for row in sorted(rows, key=lambda row: row["T"]):
        curve = curves.setdefault(
            row["attention"], Curve(attention=row["attention"], exact=row["exact"])
        )
        length, count = row["T"], row["B"]
        if row["status"] != OK:
            curve.missing[length] = ": ".join(filter(None, [row["status"], row.get("reason")]))
            continue
        curve.ms[length] = row["median_ms"] / count
        curve.least_ms[length] = row["min_ms"] / count
        curve.peak_bytes[length] = row["peak_bytes"] / count
        curve.spread[length] = row["spread"]
        if row.get("kept_bytes") is not None:
            curve.kept_bytes[length] = row["kept_bytes"] / count
    return list(curves.values())


def exponent(costs: Mapping[int, float]) -> float | None:
    """Fit a power of the length to the longest of at least three lengths, by least squares."""
    lengths = sorted(costs)[-FITTED:]
    if len(lengths) < 3:
        return None
    x = [math.log(length) for length in lengths]
    y = [math.log(max(costs[length], 1e-12)) for length in lengths]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return slope / sum((a - mean_x) ** 2 for a in x)


def predict(costs: Mapping[int, float], length: int) -> float | None:
    """Extend the fitted power from the longest length."""
    power = exponent(costs)
    if power is None:
        return None
    last = max(costs)
    return float(costs[last] * (length / last) ** power)


def best_exact(curves: Iterable[Curve]) -> dict[int, float]:
    """Return the least time of any exact attention at every length, ms a row."""
    best: dict[int, float] = {}
    for curve in curves:
        if curve.exact:
            for length, ms in curve.least_ms.items():
                best[length] = min(ms, best.get(length, math.inf))
    return best


@dataclass(frozen=True, kw_only=True)
class Crossover:
    """From which length on an attention is faster than the best exact one.

    Attributes:
        length: In tokens; interpolated between two measured lengths.
        predicted: Whether it lies beyond what was measured, where the fitted powers meet.
        at_most: Whether it was faster from the shortest measured length on.
    """

    length: float
    predicted: bool = False
    at_most: bool = False


def crossover(costs: Mapping[int, float], exact: Mapping[int, float]) -> Crossover | None:
    """Find the length from which on ``costs`` stay below ``exact``; ``None`` if there is none."""
    lengths = sorted(set(costs) & set(exact))
    if not lengths:
        return None
    gap = {n: math.log(costs[n] / exact[n]) for n in lengths}  # negative where it is faster
    slower = [n for n in lengths if gap[n] >= 0]
    if not slower:
        return Crossover(length=lengths[0], at_most=True)
    last = slower[-1]
    if last != lengths[-1]:
        after = lengths[lengths.index(last) + 1]
        share = gap[last] / (gap[last] - gap[after])
        return Crossover(length=last * (after / last) ** share)
    own, other = exponent(costs), exponent(exact)
    if own is None or other is None or own >= other:
        return None
    ahead = gap[last] / (other - own)  # a logarithm: the powers of slow attentions meet far away
    if ahead > math.log(AHEAD):
        return None
    return Crossover(length=last * math.exp(ahead), predicted=True)
