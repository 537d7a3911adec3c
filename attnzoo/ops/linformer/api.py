r"""Linformer: keys and values are projected along the sequence to a few rows.

Computes :math:`\mathrm{softmax}(s\, q\, (E^T k)^T)\, F^T v`. Token i of a sequence contributes to
row j with the weight :math:`E_{ij}`; i does not count padding, and a shorter sequence slices E.
Source: Wang et al., 2020, arXiv:2006.04768.

The paper's form is bidirectional. The block form, which is ours, is causal: a query attends to the
rows of the blocks before its own, and to the tokens of its own block up to itself, in one softmax.

Pooling, also ours: the learned weights are added to mean pooling over R neighbourhoods of the
*actual* length, so that a swapped model starts from a good approximation at every length; means
over the longest length would leave most rows empty. Of n tokens, token i goes to row ``i R // n``;
if n <= R, every token has its own row, which is softmax attention. The logarithm of the number of
tokens that a row pools is added to its scores.

Other letters: L longest sequence, R rows, C tokens per block, N blocks.
"""

from __future__ import annotations

from torch import Tensor

from attnzoo.contract.implementation import TORCH, Implementation, register_implementation, select
from attnzoo.contract.masks import AttentionMask
from attnzoo.contract.states import AttentionOutput
from attnzoo.contract.validation import (
    check_device,
    check_dtype,
    check_mask_fields,
    check_qkv,
    empty_output,
    format_shape,
    is_empty_call,
)
from attnzoo.errors import UnsupportedError
from attnzoo.ops.linformer.causal_blocks import run_block_torch
from attnzoo.ops.linformer.common import (
    BlockState,
    LinformerCall,
    empty_state,
)
from attnzoo.ops.linformer.reference import run_block_reference, run_reference
from attnzoo.ops.linformer.rows import run_torch

register_implementation(
    Implementation(
        op="linformer_attention",
        **TORCH,
        run=run_torch,
    ),
    Implementation(op="linformer_attention", name="reference", run=run_reference),
    Implementation(
        op="linformer_block_attention",
        **TORCH,
        run=run_block_torch,
        form="block form",
    ),
    Implementation(op="linformer_block_attention", name="reference", run=run_block_reference),
)


def linformer_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_rows: Tensor,
    value_rows: Tensor,
    *,
    scale: float | None = None,
    mask: AttentionMask | None = None,
    pooling: bool = False,
    dropout: float = 0.0,
    impl: str = "auto",
) -> AttentionOutput:
    """Return bidirectional Linformer attention. Time O((T + S) R (D + E)).

    Args:
        q: Queries, ``[B, H, T, D]``.
        k: Keys, ``[B, Hkv, S, D]``.
        v: Values, ``[B, Hkv, S, E]``.
        key_rows: E, ``[1 or Hkv, L, R]``.
        value_rows: F, ``[1 or Hkv, L, R]``.
        scale: Multiplies the products; ``None`` means ``D ** -0.5``.
        mask: Padding only; positions in the sequence do not count padding.
        pooling: Whether mean pooling is added to E and F.
        dropout: Probability of dropping the weight of a row.
        impl: ``"auto"``, ``"torch"`` (fused) or ``"reference"`` (dense, in float32 or wider).

    Returns:
        ``out`` as ``[B, H, T, E]`` in the dtype of ``v``, zeros for a sequence without a key.

    Raises:
        UnsupportedError: S exceeds L, or the shapes, the mask or ``impl`` are unsupported.

    Example:
        >>> q, k, v = torch.randn(3, 1, 4, 1000, 8)
        >>> key_rows, value_rows = torch.randn(2, 1, 1024, 64)  # up to 1024 tokens become 64 rows
        >>> attnzoo.ops.linformer_attention(q, k, v, key_rows, value_rows).out.shape
        torch.Size([1, 4, 1000, 8])
    """
    _check("linformer_attention", q, k, v, key_rows, value_rows, mask, dropout)
    if mask is not None and mask.causal and q.shape[2] > 1:
        raise UnsupportedError(
            "linformer_attention is bidirectional, got a causal mask; use linformer_block_attention"
        )
    if k.shape[2] > key_rows.shape[1]:
        raise UnsupportedError(
            f"linformer projects up to {key_rows.shape[1]} tokens, got {k.shape[2]}; set "
            f"max_length={k.shape[2]} or more, or truncate the input"
        )
    scale = q.shape[3] ** -0.5 if scale is None else scale
    padding_mask = _padding_mask(mask, k)
    call = LinformerCall(q, k, v, key_rows, value_rows, scale, padding_mask, pooling, dropout)
    implementation, choice = select("linformer_attention", call, impl)
    if is_empty_call(q, k):
        return AttentionOutput(empty_output(q, k, v, key_rows, value_rows), impl=choice)
    return AttentionOutput(implementation.run(call).to(v.dtype), impl=choice)


