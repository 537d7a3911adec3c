"""Makes the call that a case measures: at the operator, in its layer, in the whole model.

Letters: B batch, H heads, Hkv key heads, T tokens, D key size, E value size, M hidden size.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoConfig, DynamicCache, PreTrainedModel

from attnzoo.bench import Run
from attnzoo.compare.cases import Case, Subject
from attnzoo.demo.measure import cache_bytes
from attnzoo.errors import UnsupportedError
from attnzoo.integrations.attention import NAME, layer_backend
from attnzoo.integrations.files import model_class
from attnzoo.integrations.layers import attention_layers
from attnzoo.masks import AttentionMask
from attnzoo.registry import build_backend
from attnzoo.spec import AttentionSpec

PIECE = 1024  # tokens that a state is filled with at a time


class Prepared(NamedTuple):
    """A call to measure, and the bytes that decoding keeps between calls."""

    run: Run
    kept_bytes: int | None = None


def prepare(case: Case, subject: Subject) -> Prepared:
    """Make what a case measures.

    Raises:
        AttnzooError: The backend refuses the layer or the call.
    """
    torch.manual_seed(0)
    if case.level == "op":
        return _op_step(case, subject) if case.mode == "decode" else _op(case, subject)
    if subject.longest is not None and subject.longest < case.T:
        raise UnsupportedError(
            f"the model has {subject.longest} positions, and {case.T} are asked for; "
            "attnzoo.extend_positions makes more"
        )
    model = load(subject, case)
    make = _layer if case.level == "layer" else _model
    return make(case, subject, model)


# -- the operator --------------------------------------------------------------------------------


def _backend(case: Case, subject: Subject) -> Any:
    """Build the backend of the layer that the geometry is of."""
    entry = AttentionSpec.from_dict(case.spec).for_layer(subject.geometry.layer)
    longest = max(case.T, subject.geometry.max_length or 0)
    geometry = replace(subject.geometry, max_length=longest)
    backend = build_backend(entry.backend, dict(entry.options), geometry)
    return backend.to(case.device, getattr(torch, case.dtype)).train(case.mode == "train")


def _inputs(case: Case, subject: Subject, length: int, backend: Any) -> dict[str, Tensor]:
    """Draw queries, keys, values, and hidden states where gates are made from them."""
    geometry = subject.geometry
    assert geometry.value_dim is not None
    made = {"dtype": getattr(torch, case.dtype), "device": case.device}
    heads = (geometry.num_heads, geometry.num_key_heads, geometry.num_key_heads)
    sizes = (geometry.head_dim, geometry.head_dim, geometry.value_dim)
    inputs = {
        name: torch.randn(case.B, number, length, size, **made)
        for name, number, size in zip("qkv", heads, sizes, strict=True)
    }
    if backend.needs_hidden_states:
        inputs["hidden_states"] = torch.randn(case.B, length, geometry.hidden_size or 1, **made)
    return inputs


def _op(case: Case, subject: Subject) -> Prepared:
    """Prepare a pass over T tokens, or one and its gradients."""
    backend = _backend(case, subject)
    inputs = _inputs(case, subject, case.T, backend)
    if case.mode == "forward":
        return Prepared(torch.no_grad()(lambda: backend(**inputs).out))
    wanted = [*(x.requires_grad_() for x in inputs.values()), *backend.parameters()]

    def train() -> Any:
        out = backend(**inputs).out
        return out, torch.autograd.grad(out, wanted, torch.ones_like(out), allow_unused=True)

    return Prepared(train)


@torch.no_grad()
def _op_step(case: Case, subject: Subject) -> Prepared:
    """Prepare one token after T: over all keys, or from a state that T tokens left."""
    backend = _backend(case, subject)
    now = _inputs(case, subject, 1, backend)
    if backend.keeps_all_keys:
        before = _inputs(case, subject, case.T, backend)
        k, v = (torch.cat([before[name], now[name]], 2) for name in "kv")
        kept = before["k"].nbytes + before["v"].nbytes
        mask = AttentionMask(causal=True, q_offset=case.T)
        inputs = now | {"k": k, "v": v}
        return Prepared(torch.no_grad()(lambda: backend(**inputs, mask=mask).out), kept)
    state = None
    for length in [PIECE] * (case.T // PIECE) + [case.T % PIECE] * (case.T % PIECE > 0):
        piece = _inputs(case, subject, length, backend)
        state = backend(**piece, state=state, return_state=True).state
    assert state is not None
    kept = sum(int(x.nbytes) for x in state if isinstance(x, Tensor))
    step = torch.no_grad()(lambda: backend(**now, state=state, return_state=True).out)
    return Prepared(step, kept)


# -- the model and its layers --------------------------------------------------------------------


def load(subject: Subject, case: Case) -> PreTrainedModel:
    """Load the model with its attention swapped by config."""
    path = Path(subject.path)
    config = AutoConfig.from_pretrained(path)
    config.attnzoo = case.spec
    for name in ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob"):
        if getattr(config, name, None):
            setattr(config, name, 0.0)  # a time is measured, and most backends refuse it
    model: PreTrainedModel = model_class(config, path).from_pretrained(
        path, config=config, attn_implementation=NAME, dtype=getattr(torch, case.dtype)
    )
    model.to(torch.device(case.device))  # type: ignore[arg-type]
    model.train(case.mode == "train")
    return model


def _arguments(model: PreTrainedModel, case: Case, subject: Subject, length: int) -> dict[str, Any]:
    """Draw tokens, and say what is not to be computed."""
    vocabulary = int(model.config.get_text_config().vocab_size)
    given: dict[str, Any] = {
        "input_ids": torch.randint(vocabulary, (case.B, length), device=case.device)
    }
    known = inspect.signature(type(model).forward).parameters
    if subject.causal and "use_cache" in known:
        given["use_cache"] = case.mode == "decode"
    if case.mode != "train" and "logits_to_keep" in known:
        given["logits_to_keep"] = 1
    return given


def _model(case: Case, subject: Subject, model: PreTrainedModel) -> Prepared:
    """Prepare a pass, a step of training without the optimizer, or a step of decoding."""
    if case.mode == "decode":
        cache = filled_cache(model, case, subject)
        given = _arguments(model, case, subject, 1) | {"past_key_values": cache}
        return Prepared(torch.no_grad()(lambda: model(**given)), cache_bytes(cache))
    given = _arguments(model, case, subject, case.T)
    if case.mode == "forward":
        return Prepared(torch.no_grad()(lambda: model(**given)))
    if "labels" in inspect.signature(type(model).forward).parameters and subject.causal:
        given["labels"] = given["input_ids"]

    def train() -> None:
        model.zero_grad(set_to_none=True)
        out = model(**given)
        (out.loss if "labels" in given else out[0].float().mean()).backward()

    return Prepared(train)


class _Reached(Exception):
    """What the layer was called with."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.call = args, kwargs


