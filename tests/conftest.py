"""Settings of every test: no network, a share of the CPU cores, a fixed seed."""

import atexit
import importlib
import importlib.util
import os
import shutil
import sys
import tempfile
import zlib
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1]))  # tools/ is not in the wheel
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
if "ATTNZOO_TEST_DATASETS" not in os.environ:  # processes that a test starts share the folder
    _datasets = tempfile.mkdtemp(prefix="datasets-")
    atexit.register(shutil.rmtree, _datasets, ignore_errors=True)
    os.environ.update(HF_DATASETS_CACHE=_datasets, ATTNZOO_TEST_DATASETS="1")
# An environment variable, set before torch is imported: processes that a test starts inherit it.
_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_share = max(1, (os.cpu_count() or 1) // _workers)
os.environ["OMP_NUM_THREADS"] = str(min(_share, int(os.environ.get("OMP_NUM_THREADS", _share))))

# Without a GPU, or if TRITON_INTERPRET is 1, kernels run in Triton's interpreter on the CPU. Triton
# and the kernel modules read the variable only when they are imported. They are imported here,
# before any test module imports Triton, and the variable is then removed, so that processes that
# tests start do not inherit it. The first launch would import the last module of this list.
INTERPRETED = (
    "attnzoo.ops.linear.triton.custom_op",
    "attnzoo.ops.linear.triton.step",
    "triton.experimental.gluon",
)
if importlib.util.find_spec("triton"):
    from tests.kernel_device import interpret_kernels, require_bool_masks

    if interpret_kernels():
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            for name in INTERPRETED:
                importlib.import_module(name)
        require_bool_masks()
    else:  # cuBLAS is deterministic with this setting only
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def pytest_addoption(parser):
    help = "run the first case of each parametrised test, and one in N of the others"
    parser.addoption("--one-in", type=int, default=1, metavar="N", help=help)


def pytest_collection_modifyitems(config, items):
    number, seen, left_out = config.getoption("one_in"), set(), []
    if number == 1:
        return
    for item in tuple(items):
        test = item.nodeid.partition("[")[0]
        if test in seen and zlib.crc32(item.nodeid.encode()) % number:
            left_out.append(item)
        seen.add(test)
    kept = set(items) - set(left_out)
    items[:] = [item for item in items if item in kept]
    config.hook.pytest_deselected(items=left_out)


def pytest_collection_finish():
    from tests.helpers import freeze_garbage_collector

    freeze_garbage_collector()


@pytest.fixture(autouse=True, scope="module")
def _fast_garbage_collection():
    from tests.helpers import freeze_garbage_collector

    freeze_garbage_collector()


@pytest.fixture(autouse=True)
def _seeded():
    import torch

    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:  # without the stack traces that torch.manual_seed keeps for devices it does not find
        torch.default_generator.manual_seed(0)


@pytest.fixture(scope="session")
def fresh_python():
    """Return a function that runs a program in a process that has not imported attnzoo."""
    from tests.fresh_python import FreshPython

    python = FreshPython()
    yield python
    python.close()


@pytest.fixture(scope="session")
def naive():
    """Return a function that loads a single file of flash-linear-attention.

    Importing the package would load transformers and look for a GPU, which takes seven seconds.
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


@pytest.fixture(scope="module")
def browser():
    """Return a Chromium for the tests of one module: its event loop runs until it is closed."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("no Chromium on this machine to open the report in")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser):
    """Return a function that opens a report without network, checks it, and returns its tab.

    The page is under 1 MiB, makes no request, writes nothing to the console, has no script, is not
    wider than the window and has all its pictures.
    """
    tabs = []

    def check(page, *, width, plots):
        errors, requests = [], []
        assert page.stat().st_size < 2**20
        tab = browser.new_page(viewport={"width": width, "height": 900}, offline=True)
        tabs.append(tab)
        tab.on("console", lambda message: errors.append(message.text))
        tab.on("pageerror", lambda error: errors.append(str(error)))
        tab.on("request", lambda request: requests.append(request.url))
        tab.goto(page.as_uri())
        assert errors == []
        here = ("file:", "data:", "blob:")
        assert [url for url in requests if not url.startswith(here)] == []
        assert tab.locator("script").count() == 0
        overflow = "document.documentElement.scrollWidth - window.innerWidth"
        assert tab.evaluate(overflow) <= 0
        widths = tab.evaluate("[...document.images].map(x => x.naturalWidth && x.width)")
        assert len(widths) == plots
        assert min(widths) >= min(350, width - 50)
        return tab

    yield check
    for tab in tabs:
        tab.close()


@pytest.fixture
def any_peft(monkeypatch):
    """Let transformers take the installed PEFT: it may ask for one that is not released yet."""
    import peft
    from transformers.integrations import peft as integration

    if hasattr(integration, "MIN_PEFT_VERSION"):
        monkeypatch.setattr(integration, "MIN_PEFT_VERSION", peft.__version__)
