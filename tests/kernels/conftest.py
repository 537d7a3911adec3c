"""Kernels run in Triton's interpreter here, as the conftest above had them imported."""

import pytest


@pytest.fixture(autouse=True)
def _not_a_number_where_nothing_was_written():
    import torch

    torch.use_deterministic_algorithms(True)  # fills what is allocated and not written with NaN
    yield
    torch.use_deterministic_algorithms(False)
