"""The tables, plots and page of a comparison, and its headline: what it recommends."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console

from attnzoo.compare.cases import LEVELS
from attnzoo.compare.workers import NOT_RUN, OK
from attnzoo.evaluation.margins import Difference, combined, mean_of, paired, plus_minus, speedup
from attnzoo.evaluation.results import Row
from attnzoo.report.page import Part, Plot, line_plot, write_page
from attnzoo.report.table import Table, format_bytes, format_length, number, significant

# -- cost as a function of length -----------------------------------------------------------------


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


# -- tables and the headline ----------------------------------------------------------------------


EQUAL = "equal window"  # kind of rows with the window of equal memory
MIN_SPEEDUP = 1.1  # below this factor nothing is called faster
ACCEPTABLE_LOSS = 0.1  # bits per byte that a recommended swap may cost without training
ACCEPTABLE_COSINE = 0.99  # of a recommended swap's embeddings to the original model's
LEVEL_NAMES = {"op": "operator", "model": "whole model"}
MODE_NAMES = {"forward": "forward", "train": "forward + backward", "decode": "decoding one token"}
MEMORY_NAMES = {"forward": "peak memory", "train": "peak memory", "decode": "cache"}


def group_title(device: str, level: str, mode: str) -> str:
    """Return the heading of a group of curves."""
    return f"{LEVEL_NAMES[level].capitalize()}, {MODE_NAMES[mode]}, {device}"


def cost_table(curves: Sequence[Curve], group: tuple[str, str, str]) -> Table:
    """Return milliseconds per row by length, and what the fits say.

    All times are those of the fastest round. ``spread`` is the slowest round minus the fastest,
    divided by the median, at the length where it is largest.

    Args:
        curves: Curves of one group.
        group: Device, level and mode.
    """
    lengths = sorted({n for curve in curves for n in (*curve.ms, *curve.missing)})
    longest = lengths[-1]
    columns = [
        "attention",
        *(f"ms @{format_length(n)}" for n in lengths),
        "spread",
        f"x exact @{format_length(longest)}",
        "grows as",
        "faster from",
        f"{MEMORY_NAMES[group[2]]} @{format_length(longest)}",
    ]
    rows = []
    for curve in curves:
        power = exponent(curve.ms)
        rows.append(
            [
                curve.attention,
                *(
                    significant(curve.ms[n]) if n in curve.ms else curve.missing.get(n, NOT_RUN)
                    for n in lengths
                ),
                _percent(max(curve.spread.values(), default=None)),
                "" if curve.exact else _ratio(curve, curves, longest),
                "-" if power is None else f"T^{power:.2f}",
                faster_from(curve, curves),
                format_bytes(curve.memory.get(longest)),
            ]
        )
    return Table(
        columns=columns,
        rows=rows,
        title=group_title(*group),
        caption="Milliseconds per row, fastest round. Spread: slowest minus fastest round, in % of "
        "the median; the largest of all lengths. Faster from: where the difference is clear over "
        "rounds that alternate with exact attention's; ?: it is not.",
    )


def _ratio(curve: Curve, curves: Sequence[Curve], length: int) -> str:
    """Return the speed-up over exact attention, with ``?`` unless it is clear over the rounds."""
    gain = clear_gain(curve, curves, length)
    found = number(speedups(curves, length).get(curve.attention), 1)
    return found if found == "-" or (gain is not None and gain.is_clear) else f"{found} ?"


# -- quality -------------------------------------------------------------------------------------


def measured_quality(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with a measured quality."""
    return [row for row in rows if row["kind"] == "quality" and row["status"] == OK]


def _best_exact(measured: Sequence[Row]) -> Row:
    exact = [row for row in measured if row["exact"]]
    return min(exact, key=lambda row: float(row.get("bits_per_byte", 0)), default={})


def unable(rows: Sequence[Row]) -> str:
    """Return why exact attention itself cannot predict the text, or ``""``.

    The qualities of approximations say nothing then: the model is not trained, or the text is in
    another language.
    """
    best = _best_exact(measured_quality(rows))
    bits, unigram = best.get("bits_per_byte", 0), best.get("unigram_bits_per_byte", 1)
    if bits < unigram:
        return ""
    return (
        f"exact attention itself has {bits:.2f} bits per byte on this text, and the frequencies of "
        f"its tokens alone give {unigram:.2f}; use a trained model and text in its language"
    )


