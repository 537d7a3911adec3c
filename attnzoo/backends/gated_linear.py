"""Gated linear attention: linear attention whose state decays at every token."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attnzoo.backends.feature_maps.base import get_feature_map
from attnzoo.backends.gates.decays import GATES, get_gate
from attnzoo.backends.gates.recurrences import Recurrence
from attnzoo.backends.parts.recurrent import FeatureMapBackend, FeatureMapBackendConfig
from attnzoo.contract.backend import register
from attnzoo.contract.capabilities import Capabilities
from attnzoo.contract.config import BackendConfig, Geometry
from attnzoo.contract.implementation import impl_names
from attnzoo.contract.inputs import AttentionInputs
from attnzoo.contract.states import AttentionOutput
from attnzoo.errors import ConfigError
from attnzoo.ops.linear.api import run_linear_attention


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
            get_gate(self.gate)
        except ConfigError as error:
            raise ConfigError(f"{name}.gate: {error}") from None
        recurrence = _recurrence(self.gate)
        if recurrence is None:
            return
        for option, why in recurrence.fixed_options.items():
            if (value := getattr(self, option)) != defaults[option]:
                raise ConfigError(
                    f"{name}.{option} must stay {defaults[option]!r} with gate={self.gate!r}, "
                    f"which {why}, got {value!r}; leave it out"
                )
        if self.window is not None:
            raise ConfigError(
                f"{name}.window does not support gate={self.gate!r}, which has a state of its own; "
                "take a gate that is a decay, such as 'gla', or no window"
            )
        if get_feature_map(self.feature_map).positional:
            raise ConfigError(
                f"{name}.feature_map={self.feature_map!r} counts tokens in the state, which "
                f"gate={self.gate!r} does not support; take another map, or a gate that is a "
                "decay, such as 'gla'"
            )

    @property
    def divides(self) -> bool:
        """Whether outputs are divided by the sum of their weights; false if the op divides."""
        recurrence = _recurrence(self.gate)
        return self.normalize and (
            recurrence is None or "normalize" not in recurrence.fixed_options
        )


def _recurrence(gate: str) -> type[Recurrence] | None:
    """Return the recurrence called ``gate``, or ``None`` if it is a decay, or unknown."""
    cls = GATES.get(gate)
    return cls if cls is not None and issubclass(cls, Recurrence) else None


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
        self.recurrence = _recurrence(self.config.gate)
        # A Gate or a Recurrence; PEFT may wrap it
        of_keys = replace(geometry, head_dim=self.feature_map.size)
        self.gate: Any = get_gate(self.config.gate)(config, of_keys)

    def layer_capabilities(self) -> Capabilities:
        """Return the capabilities with this gate."""
        recurrence = _recurrence(self.config.gate)
        return replace(
            super().layer_capabilities(),
            needs_hidden_states=get_gate(self.config.gate).needs_hidden_states,
            has_weights=recurrence is None or recurrence.has_weights,
        )

    def reset_parameters(self) -> None:
        """Initialise the weights of the feature map, the linear branch and the gate."""
        super().reset_parameters()
        self.gate.reset_parameters()

    def layer_reasons(self) -> list[str]:
        """Return every reason why this backend does not support its layer."""
        reasons = super().layer_reasons()
        name, impls = self.config.gate, self.config.impl_names()
        if self.recurrence is not None:
            impls = impl_names(*self.recurrence.ops)
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
        return reasons

    def fused_feature_map(self) -> str:
        """Return the feature map that the op applies, or ``""`` if the module applies it."""
        gate = self.gate
        fusable = self.recurrence is None and not (gate.scales_keys or gate.reads_keys)
        return super().fused_feature_map() if fusable else ""

    def run_op(
        self, q: Tensor, k: Tensor, inputs: AttentionInputs, *, feature_map: str = ""
    ) -> AttentionOutput:
        """Run the recurrence's op, or the window hybrid or linear attention with the gate."""
        if self.recurrence is not None:
            return self.run_recurrence(q, k, inputs)
        k, log_decay = self.gate_keys(k, inputs, feature_map)
        if self.far_log_weight is not None:
            branch = self.linear_branch(q, k, inputs, feature_map)
            log_weight = branch.log_weight - math.log(self.gate.expected_keys)
            branch = branch._replace(log_weight=log_weight, log_decay=log_decay)
            return self.attend_hybrid(inputs, branch)
        x = self.linear_inputs(q, k, inputs, feature_map)._replace(log_decay=log_decay)
        return run_linear_attention(x, self.config.impl, inputs.shard)

    def gate_keys(
        self, k: Tensor, inputs: AttentionInputs, feature_map: str
    ) -> tuple[Tensor, Tensor]:
        """Return the keys, multiplied by the gate if it scales them, and the log decays."""
        features = k
        if feature_map:  # the op maps k
            dtype = torch.promote_types(k.dtype, torch.float32)
            features = k.new_full((), torch.nan, dtype=dtype)
            features = features.expand(*k.shape[:3], self.feature_map.size)
        log_decay, key_scale = self.gate(features, inputs.hidden_states)
        if key_scale is not None:
            k = k * key_scale
        return k, log_decay

    def run_recurrence(self, q: Tensor, k: Tensor, inputs: AttentionInputs) -> AttentionOutput:
        """Run the op of a recurrence that is more than a decay."""
        assert self.recurrence is not None
        options: dict[str, Any] = {
            "sequences": inputs.sequences,
            "slots": inputs.slots,
            "normalize": self.config.normalize,
            "impl": self.config.impl,
            "state": inputs.state,
            "return_state": inputs.return_state,
            "chunk_size": self.config.chunk_size,
            "eps": self.config.eps,
            "shard": inputs.shard,
            "reuse_state": inputs.reuse_state,
        }
        for name in self.recurrence.fixed_options:
            del options[name]
        return self.recurrence.op(q, k, inputs.v, **self.gate(inputs.hidden_states), **options)
