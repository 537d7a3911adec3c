"""Fixtures that the tests of backends share."""

import pytest

import attnzoo.backends.linear  # noqa: F401 (registers the built-in maps)
from attnzoo.backends.feature_maps import base
from tests.helpers import tiny_llama


@pytest.fixture
def llama():
    """A tiny Llama whose attention matters."""
    return tiny_llama()


@pytest.fixture
def no_new_maps(monkeypatch):
    """Forget the feature maps that a test registers."""
    monkeypatch.setattr(base, "FEATURE_MAPS", dict(base.FEATURE_MAPS))
