"""Performer: softmax's kernel estimated by positive random features (FAVOR+).

Letters: B batch, H query heads, Hkv key heads, T queries, S keys, D head size, M features.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.compiler import is_compiling

from attnzoo.backends.base import AttentionBackend, register
from attnzoo.backends.config import BackendConfig, Geometry
from attnzoo.backends.inputs import AttentionInputs
from attnzoo.backends.recurrent import RecurrentBackend, full_precision
from attnzoo.backends.window_config import WindowConfig
from attnzoo.errors import ConfigError
from attnzoo.ops.favor import favor_attention
from attnzoo.ops.hybrid import FarKeys
from attnzoo.ops.linear import choose_impl, linear_attention
from attnzoo.ops.random_features import (
    key_shift,
    measured_shift,
    positive_keys,
    positive_queries,
    random_projection,
    relu_features,
    scaled_queries,
)
from attnzoo.state import AttentionOutput

PART = 2**21  # features that are made at a time on a CPU: 8 MiB


@dataclass(frozen=True, kw_only=True)
class PerformerConfig(WindowConfig):
    """Settings of Performer's attention, FAVOR+ (arXiv:2009.14794)."""

    impl: Literal["auto", "reference", "torch", "triton"] = "auto"
    num_features: int = 256  # M; the error of the estimate falls as 1 / M
    kernel: Literal["softmax", "relu"] = "softmax"  # what the features estimate
    orthogonal: bool = True  # rows of the projection, in blocks of D; less variance, no more cost
    hyperbolic: bool = False  # every row together with its negative
    redraw: int | None = None  # draw anew after so many calls in training; None never does
    seed: int = 0  # names the draws, together with the layer's number
    floor: float = 0.0  # added to features, as 1e-4 is in the paper's code; biases towards the mean
    chunk_size: int | None = None  # tokens per parallel step; None lets the op choose
    far_weight: float = 0.01  # of what softmax gives the far keys; the estimate is rough
    # Added to the sum of weights, for rows that see nothing. Weights of large keys get tiny: at a
    # squared length of 200 after scaling, about 1e-26
    eps: float = 1e-30

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, unit in (
            ("num_features", "feature"),
            ("redraw", "call"),
            ("chunk_size", "token"),
        ):
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
                f"PerformerConfig.floor goes with kernel='softmax', got floor={self.floor} with "
                f"kernel={self.kernel!r}, which has a floor of its own; leave it out"
            )
        if self.window is not None and (self.floor or self.kernel != "softmax"):
            raise ConfigError(
                "PerformerConfig.window goes with kernel='softmax' and no floor, whose features "
                f"have the scale of the window's weights, got kernel={self.kernel!r} and "
                f"floor={self.floor}; leave one of them out"
            )
        if self.eps <= 0:
            raise ConfigError(
                f"PerformerConfig.eps must be above 0, got {self.eps}; it keeps rows that see "
                "nothing from dividing 0 by 0"
            )


