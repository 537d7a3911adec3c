"""An extension of griffe, which reads the docstrings: a section ``Example`` is one of doctests."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Rename ``Example`` to ``Examples``: only this heading starts a section of doctests."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rename it in the docstring of one object."""
        if obj.docstring is not None:
            text = obj.docstring.value
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)