def linformer_block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_rows: Tensor,
    value_rows: Tensor,
    *,
    scale: float | None = None,
    mask: AttentionMask | None = None,
    pooling: bool = False,
    dropout: float = 0.0,
    state: BlockState | None = None,
    return_state: bool = False,
    impl: str = "auto",
) -> AttentionOutput:
    """Return causal Linformer attention: finished blocks are projected, the current one is exact.

    With pooling, R >= C is softmax attention. Time O(T C D + T^2 D R / C): quadratic, but C / R
    times less than softmax attention. The state grows by R rows per block.

    Args:
        q: Queries, ``[B, H, T, D]``.
        k: Keys of the same tokens, ``[B, Hkv, T, D]``.
        v: Values, ``[B, Hkv, T, E]``.
        key_rows: E, ``[1 or Hkv, C, R]``, the same for every block.
        value_rows: F, ``[1 or Hkv, C, R]``.
        scale: Multiplies the products; ``None`` means ``D ** -0.5``.
        mask: Causality and padding; ``None`` means no padding. Blocks do not count padding.
        pooling: Whether mean pooling is added to E and F.
        dropout: Probability of dropping a weight.
        state: The state that an earlier call returned; ``None`` starts a sequence.
        return_state: Whether to return the state after the last token.
        impl: ``"auto"``, ``"torch"`` (fused, block by block) or ``"reference"`` (dense, in float32
            or wider).

    Returns:
        ``out`` as ``[B, H, T, E]`` in the dtype of ``v``, zeros at padding; and ``state``.

    Raises:
        UnsupportedError: The shapes, the mask or ``impl`` are unsupported.

    Example:
        >>> q, k, v = torch.randn(3, 1, 4, 1000, 8)
        >>> key_rows, value_rows = torch.randn(2, 1, 64, 8)  # every 64 tokens become 8 rows
        >>> attnzoo.ops.linformer_block_attention(q, k, v, key_rows, value_rows).out.shape
        torch.Size([1, 4, 1000, 8])
    """
    _check("linformer_block_attention", q, k, v, key_rows, value_rows, mask, dropout)
    if q.shape[2] != k.shape[2]:
        raise UnsupportedError(
            "linformer_block_attention needs queries and keys of the same tokens, got "
            f"{q.shape[2]} queries and {k.shape[2]} keys; pass earlier tokens as state="
        )
    if mask is not None and not mask.causal and k.shape[2] > 1:
        raise UnsupportedError(
            "linformer_block_attention is causal, got a bidirectional mask; use linformer_attention"
        )
    call = LinformerCall(
        q,
        k,
        v,
        key_rows,
        value_rows,
        q.shape[3] ** -0.5 if scale is None else scale,
        _padding_mask(mask, k),
        pooling,
        dropout,
        state,
        return_state,
    )
    implementation, choice = select("linformer_block_attention", call, impl)
    if is_empty_call(q, k):
        out = empty_output(q, k, v, key_rows, value_rows)
        state = empty_state(call) if state is None else state
        return AttentionOutput(out, state if return_state else None, impl=choice)
    out, state = implementation.run(call)
    return AttentionOutput(out.to(v.dtype), state, impl=choice)


def _check(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_rows: Tensor,
    value_rows: Tensor,
    mask: AttentionMask | None,
    dropout: float,
) -> None:
    """Raise ``UnsupportedError`` if shapes disagree, or the mask has more than padding."""
    check_qkv(q, k, v, mask, dropout=dropout)
    for name, x in (("key_rows", key_rows), ("value_rows", value_rows)):
        if x.ndim != 3 or x.shape[0] not in (1, k.shape[1]) or x.shape != key_rows.shape:
            raise UnsupportedError(
                f"{name} must be [1 or {k.shape[1]}, tokens, rows], the same for keys and values, "
                f"got {format_shape(x)}"
            )
        check_dtype(name, x)
        check_device(name, x, q.device)
    if mask is not None:
        check_mask_fields(op, mask, "q_offset")


def _padding_mask(mask: AttentionMask | None, k: Tensor) -> Tensor | None:
    """Return the padding mask for every sequence of the batch, ``[B, S]``."""
    if mask is None or mask.padding is None:
        return None
    return mask.padding.expand(k.shape[0], -1)
