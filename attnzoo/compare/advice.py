"""The findings of a comparison as text; it recommends only what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attnzoo.compare.cases import BASELINE
from attnzoo.compare.fit import Curve, best_exact, clear_gain, clearly_faster, crossover
from attnzoo.compare.memory import equal_windows
from attnzoo.compare.workers import OK
from attnzoo.evaluation.cost_laws import BUSY
from attnzoo.evaluation.margins import mean_of, paired
from attnzoo.evaluation.results import Row
from attnzoo.report.format import format_bytes, format_length, significant

ACCEPTABLE_LOSS = 0.1  # bits per byte that a recommended swap may cost without training
ACCEPTABLE_COSINE = 0.99  # of a recommended swap's embeddings to the original model's
ABLE = 0.5  # recall of exact attention below which recall says nothing about approximations
MIN_SPEEDUP = 1.1  # below this factor nothing is called faster
CONTROL = "flash window 32"


@dataclass(frozen=True, kw_only=True)
class QualitySummary:
    """Quality of one attention, compared with the best exact one.

    Attributes:
        cost: Bits per byte above exact attention, over the trained positions; of embeddings, 1
            minus their cosine similarity.
        embeddings: Whether the quality is that of embeddings.
        copy: Fraction of a second copy predicted correctly, mean over distances; ``None`` if exact
            attention does not predict it.
        rows: ``cost`` of each row; empty if it is not known.
    """

    cost: float
    embeddings: bool = False
    copy: float | None = None
    rows: Sequence[float] = ()

    @property
    def error(self) -> float | None:
        """Standard error of the cost over the rows; ``None`` if it is not known."""
        return mean_of(self.rows).error if len(self.rows) > 1 else None

    @property
    def acceptable(self) -> bool:
        """Whether the swap is recommended without training."""
        return self.cost <= (1 - ACCEPTABLE_COSINE if self.embeddings else ACCEPTABLE_LOSS)

    def describe(self, digits: int = 2) -> str:
        """Return the cost as text, after the name of the attention."""
        if self.embeddings:
            error = "" if self.error is None else f" ± {self.error:.{digits + 1}f}"
            cosine = f"{1 - self.cost:.{digits + 1}f}{error}"
            return f"has a mean cosine of {cosine} to the original embeddings"
        error = "" if self.error is None else f" ± {self.error:.{digits}f}"
        return f"costs {self.cost:+.{digits}f}{error} bits per byte"


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
    able = max((_mean(row["copy_by_distance"]) or 0 for row in measured if row["exact"]), default=0)
    costs = losses(measured)
    exact = [row for row in measured if row["exact"]]
    best = min(exact, key=lambda row: float(row["bits_per_byte"]), default={})
    return {
        row["attention"]: QualitySummary(
            cost=costs[row["attention"]],
            rows=_row_costs(row.get("rows", ()), best.get("rows", ())),
            copy=_mean(row["copy_by_distance"]) if able >= ABLE else None,
        )
        for row in measured
        if costs
    }


def _row_costs(rows: Sequence[float], exact: Sequence[float]) -> list[float]:
    if len(rows) != len(exact):  # of an earlier run, or none
        return []
    return [x - y for x, y in zip(rows, exact, strict=True)]


def _mean(fractions: dict[str, float]) -> float | None:
    return sum(fractions.values()) / len(fractions) if fractions else None


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
            f"exact attention: keep flash.{_busy(curves)}"
        )
    good = {k: x for k, x in faster.items() if k in quality and quality[k].acceptable}
    pool = good or faster
    best = max(pool, key=lambda name: pool[name])
    costs = {curve.attention: curve.ms for curve in curves}
    (curve,) = (curve for curve in curves if curve.attention == best)
    start = crossover(costs[best], exact, clearly_faster(curve, curves))
    assert start is not None  # it is clearly faster at the longest length
    since = f"From {'at most ' if start.at_most else ''}{format_length(start.length)} tokens on"
    finding = (
        f"{since}, {best} is faster than exact attention, "
        f"{_times(best, pool[best], curves, longest)} at {format_length(longest)}"
    )
    if best not in quality:
        return f"{finding}; {_unknown(best, rows, missing)}."
    found = quality[best]
    if best in good:
        return f"{finding}, and {found.describe(3)} without training."
    limit = (
        f"has less than {ACCEPTABLE_COSINE}"
        if found.embeddings
        else f"costs more than {ACCEPTABLE_LOSS}"
    )
    return (
        f"{finding}, but {found.describe()} without training, and every faster attention {limit}: "
        "train it, or keep flash."
    )


def _busy(curves: Sequence[Curve]) -> str:
    """Return a sentence about times that cannot be right, or ``""``."""
    names = [curve.attention for curve in curves if curve.busy]
    if not names:
        return ""
    return (
        f" The times of {', '.join(names)} contradict each other, also when measured again: "
        f"{BUSY}. Measure on an idle machine (--fresh)."
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


def paragraph(
    curves: Sequence[Curve], rows: Sequence[Row], mode: str, model: str, missing: str = ""
) -> str:
    """Return all findings: fastest, least memory, quality, and the command to run next.

    Args:
        curves: Curves of one level and mode.
        rows: All rows.
        mode: The mode.
        model: The model, as on the command line.
        missing: Why no quality was measured, if none was requested or possible.
    """
    quality = qualities(rows)
    exact = best_exact(curves)
    parts = [headline(curves, rows, missing)]
    if exact:
        longest = max(exact)
        fast = clear_speedups(curves, longest)
        if fast:
            best = max(fast, key=lambda name: fast[name])
            parts.append(
                f"The fastest at {format_length(longest)} is {best}, "
                f"{_times(best, fast[best], curves, longest)}{_quality_clause(best, quality)}."
                f"{_busy(curves)}"
            )
        parts.append(_memory(curves, longest, mode))
    control = quality.get(CONTROL)
    if control:
        worse = [name for name, found in quality.items() if _costs_more(found, control)]
        if worse:
            parts.append(
                f"The control, a window of 32 tokens, {control.describe()}; {len(worse)} of "
                f"{len(quality)} attentions are worse without training, and need training to be "
                "useful."
            )
    parts.append(_at_equal_memory(rows, quality))
    parts.append(_next_command(curves, rows, quality, exact, model))
    return " ".join(part for part in parts if part)


def _at_equal_memory(rows: Sequence[Row], quality: dict[str, QualitySummary]) -> str:
    """Return which attentions are better than the window with as large a cache, or ``""``."""
    found: dict[str, list[str]] = {"better": [], "worse": [], "not": []}
    for name, window in equal_windows(rows).items():
        other = quality.get(f"{BASELINE} window {window}")
        own = quality.get(name)
        if window is None or other is None or own is None or own is other:
            continue
        if len(own.rows) != len(other.rows):
            continue
        more = paired(own.rows, other.rows)
        key = "worse" if more.is_positive else "better" if more.is_negative else "not"
        found[key].append(f"{name} ({window}: {more} bits per byte)")
    parts = []
    for key, words in (
        ("better", "costs less than"),
        ("worse", "costs more than"),
        ("not", "is not measured to differ from"),
    ):
        if found[key]:
            parts.append(f"{', '.join(found[key])} {words} its window of equal memory")
    return f"Without training, {'; '.join(parts)}." if parts else ""


def _costs_more(found: QualitySummary, control: QualitySummary) -> bool:
    """Return whether an attention clearly costs more than the control, over the same rows."""
    if len(found.rows) != len(control.rows):
        return False
    return paired(found.rows, control.rows).is_positive


def _quality_clause(name: str, quality: dict[str, QualitySummary]) -> str:
    if name not in quality:
        return ""
    found = quality[name]
    recall = ""
    if found.copy is not None:
        recall = f" and predicts {found.copy:.0%} of a second copy"
    return f", which {found.describe()}{recall}"


def _memory(curves: Sequence[Curve], length: int, mode: str) -> str:
    """Return which attention needs the least memory, or has the smallest cache in decoding."""
    decode = mode == "decode"
    sizes = {
        curve.attention: (curve.cache_bytes if decode else curve.peak_bytes).get(length)
        for curve in curves
    }
    known = {name: count for name, count in sizes.items() if count is not None}
    if not known:
        return ""
    least = min(known, key=lambda name: known[name])
    what = "has the smallest cache" if decode else "needs the least memory"
    found = f"{least} {what} at {format_length(length)} tokens, {format_bytes(known[least])}"
    if "flash" not in known or least == "flash":
        return f"{found}."
    return f"{found}; flash {'has' if decode else 'needs'} {format_bytes(known['flash'])}."


def _next_command(
    curves: Sequence[Curve],
    rows: Sequence[Row],
    quality: dict[str, QualitySummary],
    exact: dict[int, float],
    model: str,
) -> str:
    """Return the command for an attention that is faster and has a measured quality."""
    fast = clear_speedups(curves, max(exact)) if exact else {}
    known = {k: x for k, x in fast.items() if k in quality}
    if not known:
        return ""
    good = {k: x for k, x in known.items() if quality[k].acceptable}
    if good:
        best = max(good, key=lambda name: good[name])
        return f"Next: attnzoo swap {model} {_options(best, rows)} --out NEW."
    best = min(known, key=lambda name: quality[name].cost)
    return (
        f"Next: attnzoo recover {model} {_options(best, rows)} --data text/ --out NEW, which "
        "trains the swap with the best quality."
    )


def _options(attention: str, rows: Sequence[Row]) -> str:
    """Return an attention as command-line options."""
    spec = next(row["spec"] for row in rows if row["attention"] == attention)
    options = [f"--set {name}={value}" for name, value in spec.get("options", {}).items()]
    return " ".join([f"--attention {spec['backend']}", *options])
