"""Kernels run in Triton's interpreter here: on the CPU, on any machine."""

import os

import pytest

given = os.environ.get("TRITON_INTERPRET")
os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are imported, and never again
import triton.experimental.gluon  # noqa: E402, F401  (the first launch imports it otherwise)

if given is None:
    del os.environ["TRITON_INTERPRET"]
else:
    os.environ["TRITON_INTERPRET"] = given


@pytest.fixture(autouse=True)
def _not_a_number_where_nothing_was_written():
    import torch

    torch.use_deterministic_algorithms(True)  # fills what is allocated and not written with NaN
    yield
    torch.use_deterministic_algorithms(False)
