"""A backend's state as one layer's entry in any transformers ``Cache``.

The attention function never sees the cache, so the entry is put in place before the attention layer runs; it
passes new keys and values through, and holds what the backend returned. Its size does not grow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, EncoderDecoderCache, StaticLayer

from attnzoo.errors import UnsupportedError

State = Any  # a named tuple of tensors, batch first


class Step(NamedTuple):
    """The new tokens of one call, kept while a rollback may ask for them."""

    length: int
    advance: Callable[[State, int], State]  # state before the call, tokens to take -> state after them


class StateLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keeps a backend's state between decoding steps, where a stock layer keeps keys and values."""

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.state: State | None = None
        self.seen: int | Tensor = 0
        self.record_past = False
        self._before: State | None = None  # the state before the recorded steps
        self._steps: list[Step] = []

    # -- what the attention layer calls ----------------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Note the batch; there is nothing to allocate before the backend has run."""
        self.batch_size = key_states.shape[0]
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Count the new tokens and hand them on: the state stands for all earlier ones."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.seen = self.seen + key_states.shape[-2]
        return key_states, value_states

    def put(self, state: State, step: Step) -> None:
        """Store the state after a call, and what is needed to take the call back while recording."""
        if self.record_past:
            if not self._steps:
                self._before = self.state
            self._steps.append(step)
        self.state = state

    # -- what generation calls -------------------------------------------------------------------

    def get_seq_length(self) -> Any:
        """Return how many tokens were seen."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[Any, int]:
        """Return the length of the mask over all tokens, and where it begins."""
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        """Return -1: a state has no longest sequence."""
        return -1

    def reset(self) -> None:
        """Forget everything."""
        self.state, self.seen, self._before, self._steps = None, 0, None, []

    def offload(self) -> None:
        """Do nothing: a state is small and stays where it is."""

    def prefetch(self) -> None:
        """Do nothing: a state is small and stays where it is."""

    def _map(self, change: Callable[[Tensor], Tensor]) -> None:
        self._forget_steps()
        if self.state is not None:
            self.state = type(self.state)(*(change(x) for x in self.state))
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
        """Take the last tokens back, by going over the recorded ones again from the state before them.

        Raises:
            UnsupportedError: Tokens were not recorded; a sum cannot be undone without them.
        """
        if tokens_to_remove > 0:
            raise UnsupportedError(
                f"crop takes the number of tokens to remove as a negative number, got {tokens_to_remove}"
            )
        remove = -tokens_to_remove
        recorded = sum(step.length for step in self._steps)
        if remove > recorded:
            raise UnsupportedError(
                f"cannot take {remove} tokens back from a recurrent state: {recorded} are recorded. Call "
                "cache.activate_past_recording() before the tokens are seen, or start from an empty cache"
            )
        if remove:
            keep, state = recorded - remove, self._before
            for step in self._steps:
                taken = min(step.length, keep)
                if taken:
                    state = step.advance(state, taken)
                keep -= taken
            self.state = state
            self.seen = self.seen - remove
        self._forget_steps()

    def _forget_steps(self) -> None:
        self._before, self._steps = None, []


class StaticStateLayer(StateLayer):
    """The same with fixed addresses, for compiled decoding: counter and state are changed in place."""

    is_compileable = True
    is_croppable = False

    def __init__(self, max_cache_len: int) -> None:
        super().__init__()
        self.max_cache_len = max_cache_len
        self.seen = torch.zeros((), dtype=torch.long)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Note the batch and move the counter to the device."""
        super().lazy_initialization(key_states, value_states)
        assert isinstance(self.seen, Tensor)
        self.seen = self.seen.to(key_states.device)
        if not torch.compiler.is_compiling():
            torch._dynamo.mark_static_address(self.seen)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Count the new tokens in place and hand them on."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert isinstance(self.seen, Tensor)
        self.seen.add_(key_states.shape[-2])
        return key_states, value_states

    def put(self, state: State, step: Step) -> None:
        """Store the state at the addresses that the first call fixed."""
        same = self.state is not None and all(
            old.shape == new.shape for old, new in zip(self.state, state, strict=True)
        )
        if same:
            for old, new in zip(self.state, state, strict=True):  # type: ignore[arg-type]
                old.copy_(new)
            return
        self.state = type(state)(*(x.clone() for x in state))
        if not torch.compiler.is_compiling():
            for x in self.state:
                torch._dynamo.mark_static_address(x)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the mask's fixed length, and where it begins."""
        return self.max_cache_len, 0

    def get_seq_length(self) -> Any:
        """Return how many tokens were seen, as a tensor, so that counting does not recompile."""
        return self.seen if self.is_initialized else 0

    def get_max_length(self) -> int:
        """Return the length that generation planned for."""
        return self.max_cache_len

    def reset(self) -> None:
        """Forget everything, in place."""
        assert isinstance(self.seen, Tensor)
        self.seen.zero_()
        for x in self.state or ():
            x.zero_()


def state_layer(cache: Cache, index: int, name: str) -> StateLayer:
    """Return layer ``index`` of a cache as a :class:`StateLayer`, put there in place of an empty stock layer.

    Raises:
        UnsupportedError: The stock layer already holds keys, which a state cannot be made from.
    """
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    while cache.layer_class_to_replicate is not None and len(cache.layers) <= index:
        cache.layers.append(cache.layer_class_to_replicate())
    layer = cache.layers[index]
    if isinstance(layer, StateLayer):
        return layer
    if layer.is_initialized and int(layer.get_seq_length()) > 0:
        raise UnsupportedError(
            f"{name}: the cache already holds {int(layer.get_seq_length())} tokens as keys and values, from before "
            "the swap; a state cannot go on from them. Start with an empty cache"
        )
    static = isinstance(layer, StaticLayer)
    made = StaticStateLayer(layer.max_cache_len) if static else StateLayer()
    if getattr(layer, "record_past", False):
        made.activate_past_recording()
    cache.layers[index] = made
    return made
