"""Decoding with sliding-window attention: the last keys that a window reaches, and the global ones.

The state has a fixed size from the first token on: the R latest keys, R being the farthest reach of
a head, and the first P keys of the sequence, P - 1 being the last global position. So a step costs
O(P + R), however long the sequence has become.
Letters: B batch, H query heads, Hkv key heads, T new tokens, S keys, D key size, E value size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnzoo.masks import AttentionMask
from attnzoo.ops.flash import flash_attention
from attnzoo.ops.longformer_pattern import Pattern, take

PIECE = 256  # new tokens at a time: a step is dense among them


class LongformerState(NamedTuple):
    """What a layer keeps; zeros where fewer tokens were seen than there is room for."""

    k: Tensor  # [B, Hkv, R, D]: the latest keys, the newest last
    v: Tensor  # [B, Hkv, R, E]
    first_k: Tensor  # [B, Hkv, P, D]: the keys of the first tokens, global ones among them
    first_v: Tensor  # [B, Hkv, P, E]
    own_k: Tensor  # [B, Hkv, P or 0, D]: the same as global tokens see them, if in another way
    own_v: Tensor  # [B, Hkv, P or 0, E]
    seen: Tensor  # [B], int64: real tokens so far


class Step(NamedTuple):
    """New tokens and how they attend."""

    q: Tensor  # [B, H, T, D]
    k: Tensor  # [B, Hkv, T, D]
    v: Tensor  # [B, Hkv, T, E]
    own: tuple[Tensor, Tensor, Tensor] | None  # q, k and v for the rows of global tokens
    real: Tensor | None  # [B, T] bool: false at padding
    pattern: Pattern
    scale: float
    positions: tuple[int, ...]  # of the global tokens, counted from the first real one; rising

    @property
    def prefix(self) -> int:
        """P: how many of the first tokens are kept."""
        return self.positions[-1] + 1 if self.positions else 0


def global_at(rank: Tensor, positions: tuple[int, ...]) -> Tensor:
    """Say which ranks among the real tokens are those of global ones; same shape, bool."""
    if positions == tuple(range(len(positions))):
        return (rank >= 0) & (rank < len(positions))
    return torch.isin(rank, torch.tensor(positions, device=rank.device))


def state_after(x: Step, state: LongformerState | None) -> LongformerState:
    """Return the state after the new tokens; what was passed in stays as it is."""
    if state is None:
        state = _empty(x)
    real, length, room = _real(x), x.k.shape[2], state.k.shape[2]
    held = torch.arange(room, device=x.k.device) >= room - state.seen[:, None]
    if x.real is None:
        new, old = max(length - room, 0), min(length, room)
        k = torch.cat([state.k[:, :, old:], x.k[:, :, new:]], 2)
        v = torch.cat([state.v[:, :, old:], x.v[:, :, new:]], 2)
    else:  # real ones behind, in their order
        latest = torch.cat([held, real], 1).int().argsort(dim=1, stable=True)[:, length:]
        k = take(torch.cat([state.k, x.k], 2), latest)
        v = take(torch.cat([state.v, x.v], 2), latest)
    seen = state.seen + real.sum(1)
    if not x.prefix:
        return state._replace(k=k, v=v, seen=seen)
    # of the new tokens, the one that each of the first P places waits for
    wanted = torch.arange(x.prefix, device=x.k.device) - state.seen[:, None]
    arrived = (wanted >= 0) & (wanted < real.sum(1, keepdim=True))
    order = real.int().argsort(dim=1, descending=True, stable=True)
    source = order.gather(1, wanted.clamp(0, length - 1))

    def filled(old: Tensor, new: Tensor) -> Tensor:
        return torch.where(arrived[:, None, :, None], take(new, source), old)

    first_k, first_v = filled(state.first_k, x.k), filled(state.first_v, x.v)
    own_k, own_v = state.own_k, state.own_v
    if x.own is not None:
        own_k, own_v = filled(own_k, x.own[1]), filled(own_v, x.own[2])
    return LongformerState(k, v, first_k, first_v, own_k, own_v, seen)


def attend_from(x: Step, state: LongformerState) -> tuple[Tensor, LongformerState]:
    """Attend to what the state holds and to the new tokens, a piece of them at a time.

    Returns:
        ``[B, H, T, E]`` in the dtype of the values, and the state after the new tokens.
    """
    outs = []
    for start in range(0, x.q.shape[2], PIECE):
        at = slice(start, start + PIECE)
        piece = x._replace(
            q=x.q[:, :, at],
            k=x.k[:, :, at],
            v=x.v[:, :, at],
            own=x.own and (x.own[0][:, :, at], x.own[1][:, :, at], x.own[2][:, :, at]),
            real=None if x.real is None else x.real[:, at],
        )
        outs.append(_dense_step(piece, state))
        state = state_after(piece, state)
    return outs[0] if len(outs) == 1 else torch.cat(outs, 2), state


def _empty(x: Step) -> LongformerState:
    """Return the state before the first token."""
    batch, heads, _, size = x.k.shape
    width = x.v.shape[3]
    own = 0 if x.own is None else x.prefix

    def room(length: int, size: int) -> Tensor:
        return x.k.new_zeros(batch, heads, length, size)

    return LongformerState(
        k=room(x.pattern.reach, size),
        v=room(x.pattern.reach, width),
        first_k=room(x.prefix, size),
        first_v=room(x.prefix, width),
        own_k=room(own, size),
        own_v=room(own, width),
        seen=torch.zeros(batch, dtype=torch.long, device=x.k.device),
    )


def _real(x: Step) -> Tensor:
    """Return which new tokens are real, ``[B, T]`` bool."""
    batch, _, length, _ = x.k.shape
    if x.real is not None:
        return x.real.expand(batch, length)
    return torch.ones(batch, length, dtype=torch.bool, device=x.k.device)


def _dense_step(x: Step, state: LongformerState) -> Tensor:
    """Attend to the first keys, the latest and the new ones, each under its rank."""
    real, seen, device = _real(x), state.seen[:, None], x.k.device
    prefix, room = state.first_k.shape[2], state.k.shape[2]
    new = seen + real.cumsum(1) - 1
    late = seen - room + torch.arange(room, device=device)
    ranks, exists = torch.cat([late, new], 1), torch.cat([late >= 0, real], 1)
    if prefix:
        early = torch.arange(prefix, device=device).expand(len(seen), -1)
        ranks, exists = torch.cat([early, ranks], 1), torch.cat([early < seen, exists], 1)
    distance = (new[:, :, None] - ranks[:, None, :])[:, None]  # [B, 1, T, P + R + T]
    may = exists[:, None, None, :]
    if x.real is not None:
        may = may & real[:, None, :, None]
    near = x.pattern.within(distance)
    if not prefix:
        keys, values = torch.cat([state.k, x.k], 2), torch.cat([state.v, x.v], 2)
        return _attend(x.q, keys, values, may & near, x.scale)
    # a global key is seen among the first ones or the new, any other among the latest or the new
    is_global = global_at(ranks, x.positions)
    place = torch.arange(prefix + room + x.k.shape[2], device=device)
    in_first, in_latest = place < prefix, (place >= prefix) & (place < prefix + room)
    as_global = (is_global & ~in_latest)[:, None, None, :] & (distance >= 0)
    as_local = (~is_global & ~in_first)[:, None, None, :] & near
    mask = may & (as_global | as_local)
    row_global = global_at(new, x.positions)[:, None, :, None]
    everything = may & (distance >= 0) & ~in_latest  # before it, all are among the first P
    keys = torch.cat([state.first_k, state.k, x.k], 2)
    values = torch.cat([state.first_v, state.v, x.v], 2)
    if x.own is None:
        return _attend(x.q, keys, values, torch.where(row_global, everything, mask), x.scale)
    out = _attend(x.q, keys, values, mask, x.scale)
    if not torch.compiler.is_compiling() and not bool(row_global.any()):
        return out
    everything = torch.cat([everything[..., :prefix], everything[..., prefix + room :]], 3)
    keys = torch.cat([state.own_k, x.own[1]], 2)
    values = torch.cat([state.own_v, x.own[2]], 2)
    return torch.where(row_global, _attend(x.own[0], keys, values, everything, x.scale), out)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attend under a mask; a row that sees nothing gives zeros."""
    sees = AttentionMask(function=lambda: mask)
    return flash_attention(q, k, v, mask=sees, scale=scale, impl="sdpa")
