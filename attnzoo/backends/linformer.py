"""Linformer: attention to a few rows that keys and values are projected to along the sequence.

Letters: B batch, H query heads, Hkv key heads, T queries, S keys, L longest sequence, R rows,
C tokens per block.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from attnzoo.backends.base import AttentionBackend, register
from attnzoo.backends.config import BackendConfig, Geometry
from attnzoo.backends.inputs import AttentionInputs
from attnzoo.errors import ConfigError, UnsupportedError
from attnzoo.ops.linformer import linformer_attention
from attnzoo.ops.linformer_blocks import linformer_block_attention
from attnzoo.state import AttentionOutput

ROWS = 256  # the paper's k, at which it is on par with its softmax model at 512 and 1024 tokens
BLOCK_SHARE = 8  # tokens per row in a finished block


@dataclass(frozen=True, kw_only=True)
class LinformerConfig(BackendConfig):
    """Settings of Linformer's attention (arXiv:2006.04768)."""

    impl: Literal["auto", "reference", "torch"] = "auto"
    num_rows: int | None = None  # R; None means 256, or an eighth of a block
    # Which projections are one: none (keys and values, every head), headwise (heads), kv (heads,
    # and keys with values), layerwise (all of these, and layers)
    sharing: Literal["none", "headwise", "kv", "layerwise"] = "headwise"
    max_length: int | None = None  # L; None takes the model's own
    # C: causal layers need it, for they summarise finished blocks only; other layers do not use it
    block: int | None = None
    pooling: bool = True  # what is learned is added to means of neighbours; else rows start random
    seed: int = 0  # of random rows, together with the layer's number

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, unit in (("num_rows", "row"), ("max_length", "token"), ("block", "token")):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(
                    f"LinformerConfig.{name} must be at least 1 {unit}, got {value}; "
                    "leave it out for the default"
                )


