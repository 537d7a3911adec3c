"""The loss of distillation, for the memory of training (:mod:`attnzoo.evaluation.memory`)."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnzoo.errors import UnsupportedError
from attnzoo.evaluation.memory import measured as measured_case
from attnzoo.evaluation.memory_4bit import in_4_bits, quantizable_layers
from attnzoo.evaluation.memory_case import NF4, MemoryCase, TrainingLoss, register_loss
from attnzoo.evaluation.memory_sharding import gather_parts
from attnzoo.hf.layers import attention_layers
from attnzoo.hf.logits import keeps_logits, tokens_per_chunk
from attnzoo.training.distil import distil_loss, predictions, softmax_teacher


def distillation(model: PreTrainedModel, tokens: Tensor, case: MemoryCase) -> TrainingLoss:
    """Return the loss of ``recover``'s second stage, with its teacher.

    Under FSDP, all logits are held, as in a run.

    Raises:
        UnsupportedError: The model predicts no next tokens.
    """
    if not (model.can_generate() and all(x.geometry.causal for x in attention_layers(model))):
        raise UnsupportedError(
            f"{type(model).__name__} predicts no next tokens, so there is no loss 'distil' of its "
            "logits; use loss='lm'"
        )
    in_chunks = keeps_logits(model) and not case.shards
    chunk = tokens_per_chunk(model) if in_chunks else None
    outputs = partial(predictions, chunk=chunk)
    in_4 = case.teacher_dtype == NF4  # counted on a copy in bfloat16, which needs no bitsandbytes
    named = "bfloat16" if in_4 else case.teacher_dtype
    dtype = case.kept_dtype if named is None else getattr(torch, named)
    copied = case.copies_teacher
    teacher = softmax_teacher(model, weights_change=copied, outputs=outputs, dtype=dtype)
    frozen: Any = getattr(teacher, "frozen", None)
    saved = 0
    if in_4:
        saved, _ = in_4_bits(frozen, dtype.itemsize)
        _allocate_while_running(quantizable_layers(frozen))  # what is dequantized
    if frozen is not None and case.keeps_parts and not in_4:
        gather_parts(frozen)
    elif case.teacher == "offloaded":
        _allocate_while_running(frozen.modules())
    if case.teacher == "offloaded":
        frozen = None  # no weights between layers
    loss = distil_loss(teacher, chunk=chunk)
    batch = {"input_ids": tokens, "labels": tokens}
    return TrainingLoss(lambda: loss(model, batch), frozen, saved)


def _allocate_while_running(modules: Iterable[nn.Module]) -> None:
    """Allocate the weights of each module while it runs, as Accelerate's ``cpu_offload`` does."""
    copies: dict[nn.Module, list[Tensor]] = {}

    def load(module: nn.Module, args: Any) -> None:
        copies[module] = [torch.empty_like(x) for x in module.parameters(recurse=False)]

    def free(module: nn.Module, args: Any, output: Any) -> None:
        del copies[module]

    for module in modules:
        if any(True for _ in module.parameters(recurse=False)):
            module.register_forward_pre_hook(load)
            module.register_forward_hook(free)


def measured(case: MemoryCase) -> dict[str, Any]:
    """Return the measured memory of a case with any loss, for another process."""
    return measured_case(case)


register_loss("distil", distillation)
