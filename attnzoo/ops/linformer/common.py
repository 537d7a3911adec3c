"""Inputs of both ops of Linformer, and the state of the block form.

Other letters: L longest sequence, R rows, C tokens per block, N finished blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class BlockState(NamedTuple):
    """The rows of finished blocks, and the keys and values of the current block."""

    row_k: Tensor  # [B, Hkv, N * R, D]
    row_v: Tensor  # [B, Hkv, N * R, E]
    filled: Tensor  # [B, N], bool: sequences of a batch finish their blocks at different times
    k: Tensor  # [B, Hkv, C, D]: the current block, zeros after its last token
    v: Tensor  # [B, Hkv, C, E]
    used: Tensor  # [B], tokens in the current block, below C


class LinformerCall(NamedTuple):
    """Inputs of either op, validated."""

    q: Tensor  # [B, H, T, D]
    k: Tensor  # [B, Hkv, S, D]
    v: Tensor  # [B, Hkv, S, E]
    key_rows: Tensor  # [1 or Hkv, L, R]; [1 or Hkv, C, R] in the block form
    value_rows: Tensor  # of the same shape
    scale: float
    padding_mask: Tensor | None  # [B, S], bool: false at padding
    pooling: bool
    dropout: float
    state: BlockState | None = None  # of the block form, and so is the next
    return_state: bool = False


def empty_state(x: LinformerCall) -> BlockState:
    """Return the state before the first token."""
    (batch, heads, _, size), block = x.k.shape, x.key_rows.shape[1]
    width = x.v.shape[3]
    return BlockState(
        x.k.new_zeros(batch, heads, 0, size),
        x.k.new_zeros(batch, heads, 0, width),
        x.k.new_zeros(batch, 0, dtype=torch.bool),
        x.k.new_zeros(batch, heads, block, size),
        x.k.new_zeros(batch, heads, block, width),
        x.k.new_zeros(batch, dtype=torch.long),
    )
