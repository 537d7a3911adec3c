r"""Softmax over scattered sets of keys, block by block, for both forms of Reformer's attention.

A step is a batch of small dense problems: blocks of queries, each beside a window of keys that may
hold more than the queries see; a bias takes the rest away. A query meets its keys in several
steps, whose shares are merged under one denominator, :math:`o = \sum_r 2^{l_r - l} o_r` with
:math:`l = \log_2 \sum_r 2^{l_r}` and :math:`l_r` that of the sum of weights in step r. The
backward pass makes the scores anew from the inputs and :math:`l`, so nothing but those is kept.

Time is that of the products, 4 C W D flops for a block; memory beyond results that of one step.
Source: arXiv:2001.04451 (rounds of hashing), arXiv:2205.14135 (the backward pass).
Letters: M queries of all heads at hand, S keys of all heads at hand, n blocks of a step, C queries
of a block, W keys beside them, D key size, E value size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.ops.room import room

LOG2_E = 1 / math.log(2)  # exp2 takes 0.2 ns an element, exp 9 where a key is far below the others
AWAY = 2.0**31  # what half a place outside takes from a score is half of it; a power, so exact
NOTHING = -1e8  # below any log of a sum of weights that somebody sees; finite, so that 0 * e^x is 0


class Step(NamedTuple):
    """Blocks of queries and the keys beside them; no query but the last row stands in it twice.

    Keys lie in stretches, n / s blocks to each, and the blocks of a stretch see windows of W keys
    that advance evenly along it; so neighbours may share keys, which are gathered once.
    """

    queries: Tensor  # [n, C], rows of q; the last row of q stands for none
    keys: Tensor  # [s, m], rows of k and v
    away: Tensor  # [n, W, C]: 0, or a quarter or more where a key is not seen; taken over
    turn: int = 0  # steps of one turn have no query in common

    @property
    def advance(self) -> int:
        """Return by how many keys the window of a block lies behind that of the one before."""
        (stretches, length), (blocks, width, _) = self.keys.shape, self.away.shape
        others = blocks // stretches - 1
        return (length - width) // others if others else width

    def windows(self, x: Tensor) -> Tensor:
        """View what belongs to the keys, ``[s m, ...]``, as each block has it: ``[n, W, ...]``."""
        x, width = x.unflatten(0, self.keys.shape), self.away.shape[1]
        if len(x) == len(self.away):
            return x
        windows: Tensor = x.unfold(1, width, self.advance).flatten(0, 1)
        return windows.movedim(-1, 1)

    def gathered(self, x: Tensor) -> Tensor:
        """Add up by key what blocks have, ``[n, W, D]``; returns ``[s m, D]``."""
        advance, (stretches, length) = self.advance, self.keys.shape
        if advance == x.shape[1]:
            return x.flatten(0, 1)
        blocks = x.unflatten(0, (stretches, -1))  # [s, n / s, W, D]
        whole = advance * blocks.shape[1]
        total = x.new_empty(stretches, length, x.shape[2])
        total[:, whole:] = 0
        for begin in range(0, x.shape[1], advance):
            room = total[:, begin : begin + whole].unflatten(1, (-1, advance))
            part = blocks[:, :, begin : begin + advance]
            room.add_(part) if begin else room.copy_(part)
        return total.flatten(0, 1)


class Plan(NamedTuple):
    """All that is to be attended to."""

    slots: int  # places in the blocks of all steps
    turns: int
    steps: Iterator[Step]


class PairBias(NamedTuple):
    """A bias of pairs of queries and keys, read where they meet."""

    values: Tensor  # of all pairs that differ, in one line
    queries: Tensor  # [M]: where those of a query's row begin
    keys: Tensor  # [S]: how far behind it a key's row has its own

    def places(self, step: Step) -> Tensor:
        """Return which values the pairs of a step have, ``[n, W, C]``."""
        keys = step.windows(self.keys.take(step.keys.flatten()))
        return keys[:, :, None] + self.queries.take(step.queries)[:, None]


class Sums(NamedTuple):
    """What attending gives."""

    out: Tensor  # [M, E]
    lse: Tensor  # [M, 1], log of the sum of weights


def attend(q: Tensor, k: Tensor, v: Tensor, plan: Plan, bias: PairBias | None = None) -> Sums:
    """Attend to the keys of all steps.

    Every place in a block has a share of the result; those of a query are added up in the end.

    Args:
        q: Queries, scaled, ``[M, D]``; the last one fills up blocks and has no result.
        k: Keys, ``[S, D]``.
        v: Values, ``[S, E]``.
        plan: Who sees whom.
        bias: Added to the scores.

    Returns:
        Output and log of the sum of weights, in the dtype of the inputs.
    """
    shares = room(v, (plan.slots + 1, v.shape[1]))
    tops, sums = v.new_empty(2, plan.slots + 1)
    shares[0], tops[0], sums[0] = 0, -math.inf, 1  # of a turn in which a query has no place
    slots = torch.arange(plan.slots + 1, device=q.device)
    places = slots.new_zeros(plan.turns, len(q))
    begin = 1
    for step in plan.steps:
        rows, shape = step.queries.flatten(), step.queries.shape
        here = slice(begin, begin + len(rows))
        beside, its_bias = step.windows(_rows(k, step.keys)), _values(bias, step)
        scores = _scores(_rows(q, rows, shape), beside, step.away, its_bias)
        top = torch.amax(scores, 1, keepdim=True, out=tops[here].view(shape[0], 1, -1))
        weights = scores.sub_(top).exp2_()
        torch.sum(weights, 1, out=sums[here].view(shape))
        values = step.windows(_rows(v, step.keys))
        torch.bmm(weights.mT, values, out=shares[here].view(*shape, -1))
        places[step.turn].index_copy_(0, rows, slots[here])
        begin = here.stop
    logs = (sums.log2_() + tops).take(places)
    most = logs.amax(0)
    lse = logs.sub_(most).exp2_().sum(0).log2_().add_(most).clamp_min_(NOTHING)
    weights = tops.take(places).sub_(lse).exp2_().t().contiguous()
    out = F.embedding_bag(places.t().contiguous(), shares, per_sample_weights=weights, mode="sum")
    return Sums(out, lse[:, None])


def attend_backward(
    d_out: Tensor,
    delta: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    steps: Iterable[Step],
    bias: PairBias | None = None,
    d_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v.

    Args:
        d_out: The gradient of the output, ``[M, E]``.
        delta: Its product with the output, ``[M, 1]``.
        lse: What :func:`attend` gave, ``[M, 1]``.
        q: As :func:`attend` took it, and the rest with it.
        k: Keys.
        v: Values.
        steps: Who sees whom.
        bias: Added to the scores.
        d_bias: Where the gradient of its values is added up, if it is wanted.
    """
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for step in steps:
        rows, keys, shape = step.queries.flatten(), step.keys.flatten(), step.queries.shape
        queries, beside = _rows(q, rows, shape), step.windows(_rows(k, keys))
        weights = _scores(queries, beside, step.away, _values(bias, step))
        weights.sub_(_rows(lse, rows, shape).mT).exp2_()
        d_rows = _rows(d_out, rows, shape)
        dv.index_add_(0, keys, step.gathered(torch.bmm(weights, d_rows)))
        d_scores = torch.bmm(step.windows(_rows(v, keys)), d_rows.mT)
        d_scores.sub_(_rows(delta, rows, shape).mT).mul_(weights)
        dq.index_add_(0, rows, torch.bmm(d_scores.mT, beside).flatten(0, 1))
        dk.index_add_(0, keys, step.gathered(torch.bmm(d_scores, queries)))
        if bias is not None and d_bias is not None:
            d_bias.index_add_(0, bias.places(step).flatten(), d_scores.flatten())
    return dq, dk, dv


def stretches(heads: int, blocks: int, most: int) -> Iterator[tuple[slice, slice]]:
    """Cut the blocks of all heads into parts of about ``most``: whole heads, or parts of one."""
    some = max(1, most // blocks)
    for head in range(0, heads, some):
        for begin in range(0, blocks, max(most, 1)):
            yield (
                slice(head, min(head + some, heads)),
                slice(begin, min(begin + max(most, 1), blocks)),
            )


def _values(bias: PairBias | None, step: Step) -> Tensor | None:
    return None if bias is None else bias.values.take(bias.places(step))


def _scores(q: Tensor, k: Tensor, away: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``[n, W, C]`` for keys ``[n, W, D]``, in logs of 2; made where ``away`` is."""
    scores = away.to(q.dtype).baddbmm_(k, q.mT, beta=-AWAY, alpha=LOG2_E)
    return scores if bias is None else scores.add_(bias, alpha=LOG2_E)


def _rows(x: Tensor, rows: Tensor, shape: torch.Size | None = None) -> Tensor:
    """Return rows of x, ``[rows, D]`` or ``[*shape, D]``."""
    found = x.index_select(0, rows if rows.ndim == 1 else rows.flatten())
    return found if shape is None else found.view(*shape, -1)
