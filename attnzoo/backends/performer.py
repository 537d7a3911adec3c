"""Performer: softmax attention estimated by positive random features (FAVOR+).

Other letters: M features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.compiler import is_compiling

from attnzoo.backends.parts.recurrent import RecurrentBackend, RecurrentConfig, check_eps
from attnzoo.contract.backend import register
from attnzoo.contract.capabilities import Capabilities
from attnzoo.contract.config import BackendConfig, Geometry
from attnzoo.contract.inputs import AttentionInputs
from attnzoo.contract.padding import fill_padding
from attnzoo.contract.states import AttentionOutput
from attnzoo.ops.features.random_features import (
    key_shift,
    measured_shift,
    positive_keys,
    positive_queries,
    random_projection,
    scaled_queries,
)
from attnzoo.ops.hybrid.api import LinearBranch
from attnzoo.ops.linear.api import run_linear_attention
from attnzoo.ops.linear.common import LinearInputs
from attnzoo.runtime.kernel_calls import autocast_disabled

BLOCK_FEATURES = 2**21  # features that are computed at once on a CPU: 8 MiB


@dataclass(frozen=True, kw_only=True)
class PerformerConfig(RecurrentConfig):
    """Settings of Performer's attention, FAVOR+ (arXiv:2009.14794).

    Attributes:
        eps: Added to the sum of weights, by which outputs are divided.
        num_features: M, the number of random features. The error of the estimate falls as 1 / M.
        seed: Seed of the features, together with the layer's index. They change only when training
            calls ``redraw`` of the backend between two steps.
    """

    smallest: ClassVar[Mapping[str, str]] = {"num_features": "1 feature"}
    largest: ClassVar[Mapping[str, int]] = {**BackendConfig.largest, "num_features": 2**16}
    # Weights of large keys are tiny: at a squared length of 200 after scaling, about 1e-26
    eps: float = 1e-30
    num_features: int = 256
    seed: int = 0
    far_weight: float = 0.01  # relative to softmax's weight of these keys; the estimate is rough

    def __post_init__(self) -> None:
        super().__post_init__()
        check_eps(self, self.eps, type(self).eps)


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

    def __init__(self, config: BackendConfig, geometry: Geometry) -> None:
        super().__init__(config, geometry)
        shape = self.config.num_features, geometry.head_dim
        self.register_buffer("projection", torch.empty(shape))
        self.reset_parameters()

    def layer_capabilities(self) -> Capabilities:
        """Return the capabilities; features of all keys of a row have one largest exponent."""
        by_sequence = self.geometry.causal or self.config.window is not None
        return replace(super().layer_capabilities(), sequences=by_sequence)

    def reset_parameters(self) -> None:
        """Draw the projection, equal on all ranks, and initialise the linear branch."""
        self.redraw(0)
        super().reset_parameters()

    @torch.no_grad()
    def redraw(self, number: int) -> None:
        """Draw the projection again, for use between steps of training (section 3 of the paper).

        Args:
            number: Number of the draw, equal on all ranks; 0 is that of an untrained model.
        """
        seed = self.config.seed, self.geometry.layer, number
        self.projection.copy_(random_projection(*self.projection.shape, seed=seed))

    def expected_feature_product(self) -> float:
        """Return 1: the products of features estimate the weights of softmax."""
        return 1.0

    def attend(self, inputs: AttentionInputs) -> AttentionOutput:
        """Run the window hybrid, or linear attention on features."""
        with autocast_disabled(inputs.q.device):
            if self.config.window is not None:
                return self.attend_hybrid(inputs, self.linear_branch(inputs))
            return self.attend_in_blocks(inputs)

    def features(self, inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
        """Return the features of queries, ``[B, H, T, M]``, and of keys, ``[B, Hkv, S, M]``.

        Features of keys are zero at padding.
        """
        mask, projection, scale = inputs.mask, self.projection, inputs.scale
        if mask.causal or inputs.sequences is not None or inputs.shard is not None:
            shift = key_shift(projection)
        else:
            shift = measured_shift(inputs.k, projection, padding_mask=mask.padding, scale=scale)
        q = positive_queries(inputs.q, projection, shift, scale=scale)
        k = positive_keys(inputs.k, projection, shift, scale=scale)
        return q, fill_padding(k, mask.padding)

    def linear_branch(self, inputs: AttentionInputs) -> LinearBranch:
        """Return features whose products estimate the weights of softmax, without a factor."""
        assert self.far_log_weight is not None
        scale, shift = inputs.scale, key_shift(self.projection)
        q, log_scale = scaled_queries(inputs.q, self.projection, shift, scale=scale)
        k = positive_keys(inputs.k, self.projection, shift, scale=scale)
        log_weight = log_scale + self.far_log_weight.to(q.dtype).view(1, -1, 1, 1)
        return LinearBranch(q, k, log_weight, relative=False)

    def attend_in_blocks(self, inputs: AttentionInputs) -> AttentionOutput:
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
            return self.attend_block(inputs)
        tokens = max(1, BLOCK_FEATURES // (batch * heads * self.config.num_features * 256)) * 256
        outs, state, choice, parts = [], inputs.state, None, _split_tokens(inputs, tokens)
        for number, part in enumerate(parts):
            is_last = number == len(parts) - 1
            part = part._replace(state=state, return_state=inputs.return_state or not is_last)
            out, state, _, choice = self.attend_block(part)
            outs.append(out)
        return AttentionOutput(
            torch.cat(outs, 2) if len(outs) > 1 else outs[0], state, None, choice
        )

    def attend_block(self, inputs: AttentionInputs) -> AttentionOutput:
        """Compute the features, and run linear attention on them."""
        q, k = self.features(inputs)
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
