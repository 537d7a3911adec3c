"""Sliding-window attention in PyTorch operations: blocks of queries with the keys of their band.

A window of w over T tokens becomes T / C dense problems, to which global keys are added, so that
time is O(T (w + G) D), and memory, with gradients or torch's kernel, O(T (w + G)). A dilated band
is a plain one over every d-th token. Other letters: N blocks, C queries of a block, W keys of a
block's band, G global keys, d dilation, g = H / Hkv.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.contract.padding import gather_tokens
from attnzoo.ops.softmax.sdpa import sdpa
from attnzoo.ops.window.pattern import Band, GlobalIndices, gather_bias

MIN_BLOCK = 64  # C is the width of the band, on CPUs a fourth of it, but at least this
MAX_SCORES = 2**19  # computed at a time on CPUs: 2 MB of float32, which fit into the L2 cache


@dataclass(frozen=True)
class LocalOptions:
    """The options of one call: band, scale and masks."""

    band: Band
    causal: bool
    scale: float
    key_mask: Tensor | None = None  # [1 or B, T] bool: keys that the band may see; None means all
    global_indices: GlobalIndices | None = None  # of the global keys, of each row
    segment_ids: Tensor | None = None  # [1 or B, T]: the band sees the query's segment only
    return_lse: bool = False


def band_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: LocalOptions,
    bias: Tensor | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return attention within a band and to global keys.

    Args:
        q: Queries, ``[B, H, T, D]``; all heads have the same band.
        k: Keys, ``[B, Hkv, T, D]``.
        v: Values, ``[B, Hkv, T, E]``.
        options: Band, scale and masks.
        bias: Added to the scores, ``[1 or B, H, 1 or T, T]``, where no log-sum-exp is asked for.
        dropout: Probability of dropping a weight, as the bias.

    Returns:
        ``[B, H, T, E]``, and the log-sum-exp of each query's scores, ``[B, H, T, 1]``, both in
        float32 or wider, and arbitrary but finite for a query that sees no key. If the options do
        not ask for it, torch's ``scaled_dot_product_attention`` computes all blocks in one call:
        the output in the dtype of ``v``, 0 for a query that sees no key, and no log-sum-exp.
    """
    x, indices = _Blocks(q, options), options.global_indices
    if options.return_lse:
        wide = torch.promote_types(q.dtype, torch.float32)
        q, k, v = q.to(wide), k.to(wide), v.to(wide)
    queries, keys, values = x.queries(q), x.band_keys(k), x.band_keys(v)
    seen = x.band_mask()
    if indices is not None:
        indices = GlobalIndices(*(y.expand(x.batch, -1) for y in indices))
        keys, values = (
            torch.cat([gather_tokens(y, indices.positions).repeat_interleave(x.copies, 0), near], 2)
            for y, near in ((k, keys), (v, values))
        )
        seen = torch.cat([x.global_mask(indices), seen], 3)
    if not options.return_lse:
        bias = None if bias is None else x.bias(bias, indices)
        out = sdpa(
            queries, keys, values, scale=options.scale, mask=seen, bias=bias, dropout=dropout
        )
        return x.tokens(out), out.new_empty(0)
    assert bias is None
    assert not dropout
    parts = [_softmax(*part) for part in x.split(queries * options.scale, keys, values, seen)]
    out, lse = (torch.cat(part) for part in zip(*parts, strict=True))
    return x.tokens(out), x.tokens(lse)


