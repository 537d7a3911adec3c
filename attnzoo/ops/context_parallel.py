r"""Rows whose tokens lie on several processes: what one needs of the others, in one collective.

Process r of P holds tokens r L to (r + 1) L of every row. What a token needs of other processes is
either sums over all that came before (a state), or the tokens next to its share (a window).

- *States*: :math:`S_t = c_t S_{t-1} + k_t v_t^T` over a share is
  :math:`S \mapsto C S + S'`, with C the decay over the share and S' its sums from nothing. Every
  process sends (S', C) to the later ones, and each folds what it got into the state that it starts
  from: O(D E) numbers, however long the sequence.
- *Windows*: every process sends the w tokens at an end of its share, to as many neighbours as w
  reaches.

Both are one ``all_to_all``, in which only those take part that need something; the backward pass is
one more, the other way.
Sources: Sun et al., 2024, arXiv:2404.02882 (states between processes); 2025, arXiv:2502.07563 (all
of them in one collective).
Letters: B batch, H heads, Hkv key heads, T = L tokens of a share, D key size, E value size,
F decays per token (1 or D).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from attnzoo.masks import AttentionMask
from attnzoo.ops.linear_decay import FORGOTTEN
from attnzoo.ops.linear_sums import decayed_sums
from attnzoo.state import LinearState, MatrixState, StabilizedState

GONE = -1e30  # the logarithm of no weight: finite, so that no difference of two is NaN


@dataclass(frozen=True, kw_only=True, eq=False)
class Shard:
    """The share of every row that this process holds; shares are equally long, and in order.

    Attributes:
        group: The processes that share the rows.
        rank: The place of this one among them.
        size: P, how many they are.
        length: L, tokens of a share.
        padding: ``[B, P L]`` bool, of whole rows; ``None`` when all tokens are real.
        segment_ids: ``[B, P L]`` integers, of whole rows, never falling; not beside padding.
    """

    group: Any
    rank: int
    size: int
    length: int
    padding: Tensor | None = None
    segment_ids: Tensor | None = None

    def __post_init__(self) -> None:
        assert self.padding is None or self.segment_ids is None

    def own(self, x: Tensor, *, before: int = 0, after: int = 0) -> Tensor:
        """Take this share, and so many tokens beside it, from whole rows ``[B, P L]``."""
        start = self.rank * self.length
        return x[:, start - before : start + self.length + after]

    def mask(self, mask: AttentionMask, *, before: int = 0, after: int = 0) -> AttentionMask:
        """Return a mask with the padding and segments of this share and so many tokens beside."""
        padding, ids = (
            None if x is None else self.own(x, before=before, after=after)
            for x in (self.padding, self.segment_ids)
        )
        return replace(mask, padding=padding, segment_ids=ids)

    def reach(self, tokens: int) -> int:
        """Return how far from its share any process finds so many real tokens, on either side.

        The same for all processes: it is worked out from whole rows.
        """
        longest = (self.size - 1) * self.length
        if self.padding is None or tokens == 0:
            return min(tokens, longest)
        total = self.padding.int().cumsum(1)
        found, width = 0, self.padding.shape[1]
        for border in range(self.length, width, self.length):
            at = total[:, border - 1 : border]
            first = (total <= at - tokens).sum(1).min()  # all up to there is too far to the left
            last = (total < at + tokens).sum(1).max() + 1
            found = max(found, border - int(first), min(int(last), width) - border)
        return min(found, longest)

    def beside(self, before: int, after: int = 0) -> tuple[int, int]:
        """Return how many of so many tokens there are on either side; the row ends somewhere."""
        return (
            min(before, self.rank * self.length),
            min(after, (self.size - 1 - self.rank) * self.length),
        )

    def borders(self) -> tuple[Tensor, Tensor] | None:
        """Return where sequences begin, ``[B, P]`` bool each; ``None`` where rows are not packed.

        The first says whether a share begins another sequence than the one before it ended with,
        the second whether one begins behind its first token.
        """
        if self.segment_ids is None:
            return None
        ids = self.segment_ids.unflatten(1, (self.size, self.length))
        first, last = ids[:, :, 0], ids[:, :, -1]
        fresh = torch.ones_like(first, dtype=torch.bool)
        fresh[:, 1:] = first[:, 1:] != last[:, :-1]
        return fresh, first != last

    def seen(self, batch: int, device: torch.device) -> Tensor:
        """Count the real tokens before this share in its first token's sequence, ``[B]``."""
        start = self.rank * self.length
        if self.padding is not None:
            return self.padding[:, :start].sum(1).expand(batch)
        if self.segment_ids is not None:
            ids = self.segment_ids
            return (ids[:, :start] == ids[:, start : start + 1]).sum(1).expand(batch)
        return torch.full((batch,), start, device=device)


