"""Performer: softmax attention estimated by positive random features (FAVOR+).

Other letters: M features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.compiler import is_compiling

from attnzoo.backends.parts.recurrent import RecurrentBackend, RecurrentConfig, check_eps
from attnzoo.contract.backend import register
from attnzoo.contract.capabilities import Capabilities
from attnzoo.contract.config import BackendConfig, Geometry
from attnzoo.contract.inputs import AttentionInputs
from attnzoo.contract.padding import fill_padding
from attnzoo.contract.states import AttentionOutput, ImplChoice
from attnzoo.errors import ConfigError
from attnzoo.ops.favor.api import favor_attention
from attnzoo.ops.features.random_features import (
    key_shift,
    measured_shift,
    positive_keys,
    positive_queries,
    random_projection,
    relu_features,
    scaled_queries,
)
from attnzoo.ops.hybrid.api import LinearBranch
from attnzoo.ops.linear.api import run_linear_attention
from attnzoo.ops.linear.common import LinearInputs
from attnzoo.runtime.kernel_calls import autocast_disabled
from attnzoo.runtime.recomputation import value_of_call

BLOCK_FEATURES = 2**21  # features that are computed at once on a CPU: 8 MiB


@dataclass(frozen=True, kw_only=True)
class PerformerConfig(RecurrentConfig):
    """Settings of Performer's attention, FAVOR+ (arXiv:2009.14794).

    Attributes:
        eps: Added to the sum of weights, by which outputs are divided.
        num_features: M, the number of random features. The error of the estimate falls as 1 / M.
        kernel: Kernel that the features estimate.
        orthogonal: Whether rows of the projection are orthogonal in blocks of D: less variance at
            the same cost.
        hyperbolic: Whether each row is used together with its negative.
        redraw: Training calls between two draws of the features. ``None`` means never.
        seed: Seed of the draws, together with the layer's index.
        floor: Added to features, as 1e-4 in the paper's code. It biases outputs towards the mean of
            the values.
    """

    largest: ClassVar[Mapping[str, int]] = {**BackendConfig.largest, "num_features": 2**16}
    # Weights of large keys are tiny: at a squared length of 200 after scaling, about 1e-26
    eps: float = 1e-30
    num_features: int = 256
    kernel: Literal["softmax", "relu"] = "softmax"
    orthogonal: bool = True
    hyperbolic: bool = False
    redraw: int | None = None
    seed: int = 0
    floor: float = 0.0
    far_weight: float = 0.01  # relative to softmax's weight of these keys; the estimate is rough

    def __post_init__(self) -> None:
        super().__post_init__()
        check_eps(self, self.eps, type(self).eps)
        for name, unit in (("num_features", "feature"), ("redraw", "call")):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(
                    f"PerformerConfig.{name} must be at least 1 {unit}, got {value}; "
                    f"leave it out to have {PerformerConfig.default_options()[name]}"
                )
        if self.hyperbolic and self.num_features % 2:
            raise ConfigError(
                "PerformerConfig.num_features must be even with hyperbolic=True, where features "
                f"come in pairs, got {self.num_features}; take {self.num_features + 1}"
            )
        if self.floor < 0:
            raise ConfigError(
                f"PerformerConfig.floor must not be negative, got {self.floor}; features are "
                "weights, and the paper's code adds 1e-4"
            )
        if self.floor and self.kernel != "softmax":
            raise ConfigError(
                f"PerformerConfig.floor needs kernel='softmax', got floor={self.floor} with "
                f"kernel={self.kernel!r}, which has a floor of its own; leave it out"
            )
        if self.window is not None and (self.floor or self.kernel != "softmax"):
            raise ConfigError(
                "PerformerConfig.window needs kernel='softmax' and floor=0, whose features "
                f"have the scale of the window's weights, got kernel={self.kernel!r} and "
                f"floor={self.floor}; leave one of them out"
            )


@register("performer")
class PerformerBackend(RecurrentBackend):
    """Linear attention through random features that estimate the kernel of softmax.

    All heads of a layer share one projection. It is a persistent buffer: saved, loaded and moved
    with the model. It is drawn from the seed and the layer's index only.
    """

    config: PerformerConfig
    config_class = PerformerConfig
    capabilities = replace(RecurrentBackend.capabilities, reuses_state=True, cross_attention=True)
    projection: Tensor  # [M, D]
    optional_buffers: ClassVar[tuple[str, ...]] = ("calls",)
    calls: Tensor  # number of training calls, a scalar

    def __init__(self, config: BackendConfig, geometry: Geometry) -> None:
        super().__init__(config, geometry)
        shape = self.config.num_features, geometry.head_dim
        self.register_buffer("projection", torch.empty(shape))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.reset_parameters()

    def layer_capabilities(self) -> Capabilities:
        """Return the capabilities; features of all keys of a row have one largest exponent."""
        by_sequence = self.geometry.causal or self.config.window is not None
        return replace(super().layer_capabilities(), sequences=by_sequence)

    def unsupported_reasons(self, inputs: AttentionInputs) -> list[str]:
        """Return every reason why these inputs are unsupported."""
        reasons = super().unsupported_reasons(inputs)
        if inputs.shard is not None and self.config.floor and not inputs.mask.causal:
            reasons.append(
                "several ranks hold parts of each row, and a floor is relative to the largest "
                "feature of a row (use floor=0)"
            )
        return reasons

    def reset_parameters(self) -> None:
        """Draw the first projection and initialise the linear branch."""
        with torch.no_grad():
            self.calls.zero_()
            self.projection.copy_(self.draw(0))
        super().reset_parameters()

    def expected_feature_product(self) -> float:
        """Return 1: the products of features estimate the weights of softmax."""
        return 1.0

    def draw(self, number: int) -> Tensor:
        """Return the projection of draw ``number``, ``[M, D]``, on the CPU; equal on all ranks."""
        return random_projection(
            self.config.num_features,
            self.geometry.head_dim,
            seed=(self.config.seed, self.geometry.layer, number),
            orthogonal=self.config.orthogonal,
            hyperbolic=self.config.hyperbolic,
        )

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def projection_of_call(self) -> Tensor:
        """Count a training call, and return its projection, new after every ``redraw`` calls.

        A call that gradient checkpointing repeats gets the projection of the first one.
        """
        return value_of_call(self, self.geometry.name, self._next_projection)

    def _next_projection(self) -> Tensor:
        """Count a call, and draw its projection if it is due.

        The new projection is a new tensor: a backward pass may still need the old.
        """
        assert self.config.redraw is not None
        draws, rest = divmod(int(self.calls), self.config.redraw)
        if draws and not rest:
            self.projection = self.draw(draws).to(self.projection)
        self.calls += 1
        return self.projection

    def attend(self, inputs: AttentionInputs) -> AttentionOutput:
        """Run the window hybrid, the fused bidirectional op, or linear attention on features."""
        projection = self.projection
        if self.training and self.config.redraw is not None and inputs.state is None:
            projection = self.projection_of_call()
        with autocast_disabled(inputs.q.device):
            if self.config.window is not None:
                return self.attend_hybrid(inputs, self.linear_branch(inputs, projection))
            if not self.fuses(inputs):
                return self.attend_in_blocks(inputs, projection)
            out = favor_attention(
                inputs.q,
                inputs.k,
                inputs.v,
                projection,
                scale=inputs.scale,
                mask=inputs.mask,
                eps=self.config.eps,
            )
        reason = "fused bidirectional form; features are not written to memory"
        return AttentionOutput(out, impl=ImplChoice("torch", reason))

    def fuses(self, inputs: AttentionInputs) -> bool:
        """Return whether ``favor_attention`` supports a call and computes it faster."""
        config, mask = self.config, inputs.mask
        if mask.causal or inputs.sequences is not None or inputs.shard is not None:
            return False
        plain = config.kernel == "softmax" and not config.floor and config.impl in ("auto", "torch")
        return plain and not is_compiling()

    def features(self, inputs: AttentionInputs, projection: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features of queries, ``[B, H, T, M]``, and of keys, ``[B, Hkv, S, M]``.

        Features of keys are zero at padding.
        """
        mask, floor = inputs.mask, self.config.floor
        if self.config.kernel == "relu":
            q = relu_features(inputs.q, projection, scale=inputs.scale)
            k = relu_features(inputs.k, projection, scale=inputs.scale)
        else:
            options = {"scale": inputs.scale, "floor": floor}
            if mask.causal or inputs.sequences is not None or inputs.shard is not None:
                shift = key_shift(projection, floor=floor)
            else:
                shift = measured_shift(inputs.k, projection, padding_mask=mask.padding, **options)
            q = positive_queries(inputs.q, projection, shift, **options)
            k = positive_keys(inputs.k, projection, shift, **options)
        return q, fill_padding(k, mask.padding)

    def linear_branch(self, inputs: AttentionInputs, projection: Tensor) -> LinearBranch:
        """Return features whose products estimate the weights of softmax, without a factor."""
        assert self.far_log_weight is not None
        scale, shift = inputs.scale, key_shift(projection)
        q, log_scale = scaled_queries(inputs.q, projection, shift, scale=scale)
        k = positive_keys(inputs.k, projection, shift, scale=scale)
        log_weight = log_scale + self.far_log_weight.to(q.dtype).view(1, -1, 1, 1)
        return LinearBranch(q, k, log_weight, relative=False)

    def attend_in_blocks(self, inputs: AttentionInputs, projection: Tensor) -> AttentionOutput:
        """Run linear attention on features; causal calls on a CPU run block after block.

        Features are larger than queries and keys. The features of a block fit into the cache, and
        their memory is reused. On one core, with 8 heads of size 64 and 128 features, a forward
        pass over 8,192 tokens takes a sixth less time than in one block.
        """
        batch, heads = inputs.q.shape[:2]
        blocks = inputs.q.device.type == "cpu" and inputs.mask.causal and not is_compiling()
        blocks = blocks and inputs.sequences is None
        blocks = blocks and inputs.shard is None  # the state of all tokens is sent at once
        if not blocks or self.config.impl in ("reference", "triton"):
            return self.attend_block(inputs, projection)
        tokens = max(1, BLOCK_FEATURES // (batch * heads * self.config.num_features * 256)) * 256
        outs, state, choice, parts = [], inputs.state, None, _split_tokens(inputs, tokens)
        for number, part in enumerate(parts):
            is_last = number == len(parts) - 1
            part = part._replace(state=state, return_state=inputs.return_state or not is_last)
            out, state, _, choice = self.attend_block(part, projection)
            outs.append(out)
        return AttentionOutput(
            torch.cat(outs, 2) if len(outs) > 1 else outs[0], state, None, choice
        )

    def attend_block(self, inputs: AttentionInputs, projection: Tensor) -> AttentionOutput:
        """Compute the features, and run linear attention on them."""
        q, k = self.features(inputs, projection)
        x = LinearInputs(
            *(q, k, inputs.v, None, inputs.state, inputs.mask.causal),
            normalize=True,
            scale=1.0,
            eps=self.config.eps,
            chunk_size=self.config.chunk_size,
            feature_map="identity",
            feature_scale=1.0,
            sequences=inputs.sequences,
            return_state=inputs.return_state,
            reuse_state=inputs.reuse_state,
            slots=inputs.slots,
        )
        return run_linear_attention(x, self.config.impl, inputs.shard)


def _split_tokens(inputs: AttentionInputs, tokens: int) -> list[AttentionInputs]:
    """Split a causal call into parts of so many tokens.

    Uses ``split``: the gradient of each slice would have the length of the whole sequence.
    """
    q, k, v = (x.split(tokens, 2) for x in (inputs.q, inputs.k, inputs.v))
    return [inputs._replace(q=q[i], k=k[i], v=v[i]) for i in range(len(q))]
