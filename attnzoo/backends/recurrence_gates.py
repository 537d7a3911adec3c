"""Gates that are more than a decay: they bring a recurrence, and mostly a state, of their own.

Letters: B batch, H heads, Hkv key heads, S tokens, F features of a key, E value size, M hidden
size, R rank.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnzoo.backends.config import BackendConfig, Geometry
from attnzoo.backends.gates import (
    GATE_BIAS,
    LOSS,
    RANK,
    Attend,
    LearnedGate,
    LowRankGate,
    register_gate,
)
from attnzoo.backends.inputs import AttentionInputs
from attnzoo.ops.feature_maps import widen
from attnzoo.ops.gates import TEMPERATURE, rwkv6_log_decay
from attnzoo.ops.matrix_gate import matrix_gated_attention
from attnzoo.ops.mlstm import NOTHING, mlstm_attention
from attnzoo.ops.rwkv6 import rwkv6_attention
from attnzoo.state import AttentionOutput


@register_gate("rwkv6")
class RWKV6Gate(LowRankGate):
    """One decay per token and key channel, and a bonus for the token itself (arXiv:2404.05892).

    The state is read before the token enters it. The bonus is an exponential, where RWKV-6 has a
    number of any sign, so that a normalised output stays a mean. RWKV's token shift belongs to the
    projections, which a swap leaves to the model.
    """

    plain = False
    start = math.log(LOSS)

    def __init__(self, config: BackendConfig, geometry: Geometry, features: int) -> None:
        super().__init__(config, geometry, features)
        self.log_bonus = nn.Parameter(torch.empty(geometry.num_key_heads, features))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start with the same long memory for every token, and the bonus at 1."""
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
        """Attend under this gate."""
        assert attend is None
        assert inputs.hidden_states is not None
        log_decay = rwkv6_log_decay(inputs.hidden_states, self.down, self.up, self.bias)
        if inputs.mask.padding is not None:
            log_decay = log_decay.masked_fill(~inputs.mask.padding[:, None, :, None], 0)
        bonus = widen(self.log_bonus).exp()
        return rwkv6_attention(q, k, inputs.v, log_decay=log_decay, bonus=bonus, **options)


@register_gate("mlstm")
class MLSTMGate(LearnedGate):
    """A sigmoid forget gate and an exponential input gate per token and head (arXiv:2405.04517).

    Divides by the sum of weights, but not by less than 1; features of keys stand for its keys over
    the root of their size. The input gate has no bias: a factor that
    all weights share cancels in that quotient.
    """

    plain = False
    fixed: ClassVar = {
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
        """Start with the same long memory, and the same weight, for every token."""
        nn.init.constant_(self.forget_bias, -math.log(math.expm1(LOSS)))
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
        """Attend under this gate."""
        assert attend is None
        assert inputs.hidden_states is not None
        x, real = widen(inputs.hidden_states), inputs.mask.padding
        weight, bias = self.forget_weight.to(x.dtype), self.forget_bias.to(x.dtype)
        forget = F.logsigmoid(F.linear(x, weight, bias)).transpose(1, 2)
        write = F.linear(x, self.input_weight.to(x.dtype)).transpose(1, 2)
        if real is not None:
            gone = ~real[:, None]
            forget, write = forget.masked_fill(gone, 0), write.masked_fill(gone, NOTHING)
        told = {name: x for name, x in options.items() if name not in self.fixed}
        return mlstm_attention(q, k, inputs.v, log_forget=forget, log_input=write, **told)


@register_gate("matrix")
class MatrixGate(LearnedGate):
    """One decay per token, key channel and value channel, of low rank in the hidden states.

    Recurrent form only: prompts and training too run token by token, which is slow.
    """

    plain = False
    has_weights = False
    forms = ("recurrent",)
    fixed: ClassVar = {"chunk_size": "runs token by token and has no chunks"}

    def __init__(self, config: BackendConfig, geometry: Geometry, features: int) -> None:
        super().__init__(config, geometry, features)
        assert geometry.value_dim is not None
        shape = geometry.num_key_heads, features, geometry.value_dim
        self.down = nn.Parameter(torch.empty(RANK, self.hidden_size))
        self.up = nn.Parameter(torch.empty(math.prod(shape), RANK))
        self.bias = nn.Parameter(torch.empty(shape))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start with the same long memory for every token; see the gate of low rank."""
        nn.init.eye_(self.down)
        nn.init.zeros_(self.up)
        nn.init.constant_(self.bias, GATE_BIAS)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        inputs: AttentionInputs,
        options: dict[str, Any],
        attend: Attend | None = None,
    ) -> AttentionOutput:
        """Attend under this gate."""
        assert attend is None
        assert inputs.hidden_states is not None
        x, real = widen(inputs.hidden_states), inputs.mask.padding
        inner = F.linear(x, self.down.to(x.dtype))
        up, bias = self.up.to(x.dtype), self.bias.to(x.dtype)

        def log_decay(start: int, stop: int) -> Tensor:
            logits = F.linear(inner[:, start:stop], up, bias.flatten()).unflatten(2, bias.shape)
            gate = F.logsigmoid(logits).transpose(1, 2) / TEMPERATURE
            if real is not None:
                gate = gate.masked_fill(~real[:, None, start:stop, None, None], 0)
            return gate

        told = {n: x for n, x in options.items() if n not in ("form", "impl", "chunk_size")}
        return matrix_gated_attention(q, k, inputs.v, log_decay=log_decay, **told)
