r"""Distillation of a model with softmax attention into the swapped model.

.. math:: \ell = \frac{1}{T} \sum_t \mathrm{KL}\big(p^*(\cdot \mid x_{\le t}) \,\big\|\,
          p(\cdot \mid x_{\le t})\big)

The hidden states of every layer can be distilled too, by their relative squared error per token,
which gives every layer a training signal beyond the predictions:

.. math:: \frac{1}{L T} \sum_{l,t} \frac{|h_{lt} - h^*_{lt}|^2}{|h^*_{lt}|^2}

An encoder, which predicts no tokens, is distilled to the last hidden states of the teacher.
Sources: Hinton et al., 2015, arXiv:1503.02531 (predictions); Romero et al., 2015, arXiv:1412.6550,
and Jiao et al., 2020, arXiv:1909.10351 (hidden states). Other letters: V vocabulary, L layers.

Logits of many tokens are computed in chunks, forward and again backward, so that memory holds those
of one chunk.

If the model's own weights are frozen, the teacher is the same model with softmax attention and
without adapters, so memory holds no second copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from attnzoo.contract.context_parallel import SequenceShard
from attnzoo.errors import ConfigError
from attnzoo.evaluation.rows import IGNORE_INDEX
from attnzoo.hf.attention.call import layer_backend
from attnzoo.hf.logits import (
    HeadInputs,
    chunk_reason,
    head_inputs,
    loss_in_forward,
    tokens_per_chunk,
)
from attnzoo.hf.names import NAME
from attnzoo.hf.swap import original_attention, restore
from attnzoo.registry import build_backend
from attnzoo.training.transfer import evaluation_mode, swapped_layers

LOSS_INPUTS = ("labels", "shift_labels", "num_items_in_batch")
Outputs = Callable[[Any, Mapping[str, Tensor]], Any]  # of a model and a batch
Loss = Callable[[nn.Module, Mapping[str, Tensor]], Tensor]  # of a model and a batch
Teacher = Outputs  # Predictions, or of an encoder its last hidden states, [B, T, M]


class Predictions(NamedTuple):
    """Logits of a decoder, ``[B, T, V]``, and the output of each layer if requested."""

    logits: Tensor
    layers: tuple[Tensor, ...] = ()  # [B, T, M] each


def model_inputs(batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the arguments of a model's ``forward`` for a batch; decoders' batches have labels."""
    inputs: dict[str, Any] = {name: x for name, x in batch.items() if name not in LOSS_INPUTS}
    return {**inputs, "use_cache": False} if "labels" in batch else inputs


def predictions(
    model: Any,
    batch: Mapping[str, Tensor],
    *,
    with_layers: bool = False,
    chunk: int | None = None,
) -> Predictions | HeadInputs:
    """Return the logits of a decoder, and with ``with_layers`` the outputs of its layers.

    Of more than ``chunk`` tokens, it returns what the logits are computed from in their place.
    """
    if _in_chunks(batch, chunk):
        return head_inputs(model, with_layers=with_layers, **model_inputs(batch))
    if not with_layers:
        return Predictions(model(**model_inputs(batch)).logits)
    output = model(**model_inputs(batch), output_hidden_states=True)
    return Predictions(output.logits, tuple(output.hidden_states[1:]))  # 0 is the embedding


def _in_chunks(batch: Mapping[str, Tensor], chunk: int | None) -> bool:
    return chunk is not None and batch["input_ids"].numel() > chunk


def chunk_of(
    model: nn.Module, tokens: int, accelerator: Accelerator, log: Callable[[str], None]
) -> int | None:
    """Return the tokens whose logits are computed at once; ``None`` for all of a micro-batch.

    Args:
        model: A decoder before Accelerate prepares it.
        tokens: Most tokens of a micro-batch.
        accelerator: Accelerate's, which will prepare it.
        log: Called with a message if chunks would save memory, but the model does not allow them.
    """
    chunk = tokens_per_chunk(model)
    if tokens <= chunk:
        return None
    fsdp = accelerator.distributed_type == DistributedType.FSDP
    # A backward pass that computes logits again ends in a segmentation fault under FSDP2
    if reason := "FSDP shards the head" if fsdp else chunk_reason(model):
        log(f"the logits of all tokens are held in memory: {reason}")
        return None
    return chunk


