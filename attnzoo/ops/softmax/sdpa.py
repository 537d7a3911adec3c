"""``scaled_dot_product_attention`` with grouped key heads, boolean masks, biases and sinks.

A query that sees no key gives zeros. On a GPU torch tries its kernels from the fastest on.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

# Torch's kernels on a GPU, the fastest first, and their names in reports
KERNELS = {
    SDPBackend.CUDNN_ATTENTION: "the cuDNN kernel",
    SDPBackend.FLASH_ATTENTION: "the flash kernel",
    SDPBackend.EFFICIENT_ATTENTION: "the memory-efficient kernel",
    SDPBackend.MATH: "the math kernel",
}


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Return softmax attention under a boolean mask.

    Args:
        q: Queries, ``[B, H, T, D]``.
        k: Keys, ``[B, Hkv, S, D]``.
        v: Values, ``[B, Hkv, S, E]``.
        scale: Multiplies the products.
        mask: True where a key is seen, broadcastable to ``[B, H, T, S]``; ``None`` if all are.
        bias: Added to the scores, broadcastable to ``[B, H, T, S]``.
        sinks: Logits without a value, ``[H]`` or ``[B, H, T, 1]``.
        dropout: Probability of dropping a weight.

    Returns:
        ``[B, H, T, E]`` in the dtype of ``v``.
    """
    attend = partial(grouped_sdpa, scale=scale, dropout=dropout)
    if bias is not None or sinks is not None:
        return _biased_sdpa(q, k, v, mask, bias, sinks, attend)
    if mask is None:
        return attend(q, k, v)
    sees_any = mask.any(-1, keepdim=True)  # a row without keys is computed unmasked, then cleared
    return attend(q, k, v, mask | ~sees_any).masked_fill(~sees_any, 0)


def _biased_sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    sinks: Tensor | None,
    attend: partial[Tensor],
) -> Tensor:
    """Attend with an additive bias; a sink is a key of zeros whose bias is the sink's logit."""
    batch, heads, length, _ = q.shape
    bias = q.new_zeros(1, 1, length, k.shape[2]) if bias is None else bias.to(q.dtype)
    sees_any = None
    if mask is not None:
        sees_any = mask.any(-1, keepdim=True)
        bias = torch.where(mask | ~sees_any, bias, -torch.inf)
    if sinks is not None:
        logits = sinks.to(bias.dtype)
        logits = logits if logits.ndim == 4 else logits.view(1, heads, 1, 1)
        logits = logits.expand(batch, heads, length, 1)
        bias = torch.cat([bias.expand(batch, heads, length, -1), logits], -1)
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
    out = attend(q, k, v, bias.expand(batch, -1, -1, -1))
    return out if sees_any is None else out.masked_fill(~sees_any, 0)


def grouped_sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float,
    dropout: float = 0.0,
    is_causal: bool = False,
) -> Tensor:
    """Call torch's attention, in which each key head serves a group of query heads.

    torch's kernels take one dtype, so mixed dtypes are promoted; autocast converts all but float64.
    """
    dtypes = {q.dtype, k.dtype, v.dtype}
    if len(dtypes) > 1 and (
        torch.float64 in dtypes or not torch.is_autocast_enabled(q.device.type)
    ):
        wide = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
        if mask is not None and mask.dtype != torch.bool:
            mask = mask.to(wide)
        attend = partial(grouped_sdpa, scale=scale, dropout=dropout, is_causal=is_causal)
        return attend(q.to(wide), k.to(wide), v.to(wide), mask).to(v.dtype)
    groups = q.shape[1] // k.shape[1]
    attend = partial(F.scaled_dot_product_attention, dropout_p=dropout, scale=scale)
    with fastest_kernel_first(q.device):
        if groups == 1:
            return attend(q, k, v, mask, is_causal=is_causal)
        if q.shape[2] == 1 and (mask is None or mask.shape[1] == 1):  # heads become queries
            folded = q.reshape(q.shape[0], k.shape[1], groups, q.shape[3])
            return attend(folded, k, v, mask).reshape(q.shape[0], q.shape[1], 1, v.shape[3])
        if q.device.type == "cuda" and mask is None and q.shape[3] == v.shape[3] <= 256:
            return attend(q, k, v, is_causal=is_causal, enable_gqa=True)
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        return attend(q, k, v, mask, is_causal=is_causal)


def fastest_kernel_first(device: torch.device) -> AbstractContextManager[object]:
    """Make torch try its kernels in the order of :data:`KERNELS`, on devices with a choice."""
    if device.type != "cuda" or torch.compiler.is_compiling():
        return nullcontext()
    return sdpa_kernel(list(KERNELS), set_priority=True)
