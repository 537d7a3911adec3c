"""Packages that one of attnzoo's extras installs: imported on first use, or an error says which."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from attnzoo.errors import UnsupportedError


class OptionalPackage:
    """A package that a plain install lacks; its names are attributes.

    Args:
        name: Name of the package.
        extra: The extra of attnzoo that installs it.
    """

    def __init__(self, name: str, extra: str) -> None:
        self._name, self._extra = name, extra

    def __getattr__(self, attribute: str) -> Any:
        """Return a name of the package.

        Raises:
            UnsupportedError: The package is not installed.
        """
        if attribute.startswith("__"):  # copy and pickle ask for methods
            raise AttributeError(attribute)
        try:
            package = import_module(self._name)
        except ModuleNotFoundError as error:
            if error.name != self._name:  # a package that this one needs
                raise
            raise UnsupportedError(
                f"This needs {self._name}, which is not installed; "
                f'pip install "attnzoo[{self._extra}]"'
            ) from error
        return getattr(package, attribute)
