"""Evaluation of a swapped model against softmax, the raw swap and its window alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnzoo.evaluation.data import EvalBatch, unigram_bits_per_byte
from attnzoo.evaluation.generation import measure_generation, with_reference
from attnzoo.evaluation.margins import Difference, closed_gap, mean_of
from attnzoo.evaluation.quality import NonFiniteError, measure_quality
from attnzoo.hf.swap.convert import original_attention
from attnzoo.training.transfer import swapped_layers

NEAR, FAR = -1e4, 1e4  # values of far_log_weight that disable the linear branch, or the window
CONTROL = 32  # window of the baseline, in tokens, if the swap has none
LEAST_GAP = 0.01  # bits per byte between window and softmax of which fractions are stated


@dataclass(frozen=True, kw_only=True)
class Quality:
    """Quality of a model on held-out text.

    The attributes of generation are those of
    :class:`~attnzoo.evaluation.generation.GenerationQuality`; ``None`` if it is not measured.

    Attributes:
        loss: Cross-entropy on plain text, in bits per byte.
        recall: On the second copy of a repeated segment; ``None`` if documents are too short, or
            if it is worse than that of a uniform guess.
        unigram: Loss of a model that knows only how frequent each token of the rows is.
        loss_rows: The contribution of each row to ``loss``, which is their mean.
        recall_rows: The same of ``recall``.
        notes: Why numbers are left out.
    """

    loss: float
    recall: float | None
    agreement: float | None = None
    equal_tokens: float | None = None
    copies: float | None = None
    needles: float | None = None
    unigram: float = math.inf
    loss_rows: Sequence[float] = ()
    recall_rows: Sequence[float] = ()
    agreement_rows: Sequence[float] = ()
    notes: Sequence[str] = ()

    def recovered(
        self, softmax: Quality, window: Quality
    ) -> tuple[Difference | None, Difference | None]:
        """Return the fraction of the gap between window and softmax that is closed: loss, recall.

        ``None`` if the gap is not clearly above 0.01 bits per byte, as
        :mod:`attnzoo.evaluation.margins` defines it.
        """
        return (
            closed_gap(self.loss_rows, softmax.loss_rows, window.loss_rows, least=LEAST_GAP),
            closed_gap(self.recall_rows, softmax.recall_rows, window.recall_rows, least=LEAST_GAP),
        )


def evaluate_rows(
    model: PreTrainedModel, batch: EvalBatch, *, is_original: bool = False
) -> Quality:
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
    generated: dict[str, Any] = {}
    if batch.generation is not None:
        generated = asdict(measure_generation(model, batch.generation, is_original=is_original))
    model.train(training)
    return Quality(
        loss=result.bits_per_byte,
        recall=result.recall_bits_per_byte,
        unigram=unigram_bits_per_byte(batch.rows),
        loss_rows=result.loss_rows,
        recall_rows=result.recall_rows,
        notes=[*result.notes, *generated.pop("notes", [])],
        **generated,
    )


def with_original_continuations(
    model: PreTrainedModel, batch: EvalBatch, teacher: PreTrainedModel | None = None
) -> EvalBatch:
    """Return the batch with the continuations of a swapped model under softmax attention.

    Called before the model is trained: other models are compared with them.

    Args:
        model: The swapped model.
        batch: The batch.
        teacher: The original model, where it is another one.
    """
    if batch.generation is None:
        return batch
    original: Any = model if teacher is None else teacher
    original.to(next(model.parameters()).device)
    training = original.training
    with original_attention(model) if teacher is None else nullcontext():
        original.eval()
        moved = batch.generation.to(next(original.parameters()).device)
        generation = with_reference(moved, original)
    original.train(training)
    return replace(batch, generation=generation)


def widest_window(model: nn.Module) -> int:
    """Return the widest window of the swapped layers in tokens; 32 if no layer has one."""
    backends = swapped_layers(model).values()
    windows = [getattr(backend.config, "window", None) for backend in backends]
    return max((w for w in windows if isinstance(w, int)), default=CONTROL)


def softmax_quality(model: PreTrainedModel, batch: EvalBatch) -> Quality:
    """Return the quality of a swapped model with softmax attention."""
    with original_attention(model):
        return evaluate_rows(model, batch)


def branch_qualities(
    model: PreTrainedModel,
    evaluate: Callable[[PreTrainedModel], Any],
    log: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Evaluate the window and the linear branch of window hybrids alone; empty without hybrids.

    Args:
        model: The model.
        evaluate: Returns the quality of the model.
        log: Called before each evaluation, and with the reason when a branch alone cannot be
            measured.
    """
    results = {}
    for name, weight in (("near branch alone", NEAR), ("far branch alone", FAR)):
        weights = [p for n, p in model.named_parameters() if n.endswith("attnzoo.far_log_weight")]
        if weights:
            log(f"evaluation: {name}")
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


def as_dicts(lines: Mapping[str, Quality]) -> dict[str, Any]:
    """Return evaluation results as plain data, with the fractions of the gap they close.

    ``loss_share_error`` and ``recall_share_error`` are the standard errors of the fractions,
    ``agreement_error`` that of the fraction of equal tokens.
    """
    softmax, window = lines["softmax"], lines["window alone"]
    data = {}
    for name, line in lines.items():
        shares = {}
        for metric, share in zip(("loss", "recall"), line.recovered(softmax, window), strict=True):
            known = share is not None and math.isfinite(share.error)
            shares[f"{metric}_share"] = None if share is None else share.mean
            shares[f"{metric}_share_error"] = share.error if known and share is not None else None
        error = mean_of(line.agreement_rows).error
        shares["agreement_error"] = error if math.isfinite(error) else None
        values = {k: list(x) if isinstance(x, tuple) else x for k, x in asdict(line).items()}
        data[name] = {**values, **shares}
    return data
