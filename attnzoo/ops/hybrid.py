r"""The window hybrid: softmax inside a window, linear attention outside, one denominator.

Computes, with N the window of query i (the W latest keys, or W on each side) and F the keys beyond,

.. math:: o_i = \frac{\sum_{j \in N} e^{s\, q_i k_j} v_j + e^{f_i} \sum_{j \in F} w_{ij} v_j}
                     {\sum_{j \in N} e^{s\, q_i k_j} + e^{f_i} \sum_{j \in F} w_{ij}}, \qquad
          w_{ij} = d_{ij}\, \phi(q_i) \cdot \phi(k_j),

where f is the logarithm of what a far weight counts beside a near one, and :math:`d_{ij}` the
product of the decays at the tokens after the one at which key j left the window, up to token i. The
larger of the two sums' logarithms is subtracted, so nothing overflows.

Time O(T (W D + C F + F E)), memory O(T D) on a CPU; the state has a fixed size. Far keys enter the
state W tokens late: queries are paired with the keys that leave their window, and no key is copied.
Source: Zhang et al., 2024, arXiv:2410.10254 (LoLCATs), where :math:`e^{f_i}` is a factor of the
window's largest term.
Letters: B batch, H query heads, Hkv key heads, T queries, D key size, E value size, F features of a
key, W window.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.masks import AttentionMask
from attnzoo.ops.context_parallel import Shard, latest_before
from attnzoo.ops.linear import linear_attention
from attnzoo.ops.longformer_pattern import Band, take
from attnzoo.ops.longformer_walk import Plan, walk_attention
from attnzoo.ops.room import joined
from attnzoo.ops.window import band_softmax
from attnzoo.state import AttentionOutput, LinearState

SMALLEST = 1e-30  # a sum of far weights below this, before they are scaled, is none


class HybridState(NamedTuple):
    """The keys of the window and the sums over all that have left it; of a fixed size."""

    k: Tensor  # [B, Hkv, W, D]: the latest keys, the newest last; zeros where there were fewer
    v: Tensor  # [B, Hkv, W, E]
    features: Tensor  # [B, Hkv, W, F]: the same keys after the feature map
    kv: Tensor  # [B, Hkv, F, E + 1]: the decayed sum of k v^T and, in the last column, of k
    z: Tensor  # [B, Hkv, F]: the decayed sum of k
    seen: Tensor  # [B], int64: real tokens so far


class FarKeys(NamedTuple):
    """Queries and keys after the feature map, and what a far key's weight is multiplied by.

    ``log_weight`` is f, broadcastable to ``[B, H, T, 1]``. With ``relative`` it counts beside the
    whole window: the logarithm of the window's sum of weights is added to it. With ``mean`` far
    keys share it: their sums are divided by their number. Heads under ``alone``, ``[H]`` bool, see
    far keys only, where there are any.
    """

    q: Tensor  # [B, H, T, F], not negative
    k: Tensor  # [B, Hkv, T, F], not negative, zero at padding
    log_weight: Tensor
    log_decay: Tensor | None = None  # as in linear_attention; 0 at padding
    relative: bool = True
    mean: bool = False
    alone: Tensor | None = None


def hybrid_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    far: FarKeys,
    *,
    window: int,
    scale: float,
    causal: bool = True,
    real: Tensor | None = None,
    segment_ids: Tensor | None = None,
    state: HybridState | None = None,
    return_state: bool = False,
    impl: str = "auto",
    chunk_size: int | None = None,
    shard: Shard | None = None,
) -> AttentionOutput:
    """Attend exactly to a window, and by feature maps to what lies beyond it.

    Args:
        q: Queries, ``[B, H, T, D]``.
        k: Keys, ``[B, Hkv, T, D]``; H is a multiple of Hkv.
        v: Values, ``[B, Hkv, T, E]``.
        far: Features of queries and keys, their weight and decay.
        window: W, in real tokens: the W latest keys, the query's own included, or as many on each
            side where the future is seen.
        scale: s, which multiplies query-key products in the window.
        causal: Whether a query sees only keys up to its own position.
        real: ``[B, T]``, false at padding, whose rows come out as zeros.
        segment_ids: ``[B, T]``, integer, never falling along a row: sequences packed into one row,
            each with a window of its own; the returned state is that of the last.
        state: What an earlier causal call returned; not together with ``segment_ids``.
        return_state: Whether to return the state after the last token.
        impl: ``"reference"`` (plain operations, differentiated by autograd), ``"torch"``, or
            ``"auto"``, which takes the latter.
        chunk_size: As in :func:`attnzoo.ops.linear.linear_attention`.
        shard: The share of the rows that these tokens are, in place of ``state``; causal.

    Returns:
        ``out`` as ``[B, H, T, E]`` in the dtype of ``v``; ``state`` where it was asked for.
    """
    one_way = state is not None or return_state or far.log_decay is not None or shard is not None
    assert causal or not one_way
    assert state is None or segment_ids is None
    if shard is not None:
        state = _window_before(k, v, far.k, window, shard)
    order, ids = None, segment_ids
    if real is not None:  # real tokens first, in their order: the W latest keys are neighbours
        order = real.int().argsort(dim=1, descending=True, stable=True)
        q, k, v = (take(x, order) for x in (q, k, v))
        far, real = _reordered(far, order), real.gather(1, order)
        if ids is not None:
            ids = ids.gather(1, order)
            ids = torch.where(real, ids, (ids * real).amax(1, keepdim=True))
    dtype, wide = v.dtype, torch.promote_types(v.dtype, torch.float32)
    v = joined([v.to(wide), v.new_ones(*v.shape[:3], 1, dtype=wide)], 3)
    x = Call(q, k, v, far, window, scale, real, ids, impl, chunk_size, shard)
    if causal:
        near, lse = x.near(state)
        sums, counts, kv = x.behind(state, keep=return_state)
    else:
        near, lse = x.near_both()
        sums, counts, kv = x.around()
    out = _joined(near, lse, sums, counts, far).to(dtype)
    if order is not None and real is not None:
        out = take(out.masked_fill(~real[:, None, :, None], 0), order.argsort(1))
    return AttentionOutput(out, x.state_after(state, kv) if return_state else None)


class Call(NamedTuple):
    """One call, its tokens in order and padding at the end."""

    q: Tensor
    k: Tensor
    v: Tensor  # [B, Hkv, T, E + 1], float32 or wider, a column of ones at the end
    far: FarKeys
    window: int
    scale: float
    real: Tensor | None
    ids: Tensor | None
    impl: str
    chunk_size: int | None
    shard: Shard | None

    def near(self, state: HybridState | None) -> tuple[Tensor, Tensor]:
        """Return softmax attention to the W latest keys, and the logarithm of its sum."""
        q, k, v, real = self.q, self.k, self.v[..., :-1], self.real
        old = 0
        if state is not None:
            old = self.window
            if q.shape[2] == 1:
                return self.one_step(state)
            q = F.pad(q, (0, 0, old, 0))
            k = torch.cat([state.k.to(k.dtype), k], 2)
            v = torch.cat([state.v.to(v.dtype), v], 2)
            now = real if real is not None else _all(self.k)
            real = torch.cat([_held(state), now], 1)
        out, lse = self.band(q, k, v, (self.window - 1, 0), real, old)
        return out[:, :, old:], lse[:, :, old:]

    def one_step(self, state: HybridState) -> tuple[Tensor, Tensor]:
        """Attend from one token to itself and to all but the oldest of the keys in the state."""
        seen = _held(state)[:, 1:]
        seen = torch.cat([seen, self.real if self.real is not None else _all(self.k)], 1)
        k = torch.cat([state.k[:, :, 1:], self.k], 2)
        v = torch.cat([state.v[:, :, 1:], self.v[..., :-1]], 2)
        return _dense(self.q, k, v, seen[:, None, None], self.scale)

    def near_both(self) -> tuple[Tensor, Tensor]:
        """Return softmax attention to W keys on either side, and the logarithm of its sum."""
        reach = (self.window, self.window)
        return self.band(self.q, self.k, self.v[..., :-1], reach, self.real)

    def band(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        reach: tuple[int, int],
        real: Tensor | None,
        old: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Attend within a band; returns the output and the logarithm of the sum of weights."""
        length, ids = q.shape[2], self.ids
        reach = (min(reach[0], length - 1), min(reach[1], length - 1))
        if ids is not None and old:  # the state is of the first sequence
            ids = torch.cat([ids[:, :1].expand(-1, old), ids], 1)
        mask = AttentionMask(window=reach, padding=real, segment_ids=ids)
        if self.impl == "reference":
            seen = mask.dense(length, length, q.device)
            assert seen is not None
            return _dense(q, k, v, seen, self.scale)
        if q.device.type != "cpu" or torch.compiler.is_compiling():
            return band_softmax(q, k, v, window=reach, scale=self.scale, mask=mask)
        wide = torch.promote_types(q.dtype, torch.float32)
        plan = Plan(Band(*reach, 1), reach[1] == 0, self.scale, real, segments=ids, with_lse=True)
        return walk_attention(q.to(wide), k.to(wide), v.to(wide), plan)

    def behind(
        self, state: HybridState | None, keep: bool
    ) -> tuple[Tensor, Tensor | None, LinearState | None]:
        """Return the sums over what has left the window, ``[B, H, T, E + 1]``, and their state.

        Token t of the linear attention is the query at t with the key that stands W before it.
        """
        far, length, size = self.far, self.q.shape[2], self.window
        log_decay, real, ids = far.log_decay, self.real, None
        if state is None:
            leave = max(length - size, 0)
            keys, values = far.k[:, :, :leave], self.v[:, :, :leave]
            queries, first = far.q[:, :, size:], size
            if log_decay is not None and log_decay.dim() > 1:
                log_decay = log_decay[:, :, size:]
            sums = None
        else:
            old = F.pad(state.v, (0, 1), value=1.0).to(self.v.dtype)
            keys = torch.cat([state.features.to(far.k.dtype), far.k], 2)[:, :, :length]
            values = torch.cat([old, self.v], 2)[:, :, :length]
            queries, first, sums = far.q, 0, LinearState(state.kv, state.z)
        if real is not None:  # no key enters at padding
            keys = keys.masked_fill(~real[:, None, first:, None], 0)
        if self.ids is not None:  # nor one of another sequence
            ids, of_keys = self.ids[:, first:], self.ids
            if state is not None:
                of_keys = torch.cat([of_keys[:, :1].expand(-1, size), of_keys], 1)
            others = ids != of_keys[:, : ids.shape[1]]
            keys = keys.masked_fill(others[:, None, :, None], 0)
        out, after, _ = linear_attention(
            queries,
            keys,
            values,
            log_decay=log_decay,
            form="recurrent" if queries.shape[2] == 1 else "chunk",
            impl=self.impl,
            state=None if self.shard is not None else sums,
            return_state=keep,
            chunk_size=self.chunk_size,
            segment_ids=ids,
            shard=self.shard,
        )
        out = F.pad(out, (0, 0, min(first, length), 0))
        counts = None
        if far.mean:
            counts = self.places()[0] + 1 - size
            if state is not None:
                earlier = state.seen[:, None]
                if self.ids is not None:
                    earlier = earlier * (self.ids == self.ids[:, :1])
                counts = counts + earlier
        return out, counts, after

    def places(self) -> tuple[Tensor, Tensor]:
        """Return how many tokens of its own sequence stand before each, and how many after."""
        batch, length = len(self.q), self.q.shape[2]
        place = torch.arange(length, device=self.q.device)
        many = torch.full((batch, 1), length, device=place.device)
        if self.real is not None:
            many = self.real.sum(1, keepdim=True)
        if self.ids is None:
            return place.expand(batch, length), (many - 1 - place).clamp(min=0)
        changes = self.ids[:, 1:] != self.ids[:, :-1]
        first = F.pad(place[1:] * changes, (1, 0)).cummax(1).values
        last = F.pad(torch.where(changes, place[:-1], length - 1), (0, 1), value=length - 1)
        last = torch.minimum(last.flip(1).cummin(1).values.flip(1), many - 1)
        return place - first, (last - place).clamp(min=0)

    def around(self) -> tuple[Tensor, Tensor | None, None]:
        """Return the sums over what lies before and after the window."""
        far, length, skip = self.far, self.q.shape[2], self.window + 1
        counts = None
        total = far.q.new_zeros(*self.q.shape[:3], self.v.shape[3], dtype=self.v.dtype)
        if length > skip:
            early, late = slice(length - skip), slice(skip, length)
            total = F.pad(self.sums(late, early), (0, 0, skip, 0))
            total = total + F.pad(self.sums(early, late), (0, 0, 0, skip))
        if far.mean:
            before, after = self.places()
            counts = (before - self.window).clamp(min=0) + (after - self.window).clamp(min=0)
        return total, counts, None

    def sums(self, queries: slice, keys: slice) -> Tensor:
        """Pair some queries with the keys that end their windows, and sum over all beyond."""
        q, k, v = self.far.q[:, :, queries], self.far.k[:, :, keys], self.v[:, :, keys]
        backwards, ids = queries.start is None, None
        if self.ids is not None:
            ids = self.ids[:, queries]
            k = k.masked_fill((ids != self.ids[:, keys])[:, None, :, None], 0)
            ids = (ids.amax() - ids).flip(1) if backwards else ids
        if backwards:
            q, k, v = q.flip(2), k.flip(2), v.flip(2)
        options: dict[str, Any] = {"impl": self.impl, "chunk_size": self.chunk_size}
        out = linear_attention(q, k, v, segment_ids=ids, **options).out
        return out.flip(2) if backwards else out

    def state_after(self, state: HybridState | None, sums: LinearState | None) -> HybridState:
        """Return the state after the last real token; what was passed in stays as it is."""
        assert sums is not None
        size, length = self.window, self.q.shape[2]
        if state is None:
            held = [F.pad(x, (0, 0, size, 0)) for x in (self.k, self.v[..., :-1], self.far.k)]
            seen = torch.zeros(len(self.q), dtype=torch.long, device=self.q.device)
        else:
            seen = state.seen
            pairs = zip(state[:3], (self.k, self.v[..., :-1], self.far.k), strict=True)
            held = [torch.cat([old.to(new.dtype), new], 2) for old, new in pairs]
        if self.real is None:
            kept = [x[:, :, length:].clone() for x in held]
            count = torch.full_like(seen, length)
        else:
            count = self.real.sum(1)
            place = count[:, None] + torch.arange(size, device=seen.device)
            kept = [take(x, place) for x in held]
        if self.ids is not None:  # what comes next belongs to the last sequence
            alike = self.ids == self.ids[:, -1:]
            count = (alike if self.real is None else alike & self.real).sum(1)
        k, v, features = kept
        after = HybridState(k, v, features, sums.kv, sums.k, seen + count)
        if self.ids is None:
            return after
        return after._replace(features=features * _held(after)[:, None, :, None])


