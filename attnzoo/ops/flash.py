r"""Exact softmax attention through fused kernels, without a score matrix in memory.

The same mathematics as :func:`attnzoo.ops.softmax.softmax_attention`; computed by torch's
``scaled_dot_product_attention`` (flash, cuDNN or memory-efficient kernels) or by xformers.
Time O(T S), memory O(T + S); with a sliding window of w, time and memory O(T w).
Source: Dao et al., 2022, arXiv:2205.14135; Rabe and Staats, 2021, arXiv:2112.05682.
Letters: B batch, H query heads, Hkv key heads, T queries, S keys, D key size, E value size,
w window.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnzoo.errors import UnsupportedError, did_you_mean
from attnzoo.masks import AttentionMask, Window
from attnzoo.ops.flash_packed import packed_attention, packing_reasons
from attnzoo.ops.softmax import sink_column
from attnzoo.ops.window import band_blocks, band_mask

IMPLS = ("sdpa", "xformers")
BLOCK = 1024  # C, queries at a time where they follow earlier keys

# Torch's kernels on a GPU, fastest first, and what reports call them
KERNELS = {
    SDPBackend.CUDNN_ATTENTION: "cuDNN's",
    SDPBackend.FLASH_ATTENTION: "the flash",
    SDPBackend.EFFICIENT_ATTENTION: "the memory-efficient",
    SDPBackend.MATH: "the plain",
}


class FlashInputs(NamedTuple):
    """What one call is given, as in :func:`flash_attention`."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: AttentionMask
    scale: float
    bias: Tensor | None
    sinks: Tensor | None
    dropout: float


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: AttentionMask,
    scale: float | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    impl: str = "auto",
) -> Tensor:
    """Attend exactly with a fused kernel.

    Args:
        q: Queries, ``[B, H, T, D]``.
        k: Keys, ``[B, Hkv, S, D]``.
        v: Values, ``[B, Hkv, S, E]``.
        mask: Which keys are seen; a row that sees nothing gives zeros.
        scale: Multiplies the products; ``None`` means ``D ** -0.5``.
        bias: Added to the scores, broadcastable to ``[B, H, T, S]``.
        sinks: A logit per head, ``[H]``, or per head and query, ``[B, H, T, 1]``, that takes part
            in the softmax and carries no value.
        dropout: Probability with which a weight is dropped.
        impl: ``"sdpa"``, ``"xformers"``, or ``"auto"`` (see :func:`choose_impl`).

    Returns:
        ``[B, H, T, E]`` in the dtype of ``v``.

    Raises:
        UnsupportedError: The named ``impl`` cannot run these inputs, with its reason.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    inputs = FlashInputs(q, k, v, mask, scale, bias, sinks, dropout)
    if impl == "auto":
        impl, _ = choose_impl(inputs)
    if impl == "sdpa":
        with _fastest_first(q.device):
            return _sdpa(inputs)
    if impl == "xformers":
        reasons = xformers_reasons(inputs)
        if reasons:
            raise UnsupportedError(
                f"impl 'xformers' cannot run this call: {'; '.join(reasons)}. "
                "Use impl='sdpa', or 'auto' to have one picked."
            )
        return _xformers(inputs)
    raise UnsupportedError(
        f"flash has no impl {impl!r}.{did_you_mean(impl, IMPLS)} It has auto, {', '.join(IMPLS)}."
    )


def choose_impl(inputs: FlashInputs) -> tuple[str, str]:
    """Pick the implementation for ``impl="auto"`` and say why.

    xformers has kernels for sliding windows that touch only the band; otherwise torch's own are as
    fast.
    """
    if inputs.q.device.type != "cuda":
        return "sdpa", f"on {inputs.q.device.type}, where xformers has no operator"
    if inputs.mask.window is None:
        return "sdpa", "no sliding window, so torch's kernels are as fast"
    reasons = xformers_reasons(inputs)
    if reasons:
        return "sdpa", f"xformers cannot: {'; '.join(reasons)}"
    return "xformers", "it has a kernel for sliding windows"


# -- torch ---------------------------------------------------------------------------------------


def sdpa_backend(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, masked: bool = False) -> str:
    """Name the kernel that torch picks for a call, as reports do."""
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = (x[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2) for x in (k, v))
    mask = q.new_zeros(1, 1, 1, 1).expand(1, 1, q.shape[2], k.shape[2]) if masked else None
    with _fastest_first(q.device):
        choice = torch._fused_sdp_choice(q, k, v, mask, 0.0, is_causal and not masked)
    return KERNELS[SDPBackend(choice)]


def ran_kernel(x: FlashInputs) -> str:
    """Say which of torch's kernels a call of ``impl="sdpa"`` ran."""
    if _packs(x):
        return "the flash kernel, padding taken out"
    plain = x.mask.is_plain and x.bias is None and x.sinks is None
    name = sdpa_backend(x.q, x.k, x.v, is_causal=x.mask.causal, masked=not plain)
    return f"{name} kernel"


