"""The softmax backend: dense attention, which every other backend is compared with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from attnzoo.backends.parts.exact import ExactBackend, ExactConfig
from attnzoo.contract.backend import register
from attnzoo.contract.inputs import AttentionInputs
from attnzoo.contract.states import AttentionOutput
from attnzoo.ops.softmax.api import softmax_attention


@dataclass(frozen=True, kw_only=True)
class SoftmaxConfig(ExactConfig):
    """Settings of dense softmax attention (arXiv:1706.03762)."""

    ops: ClassVar[tuple[str, ...]] = ("softmax_attention",)


@register("softmax")
class SoftmaxBackend(ExactBackend):
    """Dense softmax attention: supports everything, returns weights, quadratic in memory."""

    config_class = SoftmaxConfig
    capabilities = replace(ExactBackend.capabilities, packing=True, softcap=True)

    def compute(self, inputs: AttentionInputs) -> AttentionOutput:
        """Compute every score and the weighted sum of the values."""
        return softmax_attention(
            inputs.q,
            inputs.k,
            inputs.v,
            scale=inputs.scale,
            mask=inputs.mask,
            bias=inputs.bias,
            softcap=inputs.softcap,
            sinks=inputs.sinks,
            dropout=inputs.dropout,
            impl=self.config.impl,
        )
