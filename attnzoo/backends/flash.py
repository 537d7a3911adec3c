"""Exact softmax attention through fused kernels (torch SDPA, xformers)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch.compiler import is_compiling

from attnzoo.backends.base import register
from attnzoo.backends.config import BackendConfig
from attnzoo.backends.inputs import AttentionInputs
from attnzoo.backends.softmax import ExactBackend, check_window
from attnzoo.ops.flash import IMPLS, FlashInputs, choose_impl, flash_attention, ran_kernel
from attnzoo.state import AttentionOutput


@dataclass(frozen=True, kw_only=True)
class FlashConfig(BackendConfig):
    """Settings of fused softmax attention (arXiv:2205.14135)."""

    impl: Literal["auto", "sdpa", "xformers"] = "auto"
    # w: a causal query sees the w latest keys, its own included; otherwise w keys to either side.
    # Padding does not count, wherever it stands.
    window: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_window(self)


@register("flash")
class FlashBackend(ExactBackend):
    """Softmax attention without a score matrix in memory; no kernel takes a soft cap."""

    config_class = FlashConfig
    impls: ClassVar[tuple[str, ...]] = IMPLS
    packing = True

    def compute(self, inputs: AttentionInputs) -> AttentionOutput:
        """Run the fused kernel that the options name, or the one that suits device and mask."""
        impl, reason = self.config.impl, "named in the options"
        call = FlashInputs(
            inputs.q,
            inputs.k,
            inputs.v,
            inputs.mask,
            inputs.scale,
            inputs.bias,
            inputs.sinks,
            inputs.dropout,
        )
        if impl == "auto":
            impl, reason = choose_impl(call)
        out = flash_attention(**call._asdict(), impl=impl)
        if impl == "sdpa" and inputs.q.device.type == "cuda" and not is_compiling():
            reason = f"{ran_kernel(call)}; {reason}"
        self.record(impl, reason)
        return AttentionOutput(out)
