"""The delta rule as a backend: a state that overwrites, with a decay and a softmax window."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnzoo.backends.feature_maps.base import FeatureMapConfig, get_feature_map
from attnzoo.backends.gates.decays import GATES, Gate, GateModule, get_gate
from attnzoo.backends.parts.recurrent import RecurrentBackend, RecurrentConfig, check_features
from attnzoo.contract.backend import register
from attnzoo.contract.capabilities import Capabilities
from attnzoo.contract.config import BackendConfig, Geometry
from attnzoo.contract.context_parallel import latest_before
from attnzoo.contract.inputs import AttentionInputs
from attnzoo.contract.states import (
    AttentionOutput,
    DeltaConvolutionState,
    DeltaState,
    DeltaWindowConvolutionState,
    DeltaWindowState,
    ImplChoice,
    put_slots,
    read_slots,
)
from attnzoo.errors import ConfigError
from attnzoo.ops.convolution import causal_convolution, last_tokens
from attnzoo.ops.delta.api import run_delta_attention
from attnzoo.ops.delta.common import DeltaInputs
from attnzoo.ops.window.causal_window import (
    WindowState,
    causal_window_attention,
    grow_window,
)
from attnzoo.runtime.kernel_calls import autocast_disabled, widen

# -- the short convolution, as in Gated DeltaNet and KDA ------------------------------------------


class EarlierTokens(NamedTuple):
    """The tokens before each row or sequence."""

    x: Tensor  # [B, W - 1, X]


class ShortConvolution(nn.Module):
    """Causal depthwise convolution of queries, keys and values.

    Args:
        channels: X.
        width: W, in tokens, with the token itself.

    Attributes:
        weight: ``[X, 1, W]``, as that of ``nn.Conv1d``; the last column multiplies the token.
    """

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width))

    def reset_parameters(self) -> None:
        """Initialise to the identity."""
        with torch.no_grad():
            self.weight.zero_()[..., -1] = 1

    def forward(
        self, inputs: AttentionInputs, before: Tensor | None
    ) -> tuple[AttentionInputs, Tensor | None]:
        """Convolve the tokens of each sequence.

        Args:
            inputs: Queries, keys and values of rows or of one row of sequences.
            before: The W - 1 tokens before the first one, ``[S, W - 1, X]``, or a pool of them, of
                which the rows at ``inputs.slots`` are read and written.

        Returns:
            The inputs with other queries, keys and values, in float32 or wider, and the last W - 1
            tokens, if ``inputs.return_state``.
        """
        reach, sequences, slots = self.weight.shape[2] - 1, inputs.sequences, inputs.slots
        heads = [inputs.q, inputs.k, inputs.v]
        sizes = [x.shape[1] * x.shape[3] for x in heads]
        x = torch.cat([y.transpose(1, 2).flatten(2) for y in heads], 2)
        if inputs.shard is not None and reach:
            before = self._tokens_of_earlier_ranks(x, inputs)
        pool = before
        if before is not None:
            before = before if slots is None else read_slots((before,), slots)[0]
            before = before.to(x.dtype)
        earlier = None if before is None else widen(before)
        out = causal_convolution(widen(x), self.weight[:, 0], before=earlier, sequences=sequences)
        last: Tensor | None = None
        if inputs.return_state:
            last = last_tokens(x, reach, before=before, sequences=sequences)
            if slots is not None and pool is not None:
                in_place = inputs.reuse_state and not torch.is_grad_enabled()
                last = put_slots((pool,), slots, (last.to(pool.dtype),), in_place=in_place)[0]
        q, k, v = (
            y.unflatten(2, (z.shape[1], -1)).transpose(1, 2)
            for y, z in zip(out.split(sizes, 2), heads, strict=True)
        )
        return inputs._replace(q=q, k=k, v=v), last

    def _tokens_of_earlier_ranks(self, x: Tensor, inputs: AttentionInputs) -> Tensor:
        """Return the W - 1 tokens before this rank's, zeros if there are fewer."""
        assert inputs.shard is not None
        reach, rows = self.weight.shape[2] - 1, inputs.shard.rows(x[:, None])
        (latest,) = latest_before((rows,), inputs.shard, reach)
        seen = inputs.shard.tokens_before(rows.shape[0], x.device)
        is_filled = torch.arange(reach, device=x.device) >= reach - seen[:, None]
        earlier = EarlierTokens(latest[:, 0] * is_filled[..., None])
        return inputs.shard.states(earlier, inputs.sequences).x


