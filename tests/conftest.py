"""What every test runs under: no network, its share of the cores, a fixed seed."""

import os

import pytest

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
# Set before torch loads, and by name, so that the processes a test starts keep to the share too.
_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // _workers))


@pytest.fixture(autouse=True)
def _seeded():
    import torch

    torch.manual_seed(0)
