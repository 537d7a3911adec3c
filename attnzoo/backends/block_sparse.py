"""The block_sparse backend: softmax over a window, the first tokens and the best key blocks.

Other letters: N key blocks, I indexer heads, P size of index queries and keys.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from attnzoo.contract.backend import AttentionBackend, register
from attnzoo.contract.capabilities import Capabilities
from attnzoo.contract.config import BackendConfig, Geometry
from attnzoo.contract.inputs import AttentionInputs
from attnzoo.contract.states import AttentionOutput, ImplChoice
from attnzoo.errors import ConfigError, UntrainedWarning
from attnzoo.ops.block_sparse.api import run_block_sparse_attention
from attnzoo.ops.block_sparse.options import (
    IndexTensors,
    SelectionOptions,
    SparseCall,
    SparseOptions,
    selection_reasons,
)
from attnzoo.ops.flash.api import flash_attention
from attnzoo.runtime.kernel_calls import autocast_disabled

# -- the indexer ----------------------------------------------------------------------------------


ROTARY_BASE = 10000.0


class LightningIndexer(nn.Module):
    r"""Index queries, keys and head weights from the hidden states of a layer.

    Keys are normalised to mean 0 and variance 1. Queries and keys have rotary positions in the
    first half of their channels: the layer's own scores depend on distances, which hidden states
    do not contain. All is computed in float32 or wider, so that rounding does not select.

    Args:
        geometry: Shape of the layer.
        heads: I.
        head_dim: P, a multiple of 4.
    """

    def __init__(self, geometry: Geometry, heads: int, head_dim: int) -> None:
        super().__init__()
        # A layer without a hidden size is refused after it is built; until then 1 is a placeholder
        hidden = geometry.hidden_size or 1
        self.heads, self.head_dim = heads, head_dim
        self.query_weight = nn.Parameter(torch.empty(heads * head_dim, hidden))
        self.key_weight = nn.Parameter(torch.empty(head_dim, hidden))
        self.head_weight = nn.Parameter(torch.empty(heads, hidden))
        self._trained: bool | None = None  # None: unknown
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise so that all scores are zero, with a gradient for the weights of the heads."""
        hidden = self.query_weight.shape[1]
        nn.init.normal_(self.query_weight, std=hidden**-0.5)
        nn.init.normal_(self.key_weight, std=hidden**-0.5)
        nn.init.zeros_(self.head_weight)
        self._trained = None

    @property
    def is_trained(self) -> bool:
        """Whether scores are not all zero; read from the device until they are trained."""
        if not self._trained:
            self._trained = bool(self.head_weight.detach().any())
        return self._trained

    def forward(self, hidden_states: Tensor, positions: Tensor) -> IndexTensors:
        """Return the index tensors of some tokens.

        Args:
            hidden_states: ``[B, T, M]``.
            positions: Of the tokens in their sequences, ``[1 or B, T]``.
        """
        dtype = torch.promote_types(hidden_states.dtype, torch.float32)
        with autocast_disabled(hidden_states.device):
            x = hidden_states.to(dtype)
            queries, keys, weights = (
                F.linear(x, weight.to(dtype))
                for weight in (self.query_weight, self.key_weight, self.head_weight)
            )
            keys = F.layer_norm(keys, (self.head_dim,))
            queries = queries.unflatten(2, (self.heads, self.head_dim)).transpose(1, 2)
            q, k = (rotate(y, positions) for y in (queries, keys[:, None]))
            return IndexTensors(q, k, weights.transpose(1, 2) * self.head_dim**-0.5)


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Apply rotary positions ``[1 or B, T]`` to the first half of the channels of ``[B, I, T, P]``.

    Angles are computed in float32 or wider from positions of any size.
    """
    pairs = x.shape[3] // 4
    order = torch.arange(pairs, dtype=x.dtype, device=x.device)
    frequencies = ROTARY_BASE ** (-order / pairs)
    angles = positions[:, None, :, None].to(x.dtype) * frequencies
    cos, sin = angles.cos(), angles.sin()
    first, second, rest = x.split((pairs, pairs, x.shape[3] - 2 * pairs), 3)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], 3)


# -- the backend ----------------------------------------------------------------------------------


UNTRAINED = (
    "the indexer is not trained: all scores are 0, so every query selects the first blocks "
    "(train it with `attnzoo recover`, or take another score)"
)


@dataclass(frozen=True, kw_only=True)
class BlockSparseConfig(BackendConfig):
    """Settings of block-sparse attention (arXiv:2406.10774, arXiv:2503.16428).

    Attributes:
        window: w. A causal query attends to the w latest keys, its own included, another query to w
            keys on each side, and to the rest of the blocks in which these begin or end.
        num_sinks: Number of leading keys that every query attends to.
        top_k: Most key blocks that a query selects outside the window.
        block_size: Keys per block. Smaller blocks are more precise and have more summaries.
        query_block: Consecutive queries that share a selection. In a causal layer the first of them
            selects, which costs quality; otherwise their mean.
        score: How a block is scored. ``"moments"``: mean and variance of its keys, which estimate
            the logarithm of its weight. ``"mean"``: the mean key, for half the time. ``"bounds"``:
            Quest's upper bound of its scores. ``"indexer"``: a trained indexer
            (arXiv:2512.02556), which computes one selection for all heads from hidden states;
            ``attnzoo recover`` trains it.
        coverage: Select fewer blocks if these have this share of the estimated weight of all blocks
            outside the window. ``None`` means always ``top_k``.
        per_key_head: Whether query heads that share a key head share a selection. Decoding then
            reads fewer keys.
        index_heads: Heads of the indexer.
        index_head_dim: Size of the indexer's queries and keys, a multiple of 4.
        decoding: ``"sparse"``: a new token reads the selected blocks, as in one pass, and the
            cache has a summary of each block. ``"exact"``: a single new token attends to all
            cached keys; not with an indexer, nor under assisted decoding. A prompt in chunks
            (``prefill_chunk_size``) should not end with a chunk of one token, which counts as new.
    """

    ops: ClassVar[tuple[str, ...]] = ("block_sparse_attention", "block_sparse_step")
    smallest: ClassVar[Mapping[str, str]] = {
        "window": "1 token",
        "num_sinks": "0 tokens",
        "top_k": "0 blocks",
        "block_size": "1 token",
        "query_block": "1 token",
        "index_heads": "1 head",
        "index_head_dim": "4 channels",
    }
    largest: ClassVar[Mapping[str, int]] = {
        **BackendConfig.largest,
        "block_size": 2**12,  # the last block is padded
        "index_heads": 2**10,
        "index_head_dim": 2**10,
    }
    window: int = 32
    num_sinks: int = 4
    top_k: int = 12
    block_size: int = 8
    query_block: int = 1
    score: Literal["moments", "mean", "bounds", "indexer"] = "moments"
    coverage: float | None = None
    per_key_head: bool = False
    index_heads: int = 4
    index_head_dim: int = 32
    decoding: Literal["sparse", "exact"] = "sparse"

    def __post_init__(self) -> None:
        super().__post_init__()
        reasons = selection_reasons(self.selection)
        if self.index_head_dim % 4:
            reasons.append(
                f"index_head_dim must be a multiple of 4, got {self.index_head_dim}; half of the "
                "channels have rotary positions, in pairs"
            )
        if self.score != "indexer":
            defaults = BlockSparseConfig.default_options()
            reasons += [
                f"{name} needs score='indexer', got {name}={getattr(self, name)} with "
                f"score={self.score!r}; leave it out"
                for name in ("index_heads", "index_head_dim")
                if getattr(self, name) != defaults[name]
            ]
        if reasons:
            raise ConfigError(f"BlockSparseConfig.{'; '.join(reasons)}")

    @property
    def selection(self) -> SelectionOptions:
        """The options of the selection."""
        return SelectionOptions(self.score, self.coverage, self.per_key_head)


@register("block_sparse")
class BlockSparseBackend(AttentionBackend):
    """Softmax over a window, the first tokens and the key blocks with the best scores.

    Nothing is trained, unless ``score="indexer"``. The state of a causal layer contains all keys
    and values, and a summary of each finished block. A new token scores the summaries and reads the
    selected blocks.
    """

    config: BlockSparseConfig
    config_class = BlockSparseConfig
    capabilities = Capabilities(
        recurrent=True,
        state_keeps_keys=True,
        from_hidden_states="index keys",
        needs_full_sequences="it selects among the blocks of a whole row",
    )

    def __init__(self, config: BackendConfig, geometry: Geometry) -> None:
        super().__init__(config, geometry)
        self.indexer: LightningIndexer | None = None
        self.selection = self.config.selection
        names = ("window", "num_sinks", "top_k", "block_size", "query_block")
        sizes = {name: getattr(config, name) for name in names}
        self.options = {causal: SparseOptions(causal, **sizes) for causal in (False, True)}
        # Set by attention transfer, which trains the indexer: called with the inputs and the index
        # tensors instead of attention. The output has no gradient for the indexer.
        self.on_index: Callable[[AttentionInputs, IndexTensors], None] | None = None
        if self.config.score == "indexer":
            self.indexer = LightningIndexer(
                geometry, self.config.index_heads, self.config.index_head_dim
            )

    def reset_parameters(self) -> None:
        """Initialise the indexer, whose scores are 0 until it is trained."""
        if self.indexer is not None:
            self.indexer.reset_parameters()

    def layer_capabilities(self) -> Capabilities:
        """Return the capabilities of this score and this way of decoding."""
        indexed = self.config.score == "indexer"
        return replace(
            super().layer_capabilities(),
            needs_hidden_states=indexed,
            exact_steps=self.config.decoding == "exact",
            recurrent=self.config.decoding == "sparse",  # exact steps need a KV cache only
            # a block of queries selects by its first one
            state_from_keys=self.config.query_block == 1 and not indexed,
        )

    def layer_reasons(self) -> list[str]:
        """Return why this backend does not support its layer."""
        reasons, config = super().layer_reasons(), self.config
        if self.geometry.causal and config.decoding == "exact" and config.query_block > 1:
            reasons.append(
                f"query_block={config.query_block} with decoding='exact' is unsupported in a "
                "causal layer (a KV cache lacks the query that selected for the tokens after it; "
                "set decoding='sparse' or query_block=1)"
            )
        if self.geometry.causal and config.decoding == "exact" and config.score == "indexer":
            reasons.append(
                "score='indexer' with decoding='exact' is unsupported in a causal layer (a KV "
                "cache lacks the index keys from which later tokens select; set "
                "decoding='sparse', or take another score)"
            )
        if self.capabilities.needs_hidden_states and self.geometry.hidden_size is None:
            reasons.append(
                "the layer's hidden size is unknown, and score='indexer' needs hidden states (use "
                "score='moments')"
            )
        return reasons

    def unsupported_reasons(self, inputs: AttentionInputs) -> list[str]:
        """Return why this backend does not support a call."""
        reasons = super().unsupported_reasons(inputs)
        if not inputs.q.ndim == inputs.k.ndim == 4:
            return reasons
        length, keys = inputs.q.shape[2], inputs.k.shape[2]
        causal = self.causal_mask(inputs).causal
        if length > keys or (length < keys and not causal):
            reasons.append(
                f"{length} queries and {keys} keys are given without a causal mask "
                "(it needs equally many)"
            )
        has_state = inputs.state is not None or inputs.return_state
        if has_state and self.geometry.causal and not causal:
            reasons.append("a state is requested with a bidirectional mask")
        if has_state and not self.geometry.causal:
            reasons.append("a state is requested (only causal layers have one)")
        if torch.compiler.is_compiling() and has_state:
            reasons.append(
                "a state is requested under torch.compile (its size grows with the tokens; "
                "generate without torch.compile, or set use_cache=False)"
            )
        return reasons

    def attend(self, inputs: AttentionInputs) -> AttentionOutput:
        """Select blocks and attend to them."""
        config, (q, k, v), mask = self.config, inputs[:3], self.causal_mask(inputs)
        if self.capabilities.exact_steps and q.shape[2] == 1 and mask.causal:
            output = flash_attention(q, k, v, mask=mask, scale=inputs.scale, impl="sdpa")
            choice = ImplChoice("torch", "one token attends exactly to all cached keys, by SDPA")
            return output._replace(impl=choice)
        index = None if self.indexer is None else self._index(inputs)
        if self.on_index is not None and index is not None:
            self.on_index(inputs._replace(mask=mask), index)
            if not inputs.return_state:  # transfer replaces the output by softmax's
                return AttentionOutput(v.new_zeros(*q.shape[:3], v.shape[3]))
        call = SparseCall(
            *(q, k, v, None, None, None, None, inputs.scale),
            *(self.options[mask.causal], self.selection),
            return_state=inputs.return_state,
        )
        output = run_block_sparse_attention(call, mask, index, inputs.state, config.impl)
        return output if self.indexer is None else self._with_status(output)

    def _index(self, inputs: AttentionInputs) -> IndexTensors | None:
        """Return the index tensors of the new tokens; ``None`` without an indexer."""
        if self.indexer is None:
            return None
        assert inputs.hidden_states is not None
        padding, keys = inputs.mask.padding, inputs.k.shape[2]
        if padding is None:
            positions = torch.arange(keys, device=inputs.k.device)[None]
        else:
            positions = (padding.cumsum(1) - 1).clamp(min=0)
        if inputs.state is not None:
            positions = positions + inputs.state.length[:, None]
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.on_index is not None):
            index: IndexTensors = self.indexer(inputs.hidden_states, positions)
        return index

    def _with_status(self, output: AttentionOutput) -> AttentionOutput:
        """Warn and say why if the indexer is not trained."""
        if self.indexer is None or torch.compiler.is_compiling() or self.on_index is not None:
            return output
        weight = self.indexer.head_weight
        unknown = isinstance(weight, FakeTensor) or weight.is_meta  # memory counted, or offloaded
        if unknown or self.indexer.is_trained or output.impl is None:
            return output
        warnings.warn(f"block_sparse: {UNTRAINED}", UntrainedWarning, stacklevel=2)
        return output._replace(impl=ImplChoice(output.impl.impl, UNTRAINED))
