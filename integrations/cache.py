"""A backend's state as one layer's entry in any transformers ``Cache``.

The attention function never sees the cache, so the entry is put in place before the attention layer
runs; it passes new keys and values through, and holds what the backend returned. Its size does not
grow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, EncoderDecoderCache, StaticLayer

from attnzoo.backends.base import AttentionBackend
from attnzoo.errors import UnsupportedError
from attnzoo.integrations import compat

State = Any  # a named tuple of tensors, batch first


class Step(NamedTuple):
    """The new tokens of one call, kept while a rollback may ask for them."""

    length: int
    advance: Callable[[State, int], State]  # (state before, tokens to take) -> state after them


class StateLayer(CacheLayerMixin):
    """Keeps a backend's state between decoding steps, where a stock layer keeps keys and values.

    Args:
        owner: The backend whose state this is; no other goes on from it.
        window: The sliding window of the stock layer it replaces. Masks are sized by one layer for
            all of its kind, so it reports the sizes which that layer would.
    """

    is_croppable = True
    supports_early_init = False

    def __init__(self, owner: AttentionBackend, window: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.owner = (owner.name, owner.config)
        self.window = window
        self.is_sliding = window is not None
        self.state: State | None = None
        self.seen: int | Tensor = 0
        self.awaited = False  # whether a swapped layer is about to call update
        self.record_past = False
        self._before: State | None = None  # the state before the recorded steps
        self._steps: list[Step] = []

    # -- what the attention layer calls ----------------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Note the batch; there is nothing to allocate before the backend has run.

        Models that ask the layer for its keys find that there are none.
        """
        self.keys = key_states.new_empty(*key_states.shape[:2], 0, key_states.shape[3])
        self.values = value_states.new_empty(*value_states.shape[:2], 0, value_states.shape[3])
        self.batch_size = key_states.shape[0]
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Count the new tokens and hand them on: the state stands for all earlier ones.

        Raises:
            UnsupportedError: The caller is a layer that counts on all earlier keys.
        """
        if not self.awaited:
            raise UnsupportedError(
                f"the cache holds the state of backend {self.owner[0]!r} and not the earlier keys, "
                "but the layer's attention has been changed since; start with an empty cache"
            )
        self.awaited = False
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.count(key_states.shape[-2])
        return key_states, value_states

    def count(self, tokens: int) -> None:
        """Note that more tokens were seen."""
        self.seen = self.seen + tokens

    def put(self, state: State, step: Step) -> None:
        """Store the state after a call, and what takes the call back while recording."""
        if self.record_past:
            if not self._steps:
                self._before = self.state
            self._steps.append(step)
        self.store(state)

    def store(self, state: State) -> None:
        """Make ``state`` the one that the next call goes on from, and hold nothing else."""
        self.state = type(state)(*(_alone(x) for x in state))

    # -- what generation calls -------------------------------------------------------------------

    def get_seq_length(self) -> Any:
        """Return how many tokens were seen."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many keys a mask has, and where they begin."""
        return _mask_sizes(int(self.seen), query_length, self.window)

    def get_max_length(self) -> int:
        """Return -1: a state has no longest sequence."""
        return -1

    def reset(self) -> None:
        """Forget everything."""
        self.state, self.seen = None, 0
        self._forget_steps()

    def offload(self) -> None:
        """Do nothing: a state is small and stays where it is."""

    def prefetch(self) -> None:
        """Do nothing: a state is small and stays where it is."""

    def _map(self, change: Callable[[Tensor], Tensor]) -> None:
        self._forget_steps()
        if self.state is not None:
            self.store(type(self.state)(*(change(x) for x in self.state)))
            self.batch_size = self.state[0].shape[0]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Follow beam search: row i goes on from row ``beam_idx[i]``."""
        self._map(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        self._map(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the given rows."""
        self._map(lambda x: x[indices])

    # -- taking tokens back (assisted decoding) --------------------------------------------------

    def activate_past_recording(self) -> None:
        """From now on remember the inputs of each call until the next :meth:`crop`."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Take the last tokens back: go over the recorded ones again, from the state before them.

        Raises:
            UnsupportedError: Tokens were not recorded; a sum cannot be undone without them.
        """
        if tokens_to_remove > 0:
            raise UnsupportedError(
                "crop takes the number of tokens to remove as a negative number, "
                f"got {tokens_to_remove}"
            )
        remove = -tokens_to_remove
        recorded = sum(step.length for step in self._steps)
        if remove > recorded:
            raise UnsupportedError(
                f"cannot take {remove} tokens back from a recurrent state: {recorded} are "
                "recorded. Call cache.activate_past_recording() before the tokens are seen, or "
                "start from an empty cache"
            )
        if remove:
            keep, state = recorded - remove, self._before
            for step in self._steps:
                taken = min(step.length, keep)
                if taken:
                    state = step.advance(state, taken)
                keep -= taken
            if state is None:
                self.state = None
            else:
                self.store(state)
            self.count(-remove)
        self._forget_steps()

    def _forget_steps(self) -> None:
        self._before, self._steps = None, []


