r"""The gates of the delta rule: decays per token or per key channel, and the gate of the output.

Decays are :math:`g = -e^a\, \mathrm{softplus}(y)` with a projection y of the hidden states, as in
Gated DeltaNet (where a is ``A_log`` and the bias of y is ``dt_bias``) and KDA.
Letters: B batch, H query heads, Hkv key heads, T tokens, F features of a key, E value size,
M hidden size, R rank.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnzoo.ops.features.functional import softplus_of_heads

# Initial decay of a token: the state keeps 1/e after 1 / INITIAL_RATE tokens
INITIAL_RATE = 1 / 512
RANK = 16  # of the projection from hidden states to channels


class ScalarGate(nn.Module):
    """One decay per token and key head (Gated DeltaNet, arXiv:2412.06464)."""

    no_weight_decay = ("log_rate",)

    def __init__(self, heads: int, features: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, hidden_size))
        self.bias = nn.Parameter(torch.empty(heads))
        self.log_rate = nn.Parameter(torch.empty(heads))

    def reset_parameters(self) -> None:
        """Initialise to the same long memory for every token."""
        nn.init.zeros_(self.weight)
        nn.init.constant_(self.bias, math.log(math.expm1(INITIAL_RATE)))
        nn.init.zeros_(self.log_rate)

    @torch.no_grad()
    def set_rates(self, rates: Tensor) -> None:
        """Let every token decay by ``exp(-rates)``, ``[Hkv]``."""
        self.reset_parameters()
        self.bias.copy_(rates.expm1().log())

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return log decays, ``[B, Hkv, T]``, from ``[B, T, M]`` in float32 or wider."""
        x = hidden_states
        logits = F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))
        step = softplus_of_heads(logits.unsqueeze(-1)).squeeze(-1)
        return -self.log_rate.to(x.dtype).exp()[:, None] * step


class VectorGate(nn.Module):
    """One decay per token and key channel, with a projection of rank 16 (KDA, arXiv:2510.26692)."""

    no_weight_decay = ("log_rate",)

    def __init__(self, heads: int, features: int, hidden_size: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.empty(RANK, hidden_size))
        self.up = nn.Parameter(torch.empty(heads * features, RANK))
        self.bias = nn.Parameter(torch.empty(heads, features))
        self.log_rate = nn.Parameter(torch.empty(heads))

    def reset_parameters(self) -> None:
        """Initialise to the same long memory for every token; ``down`` gives ``up`` a gradient."""
        nn.init.eye_(self.down)
        nn.init.zeros_(self.up)
        nn.init.constant_(self.bias, math.log(math.expm1(INITIAL_RATE)))
        nn.init.zeros_(self.log_rate)

    @torch.no_grad()
    def set_rates(self, rates: Tensor) -> None:
        """Let every channel decay by ``exp(-rates)`` at every token, ``[Hkv]``."""
        self.reset_parameters()
        self.bias.copy_(rates.expm1().log()[:, None].expand_as(self.bias))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return log decays, ``[B, Hkv, T, F]``, from ``[B, T, M]`` in float32 or wider."""
        x, heads = hidden_states, len(self.bias)
        low = F.linear(x, self.down.to(x.dtype))
        logits = F.linear(low, self.up.to(x.dtype), self.bias.to(x.dtype).flatten())
        step = softplus_of_heads(logits.unflatten(-1, (heads, -1)))
        return -self.log_rate.to(x.dtype).exp()[:, None, None] * step


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


GATES: dict[str, type[ScalarGate] | type[VectorGate]] = {"scalar": ScalarGate, "vector": VectorGate}
