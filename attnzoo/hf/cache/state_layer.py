"""A cache layer for any transformers ``Cache`` that stores a backend's state.

The pre-hook of a swapped attention module replaces the empty stock layer of the cache by a
:class:`StateLayer`. Its ``update`` returns the new keys and values unchanged; the attention
function stores the state that the backend returns. The size of the state is constant.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    EncoderDecoderCache,
    StaticLayer,
)

from attnzoo.contract.backend import AttentionBackend
from attnzoo.errors import UnsupportedError
from attnzoo.hf import seam
from attnzoo.hf.cache.past_padding import PastPadding
from attnzoo.hf.mixins import Mixin, subclass
from attnzoo.hf.unchanged import reset_on_error

Base: Any = object  # of mixins: they stand before a class of transformers
State = Any  # a named tuple of tensors, batch first

_METADATA = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "layout", "ndim")),
        *(getattr(Tensor, name).__get__ for name in ("is_cpu", "is_cuda", "is_meta", "nbytes")),
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.__len__),
        *(Tensor.is_floating_point, Tensor.element_size, Tensor.untyped_storage),
    }
)


class MissingKeys(Tensor):
    """The keys or values that a layer with a state does not keep: shape, dtype and device only.

    Code that counts the tokens of a cache works. Memory is that of one number.

    Raises:
        UnsupportedError: An operation reads the elements, or attention is computed with them.
    """

    backend: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return metadata, and refuse every other operation."""
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        names = {x.backend for x in torch.utils._pytree.tree_leaves(args) if isinstance(x, cls)}
        operation = getattr(func, "__name__", str(func))
        raise UnsupportedError(
            f"{operation} needs the cached keys or values of a layer that runs backend "
            f"{', '.join(map(repr, sorted(names)))}, which keeps a state of fixed size instead. "
            "Keep the layers that fill this cache exact: name 'flash' for them under layers"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        """Return the shape and the backend."""
        return f"MissingKeys(shape={tuple(self.shape)}, backend={self.backend!r})"


class RecordedCall(NamedTuple):
    """One call of the backend, kept so that ``crop`` can replay a part of it."""

    length: int  # new tokens of the call
    replay: Callable[[State, int], State]  # (state before the call, number of tokens) -> state


class StateLayer(CacheLayerMixin):
    """Stores a backend's state between decoding steps, instead of keys and values.

    Another kind of layer is a subclass. It overrides :meth:`store`, which keeps the state after a
    call, and :meth:`readable_state`, from which the backend continues; and where it has other
    tensors than ``state``, :meth:`map_rows` (beams), :meth:`crop` and :meth:`reset`. Memory is that
    of all tensors among its attributes, which a pickle saves; it leaves out the recorded calls,
    which hold backends: the state before them is then the one before the next recorded call.

    Args:
        owner: The backend that computes the state; another backend cannot continue from it.
        window: The sliding window of the stock layer that this one replaces. transformers sizes the
            mask of all layers of a kind by one of them, so this layer reports that layer's sizes.
    """

    is_croppable = True
    supports_early_init = False
    overwrites_state = False  # whether a state may be computed in the place of the one before

    def __init__(self, owner: AttentionBackend, window: int | None = None) -> None:
        self.is_initialized = False  # instead of CacheLayerMixin.__init__, which sets keys
        self.owner = (owner.name, owner.config)
        self.window = window
        self.is_sliding = window is not None
        self.state: State | None = None
        self.cumulative_length: int | Tensor = 0  # type: ignore[assignment]
        self.past_padding: PastPadding | None = None  # None: unknown, or there are no past tokens
        self.update_pending = False  # whether a swapped layer is about to call update
        self.record_past = False
        self._recorded: list[RecordedCall] = []  # since the last crop
        self._state_before_recorded: State | None = None

    # -- called by the attention layer -----------------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Read batch size, dtype and device; the state is allocated when the backend has run."""
        self.batch_size, self.num_heads = key_states.shape[:2]
        self.key_dim, self.value_dim = key_states.shape[3], value_states.shape[3]
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """A :class:`MissingKeys` with the shape of a stock layer's keys; a state has no keys."""
        return self._missing(self.key_dim) if hasattr(self, "batch_size") else None

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        """A :class:`MissingKeys` with the shape of a stock layer's values."""
        return self._missing(self.value_dim) if hasattr(self, "batch_size") else None

    def _missing(self, size: int) -> Tensor:
        nan = torch.full((), torch.nan, dtype=self.dtype, device=self.device)
        shape = self.batch_size, self.num_heads, self._stock_length(), size
        missing = nan.expand(shape).as_subclass(MissingKeys)
        missing.backend = self.owner[0]
        return missing

    def _stock_length(self) -> int:
        """Return the number of keys that the stock layer would hold."""
        length = int(self.cumulative_length)
        return length if self.window is None else min(length, self.window - 1)

    def update(
        self, key_states: Tensor, value_states: Tensor, cache_kwargs: Any = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Count the new tokens and return their keys and values; the state holds the earlier ones.

        Raises:
            UnsupportedError: The caller is a layer that needs all earlier keys, or passes an
                argument that is unknown here.
        """
        if kwargs.keys() - seam.IGNORED_UPDATE_ARGUMENTS:
            seam.refuse_unknown_arguments("the cache", kwargs, seam.IGNORED_UPDATE_ARGUMENTS)
        if not self.update_pending:
            raise UnsupportedError(
                f"the cache holds the state of backend {self.owner[0]!r} and no earlier keys, but "
                "the attention implementation of this layer has changed; start with an empty cache"
            )
        self.update_pending = False
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        elif not hasattr(self, "batch_size"):  # after a reset
            self.batch_size = key_states.shape[0]
        self.add_length(key_states.shape[-2])
        return key_states, value_states

    def add_length(self, tokens: int) -> None:
        """Add to the number of tokens; a negative number removes them."""
        self.cumulative_length = self.cumulative_length + tokens

    def readable_state(self) -> State | None:
        """Return the state; with gradients, copies of tensors that inference mode has computed."""
        if self.state is None or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return self.state
        return type(self.state)(*(x.clone() if x.is_inference() else x for x in self.state))

    def skip_tokens(self, tokens: int) -> None:
        """Count tokens of a call that needed no state, because it had the keys of all tokens."""
        self.update_pending, self.state = False, None
        self._clear_recorded()
        self.add_length(tokens)

    def record(self, call: RecordedCall) -> None:
        """Keep a call, from which ``crop`` computes an earlier state; :meth:`store` follows."""
        if not self._recorded:
            self._state_before_recorded = self.state
        self._recorded.append(call)

    def store(self, state: State) -> None:
        """Store the state after a call, without views that keep larger storages alive."""
        if not torch.compiler.is_compiling():
            kept, is_view = [], False
            for x in state:
                holds_more = x.untyped_storage().nbytes() > x.nbytes
                kept.append(x.clone() if holds_more else x)
                is_view = is_view or holds_more
            state = type(state)(*kept) if is_view else state
        self.state = state

    # -- called by generation --------------------------------------------------------------------

    def get_seq_length(self) -> Any:
        """Return the number of tokens in the state."""
        return self.cumulative_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys that a mask covers, and the position of the first one."""
        begin = 0
        if self.window is not None:
            begin = max(int(self.cumulative_length) - self.window + 1, 0)
        return int(self.cumulative_length) + query_length - begin, begin

    def get_max_length(self) -> int:
        """Return -1: the length is unlimited."""
        return -1

    def reset(self) -> None:
        """Remove the state and all tokens."""
        self.state, self.cumulative_length, self.past_padding = None, 0, None
        self._clear_recorded()
        vars(self).pop("batch_size", None)  # the next rows may be others

    def offload(self) -> None:
        """Do nothing: a state of fixed size stays on its device, as sliding windows do."""

    def prefetch(self) -> None:
        """Do nothing, as :meth:`offload`."""

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Change the rows of all tensors, as in beam search."""
        self._clear_recorded()
        if self.past_padding is not None:
            self.past_padding = self.past_padding.map_rows(change)
        if self.state is not None:
            self.store(type(self.state)(*(change(x) for x in self.state)))
            self.batch_size = self.state[0].shape[0]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select rows for beam search: row i becomes row ``beam_idx[i]``."""
        self.map_rows(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        self.map_rows(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Select rows."""
        self.map_rows(lambda x: x[indices])

    # -- removing tokens (assisted decoding) -----------------------------------------------------

    def _clear_recorded(self) -> None:
        self._recorded, self._state_before_recorded = [], None

    def __getstate__(self) -> dict[str, Any]:
        """Return what a pickle contains."""
        return vars(self) | {"_recorded": [], "_state_before_recorded": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a copy, which keeps the recorded calls."""
        memo[id(self)] = new = object.__new__(type(self))
        vars(new).update(copy.deepcopy(vars(self), memo))
        return new

    def activate_past_recording(self) -> None:
        """Record the inputs of each call until the next :meth:`crop`."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens: replay the recorded calls without them from an earlier state.

        Raises:
            UnsupportedError: The tokens were not recorded, so the state without them is unknown.
        """
        if tokens_to_remove > 0:
            raise UnsupportedError(
                "crop takes the number of tokens to remove as a negative number, "
                f"got {tokens_to_remove}"
            )
        remove = -tokens_to_remove
        recorded = sum(call.length for call in self._recorded)
        if remove > recorded:
            raise UnsupportedError(
                f"cannot remove the last {remove} tokens from a recurrent state: {recorded} are "
                "recorded. Call cache.activate_past_recording() after the first call of the model, "
                "or start with an empty cache"
            )
        if remove:
            keep, state = recorded - remove, self._state_before_recorded
            for call in self._recorded:
                length = min(call.length, keep)
                if length:
                    state = call.replay(state, length)
                keep -= length
            if state is None:
                self.state = None
            else:
                self.store(state)
            self.add_length(-remove)
            if self.past_padding is not None:
                self.past_padding = self.past_padding.without_last(remove)
        self._clear_recorded()


class StaticStateLayer(StateLayer):
    """A :class:`StateLayer` at fixed addresses for compiled decoding: updates are in place.

    With a sliding window it also keeps the length as an int, which sizes the mask, as the stock
    sliding layer does.
    """

    is_compileable = True
    is_croppable = False
    overwrites_state = True

    def __init__(
        self, owner: AttentionBackend, max_cache_len: int, window: int | None = None
    ) -> None:
        super().__init__(owner, window)
        self.max_cache_len = max_cache_len
        self.cumulative_length = torch.zeros((), dtype=torch.long)
        self.cumulative_length_int = 0
        self._buffers: State | None = None  # every state is copied into these tensors

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Read batch size, dtype and device, and move the counter to the device."""
        super().lazy_initialization(key_states, value_states)
        assert isinstance(self.cumulative_length, Tensor)
        self.cumulative_length = self.cumulative_length.to(key_states.device)
        if not torch.compiler.is_compiling():
            torch._dynamo.mark_static_address(self.cumulative_length)

    def add_length(self, tokens: int) -> None:
        """Add to the number of tokens in place."""
        assert isinstance(self.cumulative_length, Tensor)
        self.cumulative_length.add_(tokens)
        if self.window is not None:
            self.cumulative_length_int += tokens

    def store(self, state: State) -> None:
        """Copy the state into the buffers; allocate new ones if the shapes changed.

        So are those of states with gradients, whose backward pass reads the earlier state.
        """
        fits = self._buffers is not None and all(
            old.shape == new.shape and not (old.requires_grad or new.requires_grad)
            for old, new in zip(self._buffers, state, strict=True)
        )
        if fits:
            for old, new in zip(self._buffers, state, strict=True):  # type: ignore[arg-type]
                if old is not new:  # else the backend has overwritten it
                    old.copy_(new)
        else:
            self._buffers = type(state)(*(x.clone() for x in state))
            if not torch.compiler.is_compiling():
                for x in self._buffers:
                    torch._dynamo.mark_static_address(x)
        self.state = self._buffers

    def _stock_length(self) -> int:
        return self.max_cache_len

    def get_seq_length(self) -> Any:
        """Return the number of tokens, as a tensor, so that its value causes no recompilation."""
        if not self.is_initialized:
            return 0
        return self.cumulative_length if self.window is None else self.cumulative_length_int

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the mask's length, constant where possible, and the position of its first key."""
        if self.window is None:
            return self.max_cache_len, 0
        past = self.cumulative_length_int
        if past + query_length <= self.window:
            return self.window, 0
        begin = max(past - self.window + 1, 0)
        return past + query_length - begin, begin

    def get_max_length(self) -> int:
        """Return the maximum length of the cache."""
        return self.max_cache_len

    def reset(self) -> None:
        """Remove the state and all tokens; the buffers are reused for the next state."""
        assert isinstance(self.cumulative_length, Tensor)
        self.cumulative_length.zero_()
        self.state, self.cumulative_length_int, self.past_padding = None, 0, None
        vars(self).pop("batch_size", None)

    def crop(self, tokens_to_remove: int) -> None:
        """Raise, as stock static layers do."""
        raise UnsupportedError("a static cache cannot remove tokens; use a DynamicCache")


class StateCache(Mixin, Base):  # type: ignore[misc]
    """Mixin of caches in which layers have states, whose layers may be created later."""

    recording = False  # whether past tokens may be removed: layers record them

    def activate_past_recording(self) -> None:
        """Let all layers record the calls that follow, also those that do not exist yet."""
        self.recording = True
        super().activate_past_recording()

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """Remove the last tokens from all layers, or from none if one raises."""
        with reset_on_error(self.layers):  # layers replace their tensors
            super().crop(*args, **kwargs)


def add_states(cache: Cache) -> None:
    """Prepare a cache for layers with states, before generation asks it to record past tokens."""
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    if not torch.compiler.is_compiling():
        cache.__class__ = subclass(StateCache, type(cache))


def cache_index(module: nn.Module, backend: AttentionBackend) -> int:
    """Return the index of a layer's entry in the cache."""
    index = getattr(module, "layer_idx", None)
    return index if isinstance(index, int) else backend.geometry.layer


def state_layer(cache: Cache, module: nn.Module, backend: AttentionBackend) -> StateLayer:
    """Return an attention module's entry of a cache as a :class:`StateLayer`.

    It replaces an empty stock layer.

    Raises:
        UnsupportedError: The cache has no such layer, or the backend cannot continue from its
            contents: keys and values, or another backend's state.
    """
    index = cache_index(module, backend)
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    while cache.layer_class_to_replicate is not None and len(cache.layers) <= index:
        cache.layers.append(cache.layer_class_to_replicate())
    while len(cache.layers) <= index:  # the last layers have the keys of others in a stock cache
        cache.layers.append(DynamicLayer())
    layer: Any = cache.layers[index]
    if not isinstance(layer, StateLayer):
        if (can := backend.capabilities).state_grows or can.state_keeps_keys:
            _refuse_growing_state(cache, layer, backend)
        layer = cache.layers[index] = _new_state_layer(layer, backend)
        add_states(cache)
        if getattr(cache, "recording", False):
            layer.activate_past_recording()
    elif layer.owner != (backend.name, backend.config):
        raise UnsupportedError(
            f"{backend.geometry.name}: the cache holds the state of backend {layer.owner[0]!r} "
            f"({layer.owner[1]}), from which {backend.name!r} ({backend.config}) cannot continue. "
            "Start with an empty cache"
        )
    replaced: StateLayer = layer
    replaced.update_pending = True
    return replaced


def _refuse_growing_state(cache: Cache, layer: Any, backend: AttentionBackend) -> None:
    """Raise if a cache is to be quantised or offloaded, and a state that grows would not be."""
    is_quantized = hasattr(layer, seam.QUANTIZE)
    asked = "quantized" if is_quantized else "offloaded" if cache.offloading else ""
    if asked:
        raise UnsupportedError(
            f"{backend.geometry.name}: the cache is {asked}, which the state of backend "
            f"{backend.name!r} cannot be, though it grows with the tokens. Use a DynamicCache "
            "(leave cache_implementation out), or a backend for this layer whose state has a fixed "
            "size, or keys ('flash')"
        )


def _new_state_layer(layer: Any, backend: AttentionBackend) -> StateLayer:
    """Return a state layer that replaces an empty stock layer."""
    if type(layer) is DynamicLayer and layer.keys is None:
        return StateLayer(backend)
    more = [name for name in seam.MORE_THAN_KEYS if hasattr(layer, name)]
    if more:
        raise UnsupportedError(
            f"{backend.geometry.name}: the cache uses a {type(layer).__name__} for this layer, "
            f"which holds more than keys and values ({', '.join(more)}), so the state of backend "
            f"{backend.name!r} cannot replace it. Call the model with use_cache=False, or give "
            "this layer an exact backend without a window"
        )
    window = getattr(layer, "sliding_window", None)
    has_keys = getattr(layer, "keys", None) is not None
    if has_keys and torch.compiler.is_exporting():
        raise UnsupportedError(
            f"{backend.geometry.name}: torch.export cannot trace a cache that backend "
            f"{backend.name!r} fills with a state. Export decoding with transformers' "
            "TorchExportableModuleForDecoderOnlyLM, whose cache holds the state from the start, or "
            "export the model with use_cache=False"
        )
    length = int(layer.get_seq_length()) if has_keys else 0
    if length > 0:
        raise UnsupportedError(
            f"{backend.geometry.name}: the cache already holds {length} tokens as keys and values "
            "(a prefix that PEFT trains, or a prompt from before the swap), from which backend "
            f"{backend.name!r}, which keeps a state, cannot continue. Start with an empty cache, "
            "or give the layer 'softmax' or 'flash' without a window"
        )
    if not isinstance(layer, StaticLayer):
        return StateLayer(backend, window)
    if layer.is_sliding:
        window = layer.max_cache_len
    return StaticStateLayer(backend, layer.max_cache_len, window)
