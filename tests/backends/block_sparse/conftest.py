"""A model that the tests of block_sparse share."""

import pytest

from tests.helpers import tiny_llama


@pytest.fixture
def llama():
    """A tiny Llama whose attention matters."""
    return tiny_llama()
