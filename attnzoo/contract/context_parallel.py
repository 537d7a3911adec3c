r"""Context parallelism: exchange states and neighbouring tokens between ranks that share sequences.

Rank r of P holds tokens r L to (r + 1) L of every sequence, its shard. Its tokens depend on other
ranks through sums over all earlier tokens (a state), or through the tokens next to its shard (a
window).

- *States*: over a shard, :math:`S_t = c_t S_{t-1} + k_t v_t^T` is :math:`S \mapsto C S + S'`, where
  C is the decay over the shard and S' its sums from a zero state. Every rank sends (S', C) to the
  later ranks, and each of them computes its first state from the pairs that it receives: O(D E)
  numbers, independent of the sequence length.
- *Windows*: every rank sends the w tokens at an end of its shard to as many neighbours as a window
  of w tokens covers.

Both use one ``all_to_all``, and one more in the backward pass. Sources: Sun et al., 2024,
arXiv:2404.02882 (states between ranks); 2025, arXiv:2502.07563 (all states in one collective).
Other letters: T = L tokens of a shard, X any size, P ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from attnzoo.contract.masks import AttentionMask
from attnzoo.contract.padding import gather_tokens
from attnzoo.contract.sequences import RowLayout, Sequences

S = TypeVar("S")

LOG_ZERO = -1e30  # logarithm of weight 0; finite, so that no difference is NaN


@dataclass(frozen=True, kw_only=True, eq=False)
class SequenceShard:
    """This rank's part of the sequences; shards have equal lengths and are in the order of ranks.

    Attributes:
        group: Process group that shares the sequences.
        rank: Rank of this process in the group.
        size: P, the number of ranks.
        length: L, tokens of a shard.
        padding: ``[B, P L]`` bool, of full sequences; ``None`` if all tokens are real.
        segment_ids: ``[B, P L]`` integers, of full rows, non-decreasing; not together with padding.
        layout: The places of this rank's tokens in its rows, if they are one row of sequences.
    """

    group: Any
    rank: int
    size: int
    length: int
    padding: Tensor | None = None
    segment_ids: Tensor | None = None
    layout: RowLayout | None = None

    def __post_init__(self) -> None:
        assert self.padding is None or self.segment_ids is None

    def rows(self, x: Tensor) -> Tensor:
        """Return this rank's tokens ``[1, H, N, X]`` in its rows, ``[B, H, T, X]``."""
        return x if self.layout is None else self.layout.to_rows(x)

    def states(self, state: S, sequences: Sequences | None) -> S:
        """Return the states of this rank's sequences from those of its rows."""
        if self.layout is None or sequences is None:
            return state
        found: S = self.layout.state_to_sequences(state, sequences.count)
        return found

    def local(self, x: Tensor, *, before: int = 0, after: int = 0) -> Tensor:
        """Return this shard of full rows ``[B, P L]``, with more tokens at its ends."""
        start = self.rank * self.length
        return x[:, start - before : start + self.length + after]

    def mask(self, mask: AttentionMask, *, before: int = 0, after: int = 0) -> AttentionMask:
        """Return ``mask`` with the padding and segments of this shard and tokens next to it."""
        padding, ids = (
            None if x is None else self.local(x, before=before, after=after)
            for x in (self.padding, self.segment_ids)
        )
        return replace(mask, padding=padding, segment_ids=ids)

    def reach(self, tokens: int) -> int:
        """Return the distance from its shard within which every rank finds ``tokens`` real tokens.

        It holds for both sides and is the same on all ranks, because it depends on full rows only.
        """
        longest = (self.size - 1) * self.length
        if self.padding is None or tokens == 0:
            return min(tokens, longest)
        counts = self.padding.int().cumsum(1)
        distance, width = 0, self.padding.shape[1]
        for boundary in range(self.length, width, self.length):
            count_here = counts[:, boundary - 1 : boundary]
            first = (counts <= count_here - tokens).sum(1).min()  # tokens that are too far left
            last = (counts < count_here + tokens).sum(1).max() + 1
            distance = max(distance, boundary - int(first), min(int(last), width) - boundary)
        return min(distance, longest)

    def available(self, before: int, after: int = 0) -> tuple[int, int]:
        """Return how many of ``before`` and ``after`` tokens exist within the sequence."""
        return (
            min(before, self.rank * self.length),
            min(after, (self.size - 1 - self.rank) * self.length),
        )

    def segment_starts(self) -> tuple[Tensor, Tensor] | None:
        """Return which shards contain starts of packed segments, ``[B, P]`` bool each.

        The first tensor is true if a segment starts at the shard's first token, the second if one
        starts later in the shard. ``None`` if rows are not packed.
        """
        if self.segment_ids is None:
            return None
        ids = self.segment_ids.unflatten(1, (self.size, self.length))
        first, last = ids[:, :, 0], ids[:, :, -1]
        new_at_start = torch.ones_like(first, dtype=torch.bool)
        new_at_start[:, 1:] = first[:, 1:] != last[:, :-1]
        return new_at_start, first != last

    def tokens_before(self, batch: int, device: torch.device) -> Tensor:
        """Return how many real tokens of its first token's segment precede this shard, ``[B]``."""
        start = self.rank * self.length
        if self.padding is not None:
            return self.padding[:, :start].sum(1).expand(batch)
        if self.segment_ids is not None:
            ids = self.segment_ids
            return (ids[:, :start] == ids[:, start : start + 1]).sum(1).expand(batch)
        return torch.full((batch,), start, device=device)


