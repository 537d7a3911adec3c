"""Cost as a function of length: exponents, speed-ups, crossovers.

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
from attnzoo.report.table import format_length

FITTED = 4  # longest lengths that enter a fit; short ones are dominated by overhead


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Costs of one attention by length, at one level and mode.

    Attributes:
        attention: Name in tables.
        exact: Whether it computes softmax attention over all keys.
        ms: Milliseconds per row of the fastest round.
        memory: Bytes per row: of the cache in decoding, else the peak.
        spread: Longest minus shortest round, divided by the median.
        missing: Status of a length without a cost.
        gain: Logarithm of the baseline's time divided by this one's, over alternating rounds.
    """

    attention: str
    exact: bool
    ms: dict[int, float] = field(default_factory=dict)
    memory: dict[int, float] = field(default_factory=dict)
    spread: dict[int, float] = field(default_factory=dict)
    missing: dict[int, str] = field(default_factory=dict)
    gain: dict[int, Difference] = field(default_factory=dict)


def make_curves(rows: Iterable[Row]) -> list[Curve]:
    """Return the curves of one level and mode, in the order of measurement."""
    curves: dict[str, Curve] = {}
    for row in sorted(rows, key=lambda row: row["T"]):
        curve = curves.setdefault(
            row["attention"], Curve(attention=row["attention"], exact=row["exact"])
        )
        length, count = row["T"], row["B"]
        if row["status"] != OK:
            curve.missing[length] = row["status"]
            continue
        curve.ms[length] = row["min_ms"] / count
        curve.spread[length] = row["spread"]
        if row.get("baseline_ms"):
            curve.gain[length] = speedup(row["baseline_ms"], row["rounds_ms"])
        held = row["kept_bytes" if row["mode"] == "decode" else "peak_bytes"]
        if held is not None:
            curve.memory[length] = held / count
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


def best_exact(curves: Iterable[Curve]) -> dict[int, float]:
    """Return the least time of any exact attention by length, in milliseconds per row."""
    best: dict[int, float] = {}
    for curve in curves:
        if curve.exact:
            for length, ms in curve.ms.items():
                best[length] = min(ms, best.get(length, math.inf))
    return best


def speedups(curves: Sequence[Curve], length: int) -> dict[str, float]:
    """Return the speed-up of each approximate attention over the best exact one at a length."""
    exact = best_exact(curves)
    return {
        curve.attention: exact[length] / curve.ms[length]
        for curve in curves
        if length in curve.ms and length in exact and not curve.exact
    }


def clearly_faster(curve: Curve, curves: Sequence[Curve]) -> list[int]:
    """Return the lengths at which a curve is clearly below the best exact one."""
    gains = {n: clear_gain(curve, curves, n) for n in curve.ms}
    return [n for n, gain in gains.items() if gain is not None and gain.is_positive]


def clear_gain(curve: Curve, curves: Iterable[Curve], length: int) -> Difference | None:
    """Return the logarithm of the best exact attention's time divided by a curve's.

    ``None`` if the two were not timed in the same rounds.

    Args:
        curve: The curve of an approximation.
        curves: All curves of its group.
        length: In tokens.
    """
    exact = [x for x in curves if x.exact and length in x.ms]
    if length not in curve.gain or not exact:
        return None
    other = min(exact, key=lambda x: x.ms[length]).gain.get(length)
    if other is None or other.mean <= 0:  # the baseline itself
        return curve.gain[length]
    return combined(curve.gain[length], replace(other, mean=-other.mean))


def crossover(
    costs: Mapping[int, float], exact: Mapping[int, float], clear: Collection[int]
) -> float | None:
    """Return the length from which on ``costs`` stay below ``exact``; ``None`` without one.

    It is interpolated between two lengths, or the shortest one.

    Args:
        costs: Milliseconds by length.
        exact: Those of the best exact attention.
        clear: The lengths at which ``costs`` are clearly below ``exact``; others do not count as
            faster.
    """
    lengths = sorted(set(costs) & set(exact))
    gap = {n: math.log(costs[n] / exact[n]) for n in lengths}  # negative where it is faster
    slower = [n for n in lengths if gap[n] >= 0 or n not in clear]
    if len(slower) == 0 or slower[-1] == lengths[-1]:
        return None if slower or not lengths else lengths[0]
    last = slower[-1]
    after = lengths[lengths.index(last) + 1]
    if gap[last] < 0:  # faster, but not clearly
        return after
    share = gap[last] / (gap[last] - gap[after])
    return float(last * (after / last) ** share)


def faster_from(curve: Curve, curves: Sequence[Curve]) -> str:
    """Return the length from which on an attention is clearly faster than the best exact one."""
    if curve.exact:
        return ""
    exact = best_exact(curves)
    found = crossover(curve.ms, exact, clearly_faster(curve, curves))
    if found is None:
        return "not seen"
    shortest = min(set(curve.ms) & set(exact))
    return ("at most " if found <= shortest else "") + format_length(found)
