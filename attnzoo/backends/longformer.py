"""The longformer backend: a sliding window for every token, and a few global tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnzoo.contract.backend import AttentionBackend, register
from attnzoo.contract.capabilities import Capabilities
from attnzoo.contract.config import MAX_STATE, BackendConfig, Geometry
from attnzoo.contract.context_parallel import SequenceShard, with_neighbours
from attnzoo.contract.inputs import MASK_IN_BIAS, AttentionInputs
from attnzoo.contract.masks import AttentionMask
from attnzoo.contract.padding import gather_tokens
from attnzoo.contract.states import AttentionOutput, ImplChoice
from attnzoo.errors import ConfigError, UnsupportedError
from attnzoo.ops.longformer.api import pattern_attention
from attnzoo.ops.longformer.call import GlobalTokens
from attnzoo.ops.longformer.decode import (
    DecodingInputs,
    decode,
    is_global_rank,
    update_state,
)
from attnzoo.ops.window.pattern import Pattern, check_positive, global_indices, per_head

DECODING = ImplChoice("torch", "a decoding step is dense over the state")


@dataclass(frozen=True, kw_only=True)
class LongformerConfig(BackendConfig):
    """Settings of attention within a sliding window and to global tokens (arXiv:2004.05150).

    ``impl`` computes whole sequences; a decoding step from a state has one implementation.

    Attributes:
        window: w, one number or a list with one for each head. A causal query sees its own key and
            the w - 1 keys before it; otherwise w keys on either side. Padding is not counted.
        dilation: d, one number or a list with one for each head. A head sees every d-th key, w of
            them, as far as w d, which is at most 2^20 tokens: decoding keeps their keys.
        num_global: Number of first tokens that see everything and that every token sees.
        global_positions: Further such tokens, counted from the first real one. Decoding keeps all
            keys up to the last of these positions.
        global_projections: Whether global tokens attend through their own queries, keys and
            values. These start as copies: the learned part is added to the layer's own projection,
            after its position embedding.
    """

    ops: ClassVar[tuple[str, ...]] = ("longformer_attention",)

    smallest: ClassVar[Mapping[str, str]] = {
        "num_global": "0 tokens",
        "global_positions": "0 (the first token)",
    }
    largest: ClassVar[Mapping[str, int]] = {**BackendConfig.largest, "num_global": 2**16}
    window: int | tuple[int, ...] = 128
    dilation: int | tuple[int, ...] = 1
    num_global: int = 0
    global_positions: tuple[int, ...] = ()
    global_projections: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        check_positive(f"{name}.window", self.window)
        check_positive(f"{name}.dilation", self.dilation)
        windows, dilations = _as_tuple(self.window), _as_tuple(self.dilation)
        pairs = (zip if len(windows) == len(dilations) else product)(windows, dilations)
        reach = max(window * dilation for window, dilation in pairs)
        if reach > MAX_STATE:
            raise ConfigError(
                f"{name}.window times dilation must be at most {MAX_STATE}, got {reach}: the "
                "state of a causal layer keeps the keys of so many tokens; give a smaller window "
                "or dilation"
            )

    @property
    def positions(self) -> tuple[int, ...]:
        """Positions of all global tokens, in order."""
        return tuple(sorted({*range(self.num_global), *self.global_positions}))


@dataclass(frozen=True, kw_only=True)
class GlobalMask(AttentionMask):
    """A mask with the global tokens of this call, which replace those of the options.

    Attributes:
        global_tokens: ``[B, S]`` bool.
    """

    global_tokens: Tensor


class GlobalProjections(nn.Module):
    """Added to the queries, keys and values of global attention; zero at first.

    The sum of a layer's projection ``W x`` and of a learned ``D x`` can become any projection
    ``(W + D) x``.
    """

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        assert geometry.hidden_size is not None
        assert geometry.value_dim is not None
        heads, key_heads = geometry.num_heads, geometry.num_key_heads
        self.query = nn.Linear(geometry.hidden_size, heads * geometry.head_dim)
        # A bias of the key would add the same number to all scores of a query: no effect.
        self.key = nn.Linear(geometry.hidden_size, key_heads * geometry.head_dim, bias=False)
        self.value = nn.Linear(geometry.hidden_size, key_heads * geometry.value_dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set all parameters to zero, which makes global attention use the layer's projections."""
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(
        self,
        qkv: tuple[Tensor, Tensor, Tensor],
        hidden: Tensor,
        is_global: Tensor,
        max_count: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values for the rows of global tokens.

        Args:
            qkv: The layer's queries ``[B, H, T, D]``, keys and values.
            hidden: Hidden states, ``[B, T, M]``.
            is_global: Which tokens are global, ``[B, T]`` bool; other queries do not change.
            max_count: Bound on their number in a row.
        """
        q, k, v = qkv
        hidden = hidden.to(self.query.weight.dtype)
        indices = global_indices(is_global, max_count)
        if indices is not None:
            index = indices.positions.expand(q.shape[0], -1)
            rows = hidden.gather(1, index[:, :, None].expand(-1, -1, hidden.shape[2]))
            found = gather_tokens(q, index) + _split_heads(self.query(rows), q)
            q = q.scatter(2, index[:, None, :, None].expand_as(found), found)
        k, v = (
            x + _split_heads(projection(hidden), x)
            for x, projection in ((k, self.key), (v, self.value))
        )
        return q, k, v

    def zero(self) -> Tensor:
        """Return 0 with a gradient path to every parameter, which DDP needs in every step."""
        return 0 * torch.stack([parameter.sum() for parameter in self.parameters()]).sum()


@register("longformer")
class LongformerBackend(AttentionBackend):
    """Softmax over a sliding window and global tokens; the decoding state has a fixed size.

    A layer with a position bias decodes with a KV cache of all keys, which the bias is made for.
    """

    config: LongformerConfig
    config_class = LongformerConfig
    capabilities = Capabilities(
        windowed=True,
        packing=True,
        dropout=True,
        recurrent=True,
        context_parallel=True,
        from_hidden_states="global projections",
    )

    def __init__(self, config: BackendConfig, geometry: Geometry) -> None:
        super().__init__(config, geometry)
        name = f"{geometry.name}: {type(config).__name__}"
        per_head(f"{name}.window", self.config.window, geometry.num_heads)
        per_head(f"{name}.dilation", self.config.dilation, geometry.num_heads)
        self.global_projections: GlobalProjections | None = None
        if self.config.global_projections and geometry.hidden_size is not None:
            self.global_projections = GlobalProjections(geometry)

    def layer_capabilities(self) -> Capabilities:
        """Return the capabilities with these global tokens."""
        positions, position_bias = self.config.positions, self.geometry.position_bias
        return replace(
            super().layer_capabilities(),
            windowed=not positions,  # the model's window would hide global tokens
            packing=not positions,  # each segment needs global tokens of its own
            recurrent=not position_bias,  # which is made for the keys of a KV cache
            additive_bias=position_bias,  # elsewhere a bias could only be a mask
            needs_hidden_states=self.config.global_projections,
        )

    def reset_parameters(self) -> None:
        """Make the global projections copies of the layer's own."""
        if self.global_projections is not None:
            self.global_projections.reset_parameters()

    # -- unsupported layers and calls ------------------------------------------------------------

    def layer_reasons(self) -> list[str]:
        """Return every reason why this backend does not support its layer."""
        reasons = super().layer_reasons()
        if self.capabilities.needs_hidden_states and self.geometry.hidden_size is None:
            reasons.append("the layer's hidden size is unknown, and global_projections need it")
        return reasons

    def dropout_reasons(self) -> list[str]:
        """Return every reason why its form of attention dropout is unsupported."""
        reasons = super().dropout_reasons()
        if self.config.global_projections and self.dropout_form == "keys":
            reasons.append(
                "whole keys cannot be dropped with global_projections, which compute values of "
                "their own (set attention_dropout='weights' or 'off')"
            )
        return reasons

    def unsupported_reasons(self, inputs: AttentionInputs) -> list[str]:
        """Return every reason why these inputs are unsupported."""
        reasons = super().unsupported_reasons(inputs)
        q, mask, causal = inputs.q, inputs.mask, self._is_causal(inputs)
        if not q.ndim == inputs.k.ndim == 4:
            return reasons
        if q.shape[1] != self.geometry.num_heads:
            reasons.append(
                f"{q.shape[1]} query heads are given (the layer has {self.geometry.num_heads})"
            )
        with_state = inputs.state is not None or inputs.return_state
        if with_state and not causal:
            reasons.append("a state is requested without a causal mask (only causal ones have it)")
        if inputs.bias is not None and self.geometry.causal and not causal:
            reasons.append(MASK_IN_BIAS)
        if q.shape[2] != inputs.k.shape[2] and not causal:
            reasons.append(
                f"{q.shape[2]} queries and {inputs.k.shape[2]} keys are given without a causal "
                "mask (it needs as many of each)"
            )
        if inputs.state is not None and inputs.dropout > 0:
            reasons.append("attention dropout is given with a state (set it to 0 to decode)")
        if isinstance(mask, GlobalMask):
            reasons += self._global_mask_reasons(mask, inputs, with_state=with_state)
        return reasons

    def _global_mask_reasons(
        self, mask: GlobalMask, inputs: AttentionInputs, *, with_state: bool
    ) -> list[str]:
        """Return every reason why the global tokens of this call are unsupported."""
        given, expected = mask.global_tokens, (inputs.k.shape[0], inputs.k.shape[2])
        reasons = []
        fits = given.ndim == 2 and all(a == b for a, b in zip(given.shape, expected, strict=True))
        if given.dtype != torch.bool or not fits:  # a tuple of symbolic sizes may equal none
            shape = f"{given.dtype} of shape {tuple(given.shape)}"
            reasons.append(f"global_tokens are {shape} (torch.bool of shape {expected} is needed)")
        for present, what in (
            (inputs.shard is not None, "context parallelism"),
            (with_state, "a state (which holds the global positions of the options only)"),
            (mask.segment_ids is not None, "packed rows (run the sequences as rows of a batch)"),
            (mask.window is not None, "a sliding window of the model, which would hide them"),
        ):
            if present:
                reasons.append(f"global_tokens are given together with {what}")
        return reasons

    def _is_causal(self, inputs: AttentionInputs) -> bool:
        """Whether attention is causal; the mask of a single new token may leave it out."""
        return inputs.mask.causal or (self.geometry.causal and inputs.q.shape[2] == 1)

    def shard_reasons(self) -> list[str]:
        """Return every reason why this layer is unsupported under context parallelism."""
        reasons = super().shard_reasons()
        if self.config.positions:
            reasons.append(
                "global tokens attend to all tokens of a row, which lie on several processes "
                "(set num_global=0 and no global_positions)"
            )
        return reasons

    # -- computation -----------------------------------------------------------------------------

    def attend(self, inputs: AttentionInputs) -> AttentionOutput:
        """Compute a whole sequence by bands, or new tokens densely over the state."""
        pattern = self._pattern(inputs)
        tokens, global_qkv = self._global_tokens(inputs), None
        if self.global_projections is not None and tokens is not None:
            assert inputs.hidden_states is not None
            global_qkv = self.global_projections(
                inputs[:3], inputs.hidden_states, tokens.is_global, tokens.max_count
            )
            tokens = GlobalTokens(tokens.is_global, tokens.max_count, *global_qkv)
        state = inputs.state
        if state is not None:
            out, state = decode(self._decoding_inputs(inputs, pattern, global_qkv), state)
            output = AttentionOutput(out, impl=DECODING)
        else:
            output = self._attend_sequence(inputs, pattern, tokens)
            if inputs.return_state:
                state = update_state(self._decoding_inputs(inputs, pattern, global_qkv), None)
        if self.global_projections is not None and global_qkv is None and torch.is_grad_enabled():
            zero = self.global_projections.zero()
            output = output._replace(out=output.out + zero.to(output.out.dtype))
        return output._replace(state=state if inputs.return_state else None)

    def _pattern(self, inputs: AttentionInputs) -> Pattern:
        return Pattern.of(
            self.config.window,
            self.config.dilation,
            heads=inputs.q.shape[1],
            causal=self._is_causal(inputs),
            limit=inputs.mask.window,
        )

    def _attend_sequence(
        self, inputs: AttentionInputs, pattern: Pattern, tokens: GlobalTokens | None
    ) -> AttentionOutput:
        """Attend within a whole sequence, or from new tokens to a KV cache."""
        length, start = inputs.q.shape[2], 0
        if inputs.shard is not None:
            inputs, start = self._add_neighbours(inputs, pattern, inputs.shard)
        mask = inputs.mask
        if pattern.causal and not mask.causal:  # of a single new token, which is the last one
            mask = replace(mask, causal=True, q_offset=inputs.k.shape[2] - length)
        output = pattern_attention(
            inputs.q,
            inputs.k,
            inputs.v,
            pattern,
            mask=mask,
            scale=inputs.scale,
            global_tokens=tokens,
            bias=inputs.bias,
            dropout=inputs.dropout,
            impl=self.config.impl,
        )
        return output._replace(out=output.out[:, :, start : start + length])

    def _add_neighbours(
        self, inputs: AttentionInputs, pattern: Pattern, shard: SequenceShard
    ) -> tuple[AttentionInputs, int]:
        """Add the neighbouring tokens of other processes; return where this shard begins."""
        sides = shard.reach(pattern.tokens_before), shard.reach(pattern.tokens_after)
        before, after = shard.available(*sides)
        k, v = with_neighbours((inputs.k, inputs.v), shard, *sides)
        q = F.pad(inputs.q, (0, 0, before, after))
        mask = shard.mask(inputs.mask, before=before, after=after)
        return inputs._replace(q=q, k=k, v=v, mask=mask), before

    def _global_tokens(self, inputs: AttentionInputs) -> GlobalTokens | None:
        """Return the global tokens: those of the mask, or by rank among the real tokens."""
        mask, positions = inputs.mask, self.config.positions
        if isinstance(mask, GlobalMask):
            return GlobalTokens(mask.global_tokens)
        if not positions:
            return None
        if mask.padding is None:
            rank = torch.arange(inputs.k.shape[2], device=inputs.q.device)[None]
            real = torch.ones_like(rank, dtype=torch.bool)
        else:
            rank, real = mask.padding.cumsum(1) - 1, mask.padding
        if inputs.state is not None:
            rank = rank + inputs.state.seen[:, None]
        return GlobalTokens(real & is_global_rank(rank, positions), len(positions))

    def _decoding_inputs(
        self,
        inputs: AttentionInputs,
        pattern: Pattern,
        global_qkv: tuple[Tensor, Tensor, Tensor] | None,
    ) -> DecodingInputs:
        """Return the new tokens as the state takes them."""
        padding_mask, ids = inputs.mask.padding, inputs.mask.segment_ids
        if ids is not None:  # the next tokens belong to the last segment
            last = ids == ids[:, -1:]
            padding_mask = last if padding_mask is None else padding_mask & last
        return DecodingInputs(
            q=inputs.q,
            k=inputs.k,
            v=inputs.v,
            global_qkv=global_qkv,
            padding_mask=padding_mask,
            pattern=pattern,
            scale=inputs.scale,
            global_positions=self.config.positions,
            model_window=None if inputs.mask.window is None else inputs.mask.window[0],
        )

    def effective_weights(self, inputs: AttentionInputs) -> Tensor:
        """Return the matrix that this backend applies to the values, ``[B, H, T, S]``.

        Raises:
            UnsupportedError: Global tokens have their own values, so that no single matrix exists.
        """
        if self.global_projections is not None:
            raise UnsupportedError(
                f"{self.geometry.name}: with global_projections, global tokens attend to other "
                "values than the rest, so there is no one matrix of weights; swap without "
                "global_projections to see it"
            )
        return super().effective_weights(inputs)


def _as_tuple(value: int | tuple[int, ...]) -> tuple[int, ...]:
    return value if isinstance(value, tuple) else (value,)


def _split_heads(x: Tensor, like: Tensor) -> Tensor:
    """Return ``[B, T, H D]`` as ``[B, H, T, D]``, in the dtype of ``like``."""
    return x.view(*x.shape[:2], like.shape[1], -1).transpose(1, 2).to(like.dtype)
