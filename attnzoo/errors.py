"""Errors for users: subclasses of ``ValueError`` that say what came and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from reprlib import Repr

__all__ = [
    "AttnzooError",
    "ConfigError",
    "SlowKernelWarning",
    "SpecError",
    "SwapWarning",
    "UnknownBackendError",
    "UnsupportedError",
    "UntrainedWarning",
]


MAX_MESSAGE = 8000  # characters; one with the reasons of every implementation has about 2000
MAX_NAME = 100  # characters of a name that is compared with known ones


class AttnzooError(ValueError):
    """Base class of the errors that attnzoo raises for invalid input.

    A message that quotes a long value of a file is shortened in the middle.
    """

    def __str__(self) -> str:
        """Return the message."""
        text = super().__str__()
        half = MAX_MESSAGE // 2
        return text if len(text) <= MAX_MESSAGE else f"{text[:half]} [...] {text[-half:]}"


class UnknownBackendError(AttnzooError):
    """No backend has the requested name."""


class ConfigError(AttnzooError):
    """An option of a backend has an unknown name, a wrong type or an invalid value."""


class SpecError(AttnzooError):
    """A spec is malformed, has a newer version, or does not fit the model."""


class SwapWarning(UserWarning):
    """A swap was made, or loaded, that may not be the one that was meant."""


class UntrainedWarning(SwapWarning):
    """A backend runs before its parameters are trained; its output is meaningless until then."""


class SlowKernelWarning(UserWarning):
    """The C++ kernels cannot be compiled or loaded, and slower forms compute in their place."""


class UnsupportedError(AttnzooError):
    """A backend, or an implementation of an op, does not support the inputs or the layer."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` if a known name is similar to ``name``, else ``""``."""
    close = get_close_matches(name[:MAX_NAME], list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def check_registered_name(decorator: str, name: object) -> None:
    """Raise ``ValueError`` if a decorator is given another object than a name."""
    if not isinstance(name, str):
        raise ValueError(
            f"@attnzoo.{decorator} takes a name, got {short_repr(name)}; write "
            f"@attnzoo.{decorator}('name')"
        )


def check_registered_class(decorator: str, name: str, value: object, base: type) -> None:
    """Raise ``ValueError`` if a decorator registers another object than a subclass of ``base``."""
    if not (isinstance(value, type) and issubclass(value, base)):
        raise ValueError(
            f"@attnzoo.{decorator}({name!r}) registers a subclass of attnzoo.{base.__name__}, got "
            f"{short_repr(value)}"
        )


class _ShortRepr(Repr):
    """``repr`` whose depth and length have a limit, so that it returns for any plain data."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 400
        self.maxlist = self.maxtuple = self.maxdict = 50

    def repr_int(self, x: int, level: int) -> str:
        """Return the digits of a number, or how many bits it has if it has more than 128."""
        return repr(x) if x.bit_length() <= 128 else f"an integer of {x.bit_length()} bits"


def short_repr(value: object) -> str:
    """Return ``repr(value)``, shortened where the value is long, deeply nested or a huge number."""
    return _ShortRepr().repr(value)


MAX_DEPTH = 50  # of plain data; configs have up to 5


def is_deeply_nested(data: object) -> bool:
    """Return whether plain data has more levels than recursive functions should follow."""
    level = [data]
    for _ in range(MAX_DEPTH):
        parts = (
            x.values() if isinstance(x, dict) else x if isinstance(x, list) else () for x in level
        )
        level = [part for values in parts for part in values]
    return bool(level)
