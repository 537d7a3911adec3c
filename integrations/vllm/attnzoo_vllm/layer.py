"""Attention layers of attnzoo under vLLM: with a state, or with the keys of all tokens.

The memory of a state is one page of vLLM's cache for each request. A page holds the tensors of the
state one after another, the widest type first, and is one tensor for vLLM, which copies, shares and
frees pages without knowing what they hold. Keys and values are in pages of a number of tokens, as
those of vLLM's own attention.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.utils.torch_utils import direct_register_custom_op
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec

from attnzoo.contract.backend import AttentionBackend
from attnzoo.contract.inputs import AttentionInputs
from attnzoo.contract.masks import PLAIN, AttentionMask
from attnzoo.contract.states import keep_pool
from attnzoo_vllm.config import STATE_BACKEND
from attnzoo_vllm.metadata import KeysBackend, Prefill, lengths_of

WORD = torch.int64  # pages are counted in elements of the widest type


def build_again(backend: AttentionBackend, dtype: torch.dtype, device: Any) -> AttentionBackend:
    """Return a backend with memory and initial values from one that may have been built without."""
    with torch.device(device):
        again = type(backend)(backend.config, backend.geometry).to(dtype).eval()
    again.fixed_state_size = True  # a page has the whole window
    return again


class Layer(nn.Module):
    """Runs a backend on the requests of a step.

    Args:
        backend: The backend, a submodule of the model already.
        prefix: vLLM's name of the layer.
        dtype: Of queries, keys and values.
        scale: Of query-key products, as the module passes it; its attributes may say another one.
    """

    def __init__(
        self, backend: AttentionBackend, prefix: str, dtype: torch.dtype, scale: float
    ) -> None:
        super().__init__()
        vars(self)["backend"] = backend  # not a submodule twice
        self.prefix, self.dtype, self.scale = prefix, dtype, scale
        self.value_dim = backend.geometry.value_dim or backend.geometry.head_dim
        self.layers = get_current_vllm_config().compilation_config.static_forward_context
        if prefix in self.layers:
            raise ValueError(f"two layers are called {prefix!r}")
        self.layers[prefix] = self

    def forward(self, q: Tensor, k: Tensor, v: Tensor, hidden_states: Tensor | None) -> Tensor:
        """Return the output of the new tokens of all requests, ``[1, T, H, E]``.

        The queries, keys and values are ``[1, H or Hkv, T, D or E]``; hidden states ``[1, T, M]``.
        """
        out = q.new_zeros(1, q.shape[2], q.shape[1], self.value_dim)
        torch.ops.vllm.attnzoo_layer(q, k, v, hidden_states, out, self.prefix)
        return out

    def step(self) -> Any:
        """Return the metadata of a step, ``None`` where vLLM measures memory, without pages."""
        return (get_forward_context().attn_metadata or {}).get(self.prefix)


class StateLayer(Layer, MambaBase):
    """Runs a backend with a state."""

    def __init__(
        self, backend: AttentionBackend, prefix: str, dtype: torch.dtype, scale: float
    ) -> None:
        super().__init__(backend, prefix, dtype, scale)
        backend.fixed_state_size = True
        with torch.device("cpu"):
            state = build_again(backend, dtype, "cpu").empty_state(torch.empty(0, dtype=dtype))
        self.state_class = type(state)
        self.fields = [(x.shape[1:], x.dtype) for x in state]
        self.words = -(-sum(x.nbytes for x in state) // WORD.itemsize)  # rounded up
        self.pool = None

    # -- memory ----------------------------------------------------------------------------------

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        """Return the shape of a page: that of the largest state, so that vLLM pools all layers."""
        return page_shapes(self.layers)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        """Return the type in which a page is counted."""
        return (WORD,)

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        """The backend of vLLM that builds the metadata."""
        return MambaAttentionBackendEnum[STATE_BACKEND]

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        """Take the pages, and view them as a pool of states."""
        super().bind_kv_cache(kv_cache)
        (words,) = self.kv_cache
        views, begin = {}, 0  # in bytes
        for i in sorted(range(len(self.fields)), key=lambda i: -self.fields[i][1].itemsize):
            shape, dtype = self.fields[i]
            first, count = begin // dtype.itemsize, prod(shape)
            views[i] = words.view(dtype)[:, first : first + count].view(-1, *shape)
            begin += count * dtype.itemsize
        self.pool = self.state_class(*(views[i] for i in range(len(views))))

    # -- computation -----------------------------------------------------------------------------

    def run(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor | None, out: Tensor) -> None:
        """Compute ``out`` and the states after the step; see :meth:`forward`."""
        if (step := self.step()) is None:
            return
        tokens = step.num_decode_tokens
        if tokens:
            self.decode(q, k, v, x, out, step.slots)
        if step.prefill is not None:
            end = tokens + step.num_prefill_tokens
            row = [y[:, :, tokens:end] for y in (q, k, v)]
            hidden = None if x is None else x[:, tokens:end]
            options = {"state": self.read(step.prefill), "sequences": step.prefill.sequences}
            options["scale"] = self.scale
            found = self.backend(*row, hidden_states=hidden, return_state=True, **options)
            out[:, tokens:end] = found.out.transpose(1, 2)
            for page, state in zip(self.pool, found.state, strict=True):
                page.index_copy_(0, step.prefill.slots, state.to(page.dtype))

    def decode(
        self, q: Tensor, k: Tensor, v: Tensor, x: Tensor | None, out: Tensor, slots: Tensor
    ) -> None:
        """Compute the requests with one new token, which come first.

        Nothing is checked here, as the arguments come from vLLM: in a small model, the checks of
        ``forward`` would take a tenth of the time of a layer.
        """
        tokens = len(slots)
        if tokens != q.shape[2]:
            q, k, v, out = q[:, :, :tokens], k[:, :, :tokens], v[:, :, :tokens], out[:, :tokens]
            x = None if x is None else x[:, :tokens]
        rows = [y.transpose(0, 2) for y in (q, k, v)]  # [tokens, H, 1, D]
        inputs = AttentionInputs(
            *(*rows, PLAIN[True], self.scale, self.pool, None if x is None else x.transpose(0, 1)),
            return_state=True,
            slots=slots,
            reuse_state=True,
        )
        found = keep_pool(self.pool, slots, self.backend.attend(inputs))
        out.view_as(found.out).copy_(found.out)

    def read(self, prefill: Prefill) -> Any:
        """Return the states before the tokens of a step, ``None`` if all requests begin."""
        keep = prefill.continues
        if keep is None:
            return None
        states = (x[prefill.slots] for x in self.pool)
        return self.state_class(
            *(torch.where(keep.view(-1, *(1,) * (x.dim() - 1)), x, 0) for x in states)
        )


class KeysLayer(Layer, AttentionLayerBase):
    """Runs a backend that reads the keys and values of all tokens of a request."""

    def get_attn_backend(self) -> type[KeysBackend]:
        """Return the backend of vLLM that builds the metadata."""
        return KeysBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> FullAttentionSpec:
        """Return what vLLM keeps of a token: its keys and values."""
        geometry, cache = self.backend.geometry, vllm_config.cache_config
        if cache.cache_dtype not in ("auto", str(self.dtype).removeprefix("torch.")):
            raise ValueError(
                f"{self.prefix}: backend {self.backend.name!r} reads keys and values of "
                f"{self.dtype}, not {cache.cache_dtype}; leave out --kv-cache-dtype"
            )
        return FullAttentionSpec(
            block_size=cache.block_size,
            num_kv_heads=geometry.num_key_heads,
            head_size=geometry.head_dim,
            head_size_v=self.value_dim,
            dtype=self.dtype,
        )

    def run(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor | None, out: Tensor) -> None:
        """Store the new keys and values, and compute ``out``; see :meth:`forward`."""
        if (step := self.step()) is None:
            return
        pages, size = self.kv_cache, self.kv_cache.shape[2]  # [pages, Hkv, tokens, D + E]
        starts, lengths = step.query_start_loc_cpu.tolist(), lengths_of(step).tolist()
        slots = step.slot_mapping[: starts[-1]].to(torch.int64)
        new = torch.cat([k, v], -1)[0, :, : len(slots)].transpose(0, 1)
        pages[slots // size, :, slots % size] = new
        requests = zip(starts, starts[1:], lengths, step.block_table_tensor, strict=False)
        for begin, end, length, table in requests:
            if begin == end:
                continue
            rows = pages[table[: -(-length // size)]].transpose(0, 1).flatten(1, 2)
            keys, values = rows[None, :, :length].split([k.shape[-1], v.shape[-1]], -1)
            mask = AttentionMask(causal=True, q_offset=length - (end - begin))
            found = self.backend(q[:, :, begin:end], keys, values, mask=mask, scale=self.scale)
            out[:, begin:end] = found.out.transpose(1, 2)


def page_shapes(layers: dict[str, Any]) -> tuple[tuple[int, ...], ...]:
    """Return the shape of the one tensor of a page from all layers with a cache, by name."""
    return ((max(x.words for x in layers.values() if isinstance(x, StateLayer)),),)


def attnzoo_layer(
    q: Tensor, k: Tensor, v: Tensor, hidden_states: Tensor | None, out: Tensor, layer_name: str
) -> None:
    """Run a layer of attnzoo; vLLM splits its graphs at this op."""
    layer = get_forward_context().no_compile_layers[layer_name]
    layer.run(q, k, v, hidden_states, out)


direct_register_custom_op(op_name="attnzoo_layer", op_func=attnzoo_layer, mutates_args=["out"])
