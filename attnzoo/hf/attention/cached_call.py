"""Run a backend from the state in the cache.

A mask knows the positions of its queries, and a state counts its tokens: a call whose keys, mask
and state do not fit is refused.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.contract.masks import AttentionMask
from attnzoo.contract.states import AttentionOutput
from attnzoo.errors import UnsupportedError
from attnzoo.hf.cache.past_keys import state_of_keys
from attnzoo.hf.cache.past_padding import update_past_padding
from attnzoo.hf.cache.state_layer import RecordedCall, StateLayer
from attnzoo.hf.masks import ModelMask


def run_with_state(
    backend: Any,
    layer: StateLayer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AttentionMask,
    options: dict[str, Any],
) -> AttentionOutput:
    """Run the backend from the state in the cache, and store the new state there.

    Args:
        backend: The backend of the layer.
        layer: The layer's entry in the cache.
        query: ``[B, H, T, D]``, of the last T new tokens.
        key: ``[B, Hkv, S, D]``, of all new tokens; or of all tokens, from another layer.
        value: ``[B, Hkv, S, E]``.
        mask: The mask of the call.
        options: The other arguments of the backend.

    Raises:
        UnsupportedError: The call cannot continue from the state.
    """
    if mask.function is not None:
        _refuse_mask_function(backend, mask)
    if layer.update_pending:  # the module has not updated the cache: the keys are another layer's
        new = mask.new_tokens if isinstance(mask, ModelMask) else query.shape[2]
        if key.shape[2] > new:
            found = _run_on_all_keys(backend, query, key, value, mask, options)
            layer.skip_tokens(new)
            return found
        layer.update(key, value)
    new, queries = key.shape[2], query.shape[2]
    is_short = queries < new
    mask = replace(mask, q_offset=mask.q_offset - (new - queries)) if is_short else mask
    if isinstance(mask, ModelMask) and not isinstance(mask.first, Tensor):
        is_empty = layer.state is None and layer.unread is None
        held = 0 if is_empty else layer.cumulative_length - new
        if isinstance(held, int) and held != mask.first:
            _refuse_count(backend, mask.first, held)
    past = None
    if not torch.compiler.is_compiling():  # raising on a tensor's values breaks the graph
        past = update_past_padding(mask, layer.past_padding, new, layer.cumulative_length)
    if layer.unread is not None:
        layer.state = state_of_keys(backend, *layer.unread, mask, options["scale"])
        layer.unread = None
    mask = mask.of_new_tokens(new)
    if layer.overwrites_state and backend.capabilities.reuses_state:
        options["reuse_state"] = True
    call = None
    if layer.record_past:
        recorded = F.pad(query, (0, 0, new - queries, 0)) if is_short else query
        call = _record_call(backend, recorded, key, value, mask, options)
    if is_short:
        query, mask = _with_all_queries(backend, query, new, mask)
    output: AttentionOutput = backend(
        query, key, value, mask=mask, state=layer.readable_state(), return_state=True, **options
    )
    if output.out.dtype != query.dtype == value.dtype:
        refuse_dtype_of_cache(query, output.out)
    if call is not None:
        layer.record(call)
    layer.store(output.state)
    layer.past_padding = past
    return _last_queries(output, queries) if is_short else output


def _record_call(
    backend: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AttentionMask,
    options: dict[str, Any],
) -> RecordedCall:
    """Return a call of a backend from a state, with its options."""

    def replay(state: Any, length: int) -> Any:
        """Return the state after ``length`` of these tokens."""
        padding, hidden = mask.padding, options["hidden_states"]
        # autograd refuses the inputs of a call that ran in inference mode
        with torch.inference_mode() if query.is_inference() else nullcontext():
            replayed: AttentionOutput = backend(
                query[:, :, :length],
                key[:, :, :length],
                value[:, :, :length],
                mask=replace(mask, padding=None if padding is None else padding[:, :length]),
                state=state,
                return_state=True,
                scale=options["scale"],
                hidden_states=None if hidden is None else hidden[:, :length],
            )
        return replayed.state

    return RecordedCall(query.shape[2], replay)


def _run_on_all_keys(
    backend: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AttentionMask,
    options: dict[str, Any],
) -> AttentionOutput:
    """Run a backend without a state on the keys of all tokens, which another layer keeps."""
    if isinstance(mask, ModelMask) and mask.shape[-1] != key.shape[2]:
        raise UnsupportedError(
            f"{backend.geometry.name}: another layer passes {key.shape[2]} keys, and the mask has "
            f"{mask.shape[-1]}; give both layers the same backend and options"
        )
    keys = key.shape[2]
    if getattr(backend.config, "num_sinks", 0) and backend.geometry.window is not None:
        raise UnsupportedError(
            f"{backend.geometry.name}: the keys are those of another layer, whose cache of the "
            f"model's sliding window drops the first tokens, which num_sinks="
            f"{backend.config.num_sinks} needs; give both layers the same backend and options"
        )
    if query.shape[2] < keys and backend.capabilities.needs_hidden_states:
        raise UnsupportedError(
            f"{backend.geometry.name}: the model passes the keys of all {keys} tokens, which "
            f"another entry of the cache holds, and backend {backend.name!r} needs the hidden "
            "states of all of them; call the model with use_cache=False, or give this layer "
            "another backend"
        )
    return run_last_queries(backend, query, key, value, mask, options)


def run_last_queries(
    backend: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AttentionMask,
    options: dict[str, Any],
) -> AttentionOutput:
    """Run a backend without a state for the queries of the last tokens.

    Args:
        backend: The backend of the layer.
        query: ``[B, H, T, D]``.
        key: ``[B, Hkv, S, D]``, T at most S.
        value: ``[B, Hkv, S, E]``.
        mask: The mask of the queries.
        options: The other arguments of the backend.
    """
    queries, keys = query.shape[2], key.shape[2]
    mask = replace(mask, q_offset=mask.q_offset - (keys - queries))
    query, mask = _with_all_queries(backend, query, keys, mask)
    output: AttentionOutput = backend(query, key, value, mask=mask, **options)
    return _last_queries(output, queries)


def _with_all_queries(
    backend: Any, query: Tensor, keys: int, mask: AttentionMask
) -> tuple[Tensor, AttentionMask]:
    """Return queries and the mask for the last tokens of a call, in the form a backend takes.

    Some models compute only the last tokens in layers with the keys of another layer. Exact
    backends take them as they are; the others need as many queries as keys, so zeros come first.

    Raises:
        UnsupportedError: The backend computes gates from hidden states, which the model does not
            pass for the other tokens.
    """
    missing = keys - query.shape[2]
    if missing <= 0:
        return query, mask
    if backend.capabilities.arbitrary_mask:
        return query, replace(mask, q_offset=mask.q_offset + missing)
    if backend.capabilities.needs_hidden_states:
        raise UnsupportedError(
            f"{backend.geometry.name}: the model computes the last {query.shape[2]} of {keys} "
            f"tokens in this layer, and backend {backend.name!r} needs the hidden states of all; "
            "pass output_hidden_states=True or logits_to_keep=0, or give this layer an exact "
            "backend"
        )
    return F.pad(query, (0, 0, missing, 0)), mask


def _last_queries(output: AttentionOutput, queries: int) -> AttentionOutput:
    """Return an output without the queries that :func:`_with_all_queries` added."""
    if output.out.shape[2] == queries:
        return output
    weights = None if output.weights is None else output.weights[:, :, -queries:]
    return output._replace(out=output.out[:, :, -queries:], weights=weights)


def refuse_dtype_of_cache(query: Tensor, held: Tensor) -> None:
    """Raise where the cache would give the output another dtype; autocast converts it.

    Args:
        query: Of the call.
        held: Keys or an output that have the dtype of earlier tokens.
    """
    if not torch.is_autocast_enabled(query.device.type):
        dtypes = [str(x.dtype).removeprefix("torch.") for x in (held, query)]
        raise UnsupportedError(
            f"the cache holds {dtypes[0]} and the queries are {dtypes[1]}: the model changed its "
            "dtype between two calls; start with an empty cache, or change the model back"
        )


def _refuse_mask_function(backend: Any, mask: AttentionMask) -> None:
    """Raise for a mask that is a function, which a state of constant size cannot continue under."""
    advice = (
        "call the model with use_cache=False"
        if backend.capabilities.arbitrary_mask
        else "give this layer an exact backend, such as 'flash'"
    )
    raise UnsupportedError(
        f"{backend.geometry.name}: the mask is {mask.function_name}, which backend "
        f"{backend.name!r} does not support with a cache of constant size; {advice}"
    )


def _refuse_count(backend: Any, first: int, held: int) -> None:
    """Raise because the model counts other earlier tokens than the state holds."""
    raise UnsupportedError(
        f"{backend.geometry.name}: the mask begins after {first} tokens, and the state of "
        f"backend {backend.name!r} holds {held}: the model keeps the keys of this call "
        "in an entry of the cache that is not the layer's own. Call the model with "
        "use_cache=False, or give this layer an exact backend"
    )
