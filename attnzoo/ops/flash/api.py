r"""Exact softmax attention by fused kernels, without a score matrix in memory.

Computes the same as :func:`attnzoo.ops.softmax.api.softmax_attention`, by torch's
``scaled_dot_product_attention`` (flash, cuDNN or memory-efficient kernels), by its FlexAttention
(windows, padding, packing and continuing prompts on CUDA), by xformers, or, on CPUs, in C++:
sliding windows, and other calls where it was measured to be faster.
Time O(T S), memory O(T + S); with a sliding window of w, time and memory O(T w). Source: Dao et
al., 2022, arXiv:2205.14135; Rabe and Staats, 2021, arXiv:2112.05682. Other letters: w window.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnzoo.contract.implementation import Implementation, register_implementation, select
from attnzoo.contract.masks import AttentionMask
from attnzoo.contract.states import AttentionOutput
from attnzoo.contract.validation import check_qkv, empty_output, is_empty_call
from attnzoo.ops.flash.call import FlashCall as FlashCall
from attnzoo.ops.flash.sdpa import kernel_name, run_sdpa
from attnzoo.ops.flash.xformers import auto_reasons, run_xformers, xformers_reasons
from attnzoo.ops.window import flex
from attnzoo.ops.window.cpu.band import band_attention_cpp, band_cpp_reasons
from attnzoo.runtime.cpp import prebuilt
from attnzoo.runtime.kernel_calls import is_transformed

FEW_QUERIES = 8  # with a window; the kernel computes 32 queries at a time
FEW_QUERIES_OF_ALL_KEYS = 63  # without a window
# Multiply-adds, B H T S (D + E), from which on PyTorch's kernels were never faster on AVX-512
MIN_CAUSAL_PRODUCTS = 2**24  # 128 tokens with 8 heads of 64
MIN_MASKED_PRODUCTS = 2**25  # bidirectional, with padding or segments
EXPORTING = "the choice would fix the lengths that the exported program accepts"


def _kernel_note(call: FlashCall) -> str:
    """Return the kernel that torch selects on a GPU."""
    on_gpu = call.q.device.type == "cuda" and not torch.compiler.is_compiling()
    return kernel_name(call) if on_gpu else ""


def skip_cpp(x: FlashCall) -> list[str]:
    """Return why ``impl="auto"`` does not consider the kernel for this call."""
    queries, exporting = x.q.shape[2], torch.compiler.is_exporting()
    few = FEW_QUERIES_OF_ALL_KEYS if x.mask.window is None else FEW_QUERIES
    if not exporting and queries <= few:  # comparing would fix the lengths that a program accepts
        return [f"there are {queries} queries, and it computes many at a time"]
    if is_transformed():
        return ["forward-mode differentiation or a transform of torch.func is active"]
    if exporting:
        return [EXPORTING] if x.mask.window is None else []
    if x.mask.window is None:
        return _skip_all_keys(x)
    return []


def _skip_all_keys(x: FlashCall) -> list[str]:
    """Return why PyTorch's kernels are as fast, or support more, without a window."""
    mask = x.mask
    if not mask.causal and mask.is_plain:
        return ["without causality or a mask PyTorch's kernels are as fast"]
    batch, heads, queries, size = x.q.shape
    products = batch * heads * queries * x.k.shape[2] * (size + x.v.shape[3])
    least = MIN_CAUSAL_PRODUCTS if mask.causal else MIN_MASKED_PRODUCTS
    if x.q.dtype in (torch.bfloat16, torch.float16) and _has_amx():
        return [f"this CPU multiplies matrices in {x.q.dtype}, which PyTorch's kernels use"]
    if products < least:
        return ["the call is small, and PyTorch's kernels start faster"]
    if not _has_avx512():
        return ["without a window it is faster on CPUs with AVX-512 only"]
    if not torch.backends.cuda.flash_sdp_enabled():
        return ["torch.nn.attention.sdpa_kernel excludes flash kernels"]
    return []


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_avx512() -> bool:
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _has_amx() -> bool:
    return torch.cpu._is_amx_tile_supported()


def cpp_reasons(x: FlashCall) -> list[str]:
    """Return every reason why the kernel does not support this call."""
    mask = x.mask
    reasons = band_cpp_reasons()
    reasons += x.band_kernel_reasons()
    if mask.num_sinks and mask.segment_ids is not None:
        reasons.append("the first tokens of each of several segments are attended to")
    return reasons


def run_cpp(x: FlashCall) -> Tensor:
    """Compute a call with a sliding window, or with all keys."""
    assert isinstance(x.mask.q_offset, int)
    return band_attention_cpp(x.q, x.k, x.v, x.band_options(), x.mask.q_offset)[0].to(x.v.dtype)


