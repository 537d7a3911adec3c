"""Projections of hidden states to gates, and their initial values.

Other letters: D features of a key, R rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from attnzoo.ops.features.functional import widen

# Learned gates are the 16th root of a sigmoid, so that the memory is hundreds of tokens long while
# the gradient of the sigmoid is not small (arXiv:2312.06635; arXiv:2405.05254).
TEMPERATURE = 16.0

# Initial bias of learned gates: log sigmoid(2) / 16 = -0.0079, so a token keeps 99.2% of the state,
# and 1/e remains after 126 tokens. A larger bias gives a longer memory, but a smaller gradient to
# learn forgetting from (here 12% of an open gate's). On the embedded model (hedgehog, only extras
# trained, 80 steps of Adam), initial biases of 0, 2 and 5 went from 4.08, 4.37 and 4.40 bits per
# byte to 1.71, 1.77 and 1.84; but 0 is a memory of 23 tokens, beyond which gradients nearly vanish.
GATE_BIAS = 2.0

# The initial decay rate per token, for gates with another parametrisation
INITIAL_RATE = math.log1p(math.exp(-GATE_BIAS)) / TEMPERATURE

RANK = 16  # of the projection from hidden states to channels (arXiv:2312.06635)


def init_identity(x: Tensor) -> None:
    """Initialise a matrix to the identity; a model that is built without memory has no values."""
    if not x.is_meta:  # where torch.eye fails if the default device is another one
        nn.init.eye_(x)


def low_rank_projection(
    hidden_states: Tensor,
    down: Tensor,
    up: Tensor,
    bias: Tensor,
    *,
    activation: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return :math:`x W_1 W_2 + b` of each head, ``[B, Hkv, S, D]``, float32 or wider.

    Args:
        hidden_states: x, ``[B, S, M]``.
        down: W1 transposed, ``[R, M]``.
        up: W2 transposed, one block per head, ``[Hkv * D, R]``.
        bias: b of each head, ``[Hkv, D]``.
        activation: Applied to :math:`x W_1`.
    """
    x = widen(hidden_states)
    inner = F.linear(x, down.to(x.dtype))
    inner = inner if activation is None else activation(inner)
    logits = F.linear(inner, up.to(x.dtype), bias.flatten().to(x.dtype))
    return logits.view(*x.shape[:2], *bias.shape).transpose(1, 2)