@register("performer")
class PerformerBackend(RecurrentBackend):
    """Linear attention through random features that estimate the kernel of softmax.

    One projection serves all heads of a layer. It is a persistent buffer: saved, loaded and moved
    with the model, and drawn from the seed and the layer's number alone.
    """

    config: PerformerConfig  # type: ignore[assignment]
    config_class = PerformerConfig
    cross_attention = True
    projection: Tensor  # [M, D]
    calls: Tensor  # training calls so far, a scalar

    def __init__(self, config: BackendConfig, geometry: Geometry) -> None:
        AttentionBackend.__init__(self, config, geometry)
        shape = self.config.num_features, geometry.head_dim
        self.register_buffer("projection", torch.empty(shape))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.add_window()
        self.reset_parameters()

    @property
    def packing(self) -> bool:  # type: ignore[override]
        """Whether packed rows go as they are; with a floor, every sequence's stabiliser counts."""
        return not self.config.floor

    def unsupported_reasons(self, inputs: AttentionInputs) -> list[str]:
        """Say why these inputs cannot run, all reasons at once."""
        reasons = super().unsupported_reasons(inputs)
        if inputs.shard is not None and self.config.floor and not inputs.mask.causal:
            reasons.append(
                "the rows lie on several processes, and a floor stands beside the largest feature "
                "of a whole row (floor=0)"
            )
        return reasons

    def reset_parameters(self) -> None:
        """Draw the first projection."""
        with torch.no_grad():
            self.calls.zero_()
            self.projection.copy_(self.draw(0))
        self.reset_window()

    def typical_product(self) -> float:
        """Return one: the estimate of softmax's weights has their scale."""
        return 1.0

    def draw(self, number: int) -> Tensor:
        """Return the projection of draw ``number``, ``[M, D]``, on the CPU: equal on every rank."""
        return random_projection(
            self.config.num_features,
            self.geometry.head_dim,
            seed=(self.config.seed, self.geometry.layer, number),
            orthogonal=self.config.orthogonal,
            hyperbolic=self.config.hyperbolic,
        )

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def count_call(self) -> None:
        """Count a call in training, and draw anew when it is time.

        A call that gradient checkpointing repeats, during the backward pass, must see what the
        first one saw. The new projection is a new tensor: a backward pass may still need the old.
        """
        assert self.config.redraw is not None
        if torch._C._current_graph_task_id() != -1:
            return
        draws, rest = divmod(int(self.calls), self.config.redraw)
        if draws and not rest:
            self.projection = self.draw(draws).to(self.projection)
        self.calls += 1

    def features(self, inputs: AttentionInputs, impl: str) -> tuple[Tensor, Tensor]:
        """Map queries to ``[B, H, T, M]`` and keys to ``[B, Hkv, S, M]``; padding to zeros."""
        mask, projection, floor = inputs.mask, self.projection, self.config.floor
        impl = _of_features(impl)
        if self.config.kernel == "relu":
            q = relu_features(inputs.q, projection, scale=inputs.scale)
            k = relu_features(inputs.k, projection, scale=inputs.scale)
        else:
            options = {"scale": inputs.scale, "floor": floor}
            if mask.causal or mask.segment_ids is not None or inputs.shard is not None:
                shift = key_shift(projection, floor=floor)
            else:
                shift = measured_shift(inputs.k, projection, real=mask.padding, **options)
            q = positive_queries(inputs.q, projection, shift, **options, impl=impl)
            k = positive_keys(inputs.k, projection, shift, **options, impl=impl)
        if mask.padding is not None:
            k = k.masked_fill(~mask.padding[:, None, :, None], 0)
        return q, k

    def attend(self, inputs: AttentionInputs) -> AttentionOutput:
        """Run the fused form where all keys are seen, else linear attention on features."""
        config, mask = self.config, inputs.mask
        if self.training and config.redraw is not None and inputs.state is None:
            self.count_call()
        form = "recurrent" if mask.causal and inputs.q.shape[2] == 1 else "chunk"
        impl, reason = str(config.impl), "named in the options"
        if impl == "auto":
            chunk_size, given = config.chunk_size, inputs[:3]
            impl, reason = choose_impl(form, *given, causal=mask.causal, chunk_size=chunk_size)
        if config.window is not None:
            self.record(impl, f"softmax in a window of {config.window}; {reason}")
            with full_precision(inputs.q.device):
                return self.attend_hybrid(inputs, self.far_estimate(inputs, impl), impl)
        plain = config.kernel == "softmax" and not config.floor and impl == "torch"
        together = mask.segment_ids is None and inputs.shard is None
        fused = plain and not mask.causal and together and not is_compiling()
        self.record(impl, f"{'fused' if fused else form} form; {reason}")
        with full_precision(inputs.q.device):
            if not fused:
                return self.attend_in_parts(inputs, impl, form)
            out = favor_attention(
                inputs.q,
                inputs.k,
                inputs.v,
                self.projection,
                scale=inputs.scale,
                real=mask.padding,
                eps=config.eps,
            )
        return AttentionOutput(out)

    def far_estimate(self, inputs: AttentionInputs, impl: str) -> FarKeys:
        """Map queries and keys so that their products estimate the weights of softmax itself."""
        assert self.far_log_weight is not None
        scale, shift = inputs.scale, key_shift(self.projection)
        q, log_scale = scaled_queries(inputs.q, self.projection, shift, scale=scale)
        k = positive_keys(inputs.k, self.projection, shift, scale=scale, impl=_of_features(impl))
        if inputs.mask.padding is not None:
            k = k.masked_fill(~inputs.mask.padding[:, None, :, None], 0)
        weight = log_scale + self.far_log_weight.to(q.dtype).view(1, -1, 1, 1)
        return FarKeys(q, k, weight, relative=False)

    def attend_in_parts(self, inputs: AttentionInputs, impl: str, form: str) -> AttentionOutput:
        """Run linear attention, on a CPU over a part of the tokens after the other.

        Features are larger than what they are made from; those of a part fit into the cache, and
        into memory that was used before. On one core, 8 heads of 64 and 128 features, a forward
        pass over 8,192 tokens takes a sixth less time than in one part.
        """
        batch, heads = inputs.q.shape[:2]
        whole = inputs.q.device.type != "cpu" or not inputs.mask.causal or is_compiling()
        whole = whole or inputs.shard is not None  # the state of all tokens is sent at once
        if whole or inputs.mask.segment_ids is not None or impl not in ("torch", "cpp"):
            return self.attend_to_part(inputs, impl, form)
        tokens = max(1, PART // (batch * heads * self.config.num_features * 256)) * 256
        outs, state, parts = [], inputs.state, _parts(inputs, tokens)
        for number, part in enumerate(parts):
            last = number == len(parts) - 1
            part = part._replace(state=state, return_state=inputs.return_state or not last)
            out, state, _ = self.attend_to_part(part, impl, form)
            outs.append(out)
        return AttentionOutput(torch.cat(outs, 2) if len(outs) > 1 else outs[0], state)

    def attend_to_part(self, inputs: AttentionInputs, impl: str, form: str) -> AttentionOutput:
        """Map queries and keys, and run linear attention on them."""
        q, k = self.features(inputs, impl)
        return linear_attention(
            q,
            k,
            inputs.v,
            normalize=True,
            form=form,
            impl=impl,
            state=inputs.state,
            return_state=inputs.return_state,
            chunk_size=self.config.chunk_size,
            causal=inputs.mask.causal,
            segment_ids=inputs.mask.segment_ids,
            eps=self.config.eps,
            shard=inputs.shard,
        )


def _of_features(impl: str) -> str:
    """Return who makes features: sums are a kernel's, features are not."""
    return "torch" if impl in ("triton", "cpp") else impl


def _parts(inputs: AttentionInputs, tokens: int) -> list[AttentionInputs]:
    """Cut a causal call into parts of so many tokens.

    Split, not sliced: each slice would get a gradient of the whole length.
    """
    mask, real = inputs.mask, inputs.mask.padding
    q, k, v = (x.split(tokens, 2) for x in (inputs.q, inputs.k, inputs.v))
    masks = [mask] * len(q)
    if real is not None:
        masks = [replace(mask, padding=part) for part in real.split(tokens, 1)]
    return [inputs._replace(q=q[i], k=k[i], v=v[i], mask=masks[i]) for i in range(len(q))]
