r"""Softmax over scattered sets of keys, block by block, for both forms of Reformer's attention.

A step is a batch of small dense problems: blocks of queries, each beside a stretch of keys that may
hold more than the queries see; penalties take the rest away. A query meets its keys in several
steps, whose shares are merged under one denominator, :math:`o = \sum_r e^{l_r - l} o_r` with
:math:`l = \log \sum_r e^{l_r}` and :math:`l_r` the log of the sum of weights in step r. The
backward pass makes the scores anew from the inputs and :math:`l`, so nothing but those is kept.

Time is that of the products, 4 C W D flops for a block; memory beyond results that of one step.
Source: arXiv:2001.04451 (rounds of hashing), arXiv:2205.14135 (the backward pass).
Letters: M queries of all heads at hand, S keys of all heads at hand, n blocks of a step, C queries
of a block, W keys beside them, D key size, E value size.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

AWAY = 1e9  # what a penalty of 1 takes from a score
NOTHING = -1e8  # below any log of a sum of weights that somebody sees; finite, so that 0 * e^x is 0


class Step(NamedTuple):
    """Blocks of queries and the keys beside them; no query but the last row stands in it twice."""

    queries: Tensor  # [n, C], rows of q; the last row of q stands for none
    keys: Tensor  # [n, W], rows of k and v
    penalty: Tensor  # [n, C, W], >= 0: in units of AWAY


class Sums(NamedTuple):
    """What attending gives."""

    out: Tensor  # [M, E]
    lse: Tensor  # [M], log of the sum of weights


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
        weights, own = _weights(_gather(q, step.queries), _gather(k, step.keys), step.penalty)
        share = torch.bmm(weights, _gather(v, step.keys)).flatten(0, 1)
        own = own.view(-1, 1)
        before = lse.index_select(0, rows)
        merged = out.index_select(0, rows).lerp_(share, torch.sigmoid(own - before))
        out.index_copy_(0, rows, merged)
        lse.index_copy_(0, rows, torch.logaddexp(before, own))
    return Sums(out, lse[:, 0])


def attend_backward(
    d_out: Tensor, sums: Sums, q: Tensor, k: Tensor, v: Tensor, steps: Iterable[Step]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, from that of the output, ``[M, E]``."""
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    delta, lse = (d_out * sums.out).sum(-1, keepdim=True), sums.lse[:, None]
    for step in steps:
        rows, keys = step.queries.flatten(), step.keys.flatten()
        queries, beside = _gather(q, step.queries), _gather(k, step.keys)
        weights, own = _weights(queries, beside, step.penalty)
        share = own.sub_(_gather(lse, step.queries)).exp_()  # of the step in all weights
        d_rows = _gather(d_out, step.queries).mul_(share)
        dv.index_add_(0, keys, torch.bmm(weights.transpose(1, 2), d_rows).flatten(0, 1))
        d_scores = torch.bmm(d_rows, _gather(v, step.keys).transpose(1, 2))
        d_scores.sub_(share.mul_(_gather(delta, step.queries))).mul_(weights)
        dq.index_add_(0, rows, torch.bmm(d_scores, beside).flatten(0, 1))
        dk.index_add_(0, keys, torch.bmm(d_scores.transpose(1, 2), queries).flatten(0, 1))
    return dq, dk, dv


def _weights(q: Tensor, k: Tensor, penalty: Tensor) -> tuple[Tensor, Tensor]:
    """Return weights that sum to 1 in a step, ``[n, C, W]``, and the log of their sum."""
    scores = torch.bmm(q, k.transpose(1, 2)).sub_(penalty, alpha=AWAY)
    top = scores.amax(-1, keepdim=True)
    weights = torch.softmax(scores, -1)  # its largest is e^(top - log of the sum)
    return weights, (top - weights.amax(-1, keepdim=True).log_()).clamp_min_(NOTHING)


def _gather(x: Tensor, rows: Tensor) -> Tensor:
    return x.index_select(0, rows.flatten()).view(*rows.shape, -1)
