"""The demo's results as a terminal table and as one self-contained HTML page."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from attnzoo.demo.measure import Result
from attnzoo.demo.run import WINDOW

CONTROL = f"flash window {WINDOW}"


def number(value: float | None, digits: int = 3) -> str:
    """Write a number, or a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def size(count: int | None) -> str:
    """Write a number of bytes with its unit."""
    if count is None:
        return "-"
    value, units = float(count), ["B", "KiB", "MiB", "GiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return (
        f"{value:.0f} {units[0]}" if value >= 10 or units[0] == "B" else f"{value:.1f} {units[0]}"
    )


def columns(results: list[Result]) -> list[str]:
    """Return the heads of the table."""
    lengths = _lengths(results)
    decode = [f"ms @{_short(n)}" for n in lengths]
    cache = [f"cache @{_short(n)}" for n in _ends(lengths)]
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


def _short(length: int) -> str:
    return f"{length // 1024}k" if length >= 1024 and length % 1024 == 0 else str(length)


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
            f"At {_short(last)} tokens {best.label} decodes "
            f"{exact.decode_ms[last] / best.decode_ms[last]:.1f}x as fast as softmax and keeps "
            f"{exact.cache_bytes[last] / best.cache_bytes[last]:.0f}x fewer bytes."
        )
    return " ".join(parts)


# -- HTML ----------------------------------------------------------------------------------------

_STYLE = """
:root { color-scheme: light dark;
  --ink: #1b1f24; --paper: #ffffff; --line: #d0d7de; --soft: #57606a; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --paper: #0d1117; --line: #30363d; --soft: #9da7b1; }
}
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 1100px; margin: 0 auto; padding: 24px 16px; }
h1 { font-size: 1.6em; margin: 0 0 .2em; } h2 { font-size: 1.15em; margin: 2em 0 .3em; }
p.soft, footer { color: var(--soft); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .35em .6em; border-bottom: 1px solid var(--line);
  text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
.plot { width: 100%; height: 420px; }
"""

_SCRIPT = """
const dark = window.matchMedia('(prefers-color-scheme: dark)');
function ink() {
  const style = getComputedStyle(document.documentElement);
  const color = style.getPropertyValue('--ink').trim();
  const line = style.getPropertyValue('--line').trim();
  document.querySelectorAll('.js-plotly-plot').forEach(plot => Plotly.relayout(plot, {
    'font.color': color, 'xaxis.gridcolor': line, 'yaxis.gridcolor': line,
    'xaxis.linecolor': line, 'yaxis.linecolor': line}));
}
dark.addEventListener('change', ink);
window.addEventListener('load', ink);
"""


CLEAR = {  # a plot's layout, on the page's own ground
    "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)",
    "margin": {"l": 60, "r": 10, "t": 10, "b": 50},
    "legend": {"orientation": "h", "y": -0.2},
}


def html_page(title: str, body: str, script: str) -> str:
    """Return a page that needs no other file, light or dark as its reader has it.

    Args:
        title: Plain text.
        body: HTML.
        script: plotly's own, which the plots in the body need.
    """
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{html.escape(title)}</title><style>{_STYLE}</style>
<script>{script}</script></head><body>
{body}
<script>{_SCRIPT}</script></body></html>
"""


def html_plots(figures: list[tuple[str, str, Any]]) -> str:
    """Return plots of plotly as HTML, each under its title and a line of text."""
    import plotly.io as pio

    return "".join(
        f"<h2>{html.escape(title)}</h2><p class='soft'>{html.escape(text)}</p>"
        + pio.to_html(
            figure,
            include_plotlyjs=False,
            full_html=False,
            config={"displaylogo": False, "responsive": True},
            default_height="420px",
        )
        for title, text, figure in figures
    )


def write_report(out: Path, results: list[Result]) -> Path | None:
    """Write ``report.html``, with everything it needs inside; ``None`` without plotly."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        return None
    data = json.loads((out / "results.json").read_text())
    shown = [r for r in results if not r.refused]
    plots = html_plots(_figures(shown))
    body = f"""<h1>Which attention, at what price?</h1>
<p class="soft">{html.escape(_subject(data))}</p>
<p>{html.escape(summary(results))}</p>
<div class="scroll">{_html_table(shown, results)}</div>
{_refused(results)}{plots}
<footer><p>{html.escape(_footer(data))}</p></footer>"""
    page = html_page("attnzoo demo", body, get_plotlyjs())
    temporary = out / "report.html.tmp"
    temporary.write_text(page, encoding="utf-8")
    return temporary.replace(out / "report.html")


def _html_table(shown: list[Result], results: list[Result]) -> str:
    head = "".join(f"<th>{html.escape(c)}</th>" for c in columns(results))
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in cells(r, results)) + "</tr>"
        for r in shown
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _refused(results: list[Result]) -> str:
    rows = "".join(
        f"<li><b>{html.escape(r.label)}</b>: {html.escape(r.refused)}</li>"
        for r in results
        if r.refused
    )
    return f"<h2>Refused</h2><ul>{rows}</ul>" if rows else ""


def _subject(data: dict[str, Any]) -> str:
    model = "the embedded model" if data["model"] == "embedded" else data["model"]
    return (
        f"Model: {model}. Text: {data['text']}, {data['rows']} rows. Every row of the table is the "
        "same weights under another attention, swapped by config, nothing trained."
    )


def _footer(data: dict[str, Any]) -> str:
    facts = ", ".join(f"{name} {value}" for name, value in data["machine"].items())
    return f"attnzoo {data['attnzoo']}; {facts}; measured in {data['seconds']:.0f} s."


def _figures(shown: list[Result]) -> list[tuple[str, str, Any]]:
    """Make the three plots: quality, decoding time, cache size."""
    import plotly.graph_objects as go

    labels = [r.label for r in shown]
    quality = go.Figure(layout=CLEAR)
    quality.add_bar(x=labels, y=[r.bits_per_byte for r in shown], name="held-out text")
    quality.add_bar(
        x=labels, y=[r.recall_bits_per_byte for r in shown], name="second copy (recall)"
    )
    quality.update_yaxes(title="bits per byte, lower is better")
    lines = []
    for name, title in (("decode_ms", "ms per token"), ("cache_bytes", "bytes")):
        figure = go.Figure(layout=CLEAR)
        for number, result in enumerate(shown):
            points = getattr(result, name)
            figure.add_scatter(
                x=list(points),
                y=list(points.values()),
                name=result.label,
                mode="lines+markers",
                # colours come again after ten
                line_dash="solid" if number < 10 else "dot",
                marker_symbol="circle" if number < 10 else "diamond",
            )
        lengths = _lengths(shown)
        figure.update_xaxes(
            type="log",
            title="tokens seen",
            tickvals=lengths,
            ticktext=[_short(n) for n in lengths],
        )
        figure.update_yaxes(type="log", title=title, dtick="D2", minor_showgrid=False)
        lines.append(figure)
    return [
        (
            "Quality",
            "Text that the model never saw, and the second copy of a repeated segment.",
            quality,
        ),
        ("Decoding one token", "Median time per token after so many tokens.", lines[0]),
        ("Cache", "What is kept between tokens: softmax grows, a state does not.", lines[1]),
    ]
