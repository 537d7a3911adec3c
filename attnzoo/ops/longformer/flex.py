"""Sliding-window attention by torch's FlexAttention, on CUDA.

Torch compiles a kernel from the mask as a function of positions. The block mask is computed per
block of keys, so that no T x T tensor exists.
Source: Beltagy et al., 2020, arXiv:2004.05150; Dong et al., 2024, arXiv:2412.05496.
Letters: B batch, H query heads, Hkv key heads, T tokens, N blocks, D key size, E value size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.ops.longformer.call import LongformerCall
from attnzoo.ops.longformer.global_rows import attend_local_and_global
from attnzoo.ops.window.pattern import GlobalIndices, Pattern

BLOCK = 128  # tokens: FlexAttention's default block size
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def flex_reasons(x: LongformerCall) -> list[str]:
    """Return every reason why FlexAttention does not support this call."""
    reasons = []
    if x.q.device.type != "cuda":
        reasons.append(
            f"the inputs are on {x.q.device.type}, where FlexAttention has no backward pass "
            "(it is used on cuda only)"
        )
    elif find_spec("triton") is None:
        reasons.append("triton, which compiles its kernels, is not installed")
    if x.q.dtype == torch.float64:
        reasons.append("the inputs are float64, which its kernels do not support")
    if x.dropout > 0:
        reasons.append(f"attention dropout of {x.dropout} is given, which it does not support")
    if x.bias is not None:
        reasons.append("a bias is given, which its kernel does not add")
    if x.has_fewer_queries:
        reasons.append("there are fewer queries than keys")
    return reasons


def run_flex(x: LongformerCall) -> Tensor:
    """Compute a call by FlexAttention, and the rows of global tokens densely."""
    return attend_local_and_global(x, _flex_local)


def mask_function(
    pattern: Pattern, key_mask: Tensor, is_global: Tensor, segment_ids: Tensor | None
) -> MaskFunction:
    """Return the mask as a function of (row, head, query, key).

    A query always sees its own key, so that no row of the softmax is empty.

    Args:
        pattern: The band of each head.
        key_mask: Keys that the band may see, ``[B, T]`` bool.
        is_global: Keys that every query sees, ``[B, T]`` bool.
        segment_ids: The band sees keys of the query's segment only, ``[B, T]`` integers.
    """
    before, after, dilation = torch.tensor(pattern.bands, device=key_mask.device).unbind(1)
    causal = pattern.causal

    def mask(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        distance, step = query - key, dilation[head]
        in_band = (distance <= before[head] * step) & (distance >= -after[head] * step)
        in_band = in_band & (distance % step == 0) & key_mask[row, key]
        if segment_ids is not None:
            in_band = in_band & (segment_ids[row, query] == segment_ids[row, key])
        global_key = is_global[row, key]
        if causal:
            global_key = global_key & (distance >= 0)
        return in_band | global_key | (distance == 0)

    return mask


def block_map(pattern: Pattern, is_global: Tensor) -> Tensor:
    """Return the key blocks that each query block may see, ``[B, H, N, N]`` bool; misses none.

    Args:
        pattern: The band of each head.
        is_global: Keys that every query sees, ``[B, T]`` bool.
    """
    length, device = is_global.shape[1], is_global.device
    blocks = -(-length // BLOCK)
    number = torch.arange(blocks, device=device)
    nearest = (number[:, None] - number) * BLOCK - BLOCK + 1  # least distance, query minus key
    sizes = torch.tensor([(b.before * b.dilation, b.after * b.dilation) for b in pattern.bands])
    before, after = sizes.to(device)[:, :, None, None].unbind(1)
    in_band = (nearest <= before) & (nearest + 2 * BLOCK - 2 >= -after)  # [H, N, N]
    has_global = F.pad(is_global, (0, blocks * BLOCK - length)).view(-1, blocks, BLOCK).any(2)
    has_global = has_global[:, None, None, :]
    if pattern.causal:
        has_global = has_global & (number[:, None] >= number)
    return in_band | has_global


@cache
def _compiled() -> Any:
    """Compile FlexAttention on first use; uncompiled, it computes the whole score matrix."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def _flex_local(
    x: LongformerCall, key_mask: Tensor | None, indices: GlobalIndices | None
) -> Tensor:
    """Compute all rows as local ones, ``[B, H, T, E]`` in the dtype of ``v``."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    batch, heads, length, _ = x.q.shape
    ones = torch.ones(batch, length, dtype=torch.bool, device=x.q.device)
    key_mask = ones if key_mask is None else key_mask.expand(batch, length)
    is_global = ~ones
    if indices is not None and x.global_tokens is not None:
        is_global = x.global_tokens.is_global.expand(batch, length)
    ids = None if x.segment_ids is None else x.segment_ids.expand(batch, length)
    blocks = block_map(x.pattern, is_global)
    mask = BlockMask.from_kv_blocks(
        blocks.sum(3).to(torch.int32),
        blocks.int().argsort(dim=3, descending=True, stable=True).to(torch.int32),
        BLOCK_SIZE=BLOCK,
        mask_mod=mask_function(x.pattern, key_mask, is_global, ids),
        seq_lengths=(length, length),
    )
    uncompiled = torch.compiler.is_compiling() or x.q.device.type != "cuda"
    attend = flex_attention if uncompiled else _compiled()
    enable_gqa = x.k.shape[1] != heads
    out: Tensor = attend(x.q, x.k, x.v, block_mask=mask, scale=x.scale, enable_gqa=enable_gqa)
    return out
