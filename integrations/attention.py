"""The attention function that transformers calls, and the hook that completes what it is given.

The interface hands over queries, keys, values and a mask. What else a backend may need, the hidden
states and the layer's entry in the cache, a forward pre-hook on the attention module takes from the
arguments of that module.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from attnzoo.backends.base import AttentionBackend
from attnzoo.errors import UnsupportedError
from attnzoo.integrations import compat
from attnzoo.integrations.cache import StateLayer, Step, state_layer
from attnzoo.integrations.context_parallel import refuse_torchs
from attnzoo.integrations.layers import is_causal as layer_is_causal
from attnzoo.integrations.layers import position_bias_is_zero
from attnzoo.integrations.masks import (
    given_mask,
    refuse_other_keys,
    with_boundaries,
    with_selection,
)
from attnzoo.masks import AttentionMask
from attnzoo.state import AttentionOutput

NAME = "attnzoo"  # of the implementation, of the config's field, and of the submodule in each layer

# Arguments that attention layers pass on and that change nothing of what is computed here.
HARMLESS = frozenset(
    {
        "cache_position",
        "deterministic",
        "layer_idx",
        "logits_to_keep",
        "max_length_k",
        "max_length_q",
        "max_seqlen",
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "shift_labels",
        "use_cache",
    }
)


class Call(NamedTuple):
    """What the hook saw of the attention module's own arguments."""

    hidden_states: Tensor | None
    layer: StateLayer | None
    cross_attention: bool


NO_CALL = Call(None, None, False)
TAKEN = Call(None, None, True)  # the state has been given to a call of the attention already


