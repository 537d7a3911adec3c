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
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

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
    bias: Tensor  # [n, C, W]: 0, or far below any score where a key is not seen; taken over

    @property
    def advance(self) -> int:
        """Return by how many keys the window of a block lies behind that of the one before."""
        (stretches, length), (blocks, _, width) = self.keys.shape, self.bias.shape
        others = blocks // stretches - 1
        return (length - width) // others if others else width

    def windows(self, x: Tensor) -> Tensor:
        """View what belongs to the keys, ``[s m, ...]``, as each block has it: ``[n, ..., W]``."""
        stretches = x.unflatten(0, self.keys.shape)
        windows: Tensor = stretches.unfold(1, self.bias.shape[2], self.advance)
        return windows.flatten(0, 1)

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


class Sums(NamedTuple):
    """What attending gives."""

    out: Tensor  # [M, E]
    lse: Tensor  # [M, 1], log of the sum of weights


def attend(q: Tensor, k: Tensor, v: Tensor, steps: Iterable[Step]) -> Sums:
    """Attend to the keys of all steps.

    Args:
        q: Queries, scaled, ``[M, D]``; the last one fills up blocks and has no result.
        k: Keys, ``[S, D]``.
        v: Values, ``[S, E]``.
        steps: Who sees whom.

    Returns:
        Output and log of the sum of weights, in the dtype of the inputs.
    """
    out, lse = v.new_zeros(len(q), v.shape[1]), v.new_full((len(q), 1), NOTHING)
    for step in steps:
        rows = step.queries.flatten()
        scores = _scores(_gather(q, step.queries), step.windows(_rows(k, step.keys)), step.bias)
        top = scores.amax(-1, keepdim=True)
        weights = scores.sub_(top).exp2_()
        total = weights.sum(-1, keepdim=True)
        share = torch.bmm(weights, step.windows(_rows(v, step.keys)).mT).div_(total).flatten(0, 1)
        own = total.log2_().add_(top).clamp_min_(NOTHING).view(-1, 1)
        before = lse.index_select(0, rows)
        both = torch.logaddexp2(before, own)
        merged = out.index_select(0, rows).lerp_(share, own.sub_(both).exp2_())
        out.index_copy_(0, rows, merged)
        lse.index_copy_(0, rows, both)
    return Sums(out, lse)


def attend_backward(
    d_out: Tensor,
    delta: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    steps: Iterable[Step],
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
    """
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for step in steps:
        rows, keys = step.queries.flatten(), step.keys.flatten()
        queries, beside = _gather(q, step.queries), step.windows(_rows(k, step.keys))
        weights = _scores(queries, beside, step.bias).sub_(_gather(lse, step.queries)).exp2_()
        d_rows = _gather(d_out, step.queries)
        dv.index_add_(0, keys, step.gathered(torch.bmm(weights.mT, d_rows)))
        d_scores = torch.bmm(d_rows, step.windows(_rows(v, step.keys)))
        d_scores.sub_(_gather(delta, step.queries)).mul_(weights)
        dq.index_add_(0, rows, torch.bmm(d_scores, beside.mT).flatten(0, 1))
        dk.index_add_(0, keys, step.gathered(torch.bmm(d_scores.mT, queries)))
    return dq, dk, dv


def _scores(q: Tensor, k: Tensor, bias: Tensor) -> Tensor:
    """Return ``[n, C, W]`` for keys ``[n, D, W]``, in logs of 2; made where the bias is."""
    return bias.to(q.dtype).baddbmm_(q, k, alpha=LOG2_E)


def _rows(x: Tensor, rows: Tensor) -> Tensor:
    return x.index_select(0, rows.flatten())


def _gather(x: Tensor, rows: Tensor) -> Tensor:
    return _rows(x, rows).view(*rows.shape, -1)
