"""Gates that decay the state: fixed ones, and ones computed from the hidden states.

Other letters: D features of a key, R rank.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnzoo.backends.gates.base import (
    GATE_BIAS,
    INITIAL_RATE,
    RANK,
    TEMPERATURE,
    Decay,
    Gate,
    init_identity,
    low_rank_projection,
    register_gate,
)
from attnzoo.contract.config import BackendConfig, Geometry
from attnzoo.ops.features.functional import softplus_of_heads
from attnzoo.runtime.kernel_calls import widen

# Initial decay of a token in the delta rule's gates: the state keeps 1/e after 512 tokens
DELTA_RATE = 1 / 512


@register_gate("retnet")
class RetNetGate(Gate):
    r"""RetNet (arXiv:2307.08621): :math:`g = \log(1 - 2^{-5-h})`, one fixed decay per key head.

    After 2^(5+h) tokens, 1/e of the state remains. No parameters; computed in every call, so that
    nothing is loaded or rounded to 16 bits.
    """

    def log_decay(self, k: Tensor, hidden_states: Tensor | None) -> Tensor:
        """Return the decays of all tokens, ``[Hkv]``."""
        head = torch.arange(k.shape[1], device=k.device, dtype=k.dtype)
        return torch.log1p(-torch.exp2(-5 - head))


def alibi_log_decay(
    heads: int, *, device: torch.device | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return the slopes of ALiBi as decays, ``[Hkv]``, which they are under the exponential.

    The paper's code uses another sequence if the number of heads is not a power of two.
    """
    head = torch.arange(1, heads + 1, device=device, dtype=dtype)
    return -torch.exp2(-8 * head / heads)


@register_gate("alibi")
class AlibiGate(Gate):
    r"""ALiBi (arXiv:2108.12409): :math:`g = -2^{-8h/H}`, one fixed decay per key head.

    It equals ALiBi's bias if the feature map's kernel is an exponential. The slopes are those of
    the key heads. No parameters.
    """

    def log_decay(self, k: Tensor, hidden_states: Tensor | None) -> Tensor:
        """Return the decays of all tokens, ``[Hkv]``."""
        return alibi_log_decay(k.shape[1], device=k.device, dtype=k.dtype)