@register("linformer")
class LinformerBackend(AttentionBackend):
    """Softmax over R rows in place of S keys, so time and memory grow as S.

    Bidirectional layers project the whole sequence. A row would show earlier tokens the later ones,
    so causal layers take the block form: finished blocks are projected, the current one is exact.
    """

    config: LinformerConfig
    config_class = LinformerConfig
    cross_attention = True
    dropout = True
    recurrent = True
    state_grows = True  # by R rows per finished block
    needs_whole_rows = "its rows are projected from whole rows of keys"

    def __init__(self, config: BackendConfig, geometry: Geometry) -> None:
        super().__init__(config, geometry)
        cfg = self.config
        self.in_blocks = geometry.causal and not geometry.cross_attention
        # Where either is missing the layer is refused; until then its weights need some shape
        longest = (cfg.block if self.in_blocks else cfg.max_length or geometry.max_length) or 1
        default = max(1, longest // BLOCK_SHARE) if self.in_blocks else ROWS
        rows = cfg.num_rows or default
        if cfg.pooling:
            rows = min(rows, longest)
        heads = geometry.num_key_heads if cfg.sharing == "none" else 1
        shape = heads, longest, rows
        self.key_rows: nn.Parameter | None = nn.Parameter(torch.empty(shape))
        self.value_rows: nn.Parameter | None = None
        if cfg.sharing in ("none", "headwise"):
            self.value_rows = nn.Parameter(torch.empty(shape))
        self._first: tuple[LinformerBackend, ...] = ()  # a tuple, so that it is no submodule
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start at plain means; or, without pooling, as the paper does, at small random numbers."""
        draw = torch.Generator(device="cpu")
        draw.manual_seed(zlib.crc32(f"{self.config.seed},{self.geometry.layer}".encode()))
        for rows in self.parameters():
            with torch.no_grad():
                if self.config.pooling:
                    rows.zero_()
                else:
                    drawn = torch.rand(rows.shape, generator=draw, device="cpu")
                    rows.copy_((2 * drawn - 1) * rows.shape[2] ** -0.5)

    def share_with(self, earlier: Sequence[AttentionBackend]) -> None:
        """Use the rows of the first layer of the same kind and shape, when all layers share."""
        if self.config.sharing != "layerwise" or self.key_rows is None:
            return
        for other in earlier:
            if (
                isinstance(other, LinformerBackend)
                and other.config == self.config
                and other.in_blocks == self.in_blocks
                and other.key_rows is not None
                and other.key_rows.shape == self.key_rows.shape
            ):
                self._first = (other,)
                self.key_rows = None  # saved, moved and trained once, where it lives
                return

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy it with its model; alone it would train rows that are nobody's and never saved."""
        if self._first and id(self._first[0]) not in memo:
            raise UnsupportedError(
                f"{self.geometry.name}: its rows are those of {self._first[0].geometry.name} "
                "(sharing='layerwise'), so it cannot be copied without that layer, as PEFT's "
                "modules_to_save does (take sharing='kv': all but layers share)"
            )
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__dict__ = copy.deepcopy(self.__dict__, memo)
        return made

    def rows(self, near: Tensor) -> tuple[Tensor, Tensor]:
        """Return E and F, ``[1 or Hkv, L, R]``."""
        found = self._first[0].key_rows if self._first else self.key_rows
        assert found is not None
        keys = found.to(near.device)
        return keys, keys if self.value_rows is None else self.value_rows

    def layer_reasons(self) -> list[str]:
        """Say why this backend cannot serve its layer, all reasons at once."""
        reasons, geometry = super().layer_reasons(), self.geometry
        if self.in_blocks and self.config.block is None:
            reasons.append(
                "the layer is causal, and rows over the whole sequence would show earlier tokens "
                "the later ones (set block=256 or so: finished blocks are summarised, the current "
                "one is exact)"
            )
        if not self.in_blocks and (self.config.max_length or geometry.max_length) is None:
            reasons.append(
                "the model does not say how long a sequence can be, which its projections need "
                "(set max_length)"
            )
        return reasons

    def unsupported_reasons(self, inputs: AttentionInputs) -> list[str]:
        """Say why these inputs cannot run, all reasons at once."""
        reasons = super().unsupported_reasons(inputs)
        q, k, mask = inputs.q, inputs.k, inputs.mask
        if not q.ndim == k.ndim == 4:
            return reasons
        if self.in_blocks:
            if not mask.causal and k.shape[2] > 1:
                reasons.append("the mask is not causal (this layer was built causal, in blocks)")
            if q.shape[2] != k.shape[2]:
                reasons.append(
                    f"{q.shape[2]} queries and {k.shape[2]} keys are given (pass the state of the "
                    "earlier tokens instead of their keys)"
                )
            if torch.compiler.is_compiling() and (inputs.state is not None or inputs.return_state):
                reasons.append(
                    "a state is asked for while compiling (its size depends on how many tokens are "
                    "padding; generate without torch.compile, or compile with use_cache=False)"
                )
            return reasons
        if mask.causal and q.shape[2] > 1:
            reasons.append("the mask is causal (this layer was built bidirectional)")
        if inputs.state is not None or inputs.return_state:
            reasons.append("a state is asked for (only causal layers have one)")
        longest = self.rows(k)[0].shape[1]
        if mask.segment_ids is None and k.shape[2] > longest:
            reasons.append(
                f"{k.shape[2]} keys are given, and its projections reach {longest} (set max_length "
                "before training, or cut the input)"
            )
        return reasons

    def attend(self, inputs: AttentionInputs) -> AttentionOutput:
        """Project and attend; block by block where the layer is causal."""
        impl, reason = str(self.config.impl), "named in the options"
        if impl == "auto":
            impl, reason = "torch", "it runs on every device"
        self.record(impl, f"{'block' if self.in_blocks else 'whole'} form; {reason}")
        key_rows, value_rows = self.rows(inputs.k)
        if not self.in_blocks:
            out = linformer_attention(
                inputs.q,
                inputs.k,
                inputs.v,
                key_rows,
                value_rows,
                scale=inputs.scale,
                real=inputs.mask.padding,
                pooling=self.config.pooling,
                dropout=inputs.dropout,
                impl=impl,
            )
            return AttentionOutput(out)
        return linformer_block_attention(
            inputs.q,
            inputs.k,
            inputs.v,
            key_rows,
            value_rows,
            scale=inputs.scale,
            real=inputs.mask.padding,
            pooling=self.config.pooling,
            dropout=inputs.dropout,
            state=inputs.state,
            return_state=inputs.return_state,
            impl=impl,
        )
