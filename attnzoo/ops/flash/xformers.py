"""Fused softmax attention by xformers, which has kernels for sliding windows."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

from torch import Tensor

from attnzoo.ops.flash.call import FlashCall


@cache
def xformers_installed() -> bool:
    """Whether xformers is installed; it is imported on first use."""
    return find_spec("xformers") is not None


def auto_reasons(x: FlashCall) -> list[str]:
    """Return why ``impl="auto"`` does not consider xformers for this call."""
    if x.mask.window is None:
        return ["without a sliding window PyTorch's kernels are as fast"]
    return []


def xformers_reasons(x: FlashCall) -> list[str]:
    """Return why xformers does not support this call, in its own words where it gives reasons."""
    if not xformers_installed():
        return ["the package is not installed (pip install attnzoo[xformers])"]
    reasons = []
    if x.mask.padding is not None or x.mask.segment_ids is not None or x.mask.function is not None:
        reasons.append("the mask is more than causal and sliding-window")
    if x.mask.num_sinks:
        reasons.append("the first tokens are attended to outside the window too")
    if x.bias is not None or x.sinks is not None:
        reasons.append("a bias or sinks are given")
    if x.mask.causal and x.mask.q_offset != x.k.shape[2] - x.q.shape[2]:
        reasons.append("the queries are not the last of the keys")
    if reasons:
        return reasons
    from xformers.ops import fmha  # takes seconds

    q, k, v = _to_xformers_layout(x)
    inputs = fmha.Inputs(query=q, key=k, value=v, attn_bias=_attn_bias(x), p=x.dropout)
    operators = (fmha.cutlass.FwOp, fmha.flash.FwOp, fmha.flash3.FwOp, fmha.ck.FwOp)
    refusals = {op.NAME: op.not_supported_reasons(inputs) for op in operators}
    if any(not why for why in refusals.values()):
        return []
    return [f"{name}: {', '.join(why)}" for name, why in refusals.items()]


def run_xformers(x: FlashCall) -> Tensor:
    """Compute a call by xformers' memory-efficient attention."""
    from xformers.ops import fmha

    q, k, v = _to_xformers_layout(x)
    out: Tensor = fmha.memory_efficient_attention(
        q, k, v, attn_bias=_attn_bias(x), p=x.dropout, scale=x.scale
    )
    return out.flatten(2, -2).transpose(1, 2)


def _to_xformers_layout(x: FlashCall) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v as ``[B, T, Hkv, G, D]``, or as ``[B, T, H, D]`` without groups."""
    q, k, v = (t.transpose(1, 2) for t in (x.q, x.k, x.v))
    groups = x.q.shape[1] // x.k.shape[1]
    if groups == 1:
        return q, k, v
    q = q.view(*q.shape[:2], x.k.shape[1], groups, q.shape[3])
    k, v = (t[:, :, :, None].expand(-1, -1, -1, groups, -1) for t in (k, v))
    return q, k, v


def _attn_bias(x: FlashCall) -> Any:
    """Return the mask as xformers' ``attn_bias``."""
    from xformers.ops.fmha import attn_bias

    if x.mask.window is not None and x.mask.causal:
        return attn_bias.LowerTriangularFromBottomRightLocalAttentionMask(x.mask.window[0] + 1)
    if x.mask.window is not None:
        return attn_bias.LocalAttentionFromBottomRightMask(*x.mask.window)
    return attn_bias.LowerTriangularFromBottomRightMask() if x.mask.causal else None