def _fastest_first(device: torch.device) -> AbstractContextManager[object]:
    """Have torch try its kernels in the order of :data:`KERNELS`, where it has a choice."""
    if device.type != "cuda" or torch.compiler.is_compiling():
        return nullcontext()
    return sdpa_kernel(list(KERNELS), set_priority=True)


def _packs(x: FlashInputs) -> bool:
    """Whether padding is taken out of a call instead of being masked."""
    alone = x.bias is None and x.sinks is None and x.dropout == 0
    return alone and not packing_reasons(x.q, x.k, x.v, x.mask)


def _sdpa(x: FlashInputs) -> Tensor:
    """Give the call to torch in the form that keeps its fastest kernel."""
    length, keys = x.q.shape[2], x.k.shape[2]
    if _packs(x):
        return packed_attention(x.q, x.k, x.v, x.mask, x.scale)
    if _banded(x):
        return _sdpa_band(x)
    window = x.mask.window
    causal_alone = x.mask.causal and x.mask.is_plain and x.bias is None and x.sinks is None
    if causal_alone and isinstance(x.mask.q_offset, int):
        if length == keys and x.mask.q_offset == 0:
            return _grouped_sdpa(x, x.k, x.v, None, is_causal=length > 1)
        if x.mask.q_offset >= keys - 1:
            return _grouped_sdpa(x, x.k, x.v, None, is_causal=False)
    assert window is None or len(window) == 2
    if _goes_on(x):
        return _sdpa_blocks(x)
    mask = x.mask.dense(length, keys, x.q.device)
    if x.sinks is not None or x.bias is not None:
        return _biased_sdpa(x, mask)
    return _masked_sdpa(x, x.q, x.k, x.v, mask)


def _goes_on(x: FlashInputs) -> bool:
    """Whether many causal queries follow earlier keys, so that their mask would be large."""
    mask, length, keys = x.mask, x.q.shape[2], x.k.shape[2]
    alone = mask.causal and mask.function is None and x.bias is None and x.sinks is None
    follows = isinstance(mask.q_offset, int) and mask.q_offset == keys - length > 0
    return alone and follows and length > BLOCK


def _sdpa_blocks(x: FlashInputs) -> Tensor:
    """Take the queries block by block, each with the keys up to its end: masks are O(C S)."""
    first, outs = x.k.shape[2] - x.q.shape[2], []
    for start in range(0, x.q.shape[2], BLOCK):
        q = x.q[:, :, start : start + BLOCK]
        end = first + start + q.shape[2]
        padding, ids = (
            None if part is None else part[:, :end] for part in (x.mask.padding, x.mask.segment_ids)
        )
        mask = replace(x.mask, padding=padding, segment_ids=ids, q_offset=first + start)
        outs.append(_sdpa(x._replace(q=q, k=x.k[:, :, :end], v=x.v[:, :, :end], mask=mask)))
    return torch.cat(outs, 2)


def _grouped_sdpa(
    x: FlashInputs, k: Tensor, v: Tensor, mask: Tensor | None, *, is_causal: bool
) -> Tensor:
    """Share each key head among its group of query heads."""
    q, groups = x.q, x.q.shape[1] // k.shape[1]
    attend = partial(F.scaled_dot_product_attention, dropout_p=x.dropout, scale=x.scale)
    if groups == 1:
        return attend(q, k, v, mask, is_causal=is_causal)
    if q.shape[2] == 1 and (mask is None or mask.shape[1] == 1):  # the group stands in as queries
        folded = q.reshape(q.shape[0], k.shape[1], groups, q.shape[3])
        return attend(folded, k, v, mask).reshape(q.shape[0], q.shape[1], 1, v.shape[3])
    if q.device.type == "cuda" and mask is None and q.shape[3] == v.shape[3] <= 256:
        return attend(q, k, v, is_causal=is_causal, enable_gqa=True)
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    return attend(q, k, v, mask, is_causal=is_causal)


