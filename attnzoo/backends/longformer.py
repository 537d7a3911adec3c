"""Longformer: a sliding window for every token, and a few global tokens that see everything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnzoo.backends.base import AttentionBackend, register
from attnzoo.backends.config import BackendConfig, Geometry
from attnzoo.backends.inputs import MASK_IN_BIAS, AttentionInputs
from attnzoo.errors import ConfigError, UnsupportedError
from attnzoo.masks import AttentionMask
from attnzoo.ops.context_parallel import Shard, with_neighbours
from attnzoo.ops.longformer import IMPLS, GlobalTokens, choose_impl, longformer_attention
from attnzoo.ops.longformer_flex import NO_BIAS, flex_reasons
from attnzoo.ops.longformer_pattern import Pattern, check_positive, find_globals, per_head, take
from attnzoo.ops.longformer_state import Step, attend_from, global_at, state_after
from attnzoo.state import AttentionOutput


@dataclass(frozen=True, kw_only=True)
class LongformerConfig(BackendConfig):
    """Settings of attention within a sliding window and to global tokens (arXiv:2004.05150)."""

    # Who computes whole sequences; a decoding step from a state has one form only.
    impl: Literal["auto", "reference", "torch", "flex"] = "auto"
    # w: a causal query sees the w latest keys, its own included; otherwise w keys to either side.
    # One number, or a list with one for each head. Padding does not count.
    window: int | tuple[int, ...] = 128
    # d: a head sees every d-th key, w of them, so it reaches d times as far; as for the window
    dilation: int | tuple[int, ...] = 1
    num_global: int = 0  # this many first tokens see everything and are seen by every token
    # further such tokens, counted from the first real one; for decoding, all keys up to the last
    # of these positions are kept
    global_positions: tuple[int, ...] = ()
    # whether global tokens see through queries, keys and values of their own, which start as
    # copies: what is learned is added to the layer's own, after its position embedding
    global_projections: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        check_positive(f"{name}.window", self.window)
        check_positive(f"{name}.dilation", self.dilation)
        if self.num_global < 0:
            raise ConfigError(
                f"{name}.num_global must be 0 or more, got {self.num_global}; "
                "it counts tokens from the first"
            )
        if self.global_positions and min(self.global_positions) < 0:
            raise ConfigError(
                f"{name}.global_positions must be 0 or more, got {list(self.global_positions)}; "
                "positions count from the first token, whose position is 0"
            )

    @property
    def positions(self) -> tuple[int, ...]:
        """Positions of all global tokens, rising."""
        return tuple(sorted({*range(self.num_global), *self.global_positions}))


@dataclass(frozen=True, kw_only=True)
class GlobalMask(AttentionMask):
    """A mask that says which tokens are global in this call, instead of those in the options.

    Attributes:
        global_tokens: ``[B, S]`` bool.
    """

    global_tokens: Tensor


class GlobalProjections(nn.Module):
    """What is added to queries, keys and values where global tokens see; zero at first.

    Added to a projection ``W x``, a learned ``D x`` makes any other projection ``(W + D) x`` of it.
    """

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        assert geometry.hidden_size is not None
        assert geometry.value_dim is not None
        heads, key_heads = geometry.num_heads, geometry.num_key_heads
        self.query = nn.Linear(geometry.hidden_size, heads * geometry.head_dim)
        # no bias: one vector added to all keys that a query sees changes nothing
        self.key = nn.Linear(geometry.hidden_size, key_heads * geometry.head_dim, bias=False)
        self.value = nn.Linear(geometry.hidden_size, key_heads * geometry.value_dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Make the global projections copies of the layer's own."""
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(
        self, inputs: AttentionInputs, where: Tensor, most: int | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values for the rows of global tokens.

        Args:
            inputs: The layer's own, and the hidden states.
            where: Which tokens are global, ``[B, T]`` bool; other queries stay as they are.
            most: A bound on their number in a row.
        """
        q, k, v, hidden = *inputs[:3], inputs.hidden_states
        assert hidden is not None
        hidden = hidden.to(self.query.weight.dtype)
        places = find_globals(where, most)
        if places is not None:
            place = places.place.expand(len(q), -1)
            rows = hidden.gather(1, place[:, :, None].expand(-1, -1, hidden.shape[2]))
            found = take(q, place) + _split(self.query(rows), q)
            q = q.scatter(2, place[:, None, :, None].expand_as(found), found)
        return q, k + _split(self.key(hidden), k), v + _split(self.value(hidden), v)


def _split(x: Tensor, like: Tensor) -> Tensor:
    """Cut ``[B, T, H D]`` into heads, ``[B, H, T, D]``, in the dtype of ``like``."""
    return x.view(*x.shape[:2], like.shape[1], -1).transpose(1, 2).to(like.dtype)


@register("longformer")
class LongformerBackend(AttentionBackend):
    """Softmax over a window and global tokens; decoding keeps the window's keys and the global.

    In a layer with a position bias decoding keeps all keys, for the bias comes with those.
    """

    config: LongformerConfig
    config_class = LongformerConfig
    impls: ClassVar[tuple[str, ...]] = IMPLS
    dropout = True
    context_parallel = True

    def __init__(self, config: BackendConfig, geometry: Geometry) -> None:
        super().__init__(config, geometry)
        name = f"{geometry.name}: {type(config).__name__}"
        per_head(f"{name}.window", self.config.window, geometry.num_heads)
        per_head(f"{name}.dilation", self.config.dilation, geometry.num_heads)
        self.global_projections: GlobalProjections | None = None
        if self.config.global_projections and geometry.hidden_size is not None:
            self.global_projections = GlobalProjections(geometry)

    @property
    def recurrent(self) -> bool:  # type: ignore[override]
        """Whether decoding keeps a state: a bias is known for keys in a cache, not in a state."""
        return not self.geometry.position_bias

    @property
    def additive_bias(self) -> bool:  # type: ignore[override]
        """Whether the layer adds a bias to its scores; other layers could only be given a mask."""
        return self.geometry.position_bias

    @property
    def windowed(self) -> bool:  # type: ignore[override]
        """Whether a sliding window of the model can be honoured: it would hide global tokens."""
        return not self.config.positions

    @property
    def packing(self) -> bool:  # type: ignore[override]
        """Whether packed rows need not be taken apart: each segment has its own global tokens."""
        return not self.config.positions

    @property
    def needs_hidden_states(self) -> bool:  # type: ignore[override]
        """Whether global tokens have projections of their own."""
        return self.config.global_projections

    def reset_parameters(self) -> None:
        """Make the global projections copies of the layer's own."""
        if self.global_projections is not None:
            self.global_projections.reset_parameters()

    def layer_reasons(self) -> list[str]:
        """Say why this backend cannot serve its layer, all reasons at once."""
        reasons = super().layer_reasons()
        if self.needs_hidden_states and self.geometry.hidden_size is None:
            reasons.append("the layer's hidden size is unknown, and global_projections need it")
        return reasons

    def unsupported_reasons(self, inputs: AttentionInputs) -> list[str]:
        """Say why these inputs cannot run, all reasons at once."""
        reasons = super().unsupported_reasons(inputs)
        q, mask = inputs.q, inputs.mask
        if not q.ndim == inputs.k.ndim == 4:
            return reasons
        if q.shape[1] != self.geometry.num_heads:
            reasons.append(
                f"{q.shape[1]} query heads are given (the layer has {self.geometry.num_heads})"
            )
        keeps = inputs.state is not None or inputs.return_state
        if keeps and not self._is_causal(inputs):
            reasons.append("a state is asked for without a causal mask (only causal ones have it)")
        causal = self._is_causal(inputs)
        if inputs.bias is not None and self.geometry.causal and not causal:
            reasons.append(MASK_IN_BIAS)
        if q.shape[2] != inputs.k.shape[2] and not causal:
            reasons.append(
                f"{q.shape[2]} queries and {inputs.k.shape[2]} keys are given without a causal "
                "mask (it needs as many of each)"
            )
        if inputs.state is not None and inputs.dropout > 0:
            reasons.append("attention dropout is given with a state (set it to 0 to decode)")
        if isinstance(mask, GlobalMask) and inputs.shard is not None:
            reasons.append("global_tokens are given, while the rows lie on several processes")
        if isinstance(mask, GlobalMask):
            reasons += self._global_mask_reasons(mask, inputs, keeps=keeps)
        if self.config.impl == "flex" and inputs.state is None:
            found = flex_reasons(q, inputs.dropout) + [NO_BIAS] * (inputs.bias is not None)
            reasons += [f"impl 'flex': {reason}" for reason in found]
        hidden = inputs.hidden_states
        if self.global_projections is not None and hidden is not None:
            expected = (q.shape[0], inputs.k.shape[2], self.geometry.hidden_size)
            if tuple(hidden.shape) != expected:
                reasons.append(f"hidden_states have shape {tuple(hidden.shape)}, not {expected}")
        return reasons

    def _global_mask_reasons(
        self, mask: GlobalMask, inputs: AttentionInputs, *, keeps: bool
    ) -> list[str]:
        given, expected = mask.global_tokens, (inputs.k.shape[0], inputs.k.shape[2])
        reasons = []
        if given.dtype != torch.bool or tuple(given.shape) != expected:
            shape = f"{given.dtype} of shape {tuple(given.shape)}"
            reasons.append(f"global_tokens are {shape} (torch.bool of shape {expected} is needed)")
        for present, what in (
            (keeps, "a state (which has room for the positions in the options only)"),
            (mask.segment_ids is not None, "packed rows (run the sequences as rows of a batch)"),
            (mask.window is not None, "a sliding window of the model, which would hide them"),
        ):
            if present:
                reasons.append(f"global_tokens are given together with {what}")
        return reasons

    def _is_causal(self, inputs: AttentionInputs) -> bool:
        """Whether nothing later is seen; a mask for one token need not say so."""
        return inputs.mask.causal or (self.geometry.causal and inputs.q.shape[2] == 1)

    def shard_reasons(self) -> list[str]:
        """Say why this layer cannot run on a share of its rows, all at once."""
        reasons = super().shard_reasons()
        if self.config.positions:
            reasons.append(
                "the rows lie on several processes, and global tokens see all of a row and are "
                "seen by all of it (num_global=0 and no global_positions)"
            )
        return reasons

    # -- the computation -------------------------------------------------------------------------

    def attend(self, inputs: AttentionInputs) -> AttentionOutput:
        """Run a whole sequence by bands, or go on from a state with a dense step."""
        tokens = self._global_tokens(inputs)
        own = None
        if self.global_projections is not None and tokens is not None:
            own = self.global_projections(inputs, tokens.where, tokens.most)
            tokens = GlobalTokens(tokens.where, tokens.most, *own)
        state, step = inputs.state, None
        if state is not None or inputs.return_state:
            step = self._step(inputs, own)
        if state is not None:
            assert step is not None
            out, state = attend_from(step, state)
            self.record("torch", "a decoding step is dense over the state")
        else:
            out = self._whole(inputs, tokens)
            if step is not None:
                state = state_after(step, None)
        if self.global_projections is not None and own is None and torch.is_grad_enabled():
            unused = [parameter.sum() for parameter in self.global_projections.parameters()]
            out = out + 0 * torch.stack(unused).sum().to(out.dtype)  # DDP awaits their gradients
        return AttentionOutput(out, state if inputs.return_state else None)

    def _whole(self, inputs: AttentionInputs, tokens: GlobalTokens | None) -> Tensor:
        """Attend among the tokens of a whole sequence."""
        impl: str = self.config.impl
        reason = "named in the options"
        if impl == "auto":
            impl, reason = choose_impl(inputs.q)
        length, start = inputs.q.shape[2], 0
        few = inputs.mask.causal and length != inputs.k.shape[2]
        if inputs.shard is not None:
            inputs, start = self._with_neighbours(inputs, inputs.shard)
        out = longformer_attention(
            inputs.q,
            inputs.k,
            inputs.v,
            window=self.config.window,
            dilation=self.config.dilation,
            causal=self._is_causal(inputs),
            scale=inputs.scale,
            padding=inputs.mask.padding,
            global_tokens=tokens,
            segment_ids=inputs.mask.segment_ids,
            limit=inputs.mask.window,
            bias=inputs.bias,
            offset=inputs.mask.q_offset if few else None,
            dropout=inputs.dropout,
            impl=impl,
        )
        self.record(impl, reason)
        return out[:, :, start : start + length]

    def _with_neighbours(
        self, inputs: AttentionInputs, shard: Shard
    ) -> tuple[AttentionInputs, int]:
        """Put the tokens beside a share at its ends, as keys; return where the share begins."""
        causal, config = self._is_causal(inputs), self.config
        pattern = Pattern.of(
            config.window,
            config.dilation,
            heads=inputs.q.shape[1],
            causal=causal,
            limit=inputs.mask.window,
        )
        ahead = max(band.after * band.dilation for band in pattern.bands)
        sides = shard.reach(pattern.reach), shard.reach(ahead)
        before, after = shard.beside(*sides)
        k, v = with_neighbours((inputs.k, inputs.v), shard, *sides)
        q = F.pad(inputs.q, (0, 0, before, after))
        mask = shard.mask(inputs.mask, before=before, after=after)
        return inputs._replace(q=q, k=k, v=v, mask=mask), before

    def _global_tokens(self, inputs: AttentionInputs) -> GlobalTokens | None:
        """Say which of the given tokens are global: by the mask, or by rank among real tokens."""
        mask, positions = inputs.mask, self.config.positions
        if isinstance(mask, GlobalMask):
            return GlobalTokens(mask.global_tokens)
        if not positions:
            return None
        length = inputs.k.shape[2]
        if mask.padding is None:
            rank = torch.arange(length, device=inputs.q.device)[None]
            where = torch.ones_like(rank, dtype=torch.bool)
        else:
            rank, where = mask.padding.cumsum(1) - 1, mask.padding
        if inputs.state is not None:
            rank = rank + inputs.state.seen[:, None]
        return GlobalTokens(where & global_at(rank, positions), len(positions))

    def _step(self, inputs: AttentionInputs, own: tuple[Tensor, Tensor, Tensor] | None) -> Step:
        """Describe new tokens to what keeps and reads the state."""
        config = self.config
        pattern = Pattern.of(
            config.window,
            config.dilation,
            heads=inputs.q.shape[1],
            causal=True,
            limit=inputs.mask.window,
        )
        real, ids = inputs.mask.padding, inputs.mask.segment_ids
        if ids is not None:  # what comes next belongs to the last segment
            last = ids == ids[:, -1:]
            real = last if real is None else real & last
        return Step(
            q=inputs.q,
            k=inputs.k,
            v=inputs.v,
            own=own,
            real=real,
            pattern=pattern,
            scale=inputs.scale,
            positions=config.positions,
        )

    def effective_weights(self, inputs: AttentionInputs) -> Tensor:
        """Return the matrix that this backend applies to the values, ``[B, H, T, S]``.

        Raises:
            UnsupportedError: Global tokens have values of their own: no one matrix is applied.
        """
        if self.global_projections is not None:
            raise UnsupportedError(
                f"{self.geometry.name}: with global_projections, global tokens see other values "
                "than the rest, so there is no one matrix of weights; swap without them to see it"
            )
        return super().effective_weights(inputs)