def hidden_states(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the hidden states after an encoder's last layer, ``[B, T, M]``."""
    states: tuple[Tensor, ...] = model(
        **model_inputs(batch), output_hidden_states=True
    ).hidden_states
    return states[-1]


@contextmanager
def flash_attention(model: nn.Module, shard: SequenceShard | None) -> Iterator[None]:
    """Context in which a swapped model runs softmax attention under context parallelism."""
    layers = [(m, backend) for m in model.modules() if (backend := layer_backend(m)) is not None]
    try:
        for module, backend in layers:
            flash = build_backend("flash", {}, backend.geometry)
            flash.shard = shard
            setattr(module, NAME, flash)
        yield
    finally:
        for module, backend in layers:
            setattr(module, NAME, backend)


def softmax_teacher(
    model: nn.Module,
    *,
    weights_change: bool,
    outputs: Outputs = predictions,
    context_parallel: bool = False,
) -> Teacher:
    """Return a function that computes a swapped model's outputs with softmax attention.

    Args:
        model: The model, possibly a PEFT model, before Accelerate prepares it. A model that is not
            swapped teaches with its current attention.
        weights_change: Whether the model's own weights are trained; the teacher is then a copy.
        outputs: Which outputs to return.
        context_parallel: Whether rows are split over processes. Softmax is then flash, because the
            model's own attention does not support that.
    """
    swapped, own = bool(swapped_layers(model)), model
    if weights_change:
        copies = {id(x): nn.Parameter(x.detach().clone(), False) for x in model.parameters()}
        own = deepcopy(model, copies)
        if swapped and not context_parallel:
            restore(own)

    @torch.no_grad()
    def teach(student: nn.Module, batch: Mapping[str, Tensor]) -> Any:
        softmax: AbstractContextManager[Any] = nullcontext()
        if context_parallel:
            shard = next(iter(swapped_layers(model).values())).shard
            softmax = flash_attention(own, shard)
        elif swapped and own is model:
            softmax = original_attention(model)
        if own is not model:
            own.to(batch["input_ids"].device)
        without_adapters: Any = getattr(own, "disable_adapter", nullcontext)
        with softmax, without_adapters(), evaluation_mode(own):  # without dropout
            return outputs(own, batch)

    return teach


def other_teacher(original: Any, outputs: Outputs = predictions) -> Teacher:
    """Return a function that computes the outputs of another model, in evaluation mode."""

    @torch.no_grad()
    def teach(student: nn.Module, batch: Mapping[str, Tensor]) -> Any:
        if original.device != batch["input_ids"].device:
            original.to(batch["input_ids"].device)
        return outputs(original, batch)

    return teach


def divergence(
    student: Tensor, teacher: Tensor, mask: Tensor, *, count: Tensor | None = None
) -> Tensor:
    """Return the mean KL divergence KL(teacher || student) over tokens, in nats, a scalar.

    Args:
        student: Logits, ``[..., V]``.
        teacher: Logits, the same shape.
        mask: ``[...]``, true or 1 for the predictions in the mean.
        count: Divisor of the sum; the sum of ``mask`` when ``None``.
    """
    kl = token_divergence(student, teacher)
    return (kl * mask).sum() / (mask.sum().clamp(min=1) if count is None else count)


def token_divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """Return KL(teacher || student) of each prediction in nats, ``[...]``, of logits."""
    student, teacher = (x.float().log_softmax(-1) for x in (student, teacher))
    return F.kl_div(student, teacher, reduction="none", log_target=True).sum(-1)


def hidden_states_error(
    student: Sequence[Tensor], teacher: Sequence[Tensor], mask: Tensor, *, count: Tensor
) -> Tensor:
    """Return the relative squared error of hidden states, a mean over layers and tokens, a scalar.

    Args:
        student: The output of each layer, ``[B, T, M]``.
        teacher: The same.
        mask: ``[B, T]``, true or 1 for the tokens in the mean.
        count: Number of tokens by which the sum is divided.
    """
    total = mask.new_zeros((), dtype=torch.float32)
    for x, exact in zip(student, teacher, strict=True):
        error = (x.float() - exact.float()).square().sum(-1)
        norm = exact.float().square().sum(-1).clamp(min=torch.finfo(torch.float32).tiny)
        total = total + (error / norm * mask).sum()
    return total / (len(student) * count)


def distil_loss(
    teacher: Teacher | None,
    *,
    cross_entropy: float = 0.0,
    hidden_states: float = 0.0,
    chunk: int | None = None,
) -> Loss:
    """Return the loss ``(1 - c) * KL + c * cross-entropy + w * error of hidden states``.

    Args:
        teacher: Returns the target :class:`Predictions`; ``None`` with ``cross_entropy=1``.
        cross_entropy: c, the weight of the cross-entropy of the text's next token, from 0 to 1.
        hidden_states: w, the weight of :func:`hidden_states_error`; not without a teacher, which
            then returns the outputs of its layers.
        chunk: Tokens whose logits are computed at once, in the backward pass again; ``None`` for
            all. The teacher has the same ``chunk``.

    Raises:
        ConfigError: A weight or ``chunk`` is invalid, or the teacher or a batch does not suit them.
    """
    _check_weights(teacher, cross_entropy, hidden_states, chunk)
    token_loss = partial(_token_loss, cross_entropy=cross_entropy)
    with_layers = hidden_states > 0

    def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        labels = batch.get("shift_labels")
        if labels is None and "labels" not in batch:
            raise ConfigError("The batch has no labels: give input_ids as labels, -100 for none")
        if labels is None:  # the last token has no label
            labels = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORE_INDEX)
        mask = labels != IGNORE_INDEX
        count = batch.get("num_items_in_batch", mask.sum().clamp(min=1))
        target: Any = None if teacher is None else teacher(model, batch)
        if target is not None and isinstance(target, HeadInputs) != _in_chunks(batch, chunk):
            raise ConfigError("The teacher has another chunk than the loss; give both the same one")
        if with_layers and not target.layers:
            raise ConfigError(
                "hidden_states compares layers, which the teacher does not return; give it "
                "outputs=partial(predictions, with_layers=True)"
            )

        def with_error(total: Tensor, layers: Sequence[Tensor]) -> Tensor:
            if not with_layers:
                return total / count
            errors = hidden_states_error(layers, target.layers, mask, count=count)
            return total / count + hidden_states * errors

        if not _in_chunks(batch, chunk):
            output: Any = predictions(model, batch, with_layers=with_layers)
            logits = None if target is None else target.logits
            return with_error(token_loss(output.logits, logits, labels), output.layers)
        assert chunk is not None
        exact: list[Tensor] = []

        def compute(states: HeadInputs) -> Tensor:
            total = with_error(
                _sum_chunks(token_loss, states, target, labels, chunk), states.layers
            )
            exact.append(total.detach())
            return total

        with loss_in_forward(model, compute, with_layers=with_layers):
            total: Tensor = model(**model_inputs(batch)).float()
        return total + (exact[-1] - total).detach()  # FSDP rounds the output of a model

    return loss


