"""Quality at longer rows than those of training: who wins at the length that a user means.

A swap and its baselines are evaluated on rows of ``target_length`` tokens and of twice as many, as
far as the held-out text and the model's positions allow. Generation is not measured there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attnzoo.errors import AttnzooError
from attnzoo.evaluation.data import EvalBatch
from attnzoo.evaluation.equal_memory import EqualWindow, equal_window
from attnzoo.evaluation.models import max_positions
from attnzoo.evaluation.rows import Rows
from attnzoo.spec import AttentionSpec
from attnzoo.training.data import DataError
from attnzoo.training.eval_rows import rows_to_eval_batch
from attnzoo.training.quality import Quality, as_dicts
from attnzoo.training.verdict import compare

LEAST_ROWS = 4  # of a length; fewer say nothing
Log = Callable[[str], None]


def make_long_batches(
    path: Path,
    load: Callable[[int], Rows],
    *,
    row_length: int,
    target_length: int | None,
    count: int,
    log: Log,
) -> dict[int, EvalBatch]:
    """Return held-out rows of the target length and of twice as many tokens, by length.

    Args:
        path: Folder of the model.
        load: Returns held-out rows of a length.
        row_length: Length of the rows on which the model is evaluated anyway.
        target_length: The length that the user means; no batches when ``None``.
        count: Largest number of rows.
        log: Called with the reason for which a length is left out.
    """
    found: dict[int, EvalBatch] = {}
    limit = max_positions(path)
    for length in () if target_length is None else (target_length, 2 * target_length):
        if length <= row_length:
            continue
        if limit is not None and length > limit:
            log(f"{length} tokens are not evaluated: the model has {limit} positions")
            continue
        try:
            rows = load(length)
        except DataError as error:
            log(f"{length} tokens are not evaluated: of the held-out text, {error}")
            continue
        batch = rows_to_eval_batch(rows, count)
        if len(batch.rows) < LEAST_ROWS:
            log(
                f"{length} tokens are not evaluated: the held-out text has {len(batch.rows)} "
                f"rows of that length, and {LEAST_ROWS} are the least; give more text"
            )
            continue
        found[length] = batch
    return found


def find_equal_window(path: Path, spec: AttentionSpec, length: int, log: Log) -> EqualWindow | None:
    """Return the window that needs as much memory as a swap; ``None``, and a message, if unknown.

    Args:
        path: Folder of the model.
        spec: The swap.
        length: Tokens of one sequence.
        log: Called with the reason for which it cannot be computed.
    """
    try:
        return equal_window(path, spec, length)
    except AttnzooError as error:
        log(f"the window of equal memory is not computed: {error}")
        return None


def is_hidden(equal: EqualWindow | None, length: int) -> bool:
    """Return whether the window of equal memory sees every key of rows of a length."""
    return equal is not None and equal.widest >= length


def equal_sentence(lines: Mapping[str, Quality], equal: EqualWindow | None, length: int) -> str:
    """Return who wins at equal memory on rows of a length, or why that is not known, or ""."""
    if equal is None:
        return ""
    if not equal.saves_memory:
        return (
            f"The swap's cache is as large as softmax's at {equal.length:,} tokens, so softmax is "
            "its baseline at equal memory."
        )
    name = f"the window of equal memory ({equal} tokens)"
    if is_hidden(equal, length):
        return (
            f"Against {name} nothing can be said: it sees every key of rows of {length:,} tokens; "
            f"evaluate on rows of more than {equal.widest:,} (--max-length or --target-length)."
        )
    found = compare("the swap", lines["result"], "the window", lines["equal window"])
    return f"Against {name} on rows of {length:,} tokens: {found}" if found else ""


def long_results(
    lines: Mapping[int, Mapping[str, Quality]], equal: EqualWindow | None
) -> dict[str, Any]:
    """Return the results of longer rows as plain data, by length.

    Args:
        lines: Results by length and model.
        equal: The window of equal memory.
    """
    return {
        str(length): {
            "lines": as_dicts(found),
            "verdict": equal_sentence(found, equal, length),
        }
        for length, found in lines.items()
    }