def _layer(case: Case, subject: Subject, model: PreTrainedModel) -> Prepared:
    """Prepare the first attention module alone, with what the model gives it."""
    module = attention_layers(model)[0].module
    kept, cache = None, None
    given = _arguments(model, case, subject, 1 if case.mode == "decode" else case.T)
    if case.mode == "decode":
        cache = filled_cache(model, case, subject)
        given["past_key_values"] = cache
        kept = cache_bytes(cache) // len(attention_layers(model))
    args, kwargs = _reached(model, module, given)
    if cache is not None:
        return Prepared(_repeatable(lambda: module(*args, **kwargs), cache), kept)
    if case.mode != "train":
        return Prepared(torch.no_grad()(lambda: module(*args, **kwargs)), kept)
    name = next((n for n in ("hidden_states", "x") if n in kwargs), None)
    hidden = (kwargs[name] if name else args[0]).detach().requires_grad_()
    rest, named = (args, kwargs | {name: hidden}) if name else ((hidden, *args[1:]), kwargs)
    wanted = [hidden, *(p for p in module.parameters() if p.requires_grad)]

    def train() -> Any:
        out = module(*rest, **named)[0]
        return out, torch.autograd.grad(out, wanted, torch.ones_like(out), allow_unused=True)

    return Prepared(train)


def _repeatable(step: Run, cache: Any) -> Run:
    """Have every step see the same tokens: its mask is of so many keys, and no more."""
    before = [dict(vars(layer)) for layer in cache.layers]

    @torch.no_grad()
    def run() -> None:
        step()
        for layer, known in zip(cache.layers, before, strict=True):
            vars(layer).update(known)

    return run


@torch.no_grad()
def _reached(model: PreTrainedModel, module: nn.Module, given: dict[str, Any]) -> Any:
    """Run the model as far as ``module`` and return the arguments of that call."""

    def stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise _Reached(args, kwargs)

    handle = module.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        model(**given)
    except _Reached as reached:
        return reached.call
    finally:
        handle.remove()
    raise UnsupportedError(
        f"{type(model).__name__} did not call {type(module).__name__} when it was run on tokens; "
        "measure --level op or model"
    )


@torch.no_grad()
def filled_cache(model: PreTrainedModel, case: Case, subject: Subject) -> DynamicCache:
    """Return a cache after T tokens: keys are drawn where all are kept, a state is gone through."""
    cache = DynamicCache(config=model.config)
    layers = attention_layers(model)
    if all(layer_backend(layer.module).keeps_all_keys for layer in layers):
        for layer in layers:
            geometry = layer.geometry
            k, v = (
                torch.randn(case.B, geometry.num_key_heads, case.T, size)
                for size in (geometry.head_dim, geometry.value_dim or geometry.head_dim)
            )
            like = {"device": case.device, "dtype": getattr(torch, case.dtype)}
            cache.update(k.to(**like), v.to(**like), geometry.layer)
        return cache
    for length in [PIECE] * (case.T // PIECE) + [case.T % PIECE] * (case.T % PIECE > 0):
        given = _arguments(model, case, subject, length)
        model(**given, past_key_values=cache)
    return cache
