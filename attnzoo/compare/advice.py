"""The findings of a comparison: a headline, which recommends what was measured, and a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attnzoo.compare.equal_windows import EQUAL
from attnzoo.compare.fit import Curve, best_exact, clear_gain, clearly_faster, crossover
from attnzoo.compare.workers import OK
from attnzoo.evaluation.margins import mean_of
from attnzoo.evaluation.results import Row
from attnzoo.report.format import format_bytes, format_length, significant
from attnzoo.report.table import Table

ACCEPTABLE_LOSS = 0.1  # bits per byte that a recommended swap may cost without training
ACCEPTABLE_COSINE = 0.99  # of a recommended swap's embeddings to the original model's
MIN_SPEEDUP = 1.1  # below this factor nothing is called faster


@dataclass(frozen=True, kw_only=True)
class QualitySummary:
    """Quality of one attention, compared with the best exact one.

    Attributes:
        cost: Bits per byte above exact attention, over the trained positions; of embeddings, 1
            minus their cosine similarity.
        embeddings: Whether the quality is that of embeddings.
        rows: ``cost`` of each row; empty if it is not known.
    """

    cost: float
    embeddings: bool = False
    rows: Sequence[float] = ()

    @property
    def error(self) -> float | None:
        """Standard error of the cost over the rows; ``None`` if it is not known."""
        return mean_of(self.rows).error if len(self.rows) > 1 else None

    @property
    def acceptable(self) -> bool:
        """Whether the swap is recommended without training."""
        return self.cost <= (1 - ACCEPTABLE_COSINE if self.embeddings else ACCEPTABLE_LOSS)

    def __str__(self) -> str:
        """Return the cost with its standard error; of embeddings, their cosine similarity."""
        error = "" if self.error is None else f" ± {self.error:.3f}"
        if self.embeddings:
            return f"a cosine of {1 - self.cost:.3f}{error}"
        return f"{self.cost:+.3f}{error} bits per byte"


def losses(measured: Sequence[Row]) -> dict[str, float]:
    """Return bits per byte above the best exact attention; empty without a measured exact one."""
    exact = [row["bits_per_byte"] for row in measured if row["exact"]]
    return {row["attention"]: row["bits_per_byte"] - min(exact) for row in measured if exact}


def measured_quality(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with a measured quality."""
    return [row for row in rows if row["kind"] == "quality" and row["status"] == OK]


def unable(rows: Sequence[Row]) -> str:
    """Return why exact attention itself cannot predict the text, or ``""``.

    The qualities of approximations say nothing then: the model is not trained, or the text is in
    another language.
    """
    exact = [row for row in measured_quality(rows) if row["exact"] and "bits_per_byte" in row]
    if not exact:
        return ""
    best = min(exact, key=lambda row: float(row["bits_per_byte"]))
    bits, unigram = best["bits_per_byte"], best.get("unigram_bits_per_byte")
    if unigram is None or bits < unigram:
        return ""
    return (
        f"exact attention itself has {bits:.2f} bits per byte on this text, and the frequencies of "
        f"its tokens alone give {unigram:.2f}; use a trained model and text in its language"
    )


def qualities(rows: Sequence[Row]) -> dict[str, QualitySummary]:
    """Return the quality of each attention by name.

    Empty without a measured exact attention, or if exact attention cannot predict the text.
    """
    measured = measured_quality(rows)
    if unable(rows):
        return {}
    if measured and "cosine" in measured[0]:
        return {
            row["attention"]: QualitySummary(
                cost=1 - row["cosine"],
                embeddings=True,
                rows=[1 - x for x in row.get("cosine_rows", ())],
            )
            for row in measured
        }
    costs = losses(measured)
    exact = [row for row in measured if row["exact"]]
    best = min(exact, key=lambda row: float(row["bits_per_byte"]), default={})
    return {
        row["attention"]: QualitySummary(
            cost=costs[row["attention"]],
            rows=_row_costs(row.get("rows", ()), best.get("rows", ())),
        )
        for row in measured
        if costs
    }


def _row_costs(rows: Sequence[float], exact: Sequence[float]) -> list[float]:
    if len(rows) != len(exact):  # of an earlier run, or none
        return []
    return [x - y for x, y in zip(rows, exact, strict=True)]


def speedups(curves: Sequence[Curve], length: int) -> dict[str, float]:
    """Return the speed-up of each approximate attention over the best exact one at a length."""
    exact = best_exact(curves)
    if length not in exact:
        return {}
    return {
        curve.attention: exact[length] / curve.ms[length]
        for curve in curves
        if length in curve.ms and not curve.exact
    }


