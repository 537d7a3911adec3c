"""Shorten what a run measures and draws besides training: most of a tiny model's run is that."""

from collections.abc import Callable
from typing import Any

import pytest

from attnzoo.evaluation import generation
from attnzoo.report import page
from attnzoo.training import head_entropy, results, runs


def shorten_runs(patch: Callable[[object, str, Any], None]) -> None:
    """Patch the lengths that a run measures at, and its report's pictures; the text remains.

    Args:
        patch: Sets an attribute: ``setattr``, or that of a ``MonkeyPatch``.
    """
    write_pages = runs.write_pages

    def write_without_pictures(*args: Any) -> None:
        with pytest.MonkeyPatch.context() as context:
            context.setattr(page, "to_svg", lambda plot: "<svg></svg>")
            write_pages(*args)

    patch(results, "LENGTHS", (16,))
    patch(generation, "NEW_TOKENS", 8)
    patch(head_entropy, "MEASUREMENTS", 2)
    patch(runs, "write_pages", write_without_pictures)
