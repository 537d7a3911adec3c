"""Reference implementations of Linformer: dense, in float32 or wider.

Other letters: L longest sequence, R rows, C tokens per block, M blocks that the call finishes.
"""

from __future__ import annotations

import torch
from einops import rearrange, repeat
from torch import Tensor
from torch.nn.functional import one_hot

from attnzoo.contract.padding import fill_padding
from attnzoo.ops.linformer.common import BlockState, LinformerCall


def run_reference(x: LinformerCall) -> Tensor:
    """Return the output of the bidirectional form, ``[B, H, T, E]``."""
    wide = torch.promote_types(x.q.dtype, torch.float32)
    q, k, v = x.q.to(wide), *_keys_and_values(x, wide)
    tokens = _padding_mask(x.padding_mask, x.k)
    position = (tokens.cumsum(1) - 1).clamp(min=0)  # [B, S]
    weights = [
        rearrange(rows.to(wide)[:, position], "h b s r -> b h s r")
        for rows in (x.key_rows, x.value_rows)
    ]
    bias = q.new_zeros(1, 1)  # [B, R]
    if x.pooling:
        rows = min(weights[0].shape[3], k.shape[2])
        lengths = tokens.sum(1, keepdim=True)
        row = position * lengths.clamp(min=1, max=rows) // lengths.clamp(min=1)
        members = one_hot(row, rows) * tokens[:, :, None]  # [B, S, R]: which row pools which token
        counts = members.sum(1)
        means = members / counts.clamp(min=1)[:, None].to(wide)
        weights = [w[..., :rows] + means[:, None] for w in weights]
        bias = counts.to(wide).log().masked_fill(lengths == 0, 0.0)
    row_k, row_v = (
        torch.einsum("bhsr,bhsd->bhrd", (w * tokens[:, None, :, None]).expand(*t.shape[:3], -1), t)
        for w, t in zip(weights, (k, v), strict=True)
    )
    return _softmax_attention(q, row_k, row_v, bias[:, None, None], x)


def run_block_reference(x: LinformerCall) -> tuple[Tensor, BlockState | None]:
    """Return the output of the causal form, ``[B, H, T, E]``, and the state if requested.

    Positions count from the start of the current block of the state.
    """
    wide, size = torch.promote_types(x.k.dtype, torch.float32), x.key_rows.shape[1]
    q, k, v = x.q.to(wide), *_keys_and_values(x, wide)
    queries = tokens = _padding_mask(x.padding_mask, x.k)
    q_position = position = (tokens.cumsum(1) - 1).clamp(min=0)
    if x.state is not None:
        used, earlier = x.state.used[:, None], torch.arange(size, device=k.device)
        q_position = position + used
        position = torch.cat([earlier.expand(k.shape[0], -1), q_position], 1)
        tokens = torch.cat([earlier < used, tokens], 1)
        k, v = torch.cat([x.state.k.to(wide), k], 2), torch.cat([x.state.v.to(wide), v], 2)
    total = tokens.sum(1)
    blocks = int(total.max()) // size

    weights, bias = _block_weights(x, wide)
    index = torch.arange(blocks, device=k.device)
    in_block = ((position // size)[:, :, None] == index) & tokens[:, :, None]  # [B, S, M]
    row_k, row_v = (
        torch.einsum("hbsr,bsm,bhsd->bhmrd", w[:, position % size], in_block.to(wide), t)
        for w, t in zip(weights, (k, v), strict=True)
    )
    row_k, row_v = (rearrange(t, "b h m r d -> b h (m r) d") for t in (row_k, row_v))
    visible = index < (q_position // size)[:, :, None]
    visible = repeat(visible, "b t m -> b t (m r)", r=len(bias))
    filled = index < (total // size)[:, None]
    if x.state is not None:
        row_k = torch.cat([x.state.row_k.to(wide), row_k], 2)
        row_v = torch.cat([x.state.row_v.to(wide), row_v], 2)
        earlier = repeat(x.state.filled, "b n -> b t (n r)", t=visible.shape[1], r=len(bias))
        visible = torch.cat([earlier, visible], 2)
        filled = torch.cat([x.state.filled, filled], 1)

    same_block = (position // size)[:, None] == (q_position // size)[:, :, None]
    own = tokens[:, None] & same_block & (position[:, None] <= q_position[:, :, None])
    visible = torch.cat([visible, own], 2)
    visible = visible | ~visible.any(2, keepdim=True)  # padding, whose output is set to zero
    bias = torch.cat([bias.repeat(row_k.shape[2] // len(bias)), bias.new_zeros(k.shape[2])])
    bias = bias.expand_as(visible).masked_fill(~visible, -torch.inf)
    keys, values = torch.cat([row_k, k], 2), torch.cat([row_v, v], 2)
    out = _softmax_attention(q, keys, values, bias[:, None], x)
    out = out.masked_fill(~queries[:, None, :, None], 0)
    if not x.return_state:
        return out, None
    unfinished = tokens & (position // size == (total // size)[:, None])
    current = (one_hot(position % size, size) * unfinished[:, :, None]).to(wide)  # [B, S, C]
    current_k, current_v = (torch.einsum("bsc,bhsd->bhcd", current, t) for t in (k, v))
    tensors = (t.to(x.k.dtype) for t in (row_k, row_v, current_k, current_v))
    row_k, row_v, current_k, current_v = tensors
    return out, BlockState(row_k, row_v, filled, current_k, current_v, total % size)


def _block_weights(x: LinformerCall, wide: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Return the weights of keys and values, ``[Hkv, C, R]``, and the bias of rows, ``[R]``."""
    weights = [rows.to(wide).expand(x.k.shape[1], -1, -1) for rows in (x.key_rows, x.value_rows)]
    size, rows = x.key_rows.shape[1:]
    if not x.pooling:
        return weights, weights[0].new_zeros(rows)
    rows = min(size, rows)
    members = one_hot(torch.arange(size, device=x.k.device) * rows // size, rows)
    counts = members.sum(0).to(wide)
    return [w[..., :rows] + members / counts for w in weights], counts.log()


def _padding_mask(padding_mask: Tensor | None, k: Tensor) -> Tensor:
    """Return the padding mask, ``[B, S]`` bool, true for all tokens if there is none."""
    if padding_mask is None:
        return torch.ones(k.shape[0], k.shape[2], dtype=torch.bool, device=k.device)
    return padding_mask.bool()


def _keys_and_values(x: LinformerCall, dtype: torch.dtype) -> list[Tensor]:
    """Return keys and values with zeros at padding."""
    return [fill_padding(t.to(dtype), x.padding_mask) for t in (x.k, x.v)]


def _softmax_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, x: LinformerCall) -> Tensor:
    """Return softmax attention with a bias, ``[B, H, T, E]``."""
    k, v = (repeat(t, "b h s d -> b (h g) s d", g=q.shape[1] // t.shape[1]) for t in (k, v))
    weights = (torch.einsum("bhtd,bhsd->bhts", q, k) * x.scale + bias).softmax(-1)
    return torch.dropout(weights, x.dropout, train=x.dropout > 0) @ v
