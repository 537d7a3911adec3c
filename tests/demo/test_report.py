import shutil
from pathlib import Path

import pytest

from attnzoo.demo.measure import Result
from attnzoo.demo.report import write_report
from attnzoo.demo.run import write_results

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
RESULTS = [
    Result(
        label=name,
        spec={"backend": name.split()[0]},
        bits_per_byte=1.0 + i,
        recall_bits_per_byte=0.5 + i,
        decode_ms={256: 1.0, 1024: 2.0},
        cache_bytes={256: 1000, 1024: 1000 + 3000 * (i < 1)},
    )
    for i, name in enumerate(["softmax", "flash window 32", "linear"])
] + [Result(label="odd <one>", spec={"backend": "odd"}, refused="it is <b>odd</b>")]


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("report")
    write_results(out, RESULTS, path=None, text=None, lengths=[256, 1024], rows=8, start=0.0)
    return write_report(out, RESULTS)


def test_text_is_escaped(page):
    text = page.read_text()
    assert "it is &lt;b&gt;odd&lt;/b&gt;" in text
    assert "odd <one>" not in text


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine to open the report in")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_it_opens_in_a_browser(page, scheme, width):
    from playwright.sync_api import sync_playwright

    errors, requests = [], []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_page(
            viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True
        )
        tab.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
        tab.on("pageerror", lambda error: errors.append(str(error)))
        tab.on("request", lambda request: requests.append(request.url))
        tab.goto(page.as_uri())
        tab.wait_for_function("document.querySelectorAll('.main-svg').length >= 3")
        assert tab.locator(".js-plotly-plot").count() == 3
        assert tab.locator("tbody tr").count() == 3
        overflow = tab.evaluate("document.documentElement.scrollWidth - window.innerWidth")
        dark = tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(13, 17, 23)"
        tab.wait_for_timeout(200)
        ink = tab.evaluate("document.querySelector('.js-plotly-plot').layout.font.color")
        browser.close()
    assert errors == []
    assert [url for url in requests if not url.startswith(("file:", "data:", "blob:"))] == []
    assert overflow <= 0
    assert dark == (scheme == "dark")
    assert ink == ("#e6edf3" if scheme == "dark" else "#1b1f24")
