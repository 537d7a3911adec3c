"""The linformer backend: keys and values are projected along the sequence to a few rows.

Other letters: L longest sequence, R rows, C tokens per block.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from attnzoo.contract.backend import AttentionBackend, register
from attnzoo.contract.capabilities import Capabilities
from attnzoo.contract.config import BackendConfig, Geometry
from attnzoo.contract.inputs import AttentionInputs
from attnzoo.contract.states import AttentionOutput
from attnzoo.errors import ConfigError, UnsupportedError
from attnzoo.ops.linformer.api import (
    linformer_attention,
    linformer_block_attention,
)

ROWS = 256  # k of the paper, where Linformer matches softmax at 512 and 1024 tokens
TOKENS_PER_ROW = 8  # of a finished block
MAX_WEIGHTS = 2**28  # of a head's projection, 1 GiB


@dataclass(frozen=True, kw_only=True)
class LinformerConfig(BackendConfig):
    """Settings of Linformer (arXiv:2006.04768).

    Attributes:
        num_rows: R, rows per sequence, or per block of a causal layer. ``None`` means 256, or an
            eighth of a block.
        sharing: Which projections are shared: ``"none"``, ``"headwise"`` (between heads), ``"kv"``
            (between heads, and keys and values), or ``"layerwise"`` (as ``"kv"``, and between
            layers).
        max_length: L, the longest sequence; ``None`` means that of the model.
        block: C, tokens per block. Causal layers need it; other layers ignore it.
        pooling: Whether the learned weights are added to mean pooling. Otherwise they are
            initialised at random, as in the paper.
        seed: Seed of random weights, together with the index of the layer.
    """

    ops: ClassVar[tuple[str, ...]] = ("linformer_attention", "linformer_block_attention")
    smallest: ClassVar[Mapping[str, str]] = {
        "num_rows": "1 row",
        "max_length": "1 token",
        "block": "1 token",
    }
    largest: ClassVar[Mapping[str, int]] = {**BackendConfig.largest, "num_rows": 2**16}
    num_rows: int | None = None
    sharing: Literal["none", "headwise", "kv", "layerwise"] = "headwise"
    max_length: int | None = None
    block: int | None = None
    pooling: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        tokens = max(self.max_length or 0, self.block or 0)
        rows = self.num_rows or max(ROWS, (self.block or 0) // TOKENS_PER_ROW)
        if rows * tokens > MAX_WEIGHTS:
            raise ConfigError(
                f"LinformerConfig: num_rows times max_length or block must be at most "
                f"{MAX_WEIGHTS:,} weights, got {rows:,} times {tokens:,}; give fewer rows, or a "
                "smaller block"
            )


class _Owner:
    """The layer whose rows another layer uses; a copy of that layer refers to the owner's copy.

    The backend itself has no ``__deepcopy__``: PEFT's wrapper around a backend would find it in the
    attributes of the backend, and a copy of the wrapper would be a backend without the wrapper.
    """

    def __init__(self, backend: LinformerBackend, user: str) -> None:
        self.backend = backend
        self.user = user

    def __deepcopy__(self, memo: dict[int, Any]) -> _Owner:
        """Refer to the copy of the owner, which is copied first."""
        copied = memo.get(id(self.backend))
        if copied is None:
            raise UnsupportedError(
                f"{self.user}: its rows are those of {self.backend.geometry.name} "
                "(sharing='layerwise'), so it cannot be copied without that layer, as PEFT's "
                "modules_to_save does; set sharing='kv', which does not share between layers, or "
                "modules_to_save=[], which freezes the rows"
            )
        return _Owner(copied, self.user)


@register("linformer")
class LinformerBackend(AttentionBackend):
    """Softmax attention to R projected rows instead of S keys: linear time and memory.

    Bidirectional layers project the full sequence. That is not causal, because a row contains later
    tokens. Causal layers therefore project finished blocks, and attend to the current one exactly.
    """

    config: LinformerConfig
    config_class = LinformerConfig
    capabilities = Capabilities(
        cross_attention=True,
        dropout=True,
        recurrent=True,
        state_grows=True,  # by R rows per finished block
        needs_full_sequences="it projects all keys of a sequence to its rows",
    )

    def __init__(self, config: BackendConfig, geometry: Geometry) -> None:
        super().__init__(config, geometry)
        cfg = self.config
        self.in_blocks = geometry.causal and not geometry.cross_attention
        # layer_reasons refuses a layer without either; its weights need a shape until then
        longest = (cfg.block if self.in_blocks else cfg.max_length or geometry.max_length) or 1
        default = max(1, longest // TOKENS_PER_ROW) if self.in_blocks else ROWS
        rows = cfg.num_rows or default
        if cfg.pooling:
            rows = min(rows, longest)
        heads = geometry.num_key_heads if cfg.sharing == "none" else 1
        shape = heads, longest, rows
        self.key_rows: nn.Parameter | None = nn.Parameter(torch.empty(shape))
        self.value_rows: nn.Parameter | None = None
        if cfg.sharing in ("none", "headwise"):
            self.value_rows = nn.Parameter(torch.empty(shape))
        self._owner: _Owner | None = None  # not a submodule
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the weights: zeros with pooling, else small random numbers as in the paper."""
        draw = torch.Generator(device="cpu")
        draw.manual_seed(zlib.crc32(f"{self.config.seed},{self.geometry.layer}".encode()))
        for rows in self.parameters():
            with torch.no_grad():
                if self.config.pooling:
                    rows.zero_()
                else:
                    drawn = torch.rand(
                        rows.shape, generator=draw, dtype=torch.float32, device="cpu"
                    )
                    rows.copy_((2 * drawn - 1) * rows.shape[2] ** -0.5)

    def share_with(self, earlier: Sequence[AttentionBackend]) -> None:
        """Use the weights of the first layer of the same kind and shape, with ``"layerwise"``."""
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
                self._owner = _Owner(other, self.geometry.name)
                self.key_rows = None  # saved, moved and trained in the first layer only
                return

    def rows(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return E and F, ``[1 or Hkv, L, R]``, on the device of ``like``."""
        owner = self._owner.backend if self._owner else self
        found = owner.key_rows
        assert found is not None
        if found.is_meta and not like.is_meta and self._owner:
            found = owner(None)  # offloaded: hooks load the weights of a module that is called
            if found.is_meta:
                raise UnsupportedError(
                    f"{self.geometry.name}: its rows are those of {owner.geometry.name} "
                    "(sharing='layerwise'), which is offloaded as one block, so they are not in "
                    "memory; keep that layer on a device, offload without preload_module_classes, "
                    "or set sharing='kv'"
                )
        keys: Tensor = found.to(like.device)
        return keys, keys if self.value_rows is None else self.value_rows

    def forward(self, q: Tensor | None, *args: Any, **options: Any) -> Any:
        """Run the layer; without queries, return E for the layers that share it."""
        return self.key_rows if q is None else super().forward(q, *args, **options)

    def layer_reasons(self) -> list[str]:
        """Return every reason why this backend does not support its layer."""
        reasons, geometry = super().layer_reasons(), self.geometry
        if self.in_blocks and self.config.block is None:
            reasons.append(
                "the layer is causal, and a projection of the full sequence is not (set block=256: "
                "finished blocks are projected, and the current one is exact)"
            )
        if not self.in_blocks and (self.config.max_length or geometry.max_length) is None:
            reasons.append(
                "the model does not define a maximum length, which its projections need (set "
                "max_length)"
            )
        return reasons

    def unsupported_reasons(self, inputs: AttentionInputs) -> list[str]:
        """Return every reason why these inputs are unsupported; empty if they are supported."""
        reasons = super().unsupported_reasons(inputs)
        q, k, mask = inputs.q, inputs.k, inputs.mask
        if not q.ndim == k.ndim == 4:
            return reasons
        if self.in_blocks:
            if not mask.causal and k.shape[2] > 1:
                reasons.append("the mask is bidirectional (the layer is causal)")
            if q.shape[2] != k.shape[2]:
                reasons.append(
                    f"{q.shape[2]} queries and {k.shape[2]} keys are given (pass the state of the "
                    "earlier tokens instead of their keys)"
                )
            if torch.compiler.is_compiling() and (inputs.state is not None or inputs.return_state):
                reasons.append(
                    "a state is requested under torch.compile (its size depends on the number of "
                    "padding tokens; generate without torch.compile, or set use_cache=False)"
                )
            return reasons
        if mask.causal and q.shape[2] > 1:
            reasons.append(
                "the mask is causal (the layer is bidirectional: its module has is_causal=False, "
                "and projections of the whole sequence would show later tokens, so it "
                "needs another backend under layers, such as flash)"
            )
        if inputs.state is not None or inputs.return_state:
            reasons.append("a state is requested (only causal layers have one)")
        longest = self.rows(k)[0].shape[1]
        if mask.segment_ids is None and k.shape[2] > longest:
            reasons.append(
                f"{k.shape[2]} keys are given, but its projections support {longest} (set "
                "max_length before training, or truncate the input)"
            )
        return reasons

    def attend(self, inputs: AttentionInputs) -> AttentionOutput:
        """Project and attend, block by block in a causal layer."""
        key_rows, value_rows = self.rows(inputs.k)
        options: dict[str, Any] = {
            "scale": inputs.scale,
            "mask": inputs.mask,
            "pooling": self.config.pooling,
            "dropout": inputs.dropout,
            "impl": self.config.impl,
        }
        tensors = inputs.q, inputs.k, inputs.v, key_rows, value_rows
        if not self.in_blocks:
            return linformer_attention(*tensors, **options)
        return linformer_block_attention(
            *tensors, **options, state=inputs.state, return_state=inputs.return_state
        )
