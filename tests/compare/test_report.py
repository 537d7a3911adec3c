"""The page, the pictures and the words, from rows that were made up."""

import io

import pytest
from rich.console import Console

from attnzoo.compare.report import advice, show, write_report

LENGTHS = [1024, 2048, 4096, 8192, 16384]
COSTS = {  # ms at 1k, exponent, bytes at 1k
    "flash": (10.0, 2.0, 1_000_000),
    "linear": (25.0, 1.0, 500_000),
    "reformer": (40.0, 1.15, 2_000_000),
    "odd <one>": (400.0, 2.0, 9_000_000),
}
BITS = {"flash": 1.0, "linear": 4.0, "reformer": 1.05, "odd <one>": 1.5}


def cost(name, length, *, level="op", mode="forward", status="ok"):
    ms, power, memory = COSTS[name]
    row = {
        "kind": "cost",
        "attention": name,
        "spec": {"backend": name, "options": {"feature_map": "relu"} if name == "linear" else {}},
        "exact": name == "flash",
        "level": level,
        "mode": mode,
        "device": "cpu",
        "T": length,
        "B": 1,
        "status": status,
        "attnzoo": "0.1.0",
        "commit": None,
        "machine": {"cpu": "a <cpu>"},
        "model": {"name": "a <model>", "H": 8, "Hkv": 8, "D": 64},
    }
    if status == "ok":
        took = ms * (length / 1024) ** power
        held = memory * length / 1024
        row |= {"median_ms": took, "min_ms": took, "spread": 0.02, "peak_bytes": held}
        row["kept_bytes"] = held if mode == "decode" else None
    else:
        row["reason"] = "it is <b>odd</b>"
    return row


def quality(name, bits):
    shares = {"64": 0.9, "128": 0.5, "256": 0.1}
    return cost(name, 2048, level="model") | {
        "kind": "quality",
        "bits_per_byte": bits,
        "bits_per_byte_beyond": bits + 1,
        "trained": 512,
        "loss_by_position": {"64": bits, "128": bits, "2048": bits + 1},
        "copy_by_distance": shares,
        "needle_by_distance": shares,
    }


ROWS = [
    *(cost(name, n, level=level) for level in ("op", "model") for n in LENGTHS for name in COSTS
      if not (name.startswith("odd") and n > 4096)),
    cost("odd <one>", 8192, status="out of memory"),
    cost("odd <one>", 16384, status="not run"),
    *(quality(name, bits) for name, bits in BITS.items()),
]  # fmt: skip


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return write_report(tmp_path_factory.mktemp("report"), ROWS, "forward", "DIR")


def printed(rows):
    console = Console(file=io.StringIO(), width=80)
    show(console, rows, "forward", "DIR")
    return console.file.getvalue()


def test_text_is_escaped(page):
    text = page.read_text()
    assert "it is &lt;b&gt;odd&lt;/b&gt;" in text
    assert "<td>odd <one>" not in text
    assert "a <cpu>" not in text


def test_every_plot_is_a_picture(page):
    names = {path.stem for path in (page.parent / "pictures").glob("*.png")}
    cost_plots = {
        f"{what}-cpu-{level}-forward"
        for what in ("time", "speedup", "memory")
        for level in ("op", "model")
    }
    lines = {"loss-by-position", "copy-by-distance", "needle-by-distance"}
    assert names == cost_plots | lines | {"pareto"}
    for path in (page.parent / "pictures").glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG")
        assert 5_000 < path.stat().st_size < 150_000


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_it_opens_in_a_browser(page, open_page, scheme, width):
    tab = open_page(page, width=width, scheme=scheme, plots=10)
    assert tab.locator("table").count() == 3
    hovers = tab.evaluate(
        "[...document.querySelectorAll('.js-plotly-plot')]"
        ".flatMap(p => p.data).filter(d => d.hoverinfo != 'skip' && !d.hovertemplate).length"
    )
    assert hovers == 0
    symbols = tab.evaluate(
        "[...document.querySelectorAll('.js-plotly-plot')]"
        ".flatMap(p => p.data).map(d => d.marker && d.marker.symbol)"
    )
    assert symbols.count("star") == 4  # linear and reformer cross flash, at both levels


def test_the_table_marks_predictions_and_reasons():
    lines = printed(ROWS).splitlines()
    of = {name: [line for line in lines if line.lstrip().startswith(name)] for name in COSTS}
    linear = of["linear"][0]
    assert "T^1.00" in linear
    assert "2.5k" in linear  # 25 n meets 10 n^2
    assert "~1600" in linear  # at 64k
    assert any("~25600 (out of memory)" in line for line in of["odd <one>"])
    assert "odd <one>, operator, 8k tokens: out of memory: it is <b>odd</b>" in lines


def test_the_advice_takes_what_costs_little():
    """Linear is faster than reformer, but costs 3 bits per byte; reformer costs 0.05."""
    told = advice(ROWS, "forward", "DIR")
    assert (
        "From 5.1k tokens on, reformer is faster than exact attention, at 16k 2.6 times, and costs "
        "+0.050 bits per byte without training."
    ) in told
    assert "The fastest at 16k is linear, 6.4 times, which costs +3.00 bits per byte" in told
    assert "linear holds least memory at 16k tokens, 7.6 MiB; flash holds 15 MiB" in told
    assert told.endswith("Next: attnzoo swap DIR --attention reformer --out NEW.")


def test_the_advice_names_a_command_with_the_options_measured():
    rows = [row for row in ROWS if row["attention"] in ("flash", "linear")]
    told = advice(rows, "forward", "DIR")
    assert "From 2.5k tokens on, linear is faster than exact attention, at 16k 6.4 times" in told
    assert "costs +3.00 bits per byte without training, and so does all" in told
    assert "attnzoo recover DIR --attention linear --set feature_map=relu" in told


def test_without_quality_the_advice_says_so():
    told = advice([row for row in ROWS if row["kind"] == "cost"], "forward", "DIR")
    assert "not measured" in told
    assert "bits per byte" not in told


def test_nothing_faster():
    rows = [row for row in ROWS if row["attention"] in ("flash", "odd <one>")]
    told = advice(rows, "forward", "DIR")
    assert "nothing that was measured is faster" in told
    assert "The fastest" not in told


def test_nothing_measured():
    failed = [cost(name, 1024, status="failed") for name in COSTS]
    assert "Nothing could be measured" in advice(failed, "forward", "DIR")
    assert "failed: it is" in printed(failed)
