"""The demo's results as a terminal table and as one self-contained HTML page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from attnzoo.demo.measure import Result
from attnzoo.demo.run import WINDOW
from attnzoo.report import page
from attnzoo.report.text import number, short, size

CONTROL = f"flash window {WINDOW}"


def columns(results: list[Result]) -> list[str]:
    """Return the heads of the table."""
    lengths = _lengths(results)
    decode = [f"ms @{short(n)}" for n in lengths]
    cache = [f"cache @{short(n)}" for n in _ends(lengths)]
    return ["attention", "extras", "bits/byte", "recall", *decode, *cache]


def cells(result: Result, results: list[Result]) -> list[str]:
    """Return one row of the table."""
    lengths = _lengths(results)
    return [
        result.label,
        f"{result.parameters_added:,}",
        number(result.bits_per_byte),
        number(result.recall_bits_per_byte),
        *(number(result.decode_ms.get(n), 1) for n in lengths),
        *(size(result.cache_bytes.get(n)) for n in _ends(lengths)),
    ]


def _ends(lengths: list[int]) -> list[int]:
    return sorted({lengths[0], lengths[-1]}) if lengths else []


def _lengths(results: list[Result]) -> list[int]:
    return sorted({n for result in results for n in result.decode_ms})


def terminal_table(results: list[Result]) -> Table:
    """Return the results as a table; what was refused stands below with its reason."""
    table = Table(
        title="One model, its attention swapped by config, nothing trained",
        caption="bits per byte on held-out text and on a second copy (recall); "
        "ms to decode a token, and bytes of cache, after so many tokens",
        box=box.SIMPLE_HEAD,
        padding=0,
        pad_edge=False,
    )
    heads = columns(results)
    shown = [i for i, head in enumerate(heads) if i != heads.index("extras")]
    shown = [i for i in shown if not heads[i].startswith("cache") or i == len(heads) - 1]
    for i in shown:  # what fits into 80 columns
        table.add_column(heads[i], justify="left" if i == 0 else "right", no_wrap=True)
    for result in results:
        if not result.refused:
            row = cells(result, results)
            table.add_row(*(row[i] for i in shown))
    return table


def summary(results: list[Result]) -> str:
    """Say in words what the table shows, the control first."""
    by_label = {r.label: r for r in results if not r.refused}
    exact, control = by_label.get("softmax"), by_label.get(CONTROL)
    approximate = [
        r
        for r in by_label.values()
        if r.bits_per_byte is not None and r.spec["backend"] not in ("softmax", "flash")
    ]
    parts = []
    if exact and control and exact.bits_per_byte and control.bits_per_byte:
        assert exact.recall_bits_per_byte
        assert control.recall_bits_per_byte
        worse = control.bits_per_byte - exact.bits_per_byte
        forgets = control.recall_bits_per_byte - exact.recall_bits_per_byte
        parts.append(
            f"Seeing only the last {WINDOW} tokens costs {worse:+.2f} bits per byte and "
            f"{forgets:+.2f} on recall: that is the control."
        )
        below = [r for r in approximate if (r.bits_per_byte or 0) >= control.bits_per_byte]
        if below:
            parts.append(
                f"{len(below)} of {len(approximate)} untrained swaps do worse than the window "
                "alone; a swap is recovered by training, not by swapping."
            )
    flat = [r for r in approximate if len(set(r.cache_bytes.values())) == 1]
    lengths = _lengths(results)
    if flat and exact and lengths:
        last = lengths[-1]
        best = min(flat, key=lambda r: r.decode_ms[last])
        parts.append(
            f"At {short(last)} tokens {best.label} decodes "
            f"{exact.decode_ms[last] / best.decode_ms[last]:.1f}x as fast as softmax and keeps "
            f"{exact.cache_bytes[last] / best.cache_bytes[last]:.0f}x fewer bytes."
        )
    return " ".join(parts)


# -- HTML ----------------------------------------------------------------------------------------


def write_report(out: Path, results: list[Result]) -> Path | None:
    """Write ``report.html``, with everything it needs inside; ``None`` without plotly."""
    if not page.can_plot():
        return None
    data = json.loads((out / "results.json").read_text())
    shown = [r for r in results if not r.refused]
    refused = [(r.label, r.refused) for r in results if r.refused]
    body = [
        page.heading("Which attention, at what price?", 1),
        page.paragraph(_subject(data), soft=True),
        page.paragraph(summary(results)),
        page.table(columns(results), [cells(r, results) for r in shown]),
        page.reasons("Refused", refused),
        page.plots_html(_plots(shown)),
        page.footer(_footer(data)),
    ]
    return page.write_page(out / "report.html", title="attnzoo demo", body=body)


def _subject(data: dict[str, Any]) -> str:
    model = "the embedded model" if data["model"] == "embedded" else data["model"]
    return (
        f"Model: {model}. Text: {data['text']}, {data['rows']} rows. Every row of the table is the "
        "same weights under another attention, swapped by config, nothing trained."
    )


def _footer(data: dict[str, Any]) -> str:
    facts = ", ".join(f"{name} {value}" for name, value in data["machine"].items())
    return f"attnzoo {data['attnzoo']}; {facts}; measured in {data['seconds']:.0f} s."


def _plots(shown: list[Result]) -> list[page.Plot]:
    """Make the three plots: quality, decoding time, cache size."""
    labels = [r.label for r in shown]
    quality = page.clear_figure()
    quality.add_bar(x=labels, y=[r.bits_per_byte for r in shown], name="held-out text")
    quality.add_bar(
        x=labels, y=[r.recall_bits_per_byte for r in shown], name="second copy (recall)"
    )
    quality.update_yaxes(title="bits per byte, lower is better")
    lines = []
    for name, title in (("decode_ms", "ms per token"), ("cache_bytes", "bytes")):
        figure = page.clear_figure()
        for index, result in enumerate(shown):
            points = getattr(result, name)
            figure.add_scatter(
                x=list(points),
                y=list(points.values()),
                name=result.label,
                **page.line_style(index),
            )
        page.length_axis(figure, _lengths(shown), "tokens seen")
        figure.update_yaxes(type="log", title=title, dtick="D2", minor_showgrid=False)
        lines.append(figure)
    told = (
        ("quality", "Quality", "Text that the model never saw, and the second copy of a segment."),
        ("decoding", "Decoding one token", "Median time per token after so many tokens."),
        ("cache", "Cache", "What is kept between tokens: softmax grows, a state does not."),
    )
    return [
        page.Plot(name=name, title=title, text=text, figure=figure)
        for (name, title, text), figure in zip(told, (quality, *lines), strict=True)
    ]
