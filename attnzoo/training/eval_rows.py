"""Held-out rows on which a causal model is evaluated.

Rows begin where documents begin, because that is where a model's own training sequences began: on
rows from the middle of documents a model may predict worse than its own student, which has seen
such rows in distillation. Where there are fewer documents than rows, the rest are spread evenly
over the text.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnzoo.evaluation.corpus import Repeat
from attnzoo.evaluation.data import EvalBatch, rows_with_repeats
from attnzoo.evaluation.generation import Encode, make_generation_batch
from attnzoo.evaluation.rows import Rows


def rows_to_eval_batch(rows: Rows, count: int, encode: Encode | None = None) -> EvalBatch:
    """Return held-out rows, plain and with a repeated segment.

    Args:
        rows: Held-out rows.
        count: Number of rows.
        encode: Returns the tokens of a string; needed to measure generation.
    """
    held_out = select_rows(rows, count)
    repeated: Rows | None = None
    repeats: list[Repeat] = []
    if rows.labels is None:
        repeated, repeats = rows_with_repeats(held_out, torch.Generator().manual_seed(0))
    return EvalBatch(
        rows=held_out,
        repeated=repeated,
        repeats=repeats,
        stream=held_out.tokens.flatten(),
        generation=None
        if encode is None
        else make_generation_batch(_whole_documents(rows), encode, rows.length, held_out),
    )


def _whole_documents(rows: Rows) -> list[Tensor]:
    """Return the documents of a text, also those that are longer than a row."""
    if rows.starts is None:
        return rows.documents()
    return [x for x in rows.stream.tensor_split(rows.starts.long()) if len(x)]


def select_rows(rows: Rows, count: int) -> Rows:
    """Return ``count`` rows that do not overlap.

    They begin with documents as far as there are documents, spread evenly over the text; rows of
    whole examples are the first ones.

    Args:
        rows: Packed rows of documents.
        count: N; fewer rows if the text has no more.
    """
    if rows.labels is not None:
        return rows.select(slice(count))
    length, total = rows.length, rows.tokens.numel()
    starts = [] if rows.starts is None else rows.starts.tolist()
    found: list[int] = []
    for start in starts:
        if start + length <= total and (not found or start >= found[-1] + length):
            found.append(start)
    chosen = _spread(found, count)
    others = [x for x in range(0, total, length) if all(abs(x - y) >= length for y in chosen)]
    chosen = sorted(chosen + _spread(others, count - len(chosen)))
    begins = torch.zeros(total, dtype=torch.bool)
    begins[torch.tensor([x for x in starts if x < total], dtype=torch.long)] = True
    index = torch.tensor(chosen)[:, None] + torch.arange(length)
    place = torch.arange(length)
    restarts = torch.where(begins[index], place, 0).cummax(1).values
    return Rows(
        tokens=rows.tokens.flatten()[index].long(),
        positions=place - restarts,
        bytes_per_token=rows.bytes_per_token,
    )


def _spread(values: list[int], count: int) -> list[int]:
    """Return at most ``count`` of the values, evenly spaced."""
    count = min(count, len(values))
    return [values[i * len(values) // count] for i in range(count)]
