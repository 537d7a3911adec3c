"""Shorten the measurements and plots of a run: with a tiny model they take most of its time."""

from collections.abc import Callable
from typing import Any

import pytest

from attnzoo.evaluation import generation
from attnzoo.evaluation.equal_memory import EqualWindow
from attnzoo.report import page
from attnzoo.training import best_state, head_entropy, lengths, rates, results

HELD_OUT_ROWS = best_state.ROWS  # of a run that is not shortened


def shorten_runs(patch: Callable[[object, str, Any], None], *, held_out_rows: int = 4) -> None:
    """Reduce the lengths of measurements, and leave out the pictures of the report.

    Args:
        patch: Sets an attribute: ``setattr``, or that of a ``MonkeyPatch``.
        held_out_rows: Rows on which a stage's states are compared, five times a stage.
    """
    write_pages = results.write_pages

    def write_without_pictures(*args: Any) -> None:
        with pytest.MonkeyPatch.context() as context:
            context.setattr(page, "to_svg", lambda plot: "<svg></svg>")
            write_pages(*args)

    windows = EqualWindow(length=16, windows={0: 2, 1: 2}, swap_bytes=1, exact_bytes=8)
    patch(best_state, "ROWS", held_out_rows)
    patch(lengths, "equal_window", lambda path, spec, length: windows)
    patch(results, "LENGTHS", (16,))
    patch(generation, "NEW_TOKENS", 8)
    patch(head_entropy, "MEASUREMENTS", 2)
    patch(rates, "CLOSE", 0.0)  # swaps of models with random weights start close to softmax
    patch(results, "write_pages", write_without_pictures)
