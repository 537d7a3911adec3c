from pathlib import Path

import pytest

from attnzoo.demo.report import write_report
from attnzoo.demo.run import SwapResult, write_results

RESULTS = [
    SwapResult(
        label=name,
        spec={"backend": name.split()[0]},
        bits_per_byte=1.0 + i,
        recall_bits_per_byte=0.5 + i,
        decode_ms={256: 1.0, 1024: 2.0},
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
