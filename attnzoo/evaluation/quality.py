"""Language-model quality in bits per byte, on plain text and on repeated segments."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from attnzoo.errors import AttnzooError
from attnzoo.evaluation.data import EvalBatch, Packing

OnStep = Callable[[], None]
ROWS_PER_STEP = 8
TOKENS_PER_STEP = 8192  # at most, if rows are long: the logits of a step are in memory
IGNORE_INDEX = -100  # the label of tokens that are not evaluated, as in transformers


class NonFiniteError(AttnzooError):
    """A model's outputs are NaN or infinite, so its quality cannot be measured."""


def require_finite(value: float, name: str) -> float:
    """Return a measured value.

    Args:
        value: The value.
        name: Name of the measurement.

    Raises:
        NonFiniteError: The value is NaN or infinite.
    """
    if not math.isfinite(value):
        raise NonFiniteError(f"the {name} is {value}: the model's outputs are not finite")
    return value


@dataclass(frozen=True, kw_only=True)
class TextQuality:
    """Cross-entropy of a model on held-out text.

    Attributes:
        bits_per_byte: On plain rows.
        recall_bits_per_byte: On the second copy of a repeated segment; ``None`` without repeats.
        loss_rows: The contribution of each row to ``bits_per_byte``, which is their mean.
        recall_rows: The same of ``recall_bits_per_byte``.
    """

    bits_per_byte: float
    recall_bits_per_byte: float | None
    loss_rows: list[float]
    recall_rows: list[float]


@torch.no_grad()
def token_losses(model: PreTrainedModel, rows: Tensor) -> Tensor:
    """Return the cross-entropy in nats of each token except the first, ``[N, T - 1]``."""
    logits = model(rows, use_cache=False).logits[:, :-1]
    return F.cross_entropy(logits.float().transpose(1, 2), rows[:, 1:], reduction="none")


@torch.no_grad()
def packed_losses(model: PreTrainedModel, rows: Tensor, packing: Packing) -> list[Tensor]:
    """Return the cross-entropy in nats of the evaluated tokens of each packed row."""
    logits = model(rows, position_ids=packing.positions, use_cache=False).logits[:, :-1]
    labels = packing.labels[:, 1:]
    losses = F.cross_entropy(logits.float().transpose(1, 2), labels, reduction="none")
    return [x[own != IGNORE_INDEX] for x, own in zip(losses, labels, strict=True)]


def measure_quality(
    model: PreTrainedModel, batch: EvalBatch, on_step: OnStep = lambda: None
) -> TextQuality:
    """Return bits per byte on plain rows and on the second copy of repeated segments.

    Args:
        model: A causal model in evaluation mode.
        batch: Rows on the model's device.
        on_step: Called after every ``ROWS_PER_STEP`` rows, or fewer if they are long.

    Raises:
        NonFiniteError: The loss is NaN or infinite.
    """
    to_bits = 1 / (math.log(2) * batch.bytes_per_token)
    plain: list[Tensor] = []
    recall: list[Tensor] = []
    count = max(1, min(ROWS_PER_STEP, TOKENS_PER_STEP // batch.tokens.shape[1]))
    for first in range(0, len(batch.tokens), count):
        rows = slice(first, first + count)
        if batch.packing is None:
            plain.extend(token_losses(model, batch.tokens[rows]))
        else:
            part = Packing(*(x[rows] for x in batch.packing))
            plain.extend(packed_losses(model, batch.tokens[rows], part))
        if batch.repeats:
            losses = token_losses(model, batch.repeat_tokens[rows])
            for loss, repeat in zip(losses, batch.repeats[rows], strict=False):
                recall.append(loss[repeat.second - 1 : repeat.second - 1 + repeat.length])
        on_step()
    loss = require_finite(float(torch.cat(plain).mean()), "loss on plain text")
    repeated = torch.cat(recall).mean() if recall else None
    return TextQuality(
        bits_per_byte=loss * to_bits,
        recall_bits_per_byte=None
        if repeated is None
        else require_finite(float(repeated), "loss on repeated text") * to_bits,
        loss_rows=contributions(plain, to_bits),
        recall_rows=contributions(recall, to_bits),
    )


def contributions(rows: Sequence[Tensor], scale: float = 1.0) -> list[float]:
    """Return one number per row, whose mean is the mean over all numbers of all rows.

    A row with more numbers contributes more, so that differences between two models on the same
    rows have the mean of the differences of their numbers.

    Args:
        rows: The numbers of each row.
        scale: Factor of all numbers.
    """
    total = sum(len(x) for x in rows)
    return [scale * float(x.float().sum()) * len(rows) / max(total, 1) for x in rows]