# -- the backend ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class DeltaConfig(RecurrentConfig, FeatureMapConfig):
    """Options of the delta rule (arXiv:2412.06464).

    Attributes:
        feature_map: Map of queries and keys before they are normalised to length 1; a larger key
            size holds more pairs.
        gate: Decay of the state: ``"none"`` (DeltaNet), ``"scalar"`` per token and key head (Gated
            DeltaNet), ``"vector"`` per token and key channel (KDA), or another gate that only
            decays.
        allow_negative_eigenvalues: Whether the write strength is in (0, 2) instead of (0, 1), so
            that a token may reverse what the state holds for its key.
        short_convolution: Width in tokens of a causal convolution per channel of queries, keys and
            values before the delta rule, as in Gated DeltaNet and KDA, which use 4; 0 means none.
            It starts as the identity; a window has the queries, keys and values without it.
        output_gate: Whether the state's output is multiplied by a gate per value channel that is
            computed from hidden states, as in KDA. It starts at 1.
        window: Latest keys with exact softmax weights. Their output and the state's are mixed per
            token and head. ``None`` means none.
        far_weight: Initial weight of the state's output, relative to the window's.
    """

    ops: ClassVar[tuple[str, ...]] = ("delta_attention", "delta_step")
    largest: ClassVar[Mapping[str, int]] = {"short_convolution": 2**10}  # a weight per channel

    feature_map: str = "identity"
    gate: str = "scalar"
    allow_negative_eigenvalues: bool = False
    short_convolution: int = 0
    output_gate: bool = False
    far_weight: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gate != "none":
            self._check_gate()
        if get_feature_map(self.feature_map).positional:
            raise ConfigError(
                f"{type(self).__name__}.feature_map={self.feature_map!r} depends on positions, "
                "which the delta rule does not count; take another map"
            )
        if self.short_convolution < 0 or self.short_convolution == 1:
            raise ConfigError(
                f"{type(self).__name__}.short_convolution must be 0 (none) or a width of at least "
                f"2 tokens, got {self.short_convolution}; Gated DeltaNet uses 4"
            )

    def _check_gate(self) -> None:
        """Raise ``ConfigError`` if the gate is unknown, or more than a decay."""
        name = f"{type(self).__name__}.gate"
        try:
            reason = _refusal(get_gate(self.gate))
        except ConfigError as error:
            raise ConfigError(f"{name}: {error} 'none' is no gate.") from None
        if reason:
            fit = ["none", *(gate for gate, cls in GATES.items() if not _refusal(cls))]
            raise ConfigError(
                f"{name}={self.gate!r} does not fit the delta rule: it {reason}; take one of "
                f"{', '.join(fit)}, or the backend gated_linear"
            )


def _refusal(gate: type[GateModule]) -> str:
    """Return why the delta rule does not take a gate, or ``""``."""
    if not issubclass(gate, Gate):
        return "has a state of its own"
    if gate.scales_keys:
        return "multiplies keys, whose length the delta rule sets to 1"
    return ""


