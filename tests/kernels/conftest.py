"""Kernels run in Triton's interpreter here: on the CPU, on any machine."""

import importlib

import pytest

# The variable is read when kernels are imported, and never again: other tests do not see it. The
# first launch would import the last of these.
INTERPRETED = (
    "attnzoo.kernels.triton.linear",
    "attnzoo.kernels.triton.linear_step",
    "triton.experimental.gluon",
)
with pytest.MonkeyPatch.context() as patch:
    patch.setenv("TRITON_INTERPRET", "1")
    for name in INTERPRETED:
        importlib.import_module(name)


@pytest.fixture(autouse=True)
def _not_a_number_where_nothing_was_written():
    import torch

    torch.use_deterministic_algorithms(True)  # fills what is allocated and not written with NaN
    yield
    torch.use_deterministic_algorithms(False)
