"""Causal Linformer, block by block: the rows of finished blocks, and the tokens of the current one.

Other letters: T new tokens, C tokens per block, R rows per block, N blocks of the state, M blocks
that the call projects, P positions: tokens counted from the start of the block that is unfinished
when the call begins.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from attnzoo.contract.padding import gather_tokens
from attnzoo.ops.linformer.common import BlockState, LinformerCall
from attnzoo.ops.linformer.rows import (
    attend_to_rows,
    compute_dtype,
    pool_matrix,
    row_counts,
)
from attnzoo.runtime.kernel_calls import is_transformed


class _Layout(NamedTuple):
    """Positions of the new tokens, which start with a block."""

    positions: Tensor | None  # [B, T], position of each token; None if token t has position t
    length: int  # P, a multiple of C
    total: Tensor | None  # [B], tokens in these positions, with those of earlier calls


class _Sizes(NamedTuple):
    """Sizes that divide the keys into blocks."""

    past: int  # N
    rows: int  # R
    block: int  # C


class _Keys(NamedTuple):
    """Keys and values of these positions, and the rows of finished blocks."""

    k: Tensor  # [B, Hkv, P, D]
    v: Tensor  # [B, Hkv, P, E]
    row_k: Tensor  # [B, Hkv, (N + M) * R, D]: N blocks of the state, then the first M of the call
    row_v: Tensor  # [B, Hkv, (N + M) * R, E]
    bias: Tensor  # [1 or B, (N + M) * R], added to scores; minus infinity for unfinished blocks
    sizes: _Sizes


def run_block_torch(x: LinformerCall) -> tuple[Tensor, BlockState | None]:
    """Return the output, ``[B, H, T, E]``, and the state if requested."""
    state, padding_mask, stored = x.state, x.padding_mask, x.k.dtype
    length, size = x.q.shape[2], x.key_rows.shape[1]
    dtype = stored if length == 1 else compute_dtype(x.k)  # one token does not convert the state
    q, k, v = (t.to(dtype) for t in (x.q, x.k, x.v))
    layout = _layout(padding_mask, state, q, size)
    k_at = _scatter(k, layout, None if state is None else state.k)
    v_at = _scatter(v, layout, None if state is None else state.v)
    finished = layout.length // size - 1  # blocks of these positions that some query attends to
    if x.return_state:
        done = length // size if layout.total is None else int(layout.total.max()) // size
        finished = max(finished, done)
    keys = _project_blocks(k_at, v_at, x, finished)
    options = {"scale": x.scale, "dropout": x.dropout}
    if layout.length <= 2 * size:
        out = _attend_dense(q, layout, keys, options)
    else:
        out = _gather(_attend_blockwise(_scatter(q, layout, None), keys, options), layout, length)
    if padding_mask is not None:
        out = out.masked_fill(~padding_mask[:, None, :, None], 0)
    if not x.return_state:
        return out, None
    filled = k.new_zeros(k.shape[0], 0, dtype=torch.bool) if state is None else state.filled
    after = _new_state(layout, keys, filled, done, length)
    return out, BlockState(*(t.to(stored) if t.is_floating_point() else t for t in after))


def _layout(padding_mask: Tensor | None, state: BlockState | None, q: Tensor, size: int) -> _Layout:
    """Return the position of every new token; padding gets position P, which is dropped."""
    batch, _, length, _ = q.shape
    if padding_mask is None and state is None:
        return _Layout(None, -(-length // size) * size, None)
    if padding_mask is None:
        padding_mask = torch.ones(batch, length, dtype=torch.bool, device=q.device)
    index = padding_mask.cumsum(1) - 1
    used = 0
    if state is not None:
        index = index + state.used[:, None]
        used = size - 1  # at most so many tokens are in the block already
    positions = -(-(used + length) // size) * size
    return _Layout(torch.where(padding_mask, index, positions), positions, index[:, -1] + 1)


def _scatter(x: Tensor, layout: _Layout, current: Tensor | None) -> Tensor:
    """Move new tokens ``[B, H, T, X]`` to their positions, after those of the ``current`` block."""
    if layout.positions is None:
        return pad(x, (0, 0, 0, layout.length - x.shape[2]))
    out = x.new_zeros(*x.shape[:2], layout.length + 1, x.shape[3])  # the last gets the padding
    if current is not None:
        out[:, :, : current.shape[2]] = current
    index = layout.positions[:, None, :, None].expand(*x.shape)
    return out.scatter(2, index, x)[:, :, :-1]


def _gather(x: Tensor, layout: _Layout, length: int) -> Tensor:
    """Move outputs from their positions back to the tokens."""
    if layout.positions is None:
        return x[:, :, :length]
    index = layout.positions.clamp(max=layout.length - 1)
    return gather_tokens(x, index)


def _project_blocks(k: Tensor, v: Tensor, x: LinformerCall, finished: int) -> _Keys:
    """Project the first ``finished`` blocks of keys and values, after the rows of the state."""
    key_rows, value_rows, state = x.key_rows, x.value_rows, x.state
    size, dtype = key_rows.shape[1], k.dtype
    wide = torch.promote_types(dtype, torch.float32)
    log_count = torch.zeros(1, key_rows.shape[2], dtype=wide, device=k.device)  # tokens per row
    if x.pooling:
        counts = row_counts(None, size, key_rows.shape[2], k.device)
        means = pool_matrix(counts, size, wide)[0]
        key_rows, value_rows = (r[..., : means.shape[2]] + means for r in (key_rows, value_rows))
        log_count = counts.to(wide).log()

    def project(x: Tensor, weights: Tensor) -> Tensor:  # [B, Hkv, P, X] -> [B, Hkv, M * R, X]
        blocks = x[:, :, : finished * size].unflatten(2, (finished, size))
        projected: Tensor = weights.to(dtype).mT.unsqueeze(1) @ blocks
        return projected.flatten(2, 3)

    row_k, row_v = project(k, key_rows), project(v, value_rows)
    past, rows, bias = 0, log_count.shape[1], log_count.repeat(1, finished)
    if state is not None:
        past = state.filled.shape[1]
        earlier = torch.where(state.filled.unsqueeze(2), log_count, -torch.inf).flatten(1)
        bias = torch.cat([earlier, bias.expand(earlier.shape[0], -1)], 1)
        row_k, row_v = (
            torch.cat([old.to(dtype), new], 2) if finished else old.to(dtype)
            for old, new in ((state.row_k, row_k), (state.row_v, row_v))
        )
    return _Keys(k, v, row_k, row_v, bias, _Sizes(past, rows, size))


def _attend_dense(q: Tensor, layout: _Layout, keys: _Keys, options: dict[str, Any]) -> Tensor:
    """Attend with one dense mask: for few tokens, such as a decoding step."""
    (past, rows, size), index = keys.sizes, layout.positions
    if index is None:
        index = torch.arange(q.shape[2], device=q.device)[None]
    index = (index % layout.length).unsqueeze(2)  # [1 or B, T, 1]; padding attends to position 0
    block = torch.arange(keys.bias.shape[1], device=q.device) // rows - past
    finished = torch.where(block < index // size, keys.bias.unsqueeze(1), -torch.inf)
    position = torch.arange(layout.length, device=q.device)
    own = (position // size == index // size) & (position <= index)
    tokens = torch.zeros_like(own, dtype=finished.dtype).masked_fill(~own, -torch.inf)
    batch = max(finished.shape[0], tokens.shape[0])
    bias = torch.cat([x.expand(batch, -1, -1) for x in (finished, tokens)], 2)
    k, v = torch.cat([keys.row_k, keys.k], 2), torch.cat([keys.row_v, keys.v], 2)
    return attend_to_rows(q, k, v, bias.unsqueeze(1), **options)


def _attend_blockwise(q: Tensor, keys: _Keys, options: dict[str, Any]) -> Tensor:
    """Attend block after block, without masked rows: for long sequences.

    The backward pass recomputes each block: autograd would save the rows that each attends to,
    which grow with the square of T.
    """
    past, rows, size = keys.sizes
    attend: Callable[..., Tensor] = partial(_attend_block, bias=keys.bias, options=options)
    tensors = q, keys.k, keys.v, keys.row_k, keys.row_v
    keep_graph = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if keep_graph and not (is_transformed() or torch.compiler.is_compiling()):
        attend = partial(
            checkpoint, attend, use_reentrant=False, preserve_rng_state=options["dropout"] > 0
        )
    wide = torch.promote_types(q.dtype, torch.float32)  # gradients of rows sum over later blocks
    row_k, row_v = keys.row_k.to(wide), keys.row_v.to(wide)
    outs = []
    for i, own in enumerate(zip(*(x.split(size, 2) for x in tensors[:3]), strict=True)):
        before = (past + i) * rows
        outs.append(attend(*own, row_k[:, :, :before], row_v[:, :, :before]))
    return torch.cat(outs, 2)


def _attend_block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    row_k: Tensor,
    row_v: Tensor,
    bias: Tensor,
    options: dict[str, Any],
) -> Tensor:
    """Attend with the queries of one block to its tokens and the rows before it."""
    size = q.shape[2]
    later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu_(1)
    own = torch.zeros(later.shape, dtype=bias.dtype, device=q.device)
    own.masked_fill_(later, -torch.inf)
    rows = bias[:, None, : row_k.shape[2]].expand(-1, size, -1)
    bias = torch.cat([rows, own.expand(rows.shape[0], -1, -1)], 2)
    k, v = torch.cat([row_k.to(k.dtype), k], 2), torch.cat([row_v.to(v.dtype), v], 2)
    return attend_to_rows(q, k, v, bias.unsqueeze(1), **options)


def _new_state(layout: _Layout, keys: _Keys, filled: Tensor, done: int, length: int) -> BlockState:
    """Return the state: the rows of ``done`` more blocks, and the unfinished block."""
    (batch, device), total = (filled.shape[0], filled.device), layout.total
    _, rows, size = keys.sizes
    if total is None:
        total = torch.full((batch,), length, device=device)
    finished = total // size
    position = finished[:, None] * size + torch.arange(size, device=device)
    index = position.clamp(max=layout.length - 1)
    exists = (position < total[:, None])[:, None, :, None]
    k, v = (gather_tokens(x, index) * exists for x in (keys.k, keys.v))
    kept = (filled.shape[1] + done) * rows
    filled = torch.cat([filled, torch.arange(done, device=device) < finished[:, None]], 1)
    row_k, row_v = keys.row_k[:, :, :kept], keys.row_v[:, :, :kept]
    return BlockState(row_k, row_v, filled, k, v, total - finished * size)
