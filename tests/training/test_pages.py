"""The card and the report of a run: the bad news first, every line, in a browser too."""

import shutil

import pytest

from attnzoo.training.pages import card, write_pages
from attnzoo.training.report import lines_table

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
VERDICT = "The result is worse than its window alone: recall is <1.6>"


def line(loss, recall=None):
    return {"loss": loss, "recall": recall, "loss_share": 0.5, "recall_share": None}


RESULTS = {
    "verdict": VERDICT,
    "window": 32,
    "lines": {"softmax": line(1.0, 0.5), "window alone": line(1.5), "result": line(1.25)},
    "decoding": {
        name: {"milliseconds": {256: 1.5, 1024: 2.5}, "cache_bytes": {256: 2048, 1024: size}}
        for name, size in (("softmax", 8192), ("result", 2048))
    },
    "spec": {"version": 1, "backend": "linear"},
}
LOSSES = [
    {"total": n + 1, "stage": stage, "step": n % 3, "loss": 1 / (n + 1)}
    for n, stage in enumerate(["transfer"] * 3 + ["distil"] * 3)
]


def test_an_encoder_is_told_in_cosines():
    names = ("softmax", "window alone", "raw swap", "result")
    lines = {name: {"cosine": 0.9 - n / 10, "least": 0.5} for n, name in enumerate(names)}
    results = {**RESULTS, "lines": lines, "decoding": {}}
    text = card(results, "recover")
    assert "pipeline_tag: feature-extraction" in text
    assert "|  | mean cosine | least |" in text
    assert "| window alone (32) | 0.800 | 0.500 |" in text
    assert "Bits per byte" not in text
    assert "Bits per byte" in card(RESULTS, "recover")
    table = lines_table(results)
    assert [column.header for column in table.columns] == ["", "mean cosine", "least"]
    assert list(table.columns[1].cells) == ["0.900", "0.800", "0.700", "0.600"]


def test_the_card_begins_with_the_verdict():
    text = card(RESULTS, "recover")
    body = text.split("---\n")[2]
    assert body.strip().splitlines()[2] == f"**{VERDICT}**"
    assert "| window alone (32) | 1.500 | 50% | - |  |" in text
    assert "| 1024 | 2.5 | 2.5 | 8.0 KiB | 2.0 KiB |" in text
    assert '"backend": "linear"' in text


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine to open the report in")
def test_the_report_opens_in_a_browser(tmp_path):
    from playwright.sync_api import sync_playwright

    write_pages(tmp_path, RESULTS, LOSSES, "recover")
    assert "&lt;1.6&gt;" in (tmp_path / "report.html").read_text()
    errors = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 500, "height": 900}, offline=True)
        tab.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
        tab.on("pageerror", lambda error: errors.append(str(error)))
        tab.goto((tmp_path / "report.html").as_uri())
        tab.wait_for_function("document.querySelectorAll('.main-svg').length >= 1")
        assert tab.locator("h1").inner_text() == VERDICT
        assert tab.locator("table").first.locator("tbody tr").count() == 3
        assert tab.locator(".scatterlayer .trace").count() == 2
        overflow = tab.evaluate("document.documentElement.scrollWidth - window.innerWidth")
        browser.close()
    assert errors == []
    assert overflow <= 0