def _softmax(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output of some blocks, ``[n, H, C, E]``, and the log-sum-exp, ``[n, H, C, 1]``."""
    by_key_head = q.unflatten(1, (k.shape[1], -1)).flatten(2, 3)  # [n, Hkv, g C, D]
    scores = (by_key_head @ k.mT).unflatten(2, (-1, q.shape[2]))
    hidden = torch.zeros(seen.shape, dtype=q.dtype, device=q.device)
    hidden = hidden.masked_fill(~seen, torch.finfo(q.dtype).min / 8)
    scores = (scores + hidden.unsqueeze(2)).flatten(2, 3)
    weights = scores.softmax(-1)
    # max(scores) - log(max(weights)): no second pass over the exponentials
    lse = scores.amax(-1, keepdim=True) - weights.amax(-1, keepdim=True).log()
    out, lse = (y.unflatten(2, (-1, q.shape[2])).flatten(1, 2) for y in (weights @ v, lse))
    return out, lse


def dense_softmax(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return softmax attention and its log-sum-exp; finite for queries that see no key."""
    wide = torch.promote_types(q.dtype, torch.float32)
    q = q.to(wide).unflatten(1, (k.shape[1], -1)) * scale
    scores = (q @ k.to(wide).unsqueeze(2).mT).flatten(1, 2)
    scores = scores.masked_fill(~seen, torch.finfo(wide).min / 8)
    lse = scores.logsumexp(-1, keepdim=True)
    weights = (scores - lse).exp().unflatten(1, (k.shape[1], -1))
    return (weights @ v.to(wide).unsqueeze(2)).flatten(1, 2), lse


class _Blocks:
    """The blocks of a call: those of each of the d phases, whose band is plain.

    Args:
        q: Queries of the call.
        options: Its options.
    """

    def __init__(self, q: Tensor, options: LocalOptions) -> None:
        self.batch, self.heads, self.length, _ = q.shape
        self.options, self.device = options, q.device
        self.step = min(options.band.dilation, self.length)
        self.phase_length = -(-self.length // self.step)
        farthest = self.phase_length - 1
        self.before, self.after = (min(side, farthest) for side in options.band[:2])
        width = self.before + self.after
        self.block = max(width // 4 if q.device.type == "cpu" else width, MIN_BLOCK)
        self.count = -(-self.phase_length // self.block)  # of a phase
        self.copies = self.step * self.count  # of a row

    def split(self, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
        """Return parts of blocks ``[B d N, ...]`` whose scores fit into the cache of a CPU."""
        count = len(tensors[0])
        if self.device.type == "cpu":
            scores = self.heads * self.block * tensors[1].shape[2]
            count = max(MAX_SCORES // scores, 1)
        return list(zip(*(x.split(count) for x in tensors), strict=True))

    def _phases(self, x: Tensor) -> Tensor:
        """Make every d-th token a row of its own, ``[B d, H, T / d, D]``."""
        if self.step > 1:
            x = F.pad(x, (0, 0, 0, -self.length % self.step)).unflatten(2, (-1, self.step))
            x = x.permute(0, 3, 1, 2, 4).flatten(0, 1)
        return x

    def queries(self, q: Tensor) -> Tensor:
        """Return the queries of the blocks, ``[B d N, H, C, D]``."""
        q = F.pad(self._phases(q), (0, 0, 0, -self.phase_length % self.block))
        blocks: Tensor = q.unflatten(2, (-1, self.block)).transpose(1, 2).flatten(0, 1)
        return blocks

    def band_keys(self, k: Tensor) -> Tensor:
        """Return the keys of the bands, ``[B d N, Hkv, W, D]``, zeros outside the sequence."""
        end = self.after + -self.phase_length % self.block
        views = F.pad(self._phases(k), (0, 0, self.before, end))
        views = views.unfold(2, self.before + self.block + self.after, self.block)
        bands: Tensor = views.permute(0, 2, 1, 4, 3).flatten(0, 1)
        return bands

    def tokens(self, x: Tensor) -> Tensor:
        """Join the outputs of the blocks ``[B d N, H, C, E]`` to ``[B, H, T, E]``."""
        x = x.unflatten(0, (self.batch, self.step, -1)).permute(0, 3, 2, 4, 1, 5)
        x = x.flatten(2, 3)[:, :, : self.phase_length]
        return x.flatten(2, 3)[:, :, : self.length]

    def band_mask(self) -> Tensor:
        """Return which keys of its band each query sees, ``[B d N, 1, C, W]`` bool."""
        queries = torch.arange(self.block, device=self.device)[:, None]
        keys = torch.arange(-self.before, self.block + self.after, device=self.device)
        distance = keys - queries
        in_band = (distance >= -self.before) & (distance <= self.after)
        first = self.block * torch.arange(self.count, device=self.device)[:, None]
        position = keys + first  # [N, W]
        seen = in_band & ((position >= 0) & (position < self.phase_length))[:, None]
        key_mask, ids = self.options.key_mask, self.options.segment_ids
        if key_mask is None and self.length % self.step:  # the end of a short phase is masked
            key_mask = torch.ones(1, self.length, dtype=torch.bool, device=self.device)
        position = position.clamp(0, self.phase_length - 1)
        if key_mask is not None:
            seen = seen & self._by_phase(key_mask)[:, position][:, :, None]
        if ids is not None:
            ids = self._by_phase(ids)
            own = F.pad(ids, (0, -self.phase_length % self.block), value=-1)
            own = own.unflatten(1, (-1, self.block))
            seen = seen & (own[..., None] == ids[:, position][:, :, None])
        return seen.expand(self.batch * self.step, -1, -1, -1).flatten(0, 1)[:, None]

    def _by_phase(self, x: Tensor) -> Tensor:
        """Return a mask or ids ``[1 or B, T]`` of the phases, ``[B d, T / d]``; 0 after the end."""
        x = F.pad(x, (0, -self.length % self.step)).expand(self.batch, -1)
        by_phase: Tensor = x.unflatten(1, (-1, self.step)).transpose(1, 2).flatten(0, 1)
        return by_phase

    def global_mask(self, indices: GlobalIndices) -> Tensor:
        """Return which global keys each query sees, ``[B d N, 1, C, G]`` bool."""
        positions, valid = (x[:, None, None, None] for x in indices)
        mask = valid.expand(self.batch, self.step, self.count, self.block, -1)
        if self.options.causal:
            mask = mask & (positions <= self._positions(0, self.block)[..., None])
        return mask.flatten(0, 2)[:, None]

    def _positions(self, begin: int, end: int) -> Tensor:
        """Return the positions of tokens relative to the begin of each block, ``[d, N, ...]``."""
        first = self.block * torch.arange(self.count, device=self.device)[:, None]
        phase = torch.arange(self.step, device=self.device)[:, None, None]
        return phase + self.step * (first + torch.arange(begin, end, device=self.device))

    def bias(self, bias: Tensor, indices: GlobalIndices | None) -> Tensor:
        """Gather the bias of every block from ``[1 or B, H, 1 or T, T]``.

        Returns:
            ``[B d N, H, 1 or C, G + W]``; arbitrary at keys outside the sequence, which are masked.
        """
        last = self.length - 1
        keys = self._positions(-self.before, self.block + self.after).clamp(0, last)[:, :, None]
        queries = self._positions(0, self.block).clamp(0, last)[..., None]
        queries = queries if bias.shape[2] > 1 else queries.new_zeros(1, 1, 1, 1)
        found = bias[:, :, queries, keys].expand(self.batch, *[-1] * 5)  # [B, H, d, N, 1 or C, W]
        if indices is not None:
            of_globals = gather_bias(bias, None, indices.positions)[:, :, queries[..., 0]]
            of_globals = of_globals.expand(*found.shape[:4], -1, -1)  # [B, H, d, N, 1 or C, G]
            found = torch.cat([of_globals, found], 5)
        return found.permute(0, 2, 3, 1, 4, 5).flatten(0, 2)
