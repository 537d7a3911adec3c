"""The attention function that transformers calls, and the pre-hook that completes its inputs.

transformers passes queries, keys, values and a mask. A backend may also need the hidden states and
the layer's entry in the cache: a forward pre-hook on the attention module takes them from the
arguments of that module. A backend with a state runs from that of the cache: a mask knows the
positions of its queries, and a state counts its tokens, so that a call whose keys, mask and state
do not fit is refused.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface

from attnzoo.contract.backend import AttentionBackend
from attnzoo.contract.masks import PLAIN, AttentionMask
from attnzoo.contract.states import AttentionOutput
from attnzoo.errors import UnsupportedError
from attnzoo.hf import seam
from attnzoo.hf.attention.continuous_batching import paged_attention
from attnzoo.hf.attention.packing import Packing, add_packing
from attnzoo.hf.cache.past_padding import UNLIMITED, PastPadding, update_past_padding
from attnzoo.hf.cache.state_layer import RecordedCall, StateLayer, state_layer
from attnzoo.hf.context_parallel import refuse_torch_context_parallel
from attnzoo.hf.layers import is_causal as layer_is_causal
from attnzoo.hf.layers import position_bias_is_zero
from attnzoo.hf.masks import (
    ModelMask,
    keep_selected,
    read_mask,
    refuse_sinks_under_function,
    refuse_window_over_own_keys,
    refuse_wrong_length,
)
from attnzoo.hf.names import NAME

# torch's context_parallel replaces it in F
BUILTIN_SDPA = torch._C._nn.scaled_dot_product_attention


class LayerArguments(NamedTuple):
    """Arguments of an attention module that its attention function does not receive."""

    hidden_states: Tensor | None
    cache: StateLayer | None  # the layer's entry in the cache, if it holds a state
    cross_attention: bool
    mask: Any = None  # the module may make a tensor of it

    def uncount(self, tokens: int) -> None:
        """Subtract the tokens of a refused call from the cache's count; no state has them."""
        if self.cache is not None and not self.cache.update_pending:
            self.cache.add_length(-tokens)


NOTHING = LayerArguments(None, None, False)
CONSUMED = LayerArguments(None, None, True)  # an earlier call in this forward took the state


class PendingArguments(threading.local):
    """The arguments of the forward pass that a layer is in, one value per thread.

    Threads may share a model. A copy of the object, or a pickled one, is empty.
    """

    value: LayerArguments = NOTHING

    def __reduce__(self) -> tuple[type[PendingArguments], tuple[()]]:
        return type(self), ()


class ForwardArguments:
    """Reads the arguments of a ``forward``, given by position or by keyword.

    Args:
        forward: The method of the module's class.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.names = tuple(inspect.signature(inspect.unwrap(forward)).parameters)[1:]

    def find(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *groups: tuple[str, ...]
    ) -> list[Any]:
        """Return the first argument of each group of names that is not ``None``."""
        given, found = dict(zip(self.names, args, strict=False)) | kwargs, []
        for names in groups:
            value = None
            for name in names:
                if (value := given.get(name)) is not None:
                    break
            found.append(value)
        return found

    def cache(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the cache, or ``None``.

        Raises:
            UnsupportedError: A cache is given under a name that is not in ``seam.CACHE``.
        """
        given = dict(zip(self.names, args, strict=False)) | kwargs
        for name in seam.CACHE:
            if (found := given.get(name)) is not None:
                return found
        for name, value in given.items():
            if isinstance(value, seam.Cache):
                raise UnsupportedError(
                    f"the model passes its cache as {name!r}, a name that attnzoo does not know "
                    f"in {seam.package('transformers')} (known: {', '.join(seam.CACHE)}), so no "
                    f"state can be kept. {seam.HOW_TO_GO_ON}"
                )
        return None