class LayerHook:
    """A forward pre-hook that reads an attention module's arguments, by position or by keyword."""

    HIDDEN = ("hidden_states", "x", "hidden_state", "k")
    CACHE = ("past_key_values", "past_key_value", "layer_past")
    OTHER = ("key_value_states", "encoder_hidden_states")

    def __init__(self, module: nn.Module) -> None:
        parameters = inspect.signature(inspect.unwrap(type(module).forward)).parameters
        self.positions = {name: i - 1 for i, name in enumerate(parameters)}

    def get(self, names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the first of ``names`` that was given and is not ``None``."""
        for name in names:
            value = kwargs.get(name)
            if value is None and name in self.positions and self.positions[name] < len(args):
                value = args[self.positions[name]]
            if value is not None:
                return value
        return None

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep for the attention function what it is not given, and put our entry in the cache."""
        if module.config._attn_implementation != NAME:
            return  # set_attn_implementation was called: the layer runs its own attention
        backend = module.attnzoo
        cross = self.get(self.OTHER, args, kwargs) is not None
        hidden = self.get(self.HIDDEN, args, kwargs) if backend.needs_hidden_states else None
        layer = None
        if not backend.keeps_all_keys and not cross:
            cache = self.get(self.CACHE, args, kwargs)
            if cache is not None:
                layer = state_layer(cache, cache_index(module, backend), backend)
        module._attnzoo_call = Call(hidden, layer, cross)


def add_hook(module: nn.Module) -> RemovableHandle:
    """Register the pre-hook on an attention module; returns the handle that removes it."""
    return module.register_forward_pre_hook(LayerHook(module), with_kwargs=True)


def layer_backend(module: nn.Module) -> Any:
    """Return the backend in an attention module, also where PEFT has wrapped it, or ``None``."""
    held = getattr(module, NAME, None)
    if isinstance(held, AttentionBackend) or hasattr(held, "attend"):
        return held
    return None


def cache_index(module: nn.Module, backend: AttentionBackend) -> int:
    """Return the layer's place in the cache."""
    index = getattr(module, "layer_idx", None)
    return index if isinstance(index, int) else backend.geometry.layer


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    indices: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Run a layer's backend; registered with transformers' ``AttentionInterface``.

    Returns:
        The output ``[B, T, H, E]``, and the effective attention matrix ``[B, H, T, S]`` if it was
        asked for.

    Raises:
        UnsupportedError: The layer has no backend, or something is given that it cannot honour.
    """
    backend = _backend_for(module, kwargs)
    call = _take_call(module, backend)
    causal = is_causal if is_causal is not None else layer_is_causal(module, None)
    mask, bias = given_mask(
        attention_mask,
        causal=causal and not call.cross_attention,
        window=sliding_window,
        q_length=query.shape[2],
        kv_length=key.shape[2],
    )
    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        sizes = query.shape[0], query.shape[2], key.shape[2]
        shared = backend.shard is not None
        mask = with_boundaries(mask, cu_seq_lens_q, cu_seq_lens_k, sizes, shared=shared)
    if indices is not None:
        mask = with_selection(mask, indices, key.shape[2])
    bias = _whole_bias(module, bias, position_bias, call)
    options = {
        "scale": scaling,
        "hidden_states": call.hidden_states,
        "bias": bias,
        "softcap": softcap,
        "sinks": s_aux if sinks is None else sinks,
        "dropout": dropout,
        "return_weights": compat.wants_weights(kwargs),
        "shard": backend.shard,
    }
    try:
        if call.layer is None:
            refuse_other_keys(mask, key.shape[2])
            output = backend(query, key, value, mask=mask, **options)
        else:
            output = _with_state(backend, call.layer, query, key, value, mask, options)
    except UnsupportedError as error:
        if backend.geometry.name in str(error):
            raise
        raise _named(backend, error) from error
    weights = output.weights if options["return_weights"] else None
    return output.out.transpose(1, 2).contiguous(), weights


def _whole_bias(
    module: nn.Module, bias: Tensor | None, position_bias: Tensor | None, call: Call
) -> Tensor | None:
    """Add what a layer makes of relative positions to a mask that came as a tensor."""
    if position_bias is None or position_bias_is_zero(module, cross_attention=call.cross_attention):
        return bias
    return position_bias if bias is None else bias + position_bias


def _named(backend: Any, error: UnsupportedError) -> UnsupportedError:
    """Say of an op's refusal in which layer it came up."""
    where = f"{backend.geometry.name}: backend {backend.name!r}"
    return UnsupportedError(f"{where} cannot run this call: {error}")


def _backend_for(module: nn.Module, kwargs: dict[str, Any]) -> Any:
    """Return the layer's backend, unless the model passes what nobody here would honour."""
    backend = layer_backend(module)
    if backend is None:
        raise UnsupportedError(
            f"{type(module).__name__} runs with attn_implementation='attnzoo' but no backend was "
            "put into it; set config.attnzoo before the model is built, or use "
            "attnzoo.swap(model, ...)"
        )
    refuse_torchs(backend)
    for name, given in kwargs.items():
        if given is not None and name not in HARMLESS:
            raise UnsupportedError(
                f"{backend.geometry.name}: the model passes {name!r} to its attention, which "
                f"backend {backend.name!r} does not know and would ignore; keep this model on "
                "attn_implementation='eager' or 'sdpa'"
            )
    return backend


def _take_call(module: nn.Module, backend: Any) -> Call:
    """Return what the hook saw, once: a state cannot stand for two calls in the same forward."""
    call: Call = getattr(module, "_attnzoo_call", None) or NO_CALL
    if call is TAKEN:
        raise UnsupportedError(
            f"{backend.geometry.name}: the layer calls its attention more than once, and backend "
            f"{backend.name!r} keeps one state of constant size; call the model with "
            "use_cache=False, or give this layer an exact backend"
        )
    module._attnzoo_call = TAKEN if call.layer is not None else None  # type: ignore[assignment]
    return call


def _with_state(
    backend: Any,
    layer: StateLayer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AttentionMask,
    options: dict[str, Any],
) -> AttentionOutput:
    """Go on from the state in the cache, and put the new one there."""
    if mask.function is not None:
        raise UnsupportedError(
            f"{backend.geometry.name}: the mask is {mask.function_name}, which backend "
            f"{backend.name!r} cannot follow with a cache of constant size; call the model with "
            "use_cache=False"
        )
    mask = mask.of_new_tokens(query.shape[2])
    output: AttentionOutput = backend(
        query, key, value, mask=mask, state=layer.state, return_state=True, **options
    )

    def advance(state: Any, length: int) -> Any:  # over the same tokens again, for a rollback
        padding, hidden = mask.padding, options["hidden_states"]
        again: AttentionOutput = backend(
            query[:, :, :length],
            key[:, :, :length],
            value[:, :, :length],
            mask=replace(mask, padding=None if padding is None else padding[:, :length]),
            state=state,
            return_state=True,
            scale=options["scale"],
            hidden_states=None if hidden is None else hidden[:, :length],
        )
        return again.state

    layer.put(output.state, Step(query.shape[2], advance))
    return output
