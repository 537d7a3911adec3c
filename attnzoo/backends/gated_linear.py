"""Gated linear attention: a linear attention whose state forgets."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from attnzoo.backends import recurrence_gates  # noqa: F401  (registers its gates)
from attnzoo.backends.base import register
from attnzoo.backends.config import BackendConfig, Geometry
from attnzoo.backends.feature_maps import get_feature_map
from attnzoo.backends.gates import (  # noqa: F401  (the decorator, for users)
    GATES,
    Gate,
    get_gate,
    register_gate,
)
from attnzoo.backends.inputs import AttentionInputs
from attnzoo.backends.recurrent import RecurrentBackend, RecurrentConfig
from attnzoo.errors import ConfigError
from attnzoo.ops.hybrid import FarKeys
from attnzoo.state import AttentionOutput


@dataclass(frozen=True, kw_only=True)
class GatedLinearConfig(RecurrentConfig):
    """Settings of gated linear attention (arXiv:2312.06635)."""

    gate: str = "gla"  # the decay, by name; see attnzoo.backends.gates

    def __post_init__(self) -> None:
        super().__post_init__()
        name, defaults = type(self).__name__, self.default_options()
        try:
            gate = get_gate(self.gate)
        except ConfigError as error:
            raise ConfigError(f"{name}.gate: {error}") from None
        for option, why in gate.fixed.items():
            if (given := getattr(self, option)) != defaults[option]:
                raise ConfigError(
                    f"{name}.{option} must stay {defaults[option]!r} with gate={self.gate!r}, "
                    f"which {why}, got {given!r}; leave it out"
                )
        if not gate.plain and self.window is not None:
            raise ConfigError(
                f"{name}.window goes with gates that are a decay, such as 'gla', and not with "
                f"gate={self.gate!r}, which has a state of its own; leave one of the two out"
            )
        if not gate.plain and get_feature_map(self.feature_map).positional:
            raise ConfigError(
                f"{name}.feature_map={self.feature_map!r} counts tokens in the state, and "
                f"gate={self.gate!r} has a state of its own without a count; take another map, or "
                "a gate that is a decay, such as 'gla'"
            )

    @property
    def divides(self) -> bool:
        """Whether outputs are divided by the sum of their weights, and not by the gate's own."""
        return self.normalize and "normalize" not in GATES.get(self.gate, Gate).fixed


@register("gated_linear")
class GatedLinearBackend(RecurrentBackend):
    """Linear attention in which every step keeps only a part of the state; causal."""

    config: GatedLinearConfig
    config_class = GatedLinearConfig
    bidirectional = False

    def __init__(self, config: BackendConfig, geometry: Geometry) -> None:
        super().__init__(config, geometry)
        gate = get_gate(self.config.gate)
        self.gate = gate(config, geometry, self.feature_map.size)

    @property
    def needs_hidden_states(self) -> bool:  # type: ignore[override]
        """Whether the gate is computed from hidden states; those of fixed decays are not."""
        return self.gate.needs_hidden_states

    def kernel_reasons(self) -> list[str]:
        """Why this layer's options rule the kernels out."""
        reasons = super().kernel_reasons()
        if not self.gate.plain:
            reasons.append(f"gate {self.config.gate!r} has a state of its own (gate='gla' has not)")
        return reasons

    def fused_map(self, inputs: AttentionInputs) -> str:
        """The feature map that kernels may apply; none where the gate multiplies the features."""
        return "" if self.gate.writes else super().fused_map(inputs)

    @property
    def has_weights(self) -> bool:  # type: ignore[override]
        """Whether one matrix of weights serves all value channels."""
        return self.gate.has_weights

    def reset_parameters(self) -> None:
        """Give the weights of feature map and gate their initial values."""
        super().reset_parameters()
        self.gate.reset_parameters()

    def layer_reasons(self) -> list[str]:
        """Say why this backend cannot serve its layer, all reasons at once."""
        reasons = super().layer_reasons()
        if self.needs_hidden_states and self.geometry.hidden_size is None:
            reasons.append(
                f"the layer's hidden size is unknown, and gate {self.config.gate!r} needs "
                "hidden states (gates 'retnet' and 'alibi' do without)"
            )
        return reasons

    def unsupported_reasons(self, inputs: AttentionInputs) -> list[str]:
        """Say why these inputs cannot run, all reasons at once."""
        reasons = super().unsupported_reasons(inputs)
        if not inputs.mask.causal:
            reasons.append("the mask is not causal (its gates order the tokens)")
        hidden = inputs.hidden_states
        if hidden is not None and inputs.k.ndim == 4:
            expected = (inputs.k.shape[0], inputs.k.shape[2], self.geometry.hidden_size)
            if tuple(hidden.shape) != expected:
                reasons.append(
                    f"hidden_states have shape {tuple(hidden.shape)} (its gate takes {expected})"
                )
        return reasons

    def form(self, inputs: AttentionInputs) -> str:
        """Return the form to run, of those that the gate has."""
        form = super().form(inputs)
        return form if form in self.gate.forms else self.gate.forms[0]

    def sum_up(
        self, q: Tensor, k: Tensor, inputs: AttentionInputs, *, form: str, impl: str
    ) -> AttentionOutput:
        """Run the op as the gate has it."""
        options = self.op_options(inputs, form=form, impl=impl)
        attend = None
        if self.far_log_weight is not None:
            weight = self.far_log_weight.to(q.dtype).view(1, -1, 1, 1) - math.log(self.gate.memory)

            def attend(k: Tensor, log_decay: Tensor) -> AttentionOutput:
                return self.attend_hybrid(inputs, FarKeys(q, k, weight, log_decay), impl)

        output: AttentionOutput = self.gate(q, k, inputs, options, attend)
        return output
