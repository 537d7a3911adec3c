"""The projections of global tokens, which Longformer learns apart from those of the layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attnzoo.contract.config import Geometry
from attnzoo.contract.padding import gather_tokens
from attnzoo.ops.window.pattern import global_indices


class GlobalProjections(nn.Module):
    """Added to the queries, keys and values of global attention; zero at first.

    The sum of a layer's projection ``W x`` and of a learned ``D x`` can become any projection
    ``(W + D) x``.
    """

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        assert geometry.hidden_size is not None
        assert geometry.value_dim is not None
        heads, key_heads = geometry.num_heads, geometry.num_key_heads
        self.query = nn.Linear(geometry.hidden_size, heads * geometry.head_dim)
        # A bias of the key would add the same number to all scores of a query: no effect.
        self.key = nn.Linear(geometry.hidden_size, key_heads * geometry.head_dim, bias=False)
        self.value = nn.Linear(geometry.hidden_size, key_heads * geometry.value_dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set all parameters to zero, which makes global attention use the layer's projections."""
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(
        self,
        qkv: tuple[Tensor, Tensor, Tensor],
        hidden: Tensor,
        is_global: Tensor,
        max_count: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values for the rows of global tokens.

        Args:
            qkv: The layer's queries ``[B, H, T, D]``, keys and values.
            hidden: Hidden states, ``[B, T, M]``.
            is_global: Which tokens are global, ``[B, T]`` bool; other queries do not change.
            max_count: Bound on their number in a row.
        """
        q, k, v = qkv
        hidden = hidden.to(self.query.weight.dtype)
        indices = global_indices(is_global, max_count)
        if indices is not None:
            index = indices.positions.expand(q.shape[0], -1)
            rows = hidden.gather(1, index[:, :, None].expand(-1, -1, hidden.shape[2]))
            found = gather_tokens(q, index) + _split_heads(self.query(rows), q)
            q = q.scatter(2, index[:, None, :, None].expand_as(found), found)
        k, v = (
            x + _split_heads(projection(hidden), x)
            for x, projection in ((k, self.key), (v, self.value))
        )
        return q, k, v

    def zero(self) -> Tensor:
        """Return 0 with a gradient path to every parameter, which DDP needs in every step."""
        return 0 * torch.stack([parameter.sum() for parameter in self.parameters()]).sum()


def _split_heads(x: Tensor, like: Tensor) -> Tensor:
    """Return ``[B, T, H D]`` as ``[B, H, T, D]``, in the dtype of ``like``."""
    return x.view(*x.shape[:2], like.shape[1], -1).transpose(1, 2).to(like.dtype)
