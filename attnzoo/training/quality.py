"""Evaluation of a swapped model against softmax, the raw swap and its window alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnzoo.evaluation.corpus import add_repeats
from attnzoo.evaluation.data import Completions, EvalBatch
from attnzoo.evaluation.generation import (
    make_generation_batch,
    measure_generation,
    with_reference,
)
from attnzoo.evaluation.quality import NonFiniteError, measure_quality
from attnzoo.evaluation.recall_rows import Encode
from attnzoo.hf.swap.convert import original_attention
from attnzoo.training.data import IGNORE_INDEX, MIN_REPEAT_LENGTH, Rows
from attnzoo.training.transfer import swapped_layers

NEAR, FAR = -1e4, 1e4  # values of far_log_weight that disable the linear branch, or the window
CONTROL = 32  # window of the baseline, in tokens, if the swap has none


@dataclass(frozen=True, kw_only=True)
class Quality:
    """Quality of a model on held-out text.

    The attributes of generation are those of
    :class:`~attnzoo.evaluation.generation.GenerationQuality`; ``None`` if it is not measured.

    Attributes:
        loss: Cross-entropy on plain text, in bits per byte.
        recall: On the second copy of a repeated segment; ``None`` if rows are too short.
    """

    loss: float
    recall: float | None
    agreement: float | None = None
    equal_tokens: float | None = None
    copies: float | None = None
    needles: float | None = None

    def recovered(self, softmax: Quality, window: Quality) -> tuple[float | None, float | None]:
        """Return the fraction of the gap between window and softmax that is closed: loss, recall.

        ``None`` if the gap is below 0.01 bits per byte.
        """

        def fraction(own: float | None, best: float | None, worst: float | None) -> float | None:
            if own is None or best is None or worst is None or worst - best < 0.01:
                return None
            return (worst - own) / (worst - best)

        return (
            fraction(self.loss, softmax.loss, window.loss),
            fraction(self.recall, softmax.recall, window.recall),
        )


def rows_to_eval_batch(rows: Rows, count: int, encode: Encode | None = None) -> EvalBatch:
    """Return the first held-out rows, plain and with a repeated segment.

    Args:
        rows: Held-out rows.
        count: Number of rows.
        encode: Returns the tokens of a string; needed to measure generation.
    """
    plain = rows.tokens[:count].long()
    repeated, repeats = plain.clone(), []
    if plain.shape[1] >= MIN_REPEAT_LENGTH and rows.labels is None:
        repeats = add_repeats(repeated, torch.Generator().manual_seed(0))
    return EvalBatch(
        tokens=plain,
        repeat_tokens=repeated,
        repeats=[repeat for repeat in repeats if repeat is not None],
        bytes_per_token=rows.bytes_per_token,
        stream=plain.flatten(),
        generation=None
        if encode is None
        else make_generation_batch(rows.stream, encode, rows.tokens.shape[1]),
        completions=None
        if rows.labels is None
        else Completions(
            positions=rows.positions[:count],
            labels=rows.labels[:count].masked_fill(rows.positions[:count] == 0, IGNORE_INDEX),
        ),
    )


def quality(model: PreTrainedModel, batch: EvalBatch, *, is_original: bool = False) -> Quality:
    """Return the quality of a model in evaluation mode; its mode is restored.

    Args:
        model: The model.
        batch: Rows to evaluate it on.
        is_original: Whether :func:`with_original_continuations` has run the same model.
    """
    training = model.training
    model.eval()
    batch = batch.to(next(model.parameters()).device)
    result = measure_quality(model, batch)
    generated = (
        {}
        if batch.generation is None
        else asdict(measure_generation(model, batch.generation, is_original=is_original))
    )
    model.train(training)
    return Quality(loss=result.bits_per_byte, recall=result.recall_bits_per_byte, **generated)


def with_original_continuations(model: PreTrainedModel, batch: EvalBatch) -> EvalBatch:
    """Return the batch with the continuations of a swapped model under softmax attention.

    Called before the model is trained: other models are compared with them.
    """
    if batch.generation is None:
        return batch
    training = model.training
    with original_attention(model):
        model.eval()
        moved = batch.generation.to(next(model.parameters()).device)
        generation = with_reference(moved, model)
    model.train(training)
    return replace(batch, generation=generation)


def widest_window(model: nn.Module) -> int:
    """Return the widest window of the swapped layers in tokens; 32 if no layer has one."""
    windows = [getattr(b.config, "window", None) for b in swapped_layers(model).values()]
    return max((w for w in windows if isinstance(w, int)), default=CONTROL)


def softmax_quality(model: PreTrainedModel, batch: EvalBatch) -> Quality:
    """Return the quality of a swapped model with softmax attention."""
    with original_attention(model):
        return quality(model, batch)


def branch_qualities(
    model: PreTrainedModel,
    evaluate: Callable[[PreTrainedModel], Any],
    log: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Evaluate the window and the linear branch of window hybrids alone; empty without hybrids.

    Args:
        model: The model.
        evaluate: Returns the quality of the model.
        log: Called with the reason when a branch alone cannot be measured.
    """
    results = {}
    for name, weight in (("near branch alone", NEAR), ("far branch alone", FAR)):
        weights = [p for n, p in model.named_parameters() if n.endswith("attnzoo.far_log_weight")]
        if weights:
            with _fill(weights, weight):
                try:
                    results[name] = evaluate(model)
                except NonFiniteError as error:
                    log(f"{name} is not measured: {error}")
    return results


@contextmanager
def _fill(tensors: list[Any], value: float) -> Iterator[None]:
    """Context in which tensors have one value."""
    saved: list[Tensor] = [x.detach().clone() for x in tensors]
    with torch.no_grad():
        try:
            for x in tensors:
                x.fill_(value)
            yield
        finally:
            for x, old in zip(tensors, saved, strict=True):
                x.copy_(old)


def verdict(lines: dict[str, Quality]) -> str:
    """Return the conclusion in one sentence, beginning with a result worse than the window's.

    Args:
        lines: Evaluation results of ``softmax``, ``window alone`` and ``result``.
    """
    result, softmax, window = lines["result"], lines["softmax"], lines["window alone"]
    worse = [
        f"{name} is {mine:.3f} bits per byte, the window's {theirs:.3f}"
        for name, mine, theirs in (
            ("loss", result.loss, window.loss),
            ("recall", result.recall, window.recall),
        )
        if mine is not None and theirs is not None and mine > theirs
    ]
    if worse:
        return (
            "The result is worse than its window alone: "
            + " and ".join(worse)
            + ". Do not use it; keep more layers exact, train longer, or use the window."
        )
    fractions = zip(result.recovered(softmax, window), ("loss", "recall"), strict=True)
    generated = ""
    if result.agreement is not None:
        generated = (
            f" Of the tokens it generates, {result.agreement:.0%} equal the original model's."
        )
    parts = [f"{fraction:.0%} in {name}" for fraction, name in fractions if fraction is not None]
    if not parts:
        return (
            "On this text the window alone is as good as softmax, so recovery cannot be measured; "
            f"evaluate on longer rows, or on text with long-range dependencies.{generated}"
        )
    return (
        "The result closes the gap between the window alone and softmax by "
        f"{' and '.join(parts)}.{generated}"
    )


def as_dicts(lines: dict[str, Quality]) -> dict[str, Any]:
    """Return evaluation results as plain data, with the fractions of the gap they close."""
    softmax, window = lines["softmax"], lines["window alone"]
    data = {}
    for name, line in lines.items():
        loss, recall = line.recovered(softmax, window)
        data[name] = {**asdict(line), "loss_share": loss, "recall_share": recall}
    return data
