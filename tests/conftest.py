"""What every test runs under: no network, its share of the cores, a fixed seed."""

import importlib
import importlib.util
import os
import shutil
from pathlib import Path

import pytest

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
# Set before torch loads, and by name, so that the processes a test starts keep to the share too.
_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // _workers))

# Kernels run in Triton's interpreter, on the CPU. The variable is read when Triton and kernels are
# imported, and never again: before any test module imports Triton for another reason, and unseen by
# what tests start. The first launch would import the last of these.
INTERPRETED = (
    "attnzoo.kernels.triton.linear",
    "attnzoo.kernels.triton.linear_step",
    "triton.experimental.gluon",
)
if importlib.util.find_spec("triton"):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        for name in INTERPRETED:
            importlib.import_module(name)


@pytest.fixture(autouse=True)
def _seeded():
    import torch

    torch.manual_seed(0)


@pytest.fixture(scope="session")
def naive():
    """Return a function that loads a file of flash-linear-attention alone.

    Importing the package would load transformers and look for a GPU: seven seconds.
    """

    def load(path):
        package = importlib.util.find_spec("fla")
        if package is None:
            pytest.skip("flash-linear-attention is not installed; fla-core is in the extra 'dev'")
        file = Path(package.submodule_search_locations[0], path)
        spec = importlib.util.spec_from_file_location(f"naive_{file.parent.name}", file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture
def open_page():
    """Return a function that opens a report without network, checks it, and returns its tab.

    Nothing but the file is asked for, nothing is said on the console, nothing is wider than the
    window, and text and plots have the colours of the scheme.
    """
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("no Chromium on this machine to open the report in")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])

        def check(page, *, width, scheme, plots):
            errors, requests = [], []
            tab = browser.new_page(
                viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True
            )
            tab.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
            tab.on("pageerror", lambda error: errors.append(str(error)))
            tab.on("request", lambda request: requests.append(request.url))
            tab.goto(page.as_uri())
            tab.wait_for_function(f"document.querySelectorAll('.main-svg').length >= {plots}")
            tab.wait_for_timeout(200)
            assert errors == []
            here = ("file:", "data:", "blob:")
            assert [url for url in requests if not url.startswith(here)] == []
            assert tab.locator(".js-plotly-plot").count() == plots
            overflow = "document.documentElement.scrollWidth - window.innerWidth"
            assert tab.evaluate(overflow) <= 0
            background = tab.evaluate("getComputedStyle(document.body).backgroundColor")
            assert background == ("rgb(13, 17, 23)" if scheme == "dark" else "rgb(255, 255, 255)")
            inks = tab.evaluate(
                "[...document.querySelectorAll('.js-plotly-plot')].map(p => p.layout.font.color)"
            )
            assert set(inks) == {"#e6edf3" if scheme == "dark" else "#1b1f24"}
            return tab

        yield check
        browser.close()