@register_gate("gated_retention")
class GatedRetentionGate(Gate):
    r"""Gated retention (arXiv:2405.05254): :math:`g = \log \sigma(x w + b) / 16`.

    One learned decay per token and key head.
    """

    needs_hidden_states = True

    def __init__(self, config: BackendConfig, geometry: Geometry) -> None:
        super().__init__(config, geometry)
        heads = geometry.num_key_heads
        self.weight = nn.Parameter(torch.empty(heads, self.hidden_size))
        self.bias = nn.Parameter(torch.empty(heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise to the same long memory for every token."""
        nn.init.zeros_(self.weight)
        nn.init.constant_(self.bias, GATE_BIAS)

    def log_decay(self, k: Tensor, hidden_states: Tensor | None) -> Tensor:
        """Return one decay per token, ``[B, Hkv, S]``."""
        assert hidden_states is not None
        x = widen(hidden_states)
        logits = F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))
        return F.logsigmoid(logits).transpose(1, 2) / TEMPERATURE


class LowRankGate(Gate):
    """Base class of gates per key channel: a low-rank projection of the hidden states."""

    needs_hidden_states = True
    initial_bias: ClassVar[float] = GATE_BIAS

    def __init__(self, config: BackendConfig, geometry: Geometry) -> None:
        super().__init__(config, geometry)
        heads = geometry.num_key_heads
        self.down = nn.Parameter(torch.empty(RANK, self.hidden_size))
        self.up = nn.Parameter(torch.empty(heads * geometry.head_dim, RANK))
        self.bias = nn.Parameter(torch.empty(heads, geometry.head_dim))
        LowRankGate.reset_parameters(self)

    def reset_parameters(self) -> None:
        """Initialise to the same long memory for every token.

        ``up`` is zero, so ``down`` has no effect on the first output. ``down`` must not be zero
        too, because then neither would have a gradient.
        """
        init_identity(self.down)
        nn.init.zeros_(self.up)
        nn.init.constant_(self.bias, self.initial_bias)


@register_gate("gla")
class GLAGate(LowRankGate):
    r"""GLA (arXiv:2312.06635): :math:`g = \log \sigma(x W_1 W_2 + b) / 16`.

    One learned decay per token and key channel, with projections of rank 16.
    """

    def log_decay(self, k: Tensor, hidden_states: Tensor | None) -> Tensor:
        """Return one decay per token and feature, ``[B, Hkv, S, F]``."""
        assert hidden_states is not None
        logits = low_rank_projection(hidden_states, self.down, self.up, self.bias)
        return F.logsigmoid(logits) / TEMPERATURE


@register_gate("scalar")
class ScalarGate(Gate):
    r"""Gated DeltaNet (arXiv:2412.06464): :math:`g = -e^a\, \mathrm{softplus}(x w + b)`.

    One learned decay per token and key head; a is ``A_log`` and b ``dt_bias`` of Gated DeltaNet.
    """

    needs_hidden_states = True
    no_weight_decay = ("log_rate",)
    initial_rate: ClassVar[float] = DELTA_RATE

    def __init__(self, config: BackendConfig, geometry: Geometry) -> None:
        super().__init__(config, geometry)
        heads = geometry.num_key_heads
        self.weight = nn.Parameter(torch.empty(heads, self.hidden_size))
        self.bias = nn.Parameter(torch.empty(heads))
        self.log_rate = nn.Parameter(torch.empty(heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise to the same long memory for every token."""
        nn.init.zeros_(self.weight)
        nn.init.constant_(self.bias, math.log(math.expm1(self.initial_rate)))
        nn.init.zeros_(self.log_rate)

    def log_decay(self, k: Tensor, hidden_states: Tensor | None) -> Tensor:
        """Return one decay per token, ``[B, Hkv, S]``."""
        assert hidden_states is not None
        return mamba2_gate(hidden_states, self.weight, self.bias, self.log_rate)[0]


@register_gate("vector")
class VectorGate(LowRankGate):
    r"""KDA (arXiv:2510.26692): :math:`g = -e^a\, \mathrm{softplus}(x W_1 W_2 + b)`.

    One learned decay per token and key channel, with projections of rank 16 and one a per key head.
    """

    no_weight_decay = ("log_rate",)
    initial_bias = math.log(math.expm1(DELTA_RATE))

    def __init__(self, config: BackendConfig, geometry: Geometry) -> None:
        super().__init__(config, geometry)
        self.log_rate = nn.Parameter(torch.empty(geometry.num_key_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise to the same long memory for every token."""
        super().reset_parameters()
        nn.init.zeros_(self.log_rate)

    def log_decay(self, k: Tensor, hidden_states: Tensor | None) -> Tensor:
        """Return one decay per token and feature, ``[B, Hkv, S, F]``."""
        assert hidden_states is not None
        logits = low_rank_projection(hidden_states, self.down, self.up, self.bias)
        step = softplus_of_heads(logits.transpose(1, 2))
        return -self.log_rate.to(step.dtype).exp()[:, None, None] * step


def mamba2_gate(
    hidden_states: Tensor, weight: Tensor, bias: Tensor, log_rate: Tensor
) -> tuple[Tensor, Tensor]:
    r"""Return the decays :math:`-e^a \Delta` and steps :math:`\Delta` of Mamba-2, ``[B, Hkv, S]``.

    In the paper the step multiplies the value, which is the same without a normaliser.
    """
    x = widen(hidden_states)
    logits = F.linear(x, weight.to(x.dtype), bias.to(x.dtype))
    step = softplus_of_heads(logits.unsqueeze(-1)).squeeze(-1)
    return -log_rate.to(x.dtype).exp()[:, None] * step, step


@register_gate("mamba2")
class Mamba2Gate(ScalarGate):
    r"""Mamba-2 (arXiv:2405.21060): :math:`g = -e^a \Delta`.

    One learned decay per token and key head, with the step
    :math:`\Delta = \mathrm{softplus}(x w + b)`, by which the key is multiplied.
    """

    scales_keys = True
    expected_keys = 1  # a token enters the state with the weight that the state loses
    initial_rate = INITIAL_RATE

    def forward(self, k: Tensor, hidden_states: Tensor | None) -> Decay:
        """Return one log decay per token, ``[B, Hkv, S]``, and the steps that multiply the keys."""
        assert hidden_states is not None
        log_decay, step = mamba2_gate(hidden_states, self.weight, self.bias, self.log_rate)
        return Decay(log_decay, step.unsqueeze(-1))


@register_gate("hgrn2")
class HGRN2Gate(LowRankGate):
    r"""HGRN-2 (arXiv:2404.07904): :math:`g = \log f`, and keys are multiplied by 1 - f.

    One learned decay per token and key channel: :math:`f = l + (1 - l) \sigma(x W_1 W_2 + b)` with
    the lower bound :math:`l = \sigma(c)`. In HGRN-2, 1 - f is the key. A swapped layer has
    pretrained keys, so here 1 - f multiplies their features; if these are ones, this is HGRN-2.
    """

    scales_keys = True
    expected_keys = 1  # a token enters the state with the weight that the state loses
    no_weight_decay = ("bound",)

    initial_bias = math.log(0.5 / INITIAL_RATE - 1)  # with the initial bound of 1/2

    def __init__(self, config: BackendConfig, geometry: Geometry) -> None:
        super().__init__(config, geometry)
        self.bound = nn.Parameter(torch.empty(geometry.num_key_heads, geometry.head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise to the same long memory for every token, and a lower bound of 1/2."""
        super().reset_parameters()
        nn.init.zeros_(self.bound)

    def forward(self, k: Tensor, hidden_states: Tensor | None) -> Decay:
        """Return log f, and 1 - f, which multiplies the keys, ``[B, Hkv, S, F]`` each."""
        assert hidden_states is not None
        logits = low_rank_projection(hidden_states, self.down, self.up, self.bias)
        one_minus_bound = torch.sigmoid(-self.bound.to(logits.dtype)).unsqueeze(1)
        # 1 - f as a product of sigmoids does not cancel where f is nearly 1. The clamp keeps the
        # gradient of the logarithm finite.
        largest = 1 - torch.finfo(logits.dtype).eps
        key = (one_minus_bound * torch.sigmoid(-logits)).clamp(max=largest)
        return Decay(torch.log1p(-key), key)
