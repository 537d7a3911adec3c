"""Errors that users can meet: each is a ``ValueError`` and says what came and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class AttnzooError(ValueError):
    """Base of all errors that attnzoo raises about what a user gave."""


class UnknownBackendError(AttnzooError):
    """No backend has the name that was asked for."""


class ConfigError(AttnzooError):
    """An option of a backend has a wrong name, type or range."""


class SpecError(AttnzooError):
    """A spec is malformed, of a newer version, or does not fit the model."""


class UnsupportedError(AttnzooError):
    """A backend, or an implementation of an op, cannot run the given inputs or layer."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` when a known name is close to ``name``, else nothing."""
    close = get_close_matches(name, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""
