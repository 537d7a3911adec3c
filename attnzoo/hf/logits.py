"""Logits of a causal model in chunks of tokens, so that those of all tokens never exist at once.

A model's ``forward`` runs its base model and then the head, which may scale or cap the logits. Here
the base model runs once, and the head of that ``forward`` on some hidden states at a time: a
stand-in for the base model returns them. Everything happens inside of the call of the model, where
FSDP and DeepSpeed have its weights. Letters: N tokens of all rows, M hidden size, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import MoeModelOutputWithPast

from attnzoo.errors import UnsupportedError
from attnzoo.hf.layers import unwrap_model
from attnzoo.hf.seam import base_model_name

Head = Callable[[Tensor], Tensor]  # logits [N, V] of hidden states [N, M]
CHUNK_LOGITS = 2**25  # logits of one chunk, 128 MiB in float32


class _BaseOutput(MoeModelOutputWithPast):
    """Output of a base model; what it lacks is ``None``, as in classes that have more fields."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


class HeadInputs(NamedTuple):
    """What a model computed up to its head.

    Attributes:
        hidden: Hidden states, ``[B, T, M]``.
        layers: The output of each layer if requested, ``[B, T, M]`` each.
        head: Returns logits; callable inside of a call of the model.
    """

    hidden: Tensor
    layers: tuple[Tensor, ...]
    head: Head


def tokens_per_chunk(model: nn.Module) -> int:
    """Return the number of tokens whose logits are computed at once, at least 64."""
    inner: Any = unwrap_model(model)
    return max(64, CHUNK_LOGITS // int(inner.config.get_text_config().vocab_size))


@torch.no_grad()
def chunk_reason(model: nn.Module) -> str:
    """Return why a model's logits cannot be computed in chunks, or ``""``; runs two tokens."""
    inner: Any = unwrap_model(model)
    name = type(inner).__name__
    if "logits_to_keep" not in inspect.signature(type(inner).forward).parameters:
        return f"{name} computes the logits of all tokens"
    modes = {module: module.training for module in inner.modules()}
    inner.eval()
    try:
        ids = torch.zeros(1, 2, dtype=torch.long, device=inner.device)
        exact = inner(input_ids=ids, use_cache=False).logits[0]
        states = head_inputs(inner, input_ids=ids, use_cache=False)
        found = states.head(states.hidden[0])
    except UnsupportedError as error:
        return str(error)
    except (AttributeError, TypeError) as error:  # its forward asks more of the base model
        return f"the head of {name} does not run apart from its base model ({error})"
    finally:
        for module, training in modes.items():
            module.training = training
    same = found.shape == exact.shape and torch.allclose(found, exact, rtol=1e-3, atol=1e-3)
    return "" if same else f"the head of {name} depends on more than the hidden states"


def head_inputs(model: nn.Module, *, with_layers: bool = False, **inputs: Any) -> HeadInputs:
    """Run a causal model up to its head."""
    inner: Any = unwrap_model(model)
    return _head_inputs(inner, inner.forward, model, with_layers, inputs)


def _head_inputs(
    inner: Any, forward: Any, call: Callable[..., Any], with_layers: bool, inputs: dict[str, Any]
) -> HeadInputs:
    """Call a model, or its ``forward``, for one token's logits; return what precedes its head."""
    found: list[Tensor] = []
    if with_layers:
        inputs = {**inputs, "output_hidden_states": True}
    base: nn.Module = getattr(inner, base_model_name(inner))
    hook = base.register_forward_hook(lambda module, args, output: found.append(output[0]))
    try:
        output = call(**inputs, logits_to_keep=1)
    finally:
        hook.remove()
    if len(found) != 1:
        raise UnsupportedError(f"{type(inner).__name__} does not call its base model once")
    layers = tuple(output.hidden_states[1:]) if with_layers else ()  # 0 is the embedding
    return HeadInputs(found[0], layers, lambda hidden: _head_logits(inner, forward, hidden))


def _head_logits(inner: Any, forward: Any, hidden: Tensor) -> Tensor:
    """Return the logits ``[N, V]`` of hidden states ``[N, M]``."""
    name = base_model_name(inner)
    output = _BaseOutput(last_hidden_state=hidden[None])
    vars(inner)[name] = lambda *args, **kwargs: output  # found before the registered module
    try:
        logits: Tensor = forward(input_ids=None, use_cache=False).logits[0]
    finally:
        del vars(inner)[name]
    return logits


@contextmanager
def loss_in_forward(
    model: nn.Module, loss: Callable[[HeadInputs], Tensor], *, with_layers: bool = False
) -> Iterator[None]:
    """Context in which calls of a causal model return a loss in place of their output."""
    inner: Any = unwrap_model(model)
    own, forward = vars(inner).get("forward"), inner.forward

    def forward_with_loss(**inputs: Any) -> Tensor:
        return loss(_head_inputs(inner, forward, forward, with_layers, inputs))

    vars(inner)["forward"] = forward_with_loss
    try:
        yield
    finally:
        vars(inner).pop("forward")
        if own is not None:
            vars(inner)["forward"] = own
