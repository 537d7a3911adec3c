"""The loss of distillation, for the memory of training (:mod:`attnzoo.evaluation.memory`)."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from attnzoo.errors import UnsupportedError
from attnzoo.evaluation.memory import MemoryCase, TrainingLoss, register_loss
from attnzoo.evaluation.memory import measured as measured_case
from attnzoo.hf.layers import attention_layers
from attnzoo.hf.logits import keeps_logits, tokens_per_chunk
from attnzoo.training.distil import distil_loss, predictions, softmax_teacher


def distillation(model: PreTrainedModel, tokens: Tensor, train: str) -> TrainingLoss:
    """Return the loss of ``recover``'s second stage, with its teacher.

    Raises:
        UnsupportedError: The model predicts no next tokens.
    """
    if not (model.can_generate() and all(x.geometry.causal for x in attention_layers(model))):
        raise UnsupportedError(
            f"{type(model).__name__} predicts no next tokens, so there is no loss 'distil' of its "
            "logits; use loss='lm'"
        )
    chunk = tokens_per_chunk(model) if keeps_logits(model) else None
    outputs = partial(predictions, chunk=chunk)
    teacher = softmax_teacher(model, weights_change=train == "full", outputs=outputs)
    loss = distil_loss(teacher, chunk=chunk)
    batch = {"input_ids": tokens, "labels": tokens}
    return TrainingLoss(lambda: loss(model, batch), getattr(teacher, "frozen", None))


def measured(case: MemoryCase) -> dict[str, Any]:
    """Return the measured memory of a case with any loss, for another process."""
    return measured_case(case)


register_loss("distil", distillation)
