"""The gate of a state's output.

Letters: B batch, H query heads, T tokens, E value size, M hidden size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class OutputGate(nn.Module):
    r"""The gate of the state's output, :math:`2\,\sigma(x W_1 W_2 + b)` with rank E.

    KDA (arXiv:2510.26692) multiplies by :math:`\sigma(x W_1 W_2 + b)` after a normalisation of the
    output. A pretrained layer's output has a length, so there is no normalisation here.
    """

    def __init__(self, heads: int, value_dim: int, hidden_size: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.empty(value_dim, hidden_size))
        self.up = nn.Parameter(torch.empty(heads * value_dim, value_dim))
        self.bias = nn.Parameter(torch.empty(heads, value_dim))

    def reset_parameters(self) -> None:
        """Initialise to 1 for every token; ``down`` gives ``up`` a gradient."""
        nn.init.eye_(self.down)
        nn.init.zeros_(self.up)
        nn.init.zeros_(self.bias)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return factors, ``[B, H, T, E]``, from ``[B, T, M]`` in float32 or wider."""
        x, heads = hidden_states, len(self.bias)
        low = F.linear(x, self.down.to(x.dtype))
        logits = F.linear(low, self.up.to(x.dtype), self.bias.to(x.dtype).flatten())
        factors: Tensor = 2 * logits.sigmoid().unflatten(-1, (heads, -1)).transpose(1, 2)
        return factors
