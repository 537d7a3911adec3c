r"""Distillation: the swapped model learns to predict what the model predicts with softmax.

.. math:: \ell = \frac{1}{T} \sum_t \mathrm{KL}\big(p^*(\cdot \mid x_{\le t}) \,\big\|\,
          p(\cdot \mid x_{\le t})\big)

An encoder predicts nothing: it learns the last hidden states that it has with softmax.

Where the model's own weights stay as they are, or only adapters beside them learn, the teacher is
the same model with its own attention, adapters off: no second copy is held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnzoo.integrations.attention import NAME, layer_backend
from attnzoo.integrations.convert import own_attention, restore
from attnzoo.ops.context_parallel import Shard
from attnzoo.registry import build_backend
from attnzoo.training.data import IGNORED
from attnzoo.training.loop import Loss
from attnzoo.training.transfer import swapped_layers

OF_LOSS = ("labels", "shift_labels", "num_items_in_batch")
Read = Callable[[Any, Mapping[str, Tensor]], Tensor]  # of a model on a batch
Teacher = Read  # logits, [B, T, V], or hidden states, [B, T, M]


def model_inputs(batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return what a model's forward is given of a batch; only rows of decoders have labels."""
    inputs: dict[str, Any] = {name: x for name, x in batch.items() if name not in OF_LOSS}
    return {**inputs, "use_cache": False} if "labels" in batch else inputs


def read_logits(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Return what a model predicts, ``[B, T, V]``."""
    logits: Tensor = model(**model_inputs(batch)).logits
    return logits


def read_hidden(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Return what comes out of an encoder's last layer, whatever its head, ``[B, T, M]``."""
    states: tuple[Tensor, ...] = model(
        **model_inputs(batch), output_hidden_states=True
    ).hidden_states
    return states[-1]


@contextmanager
def exact_attention(model: nn.Module, shard: Shard | None) -> Iterator[None]:
    """Let a swapped model run softmax attention on a share of rows for a while."""
    held = [(m, backend) for m in model.modules() if (backend := layer_backend(m)) is not None]
    try:
        for module, backend in held:
            flash = build_backend("flash", {}, backend.geometry)
            flash.shard = shard
            setattr(module, NAME, flash)
        yield
    finally:
        for module, backend in held:
            setattr(module, NAME, backend)


def own_teacher(
    model: nn.Module, *, weights_change: bool, read: Read = read_logits, shared: bool = False
) -> Teacher:
    """Return what gives softmax's logits, or hidden states, for a swapped model.

    Args:
        model: As it is trained, not yet wrapped for several processes; PEFT may be around it. One
            that is not swapped teaches as it is now.
        weights_change: Whether its own weights are trained: then a copy of them is made.
        read: What of it is given.
        shared: Whether processes share rows. The model's own attention knows nothing of that.
    """
    swapped = bool(swapped_layers(model))
    frozen: Any = None
    if weights_change:
        frozen = deepcopy(model).requires_grad_(False).eval()
        if swapped and not shared:
            restore(frozen)

    @torch.no_grad()
    def teach(student: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        exact: AbstractContextManager[Any] = nullcontext()
        if shared:
            shard = next(iter(swapped_layers(model).values())).shard
            exact = exact_attention(model if frozen is None else frozen, shard)
        elif swapped and frozen is None:
            exact = own_attention(model)
        if frozen is not None:
            with exact:
                return read(frozen.to(batch["input_ids"].device), batch)
        without: Any = getattr(model, "disable_adapter", nullcontext)
        with exact, without():
            return read(model, batch)

    return teach


def divergence(
    student: Tensor,
    teacher: Tensor,
    real: Tensor,
    top_k: int | None = None,
    *,
    count: Tensor | None = None,
) -> Tensor:
    """Return the mean KL of the student's prediction from the teacher's, in nats, a scalar.

    Args:
        student: Logits, ``[B, T, V]``.
        teacher: Logits, ``[B, T, V]``.
        real: ``[B, T]``, which predictions count.
        top_k: How many of the teacher's likeliest tokens count one by one; all others count as
            one outcome, so the result is still a divergence, and at most the full one.
        count: What the sum is divided by; the number of predictions that count without.
    """
    student, teacher = (x.float().log_softmax(-1) for x in (student, teacher))
    if top_k is not None and top_k < student.shape[-1]:
        teacher, places = teacher.topk(top_k, -1)
        student, teacher = (_with_rest(x) for x in (student.gather(-1, places), teacher))
    each = F.kl_div(student, teacher, reduction="none", log_target=True).sum(-1)
    return (each * real).sum() / (real.sum().clamp(min=1) if count is None else count)


def _with_rest(logs: Tensor) -> Tensor:
    """Append the logarithm of what some outcomes' probabilities leave of 1."""
    rest = (1 - logs.exp().sum(-1, keepdim=True)).clamp(min=torch.finfo(logs.dtype).eps)
    return torch.cat([logs, rest.log()], -1)


def distil_loss(
    teacher: Teacher | None, *, cross_entropy: float = 0.0, top_k: int | None = None
) -> Loss:
    """Return a loss: the divergence from a teacher, or cross-entropy, or a mix of both.

    Args:
        teacher: Gives the logits to come to; ``None`` with ``cross_entropy=1``.
        cross_entropy: Share of the text's own next token in the loss, from 0 to 1.
        top_k: As in :func:`divergence`.
    """

    def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        labels = batch.get("shift_labels")
        if labels is None:  # the last token predicts what is not there
            labels = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
        real = labels != IGNORED
        count = batch.get("num_items_in_batch", real.sum().clamp(min=1))
        target = None if teacher is None else teacher(model, batch)
        logits = read_logits(model, batch)
        total = logits.new_zeros((), dtype=torch.float32)
        if target is not None and cross_entropy < 1:
            total = (1 - cross_entropy) * divergence(logits, target, real, top_k, count=count)
        if cross_entropy > 0:
            rows = logits.float().flatten(0, 1), labels.flatten()
            each = F.cross_entropy(*rows, ignore_index=IGNORED, reduction="sum")
            total = total + cross_entropy * each / count
        return total

    return loss


def hidden_loss(teacher: Teacher) -> Loss:
    """Return a loss: the relative squared error of an encoder's last hidden states.

    Args:
        teacher: Gives the hidden states to come to.
    """

    def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        exact = teacher(model, batch).float()
        real = batch["attention_mask"].unsqueeze(-1)
        difference = (read_hidden(model, batch).float() - exact).square() * real
        return difference.sum() / (exact.square() * real).sum()

    return loss