def qualities(rows: Sequence[Row]) -> dict[str, Difference]:
    """Return what each attention costs: bits per byte above exact attention, or 1 - cosine.

    Empty without a measured exact attention, or if exact attention cannot predict the text.
    """
    measured = measured_quality(rows)
    best = _best_exact(measured)
    if not best or unable(rows):
        return {}
    if "cosine" in best:
        return {x["attention"]: mean_of([1 - c for c in x["cosine_rows"]]) for x in measured}
    return {row["attention"]: paired(row["rows"], best["rows"]) for row in measured}


def _signed(cost: Difference) -> str:
    return f"{'+' if cost.mean >= 0 else ''}{cost}"


def _in_cosines(rows: Sequence[Row]) -> bool:
    """Whether the measured qualities are those of embeddings."""
    return any("cosine" in row for row in measured_quality(rows))


def equal_windows(rows: Sequence[Row]) -> dict[str, int | None]:
    """Return the window of equal memory of each attention; ``None`` if it keeps all keys."""
    found = [row for row in rows if row["kind"] == EQUAL and row["status"] == OK]
    return {row["attention"]: row["window"] for row in found}


def quality_table(rows: Sequence[Row]) -> Table | None:
    """Return loss within and beyond the trained length, generation and recall; ``None`` if none.

    ``costs`` is the loss above exact attention's, and ``equal tokens`` the fraction of greedily
    generated tokens that equal exact attention's. Of a model that predicts no next token: the
    similarity of its embeddings by length.
    """
    measured = measured_quality(rows)
    if not measured:
        return None
    if _in_cosines(rows):
        title = "Quality without training: cosine similarity of embeddings to the original model's"
        lengths = list(measured[0]["cosine_by_length"])
        columns = ["attention", *(f"cosine @{format_length(int(n))}" for n in lengths), "least"]
        body = [
            [x["attention"], *map(number, x["cosine_by_length"].values()), number(x["least"])]
            for x in measured
        ]
        return Table(columns=columns, rows=body, title=title)
    costs, equal = qualities(rows), equal_windows(rows)
    distances = sorted({int(d) for row in measured for d in row["needle_by_distance"]})
    shown = sorted({distances[i] for i in (0, len(distances) // 2, -1) if distances})
    columns = [
        "attention",
        f"bits/byte to {format_length(measured[0]['trained'])}",
        "costs",
        "window of equal memory",
        "beyond",
        "equal tokens",
        *(f"{kind} @{format_length(d)}" for kind in ("copy", "needle") for d in shown),
    ]
    body = [
        [
            (name := row["attention"]),
            number(row["bits_per_byte"]),
            _signed(costs[name]) if name in costs else "-",
            _window(equal[name], row["T"]) if name in equal else "-",
            number(row["bits_per_byte_beyond"]),
            _percent(row["generation"].get("agreement")),
            *(
                _percent(row[f"{kind}_by_distance"].get(str(d)))
                for kind in ("copy", "needle")
                for d in shown
            ),
        ]
        for row in measured
    ]
    return Table(
        columns=columns, rows=body, title="Quality without training", caption=_notes(measured)
    )


def _window(window: int | None, length: int) -> str:
    """Return a window of equal memory; one that sees every key of the rows has no row."""
    if window is None:
        return "all keys"
    return str(window) if window < length else f"{window} (rows are shorter)"


def _notes(measured: Sequence[Row]) -> str:
    """Return why numbers of quality are left out, or ``""``."""
    found: dict[str, list[str]] = {}
    for row in measured:
        for note in row["notes"]:
            found.setdefault(note, []).append(row["attention"])
    return " ".join(f"{note} ({', '.join(names)})." for note, names in found.items())


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


# -- findings ------------------------------------------------------------------------------------


def headline(curves: Sequence[Curve], rows: Sequence[Row]) -> str:
    """Return the main finding: the best attention, from which length on, and its quality.

    Args:
        curves: Curves of one level and mode.
        rows: All rows.
    """
    exact = best_exact(curves)
    if not exact:
        return "No exact attention could be measured, so there is no baseline to compare with."
    longest = max(exact)
    clear = {x.attention for x in curves if longest in clearly_faster(x, curves)}
    faster = {
        name: factor
        for name, factor in speedups(curves, longest).items()
        if name in clear and factor >= MIN_SPEEDUP
    }
    if not faster:
        return (
            f"At {format_length(longest)} tokens, nothing that was measured is clearly faster than "
            "exact attention: keep flash."
        )
    costs = qualities(rows)
    limit, bound = ACCEPTABLE_LOSS, f"{ACCEPTABLE_LOSS} bits per byte or less"
    if _in_cosines(rows):
        limit, bound = 1 - ACCEPTABLE_COSINE, f"a cosine of {ACCEPTABLE_COSINE} or more"
    good = {name: x for name, x in faster.items() if name in costs and costs[name].mean <= limit}
    pool = good or faster
    best = max(pool, key=lambda name: pool[name])
    (curve,) = (curve for curve in curves if curve.attention == best)
    gain = clear_gain(curve, curves, longest)
    error = pool[best] * gain.error if gain else 0.0
    finding = (
        f"From {faster_from(curve, curves)} tokens on, {best} is faster than exact attention, "
        f"{significant(pool[best], 2)} ± {significant(error, 1)} times at {format_length(longest)}"
    )
    if best not in costs:
        return f"{finding}; {_unknown(best, rows)}."
    cost = f"costs {_signed(costs[best])} bits per byte without training"
    if _in_cosines(rows):
        similar = plus_minus(1 - costs[best].mean, costs[best].error)
        cost = f"has a cosine of {similar} without training"
    if best in good:
        return f"{finding}, and {cost}."
    return f"{finding}, but {cost}; no faster one is measured at {bound}: train it, or keep flash."


def _unknown(attention: str, rows: Sequence[Row]) -> str:
    """Return why the quality of an attention is unknown."""
    reason = unable(rows)
    for row in rows:
        if row["kind"] == "quality" and row["attention"] == attention and row["status"] != OK:
            reason = _reason(row)
    return "its quality was not measured" + (f": {reason}" if reason else "")


def _reason(row: Row) -> str:
    """Return why a row has no result."""
    return ": ".join(filter(None, [row["status"], row.get("reason")]))


def not_measured(rows: Sequence[Row]) -> list[str]:
    """Return cases without a result and why; cases skipped after a shorter one are left out.

    A reason that several cases of an attention share is given once, with the first of them.
    """
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row["status"] not in (OK, NOT_RUN):
            what = LEVEL_NAMES[row["level"]] if row["kind"] == "cost" else row["kind"]
            cases = found.setdefault((row["attention"], _reason(row)), [])
            cases.append(f"{what}, {format_length(row['T'])} tokens")
    return [
        f"{attention}, {cases[0]}{f' and {len(cases) - 1} more' if cases[1:] else ''}: {reason}"
        for (attention, reason), cases in found.items()
    ]


PAGE = "report.html"
Group = tuple[str, str, str]  # device, level, mode


def group_curves(rows: Sequence[Row]) -> dict[Group, list[Curve]]:
    """Return the curves of every device, level and mode; the whole model first."""
    groups: dict[Group, list[Row]] = defaultdict(list)
    for row in rows:
        if row["kind"] == "cost":
            groups[row["device"], row["level"], row["mode"]].append(row)
    order = sorted(groups, key=lambda group: (group[0], LEVELS.index(group[1])))
    return {group: make_curves(groups[group]) for group in order}


def main_group(groups: dict[Group, list[Curve]]) -> Group | None:
    """Return the group to summarise: on a GPU if any, largest level."""
    found = [group for group in groups if any(curve.ms for curve in groups[group])]
    on_gpu = [group for group in found if group[0] != "cpu"]
    return next(iter(on_gpu or found), None)


def finding(rows: Sequence[Row]) -> str:
    """Return the main finding of a comparison's rows."""
    groups = group_curves(rows)
    if (group := main_group(groups)) is None:
        return "Nothing could be measured; the reasons are listed above."
    return f"{group_title(*group)}. {headline(groups[group], rows)}"


def show(console: Console, rows: Sequence[Row]) -> None:
    """Print the tables, quality first, the cases without a result, and the main finding."""
    costs = [cost_table(curves, group) for group, curves in group_curves(rows).items()]
    for part in (quality_table(rows), *costs, *not_measured(rows), finding(rows)):
        if isinstance(part, Table):
            part.print(console)
        elif part:
            console.print(part, soft_wrap=True, highlight=False, markup=False)


def write_report(out: Path, rows: Sequence[Row]) -> Path | None:
    """Write ``report.html`` and its plots as PNG; return ``None`` without matplotlib."""
    about, model = rows[0], rows[0]["model"]
    subject = (
        f"{model['name']}: {model['H']} query heads, {model['Hkv']} key heads of size "
        f"{model['D']}. Costs are per row, and times those of the fastest round."
    )
    parts: list[Part] = [subject, finding(rows), *quality_plots(rows)]
    parts.append(quality_table(rows))
    for group, curves in group_curves(rows).items():
        if any(curve.ms for curve in curves):
            parts += [*cost_plots(group, curves), cost_table(curves, group)]
    facts = ", ".join(f"{name} {value}" for name, value in about["machine"].items())
    parts += [*not_measured(rows), f"attnzoo {about['attnzoo']}; {facts}."]
    return write_page(out / PAGE, "Which attention is faster, and from which length on?", parts)


def cost_plots(group: Group, curves: Sequence[Curve]) -> list[Plot]:
    """Return time and memory over length of one device, level and mode."""
    name, title = "-".join(group), group_title(*group)
    return [
        line_plot(
            {curve.attention: curve.ms for curve in curves if curve.ms},
            name=f"time-{name}",
            title=title,
            x="tokens",
            y="milliseconds per row",
        ),
        line_plot(
            {
                curve.attention: {n: size / 2**20 for n, size in curve.memory.items()}
                for curve in curves
                if curve.ms
            },
            name=f"memory-{name}",
            title=f"{title}: {MEMORY_NAMES[group[2]]}",
            x="tokens",
            y="MiB per row",
        ),
    ]


def quality_plots(rows: Sequence[Row]) -> list[Plot]:
    """Return quality against cost, loss by position and recall by distance."""
    plots, measured = [], measured_quality(rows)
    for key, title, x, y in (
        ("cosine_by_length", "Similarity of embeddings", "tokens", "cosine similarity"),
        ("loss_by_position", "Loss by position in the row", "position, up to", "bits per byte"),
        ("copy_by_distance", "Tokens of a second copy", "distance, tokens", "predicted correctly"),
        ("needle_by_distance", "Digits of a needle", "distance, tokens", "predicted correctly"),
    ):
        lines = {row["attention"]: row[key] for row in measured if row.get(key)}
        if lines:
            name = key.replace("_", "-")
            plots.append(line_plot(lines, name=name, title=title, x=x, y=y, log=False))
    return [*_pareto(rows), *plots]


def _pareto(rows: Sequence[Row]) -> list[Plot]:
    """Return quality against time at the longest length, with the Pareto front."""
    groups = group_curves(rows)
    bits = {x["attention"]: x["bits_per_byte"] for x in measured_quality(rows) if "rows" in x}
    if (group := main_group(groups)) is None:
        return []
    length = max(best_exact(groups[group]), default=0)
    points: dict[str, tuple[float, float]] = {
        curve.attention: (curve.ms[length], bits[curve.attention])
        for curve in groups[group]
        if length in curve.ms and curve.attention in bits
    }
    if not points:
        return []
    front: dict[float, float] = {}
    for ms, loss in sorted(points.values()):
        if loss < min(front.values(), default=math.inf):
            front[ms] = loss
    at = f"{format_length(length)} tokens"
    return [
        line_plot(
            {name: dict([point]) for name, point in points.items()} | {"Pareto front": front},
            name="pareto",
            title="Quality without training against cost",
            x=f"milliseconds per row at {at}, {MODE_NAMES[group[2]]}",
            y="bits per byte, lower is better",
            scale="log",
        )
    ]
