"""Reformer: attention to the keys that locality-sensitive hashing brings together.

Letters: B batch, H query heads, Hkv key heads, T queries, S keys, D key size, E value size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from attnzoo.backends.base import AttentionBackend, register
from attnzoo.backends.config import BackendConfig, Geometry
from attnzoo.backends.inputs import MASK_IN_BIAS, AttentionInputs
from attnzoo.errors import ConfigError
from attnzoo.ops.flash import flash_attention
from attnzoo.ops.reformer import IMPLS, choose_impl, lsh_attention, shared_qk_attention
from attnzoo.state import AttentionOutput

NOT_CAUSAL = (
    "form='shared_qk' sorts all tokens at once, so that later ones would decide which keys an "
    "earlier one meets; form='asymmetric' is causal"
)


@dataclass(frozen=True, kw_only=True)
class ReformerConfig(BackendConfig):
    """Settings of attention by locality-sensitive hashing (arXiv:2001.04451, arXiv:2010.05315)."""

    impl: Literal["auto", "reference", "torch", "cpp"] = "auto"
    # asymmetric: queries and keys that differ, as in pretrained models, are hashed each in its way,
    # and a window is seen beside the buckets. shared_qk: as in the paper, for layers whose keys are
    # their queries; the scores have no scale, and a sort of all tokens allows no causal layer.
    form: Literal["asymmetric", "shared_qk"] = "asymmetric"
    num_hashes: int = 8  # rounds
    chunk_size: int = 64  # keys met in a round; of shared_qk: in a chunk, and two chunks are met
    num_buckets: int | None = None  # of a round; None has about one or two for each chunk
    # w: a causal query sees the w latest keys, its own included; otherwise w keys to either side.
    # This and first_tokens are of the asymmetric form.
    window: int = 32
    first_tokens: int = 4  # keys at the beginning that all see, as many heads rest on them
    # exact: a single new token attends to all cached keys, which is faster than hashing them anew,
    # and nearer to softmax than one pass is. hashed: it meets the keys that one pass would meet.
    decoding: Literal["exact", "hashed"] = "exact"
    redraw: int | None = None  # hash anew after so many calls in training; None never does
    seed: int = 0  # names the draws, together with the layer's number

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, unit in (
            ("num_hashes", "round"),
            ("chunk_size", "token"),
            ("num_buckets", "bucket"),
            ("window", "token"),
            ("redraw", "call"),
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(
                    f"ReformerConfig.{name} must be at least 1 {unit}, got {value}; "
                    f"leave it out to have {ReformerConfig.default_options()[name]}"
                )
        if self.first_tokens < 0:
            raise ConfigError(
                f"ReformerConfig.first_tokens must be 0 or more, got {self.first_tokens}; "
                "it counts keys from the first"
            )
        if self.form != "shared_qk":
            return
        if self.num_buckets is not None and self.num_buckets % 2:
            raise ConfigError(
                "ReformerConfig.num_buckets must be even with form='shared_qk', where each rotated "
                f"coordinate and its negative name one, got {self.num_buckets}; "
                f"take {self.num_buckets + 1}"
            )
        for name in ("window", "first_tokens", "decoding"):
            value, default = getattr(self, name), ReformerConfig.default_options()[name]
            if value != default:
                raise ConfigError(
                    f"ReformerConfig.{name} goes with form='asymmetric', got {name}={value} with "
                    "form='shared_qk', which sees chunks and nothing else; leave it out"
                )


@register("reformer")
class ReformerBackend(AttentionBackend):
    """Softmax over a window, the first tokens and the keys that share a bucket with the query.

    Decoding keeps all keys, in an ordinary cache, and a single new token attends to all of them
    exactly: finding those that it would meet in one pass costs a hash of every key, 7 to 140 times
    as much. With ``decoding="hashed"`` it finds them. Several new tokens are hashed in any case.
    """

    config: ReformerConfig
    config_class = ReformerConfig
    impls: ClassVar[tuple[str, ...]] = IMPLS
    packing = True
    needs_whole_rows: ClassVar[str] = "its buckets sort the tokens of a whole row"
    calls: Tensor  # training calls so far, a scalar

    def __init__(self, config: BackendConfig, geometry: Geometry) -> None:
        super().__init__(config, geometry)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def reset_parameters(self) -> None:
        """Begin with the first draw."""
        with torch.no_grad():
            self.calls.zero_()

    @property
    def exact_steps(self) -> bool:  # type: ignore[override]
        """Whether a single new token sees all cached keys."""
        return self.config.form == "asymmetric" and self.config.decoding == "exact"

    @property
    def additive_bias(self) -> bool:  # type: ignore[override]
        """Whether the layer adds a bias to its scores; other layers could only be given a mask."""
        return self.geometry.position_bias

    def layer_reasons(self) -> list[str]:
        """Say why this backend cannot serve its layer, all reasons at once."""
        reasons = super().layer_reasons()
        if self.geometry.causal and self.config.form == "shared_qk":
            reasons.append(f"the layer is causal ({NOT_CAUSAL})")
        return reasons

    def unsupported_reasons(self, inputs: AttentionInputs) -> list[str]:
        """Say why these inputs cannot run, all reasons at once."""
        reasons = super().unsupported_reasons(inputs)
        if not inputs.q.ndim == inputs.k.ndim == 4:
            return reasons
        length, keys = inputs.q.shape[2], inputs.k.shape[2]
        if length > keys or (length < keys and not self._is_causal(inputs)):
            reasons.append(
                f"{length} queries and {keys} keys are given without a causal mask "
                "(it needs as many of each)"
            )
        if inputs.bias is not None and self.geometry.causal and not self._is_causal(inputs):
            reasons.append(MASK_IN_BIAS)
        if self._is_causal(inputs) and self.config.form == "shared_qk":
            reasons.append(f"the mask is causal ({NOT_CAUSAL})")
        return reasons

    def _is_causal(self, inputs: AttentionInputs) -> bool:
        """Whether nothing later is seen; a mask for one token need not say so."""
        return inputs.mask.causal or (self.geometry.causal and inputs.q.shape[2] == 1)

    # -- draws -----------------------------------------------------------------------------------

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def count_call(self) -> None:
        """Count a call in training, unless gradient checkpointing repeats it.

        A repeated call, during the backward pass, must see what the first one saw.
        """
        if torch._C._current_graph_task_id() == -1:
            self.calls += 1

    def draw(self) -> Tensor:
        """Return the numbers that name the hashes of this call, ``[3]``: equal on every rank."""
        name = torch.tensor([self.config.seed, self.geometry.layer, 0], device="cpu")
        if self.config.redraw is None:
            return name
        number = (self.calls - 1).clamp_min(0) // self.config.redraw
        return torch.cat([name[:2].to(number.device), number[None]])

    # -- the computation -------------------------------------------------------------------------

    def attend(self, inputs: AttentionInputs) -> AttentionOutput:
        """Hash queries and keys, and attend."""
        if self.training and self.config.redraw is not None:
            self.count_call()
        config, (q, k, v) = self.config, inputs[:3]
        if self.exact_steps and q.shape[2] == 1 and self._is_causal(inputs):
            self.record("sdpa", "a single new token attends exactly to all cached keys")
            mask = replace(inputs.mask, causal=True)
            scale, bias = inputs.scale, inputs.bias
            out = flash_attention(q, k, v, mask=mask, scale=scale, bias=bias, impl="sdpa")
            return AttentionOutput(out)
        impl, reason = choose_impl(config.impl, q, config.form == "shared_qk", inputs.bias)
        if config.form == "shared_qk":
            out = shared_qk_attention(
                q,
                k,
                v,
                rounds=config.num_hashes,
                chunk_size=config.chunk_size,
                num_buckets=config.num_buckets,
                causal=False,
                segments=self._segments(inputs),
                bias=inputs.bias,
                seed=self.draw(),
                impl=impl,
            )
        else:
            out = lsh_attention(
                q,
                k,
                v,
                rounds=config.num_hashes,
                chunk_size=config.chunk_size,
                num_buckets=config.num_buckets,
                window=config.window,
                first_tokens=config.first_tokens,
                causal=self._is_causal(inputs),
                segments=self._segments(inputs),
                scale=inputs.scale,
                bias=inputs.bias,
                seed=self.draw(),
                impl=impl,
            )
        self.record(impl, reason)
        return AttentionOutput(out)

    def _segments(self, inputs: AttentionInputs) -> tuple[Tensor, Tensor] | None:
        """Number the sequences that queries and keys belong to, padding -1.

        ``None`` if every row is one sequence, of which the queries are the last.
        """
        mask, (batch, _, size, _) = inputs.mask, inputs.k.shape
        length = inputs.q.shape[2]
        offset = mask.q_offset if mask.causal else size - length
        last = isinstance(offset, int) and offset == size - length
        if mask.padding is None and mask.segment_ids is None and last:
            return None
        positions = torch.arange(size, device=inputs.k.device)
        real = (positions < offset + length).expand(batch, size)  # not written yet in static caches
        if mask.padding is not None:
            real = real & mask.padding
        ids = torch.zeros_like(positions) if mask.segment_ids is None else mask.segment_ids
        ids = torch.where(real, ids, -1)
        return ids.index_select(1, positions[:length] + offset), ids
