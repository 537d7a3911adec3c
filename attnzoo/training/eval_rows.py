"""Held-out rows on which a causal model is evaluated.

Rows begin where documents begin, because that is where a model's own training sequences began: on
rows from the middle of documents a model may predict worse than its own student, which has seen
such rows in distillation. Where there are fewer documents than rows, the rest are spread evenly
over the text.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnzoo.evaluation.corpus import add_repeats
from attnzoo.evaluation.data import EvalBatch, Packing
from attnzoo.evaluation.generation import make_generation_batch
from attnzoo.evaluation.recall_rows import Encode
from attnzoo.training.data import IGNORE_INDEX, MIN_REPEAT_LENGTH, Rows


def rows_to_eval_batch(rows: Rows, count: int, encode: Encode | None = None) -> EvalBatch:
    """Return held-out rows, plain and with a repeated segment.

    Args:
        rows: Held-out rows.
        count: Number of rows.
        encode: Returns the tokens of a string; needed to measure generation.
    """
    if rows.labels is not None:
        return _completion_batch(rows, count, encode)
    length = rows.tokens.shape[1]
    plain, positions = select_rows(rows, count)
    repeated, repeats = plain.clone(), []
    if length >= MIN_REPEAT_LENGTH:
        repeats = add_repeats(repeated, torch.Generator().manual_seed(0))
    packing = None
    if (positions == 0).sum() > len(positions):  # a document begins inside of a row
        packing = Packing(positions, plain.masked_fill(positions == 0, IGNORE_INDEX))
    return EvalBatch(
        tokens=plain,
        repeat_tokens=repeated,
        repeats=[repeat for repeat in repeats if repeat is not None],
        bytes_per_token=rows.bytes_per_token,
        stream=plain.flatten(),
        generation=None
        if encode is None
        else make_generation_batch(rows.stream, encode, length, plain),
        packing=packing,
    )


def _completion_batch(rows: Rows, count: int, encode: Encode | None) -> EvalBatch:
    """Return held-out rows of whole examples, of which the completions are evaluated."""
    assert rows.labels is not None
    tokens, positions = rows.tokens[:count].long(), rows.positions[:count].long()
    labels = rows.labels[:count].masked_fill(positions == 0, IGNORE_INDEX)
    length = tokens.shape[1]
    return EvalBatch(
        tokens=tokens,
        repeat_tokens=tokens.clone(),
        repeats=[],
        bytes_per_token=rows.bytes_per_token,
        stream=tokens.flatten(),
        generation=None if encode is None else make_generation_batch(rows.stream, encode, length),
        packing=Packing(positions, labels),
    )


def select_rows(rows: Rows, count: int) -> tuple[Tensor, Tensor]:
    """Return ``count`` rows that do not overlap, and the positions of their tokens, ``[N, T]``.

    They begin with documents as far as there are documents, spread evenly over the text.

    Args:
        rows: Packed rows of documents.
        count: N; fewer rows if the text has no more.
    """
    length, total = rows.tokens.shape[1], rows.tokens.numel()
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
    return rows.tokens.flatten()[index].long(), place - restarts


def _spread(values: list[int], count: int) -> list[int]:
    """Return at most ``count`` of the values, evenly spaced."""
    count = min(count, len(values))
    return [values[i * len(values) // count] for i in range(count)]
