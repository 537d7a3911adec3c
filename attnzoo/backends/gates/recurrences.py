"""Recurrences that are more than a decay: RWKV-6, mLSTM and the full-matrix gate.

Each has an op and a state of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.backends.gates.decays import (
    GATE_BIAS,
    INITIAL_RATE,
    TEMPERATURE,
    GateModule,
    per_channel,
    register_gate,
)
from attnzoo.contract.states import AttentionOutput
from attnzoo.ops.gated.matrix_gate import TakeTokens, matrix_gated_attention
from attnzoo.ops.gated.mlstm import mlstm_attention
from attnzoo.ops.gated.rwkv6 import rwkv6_attention
from attnzoo.runtime.kernel_calls import widen


class Recurrence(GateModule):
    """Base class of recurrences with an op of their own: the numbers that the op takes.

    Attributes:
        op: Computes attention; takes these numbers beside queries, keys, values and options.
        has_weights: Whether all value channels share one matrix of attention weights.
        ops: The ops that compute it, whose implementations ``impl`` may name.
        fixed_options: Options that must keep their defaults, and why. The op does not take them.
    """

    needs_hidden_states = True
    op: ClassVar[Callable[..., AttentionOutput]]
    has_weights: ClassVar[bool] = True
    ops: ClassVar[tuple[str, ...]] = ("linear_attention",)
    fixed_options: ClassVar[Mapping[str, str]] = {}

    def forward(self, hidden_states: Tensor) -> dict[str, Any]:
        """Return the op's arguments that depend on tokens, from ``[B, S, M]``, by name.

        Backends call the module, so that its hooks run.
        """
        raise NotImplementedError


# Largest log of a decay rate: exp(-exp(8)) is 0 in every dtype, and exp(89) is infinite
MAX_LOG_RATE = 8.0


@register_gate("rwkv6")
class RWKV6(Recurrence):
    r"""RWKV-6 (arXiv:2404.05892): :math:`g = -\exp(\tanh(x W_1) W_2 + b)`, with a bonus u.

    One learned decay per token and key channel. A query reads the state before its own token
    enters it, and that token's key is multiplied by :math:`u = e^c`. RWKV-6 has u of any sign; the
    exponential keeps normalised outputs a weighted mean. RWKV's token shift is part of the
    projections, which a swap does not change.
    """

    no_weight_decay = ("log_bonus",)
    op = staticmethod(rwkv6_attention)
    shapes: ClassVar = {**per_channel(math.log(INITIAL_RATE)), "log_bonus": ("H F", 0.0)}
    log_bonus: Tensor

    def forward(self, hidden_states: Tensor) -> dict[str, Any]:
        """Return the log decays and the bonus."""
        logits = self.channel_logits(hidden_states, torch.tanh)
        log_decay = -logits.clamp(max=MAX_LOG_RATE).exp()
        return {"log_decay": log_decay, "bonus": widen(self.log_bonus).exp()}


@register_gate("mlstm")
class MLSTM(Recurrence):
    r"""mLSTM, the matrix memory of xLSTM (arXiv:2405.04517).

    One learned forget gate :math:`f = \sigma(x w_f + b)` and one exponential input gate
    :math:`e^{x w_i}` per token and key head. The output is divided by the absolute sum of weights,
    but at least by 1. The input gate has no bias, because a factor of all weights cancels in that
    quotient. In the paper, keys are divided by :math:`\sqrt{D}`; here they are features, which are
    not.
    """

    op = staticmethod(mlstm_attention)
    fixed_options: ClassVar = {
        "normalize": "has a normaliser of its own, max(|q n|, 1)",
        "eps": "divides by max(|q n|, 1) and needs none",
    }
    shapes: ClassVar = {
        "forget_weight": ("H M", 0.0),
        "forget_bias": ("H", -math.log(math.expm1(INITIAL_RATE))),
        "input_weight": ("H M", 0.0),
    }
    forget_weight: Tensor
    forget_bias: Tensor
    input_weight: Tensor

    def forward(self, hidden_states: Tensor) -> dict[str, Any]:
        """Return the logarithms of the forget gates and of the input gates."""
        x = widen(hidden_states)
        weight, bias = self.forget_weight.to(x.dtype), self.forget_bias.to(x.dtype)
        log_forget = F.logsigmoid(F.linear(x, weight, bias)).transpose(1, 2)
        log_input = F.linear(x, self.input_weight.to(x.dtype)).transpose(1, 2)
        return {"log_forget": log_forget, "log_input": log_input}


@register_gate("matrix")
class Matrix(Recurrence):
    r"""Full-matrix gate (arXiv:2312.06635, table 1): :math:`G = \log \sigma(x W_1 W_2 + b) / 16`.

    One learned decay per token, key channel and value channel, with projections of rank 16. It has
    only the recurrent form: prefill and training run token by token too, which is slow.
    """

    op = staticmethod(matrix_gated_attention)
    has_weights = False
    ops = ("matrix_gated_attention",)
    fixed_options: ClassVar = {"chunk_size": "runs token by token and has no chunks"}
    shapes: ClassVar = {"down": ("R M", None), "up": ("HFE R", 0.0), "bias": ("H F E", GATE_BIAS)}

    def forward(self, hidden_states: Tensor) -> dict[str, Any]:
        """Return the log decays, as a function that gets ``take``, which takes n tokens."""
        x = widen(hidden_states)
        inner = F.linear(x, self.down.to(x.dtype))
        up, bias = self.up.to(x.dtype), self.bias.to(x.dtype)

        def log_decay(take: TakeTokens) -> Tensor:
            logits = F.linear(take(inner), up, bias.flatten()).unflatten(2, bias.shape)
            return F.logsigmoid(logits).transpose(1, 2) / TEMPERATURE

        return {"log_decay": log_decay}
