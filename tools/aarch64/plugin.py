"""Plug-in of pytest: the tests run kernels for 64-bit ARM under QEMU.

``python -m pytest -n 0 -p tools.aarch64.plugin tests/ops/linear/test_cpp.py``
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tools.aarch64 import emulated

_folder = pytest.StashKey[tempfile.TemporaryDirectory[str]]()


def pytest_configure(config: pytest.Config) -> None:
    """Replace the kernels, before a test module is imported."""
    config.stash[_folder] = tempfile.TemporaryDirectory()
    emulated.install(Path(config.stash[_folder].name))
