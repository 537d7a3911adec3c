"""Turn the demo's report into the README's pictures, through a headless Chromium.

make demo && .venv/bin/python benchmarks/plot.py
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer
from playwright.sync_api import sync_playwright

NAMES = ("quality", "decoding", "cache")  # the report's plots, from the top


def main(
    report: Annotated[Path, typer.Option(help="page that the demo wrote")] = Path(
        "attnzoo-demo/report.html"
    ),
    out: Annotated[Path, typer.Option(help="folder for the pictures")] = Path("benchmarks/figures"),
) -> None:
    """Write one PNG per plot."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None or not report.is_file():
        missing = "Chromium is" if chromium is None else f"{report} is"
        raise typer.BadParameter(f"{missing} not there; install Chromium and run `make demo` first")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 900, "height": 900}, device_scale_factor=1.5)
        page.goto(report.resolve().as_uri())
        page.wait_for_function("document.querySelectorAll('.main-svg').length >= 3")
        page.wait_for_timeout(500)
        for name, plot in zip(NAMES, page.locator(".js-plotly-plot").all(), strict=True):
            plot.screenshot(path=out / f"{name}.png")
        browser.close()


if __name__ == "__main__":
    typer.run(main)