class _Exchange(torch.autograd.Function):
    """All-to-all with gradients: the backward pass sends them in the opposite direction."""

    @staticmethod
    def forward(
        ctx: Any, flat: Tensor, group: Any, sent_sizes: list[int], received_sizes: list[int]
    ) -> Tensor:
        """Send ``sent_sizes[j]`` numbers to rank j and receive ``received_sizes[j]`` from it."""
        ctx.how = group, received_sizes, sent_sizes
        return _all_to_all(flat, group, sent_sizes, received_sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Send each gradient to the rank that sent the number."""
        d_flat: Tensor = _Exchange.apply(grad, *ctx.how)  # type: ignore[no-untyped-call]
        return d_flat, None, None, None


def _all_to_all(
    flat: Tensor, group: Any, sent_sizes: list[int], received_sizes: list[int]
) -> Tensor:
    out = flat.new_empty(sum(received_sizes))
    dist.all_to_all_single(out, flat.contiguous(), received_sizes, sent_sizes, group=group)
    return out


def exchange(
    pieces: Sequence[Tensor], received_sizes: Sequence[int], shard: SequenceShard
) -> list[Tensor]:
    """Send one tensor to each rank, and return the tensors from all ranks, flattened.

    Args:
        pieces: One tensor per rank, all of one dtype. Empty ones must be slices of a tensor that is
            sent, so that autograd connects them.
        received_sizes: Numbers that each rank sends to this one.
        shard: This rank's part of the sequences.

    Returns:
        One flat tensor per rank. The loss must depend on all of them, also on empty ones, because
        all ranks must take part in the collective of the backward pass.
    """
    flat = torch.cat([x.flatten() for x in pieces])
    sent_sizes = [x.numel() for x in pieces]
    out: Tensor = _Exchange.apply(flat, shard.group, sent_sizes, list(received_sizes))  # type: ignore[no-untyped-call]
    return list(out.split(list(received_sizes)))


# -- windows ---------------------------------------------------------------------------------------


def with_neighbours(
    tensors: Sequence[Tensor], shard: SequenceShard, before: int, after: int = 0
) -> tuple[Tensor, ...]:
    """Extend tensors by the tokens before and after this shard.

    Args:
        tensors: ``[B, H, L, X]`` each, of one B and H; they share one collective.
        shard: This rank's part of the sequences.
        before: Tokens to add from before the shard, the same on all ranks.
        after: Tokens to add from after the shard, the same on all ranks.

    Returns:
        The tensors, with ``shard.available(before, after)`` more tokens at their ends.
    """
    if before == after == 0:
        return tuple(tensors)
    tokens, sizes = shard.length, [x.shape[3] for x in tensors]

    def width(offset: int) -> int:
        """Return how many tokens are sent to the rank at ``offset`` from this one."""
        needed, distance = (before, offset) if offset > 0 else (after, -offset)
        return min(max(needed - (distance - 1) * tokens, 0), tokens) if offset else 0

    def piece(offset: int) -> Tensor:
        """Return the tokens to send there, of all tensors."""
        end = slice(tokens - width(offset), tokens) if offset > 0 else slice(width(offset))
        return torch.cat([x[:, :, end] for x in tensors], 3)

    offsets = [other - shard.rank for other in range(shard.size)]
    elements_per_token = sum(x[:, :, :1].numel() for x in tensors)
    received = exchange(
        [piece(o) for o in offsets], [elements_per_token * width(-o) for o in offsets], shard
    )
    parts = [x.view(*tensors[0].shape[:2], -1, sum(sizes)) for x in received]
    left, right = (
        torch.cat(side, 2).split(sizes, 3)
        for side in (parts[: shard.rank + 1], parts[shard.rank :])
    )
    return tuple(
        torch.cat([low.to(x.dtype), x, high.to(x.dtype)], 2)
        for low, x, high in zip(left, tensors, right, strict=True)
    )


def latest_before(
    tensors: Sequence[Tensor], shard: SequenceShard, count: int
) -> tuple[Tensor, ...]:
    """Return the last ``count`` real tokens before this shard, left-padded with zeros.

    Args:
        tensors: ``[B, H, L, X]`` each.
        shard: This rank's part of the sequences.
        count: Tokens to return.
    """
    reach = shard.reach(count)
    available_tokens, _ = shard.available(reach)
    tensors_before = [x[:, :, :available_tokens] for x in with_neighbours(tensors, shard, reach)]
    if shard.padding is not None and available_tokens:
        order = (
            shard.local(shard.padding, before=available_tokens)[:, :available_tokens]
            .int()
            .argsort(dim=1, stable=True)
        )
        tensors_before = [gather_tokens(x, order) for x in tensors_before]
    return tuple(
        pad(x, (0, 0, max(count - available_tokens, 0), 0))[:, :, -count:] for x in tensors_before
    )


# -- states ----------------------------------------------------------------------------------------


def clear_finished_sequences(x: Tensor, shard: SequenceShard, cleared: float) -> Tensor:
    """Set ``[B, Hkv, T, X]`` to ``cleared`` except in the last segment, which may continue."""
    if shard.segment_ids is None:
        return x
    ids = shard.local(shard.segment_ids)
    return x.masked_fill((ids != ids[:, -1:])[:, None, :, None], cleared)


def log_decay_across_shard(log_decay: Tensor, shard: SequenceShard) -> Tensor:
    """Return the log decay of a state over this shard; ``LOG_ZERO`` if a segment starts in it."""
    if (segment_starts := shard.segment_starts()) is None:
        return log_decay
    new_at_start, new_inside = (x[:, shard.rank] for x in segment_starts)
    return log_decay.masked_fill(
        (new_at_start | new_inside).view(-1, *(1 for _ in log_decay.shape[1:])), LOG_ZERO
    )


def gather_from_earlier_ranks(
    tensors: Sequence[Tensor], shard: SequenceShard, *, from_later: bool = False
) -> Iterator[tuple[Tensor, ...]]:
    """Send tensors to all later ranks, and yield those of the earlier ranks in order.

    With ``from_later``, send to and receive from all other ranks. A rank that receives nothing gets
    zeros that depend on the collective, so that it takes part in the backward pass.
    """
    flat, rank = torch.cat([x.flatten() for x in tensors]), shard.rank
    sends = [j > rank or (from_later and j < rank) for j in range(shard.size)]
    received_sizes = [
        flat.numel() * (j < rank or (from_later and j > rank)) for j in range(shard.size)
    ]
    received = exchange([flat if send else flat[:0] for send in sends], received_sizes, shard)
    if not any(received_sizes):
        received = [received[0].sum() * flat.new_zeros(flat.shape)]
    for chunk in received:
        if chunk.numel():
            parts = chunk.split([x.numel() for x in tensors])
            yield tuple(part.view(x.shape) for part, x in zip(parts, tensors, strict=True))


def fold_earlier_states(sums: Tensor, decay: Tensor, shard: SequenceShard) -> Tensor:
    """Return the state before this shard, from the sums and decays of the earlier ranks.

    Args:
        sums: Sums of this shard from a zero state, ``[B, Hkv, D, E]``.
        decay: Decay of a state over this shard, broadcastable to ``sums``.
        shard: This rank's part of the sequences.
    """
    total = torch.zeros_like(sums)
    for other, other_decay in gather_from_earlier_ranks([sums, decay], shard):
        total = total * other_decay + other
    return reset_new_sequences(total, shard)


def reset_new_sequences(state: Tensor, shard: SequenceShard) -> Tensor:
    """Set the state ``[B, ...]`` of rows to 0 where a segment starts at this shard."""
    if (segment_starts := shard.segment_starts()) is None:
        return state
    new_at_start = segment_starts[0][:, shard.rank]
    return state.masked_fill(new_at_start.view(-1, *(1 for _ in state.shape[1:])), 0)
