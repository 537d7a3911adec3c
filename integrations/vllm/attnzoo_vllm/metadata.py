"""What all layers of a kind read of one step of the engine, computed once for the step.

Nothing here waits for a device: lengths come from vLLM's copies on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.linear_attn import (
    LinearAttentionBackend,
    LinearAttentionMetadata,
    LinearAttentionMetadataBuilder,
)

from attnzoo.contract.sequences import Sequences


def lengths_of(common: CommonAttentionMetadata) -> Tensor:
    """Return the number of tokens of each request after the step, on the CPU."""
    bound = common.seq_lens_cpu_upper_bound  # exact without speculative decoding
    return common.seq_lens.cpu() if bound is None else bound


@dataclass
class Prefill:
    """The requests with more than one new token, whose tokens are one row."""

    slots: Tensor  # [S] int64, the page of each
    sequences: Sequences
    continues: Tensor | None  # [S] bool, which have earlier tokens; None: none


@dataclass
class StateMetadata(LinearAttentionMetadata):
    """vLLM's metadata, and what backends take; requests with one new token come first."""

    slots: Tensor  # [num_decodes] int64, the page of each request with one token; -1: padding
    prefill: Prefill | None


class StateMetadataBuilder(LinearAttentionMetadataBuilder):
    """Builds the metadata, and clears the pages of requests that begin with one token."""

    # The op runs between CUDA graphs: untested inside of them
    _cudagraph_support = AttentionCGSupport.NEVER

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> StateMetadata:
        """Return the metadata of one step."""
        common = common_attn_metadata
        step = super().build(common_prefix_len, common, fast_build)
        decodes, pages = step.num_decodes, step.state_indices_tensor.to(torch.int64)
        starts = common.query_start_loc_cpu
        counts = starts.diff()
        is_new = lengths_of(common)[: len(counts)] <= counts
        if begin := is_new[:decodes].nonzero()[:, 0].tolist():
            self.clear(pages[begin])
        slots = torch.where(step.seq_lens[:decodes] > 0, pages[:decodes], -1)
        return StateMetadata(
            **vars(step), slots=slots, prefill=self.prefill(step, pages, counts, is_new)
        )

    def prefill(
        self, step: LinearAttentionMetadata, pages: Tensor, counts: Tensor, is_new: Tensor
    ) -> Prefill | None:
        """Return the requests with several tokens, ``None`` if there are none."""
        if not step.num_prefills:
            return None
        first = step.num_decodes
        starts = step.query_start_loc[first:].to(torch.int64) - step.num_decode_tokens
        longest = int(counts[first:].max())
        sequences = Sequences(starts[:-1], starts.diff(), longest)
        old = ~is_new[first:]
        continues = old.to(pages.device, non_blocking=True) if bool(old.any()) else None
        return Prefill(pages[first:], sequences, continues)

    def clear(self, pages: Tensor) -> None:
        """Set the states of some pages to those of no tokens."""
        for name in self.layer_names:
            (pool,) = self.vllm_config.compilation_config.static_forward_context[name].kv_cache
            pool[pages] = 0


class StateBackend(LinearAttentionBackend):
    """The name under which vLLM finds the builder."""

    @staticmethod
    def get_builder_cls() -> type[StateMetadataBuilder]:
        """Return the builder."""
        return StateMetadataBuilder


class KeysMetadataBuilder(AttentionMetadataBuilder[CommonAttentionMetadata]):
    """Passes vLLM's metadata to layers that read all keys."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], *args: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, *args)  # abstract there

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> CommonAttentionMetadata:
        """Return the metadata of one step as they are."""
        return common_attn_metadata


class KeysBackend(AttentionBackend):
    """The name under which vLLM finds the builder."""

    @staticmethod
    def get_name() -> str:
        """Return the name."""
        return "ATTNZOO_KEYS"

    @staticmethod
    def get_builder_cls() -> type[KeysMetadataBuilder]:
        """Return the builder."""
        return KeysMetadataBuilder
