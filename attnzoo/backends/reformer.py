"""Reformer: attention to keys that locality-sensitive hashing puts in the query's bucket."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch

from attnzoo.contract.backend import AttentionBackend, register
from attnzoo.contract.capabilities import Capabilities
from attnzoo.contract.config import BackendConfig
from attnzoo.contract.inputs import MASK_IN_BIAS, AttentionInputs
from attnzoo.contract.states import AttentionOutput, ImplChoice
from attnzoo.errors import ConfigError
from attnzoo.ops.flash.api import flash_attention
from attnzoo.ops.lsh.api import lsh_attention, shared_qk_attention
from attnzoo.ops.lsh.validation import MAX_BUCKETS, MAX_HASHES

NOT_CAUSAL = (
    "form='shared_qk' sorts all tokens at once, so later tokens would determine which keys an "
    "earlier one attends to; use form='asymmetric'"
)


@dataclass(frozen=True, kw_only=True)
class ReformerConfig(BackendConfig):
    """Settings of attention by locality-sensitive hashing (arXiv:2001.04451, arXiv:2010.05315).

    Attributes:
        form: ``"asymmetric"`` hashes queries and keys separately, for pretrained models, and adds a
            window. ``"shared_qk"`` is the paper's form, for layers whose keys are their queries;
            its scores have no scale, and its sort of all tokens rules out causal layers.
        num_hashes: Rounds of hashing.
        chunk_size: Most keys that a query attends to in a round. In the form ``"shared_qk"``,
            tokens per chunk, and a query attends to two chunks.
        num_buckets: Buckets per round. ``None`` means about one or two per chunk.
        window: w. A causal query attends to the w latest keys, its own included, another query to w
            keys on each side. Form ``"asymmetric"`` only, like ``first_tokens``.
        first_tokens: Number of leading keys that every query attends to; many heads need them.
        decoding: ``"exact"``: a single new token attends to all cached keys, which is faster than
            hashing all keys again and closer to softmax than one pass; not under assisted decoding.
            A prompt in chunks (``prefill_chunk_size``) should not end with a chunk of one token,
            which counts as new. ``"hashed"``: it attends to the same keys as in one pass.
        seed: Seed of the hashes, together with the layer's index.
    """

    ops: ClassVar[tuple[str, ...]] = ("lsh_attention",)
    smallest: ClassVar[Mapping[str, str]] = {
        "num_hashes": "1 round",
        "chunk_size": "1 token",
        "num_buckets": "1 bucket",
        "window": "1 token",
        "first_tokens": "0 tokens",
    }
    largest: ClassVar[Mapping[str, int]] = {
        **BackendConfig.largest,
        "num_hashes": MAX_HASHES,
        "num_buckets": MAX_BUCKETS,
    }
    form: Literal["asymmetric", "shared_qk"] = "asymmetric"
    num_hashes: int = 8
    chunk_size: int = 64
    num_buckets: int | None = None
    window: int = 32
    first_tokens: int = 4
    decoding: Literal["exact", "hashed"] = "exact"
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.form == "shared_qk":
            self._check_shared_qk()

    def _check_shared_qk(self) -> None:
        """Raise ``ConfigError`` for options that ``form='shared_qk'`` does not support."""
        if self.num_buckets is not None and self.num_buckets % 2:
            raise ConfigError(
                "ReformerConfig.num_buckets must be even with form='shared_qk', where each rotated "
                f"coordinate and its negative are two buckets, got {self.num_buckets}; "
                f"use {self.num_buckets + 1}"
            )
        for name in ("window", "first_tokens", "decoding"):
            value, default = getattr(self, name), ReformerConfig.default_options()[name]
            if value != default:
                raise ConfigError(
                    f"ReformerConfig.{name} requires form='asymmetric', got {name}={value} with "
                    "form='shared_qk', which attends to chunks only; remove the option"
                )


@register("reformer")
class ReformerBackend(AttentionBackend):
    """Softmax over a window, the first tokens and keys that share a bucket with the query.

    Decoding uses an ordinary KV cache, and a single new token attends exactly to all cached keys:
    finding the keys of one pass would hash every key, at 7 to 140 times the cost.
    ``decoding="hashed"`` does so. Several new tokens are always hashed.
    """

    config: ReformerConfig
    config_class = ReformerConfig
    capabilities = Capabilities(
        packing=True,
        exact_steps=True,
        needs_full_sequences="its buckets sort the tokens of a whole row",
    )
    seeded_by_layer: ClassVar[bool] = True  # hashes

    def layer_capabilities(self) -> Capabilities:
        """Return the capabilities of this form and this way of decoding."""
        return replace(
            super().layer_capabilities(),
            exact_steps=self.config.form == "asymmetric" and self.config.decoding == "exact",
            additive_bias=self.geometry.position_bias,  # elsewhere a bias would be a mask
        )

    def layer_reasons(self) -> list[str]:
        """Return why this backend does not support its layer."""
        reasons = super().layer_reasons()
        if self.geometry.causal and self.config.form == "shared_qk":
            reasons.append(f"the layer is causal ({NOT_CAUSAL})")
        return reasons

    def unsupported_reasons(self, inputs: AttentionInputs) -> list[str]:
        """Return why this backend does not support a call."""
        reasons = super().unsupported_reasons(inputs)
        if not inputs.q.ndim == inputs.k.ndim == 4:
            return reasons
        length, keys = inputs.q.shape[2], inputs.k.shape[2]
        causal = self.causal_mask(inputs).causal
        if length > keys or (length < keys and not causal):
            reasons.append(
                f"{length} queries and {keys} keys are given without a causal mask "
                "(it needs equally many)"
            )
        if inputs.bias is not None and self.geometry.causal and not causal:
            reasons.append(MASK_IN_BIAS)
        if causal and self.config.form == "shared_qk":
            reasons.append(f"the mask is causal ({NOT_CAUSAL})")
        return reasons

    def attend(self, inputs: AttentionInputs) -> AttentionOutput:
        """Hash queries and keys, and attend."""
        config, (q, k, v), mask = self.config, inputs[:3], self.causal_mask(inputs)
        scale, bias = inputs.scale, inputs.bias
        if self.capabilities.exact_steps and q.shape[2] == 1 and mask.causal:
            output = flash_attention(q, k, v, mask=mask, scale=scale, bias=bias, impl="sdpa")
            choice = ImplChoice("torch", "one token attends exactly to all cached keys, by SDPA")
            return output._replace(impl=choice)
        options: dict[str, Any] = {
            "num_hashes": config.num_hashes,
            "chunk_size": config.chunk_size,
            "num_buckets": config.num_buckets,
            "bias": bias,
            "seed": torch.tensor([config.seed, self.geometry.layer, 0], device="cpu"),
            "impl": config.impl,
        }
        if config.form == "shared_qk":
            return shared_qk_attention(q, k, v, mask=mask, **options)
        return lsh_attention(
            q,
            k,
            v,
            mask=mask,
            window=config.window,
            first_tokens=config.first_tokens,
            scale=scale,
            **options,
        )