class OutputGate(GateModule):
    r"""The gate of the state's output, :math:`2\,\sigma(x W_1 W_2 + b)` with rank E; 1 at first.

    KDA (arXiv:2510.26692) multiplies by :math:`\sigma(x W_1 W_2 + b)` after a normalisation of the
    output. A pretrained layer's output has a length, so there is no normalisation here.
    """

    shapes: ClassVar = {"down": ("E M", None), "up": ("QE E", 0.0), "bias": ("Q E", 0.0)}

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return factors, ``[B, H, T, E]``, from ``[B, T, M]``."""
        return 2 * self.channel_logits(hidden_states).sigmoid()


@register("delta")
class DeltaBackend(RecurrentBackend):
    r"""The delta rule: a state that overwrites what it holds for a key; causal only.

    The write strength of a token and key head is :math:`\sigma(x w + b)` with the hidden state x,
    or twice that. With a window, outputs are
    :math:`(1 - m)\, o_\mathrm{window} + m\, o_\mathrm{delta}` with the mixing weight
    :math:`m = \sigma(x u - c \ell + f)` of a token and head, where :math:`\ell` is the window's
    log-sum-exp: a token that finds its answer in the window needs no other.
    """

    config: DeltaConfig
    config_class = DeltaConfig
    capabilities = replace(
        RecurrentBackend.capabilities,
        bidirectional=False,
        sequences=True,
        reuses_state=True,
        needs_hidden_states=True,
        from_hidden_states="write strengths",
    )
    window_op = "causal_window_attention"
    no_weight_decay = ("far_log_weight", "mix_lse")

    def __init__(self, config: BackendConfig, geometry: Geometry) -> None:
        super().__init__(config, geometry)
        # A layer without a hidden size is refused after it is built; until then 1 is a placeholder
        heads, hidden = geometry.num_key_heads, geometry.hidden_size or 1
        value_dim = geometry.value_dim or geometry.head_dim
        self.feature_map = get_feature_map(self.config.feature_map)(config, geometry)
        self.write_weight = nn.Parameter(torch.empty(heads, hidden))
        self.write_bias = nn.Parameter(torch.empty(heads))
        self.gate: Gate | None = None
        if self.config.gate != "none":
            gate = get_gate(self.config.gate)
            assert issubclass(gate, Gate)
            self.gate = gate(config, replace(geometry, head_dim=self.feature_map.size))
        self.convolution: ShortConvolution | None = None
        if self.config.short_convolution:
            channels = (geometry.num_heads + heads) * geometry.head_dim + heads * value_dim
            self.convolution = ShortConvolution(channels, self.config.short_convolution)
        self.output_gate: OutputGate | None = None
        if self.config.output_gate:
            self.output_gate = OutputGate(config, geometry)
        self.mix_weight: nn.Parameter | None = None  # u
        self.mix_lse: nn.Parameter | None = None  # c
        if self.config.window is not None:
            self.mix_weight = nn.Parameter(torch.empty(geometry.num_heads, hidden))
            self.mix_lse = nn.Parameter(torch.empty(geometry.num_heads))
        DeltaBackend.reset_parameters(self)

    def reset_parameters(self) -> None:
        """Initialise to equal write strengths and decays, and to a small weight of the state."""
        self.feature_map.reset_parameters()
        nn.init.zeros_(self.write_weight)
        nn.init.zeros_(self.write_bias)
        for part in (self.gate, self.convolution, self.output_gate):
            if part is not None:
                part.reset_parameters()
        if self.far_log_weight is not None and self.mix_weight is not None:
            assert self.mix_lse is not None
            nn.init.constant_(self.far_log_weight, math.log(self.config.far_weight))
            nn.init.zeros_(self.mix_weight)
            nn.init.zeros_(self.mix_lse)

    def layer_capabilities(self) -> Capabilities:
        """Return the capabilities with this convolution and output gate."""
        convolves = self.config.short_convolution > 0
        return replace(
            super().layer_capabilities(),
            has_weights=not (convolves or self.config.output_gate),
            state_from_keys=not convolves,  # a convolution keeps queries too
        )

    def layer_reasons(self) -> list[str]:
        """Return every reason why this backend does not support its layer."""
        reasons = super().layer_reasons() + self.feature_map.layer_reasons()
        if self.geometry.hidden_size is None:
            reasons.append(
                "the layer's hidden size is unknown, and write strengths are computed from hidden "
                "states (use gated_linear with gate 'retnet')"
            )
        return reasons

    def unsupported_reasons(self, inputs: AttentionInputs) -> list[str]:
        """Return every reason why these inputs are unsupported."""
        reasons = super().unsupported_reasons(inputs)
        if not inputs.mask.causal:
            reasons.append("the mask is not causal (the delta rule needs an order of the tokens)")
        return reasons

    def attend(self, inputs: AttentionInputs) -> AttentionOutput:
        """Run the delta rule, and the softmax window beside it if there is one."""
        with autocast_disabled(inputs.q.device):
            far = self.attend_state(inputs)
            if self.config.window is None:
                return far._replace(out=far.out.to(inputs.v.dtype))
            old, window = inputs.state, self.window_of_call(inputs)
            assert far.impl is not None
            sinks = self.config.num_sinks
            if old is not None and inputs.slots is None and old.k.shape[2] < window + sinks:
                k, v = (grow_window(x, window, sinks) for x in (old.k, old.v))
                old = old._replace(k=k, v=v)
            near, lse, near_state, near_impl = causal_window_attention(
                inputs.q,
                inputs.k,
                inputs.v,
                window=window,
                scale=inputs.scale,
                sequences=inputs.sequences,
                state=None if old is None else WindowState(old.k, old.v, old.seen),
                return_state=inputs.return_state,
                shard=inputs.shard,
                impl=self.config.impl,
                num_sinks=sinks,
                slots=inputs.slots,
                reuse_state=inputs.reuse_state,
            )
            weight = self.mixing_weight(inputs, lse)
            out = torch.lerp(near, far.out.to(near.dtype), weight).to(inputs.v.dtype)
            state: Any = None
            if far.state is not None and near_state is not None:
                kv, *convolved = far.state
                kind = DeltaWindowConvolutionState if convolved else DeltaWindowState
                state = kind(kv, *near_state, *convolved)
            reason = f"softmax window ({near_impl.impl}) + {far.impl.reason}"
            choice = ImplChoice(far.impl.impl, reason)
            return AttentionOutput(out, state, None, choice)

    def attend_state(self, inputs: AttentionInputs) -> AttentionOutput:
        """Return the state's output and the state, without the window."""
        old = inputs.state
        state = None if old is None else DeltaState(old.kv)
        last: Tensor | None = None
        if self.convolution is not None:
            before = None if old is None else old.convolved
            inputs, last = self.convolution(inputs, before)
        output = self.run_op(inputs, state)
        if self.output_gate is not None:
            assert inputs.hidden_states is not None
            gate = self.output_gate(inputs.hidden_states)
            output = output._replace(out=output.out * gate)
        if last is not None:
            output = output._replace(state=DeltaConvolutionState(output.state.kv, last))  # type: ignore[union-attr]
        return output

    def run_op(self, inputs: AttentionInputs, state: DeltaState | None) -> AttentionOutput:
        """Run the delta rule on the features of queries and keys."""
        assert inputs.hidden_states is not None
        hidden = widen(inputs.hidden_states)
        beta = torch.sigmoid(_project(hidden, self.write_weight, self.write_bias))
        if self.fused_feature_map() == "identity":
            q, k = widen(inputs.q), widen(inputs.k)
        else:
            q = self.feature_map(inputs.q, inputs.scale, of="queries")
            k = self.feature_map(inputs.k, inputs.scale, of="keys")
            check_features(q, k, inputs)
        x = DeltaInputs(
            q=q,
            k=k,
            v=inputs.v,
            beta=2 * beta if self.config.allow_negative_eigenvalues else beta,
            log_decay=None if self.gate is None else self.gate(k, inputs.hidden_states).log_decay,
            state=state,
            scale=1.0,
            chunk_size=self.config.chunk_size,
            normalize=True,
            sequences=inputs.sequences,
            return_state=inputs.return_state,
            reuse_state=inputs.reuse_state,
            slots=inputs.slots,
        )
        return run_delta_attention(x, self.config.impl, inputs.shard)

    def mixing_weight(self, inputs: AttentionInputs, lse: Tensor) -> Tensor:
        """Return m, the weight of the state's output, ``[B, H, T, 1]``."""
        assert inputs.hidden_states is not None
        assert self.far_log_weight is not None
        assert self.mix_weight is not None
        assert self.mix_lse is not None
        logit = _project(widen(inputs.hidden_states), self.mix_weight, self.far_log_weight)
        logit = logit.unsqueeze(-1).to(lse.dtype) - self.mix_lse.to(lse.dtype).view(-1, 1, 1) * lse
        return logit.sigmoid()


def _project(hidden_states: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return one number per token and head, ``[B, H, T]``, from ``[B, T, M]``."""
    x = hidden_states
    return F.linear(x, weight.to(x.dtype), bias.to(x.dtype)).transpose(1, 2)