class ModelHook(ForwardArguments):
    """A forward pre-hook on a model that changes a call in which one of some arguments is given."""

    reads: tuple[str, ...]  # their names
    change: Callable[..., Any]

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return other arguments; ``None`` leaves them as they are."""
        given = dict(zip(self.names, args, strict=False)) | kwargs
        for name in self.reads:
            if given.get(name) is not None:
                return self.change(model, args, kwargs)
        return None


class LayerHook(ForwardArguments):
    """A forward pre-hook that keeps an attention module's arguments for its attention function."""

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Store the arguments for the attention function, and put a state layer in the cache."""
        if module.config._attn_implementation != NAME:
            return  # set_attn_implementation was called: the layer runs its own attention
        backend = module.attnzoo
        can, layer = backend.capabilities, None
        names = seam.HIDDEN_STATES if can.needs_hidden_states else ()
        groups = names, seam.ENCODER_STATES, seam.ATTENTION_MASK, seam.CACHE
        hidden, encoder, mask, cache = self.find(args, kwargs, *groups)
        if encoder is None and not backend.keeps_all_keys:
            if cache is None:
                cache = self.cache(args, kwargs)  # refuses one of another name
            if cache is not None:
                if not backend.geometry.causal or torch.compiler.is_compiling():
                    _refuse_state(backend)
                layer = state_layer(cache, module, backend)
        elif can.exact_steps and encoder is None:
            _refuse_candidates(backend, cache)
        arguments = LayerArguments(hidden, layer, encoder is not None, mask)
        module._attnzoo_arguments.value = arguments


def _refuse_candidates(backend: AttentionBackend, cache: Any) -> None:
    """Raise for assisted decoding, whose candidates are several new tokens in one call.

    Greedy tokens would differ from those without an assistant.
    """
    cache = getattr(cache, "self_attention_cache", cache)
    if getattr(cache, "recording", False):  # a StateCache
        raise UnsupportedError(
            f"{backend.geometry.name}: backend {backend.name!r} with decoding='exact' attends to "
            "all keys for a single new token only, and assisted decoding passes several at once; "
            "set another value of decoding, or leave out the assistant and "
            "prompt_lookup_num_tokens"
        )


def _refuse_state(backend: Any) -> None:
    """Raise for a state that a call with a cache cannot have, before the cache has counted it."""
    can, reason = backend.capabilities, ""
    if not backend.geometry.causal:
        reason = "the layer is bidirectional, so that no state continues it; pass use_cache=False"
    elif torch.compiler.is_compiling() and (can.state_grows or can.state_keeps_keys):
        reason = "the size of its state depends on the number of tokens, which a graph of "
        reason += "torch.compile does not follow; do not compile calls with a cache"
    if reason:
        raise UnsupportedError(
            f"{backend.geometry.name}: backend {backend.name!r} cannot run with a cache: {reason}"
        )


def add_hook(module: nn.Module) -> RemovableHandle:
    """Register the pre-hook on an attention module and return the handle that removes it."""
    vars(module)["_attnzoo_arguments"] = PendingArguments()
    return module.register_forward_pre_hook(LayerHook(type(module).forward), with_kwargs=True)


def pass_hidden_states(module: nn.Module, argument: str) -> RemovableHandle:
    """Have an attention module pass its hidden states to its attention function.

    For engines that run modules of transformers with an attention function of their own.

    Args:
        module: The module.
        argument: Name under which the function receives them.

    Raises:
        UnsupportedError: The module passes no further arguments on.
    """
    arguments = ForwardArguments(type(module).forward)
    parameters = inspect.signature(type(module).forward).parameters.values()
    if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters):
        raise UnsupportedError(
            f"{type(module).__name__} passes no further arguments to its attention function, and "
            "the layer's backend needs its hidden states. Use 'linear', or gated_linear with gate "
            "'retnet'"
        )

    def add(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args, kwargs | {argument: arguments.find(args, kwargs, seam.HIDDEN_STATES)[0]}

    return module.register_forward_pre_hook(add, with_kwargs=True)


def layer_backend(module: nn.Module) -> Any:
    """Return the backend of an attention module, or ``None``; PEFT may have wrapped it."""
    found = getattr(module, NAME, None)
    if isinstance(found, AttentionBackend) or hasattr(found, "attend"):
        return found
    return None


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
    seq_idx: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Run a layer's backend; registered with transformers' ``AttentionInterface``.

    Args:
        module: The attention module.
        query: ``[B, H, T, D]``.
        key: ``[B, Hkv, S, D]``.
        value: ``[B, Hkv, S, E]``.
        attention_mask: A :class:`ModelMask`, a 4-D tensor, or ``None``.
        scaling: Multiplies query-key products.
        dropout: Probability with which attention weights are dropped.
        is_causal: Overrides the layer's own causality.
        sliding_window: The model's window, in tokens.
        softcap: Bound on the scores.
        s_aux: Attention sinks, another name for ``sinks``.
        sinks: A logit per head, or per head and query, that takes part in the softmax.
        indices: Keys that a sparse indexer selected, ``[B, T, N]``.
        position_bias: Added to the scores.
        cu_seq_lens_q: Cumulative lengths of packed sequences, ``[N + 1]``.
        cu_seq_lens_k: The same of the keys; by layer type under continuous batching.
        seq_idx: Index of the packed sequence of each token, ``[B, S]``.
        **kwargs: Other arguments of the layer; unknown ones are refused.

    Returns:
        The output ``[B, T, H, E]``, and the effective attention matrix ``[B, H, T, S]`` if it was
        requested.

    Raises:
        UnsupportedError: The layer has no backend, or the backend does not support the inputs.
    """
    packing, is_paged = None, False
    if seq_idx is not None or cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        packing = Packing(seq_idx, cu_seq_lens_q, cu_seq_lens_k)
        is_paged = kwargs.get("write_index") is not None  # the module has read the pages
        if is_paged:
            kwargs = {name: x for name, x in kwargs.items() if name not in seam.PAGE_ARGUMENTS}
    backend = layer_backend(module)
    if backend is None and seam.attends_to_layers(module):
        return seam.attend_to_layers(query, key, value, scaling), None
    arguments = _take_arguments(module, backend, kwargs)
    mask, bias = attention_mask, None
    if is_paged and mask is None:
        window = None if sliding_window is None else (sliding_window - 1, 0)
        mask = AttentionMask(causal=True, window=window)
    if not isinstance(mask, AttentionMask):
        causal = layer_is_causal(module, None) if is_causal is None else is_causal
        lengths = query.shape[2], key.shape[2]
        mask, bias = _read_mask(backend, arguments, mask, causal, sliding_window, lengths)
    if packing is not None and not is_paged:
        sizes = query.shape[0], query.shape[2], key.shape[2]
        mask = add_packing(mask, packing, sizes, sharded=backend.shard is not None)
    if indices is not None:
        mask = keep_selected(mask, indices, key.shape[2])
    if position_bias is not None:
        bias = _add_position_bias(module, bias, position_bias, arguments)
    sinks = s_aux if sinks is None else sinks
    options: dict[str, Any] = {"scale": scaling, "bias": bias, "softcap": softcap, "sinks": sinks}
    options |= {"hidden_states": arguments.hidden_states, "return_weights": _wants_weights(kwargs)}
    options |= {"dropout": dropout, "shard": backend.shard}
    if packing is not None and is_paged:
        borders = packing._asdict()
        out = paged_attention(module, backend, query, key, value, mask, borders, options)
        return out.transpose(1, 2).contiguous(), None
    output = _run_backend(backend, arguments, query, key, value, mask, options)
    weights = output.weights if options["return_weights"] else None
    return output.out.transpose(1, 2).contiguous(), weights


