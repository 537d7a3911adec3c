r"""Longformer attention: a sliding window for every token, and a few global tokens.

A query sees the keys of its head's window, at steps of the head's dilation, and all global keys; a
global token sees everything. With :math:`A_i` the set of keys that token i sees, :math:`o_i =
\sum_{j \in A_i} a_{ij} v_j`, where :math:`a_{ij}` is the softmax of :math:`s\, q_i \cdot k_j` over
:math:`A_i`. Global tokens may have their own queries, and keys and values that only they attend to.
Causal attention hides later tokens from every token, global or not. Padding is not counted: windows
and distances are measured in real tokens. A position bias is added to the scores of the keys that a
query sees. Time O(T (w + G) D), memory O(T D) in C++. Source: Beltagy et al., 2020,
arXiv:2004.05150.
Other letters: w window, d dilation, G global tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnzoo.contract.implementation import CPP, Implementation, register_implementation, select
from attnzoo.contract.masks import AttentionMask
from attnzoo.contract.padding import has_gaps
from attnzoo.contract.states import AttentionOutput
from attnzoo.contract.validation import (
    check_broadcastable,
    check_lengths,
    check_qkv,
    check_shape,
    empty_output,
    is_empty_call,
)
from attnzoo.errors import UnsupportedError
from attnzoo.ops.longformer.by_band import (
    cpp_reasons,
    flex_reasons,
    run_cpp,
    run_flex,
    run_torch,
    skip_kernel,
)
from attnzoo.ops.longformer.call import GlobalTokens, LongformerCall
from attnzoo.ops.longformer.reference import run_reference
from attnzoo.ops.window.flex import FLEX
from attnzoo.ops.window.pattern import Pattern, PerHead, expand_bias

register_implementation(
    Implementation(
        op="longformer_attention",
        **CPP,
        run=run_cpp,
        reasons=cpp_reasons,
        auto_reasons=skip_kernel,
    ),
    Implementation(
        op="longformer_attention",
        **FLEX,
        run=run_flex,
        reasons=flex_reasons,
        auto_reasons=skip_kernel,
    ),
    Implementation(
        op="longformer_attention",
        name="torch",
        run=run_torch,
        automatic="blocks of queries with the keys of their band, on every device",
    ),
    Implementation(op="longformer_attention", name="reference", run=run_reference),
)


def longformer_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: PerHead,
    dilation: PerHead = 1,
    mask: AttentionMask | None = None,
    scale: float | None = None,
    global_tokens: Tensor | GlobalTokens | None = None,
    bias: Tensor | None = None,
    dropout: float = 0.0,
    impl: str = "auto",
) -> AttentionOutput:
    """Return attention within a sliding window and to global tokens.

    Args:
        q: Queries, ``[B, H, T, D]``; causal ones may be fewer than the keys.
        k: Keys, ``[B, Hkv, S, D]``; each serves H / Hkv query heads.
        v: Values, ``[B, Hkv, S, E]``.
        window: w, for all heads or for each: keys on either side, or, in causal attention, the
            number of keys that a query sees, its own included.
        dilation: d, for all heads or for each: only every d-th key is seen, as far as w d
            (w d - d in causal attention).
        mask: Causality, padding, and segments, which need calls without global tokens. Its window
            limits that of every head, and counts padding between real tokens, for which memory is
            that of a dense mask of 256 queries. Its ``q_offset`` is read if there are fewer queries
            than keys. Queries at padding give zeros. Hidden keys and values must be finite, as in
            ``softmax_attention``. ``None`` means bidirectional.
        scale: Multiplies the products; ``None`` means ``D ** -0.5``.
        global_tokens: ``[B, S]`` or ``[1, S]`` bool, true where a token is global; or
            :class:`GlobalTokens`.
        bias: Added to the scores, broadcastable to ``[B, H, T, S]``. A bias of one row, such as
            ALiBi's, is not expanded. A query whose bias is -inf at all its keys gives zeros.
        dropout: Probability of dropping a weight.
        impl: ``"cpp"``, ``"flex"`` (CUDA), ``"torch"``, ``"reference"``, or ``"auto"``, which
            selects cpp on CPUs, flex on CUDA, and torch elsewhere and where these do not support
            the call.

    Returns:
        ``out`` as ``[B, H, T, E]`` in the dtype of ``v``, and ``impl``.

    Raises:
        ConfigError: A window or dilation is not positive, or a list does not have one number for
            each head.
        UnsupportedError: The shapes disagree, the mask is not supported, or ``impl`` is unknown or
            does not support the call.

    Example:
        >>> q, k, v = torch.randn(3, 1, 4, 1000, 8)
        >>> attnzoo.ops.longformer_attention(q, k, v, window=64).out.shape
        torch.Size([1, 4, 1000, 8])
    """
    check_qkv(q, k, v, mask, bias=bias, dropout=dropout)
    mask = AttentionMask() if mask is None else mask
    check_lengths(q, k, mask)
    pattern = Pattern.of(window, dilation, heads=q.shape[1], causal=mask.causal, limit=mask.window)
    return pattern_attention(
        q,
        k,
        v,
        pattern,
        mask=mask,
        scale=q.shape[3] ** -0.5 if scale is None else scale,
        global_tokens=global_tokens,
        bias=bias,
        dropout=dropout,
        impl=impl,
    )


def pattern_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Pattern,
    *,
    mask: AttentionMask,
    scale: float,
    global_tokens: Tensor | GlobalTokens | None = None,
    bias: Tensor | None = None,
    dropout: float = 0.0,
    impl: str = "auto",
) -> AttentionOutput:
    """Return :func:`longformer_attention` for a pattern that was made before.

    The pattern holds the window, the dilation and the causality; the rest is as there.
    """
    _check_mask(mask)
    if isinstance(global_tokens, Tensor):
        global_tokens = GlobalTokens(global_tokens)
    if global_tokens is not None:
        _check_global_tokens(global_tokens, q, k, v, mask)
    if global_tokens is not None and mask.padding is not None:
        global_tokens = global_tokens._replace(is_global=global_tokens.is_global & mask.padding)
    fewer = q.shape[2] != k.shape[2]
    if fewer and not pattern.causal:
        raise UnsupportedError(
            f"{q.shape[2]} queries and {k.shape[2]} keys are given; bidirectional attention needs "
            "as many of each (causal=True in the mask supports fewer queries)"
        )
    call = LongformerCall(
        q,
        k,
        v,
        pattern,
        scale,
        padding_mask=mask.padding,
        segment_ids=mask.segment_ids,
        q_offset=mask.q_offset if fewer else 0,
        global_tokens=global_tokens,
        bias=None if bias is None else expand_bias(bias, q.shape[1], k.shape[2]),
        dropout=dropout,
        window=mask.window if mask.padding is not None and has_gaps(mask.padding) else None,
    )
    implementation, choice = select("longformer_attention", call, impl)
    if is_empty_call(q, k):
        of_globals = () if global_tokens is None else global_tokens[2:]
        return AttentionOutput(empty_output(q, k, v, bias, *of_globals), impl=choice)
    return AttentionOutput(implementation.run(call), impl=choice)


def _check_mask(mask: AttentionMask) -> None:
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


def _check_global_tokens(
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