class _Exchange(torch.autograd.Function):
    """Numbers to and from every process; gradients go the way back."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, group: Any, sent: list[int], got: list[int]) -> Tensor:
        """Send ``sent[j]`` numbers to process j and receive ``got[j]`` from it."""
        ctx.how = group, got, sent
        return _all_to_all(flat, group, sent, got)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Send every gradient to where its number came from."""
        return _all_to_all(grad, *ctx.how), None, None, None


def _all_to_all(flat: Tensor, group: Any, sent: list[int], got: list[int]) -> Tensor:
    out = flat.new_empty(sum(got))
    dist.all_to_all_single(out, flat.contiguous(), got, sent, group=group)
    return out


def exchange(pieces: Sequence[Tensor], got: Sequence[int], shard: Shard) -> list[Tensor]:
    """Send a piece to each process, and return what each sent here, flat.

    Args:
        pieces: For each process, of one dtype; empty ones too must come from what is sent.
        got: How many numbers come from each.
        shard: Names the processes.

    Returns:
        One flat tensor for each process. Something must be made of the empty ones too: whoever only
        sent awaits gradients, and a process that only received has to send some.
    """
    flat = torch.cat([x.flatten() for x in pieces])
    sent = [x.numel() for x in pieces]
    out: Tensor = _Exchange.apply(flat, shard.group, sent, list(got))  # type: ignore[no-untyped-call]
    return list(out.split(list(got)))


# -- windows ---------------------------------------------------------------------------------------


def with_neighbours(
    tensors: Sequence[Tensor], shard: Shard, before: int, after: int = 0
) -> tuple[Tensor, ...]:
    """Put the tokens beside a share at its ends.

    Args:
        tensors: ``[B, H, L, X]`` each, of one B and H; one collective serves them all.
        shard: The share.
        before: Tokens wanted from before it, the same for every process.
        after: And from behind it.

    Returns:
        The tensors, with ``shard.beside(before, after)`` tokens more at their ends.
    """
    if before == after == 0:
        return tuple(tensors)
    tokens, sizes = shard.length, [x.shape[3] for x in tensors]

    def width(offset: int) -> int:
        """Return how many tokens go so many processes on, or back."""
        wanted, away = (before, offset) if offset > 0 else (after, -offset)
        return min(max(wanted - (away - 1) * tokens, 0), tokens) if offset else 0

    def piece(offset: int) -> Tensor:
        """Return what goes there, of all tensors."""
        end = slice(tokens - width(offset), tokens) if offset > 0 else slice(width(offset))
        return torch.cat([x[:, :, end] for x in tensors], 3)

    offsets = [other - shard.rank for other in range(shard.size)]
    each = sum(x[:, :, :1].numel() for x in tensors)
    got = exchange([piece(o) for o in offsets], [each * width(-o) for o in offsets], shard)
    parts = [x.view(*tensors[0].shape[:2], -1, sum(sizes)) for x in got]
    left, right = (
        torch.cat(side, 2).split(sizes, 3)
        for side in (parts[: shard.rank + 1], parts[shard.rank :])
    )
    return tuple(
        torch.cat([low.to(x.dtype), x, high.to(x.dtype)], 2)
        for low, x, high in zip(left, tensors, right, strict=True)
    )


