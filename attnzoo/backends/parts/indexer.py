r"""A trained indexer: it projects hidden states to the index tensors that select key blocks.

Source: the lightning indexer of DeepSeek-AI, 2025, arXiv:2512.02556. Other letters: I indexer
heads, P size of index queries and keys.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnzoo.contract.config import Geometry
from attnzoo.ops.block_sparse.options import IndexTensors
from attnzoo.runtime.kernel_calls import autocast_disabled

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