def _read_mask(
    backend: Any,
    arguments: LayerArguments,
    mask: Any,
    causal: bool,
    window: int | None,
    lengths: tuple[int, int],
) -> tuple[AttentionMask, Tensor | None]:
    """Read a mask that is a tensor or ``None``; returns the mask, and the bias if it is one."""
    has_state, given = arguments.cache is not None, arguments.mask
    if isinstance(given, Tensor) and given.ndim == 4 and given.shape[-1] < lengths[1]:
        refuse_window_over_own_keys(backend, given.shape[-1], lengths[1])
    return read_mask(
        mask,
        causal=causal and not arguments.cross_attention,
        window=window,
        q_length=lengths[0],
        kv_length=lengths[1],
        given=given if has_state or getattr(backend, "window", None) is not None else None,
        all_columns=has_state,
        as_bias=has_state and backend.capabilities.additive_bias,
    )


def _wants_weights(kwargs: dict[str, Any]) -> bool:
    """Return whether the caller set ``output_attentions``; not all models pass the flag on."""
    if kwargs.get("output_attentions"):
        return True
    collector = seam.active_collector
    if not torch.compiler.is_compiling():
        collected = collector.get()
    else:  # a context variable cannot be traced; while tracing, transformers uses a plain one
        collected = collector.global_var if collector.compiling else None
    return bool(collected) and any("attentions" in key for key in collected)


