"""Checks of the masks and global tokens that Longformer attention supports.

Letters: B batch, H query heads, Hkv key heads, T queries, S keys, D key size, E value size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnzoo.contract.masks import AttentionMask
from attnzoo.contract.validation import check_broadcastable, check_shape
from attnzoo.errors import UnsupportedError
from attnzoo.ops.longformer.call import GlobalTokens


def check_mask(mask: AttentionMask) -> None:
    """Raise ``UnsupportedError`` for a mask that no implementation supports."""
    if mask.function is not None:
        raise UnsupportedError(
            f"the mask is {mask.function_name or 'a function'}, and longformer_attention supports "
            "causality, padding, segments and a window; use softmax_attention or flash_attention."
        )
    if mask.num_sinks:
        raise UnsupportedError(
            f"the mask has num_sinks={mask.num_sinks}, which longformer_attention does not "
            "support; give the first tokens as global_tokens."
        )


def check_global_tokens(
    tokens: GlobalTokens, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask
) -> None:
    """Raise ``UnsupportedError`` if global tokens do not fit the call."""
    found = tokens.is_global
    check_broadcastable("global_tokens", found, (k.shape[0], k.shape[2]), "B, S", q.device)
    if found.dim() != 2 or found.dtype != torch.bool:
        raise UnsupportedError(
            f"global_tokens must have two dims and be bool, got {found.dim()} and {found.dtype}."
        )
    shape = (*q.shape[:2], k.shape[2], q.shape[3])
    for name, x, wanted, letters in (
        ("q", tokens.q, shape, "B, H, S, D"),
        ("k", tokens.k, tuple(k.shape), "B, Hkv, S, D"),
        ("v", tokens.v, tuple(v.shape), "B, Hkv, S, E"),
    ):
        if x is not None:
            check_shape(f"global_tokens.{name}", x, wanted, letters, q.device)
    if mask.segment_ids is not None:
        raise UnsupportedError(
            "global tokens are given together with segment_ids, which longformer_attention does "
            "not support; run the sequences as rows of a batch."
        )
