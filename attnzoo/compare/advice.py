"""What the numbers say, in plain words; nothing is recommended that was not measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attnzoo.compare.fit import Curve, best_exact, crossover
from attnzoo.compare.measure import OK
from attnzoo.compare.results import Row
from attnzoo.report.text import figures, short, size

BEARABLE = 0.1  # bits per byte that a swap may cost before it is called a loss
WORTH = 1.1  # times faster, below which nothing is said to be faster


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What quality an attention has.

    Attributes:
        bits: Per byte, over the positions that the model was made for.
        cost: Beyond those of the best exact attention.
        copy: Share of a second copy that is guessed right, over all distances.
        needle: Share of needles' tokens.
    """

    bits: float
    cost: float
    copy: float | None
    needle: float | None


def qualities(rows: Sequence[Row]) -> dict[str, Judged]:
    """Return the quality of every attention that was judged beside an exact one."""
    judged = [row for row in rows if row["kind"] == "quality" and row["status"] == OK]
    exact = [row["bits_per_byte"] for row in judged if row["exact"]]
    if not exact:
        return {}
    return {
        row["attention"]: Judged(
            bits=row["bits_per_byte"],
            cost=row["bits_per_byte"] - min(exact),
            copy=_mean(row["copy_by_distance"]),
            needle=_mean(row["needle_by_distance"]),
        )
        for row in judged
    }


def _mean(shares: dict[str, float]) -> float | None:
    return sum(shares.values()) / len(shares) if shares else None


def speedups(curves: Sequence[Curve], length: int) -> dict[str, float]:
    """Return how many times faster than the best exact attention each is, at one length."""
    exact = best_exact(curves)
    if length not in exact:
        return {}
    return {
        curve.attention: exact[length] / curve.least_ms[length]
        for curve in curves
        if length in curve.least_ms and not curve.exact
    }


def headline(curves: Sequence[Curve], judged: dict[str, Judged], mode: str) -> str:
    """Answer in one sentence: which, from which length on, how much faster, at what cost."""
    exact = best_exact(curves)
    if not exact:
        return "No exact attention could be measured, so nothing can be compared with one."
    longest = max(exact)
    faster = {k: x for k, x in speedups(curves, longest).items() if x >= WORTH}
    if not faster:
        return (
            f"Up to {short(longest)} tokens nothing that was measured is faster than exact "
            "attention: keep flash."
        )
    good = {k: x for k, x in faster.items() if k in judged and judged[k].cost <= BEARABLE}
    pool = good or faster
    best = max(pool, key=lambda name: pool[name])
    costs = {curve.attention: curve.least_ms for curve in curves}
    start = crossover(costs[best], exact)
    assert start is not None  # it is faster at the longest
    since = f"From {'at most ' if start.at_most else ''}{short(start.length)} tokens on"
    told = (
        f"{since}, {best} is faster than exact attention, at {short(longest)} "
        f"{figures(pool[best], 2)} times"
    )
    if best not in judged:
        return f"{told}; what it costs in quality was not measured (give --text FILE)."
    cost = judged[best].cost
    if best in good:
        return f"{told}, and costs {cost:+.3f} bits per byte without training."
    return (
        f"{told}, but costs {cost:+.2f} bits per byte without training, and so does all that is "
        f"faster (more than {BEARABLE}): train it, or keep flash."
    )


def paragraph(curves: Sequence[Curve], rows: Sequence[Row], mode: str, model: str) -> str:
    """Say what was found: fastest, least memory, quality, and what to run next."""
    judged = qualities(rows)
    exact = best_exact(curves)
    parts = [headline(curves, judged, mode)]
    if exact:
        longest = max(exact)
        fast = speedups(curves, longest)
        if max(fast.values(), default=0.0) >= WORTH:
            best = max(fast, key=lambda name: fast[name])
            parts.append(
                f"The fastest at {short(longest)} is {best}, {figures(fast[best], 2)} times"
                + _price(best, judged)
                + "."
            )
        parts.append(_memory(curves, longest, mode))
    control = judged.get("flash window 32")
    if control:
        worse = [k for k, j in judged.items() if j.cost > control.cost]
        if worse:
            parts.append(
                f"Seeing only the last 32 tokens costs {control.cost:+.2f} bits per byte; "
                f"{len(worse)} of {len(judged)} attentions cost more untrained, and are of use "
                "only after training."
            )
    parts.append(_next(curves, rows, judged, exact, model))
    return " ".join(part for part in parts if part)


def _price(name: str, judged: dict[str, Judged]) -> str:
    if name not in judged:
        return ""
    found = judged[name]
    recall = ""
    if found.copy is not None:
        recall = f" and guesses {found.copy:.0%} of a second copy right"
    return f", which costs {found.cost:+.2f} bits per byte{recall}"


def _memory(curves: Sequence[Curve], length: int, mode: str) -> str:
    """Name what holds least memory, or keeps least in decoding."""
    kept = mode == "decode"
    held = {
        curve.attention: (curve.kept_bytes if kept else curve.peak_bytes).get(length)
        for curve in curves
    }
    known = {name: count for name, count in held.items() if count is not None}
    if not known:
        return ""
    least = min(known, key=lambda name: known[name])
    what = "keeps" if kept else "holds"
    return (
        f"{least} {what} least memory at {short(length)} tokens, {size(known[least])}; "
        f"flash {what} {size(known['flash'])}."
        if "flash" in known and least != "flash"
        else f"{least} {what} least memory at {short(length)} tokens, {size(known[least])}."
    )


def _next(
    curves: Sequence[Curve],
    rows: Sequence[Row],
    judged: dict[str, Judged],
    exact: dict[int, float],
    model: str,
) -> str:
    """Name the command to go on with, for an attention that is faster and was judged."""
    fast = {k: x for k, x in speedups(curves, max(exact)).items() if x >= WORTH} if exact else {}
    known = {k: x for k, x in fast.items() if k in judged}
    if not known:
        return ""
    cheap = {k: x for k, x in known.items() if judged[k].cost <= BEARABLE}
    if cheap:
        best = max(cheap, key=lambda name: cheap[name])
        return f"Next: attnzoo swap {model} {_options(best, rows)} --out NEW."
    best = min(known, key=lambda name: judged[name].cost)
    return (
        f"Next: attnzoo recover {model} {_options(best, rows)} --data text/ --out NEW, which "
        "trains the swap that costs least."
    )


def _options(attention: str, rows: Sequence[Row]) -> str:
    """Write an attention as the options of a command."""
    spec = next(row["spec"] for row in rows if row["attention"] == attention)
    given = [f"--set {name}={value}" for name, value in spec.get("options", {}).items()]
    return " ".join([f"--attention {spec['backend']}", *given])
