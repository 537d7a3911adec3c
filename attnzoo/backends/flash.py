"""The flash backend: exact softmax attention by fused kernels (PyTorch's SDPA, xformers)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from attnzoo.backends.parts.exact import ExactBackend, ExactConfig
from attnzoo.contract.backend import register
from attnzoo.contract.capabilities import Capabilities
from attnzoo.contract.inputs import AttentionInputs
from attnzoo.contract.states import AttentionOutput
from attnzoo.ops.flash.api import FlashCall, run_flash_attention


@dataclass(frozen=True, kw_only=True)
class FlashConfig(ExactConfig):
    """Settings of fused softmax attention (arXiv:2205.14135)."""

    ops: ClassVar[tuple[str, ...]] = ("flash_attention",)


@register("flash")
class FlashBackend(ExactBackend):
    """Exact softmax attention by fused kernels, linear in memory; does not support a soft cap."""

    config_class = FlashConfig
    capabilities = replace(ExactBackend.capabilities, packing=True)

    def layer_capabilities(self) -> Capabilities:
        """Return the capabilities; segments with first tokens of their own are unpacked."""
        return replace(super().layer_capabilities(), packing=not self.config.num_sinks)

    def compute(self, inputs: AttentionInputs) -> AttentionOutput:
        """Compute attention with the implementation of the options."""
        call = FlashCall(
            *(inputs.q, inputs.k, inputs.v, inputs.mask, inputs.scale),
            *(inputs.bias, inputs.sinks, inputs.dropout),
        )
        return run_flash_attention(call, self.config.impl)