def _joined(near: Tensor, lse: Tensor, sums: Tensor, counts: Tensor | None, far: FarKeys) -> Tensor:
    """Put both kinds of weights over one denominator, the larger logarithm subtracted."""
    weight = far.log_weight.to(lse.dtype)
    if counts is not None:
        weight = weight - counts.clamp(min=1).to(lse.dtype).log()[:, None, :, None]
    values, total = sums[..., :-1], sums[..., -1:]
    if far.relative:
        lse = torch.zeros_like(lse)  # what the window's sum is divided by cancels
    some = total > SMALLEST
    if far.alone is not None:
        lse = lse.masked_fill(some & far.alone.view(1, -1, 1, 1), -torch.inf)
    log_total = total.clamp(min=SMALLEST).log()
    top = torch.where(some, torch.maximum(lse, weight + log_total), lse).detach()
    share = (weight - top).masked_fill(~some, -torch.inf).exp()
    window = (lse - top).exp()
    return (window * near + share * values) / (window + share * total)


def _window_before(k: Tensor, v: Tensor, far: Tensor, window: int, shard: Shard) -> HybridState:
    """Return the window that a share starts with; the sums beside it are left to the op."""
    seen = shard.seen(len(k), k.device)
    k, v, far = latest_before((k, v, far), shard, window)
    nothing = far.new_zeros(0)
    state = HybridState(k, v, far, nothing, nothing, seen)
    return state._replace(features=far * _held(state)[:, None, :, None])


