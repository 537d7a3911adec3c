"""What backends share whose memory is a state of fixed size: feature maps, padding, forms.

Letters: B batch, H query heads, Hkv key heads, T queries, S keys, F features.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from attnzoo.backends.base import AttentionBackend
from attnzoo.backends.config import BackendConfig, Geometry
from attnzoo.backends.feature_map_config import FeatureMapConfig
from attnzoo.backends.feature_maps import FeatureMap, get_feature_map
from attnzoo.backends.inputs import AttentionInputs
from attnzoo.backends.positions import count_tokens, with_count, without_count
from attnzoo.backends.window_config import WindowConfig
from attnzoo.errors import ConfigError
from attnzoo.ops.hybrid import FarKeys, hybrid_attention
from attnzoo.ops.linear import choose_impl, linear_attention
from attnzoo.state import AttentionOutput


@dataclass(frozen=True, kw_only=True)
class RecurrentConfig(WindowConfig, FeatureMapConfig):
    """Settings of attention through feature maps and a state."""

    impl: Literal["auto", "reference", "torch", "triton"] = "auto"
    chunk_size: int | None = None  # tokens per parallel step; None lets the op choose
    normalize: bool = True  # divide by the sum of weights, so that an output is a mean of values
    # Added to that sum. Not the 1e-6 of arXiv:2006.16236: where hedgehog meets queries and keys of
    # standard deviation 10, a quarter of the weights are below that, and one in 2,000 below 1e-12
    eps: float = 1e-12

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        if self.chunk_size is not None and self.chunk_size < 1:
            raise ConfigError(
                f"{name}.chunk_size must be at least 1 token, got {self.chunk_size}; "
                "leave it out to let the op choose"
            )
        if self.eps <= 0:
            raise ConfigError(
                f"{name}.eps must be above 0, got {self.eps}; it keeps rows that see nothing "
                "from dividing 0 by 0"
            )
        if get_feature_map(self.feature_map).signed and self.divides:
            raise ConfigError(
                f"{name}.feature_map={self.feature_map!r} needs normalize=False and no window: its "
                "weights have any sign, and their sum may be zero; set that, or take another map"
            )
        if self.window is not None and not self.normalize:
            raise ConfigError(
                f"{name}.window needs normalize=True, for near and far weights share one "
                "denominator; leave one of the two out"
            )
        if self.window is not None and self.eps != type(self).eps:
            raise ConfigError(
                f"{name}.eps goes without a window, got eps={self.eps} with window={self.window}: "
                "the window's own weights keep the sum above 0; leave one of the two out"
            )
        if self.window is not None and get_feature_map(self.feature_map).positional:
            raise ConfigError(
                f"{name}.window and feature_map={self.feature_map!r} do not go together: the map "
                "fades by distance, and so does leaving the window; take another map, or no window"
            )

    @property
    def divides(self) -> bool:
        """Whether outputs are divided by the sum of their weights."""
        return self.normalize


class WindowDropout(NamedTuple):
    """Which share of the heads trains without its window now (arXiv:2510.05901).

    A hybrid otherwise learns to rely on its window alone. All rows and processes, and a pass that
    gradient checkpointing repeats, draw the same heads.
    """

    share: float
    seed: int  # another one for every step

    def heads(self, count: int, layer: int, device: torch.device) -> Tensor:
        """Draw the heads of a layer that see far keys only, ``[H]`` bool."""
        generator = torch.Generator("cpu").manual_seed(1000 * self.seed + layer)
        return (torch.rand(count, generator=generator, device="cpu") < self.share).to(device)


class RecurrentBackend(AttentionBackend):
    """Attention as :math:`o_t = q_t S_t / (q_t z_t + eps)`, over features of queries and keys."""

    config: RecurrentConfig
    config_class: ClassVar[type[BackendConfig]] = RecurrentConfig
    packing = True
    recurrent = True
    context_parallel = True
    window_dropout: WindowDropout | None = None  # set from outside, step by step; in training only

    def __init__(self, config: BackendConfig, geometry: Geometry) -> None:
        super().__init__(config, geometry)
        self.feature_map = get_feature_map(self.config.feature_map)(config, geometry)
        self.add_window()

    def add_window(self) -> None:
        """Make the weight of far keys beside the window, one for each query head."""
        self.far_log_weight: nn.Parameter | None = None
        if self.config.window is not None:
            self.far_log_weight = nn.Parameter(torch.empty(self.geometry.num_heads))
            self.reset_window()

    def reset_parameters(self) -> None:
        """Give the feature map's weights their initial values."""
        self.feature_map.reset_parameters()
        self.reset_window()

    def reset_window(self) -> None:
        """Have the far keys weigh ``far_weight`` together, were queries and keys normal numbers."""
        if self.far_log_weight is None or self.far_log_weight.is_meta:
            return
        with torch.no_grad():
            typical = self.typical_product()
            self.far_log_weight.fill_(math.log(self.config.far_weight / typical))

    def typical_product(self) -> float:
        """Return what a far key weighs about, beside the window, with a logarithmic weight of 0."""
        size, scale = self.geometry.head_dim, self.geometry.scale
        assert scale is not None
        assert self.far_log_weight is not None
        generator = torch.Generator("cpu").manual_seed(0)
        heads, key_heads = self.geometry.num_heads, self.geometry.num_key_heads
        q, k = (
            torch.randn(1, n, 64, size, generator=generator, device="cpu")
            for n in (heads, key_heads)
        )
        device = self.far_log_weight.device
        q = self.feature_map(q.to(device), scale, of="queries").mean((0, 1, 2))
        k = self.feature_map(k.to(device), scale, of="keys").mean((0, 1, 2))
        return max(float(q @ k), 1e-6)

    def layer_reasons(self) -> list[str]:
        """Say why this backend cannot serve its layer, all reasons at once."""
        maps = (part for part in self.children() if isinstance(part, FeatureMap))
        reasons = super().layer_reasons() + [why for part in maps for why in part.layer_reasons()]
        if self.config.impl == "triton":
            reasons += [f"impl 'triton' cannot: {why}" for why in self.kernel_reasons()]
        if self.config.window is not None and self.geometry.cross_attention:
            reasons.append("a window lies around a token of its own sequence (leave window out)")
        return reasons

    def unsupported_reasons(self, inputs: AttentionInputs) -> list[str]:
        """Say why these inputs cannot run, all reasons at once."""
        reasons = super().unsupported_reasons(inputs)
        q, k, mask = inputs.q, inputs.k, inputs.mask
        if not q.ndim == k.ndim == 4:
            return reasons
        geometry = self.geometry
        layer = (geometry.num_heads, geometry.num_key_heads, geometry.head_dim)
        given = (q.shape[1], k.shape[1], k.shape[3])
        if given != layer:
            reasons.append(
                "{} query and {} key heads of size {} are given".format(*given)
                + " (the layer has {} and {} of size {})".format(*layer)
            )
        if mask.causal and q.shape[2] != k.shape[2]:
            reasons.append(
                f"{q.shape[2]} queries and {k.shape[2]} keys are given under a causal mask "
                "(pass the state of the earlier tokens instead of their keys)"
            )
        if not mask.causal and (inputs.state is not None or inputs.return_state):
            reasons.append("a state is asked for without a causal mask (only causal ones have it)")
        if inputs.shard is not None and self.config.window is not None and not mask.causal:
            reasons.append(
                "the rows lie on several processes, and a window to both sides lies beside the "
                "sums (longformer, or window=None)"
            )
        return reasons

    def attend(self, inputs: AttentionInputs) -> AttentionOutput:
        """Map queries and keys; run the recurrent form for one token, the chunk form for more."""
        real = inputs.mask.padding
        # Features of 16-bit layers go into the op in float32, in which it works anyway. Rounded to
        # 16 bits they were no faster on a CPU (T=2048, D=64, both passes: 43 ms against 40), the
        # gradients of q and k lost up to twice as much (3.5e-3 against 1.7e-3, which is the
        # rounding of the gradients themselves), and features of exp overflow in float16.
        form = self.form(inputs)
        impl, reason = self.choose_impl(inputs, form)
        if impl == "triton" and self.fused_map(inputs):  # raw, for the kernels map on the way
            with full_precision(inputs.q.device):
                output = self.sum_up(inputs.q, inputs.k, inputs, form=form, impl=impl)
            self.record(impl, f"{form} form, {self.fused_map(inputs)} fused; {reason}")
            return output
        with full_precision(inputs.q.device):
            places = count_tokens(inputs) if self.feature_map.positional else None
            options: dict[str, Any] = {"positions": places.positions} if places else {}
            q = self.feature_map(inputs.q, inputs.scale, of="queries", **options)
            k = self.feature_map(inputs.k, inputs.scale, of="keys", **options)
            if real is not None:  # the features of a zero key are not zero
                k = k.masked_fill(~real[:, None, :, None], 0)
            output = self.sum_up(
                q, k, without_count(inputs) if places else inputs, form=form, impl=impl
            )
        what = f"{form} form" if self.config.window is None else "a softmax window beside it"
        self.record(impl, f"{what}; {reason}")
        return with_count(output, places) if places else output

    def kernel_reasons(self) -> list[str]:
        """Why this layer's options rule the kernels out; empty if they do not."""
        if self.config.window is not None:
            return ["a softmax window is beside the state (window=None)"]
        return []

    def fused_map(self, inputs: AttentionInputs) -> str:
        """The feature map that kernels may apply themselves, or "" where only the module can."""
        if inputs.shard is not None:  # what goes to other processes is made of features
            return ""
        plain = not (self.feature_map._forward_hooks or self.feature_map._forward_pre_hooks)
        return self.feature_map.fused if plain else ""

    def choose_impl(self, inputs: AttentionInputs, form: str) -> tuple[str, str]:
        """Return the implementation to run, and why."""
        if self.config.impl != "auto":
            return self.config.impl, "named in the options"
        if inputs.q.device.type == "cuda" and self.kernel_reasons():
            return "torch", f"triton cannot: {'; '.join(self.kernel_reasons())}"
        return choose_impl(
            form,
            *inputs[:3],
            causal=inputs.mask.causal,
            chunk_size=self.config.chunk_size,
        )

    def form(self, inputs: AttentionInputs) -> str:
        """Return the form to run: recurrent for one token, chunk for more."""
        return "recurrent" if inputs.mask.causal and inputs.q.shape[2] == 1 else "chunk"

    def sum_up(
        self, q: Tensor, k: Tensor, inputs: AttentionInputs, *, form: str, impl: str
    ) -> AttentionOutput:
        """Run the op on queries ``[B, H, T, F]`` and keys ``[B, Hkv, S, F]``, zero in padding."""
        if self.far_log_weight is not None:
            weight = self.far_log_weight.to(q.dtype).view(1, -1, 1, 1)
            return self.attend_hybrid(inputs, FarKeys(q, k, weight, mean=True), impl)
        options = self.op_options(inputs, form=form, impl=impl)
        return linear_attention(q, k, inputs.v, causal=inputs.mask.causal, **options)

    def op_options(self, inputs: AttentionInputs, **chosen: str) -> dict[str, Any]:
        """Return what every op of a gated or plain linear attention is told."""
        options: dict[str, Any] = {
            "normalize": self.config.normalize,
            "state": inputs.state,
            "return_state": inputs.return_state,
            "chunk_size": self.config.chunk_size,
            "segment_ids": inputs.mask.segment_ids,
            "eps": self.config.eps,
            "shard": inputs.shard,
            **chosen,
        }
        if chosen["impl"] == "triton" and self.fused_map(inputs):
            options["feature_map"] = self.fused_map(inputs)
            options["feature_scale"] = inputs.scale
            options["real"] = inputs.mask.padding
        return options

    def attend_hybrid(self, inputs: AttentionInputs, far: FarKeys, impl: str) -> AttentionOutput:
        """Attend exactly inside the window and by features outside."""
        assert self.config.window is not None
        if self.training and self.window_dropout is not None and self.window_dropout.share > 0:
            heads = self.window_dropout.heads(
                self.geometry.num_heads, self.geometry.layer, inputs.q.device
            )
            far = far._replace(alone=heads)
        return hybrid_attention(
            inputs.q,
            inputs.k,
            inputs.v,
            far,
            window=self.config.window,
            scale=inputs.scale,
            causal=inputs.mask.causal,
            real=inputs.mask.padding,
            segment_ids=inputs.mask.segment_ids,
            state=inputs.state,
            return_state=inputs.return_state,
            impl=impl,
            chunk_size=self.config.chunk_size,
            shard=inputs.shard,
        )


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """Return a context where autocast leaves the products of features, gates and states wide."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()