def skip_flex(x: FlashCall) -> list[str]:
    """Return why ``impl="auto"`` does not consider FlexAttention for this call."""
    mask, queries = x.mask, x.q.shape[2]
    if queries == 1:
        return ["one query needs one row of a mask"]
    follows = mask.causal and queries < x.k.shape[2]
    if mask.is_plain and not follows:
        return ["without a mask PyTorch's kernels are as fast"]
    return []


def flex_reasons(x: FlashCall) -> list[str]:
    """Return every reason why FlexAttention does not support this call."""
    return flex.flex_reasons(x.q, x.k, x.v) + x.region_reasons()


def run_flex(x: FlashCall) -> Tensor:
    """Compute a call by FlexAttention."""
    return flex.run_flex(x.q, x.k, x.v, flex.of_mask(x.mask, x.q, x.k), x.scale)[0]


register_implementation(
    Implementation(
        op="flash_attention",
        **flex.FLEX,
        run=run_flex,
        reasons=flex_reasons,
        auto_reasons=skip_flex,
    ),
    Implementation(
        op="flash_attention",
        name="xformers",
        devices=("cuda",),
        run=run_xformers,
        reasons=xformers_reasons,
        automatic="xformers has a kernel for sliding windows",
        auto_reasons=auto_reasons,
    ),
    Implementation(
        op="flash_attention",
        name="cpp",
        devices=("cpu",),
        run=run_cpp,
        reasons=cpp_reasons,
        auto_reasons=skip_cpp,
        automatic=f"causal attention and masks are {prebuilt.origin()}",
    ),
    Implementation(
        op="flash_attention",
        name="sdpa",
        run=run_sdpa,
        automatic="PyTorch's fused kernels run on every device",
        note=_kernel_note,
        onnx=True,
    ),
)


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: AttentionMask | None = None,
    scale: float | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    impl: str = "auto",
) -> AttentionOutput:
    """Return exact softmax attention, computed by a fused kernel.

    Args:
        q: Queries, ``[B, H, T, D]``.
        k: Keys, ``[B, Hkv, S, D]``; each serves H / Hkv query heads.
        v: Values, ``[B, Hkv, S, E]``.
        mask: Which keys each query sees; ``None`` means all. A query that sees none gives zeros.
            Hidden keys and values must be finite, as in ``softmax_attention``.
        scale: Multiplies the products; ``None`` means ``D ** -0.5``.
        bias: Added to the scores, broadcastable to ``[B, H, T, S]``.
        sinks: A logit per head, ``[H]``, or per head and query, ``[B, H, T, 1]``, that takes part
            in the softmax and has no value.
        dropout: Probability of dropping a weight.
        impl: ``"sdpa"``, ``"flex"`` (CUDA), ``"xformers"``, ``"cpp"`` (CPUs), or ``"auto"``: on
            CUDA flex for windows, padding, packing and continuing prompts, else xformers for
            windows; on CPUs cpp for windows, and on CPUs with AVX-512 also for causal calls from
            B H T S (D + E) = 2^24 on and padded or packed bidirectional ones from 2^25 on, with 64
            queries or more; else sdpa.

    Returns:
        ``out`` as ``[B, H, T, E]`` in the dtype of ``v``, and ``impl``, which on a GPU names the
        kernel that torch selected.

    Raises:
        UnsupportedError: The shapes disagree, or ``impl`` is unknown or does not support the call.

    Example:
        >>> q, k, v = torch.randn(3, 1, 4, 10, 8)
        >>> mask = attnzoo.AttentionMask(causal=True)
        >>> out = attnzoo.ops.flash_attention(q, k, v, mask=mask).out
        >>> torch.allclose(out, attnzoo.ops.softmax_attention(q, k, v, mask=mask).out, atol=1e-6)
        True
    """
    check_qkv(q, k, v, mask, bias=bias, sinks=sinks, dropout=dropout)
    mask = AttentionMask() if mask is None else mask
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return run_flash_attention(FlashCall(q, k, v, mask, scale, bias, sinks, dropout), impl)


def run_flash_attention(call: FlashCall, impl: str = "auto") -> AttentionOutput:
    """Compute :func:`flash_attention` of tensors that fit each other, as a backend's do."""
    bias, sinks = call.bias, call.sinks
    if bias is not None or sinks is not None:  # of a model, which no contract knows
        check_qkv(call.q, call.k, call.v, call.mask, bias=bias, sinks=sinks)
    if bias is not None:
        call = call._replace(bias=bias[(None,) * (4 - bias.dim())])  # kernels expand four of them
    implementation, choice = select("flash_attention", call, impl)
    if is_empty_call(call.q, call.k):
        empty = empty_output(call.q, call.k, call.v, bias, sinks)
        return AttentionOutput(empty, impl=choice)
    return AttentionOutput(implementation.run(call), impl=choice)