def clear_speedups(curves: Sequence[Curve], length: int) -> dict[str, float]:
    """Return the speed-ups at a length that are at least ``MIN_SPEEDUP`` and clear over rounds."""
    clear = {c.attention for c in curves if not c.exact and length in clearly_faster(c, curves)}
    fast = speedups(curves, length)
    return {name: x for name, x in fast.items() if x >= MIN_SPEEDUP and name in clear}


def _times(name: str, factor: float, curves: Sequence[Curve], length: int) -> str:
    """Return a speed-up with its standard error over rounds, such as ``"2.6 ± 0.1 times"``."""
    (curve,) = (c for c in curves if c.attention == name)
    gain = clear_gain(curve, curves, length)
    error = 0.0 if gain is None else factor * gain.error
    return f"{significant(factor, 2)} ± {significant(error, 1)} times"


def headline(curves: Sequence[Curve], rows: Sequence[Row], missing: str = "") -> str:
    """Return the main finding: the best attention, from which length on, and its quality.

    Args:
        curves: Curves of one level and mode.
        rows: All rows.
        missing: Why no quality was measured, if none was requested or possible.
    """
    quality = qualities(rows)
    exact = best_exact(curves)
    if not exact:
        return "No exact attention could be measured, so there is no baseline to compare with."
    longest = max(exact)
    faster = clear_speedups(curves, longest)
    if not faster:
        return (
            f"At {format_length(longest)} tokens, nothing that was measured is clearly faster than "
            "exact attention: keep flash."
        )
    good = {k: x for k, x in faster.items() if k in quality and quality[k].acceptable}
    pool = good or faster
    best = max(pool, key=lambda name: pool[name])
    (curve,) = (curve for curve in curves if curve.attention == best)
    finding = (
        f"From {faster_from(curve, curves)} tokens on, {best} is faster than exact attention, "
        f"{_times(best, pool[best], curves, longest)} at {format_length(longest)}"
    )
    if best not in quality:
        return f"{finding}; {_unknown(best, rows, missing)}."
    cost = f"{'has' if quality[best].embeddings else 'costs'} {quality[best]} without training"
    if best in good:
        return f"{finding}, and {cost}."
    return (
        f"{finding}, but {cost}, and every faster attention loses as much or more than is "
        "acceptable: train it, or keep flash."
    )


def _unknown(attention: str, rows: Sequence[Row], missing: str) -> str:
    """Return why the quality of an attention is unknown."""
    if reason := unable(rows):
        return f"its quality was not measured: {reason}"
    for row in rows:
        if row["kind"] == "quality" and row["attention"] == attention and row["status"] != OK:
            reason = ": ".join(filter(None, [row["status"], row.get("reason")]))
            return f"its quality was not measured ({reason})"
    return "its quality was not measured" + (f" ({missing})" if missing else "")


def faster_from(curve: Curve, curves: Sequence[Curve]) -> str:
    """Return the length from which on an attention is clearly faster; ~ marks a prediction."""
    if curve.exact:
        return ""
    if curve.busy:
        return "busy"
    found = crossover(curve.ms, best_exact(curves), clearly_faster(curve, curves))
    if found is None:
        return "not seen"
    sign = "~" if found.predicted else "at most " if found.at_most else ""
    return f"{sign}{format_length(found.length)}"


def findings_table(curves: Sequence[Curve], rows: Sequence[Row]) -> Table:
    """Return from which length each attention is faster, its cost in quality, and its cache.

    Args:
        curves: Curves of one level and mode.
        rows: All rows.
    """
    quality, sizes = qualities(rows), cache_bytes(curves, rows)
    body = [
        [
            curve.attention,
            faster_from(curve, curves),
            str(quality.get(curve.attention, "-")),
            format_bytes(sizes.get(curve.attention)),
        ]
        for curve in curves
    ]
    columns = ["attention", "faster from", "cost without training", "cache"]
    return Table(columns=columns, rows=body, title="Findings")


def cache_bytes(curves: Sequence[Curve], rows: Sequence[Row]) -> dict[str, float]:
    """Return the bytes of one sequence's cache at the longest length, by attention, where known."""
    found = {}
    equal = [row for row in rows if row["kind"] == EQUAL and row["status"] == OK]
    for row in sorted(equal, key=lambda row: int(row["T"])):
        found[row["attention"]] = row["swap_bytes"]
        found |= {curve.attention: row["exact_bytes"] for curve in curves if curve.exact}
    return found | {x.attention: x.cache_bytes[max(x.cache_bytes)] for x in curves if x.cache_bytes}