def latest_before(tensors: Sequence[Tensor], shard: Shard, count: int) -> tuple[Tensor, ...]:
    """Return the latest real tokens before a share, the last one last; zeros where there are fewer.

    Args:
        tensors: ``[B, H, L, X]`` each.
        shard: The share.
        count: How many tokens.
    """
    reach = shard.reach(count)
    held, _ = shard.beside(reach)
    found = [x[:, :, :held] for x in with_neighbours(tensors, shard, reach)]
    if shard.padding is not None and held:
        order = shard.own(shard.padding, before=held)[:, :held].int().argsort(dim=1, stable=True)
        found = [torch.take_along_dim(x, order[:, None, :, None], 2) for x in found]
    return tuple(pad(x, (0, 0, max(count - held, 0), 0))[:, :, -count:] for x in found)


# -- states ----------------------------------------------------------------------------------------


def earlier_sums(
    k: Tensor, v: Tensor, log_decay: Tensor | None, shard: Shard, *, causal: bool = True
) -> LinearState:
    """Return the state that the earlier processes' tokens leave for this share.

    Args:
        k: Keys of this share after the feature map, ``[B, Hkv, T, D]``, zero in padding.
        v: Values, ``[B, Hkv, T, E]``.
        log_decay: As in :func:`attnzoo.ops.linear.linear_attention`; 0 in padding.
        shard: The share.
        causal: Whether only earlier tokens count; otherwise those of all other processes do, and
            rows are not packed.

    Returns:
        The sums in float32 or wider; gradients flow to the processes that they came from.
    """
    assert causal or (log_decay is None and shard.segment_ids is None)
    k, v = (x.to(_wide(k, v)) for x in (k, v))
    k = _of_last_sequence(k, shard, 0)
    if log_decay is None:
        kv, z, carry = k.mT @ v, k.sum(2), k.new_zeros(*k.shape[:2], 1)
    else:
        kv, z, carry = decayed_sums(k, v, _per_token(log_decay, k))
    sums = torch.cat([kv, z.unsqueeze(3)], 3)
    if log_decay is None and shard.segment_ids is None:
        total = torch.zeros_like(sums)
        for (other,) in _gathered([sums], shard, from_later=not causal):
            total = total + other
    else:
        total = _folded(sums, _kept(carry, shard).exp().unsqueeze(3), shard)
    return LinearState(total[..., :-1], total[..., -1])


def earlier_stabilized(
    k: Tensor, v: Tensor, log_forget: Tensor, log_input: Tensor, shard: Shard
) -> StabilizedState:
    """Return the state of mLSTM that the earlier processes' tokens leave for this share.

    Args:
        k: Keys of this share after the feature map, ``[B, Hkv, T, D]``.
        v: Values, ``[B, Hkv, T, E]``.
        log_forget: ``[B, Hkv, T]``, at most 0.
        log_input: ``[B, Hkv, T]``, of any size.
        shard: The share.

    Returns:
        The sums in float32 or wider, divided by ``exp(m)``.
    """
    k, v = (x.to(_wide(k, v)) for x in (k, v))
    # from the end, so that the weights that count come from short sums
    onwards = log_forget.to(k.dtype).clamp(min=FORGOTTEN).flip(2).cumsum(2).flip(2).unsqueeze(3)
    later, carry = pad(onwards[:, :, 1:], (0, 0, 0, 1)), _kept(onwards[:, :, 0], shard)
    weight = (later + log_input.to(k.dtype).unsqueeze(3)).clamp(min=GONE)
    weight = _of_last_sequence(weight, shard, GONE)
    top = weight.detach().amax(2)  # [B, Hkv, 1]
    k = k * (weight - top.unsqueeze(2)).exp()
    sums = torch.cat([k.mT @ v, k.sum(2).unsqueeze(3)], 3)
    total, m = torch.zeros_like(sums), torch.zeros_like(top)
    for other, left, peak in _gathered([sums, carry, top], shard):
        higher = torch.maximum(left.detach() + m, peak)
        kept, added = (left + m - higher).exp(), (peak - higher).exp()
        total, m = total * kept.unsqueeze(3) + other * added.unsqueeze(3), higher
    total, m = (_begun(x, shard) for x in (total, m.squeeze(2).detach()))
    return StabilizedState(total[..., :-1], total[..., -1], m)


