"""The demo's results as a table for the terminal and as one self-contained HTML page."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import quantiles
from typing import Any

from attnzoo.demo.run import WINDOW, SwapResult
from attnzoo.evaluation.margins import paired, speedup
from attnzoo.evaluation.models import EMBEDDED
from attnzoo.report import charts, page
from attnzoo.report.format import byte_unit, format_bytes, format_length, number
from attnzoo.report.table import Table

CONTROL = f"flash window {WINDOW}"


def results_table(results: list[SwapResult]) -> Table:
    """Return the results as a table; unsupported attentions have no row."""
    lengths = _lengths(results)
    cached = sorted({lengths[0], lengths[-1]}) if lengths else []
    rows = [
        [
            result.label,
            f"{result.parameters_added:,}",
            number(result.bits_per_byte),
            number(result.recall_bits_per_byte),
            *(number(result.decode_ms.get(n), 1) for n in lengths),
            *(format_bytes(result.cache_bytes.get(n)) for n in cached),
        ]
        for result in results
        if not result.refused
    ]
    decode = [f"ms @{format_length(n)}" for n in lengths]
    cache = [f"cache @{format_length(n)}" for n in cached]
    return Table(
        columns=["attention", "extras", "bits/byte", "recall", *decode, *cache],
        rows=rows,
        title="One model under each attention, swapped by config, without training",
        caption="bits per byte on held-out text and on the second copy of a segment (recall); "
        "milliseconds per decoded token, and bytes of cache, at each context length",
    )


def terminal_table(results: list[SwapResult]) -> Table:
    """Return the columns of the results that fit into 80 characters."""
    table = results_table(results)
    *_, last = table.columns
    narrow = [
        name
        for name in table.columns
        if name != "extras" and (not name.startswith("cache") or name == last)
    ]
    return table.select(narrow)


def _lengths(results: list[SwapResult]) -> list[int]:
    return sorted({n for result in results for n in result.decode_ms})


def summary(results: list[SwapResult]) -> str:
    """Return the main findings as text, starting with the control."""
    by_label = {r.label: r for r in results if not r.refused}
    exact, control = by_label.get("softmax"), by_label.get(CONTROL)
    approximate = [
        r
        for r in by_label.values()
        if r.bits_per_byte is not None and r.spec["backend"] not in ("softmax", "flash")
    ]
    parts = []
    if exact and control and exact.bits_per_byte and control.bits_per_byte:
        loss = paired(control.loss_rows, exact.loss_rows)
        before, after, recall = exact.recall_bits_per_byte, control.recall_bits_per_byte, ""
        if before is not None and after is not None:
            recall = f" and {after - before:+.2f} on recall"
        parts.append(
            f"The control, a window of {WINDOW} tokens, costs {loss} bits per byte{recall}."
        )
        below = [r for r in approximate if paired(r.loss_rows, control.loss_rows).is_positive]
        if below:
            parts.append(
                f"{len(below)} of {len(approximate)} untrained swaps are clearly worse than it; "
                "a swap needs training to recover its quality."
            )
    flat = [r for r in approximate if len(set(r.cache_bytes.values())) == 1]
    lengths = _lengths(results)
    if flat and exact and lengths:
        last = lengths[-1]
        best = min(flat, key=lambda r: r.decode_ms[last])
        smaller = exact.cache_bytes[last] / best.cache_bytes[last]
        gain = speedup(best.original_ms.get(last, []), best.rounds_ms.get(last, []))
        decodes = (
            "decodes neither clearly faster nor clearly slower than the model's own attention "
            "(no difference measured)"
        )
        if gain.is_clear:
            factor = math.exp(gain.mean)
            decodes = (
                f"decodes {factor:.1f} ± {factor * gain.error:.1f} times as fast as the model's "
                "own attention"
            )
        parts.append(
            f"At {format_length(last)} tokens {best.label} {decodes}, and its cache is "
            f"{smaller:.0f}x smaller than softmax's."
        )
    return " ".join(parts)


# -- HTML ----------------------------------------------------------------------------------------


def write_report(out: Path, results: list[SwapResult]) -> Path | None:
    """Write ``report.html`` and its plots as PNG; return ``None`` without matplotlib."""
    if not charts.can_draw():
        return None
    data = json.loads((out / "results.json").read_text("utf-8"))
    shown = [r for r in results if not r.refused]
    refused = [(r.label, r.refused) for r in results if r.refused]
    plots = _plots(shown)
    body = [
        page.heading("Quality and decoding cost by attention", 1),
        page.paragraph(_subject(data), muted=True),
        page.paragraph(summary(results)),
        results_table(shown).html(),
        page.reasons("Not supported", refused),
        page.plots_html(plots),
        page.footer(_footer(data)),
    ]
    charts.write_pictures(out, plots)
    return page.write_page(out / "report.html", title="attnzoo demo", body=body)


def _subject(data: dict[str, Any]) -> str:
    model = "the embedded model" if data["model"] == EMBEDDED else data["model"]
    return (
        f"Model: {model}. Text: {data['text']}, {data['rows']} rows. All rows of the table use the "
        "same weights; the attention is swapped by config, without training."
    )


def _footer(data: dict[str, Any]) -> str:
    facts = ", ".join(f"{name} {value}" for name, value in data["machine"].items())
    return f"attnzoo {data['attnzoo']}; {facts}; measured in {data['seconds']:.0f} s."


def _plots(shown: list[SwapResult]) -> list[charts.Plot]:
    """Return three plots: quality, decoding time and cache size."""
    bars = {
        "held-out text": [r.bits_per_byte for r in shown],
        "second copy (recall)": [r.recall_bits_per_byte for r in shown],
    }
    bits = charts.Axis(label="bits per byte, lower is better")
    largest = max((n for r in shown for n in r.cache_bytes.values()), default=0)
    size, unit = byte_unit(largest)
    return [
        charts.Plot(
            name="quality",
            title="Quality",
            text="Held-out text, and the second copy of a repeated segment.",
            figure=charts.bar_chart([r.label for r in shown], bars, value=bits),
        ),
        charts.Plot(
            name="decoding",
            title="Decoding one token",
            text="Time per token at each context length: median, and the middle half of the "
            "tokens as bars.",
            figure=_over_context(shown, "decode_ms", 1, "milliseconds per token"),
        ),
        charts.Plot(
            name="cache",
            title="Cache",
            text="Memory kept between tokens: it grows for softmax and is constant for a state.",
            figure=_over_context(shown, "cache_bytes", size, f"cache, {unit}"),
        ),
    ]


def _quartiles(result: SwapResult) -> dict[str, Any]:
    """Return the ends of the middle half of the timed tokens, as arguments of a series."""
    if any(len(result.rounds_ms.get(n, ())) < 2 for n in result.decode_ms):
        return {}
    ends = [quantiles(result.rounds_ms[n], n=4) for n in result.decode_ms]
    return {"low": [x[0] for x in ends], "high": [x[2] for x in ends]}


def _over_context(shown: list[SwapResult], name: str, unit: float, label: str) -> Any:
    """Draw a measurement of each attention over the context length."""
    series = [
        charts.Series(
            name=result.label,
            x=list(getattr(result, name)),
            y=[value / unit for value in getattr(result, name).values()],
            **(_quartiles(result) if name == "decode_ms" else {}),
            style=index,
        )
        for index, result in enumerate(shown)
    ]
    lengths = charts.length_axis(_lengths(shown), "context length, tokens")
    return charts.line_chart(series, x=lengths, y=charts.Axis(label=label, log=True))
