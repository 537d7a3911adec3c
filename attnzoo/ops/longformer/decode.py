"""Decoding with sliding-window attention: a rolling cache of the window, and the first keys.

The state has a fixed size from the first token on, or, in a wide pattern, grows to it: the R latest
keys, R being the largest distance to a key over all heads, and the first P keys of the sequence,
the last of which is the last global position. A step costs O(P + R), independent of the sequence
length. Other letters: T new tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.contract.padding import gather_tokens
from attnzoo.contract.states import rows_of_state
from attnzoo.ops.softmax.sdpa import sdpa
from attnzoo.ops.window.pattern import Pattern

STEP_TOKENS = 256  # new tokens that are computed at a time, densely


class LongformerState(NamedTuple):
    """The state of a layer; zeros where the sequence has had too few tokens to fill it."""

    k: Tensor  # [B, Hkv, R, D]: the latest keys, the newest last
    v: Tensor  # [B, Hkv, R, E]
    first_k: Tensor  # [B, Hkv, P, D]: the keys of the first tokens, which include the global ones
    first_v: Tensor  # [B, Hkv, P, E]
    own_k: Tensor  # [B, Hkv, P or 0, D]: the first keys in the global projection, if there is one
    own_v: Tensor  # [B, Hkv, P or 0, E]
    seen: Tensor  # [B], int64: number of real tokens so far
    age: Tensor  # [B, R], int64: tokens since each of the latest keys; [B, 0] without model_window


class DecodingInputs(NamedTuple):
    """New tokens, and the pattern in which they attend."""

    q: Tensor  # [B, H, T, D]
    k: Tensor  # [B, Hkv, T, D]
    v: Tensor  # [B, Hkv, T, E]
    global_qkv: tuple[Tensor, Tensor, Tensor] | None  # for the rows of global tokens
    padding_mask: Tensor | None  # [B, T] bool: false at padding
    pattern: Pattern
    scale: float
    global_positions: tuple[int, ...]  # counted from the first real token; rising
    model_window: int | None = None  # largest distance to a key in tokens, padding included

    @property
    def num_first(self) -> int:
        """P, the number of first tokens in the state."""
        return self.global_positions[-1] + 1 if self.global_positions else 0


def is_global_rank(rank: Tensor, global_positions: tuple[int, ...]) -> Tensor:
    """Return which ranks among the real tokens are global positions; same shape, bool."""
    if global_positions == tuple(range(len(global_positions))):
        return (rank >= 0) & (rank < len(global_positions))
    return torch.isin(rank, torch.tensor(global_positions, device=rank.device))


def update_state(x: DecodingInputs, state: LongformerState | None) -> LongformerState:
    """Return the state after the new tokens; the given state is not modified."""
    if state is None:
        state = _empty_state(x)
    real, length, held = _real_tokens(x), x.k.shape[2], state.k.shape[2]
    size = rows_of_state(x.pattern.tokens_before, held, state.seen, length)
    if size > held:
        k, v = (F.pad(y, (0, 0, size - held, 0)) for y in (state.k, state.v))
        age = state.age if x.model_window is None else F.pad(state.age, (size - held, 0))
        state = state._replace(k=k, v=v, age=age)
    ages = _ages(x, state)
    if x.padding_mask is None:
        new, old = max(length - size, 0), min(length, size)
        k = torch.cat([state.k[:, :, old:], x.k[:, :, new:]], 2)
        v = torch.cat([state.v[:, :, old:], x.v[:, :, new:]], 2)
        ages = ages[:, ages.shape[1] - min(size, ages.shape[1]) :].clone()
    else:  # real tokens last, in order
        filled = torch.arange(size, device=x.k.device) >= size - state.seen[:, None]
        latest = torch.cat([filled, real], 1).int().argsort(dim=1, stable=True)[:, length:]
        k = gather_tokens(torch.cat([state.k, x.k], 2), latest)
        v = gather_tokens(torch.cat([state.v, x.v], 2), latest)
        ages = ages if x.model_window is None else ages.gather(1, latest)
    seen = state.seen + real.sum(1)
    if not x.num_first:
        return state._replace(k=k, v=v, seen=seen, age=ages)
    # the new token, if any, of each of the first P positions
    rank = torch.arange(x.num_first, device=x.k.device) - state.seen[:, None]
    is_new = (rank >= 0) & (rank < real.sum(1, keepdim=True))
    order = real.int().argsort(dim=1, descending=True, stable=True)
    source = order.gather(1, rank.clamp(0, length - 1))

    def fill(old: Tensor, new: Tensor) -> Tensor:
        return torch.where(is_new[:, None, :, None], gather_tokens(new, source), old)

    first_k, first_v = fill(state.first_k, x.k), fill(state.first_v, x.v)
    own_k, own_v = state.own_k, state.own_v
    if x.global_qkv is not None:
        own_k, own_v = fill(own_k, x.global_qkv[1]), fill(own_v, x.global_qkv[2])
    return LongformerState(k, v, first_k, first_v, own_k, own_v, seen, ages)


def decode(x: DecodingInputs, state: LongformerState) -> tuple[Tensor, LongformerState]:
    """Attend to the keys of the state and to the new tokens.

    Returns:
        ``[B, H, T, E]`` in the dtype of the values, and the state after the new tokens.
    """
    outs = []
    for start in range(0, x.q.shape[2], STEP_TOKENS):
        at = slice(start, start + STEP_TOKENS)
        qkv = x.global_qkv
        step = x._replace(
            q=x.q[:, :, at],
            k=x.k[:, :, at],
            v=x.v[:, :, at],
            global_qkv=qkv and (qkv[0][:, :, at], qkv[1][:, :, at], qkv[2][:, :, at]),
            padding_mask=None if x.padding_mask is None else x.padding_mask[:, at],
        )
        outs.append(_dense_step(step, state))
        state = update_state(step, state)
    return outs[0] if len(outs) == 1 else torch.cat(outs, 2), state


def _empty_state(x: DecodingInputs) -> LongformerState:
    """Return the state before the first token."""
    batch, heads, _, key_size = x.k.shape
    value_size, latest, first = x.v.shape[3], x.pattern.tokens_before, x.num_first
    own = 0 if x.global_qkv is None else first
    latest = rows_of_state(latest, None, None, x.k.shape[2])

    def zeros(length: int, size: int) -> Tensor:
        return x.k.new_zeros(batch, heads, length, size)

    return LongformerState(
        k=zeros(latest, key_size),
        v=zeros(latest, value_size),
        first_k=zeros(first, key_size),
        first_v=zeros(first, value_size),
        own_k=zeros(own, key_size),
        own_v=zeros(own, value_size),
        seen=torch.zeros(batch, dtype=torch.long, device=x.k.device),
        age=x.k.new_zeros(batch, 0 if x.model_window is None else latest, dtype=torch.long),
    )


def _ages(x: DecodingInputs, state: LongformerState) -> Tensor:
    """Return the ages of the latest and the new keys after the new tokens, ``[B, R + T or 0]``."""
    if x.model_window is None:
        return state.age
    length = x.k.shape[2]
    new = torch.arange(length, 0, -1, device=x.k.device).expand(len(state.age), -1)
    return torch.cat([state.age + length, new], 1)


def _real_tokens(x: DecodingInputs) -> Tensor:
    """Return which new tokens are real, ``[B, T]`` bool."""
    batch, _, length, _ = x.k.shape
    if x.padding_mask is not None:
        return x.padding_mask.expand(batch, length)
    return torch.ones(batch, length, dtype=torch.bool, device=x.k.device)


def _dense_step(x: DecodingInputs, state: LongformerState) -> Tensor:
    """Attend to the first keys, the latest and the new ones, by their ranks."""
    real, seen, device = _real_tokens(x), state.seen[:, None], x.k.device
    num_first, num_latest = state.first_k.shape[2], state.k.shape[2]
    new = seen + real.cumsum(1) - 1
    latest = seen - num_latest + torch.arange(num_latest, device=device)
    ranks, exists = torch.cat([latest, new], 1), torch.cat([latest >= 0, real], 1)
    if num_first:
        first = torch.arange(num_first, device=device).expand(len(seen), -1)
        ranks, exists = torch.cat([first, ranks], 1), torch.cat([first < seen, exists], 1)
    distance = (new[:, :, None] - ranks[:, None, :])[:, None]  # [B, 1, T, P + R + T]
    allowed = exists[:, None, None, :]
    if x.padding_mask is not None:
        allowed = allowed & real[:, None, :, None]
    in_window = x.pattern.mask(distance)
    if x.model_window is not None:  # there are no first tokens beside it
        length = x.k.shape[2]
        age = _ages(x, state)[:, None, :] - torch.arange(length, 0, -1, device=device)[:, None]
        in_window = in_window & (age <= x.model_window)[:, None]
    if not num_first:
        keys, values = torch.cat([state.k, x.k], 2), torch.cat([state.v, x.v], 2)
        return sdpa(x.q, keys, values, mask=allowed & in_window, scale=x.scale)
    # A global key is seen among the first or the new keys, any other among the latest or the new.
    key_is_global = is_global_rank(ranks, x.global_positions)
    place = torch.arange(num_first + num_latest + x.k.shape[2], device=device)
    in_first = place < num_first
    in_latest = (place >= num_first) & (place < num_first + num_latest)
    as_global = (key_is_global & ~in_latest)[:, None, None, :] & (distance >= 0)
    as_local = (~key_is_global & ~in_first)[:, None, None, :] & in_window
    mask = allowed & (as_global | as_local)
    query_is_global = is_global_rank(new, x.global_positions)[:, None, :, None]
    # All keys before a global query are among the first P, or new.
    global_mask = allowed & (distance >= 0) & ~in_latest
    keys = torch.cat([state.first_k, state.k, x.k], 2)
    values = torch.cat([state.first_v, state.v, x.v], 2)
    if x.global_qkv is None:
        mask = torch.where(query_is_global, global_mask, mask)
        return sdpa(x.q, keys, values, mask=mask, scale=x.scale)
    out = sdpa(x.q, keys, values, mask=mask, scale=x.scale)
    if not torch.compiler.is_compiling() and not bool(query_is_global.any()):
        return out
    q, k, v = x.global_qkv
    global_mask = torch.cat(
        [global_mask[..., :num_first], global_mask[..., num_first + num_latest :]], 3
    )
    keys, values = torch.cat([state.own_k, k], 2), torch.cat([state.own_v, v], 2)
    global_rows = sdpa(q, keys, values, mask=global_mask, scale=x.scale)
    return torch.where(query_is_global, global_rows, out)