def earlier_matrices(last: MatrixState, carry: Tensor, shard: Shard) -> MatrixState:
    """Return the state under a decay per pair of channels that earlier tokens leave for this share.

    Args:
        last: What this share's tokens leave from nothing; packed, those of its last sequence.
        carry: The sums of the share's log decays, ``[B, Hkv, D, E]``.
        shard: The share.
    """
    carry = _kept(carry, shard).exp()
    total = _folded(torch.cat(list(last), 3), torch.cat([carry, carry], 3), shard)
    return MatrixState(*total.chunk(2, 3))


def _per_token(log_decay: Tensor, k: Tensor) -> Tensor:
    """Return log decays of any accepted shape as ``[B, Hkv, T, F]``."""
    if log_decay.dim() == 1:
        log_decay = log_decay[None, :, None].expand(k.shape[:3])
    return log_decay if log_decay.dim() == 4 else log_decay.unsqueeze(3)


def _of_last_sequence(x: Tensor, shard: Shard, cleared: float) -> Tensor:
    """Clear ``[B, Hkv, T, X]`` where packed sequences end in this share: the last one goes on."""
    if shard.segment_ids is None:
        return x
    ids = shard.own(shard.segment_ids)
    return x.masked_fill((ids != ids[:, -1:])[:, None, :, None], cleared)


def _kept(carry: Tensor, shard: Shard) -> Tensor:
    """Return the logarithm of what a state has left after this share, gone where another begins."""
    if (borders := shard.borders()) is None:
        return carry
    fresh, inner = (x[:, shard.rank] for x in borders)
    return carry.masked_fill((fresh | inner).view(-1, *(1 for _ in carry.shape[1:])), GONE)


def _gathered(
    tensors: Sequence[Tensor], shard: Shard, *, from_later: bool = False
) -> Iterator[tuple[Tensor, ...]]:
    """Send tensors to the later processes, and yield what the earlier ones sent, in order.

    With ``from_later``, to and from all other processes. Where none sends anything, zeros come that
    depend on the collective.
    """
    flat, rank = torch.cat([x.flatten() for x in tensors]), shard.rank
    to = [j > rank or (from_later and j < rank) for j in range(shard.size)]
    got = [flat.numel() * (j < rank or (from_later and j > rank)) for j in range(shard.size)]
    found = exchange([flat if sent else flat[:0] for sent in to], got, shard)
    if not any(got):
        found = [found[0].sum() * flat.new_zeros(flat.shape)]
    for each in found:
        if each.numel():
            parts = each.split([x.numel() for x in tensors])
            yield tuple(part.view(x.shape) for part, x in zip(parts, tensors, strict=True))


def _folded(sums: Tensor, carry: Tensor, shard: Shard) -> Tensor:
    """Fold what the earlier processes sent: each takes its decay from the state, and adds its sums.

    Args:
        sums: Of this share from nothing, ``[B, Hkv, D, E]``.
        carry: What a state has left after this share, broadcastable to it.
        shard: The share.
    """
    total = torch.zeros_like(sums)
    for other, kept in _gathered([sums, carry], shard):
        total = total * kept + other
    return _begun(total, shard)


def _begun(state: Tensor, shard: Shard) -> Tensor:
    """Drop the state ``[B, ...]`` of rows in which this share begins another packed sequence."""
    if (borders := shard.borders()) is None:
        return state
    fresh = borders[0][:, shard.rank]
    return state.masked_fill(fresh.view(-1, *(1 for _ in state.shape[1:])), 0)


def _wide(*tensors: Tensor) -> torch.dtype:
    wide = torch.float32
    for x in tensors:
        wide = torch.promote_types(wide, x.dtype)
    return wide
