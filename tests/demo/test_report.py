from dataclasses import replace
from pathlib import Path

import pytest

from attnzoo.demo.report import summary, write_report
from attnzoo.demo.run import SwapResult, write_results

RESULTS = [
    SwapResult(
        label=name,
        spec={"backend": name.split()[0]},
        bits_per_byte=1.0 + i,
        recall_bits_per_byte=0.5 + i,
        decode_ms={256: 1.0, 1024: 2.0},
        loss_rows=[1.0 + i - 0.1, 1.0 + i + 0.1] * 4,
        rounds_ms={
            n: [ms * (1 + k / 100) for k in range(12)] for n, ms in ((256, 1.0), (1024, 2.0))
        },
        original_ms={256: [4.0] * 12, 1024: [5.0 + k / 20 for k in range(12)]},
        cache_bytes={256: 1000, 1024: 1000 + 3000 * (i < 1)},
    )
    for i, name in enumerate(["softmax", "flash window 32", "linear"])
] + [SwapResult(label="odd <one>", spec={"backend": "odd"}, refused="it is <b>odd</b>")]


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("report")
    write_results(out, RESULTS, path=None, text=None, lengths=[256, 1024], rows=8, start=0.0)
    return write_report(out, RESULTS)


def test_text_is_escaped(page):
    text = page.read_text()
    assert "it is &lt;b&gt;odd&lt;/b&gt;" in text
    assert "odd <one>" not in text


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_it_opens_in_a_browser(page, open_page, scheme, width):
    tab = open_page(page, width=width, scheme=scheme, plots=3)
    assert tab.locator("tbody tr").count() == 3


def test_the_summary_states_clear_differences_only():
    text = summary(RESULTS)
    assert "costs 1.000 ± 0.000 bits per byte" in text
    assert "1 of 1 untrained swaps are clearly worse" in text
    assert (
        "At 1k tokens linear decodes 2.5 ± 0.0 times as fast as the model's own attention" in text
    )
    assert "+1.00 on recall" in text
    without = [replace(x, recall_bits_per_byte=None) for x in RESULTS]
    assert "costs 1.000 ± 0.000 bits per byte." in summary(without)
    noisy = [replace(x, original_ms=x.rounds_ms) for x in RESULTS]
    noisy[2] = replace(noisy[2], loss_rows=[2.0, 9.0, 1.0, 0.5] * 2)
    text = summary(noisy)
    assert "(no difference measured)" in text
    assert "untrained swaps" not in text
