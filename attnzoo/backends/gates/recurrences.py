"""Gates with a recurrence of their own: RWKV-6, mLSTM, the full-matrix gate and Mamba.

Letters: B batch, H heads, Hkv key heads, S tokens, F features of a key, E value size, M hidden
size, R rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnzoo.backends.gates.base import (
    GATE_BIAS,
    INITIAL_RATE,
    RANK,
    Attend,
    LearnedGate,
    LowRankGate,
    register_gate,
)
from attnzoo.backends.gates.functional import TEMPERATURE, rwkv6_log_decay
from attnzoo.contract.config import BackendConfig, Geometry
from attnzoo.contract.inputs import AttentionInputs
from attnzoo.contract.states import AttentionOutput
from attnzoo.ops.features.functional import softplus_of_heads, widen
from attnzoo.ops.gated import api as op

LogDecay = Callable[[int, int], Tensor]  # of the tokens from start to stop


@register_gate("rwkv6")
class RWKV6Gate(LowRankGate):
    r"""RWKV-6 (arXiv:2404.05892): :math:`g = -\exp(\tanh(x W_1) W_2 + b)`, with a bonus u.

    One learned decay per token and key channel. A query reads the state before its own token
    enters it, and that token's key is multiplied by :math:`u = e^c`. RWKV-6 has u of any sign; the
    exponential keeps normalised outputs a weighted mean. RWKV's token shift is part of the
    projections, which a swap does not change.
    """

    only_decays = False
    no_weight_decay = ("log_bonus",)
    ops = ("rwkv6_attention", "rwkv6_step")
    initial_bias = math.log(INITIAL_RATE)

    def __init__(self, config: BackendConfig, geometry: Geometry, features: int) -> None:
        super().__init__(config, geometry, features)
        self.log_bonus = nn.Parameter(torch.empty(geometry.num_key_heads, features))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise to the same long memory for every token, and a bonus of 1."""
        super().reset_parameters()
        nn.init.zeros_(self.log_bonus)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        inputs: AttentionInputs,
        options: dict[str, Any],
        attend: Attend | None = None,
    ) -> AttentionOutput:
        """Compute attention with this gate."""
        assert attend is None
        assert inputs.hidden_states is not None
        log_decay = rwkv6_log_decay(inputs.hidden_states, self.down, self.up, self.bias)
        bonus = widen(self.log_bonus).exp()
        return op.rwkv6_attention(q, k, inputs.v, log_decay=log_decay, bonus=bonus, **options)