def _masked_sdpa(x: FlashInputs, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attend under a boolean mask; rows that see nothing are computed unmasked and then cleared."""
    if mask is None:
        return _grouped_sdpa(x._replace(q=q), k, v, None, is_causal=False)
    sees = mask.any(-1, keepdim=True)
    out = _grouped_sdpa(x._replace(q=q), k, v, mask | ~sees, is_causal=False)
    return out.masked_fill(~sees, 0)


def _biased_sdpa(x: FlashInputs, mask: Tensor | None) -> Tensor:
    """Attend with an additive bias; a sink is a key of zeros whose bias is the sink's logit."""
    batch, heads, length, _ = x.q.shape
    bias = x.q.new_zeros(1, 1, length, x.k.shape[2]) if x.bias is None else x.bias.to(x.q.dtype)
    sees = None
    if mask is not None:
        sees = mask.any(-1, keepdim=True)
        bias = torch.where(mask | ~sees, bias, -torch.inf)
    k, v = x.k, x.v
    if x.sinks is not None:
        column = sink_column(x.sinks.to(bias.dtype), batch, heads, length)
        bias = torch.cat([bias.expand(batch, heads, length, -1), column], -1)
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
    bias = bias.expand(batch, -1, -1, -1)
    out = _grouped_sdpa(x, k, v, bias, is_causal=False)
    return out if sees is None else out.masked_fill(~sees, 0)


def _banded(x: FlashInputs) -> bool:
    """Whether the band of a sliding window is worth cutting out of the square."""
    mask, length = x.mask, x.q.shape[2]
    if mask.window is None or mask.function is not None or length != x.k.shape[2]:
        return False
    offset_free = isinstance(mask.q_offset, int) and mask.q_offset == 0
    reach = mask.window[0] + (0 if mask.causal else mask.window[1])
    return offset_free and x.bias is None and x.sinks is None and length > 2 * max(reach, 64)


def _sdpa_band(x: FlashInputs) -> Tensor:
    """Cut the rows into blocks that see their own stretch of keys only: O(T w)."""
    assert x.mask.window is not None
    window: Window = (x.mask.window[0], 0 if x.mask.causal else x.mask.window[1])
    batch, heads, length, _ = x.q.shape
    block = max(sum(window), 64)
    q, k, v = band_blocks(x.q, x.k, x.v, block=block, window=window)
    mask = band_mask(length, block=block, window=window, mask=x.mask, device=x.q.device)
    mask = mask.repeat(q.shape[0] // mask.shape[0], 1, 1, 1)
    out = _masked_sdpa(x, q, k, v, mask)  # [B * N, H, block, E]
    out = out.view(batch, -1, heads, block, v.shape[-1]).transpose(1, 2)
    return out.reshape(batch, heads, -1, v.shape[-1])[:, :, :length]


# -- xformers ------------------------------------------------------------------------------------


@cache
def xformers_installed() -> bool:
    """Whether the package is there; it is imported only when a call needs it."""
    return find_spec("xformers") is not None


def xformers_reasons(x: FlashInputs) -> list[str]:
    """Say why xformers cannot run this call, asking it where it knows; empty if it can."""
    if not xformers_installed():
        return ["the package is not installed (pip install attnzoo[xformers])"]
    reasons = []
    if x.mask.padding is not None or x.mask.segment_ids is not None or x.mask.function is not None:
        reasons.append("it is used for causal and sliding-window masks only, and this one has more")
    if x.bias is not None or x.sinks is not None:
        reasons.append("a bias or sinks are given")
    if x.mask.causal and x.mask.q_offset != x.k.shape[2] - x.q.shape[2]:
        reasons.append("the queries are not the last of the keys")
    if reasons:
        return reasons
    from xformers.ops import fmha  # loading it takes seconds

    q, k, v = _xformers_layout(x)
    inputs = fmha.Inputs(query=q, key=k, value=v, attn_bias=_xformers_bias(x), p=x.dropout)
    operators = (fmha.cutlass.FwOp, fmha.flash.FwOp, fmha.flash3.FwOp, fmha.ck.FwOp)
    refusals = {op.NAME: op.not_supported_reasons(inputs) for op in operators}
    if any(not why for why in refusals.values()):
        return []
    return [f"{name}: {', '.join(why)}" for name, why in refusals.items()]


def _xformers_layout(x: FlashInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Bring q, k and v into xformers' ``[B, T, Hkv, G, D]``, or ``[B, T, H, D]`` without groups."""
    q, k, v = (t.transpose(1, 2) for t in (x.q, x.k, x.v))
    groups = x.q.shape[1] // x.k.shape[1]
    if groups == 1:
        return q, k, v
    q = q.view(*q.shape[:2], x.k.shape[1], groups, q.shape[3])
    k, v = (t[:, :, :, None].expand(-1, -1, -1, groups, -1) for t in (k, v))
    return q, k, v


def _xformers_bias(x: FlashInputs) -> Any:
    """Name the mask in xformers' own terms."""
    from xformers.ops.fmha import attn_bias

    if x.mask.window is not None and x.mask.causal:
        return attn_bias.LowerTriangularFromBottomRightLocalAttentionMask(x.mask.window[0] + 1)
    if x.mask.window is not None:
        return attn_bias.LocalAttentionFromBottomRightMask(*x.mask.window)
    return attn_bias.LowerTriangularFromBottomRightMask() if x.mask.causal else None


def _xformers(x: FlashInputs) -> Tensor:
    """Run xformers' memory-efficient attention."""
    from xformers.ops import fmha

    q, k, v = _xformers_layout(x)
    out: Tensor = fmha.memory_efficient_attention(
        q, k, v, attn_bias=_xformers_bias(x), p=x.dropout, scale=x.scale
    )
    return out.flatten(2, -2).transpose(1, 2)
