"""Language-model quality in bits per byte, on plain text and on repeated segments."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from attnzoo.errors import AttnzooError
from attnzoo.evaluation.data import EvalBatch
from attnzoo.evaluation.rows import IGNORE_INDEX, Rows, predictions

OnStep = Callable[[], None]
ROWS_PER_STEP = 8
TOKENS_PER_STEP = 8192  # at most, if rows are long: the logits of a step are in memory


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
        recall_bits_per_byte: On the second copy of a repeated segment; ``None`` without repeats,
            or if it is worse than that of a uniform guess.
        loss_rows: The contribution of each row to ``bits_per_byte``, which is their mean.
        recall_rows: The same of ``recall_bits_per_byte``.
        notes: Why numbers are left out.
    """

    bits_per_byte: float
    recall_bits_per_byte: float | None
    loss_rows: list[float]
    recall_rows: list[float]
    notes: list[str] = field(default_factory=list)


def losses_of(rows: Rows, logits: Tensor) -> Tensor:
    """Return the cross-entropy in nats of the tokens of rows, ``[N, T]``; 0 without a target."""
    losses = F.cross_entropy(
        logits[:, :-1].float().transpose(1, 2), rows.targets[:, 1:], reduction="none"
    )
    return F.pad(losses, (1, 0))


def rows_per_step(rows: Rows) -> int:
    """Return the number of rows in one forward pass: fewer if they are long."""
    return max(1, min(ROWS_PER_STEP, TOKENS_PER_STEP // rows.length))


def uniform_bits_per_byte(model: PreTrainedModel, bytes_per_token: float) -> float:
    """Return the loss of a model that gives every token the same probability."""
    return math.log2(model.config.get_text_config().vocab_size) / bytes_per_token


def worse_than_uniform(what: str, found: float, uniform: float) -> str:
    """Return why a recall is left out, or ``""``: it is worse than that of a uniform guess.

    A model that copies worse than it guesses does not recall: the segments are not like the text
    that it was trained on, or it is not trained.
    """
    if found <= uniform:
        return ""
    return (
        f"{what} is left out: {found:.2f} bits per byte, and a uniform guess has {uniform:.2f}; "
        "the model recalls nothing in such rows"
    )


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
    to_bits = 1 / (math.log(2) * batch.rows.bytes_per_token)
    plain: list[Tensor] = []
    recall: list[Tensor] = []
    for rows, logits in predictions(model, batch.rows, rows_per_step(batch.rows)):
        chosen = zip(losses_of(rows, logits), rows.targets, strict=True)
        plain += [x[1:][target[1:] != IGNORE_INDEX] for x, target in chosen]
        on_step()
    loss = require_finite(float(torch.cat(plain).mean()), "loss on plain text")
    notes = []
    repeated = None
    if batch.repeated is not None:
        places = iter(batch.repeats)
        for rows, logits in predictions(model, batch.repeated, rows_per_step(batch.repeated)):
            for x in losses_of(rows, logits):
                repeat = next(places)
                recall.append(x[repeat.second : repeat.second + repeat.length])
            on_step()
        repeated = require_finite(float(torch.cat(recall).mean()), "loss on repeated text")
        repeated *= to_bits
        uniform = uniform_bits_per_byte(model, batch.rows.bytes_per_token)
        if note := worse_than_uniform("recall", repeated, uniform):
            notes, repeated, recall = [note], None, []
    return TextQuality(
        bits_per_byte=loss * to_bits,
        recall_bits_per_byte=repeated,
        loss_rows=contributions(plain, to_bits),
        recall_rows=contributions(recall, to_bits),
        notes=notes,
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