def _dense(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attend with a materialised score matrix; a row that sees nothing gets something finite."""
    wide = torch.promote_types(q.dtype, torch.float32)
    q = q.to(wide).unflatten(1, (k.shape[1], -1)) * scale
    scores = (q @ k.to(wide).unsqueeze(2).mT).flatten(1, 2)
    scores = scores.masked_fill(~seen, torch.finfo(wide).min / 8)
    lse = scores.logsumexp(-1, keepdim=True)
    weights = (scores - lse).exp().unflatten(1, (k.shape[1], -1))
    return (weights @ v.to(wide).unsqueeze(2)).flatten(1, 2), lse


def _held(state: HybridState) -> Tensor:
    """Return which places of the window are taken, ``[B, W]`` bool."""
    place = torch.arange(state.k.shape[2], device=state.seen.device)
    return place >= len(place) - state.seen[:, None]


def _all(k: Tensor) -> Tensor:
    return torch.ones(k.shape[0], k.shape[2], dtype=torch.bool, device=k.device)


def _reordered(far: FarKeys, order: Tensor) -> FarKeys:
    """Bring all that belongs to tokens into another order."""
    log_decay, weight = far.log_decay, far.log_weight
    if log_decay is not None and log_decay.dim() == 3:
        log_decay = torch.take_along_dim(log_decay, order[:, None], 2)
    elif log_decay is not None and log_decay.dim() == 4:
        log_decay = take(log_decay, order)
    if weight.dim() == 4 and weight.shape[2] > 1:
        weight = take(weight, order)
    return far._replace(
        q=take(far.q, order), k=take(far.k, order), log_decay=log_decay, log_weight=weight
    )
