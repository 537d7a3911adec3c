"""States in the modules with which transformers exports decoding by ``torch.export``.

These modules have a static cache with buffers, which exist before a program is traced. A layer with
a state gets the buffers of its state here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, StaticLayer

from attnzoo.contract.backend import AttentionBackend
from attnzoo.errors import UnsupportedError
from attnzoo.hf.attention.call import layer_backend
from attnzoo.hf.cache.state_layer import State, StaticStateLayer, cache_index
from attnzoo.hf.layers import attention_layers
from attnzoo.hf.names import NAME


class ExportedStateLayer(StaticStateLayer):
    """A :class:`StaticStateLayer` that has a state before the first token: zeros.

    A program has one path for all tokens. At position 0 it starts from zeros, whatever its buffers
    hold of an earlier sequence; any other position must follow the tokens in the state.

    Args:
        backend: The backend of the layer.
        stock: The initialised layer of the cache, which this one replaces.
    """

    cumulative_length: Tensor  # type: ignore[assignment]  # set to the position of each call

    def __init__(self, backend: AttentionBackend, stock: StaticLayer) -> None:
        super().__init__(backend, stock.max_cache_len)
        assert stock.keys is not None
        assert stock.values is not None
        self.lazy_initialization(stock.keys, stock.values)
        state = backend.empty_state(stock.keys, stock.keys.shape[0])
        self._buffers = self.state = state
        self.tokens = torch.zeros_like(self.cumulative_length)  # in the state
        self.starts = self.tokens == 0  # whether the call begins at position 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Count the new tokens and return their keys and values; see :class:`StateLayer`."""
        self.starts = self.cumulative_length == 0
        torch._assert_async(
            self.starts | (self.cumulative_length == self.tokens),
            "cache_position must continue the tokens before it, or start at 0: a state of constant "
            "size cannot return to an earlier token",
        )
        new = super().update(key_states, value_states, *args, **kwargs)
        self.tokens.copy_(self.cumulative_length)
        return new

    def readable_state(self) -> State:
        """Return the state, or zeros at position 0."""
        assert self.state is not None
        return type(self.state)(*(x.masked_fill(self.starts, 0) for x in self.state))

    def named_buffers(self) -> dict[str, Tensor]:
        """Return the tensors that a program updates, by name."""
        assert self.state is not None
        state = {f"state_{name}": x for name, x in self.state._asdict().items()}
        return {"cumulative_length": self.cumulative_length, "state_tokens": self.tokens, **state}


def prepare_export(exported: Any, cache: Cache) -> None:
    """Replace layers of the static cache of an exported module by states, and their buffers."""
    model: nn.Module = exported.model
    for layer in attention_layers(model):
        backend, geometry = layer_backend(layer.module), layer.geometry
        config: Any = layer.module.config
        runs = backend is not None and config._attn_implementation == NAME
        if not runs or geometry.cross_attention or not geometry.causal:
            continue
        index = cache_index(layer.module, backend)
        if backend.keeps_all_keys or index >= len(cache.layers):
            continue
        if not backend.capabilities.zero_state:
            raise UnsupportedError(
                f"{layer.name}: backend {backend.name!r} cannot be exported with a cache: the size "
                "of its state changes with the tokens. Give this layer 'linear', 'gated_linear', "
                "'delta' or 'performer', or 'flash' without a window; or export the model without "
                "a cache (use_cache=False)"
            )
        stock: Any = cache.layers[index]
        state = ExportedStateLayer(backend, stock)
        cache.layers[index] = state
        for name in ("key_cache", "value_cache"):
            delattr(exported, f"{name}_{index}")
        for name, x in state.named_buffers().items():
            exported.register_buffer(f"{name}_{index}", x, persistent=False)
