"""What every test runs under: no network, its share of the cores, a fixed seed."""

import importlib.util
import os
from pathlib import Path

import pytest

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
# Set before torch loads, and by name, so that the processes a test starts keep to the share too.
_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // _workers))


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
