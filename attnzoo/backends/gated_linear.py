"""Gated linear attention: linear attention whose state decays at every token."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch import Tensor

from attnzoo.backends.feature_maps.base import get_feature_map
from attnzoo.backends.gates import recurrences  # noqa: F401  (registers its gates)
from attnzoo.backends.gates.base import GATES, Gate, get_gate
from attnzoo.backends.gates.base import register_gate as register_gate
from attnzoo.backends.parts.recurrent import FeatureMapBackend, FeatureMapBackendConfig
from attnzoo.contract.backend import register
from attnzoo.contract.capabilities import Capabilities
from attnzoo.contract.config import BackendConfig, Geometry
from attnzoo.contract.implementation import impl_names
from attnzoo.contract.inputs import AttentionInputs
from attnzoo.contract.states import AttentionOutput
from attnzoo.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class GatedLinearConfig(FeatureMapBackendConfig):
    """Settings of gated linear attention (arXiv:2312.06635).

    Attributes:
        gate: Name of the gate that computes the decay of the state at each token.
    """

    gate: str = "gla"

    def __post_init__(self) -> None:
        super().__post_init__()
        name, defaults = type(self).__name__, self.default_options()
        try:
            gate = get_gate(self.gate)
        except ConfigError as error:
            raise ConfigError(f"{name}.gate: {error}") from None
        for option, why in gate.fixed_options.items():
            if (value := getattr(self, option)) != defaults[option]:
                raise ConfigError(
                    f"{name}.{option} must stay {defaults[option]!r} with gate={self.gate!r}, "
                    f"which {why}, got {value!r}; leave it out"
                )
        if not gate.only_decays and self.window is not None:
            raise ConfigError(
                f"{name}.window does not support gate={self.gate!r}, which has a state of its own; "
                "take a gate that is a decay, such as 'gla', or no window"
            )
        if not gate.only_decays and get_feature_map(self.feature_map).positional:
            raise ConfigError(
                f"{name}.feature_map={self.feature_map!r} counts tokens in the state, which "
                f"gate={self.gate!r} does not support; take another map, or a gate that is a "
                "decay, such as 'gla'"
            )

    @property
    def divides(self) -> bool:
        """Whether outputs are divided by the sum of their weights; false if the gate divides."""
        return self.normalize and "normalize" not in GATES.get(self.gate, Gate).fixed_options


@register("gated_linear")
class GatedLinearBackend(FeatureMapBackend):
    """Linear attention whose state decays at every token, as a gate determines; causal only."""

    config: GatedLinearConfig
    config_class = GatedLinearConfig
    capabilities = replace(
        FeatureMapBackend.capabilities, bidirectional=False, needs_hidden_states=True
    )

    def __init__(self, config: BackendConfig, geometry: Geometry) -> None:
        super().__init__(config, geometry)
        gate = get_gate(self.config.gate)
        self.gate = gate(config, geometry, self.feature_map.size)

    def layer_capabilities(self) -> Capabilities:
        """Return the capabilities with this gate."""
        gate = get_gate(self.config.gate)
        return replace(
            super().layer_capabilities(),
            needs_hidden_states=gate.needs_hidden_states,
            has_weights=gate.has_weights,
        )

    def reset_parameters(self) -> None:
        """Initialise the weights of the feature map, the linear branch and the gate."""
        super().reset_parameters()
        self.gate.reset_parameters()

    def layer_reasons(self) -> list[str]:
        """Return every reason why this backend does not support its layer."""
        reasons = super().layer_reasons()
        name, impls = self.config.gate, impl_names(*self.gate.ops)
        if self.config.impl not in impls:
            reasons.append(
                f"impl={self.config.impl!r} does not support gate {name!r} (use one of "
                f"{', '.join(impls)}, or gate='gla')"
            )
        if self.capabilities.needs_hidden_states and self.geometry.hidden_size is None:
            reasons.append(
                f"the layer's hidden size is unknown, and gate {name!r} needs hidden states (use "
                "gate 'retnet' or 'alibi')"
            )
        return reasons

    def unsupported_reasons(self, inputs: AttentionInputs) -> list[str]:
        """Return every reason why these inputs are unsupported."""
        reasons = super().unsupported_reasons(inputs)
        if not inputs.mask.causal:
            reasons.append("the mask is not causal (gates need an order of the tokens)")
        return reasons + inputs.hidden_state_reasons(self.geometry.hidden_size, "the gate takes")

    def fused_feature_map(self) -> str:
        """Return the feature map that the op applies, or ``""`` if the module applies it."""
        gate = self.gate
        fusable = gate.only_decays and not (gate.scales_keys or gate.reads_keys)
        return super().fused_feature_map() if fusable else ""

    def run_op(
        self, q: Tensor, k: Tensor, inputs: AttentionInputs, *, feature_map: str = ""
    ) -> AttentionOutput:
        """Run the gate's op."""
        options = self.op_options(inputs, feature_map)
        if not self.gate.only_decays:
            options["mask"] = inputs.mask  # with padding, at which the op sets the gates
            options["reuse_state"] = inputs.reuse_state
        attend = None
        if self.far_log_weight is not None:

            def attend(k: Tensor, log_decay: Tensor) -> AttentionOutput:
                branch = self.linear_branch(q, k, inputs, feature_map)
                log_weight = branch.log_weight - math.log(self.gate.expected_keys)
                branch = branch._replace(log_weight=log_weight, log_decay=log_decay)
                return self.attend_hybrid(inputs, branch)

        output: AttentionOutput = self.gate(q, k, inputs, options, attend)
        return output