@register_gate("mlstm")
class MLSTMGate(LearnedGate):
    r"""mLSTM, the matrix memory of xLSTM (arXiv:2405.04517).

    One learned forget gate :math:`f = \sigma(x w_f + b)` and one exponential input gate
    :math:`e^{x w_i}` per token and key head. The output is divided by the absolute sum of weights,
    but at least by 1. The input gate has no bias, because a factor of all weights cancels in that
    quotient. In the paper, keys are divided by :math:`\sqrt{D}`; here they are features, which are
    not.
    """

    only_decays = False
    ops = ("mlstm_attention", "mlstm_step")
    fixed_options: ClassVar = {
        "normalize": "has a normaliser of its own, max(|q n|, 1)",
        "eps": "divides by max(|q n|, 1) and needs none",
    }

    def __init__(self, config: BackendConfig, geometry: Geometry, features: int) -> None:
        super().__init__(config, geometry, features)
        heads = geometry.num_key_heads
        self.forget_weight = nn.Parameter(torch.empty(heads, self.hidden_size))
        self.forget_bias = nn.Parameter(torch.empty(heads))
        self.input_weight = nn.Parameter(torch.empty(heads, self.hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise to the same long memory and the same input weight for every token."""
        nn.init.constant_(self.forget_bias, -math.log(math.expm1(INITIAL_RATE)))
        nn.init.zeros_(self.forget_weight)
        nn.init.zeros_(self.input_weight)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        inputs: AttentionInputs,
        options: dict[str, Any],
        attend: Attend | None = None,
    ) -> AttentionOutput:
        """Compute attention with this gate."""
        assert attend is None
        assert inputs.hidden_states is not None
        x = widen(inputs.hidden_states)
        weight, bias = self.forget_weight.to(x.dtype), self.forget_bias.to(x.dtype)
        log_forget = F.logsigmoid(F.linear(x, weight, bias)).transpose(1, 2)
        log_input = F.linear(x, self.input_weight.to(x.dtype)).transpose(1, 2)
        options = {name: x for name, x in options.items() if name not in self.fixed_options}
        return op.mlstm_attention(
            q, k, inputs.v, log_forget=log_forget, log_input=log_input, **options
        )


class TokenByTokenGate(LearnedGate):
    """Base class of gates with a decay per token, key channel and value channel.

    They have no chunks: prefill and training run token by token too.
    """

    only_decays = False
    has_weights = False
    ops = ("matrix_gated_attention",)
    fixed_options: ClassVar = {"chunk_size": "runs token by token and has no chunks"}

    def gates(self, x: Tensor) -> tuple[LogDecay, Tensor | None]:
        """Return a function that gives the log decays of some tokens, and the weights of values.

        Args:
            x: Hidden states, ``[B, S, M]``, float32 or wider.

        Returns:
            The function takes ``start`` and ``stop`` and returns log decays at these tokens,
            broadcastable to ``[B, Hkv, stop - start, F, E]``. The weights multiply the values,
            ``[B, Hkv, S, E]``; ``None`` means ones.
        """
        raise NotImplementedError

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        inputs: AttentionInputs,
        options: dict[str, Any],
        attend: Attend | None = None,
    ) -> AttentionOutput:
        """Compute attention with this gate."""
        assert attend is None
        assert inputs.hidden_states is not None
        log_decay, value_weights = self.gates(widen(inputs.hidden_states))
        left_out = ("chunk_size", "reuse_state")
        options = {n: x for n, x in options.items() if n not in left_out}
        return op.matrix_gated_attention(
            q, k, inputs.v, log_decay=log_decay, value_weights=value_weights, **options
        )


@register_gate("matrix")
class MatrixGate(TokenByTokenGate):
    r"""Full-matrix gate (arXiv:2312.06635, table 1): :math:`G = \log \sigma(x W_1 W_2 + b) / 16`.

    One learned decay per token, key channel and value channel, with projections of rank 16. It has
    only the recurrent form: prefill and training run token by token too, which is slow.
    """

    def __init__(self, config: BackendConfig, geometry: Geometry, features: int) -> None:
        super().__init__(config, geometry, features)
        assert geometry.value_dim is not None
        shape = geometry.num_key_heads, features, geometry.value_dim
        self.down = nn.Parameter(torch.empty(RANK, self.hidden_size))
        self.up = nn.Parameter(torch.empty(math.prod(shape), RANK))
        self.bias = nn.Parameter(torch.empty(shape))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise to the same long memory for every token, as :class:`LowRankGate`."""
        nn.init.eye_(self.down)
        nn.init.zeros_(self.up)
        nn.init.constant_(self.bias, GATE_BIAS)

    def gates(self, x: Tensor) -> tuple[LogDecay, Tensor | None]:
        """Return the log decays and the weights of values."""
        inner = F.linear(x, self.down.to(x.dtype))
        up, bias = self.up.to(x.dtype), self.bias.to(x.dtype)

        def log_decay(start: int, stop: int) -> Tensor:
            logits = F.linear(inner[:, start:stop], up, bias.flatten()).unflatten(2, bias.shape)
            return F.logsigmoid(logits).transpose(1, 2) / TEMPERATURE

        return log_decay, None


@register_gate("mamba")
class MambaGate(TokenByTokenGate):
    r"""Mamba's selective state space (arXiv:2312.00752): :math:`G = -\Delta_e e^{a_{de}}`.

    One learned step per token and value channel, :math:`\Delta = \mathrm{softplus}(x W_1 W_2 + b)`
    with projections of rank 16, by which the value is multiplied, and one fixed rate per key and
    value channel. Mamba's B is the key, its C the query and its input the value. Its convolution,
    skip connection and output gate are not part of it. It has only the recurrent form, which is
    slow in prefill and training; ``mamba2``, with one decay per head, has chunks.
    """

    no_weight_decay = ("log_rate",)

    def __init__(self, config: BackendConfig, geometry: Geometry, features: int) -> None:
        super().__init__(config, geometry, features)
        assert geometry.value_dim is not None
        heads, size = geometry.num_key_heads, geometry.value_dim
        self.down = nn.Parameter(torch.empty(RANK, self.hidden_size))
        self.up = nn.Parameter(torch.empty(heads * size, RANK))
        self.bias = nn.Parameter(torch.empty(heads, size))
        self.log_rate = nn.Parameter(torch.empty(heads, features, size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise to the same small step for every token, as :class:`LowRankGate`."""
        nn.init.eye_(self.down)
        nn.init.zeros_(self.up)
        nn.init.constant_(self.bias, math.log(math.expm1(INITIAL_RATE)))
        nn.init.zeros_(self.log_rate)

    def gates(self, x: Tensor) -> tuple[LogDecay, Tensor | None]:
        """Return the log decays and the weights of values."""
        weights = (w.to(x.dtype) for w in (self.down, self.up, self.bias, self.log_rate))
        down, up, bias, log_rate = weights
        logits = F.linear(F.linear(x, down), up, bias.flatten()).unflatten(2, bias.shape)
        step = softplus_of_heads(logits)  # [B, Hkv, S, E]
        rate = log_rate.exp()

        def log_decay(start: int, stop: int) -> Tensor:
            return -step[:, :, start:stop, None] * rate[:, None]

        return log_decay, step