class StaticStateLayer(StateLayer):
    """The same at fixed addresses, for compiled decoding: counter and state change in place.

    A sliding layer counts in a plain number too, as the stock one does for the sizes of its mask.
    """

    is_compileable = True
    is_croppable = False

    def __init__(
        self, owner: AttentionBackend, max_cache_len: int, window: int | None = None
    ) -> None:
        super().__init__(owner, window)
        self.max_cache_len = max_cache_len
        self.seen = torch.zeros((), dtype=torch.long)
        self.number_seen = 0
        self._places: State | None = None  # the tensors that every state is written to

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Note the batch and move the counter to the device."""
        super().lazy_initialization(key_states, value_states)
        assert isinstance(self.seen, Tensor)
        self.seen = self.seen.to(key_states.device)
        if not torch.compiler.is_compiling():
            torch._dynamo.mark_static_address(self.seen)

    def count(self, tokens: int) -> None:
        """Note in place that more tokens were seen."""
        assert isinstance(self.seen, Tensor)
        self.seen.add_(tokens)
        if self.window is not None:
            self.number_seen += tokens

    def store(self, state: State) -> None:
        """Write the state to the places that the first one fixed; new places if shapes changed."""
        fits = self._places is not None and all(
            old.shape == new.shape for old, new in zip(self._places, state, strict=True)
        )
        if fits:
            for old, new in zip(self._places, state, strict=True):  # type: ignore[arg-type]
                old.copy_(new)
        else:
            self._places = type(state)(*(x.clone() for x in state))
            if not torch.compiler.is_compiling():
                for x in self._places:
                    torch._dynamo.mark_static_address(x)
        self.state = self._places

    def get_seq_length(self) -> Any:
        """Return how many tokens were seen, as a tensor, so that counting does not recompile."""
        if not self.is_initialized:
            return 0
        return self.seen if self.window is None else self.number_seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the mask's length, fixed while it can be, and where it begins."""
        if self.window is None:
            return self.max_cache_len, 0
        if self.number_seen + query_length <= self.window:
            return self.window, 0
        return _mask_sizes(self.number_seen, query_length, self.window)

    def get_max_length(self) -> int:
        """Return the length that generation planned for."""
        return self.max_cache_len

    def reset(self) -> None:
        """Forget everything; the places stay, and the next state is written to them."""
        assert isinstance(self.seen, Tensor)
        self.seen.zero_()
        self.state, self.number_seen = None, 0

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse, as stock static layers do."""
        raise UnsupportedError("a static cache takes no tokens back; use a DynamicCache")


def _alone(x: Tensor) -> Tensor:
    """Return ``x``, copied if it is a part of something larger, such as the keys of a prompt."""
    if torch.compiler.is_compiling() or x.untyped_storage().nbytes() <= x.nbytes:
        return x
    return x.clone()


def _mask_sizes(seen: int, new: int, window: int | None) -> tuple[int, int]:
    """Return length and beginning of the keys that a stock layer shows to ``new`` queries."""
    begin = 0 if window is None else max(seen - window + 1, 0)
    return seen + new - begin, begin


def state_layer(cache: Cache, index: int, backend: AttentionBackend) -> StateLayer:
    """Return layer ``index`` of a cache as a :class:`StateLayer`, made if the stock one is empty.

    Raises:
        UnsupportedError: The layer holds what this backend cannot go on from: keys and values, or
            another backend's state.
    """
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    while cache.layer_class_to_replicate is not None and len(cache.layers) <= index:
        cache.layers.append(cache.layer_class_to_replicate())
    if index >= len(cache.layers):
        raise UnsupportedError(
            f"{backend.geometry.name}: the cache has {len(cache.layers)} layers and none for this "
            f"one, which takes its keys from another; the state of backend {backend.name!r} has no "
            "place. Call the model with use_cache=False, or give this layer an exact backend"
        )
    layer: Any = cache.layers[index]
    if not isinstance(layer, StateLayer):
        layer = cache.layers[index] = _replacement(layer, backend)
        if compat.is_recording(cache):
            layer.activate_past_recording()
    elif layer.owner != (backend.name, backend.config):
        raise UnsupportedError(
            f"{backend.geometry.name}: the cache holds the state of backend {layer.owner[0]!r} "
            f"({layer.owner[1]}), and {backend.name!r} ({backend.config}) cannot go on from it. "
            "Start with an empty cache"
        )
    made: StateLayer = layer
    made.awaited = True
    return made


def _replacement(layer: Any, backend: AttentionBackend) -> StateLayer:
    """Make the state's layer in the image of an empty stock one."""
    if hasattr(layer, "update_conv_state"):
        raise UnsupportedError(
            f"{backend.geometry.name}: the cache keeps a {type(layer).__name__} for this layer, "
            f"more than keys and values; the state of backend {backend.name!r} cannot take its "
            "place. Call the model with use_cache=False, or give this layer an exact backend"
        )
    seen = int(layer.get_seq_length()) if getattr(layer, "keys", None) is not None else 0
    if seen > 0:
        raise UnsupportedError(
            f"{backend.geometry.name}: the cache already holds {seen} tokens as keys and values, "
            f"from before the swap; backend {backend.name!r} cannot go on from them. Start with an "
            "empty cache"
        )
    window = getattr(layer, "sliding_window", None)
    if not isinstance(layer, StaticLayer):
        return StateLayer(backend, window)
    if layer.is_sliding:
        window = layer.max_cache_len
    return StaticStateLayer(backend, layer.max_cache_len, window)
