r"""Linformer for decoders: finished blocks are projected to R rows each, the current one is exact.

A query in block i sees the rows of the blocks before it and the tokens of its own block up to
itself, in one softmax. No row mixes a later token into what an earlier one sees. With pooling, a
row weighs as many tokens as it pools, and R >= C is softmax attention itself.
Time O(T C D + T^2 D R / C): quadratic still, but C / R times less; the state grows by R rows per
block. After Wang et al., 2020, arXiv:2006.04768, which is not causal; the blocks are ours.

Letters: B batch, H query heads, Hkv key heads, T new tokens, D key size, E value size,
C tokens per block, R rows per block, N finished blocks, P places: tokens counted from the start of
the block that is unfinished when the call begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from attnzoo.ops.linformer import attend_to_rows, pool_matrix, row_counts
from attnzoo.state import AttentionOutput


class BlockState(NamedTuple):
    """What a block-causal layer keeps: rows of finished blocks, and the keys of the current one."""

    row_k: Tensor  # [B, Hkv, N * R, D]
    row_v: Tensor  # [B, Hkv, N * R, E]
    filled: Tensor  # [B, N], bool: rows of a batch finish their blocks at different times
    k: Tensor  # [B, Hkv, C, D]: the current block, zeros behind its last token
    v: Tensor  # [B, Hkv, C, E]
    used: Tensor  # [B], tokens in the current block, below C


class _Layout(NamedTuple):
    """Where the new tokens stand among the places of a call, which begin with a block."""

    place: Tensor | None  # [B, T]; None when tokens and places are the same
    span: int  # P, a multiple of C
    total: Tensor | None  # [B], tokens in these places, also those of earlier calls


class _Sizes(NamedTuple):
    """What cuts the keys into blocks."""

    past: int  # N, blocks of the state
    rows: int  # R
    block: int  # C


class _Keys(NamedTuple):
    """What queries may see: rows of finished blocks, those of the state first, and the tokens."""

    k: Tensor  # [B, Hkv, P, D]
    v: Tensor  # [B, Hkv, P, E]
    row_k: Tensor  # [B, Hkv, (N + M) * R, D]: N blocks of the state, the first M of these places
    row_v: Tensor  # [B, Hkv, (N + M) * R, E]
    bias: Tensor  # [1 or B, (N + M) * R], added to scores; minus infinity where no block is
    sizes: _Sizes


def linformer_block_attention(
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
    state: BlockState | None = None,
    return_state: bool = False,
    impl: str = "torch",
) -> AttentionOutput:
    """Attend causally, block by block.

    Args:
        q: Queries, ``[B, H, T, D]``.
        k: Keys of the same tokens, ``[B, Hkv, T, D]``, zeros where ``real`` is false.
        v: Values, ``[B, Hkv, T, E]``, likewise.
        key_rows: E, ``[1 or Hkv, C, R]``, the same for every block.
        value_rows: F, ``[1 or Hkv, C, R]``.
        scale: Multiplies the products.
        real: ``[B, T]``, false at padding, which takes no place in a block.
        pooling: Whether E and F are added to the means over neighbourhoods.
        dropout: Probability with which a weight is dropped.
        state: What an earlier call returned.
        return_state: Whether to return the state after the last token.
        impl: ``"torch"`` (fused, block by block) or ``"reference"`` (dense, float32 or wider).

    Returns:
        ``out`` as ``[B, H, T, E]`` in the dtype of ``v``, zeros at padding; and the state.
    """
    length, size = q.shape[2], key_rows.shape[1]
    real = None if real is None else real.expand(q.shape[0], -1)
    layout = _lay_out(real, state, q, size)
    wide = torch.promote_types(k.dtype, torch.float32) if impl == "reference" else k.dtype
    at_k = _put(k, layout, None if state is None else state.k).to(wide)
    at_v = _put(v, layout, None if state is None else state.v).to(wide)
    finished = layout.span // size - 1  # blocks in these places that some query can look back on
    if return_state:
        done = length // size if layout.total is None else int(layout.total.max()) // size
        finished = max(finished, done)
    keys = _gather_keys(at_k, at_v, key_rows, value_rows, finished, pooling, state)
    options = {"scale": scale, "dropout": dropout, "impl": impl}
    if impl == "reference" or layout.span <= 2 * size:
        out = _attend_at_once(q, layout, keys, options)
    else:
        out = _attend_by_block(_put(q, layout, None), keys, options)
        out = _take(out, layout, length)
    if real is not None:
        out = out.masked_fill(~real[:, None, :, None], 0)
    after = None
    if return_state:
        past = k.new_zeros(k.shape[0], 0, dtype=torch.bool) if state is None else state.filled
        after = _state_after(layout, keys, past, done, length)
        after = BlockState(*(x.to(k.dtype) if x.is_floating_point() else x for x in after))
    return AttentionOutput(out.to(v.dtype), after)


def _lay_out(real: Tensor | None, state: BlockState | None, q: Tensor, size: int) -> _Layout:
    """Give every new token its place; padding, which has none, gets the first."""
    batch, _, length, _ = q.shape
    if real is None and state is None:
        return _Layout(None, -(-length // size) * size, None)
    if real is None:
        real = torch.ones(batch, length, dtype=torch.bool, device=q.device)
    rank = real.cumsum(1) - 1
    first = 0
    if state is not None:
        rank = rank + state.used[:, None]
        first = size - 1  # at most so many tokens are in the block already
    span = -(-(first + length) // size) * size
    return _Layout(torch.where(real, rank, span), span, rank[:, -1] + 1)


def _put(x: Tensor, layout: _Layout, begun: Tensor | None) -> Tensor:
    """Bring new tokens ``[B, H, T, X]`` to their places behind those of the ``begun`` block."""
    if layout.place is None:
        return pad(x, (0, 0, 0, layout.span - x.shape[2]))
    room = x.new_zeros(*x.shape[:2], layout.span + 1, x.shape[3])  # the last takes the padding
    if begun is not None:
        room[:, :, : begun.shape[2]] = begun
    index = layout.place[:, None, :, None].expand(*x.shape)
    return room.scatter(2, index, x)[:, :, :-1]


def _take(x: Tensor, layout: _Layout, length: int) -> Tensor:
    """Bring results from their places back to the tokens."""
    if layout.place is None:
        return x[:, :, :length]
    place = layout.place.clamp(max=layout.span - 1)
    return x.gather(2, place[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


def _gather_keys(
    at_k: Tensor,
    at_v: Tensor,
    key_rows: Tensor,
    value_rows: Tensor,
    finished: int,
    pooling: bool,
    state: BlockState | None,
) -> _Keys:
    """Project the first ``finished`` blocks, and put them beside those of the state."""
    size, wide = key_rows.shape[1], at_k.dtype
    weight = torch.zeros(1, key_rows.shape[2], device=at_k.device)  # of a row, as a logarithm
    if pooling:
        counts = row_counts(None, size, key_rows.shape[2], at_k.device)
        share = pool_matrix(counts, size, torch.promote_types(wide, torch.float32))[0]
        key_rows, value_rows = (x[..., : share.shape[2]] + share for x in (key_rows, value_rows))
        weight = counts.to(share.dtype).log()

    def project(x: Tensor, weights: Tensor) -> Tensor:  # [B, Hkv, P, X] -> [B, Hkv, M * R, X]
        blocks = x[:, :, : finished * size].unflatten(2, (finished, size))
        projected: Tensor = weights.to(wide).mT.unsqueeze(1) @ blocks
        return projected.flatten(2, 3)

    row_k, row_v = project(at_k, key_rows), project(at_v, value_rows)
    past, rows, bias = 0, weight.shape[1], weight.repeat(1, finished)
    if state is not None:
        past = state.filled.shape[1]
        seen = torch.where(state.filled.unsqueeze(2), weight, -torch.inf).flatten(1)
        bias = torch.cat([seen, bias.expand(seen.shape[0], -1)], 1)
        row_k, row_v = (
            torch.cat([old.to(wide), new], 2) if finished else old.to(wide)
            for old, new in ((state.row_k, row_k), (state.row_v, row_v))
        )
    return _Keys(at_k, at_v, row_k, row_v, bias, _Sizes(past, rows, size))


def _attend_at_once(q: Tensor, layout: _Layout, keys: _Keys, options: dict[str, Any]) -> Tensor:
    """Attend with a dense mask: for few tokens, such as one, and to compare with."""
    (past, rows, size), place = keys.sizes, layout.place
    if place is None:
        place = torch.arange(q.shape[2], device=q.device)[None]
    place = (place % layout.span).unsqueeze(2)  # [1 or B, T, 1]; padding looks at the first token
    block = torch.arange(keys.bias.shape[1], device=q.device) // rows - past
    finished = torch.where(block < place // size, keys.bias.unsqueeze(1), -torch.inf)
    there = torch.arange(layout.span, device=q.device)
    own = (there // size == place // size) & (there <= place)
    tokens = torch.zeros_like(own, dtype=finished.dtype).masked_fill(~own, -torch.inf)
    batch = max(finished.shape[0], tokens.shape[0])
    bias = torch.cat([x.expand(batch, -1, -1) for x in (finished, tokens)], 2)
    k, v = torch.cat([keys.row_k, keys.k], 2), torch.cat([keys.row_v, keys.v], 2)
    return attend_to_rows(q, k, v, bias.unsqueeze(1), **options)


def _attend_by_block(q: Tensor, keys: _Keys, options: dict[str, Any]) -> Tensor:
    """Attend block after block, each to exactly what its queries may see; for long sequences."""
    tensors = q, keys.k, keys.v, keys.row_k, keys.row_v
    if not (options["dropout"] or torch.compiler.is_compiling()):
        out: Tensor = _Blocks.apply(*tensors, keys.bias, keys.sizes, options)  # type: ignore[no-untyped-call]
        return out
    blocks = range(q.shape[2] // keys.sizes.block)
    outs = [_attend(_cut(i, tensors, keys.sizes), keys.bias, options) for i in blocks]
    return torch.cat(outs, 2)


def _cut(i: int, tensors: Sequence[Tensor], sizes: _Sizes) -> list[Tensor]:
    """Take what block ``i`` of these places uses of queries, keys, values, and rows of both."""
    now = slice(i * sizes.block, (i + 1) * sizes.block)
    before = slice((sizes.past + i) * sizes.rows)
    return [x[:, :, now if n < 3 else before] for n, x in enumerate(tensors)]


def _attend(parts: Sequence[Tensor], bias: Tensor, options: dict[str, Any]) -> Tensor:
    """Attend to what :func:`_cut` took."""
    q, k, v, row_k, row_v = parts
    size = q.shape[2]
    later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu_(1)
    own = torch.zeros(later.shape, device=q.device).masked_fill_(later, -torch.inf)
    rows = bias[:, None, : row_k.shape[2]].expand(-1, size, -1)
    bias = torch.cat([rows, own.expand(rows.shape[0], -1, -1)], 2)
    k, v = torch.cat([row_k, k], 2), torch.cat([row_v, v], 2)
    return attend_to_rows(q, k, v, bias.unsqueeze(1), **options)


class _Blocks(torch.autograd.Function):
    """The walk over blocks, which keeps only its inputs and makes each block again on the way back.

    What autograd would keep, the rows that every block has seen, grows with the square of T.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        row_k: Tensor,
        row_v: Tensor,
        bias: Tensor,
        sizes: _Sizes,
        options: dict[str, Any],
    ) -> Tensor:
        tensors = q, k, v, row_k, row_v
        ctx.save_for_backward(*tensors, bias)
        ctx.sizes, ctx.options = sizes, options
        out = v.new_empty(*q.shape[:3], v.shape[3])
        for i in range(q.shape[2] // sizes.block):
            (room,) = _cut(i, [out], sizes)
            room.copy_(_attend(_cut(i, tensors, sizes), bias, options))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, bias = ctx.saved_tensors
        wide = torch.promote_types(grad.dtype, torch.float32)  # rows gather from all later blocks
        sums = [torch.zeros_like(x, dtype=wide) for x in tensors]
        for i in range(grad.shape[2] // ctx.sizes.block):
            leaves = [x.detach().requires_grad_() for x in _cut(i, tensors, ctx.sizes)]
            with torch.enable_grad():
                out = _attend(leaves, bias, ctx.options)
            (d_out,) = _cut(i, [grad], ctx.sizes)
            found = torch.autograd.grad(out, leaves, d_out)
            for room, part in zip(_cut(i, sums, ctx.sizes), found, strict=True):
                room.add_(part)
        return *(x.to(grad.dtype) for x in sums), None, None, None


def _state_after(layout: _Layout, keys: _Keys, past: Tensor, done: int, length: int) -> BlockState:
    """Keep the rows of ``done`` more blocks, and of each sequence the unfinished block."""
    (batch, device), total = (past.shape[0], past.device), layout.total
    _, rows, size = keys.sizes
    if total is None:
        total = torch.full((batch,), length, device=device)
    finished = total // size
    place = finished[:, None] * size + torch.arange(size, device=device)
    index = place.clamp(max=layout.span - 1)[:, None, :, None]
    there = (place < total[:, None])[:, None, :, None]
    k, v = (
        x.gather(2, index.expand(-1, x.shape[1], -1, x.shape[3])) * there for x in (keys.k, keys.v)
    )
    kept = (past.shape[1] + done) * rows
    filled = torch.cat([past, torch.arange(done, device=device) < finished[:, None]], 1)
    row_k, row_v = keys.row_k[:, :, :kept], keys.row_v[:, :, :kept]
    return BlockState(row_k, row_v, filled, k, v, total - finished * size)
