"""Fixtures of the tests of linear attention."""

import pytest

import attnzoo.backends.linear.backend  # noqa: F401 (registers the built-in maps)
from attnzoo.backends.linear.feature_maps import base


@pytest.fixture
def no_new_maps(monkeypatch):
    """Forget the feature maps that a test registers."""
    monkeypatch.setattr(base, "FEATURE_MAPS", dict(base.FEATURE_MAPS))