def _run_backend(
    backend: Any,
    arguments: LayerArguments,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AttentionMask,
    options: dict[str, Any],
) -> AttentionOutput:
    """Run the backend, from the state in the cache if there is one; errors name the layer."""
    try:
        if query.shape[1] != backend.geometry.num_heads:
            _refuse_split_heads(query.shape[1], backend.geometry.num_heads)
        if query.dtype != key.dtype and not arguments.cross_attention:
            refuse_dtype_of_cache(query, key)
        if arguments.cache is not None:
            return run_with_state(backend, arguments.cache, query, key, value, mask, options)
        if isinstance(mask, ModelMask) and mask.function is not None:
            refuse_sinks_under_function(mask, backend)
        if isinstance(mask, ModelMask) and mask.shape[-1] != key.shape[2]:
            refuse_wrong_length(mask, key.shape[2])
        queries, keys = query.shape[2], key.shape[2]
        if isinstance(mask, ModelMask) and queries < keys == mask.new_tokens:
            return run_last_queries(backend, query, key, value, mask, options)
        output: AttentionOutput = backend(query, key, value, mask=mask, **options)
        return output
    except UnsupportedError as error:
        arguments.uncount(key.shape[2])
        if backend.geometry.name in str(error):
            raise
        where = f"{backend.geometry.name}: backend {backend.name!r}"
        raise UnsupportedError(f"{where} cannot run this call: {error}") from error


def _refuse_split_heads(heads: int, of_layer: int) -> None:
    """Raise where tensor parallelism has given this process a part of the heads."""
    parallel = torch.distributed.is_available() and torch.distributed.is_initialized()
    if parallel and torch.distributed.get_world_size() * heads == of_layer:
        raise UnsupportedError(
            f"this process has {heads} of the layer's {of_layer} heads: tensor parallelism splits "
            "them, which a swap does not support; use FSDP, DeepSpeed or attnzoo.context_parallel"
        )


def _add_position_bias(
    module: nn.Module, bias: Tensor | None, position_bias: Tensor, arguments: LayerArguments
) -> Tensor | None:
    """Add the layer's relative position bias to a mask that came as an additive tensor."""
    if position_bias_is_zero(module, cross_attention=arguments.cross_attention):
        return bias
    return position_bias if bias is None else bias + position_bias


def _take_arguments(module: nn.Module, backend: Any, kwargs: dict[str, Any]) -> LayerArguments:
    """Return the pending arguments once: one state cannot serve two calls in one forward pass.

    Args:
        module: The attention module.
        backend: Its backend, or ``None``, which is refused.
        kwargs: Arguments of the attention function that nothing of ours reads.
    """
    if backend is None:
        raise UnsupportedError(
            f"{type(module).__name__} runs with attn_implementation='attnzoo' but has no backend; "
            "set config.attnzoo before the model is built, or call attnzoo.swap(model, ...)"
        )
    if F.scaled_dot_product_attention is not BUILTIN_SDPA and not torch.compiler.is_compiling():
        refuse_torch_context_parallel(backend)
    for name, value in kwargs.items():
        if value is not None and name not in seam.IGNORED_ARGUMENTS:
            raise UnsupportedError(
                f"{backend.geometry.name}: backend {backend.name!r} does not support the attention "
                f"argument {name!r}, which this model passes; keep this model on "
                "attn_implementation='eager' or 'sdpa'"
            )
    pending: Any = module._attnzoo_arguments
    arguments: LayerArguments = pending.value
    if arguments is CONSUMED:
        raise UnsupportedError(
            f"{backend.geometry.name}: the layer calls its attention more than once, and backend "
            f"{backend.name!r} keeps one state of constant size; call the model with "
            "use_cache=False, or give this layer an exact backend"
        )
    pending.value = CONSUMED if arguments.cache is not None else NOTHING
    return arguments


# -- from the state in the cache -------------------------------------------------------------------


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
        held = 0 if layer.state is None else layer.cumulative_length - new
        if isinstance(held, int) and held != mask.first:
            _refuse_count(backend, mask.first, held)
    past = layer.past_padding
    if torch.compiler.is_compiling():  # raising on a tensor's values breaks the graph
        past = None
    elif mask.padding is None and (past is None or past.padding is None):
        is_counted = isinstance(mask, ModelMask) and isinstance(mask.q_offset, int)
        past = PastPadding(None, int(mask.q_offset) + new if is_counted else UNLIMITED)
    else:
        past = update_past_padding(mask, past, new, layer.cumulative_length)
    is_full = mask.padding is None and mask.segment_ids is None and mask.window is None
    mask = PLAIN[mask.causal] if is_full else mask.of_new_tokens(new)
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


AttentionInterface.register(NAME, attention)  # in place of the function that imports this module