def _check_weights(
    teacher: Teacher | None, cross_entropy: float, hidden_states: float, chunk: int | None
) -> None:
    """Raise ``ConfigError`` for arguments of :func:`distil_loss` that have no meaning."""
    if not (0 <= cross_entropy <= 1 and 0 <= hidden_states < math.inf):
        raise ConfigError(
            "cross_entropy must be from 0 to 1, and hidden_states at least 0 and finite; got "
            f"{cross_entropy} and {hidden_states}"
        )
    if teacher is None and (cross_entropy != 1 or hidden_states):
        raise ConfigError("Without a teacher, give cross_entropy=1 and no hidden_states")
    if chunk is not None and chunk < 1:
        raise ConfigError(f"chunk must be at least 1, got {chunk}")


def _token_loss(
    logits: Tensor, target: Tensor | None, labels: Tensor, *, cross_entropy: float
) -> Tensor:
    """Return the sum over tokens of the part of the loss that depends on logits, a scalar."""
    total = logits.new_zeros((), dtype=torch.float32)
    if target is not None and cross_entropy < 1:
        one = torch.ones((), device=logits.device)
        kl = divergence(logits, target, labels != IGNORE_INDEX, count=one)
        total = (1 - cross_entropy) * kl
    if cross_entropy > 0:
        losses = F.cross_entropy(
            logits.float().flatten(0, -2),
            labels.flatten(),
            ignore_index=IGNORE_INDEX,
            reduction="sum",
        )
        total = total + cross_entropy * losses
    return total


def _sum_chunks(
    token_loss: Callable[..., Tensor],
    states: HeadInputs,
    target: HeadInputs | None,
    labels: Tensor,
    chunk: int,
) -> Tensor:
    """Return the sum of a loss over chunks of tokens, whose logits are not kept."""

    def part_loss(hidden: Tensor, exact: Tensor | None, labels: Tensor) -> Tensor:
        logits = None
        if target is not None and exact is not None:
            with torch.no_grad():
                logits = target.head(exact)
        return token_loss(states.head(hidden), logits, labels)

    hidden = states.hidden.flatten(0, 1).split(chunk)
    exact = [None] * len(hidden) if target is None else target.hidden.flatten(0, 1).split(chunk)
    total = labels.new_zeros((), dtype=torch.float32)
    for part in zip(hidden, exact, labels.flatten().split(chunk), strict=True):
        total = total + checkpoint(part_loss, *part, use_reentrant=False, preserve_rng_state=False)
    return total


def hidden_loss(teacher: Teacher) -> Loss:
    """Return the relative squared error of an encoder's last hidden states as a loss.

    Args:
        teacher: Returns the target hidden states.
    """

    def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        exact = teacher(model, batch).float()
        mask = batch["attention_mask"].unsqueeze(-1)
        error = (hidden_states(model, batch).float() - exact).square() * mask
        total: Tensor = error.sum() / (exact.square() * mask).sum()
        return total

    return loss
