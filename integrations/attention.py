"""The attention function that transformers calls, and the hook that tells it what transformers does not.

The interface hands over queries, keys, values and a mask. What else a backend may need, the hidden states and the
layer's entry in the cache, a forward pre-hook on the attention module takes from that module's own arguments.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attnzoo.backends.base import AttentionBackend
from attnzoo.errors import UnsupportedError
from attnzoo.integrations import compat
from attnzoo.integrations.cache import StateLayer, Step, state_layer
from attnzoo.integrations.masks import given_mask
from attnzoo.masks import AttentionMask
from attnzoo.state import AttentionOutput

NAME = "attnzoo"  # of the implementation, of the config's field, and of the submodule in each layer

# Arguments that attention layers pass on and that change nothing of what is computed here.
HARMLESS = frozenset(
    {
        "cache_position",
        "deterministic",
        "layer_idx",
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
        "use_cache",
    }
)


class Call(NamedTuple):
    """What the hook saw of the attention module's own arguments."""

    hidden_states: Tensor | None
    layer: StateLayer | None
    cross_attention: bool


class Arguments:
    """Reads a forward's arguments by name, whether they come by position or by keyword."""

    HIDDEN = ("hidden_states", "x", "hidden_state")
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


def add_hook(module: nn.Module) -> Any:
    """Register the pre-hook on an attention module; returns the handle that removes it."""
    arguments = Arguments(module)

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        backend: AttentionBackend = module.attnzoo  # type: ignore[assignment]
        cross = arguments.get(Arguments.OTHER, args, kwargs) is not None
        hidden = arguments.get(Arguments.HIDDEN, args, kwargs) if backend.needs_hidden_states else None
        layer = None
        if not backend.keeps_all_keys and not cross:
            cache = arguments.get(Arguments.CACHE, args, kwargs)
            if cache is not None:
                layer = state_layer(cache, cache_index(module, backend), backend.geometry.name)
        module._attnzoo_call = Call(hidden, layer, cross)  # type: ignore[assignment]

    return module.register_forward_pre_hook(before, with_kwargs=True)


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
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Run a layer's backend; registered with transformers' ``AttentionInterface``.

    Returns:
        The output ``[B, T, H, E]``, and the effective attention matrix ``[B, H, T, S]`` if it was asked for.

    Raises:
        UnsupportedError: The layer has no backend, or something is given that it cannot honour.
    """
    backend = getattr(module, NAME, None)
    if backend is None:
        raise UnsupportedError(
            f"{type(module).__name__} runs with attn_implementation='attnzoo' but no backend was put into it; "
            "set config.attnzoo before the model is built, or use attnzoo.swap(model, ...)"
        )
    where = backend.geometry.name
    for name, given in kwargs.items():
        if given is not None and name not in HARMLESS:
            raise UnsupportedError(
                f"{where}: the model passes {name!r} to its attention, which attnzoo does not know and so "
                "would ignore; keep this model on attn_implementation='eager' or 'sdpa'"
            )
    call: Call = getattr(module, "_attnzoo_call", None) or Call(None, None, False)
    module._attnzoo_call = None  # type: ignore[assignment]
    causal = is_causal if is_causal is not None else bool(getattr(module, "is_causal", True))
    mask, bias = given_mask(
        attention_mask,
        causal=causal and not call.cross_attention,
        window=sliding_window,
        q_length=query.shape[2],
        kv_length=key.shape[2],
    )
    if cu_seq_lens_q is not None and mask.segment_ids is None and mask.padding is None:
        mask = replace(mask, segment_ids=_segments(cu_seq_lens_q, query.shape[2]))
    if position_bias is not None:
        bias = position_bias if bias is None else bias + position_bias
    wants_weights = compat.wants_weights(kwargs)
    options = {
        "scale": scaling,
        "hidden_states": call.hidden_states,
        "bias": bias,
        "softcap": softcap,
        "sinks": s_aux,
        "dropout": dropout,
        "return_weights": wants_weights,
    }
    if call.layer is None:
        output = backend(query, key, value, mask=mask, **options)
    else:
        output = _with_state(backend, call.layer, query, key, value, mask, options)
    return output.out.transpose(1, 2).contiguous(), output.weights if wants_weights else None


def _segments(boundaries: Tensor, length: int) -> Tensor:
    """Turn cumulative lengths ``[N + 1]`` into segment ids, ``[1, T]``."""
    tokens = torch.arange(length, device=boundaries.device)
    return torch.searchsorted(boundaries[1:].contiguous(), tokens, right=True)[None]


def _with_state(
    backend: AttentionBackend,
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
            f"{backend.geometry.name}: a cache of constant size cannot follow a mask {mask.function_name}; "
            "call the model with use_cache=False"
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
