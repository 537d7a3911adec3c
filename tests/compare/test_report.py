"""The page, the pictures and the findings, from artificial rows."""

import io

import pytest
from rich.console import Console

from attnzoo.compare.report import (
    cost_table,
    finding,
    group_curves,
    make_curves,
    not_measured,
    quality_table,
    show,
    write_report,
)

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
        "machine": {"cpu": "a <cpu>"},
        "model": {"name": "a <model>", "H": 8, "Hkv": 8, "D": 64},
    }
    if status == "ok":
        took = ms * (length / 1024) ** power
        held = memory * length / 1024
        row |= {"median_ms": 3 * took, "min_ms": took, "spread": 0.02, "peak_bytes": held}
        row["kept_bytes"] = held if mode == "decode" else None
        rounds = [1 + n / 50 for n in range(7)]
        baseline = COSTS["flash"][0] * (length / 1024) ** COSTS["flash"][1]
        row["rounds_ms"] = [took * x for x in rounds]
        if name != "flash":
            row["baseline_ms"] = [baseline * x * (1 + (n % 2) / 100) for n, x in enumerate(rounds)]
    else:
        row["reason"] = "it is <b>odd</b>"
    return row


def quality(name, bits):
    shares = {"64": 0.9, "128": 0.5, "256": 0.1}
    return cost(name, 2048, level="model") | {
        "kind": "quality",
        "bits_per_byte": bits,
        "rows": [bits + x / 7 for x in (-1, 0, 1)],
        "notes": [],
        "bits_per_byte_beyond": bits + 1,
        "unigram_bits_per_byte": 4.5,
        "trained": 512,
        "loss_by_position": {"64": bits, "128": bits, "2048": bits + 1},
        "copy_by_distance": shares,
        "needle_by_distance": shares,
        "generation": {"agreement": 0.75},
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
    return write_report(tmp_path_factory.mktemp("report"), ROWS)


def printed(rows):
    console = Console(file=io.StringIO(), width=80)
    show(console, rows)
    return console.file.getvalue()


def test_text_is_escaped(page):
    text = page.read_text()
    assert "it is &lt;b&gt;odd&lt;/b&gt;" in text
    assert "<td>odd <one>" not in text
    assert "a <cpu>" not in text


def test_every_plot_is_a_picture(page):
    names = {path.stem for path in (page.parent / "pictures").glob("*.png")}
    costs = {f"{what}-cpu-{n}-forward" for what in ("time", "memory") for n in ("op", "model")}
    lines = {"loss-by-position", "copy-by-distance", "needle-by-distance"}
    assert names == costs | lines | {"pareto"}


@pytest.mark.parametrize("width", [1280, 400])
def test_it_opens_in_a_browser(page, open_page, width):
    tab = open_page(page, width=width, plots=8)
    assert tab.locator("table").count() == 3


def test_the_table_has_fits_and_reasons():
    lines = printed(ROWS).splitlines()
    of = {name: [line for line in lines if line.lstrip().startswith(name)] for name in COSTS}
    assert "75%" in of["linear"][0]  # quality comes first
    assert "T^1.00" in of["linear"][1]
    assert "2.5k" in of["linear"][1]  # 25 n meets 10 n^2
    assert any("out of memory" in line and "not run" in line for line in of["odd <one>"])
    assert "odd <one>, operator, 8k tokens: out of memory: it is <b>odd</b>" in lines


def test_texts_too_short_for_recall_have_no_columns_of_it():
    none = {"copy_by_distance": {}, "needle_by_distance": {}}
    short = quality_table([quality(name, bits) | none for name, bits in BITS.items()])
    assert short.columns == quality_table(ROWS).columns[: len(short.columns)]
    assert short.columns[-1] == "equal tokens"


def test_times_and_ratios_are_of_the_same_rounds():
    """A ratio in the table is that of two times in the table, though medians differ."""
    slow, fast = cost("flash", 1024), cost("linear", 1024)
    slow |= {"min_ms": 12.0, "median_ms": 13.6, "spread": 0.3}
    fast |= {"min_ms": 1.0, "median_ms": 2.12, "spread": 1.5}
    table = cost_table(make_curves([slow, fast]), ("cpu", "op", "forward"))
    found = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    assert [row["ms @1k"] for row in found] == ["12", "1"]
    assert [row["x exact @1k"] for row in found] == ["", "12.0"]
    assert [row["spread"] for row in found] == ["30%", "150%"]


def test_a_reason_is_given_once():
    failed = [
        cost(name, n, level=level, status="refused")
        for name in ("linear", "reformer")
        for level in ("op", "model")
        for n in (1024, 2048)
    ]
    assert not_measured(failed) == [
        f"{name}, operator, 1k tokens and 3 more: refused: it is <b>odd</b>"
        for name in ("linear", "reformer")
    ]


def column(table, name):
    """Return the cells of a column by attention."""
    index = list(table.columns).index(name)
    return {row[0]: row[index] for row in table.rows}


def faster_from(rows):
    """Return the lengths of the table of the whole model, or else of the operator."""
    group, curves = next(iter(group_curves(rows).items()))
    return column(cost_table(curves, group), "faster from")


def test_the_headline_takes_what_costs_little():
    """Linear is faster than reformer, but costs 3 bits per byte; reformer costs 0.05."""
    text = finding(ROWS)
    assert (
        "From 5.1k tokens on, reformer is faster than exact attention, 2.6 ± 0.005 times at 16k, "
        "and costs +0.050 ± 0.000 bits per byte without training."
    ) in text
    lengths = {"flash": "", "linear": "2.5k", "reformer": "5.1k", "odd <one>": "not seen"}
    assert faster_from(ROWS) == lengths
    costs = {"flash": "+0.000", "linear": "+3.000", "reformer": "+0.050", "odd <one>": "+0.500"}
    found = column(quality_table(ROWS), "costs")
    assert found == {name: f"{cost} ± 0.000" for name, cost in costs.items()}
    text = finding([row for row in ROWS if row["attention"] in ("flash", "linear")])
    assert "From 2.5k tokens on, linear is faster than exact attention, 6.4 ± 0.01 times" in text
    assert "costs +3.000 ± 0.000 bits per byte without training; no faster one is" in text
    assert "is measured at 0.1 bits per byte or less: train it" in text


def test_without_quality_the_headline_says_so():
    costs = [row for row in ROWS if row["kind"] == "cost"]
    assert "its quality was not measured." in finding(costs)
    assert quality_table(costs) is None
    failed = quality("linear", 0) | {"status": "failed", "reason": "the loss is nan"}
    assert "not measured: failed: the loss is nan." in finding([*costs, failed])


def test_no_cost_if_exact_attention_cannot_predict_the_text():
    """Bits per byte above those of the tokens' frequencies: an untrained model."""
    text = finding([*ROWS, quality("flash", 7.0) | {"attention": "softmax"}])
    assert "costs +0.050 ± 0.000 bits per byte" in text  # the best exact attention counts
    rows = [row | {"unigram_bits_per_byte": 0.5} if "trained" in row else row for row in ROWS]
    text = finding(rows)
    assert "exact attention itself has 1.00 bits per byte on this text" in text
    assert set(column(quality_table(rows), "costs").values()) == {"-"}


def test_findings_on_embeddings():
    cosines = {"flash": 1.0, "linear": 0.9, "reformer": 0.995, "odd <one>": 0.5}
    rows = [row for row in ROWS if row["kind"] == "cost"]
    for name, cosine in cosines.items():
        measured = {"kind": "quality", "cosine": cosine, "least": cosine}
        measured["cosine_rows"] = [cosine - 0.004, cosine + 0.004]
        rows.append(cost(name, 512) | measured | {"cosine_by_length": {"512": cosine}})
    text = finding(rows)
    assert text.endswith("at 16k, and has a cosine of 0.995 ± 0.004 without training.")


def test_nothing_faster():
    rows = [row for row in ROWS if row["attention"] in ("flash", "odd <one>")]
    assert "nothing that was measured is clearly faster" in finding(rows)


def noisy(rows, factor):
    """Rows whose rounds scatter by a factor, in another order than the baseline's."""
    changed = []
    for row in rows:
        if row.get("baseline_ms"):
            own = [x * factor ** ((7 * n) % 5 - 2) for n, x in enumerate(row["rounds_ms"])]
            row = row | {"rounds_ms": own}
        changed.append(row)
    return changed


def test_a_speed_up_inside_the_spread_is_not_claimed():
    """With a spread of 42% and more, neither "faster" nor a crossover is stated."""
    rows = [row for row in ROWS if row["attention"] in ("flash", "reformer")]
    loud = noisy(rows, 2.0)
    assert "nothing that was measured is clearly faster" in finding(loud)
    assert faster_from(loud)["reformer"] == "not seen"
    for found, ratio in ((rows, "2.6"), (loud, "2.6 ?")):
        group, curves = next(iter(group_curves(found).items()))
        ratios = column(cost_table(curves, group), "x exact @16k")
        assert ratios == {"flash": "", "reformer": ratio}
    assert "reformer is faster" in finding(noisy(rows, 1.05))


def test_without_rounds_beside_the_baseline_nothing_is_claimed():
    rows = [{k: x for k, x in row.items() if k != "baseline_ms"} for row in ROWS]
    assert "nothing that was measured is clearly faster" in finding(rows)


def test_the_window_of_equal_memory_stands_beside_an_attention():
    equal = [
        cost(name, 16384) | {"kind": "equal window", "window": window, "attention": name}
        for name, window in (("linear", 65), ("reformer", None), ("odd <one>", 2048))
    ]
    sizes = {"swap_bytes": 10, "exact_bytes": 20}
    table = quality_table([*ROWS, *(row | sizes for row in equal)])
    column = table.columns.index("window of equal memory")
    assert [row[column] for row in table.rows] == ["-", "65", "all keys", "2048 (rows are shorter)"]


def test_nothing_measured():
    failed = [cost(name, 1024, status="failed") for name in COSTS]
    assert "Nothing could be measured" in finding(failed)
    assert "failed: it is" in printed(failed)
