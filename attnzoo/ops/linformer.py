r"""Linformer: keys and values are projected along the sequence to a few rows.

Computes :math:`\mathrm{softmax}(s\, q\, (E^T k)^T)\, F^T v`. Token i of a sequence goes into row j
with the weight :math:`E_{ij}`, i counted over the real tokens; a shorter sequence slices E.
Source: Wang et al., 2020, arXiv:2006.04768.

Pooling (ours): what is learned is added to the means over R neighbourhoods of the *actual* length,
so that a swapped model starts from something sane at every length; means over the longest one would
leave most rows empty. Of n tokens, token i goes to row ``i R // n``; n <= R tokens get a row each,
which is softmax attention itself. A row weighs as many tokens as it pools: the logarithm of their
number is added to its scores.

Letters: B batch, H query heads, Hkv key heads, T queries, S keys, D key size, E value size,
L longest sequence, R rows, C tokens per block, N blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attnzoo.errors import UnsupportedError


def linformer_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_rows: Tensor,
    value_rows: Tensor,
    *,
    scale: float,
    real: Tensor | None = None,
    pooling: bool = False,
    dropout: float = 0.0,
    impl: str = "torch",
) -> Tensor:
    """Attend to all keys at once, through R rows. Time O((T + S) R (D + E)).

    Args:
        q: Queries, ``[B, H, T, D]``.
        k: Keys, ``[B, Hkv, S, D]``.
        v: Values, ``[B, Hkv, S, E]``.
        key_rows: E, ``[1 or Hkv, L, R]``.
        value_rows: F, ``[1 or Hkv, L, R]``.
        scale: Multiplies the products.
        real: ``[B, S]``, false where a key is padding, which takes no place in the sequence.
        pooling: Whether E and F are added to the means over neighbourhoods.
        dropout: Probability with which a weight of a row is dropped.
        impl: ``"torch"`` (fused) or ``"reference"`` (dense, in float32 or wider).

    Returns:
        ``[B, H, T, E]`` in the dtype of ``v``; zeros for a sequence without a key.

    Raises:
        UnsupportedError: S exceeds L.
    """
    keys, longest = k.shape[2], key_rows.shape[1]
    real = None if real is None else real.expand(k.shape[0], -1)
    if keys > longest:
        raise UnsupportedError(
            f"linformer projects up to {longest} tokens, got {keys}: set max_length={keys} or "
            "more, or cut the input"
        )
    counts = row_counts(real, keys, key_rows.shape[2], k.device) if pooling else None
    bias = None if counts is None else row_bias(counts)
    wide = torch.promote_types(q.dtype, torch.float32)
    if impl == "reference":
        short_k, short_v = (
            token_weights(rows, real, keys, counts).to(wide).mT @ x.to(wide)
            for rows, x in ((key_rows, k), (value_rows, v))
        )
    else:
        share = None if counts is None else pool_matrix(counts, keys, wide)
        short_k = project(k, key_rows, real, share).to(q.dtype)
        short_v = project(v, value_rows, real, share).to(q.dtype)
        if real is None and counts is not None and keys % counts.shape[1] == 0:
            bias = None  # all rows weigh alike
    out = attend_to_rows(q, short_k, short_v, bias, scale=scale, dropout=dropout, impl=impl)
    return out.to(v.dtype)


def row_counts(real: Tensor | None, tokens: int, rows: int, device: torch.device) -> Tensor:
    """Return how many tokens each row pools: row j those from ``ceil(j n / R)`` on.

    Returns:
        ``[1 or B, R']``, integers, R' = min(R, S); zero for rows beyond a shorter sequence.
    """
    used = min(rows, tokens)
    if real is None:
        lengths = torch.full((1, 1), tokens, device=device)
    else:
        lengths = real.sum(1, keepdim=True)
    place = torch.arange(used + 1, device=device)
    shared = lengths.clamp(min=1, max=used)  # rows that n tokens make
    starts = (place * lengths + shared - 1) // shared
    return starts.minimum(lengths).diff(dim=1)


def row_bias(counts: Tensor) -> Tensor:
    """Return what is added to the scores of rows that pool so many tokens, ``[1 or B, 1, 1, R']``.

    At most 0, for the sake of 16 bits: of the logarithms only differences count. Minus infinity
    keeps out rows without a token, except in a sequence that has none at all: its rows are zeros,
    and so is what they give.
    """
    most = counts.amax(1, keepdim=True)
    bias = (counts / most.clamp(min=1)).log()
    return bias.masked_fill(most == 0, 0.0)[:, None, None]


def pool_index(counts: Tensor, tokens: int) -> Tensor:
    """Return the row of each token, ``[1 or B, S]``; tokens beyond the sequence get the last."""
    ends = counts.cumsum(1).contiguous()
    place = torch.arange(tokens, device=counts.device).expand(counts.shape[0], -1).contiguous()
    return torch.searchsorted(ends, place, right=True).clamp_(max=counts.shape[1] - 1)


def pool_matrix(counts: Tensor, tokens: int, dtype: torch.dtype) -> Tensor:
    """Return the weights of the means, ``[1 or B, 1, S, R']``; zero beyond the sequence."""
    index = pool_index(counts, tokens)
    share = 1 / counts.gather(1, index).to(dtype).clamp(min=1)
    place = torch.arange(tokens, device=counts.device)
    share = share * (place < counts.sum(1, keepdim=True))
    matrix = share.new_zeros(*index.shape, counts.shape[1])
    return matrix.scatter_(2, index.unsqueeze(2), share.unsqueeze(2)).unsqueeze(1)


def project(x: Tensor, rows: Tensor, real: Tensor | None, share: Tensor | None) -> Tensor:
    """Project keys or values ``[B, Hkv, S, D]`` along the sequence to ``[B, Hkv, R', D]``.

    Args:
        x: Keys or values.
        rows: ``[1 or Hkv, L, R]``.
        real: ``[B, S]``, false at padding: the others are moved together first.
        share: From :func:`pool_matrix`, when pooling.
    """
    if x.device.type == "cpu":  # where products of 16 bits are summed in few bits, too
        x = x.to(torch.promote_types(x.dtype, torch.float32))
    if real is not None:
        gone, order = (~real).to(torch.uint8).sort(dim=1, stable=True)
        x = x.gather(2, order[:, None, :, None].expand(*x.shape))
        x = x.masked_fill(gone.bool()[:, None, :, None], 0)
    weights = rows[:, : x.shape[2]].to(x.dtype)
    if share is None:
        return _sum_tokens(weights, x)
    share = share.to(x.dtype)
    weights = weights[:, :, : share.shape[3]]
    if real is None:
        return _sum_tokens(weights + share[0], x)
    return _sum_tokens(weights, x) + share.mT @ x  # shares differ between rows of the batch


def _sum_tokens(weights: Tensor, x: Tensor) -> Tensor:
    """Multiply ``[1 or Hkv, S, R]`` transposed with ``[B, Hkv, S, D]``."""
    batch, heads, tokens, size = x.shape
    if weights.shape[0] == 1:
        # One product for all heads, which lie side by side in memory as models make them; where
        # they do not, a copy costs less than a gradient of the weights for every head
        flat = weights[0].mT @ x.transpose(1, 2).reshape(batch, tokens, heads * size)
        return flat.view(batch, -1, heads, size).transpose(1, 2)
    return weights.mT @ x


def token_weights(rows: Tensor, real: Tensor | None, tokens: int, counts: Tensor | None) -> Tensor:
    """Return every token's weights, ``[1 or B, 1 or Hkv, S, R']``, dense; zero at padding."""
    place = torch.arange(tokens, device=rows.device)[None]
    if real is not None:
        place = (real.cumsum(1) - 1).clamp(min=0)
    weights = rows[:, place].transpose(0, 1)
    if counts is not None:
        share = pool_matrix(counts, tokens, torch.promote_types(rows.dtype, torch.float32))[:, 0]
        share = share.gather(1, place.unsqueeze(2).expand(-1, -1, share.shape[2]))
        weights = weights[..., : counts.shape[1]] + share.unsqueeze(1)
    return weights if real is None else weights * real[:, None, :, None]


def attend_to_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    *,
    scale: float,
    dropout: float = 0.0,
    impl: str = "torch",
) -> Tensor:
    """Softmax attention in which the query heads of a group stand below each other.

    So no row is repeated, and the fused kernel sees as many heads of queries as of rows.

    Args:
        q: Queries, ``[B, H, T, D]``.
        k: Rows of keys, ``[B, Hkv, R, D]``.
        v: Rows of values, ``[B, Hkv, R, E]``.
        bias: Added to the scores: ``[1 or B, 1, 1 or T, R]``.
        scale: Multiplies the products.
        dropout: Probability with which a weight is dropped.
        impl: ``"torch"`` or ``"reference"``.

    Returns:
        ``[B, H, T, E]`` in the dtype of the rows.
    """
    batch, heads, length, size = q.shape
    groups = heads // k.shape[1]
    q = q.reshape(batch, k.shape[1], groups * length, size).to(k.dtype)
    if bias is not None:
        bias = bias.to(k.dtype)
        if bias.shape[2] > 1:
            bias = bias.repeat(1, 1, groups, 1)
    if impl == "reference":
        scores = q @ k.mT * scale
        weights = (scores if bias is None else scores + bias).softmax(-1)
        out = torch.dropout(weights, dropout, train=dropout > 0) @ v
    else:
        out = scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout, scale=scale)
    return out.reshape(batch, heads, length, -1)
