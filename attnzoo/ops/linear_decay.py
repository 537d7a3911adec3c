r"""Decay inside one chunk of linear attention: exact for any gate, however strong.

Row i reads key j with weight ``exp(b_i - b_j)``, where b sums the log decays up to a token.

- *scalar* (one decay per token): the differences are taken in float64, cheap as they are few, and
  then rounded: nothing overflows, nothing cancels.
- *vector* (one per key channel): every pair has its own weight in each channel, and splitting it
  into ``exp(b_i) exp(-b_j)`` overflows. So blocks of 1, 2, 4 ... tokens are joined in pairs. What
  the second block reads in the first is one product of rows decayed from the border and keys
  decayed to it; then each is decayed by the other's total. All factors are at most one, one
  exponential is taken per gate, and half of the products of a dense form are made. Going back over
  the same joins gives the gradients, of the log decays too, without a difference or a quotient.

Letters: N batch times key heads, C tokens in the chunk, G query heads per key head, D key size,
M pairs of blocks of s tokens. Query rows are folded as ``[N, C * G, D]``, token by token.
"""

from __future__ import annotations

from math import exp
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

FORGOTTEN = -1e4  # the exponential of this is zero in every type; what is below stands at it
FAINTEST = {torch.float32: -87.0, torch.float64: -708.0}  # the exponential is still a normal number


def fade(x: Tensor) -> Tensor:
    """Take exponentials in place; those too faint to be normal numbers are zero.

    Denormal numbers would make every operation on them several times slower.
    """
    faintest = FAINTEST[x.dtype]
    return torch.threshold_(x.clamp_(min=faintest).exp_(), 1.25 * exp(faintest), 0.0)


# -- scalar ----------------------------------------------------------------------------------------


class Spans(NamedTuple):
    """Decay between a token and the chunk's borders, in the type to accumulate in."""

    sums: Tensor  # log decays summed from the chunk's start, float64, [N, C, 1]
    reads: Tensor  # from the start through the token, [N, C, 1]
    writes: Tensor  # past the token to the end, [N, C, 1]
    carry: Tensor  # from start to end, [N, 1, 1]


def scalar_spans(log_decay: Tensor, dtype: torch.dtype) -> Spans:
    """Sum up log decays ``[N, C, 1]``."""
    sums = log_decay.double().clamp(min=FORGOTTEN).cumsum(1)
    reads, last = sums.exp().to(dtype), sums[:, -1:]
    return Spans(sums, reads, (last - sums).exp().to(dtype), reads[:, -1:])


def scalar_pairs(sums: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight of key j for row i, ``[N, C, C]``, zero ahead; ``sums`` as in Spans."""
    differences = (sums - sums.mT).to(dtype)
    return fade(differences.clamp_(max=0)).tril_()


def scalar_backward(products: Tensor, read: Tensor, written: Tensor, kept: Tensor) -> Tensor:
    """Return the gradients of the log decays, ``[N, C, 1]``.

    A log decay lies between a row and the keys before it, between a row and the carried state,
    between a key and the state after the chunk, and between the two states; each of these gives it
    value times gradient of what it decays.

    Args:
        products: For row i and key j, ``[N, C, C]``; those ahead are ignored.
        read: For each row's reading of the carried state, ``[N, C, 1]``.
        written: For each key's part in the next state, ``[N, C, 1]``.
        kept: For the carried state's part in the next one, ``[N, 1, 1]``.
    """
    up_to = products.cumsum(-1).tril_(-1).sum(-2)  # at j: keys up to j, rows after j
    between = pad(up_to[:, :-1], (1, 0)).unsqueeze(-1)
    from_here = read.flip(1).cumsum(1).flip(1)
    before = pad(written[:, :-1].cumsum(1), (0, 0, 1, 0))
    return between.add_(from_here).add_(before).add_(kept)


# -- vector ----------------------------------------------------------------------------------------


class Join(NamedTuple):
    """Two blocks of s tokens each, about to become one; of M pairs at once."""

    rows: Tensor  # of the second, decayed from the border, [M, s * G, D]
    keys: Tensor  # of the first, decayed to the border, [M, s, D]
    first: Tensor  # decay over the first block, [M, 1, D]
    second: Tensor  # decay over the second block, [M, 1, D]


class Joined(NamedTuple):
    """The chunk as one block."""

    scores: Tensor  # [N, C * G, C], zero ahead
    reading: Tensor  # rows, decayed from the chunk's start, [N, C * G, D]
    writing: Tensor  # keys, decayed to the chunk's end, [N, C, D]
    carry: Tensor  # decay over the chunk, [N, 1, D]


def vector_scores(q: Tensor, k: Tensor, gates: Tensor, joins: list[Join] | None = None) -> Joined:
    r"""Compute :math:`\sum_d q_{id} k_{jd} \exp(b_{id} - b_{jd})`.

    Args:
        q: ``[N, C * G, D]``; C is a power of two.
        k: ``[N, C, D]``.
        gates: Exponentials of the log decays, ``[N, C, D]``.
        joins: Filled with what the backward pass needs, if given.
    """
    n, length, d = k.shape
    groups = q.shape[1] // length
    q_per_token = q.view(n, length, groups, d)
    reading = (q_per_token * gates.unsqueeze(2)).view(n, length * groups, d)
    writing = k.clone(memory_format=torch.contiguous_format)
    scores = q.new_zeros(n, length * groups, length)
    _diagonal(scores).copy_((q_per_token * k.unsqueeze(2)).sum(-1).mT)
    total, size = gates, 1
    while size < length:
        _, rows = reading.view(-1, 2, size * groups, d).unbind(1)
        keys, _ = writing.view(-1, 2, size, d).unbind(1)
        first, second = total.view(-1, 2, 1, d).unbind(1)
        block = _between(scores, size, groups)
        block.copy_(torch.bmm(rows, keys.mT).view(block.shape))
        if joins is not None:
            joins.append(Join(rows.clone(), keys.clone(), first, second))
        rows.mul_(first)
        keys.mul_(second)
        total, size = first * second, 2 * size
    return Joined(scores, reading, writing, total.view(n, 1, d))


def vector_writing(k: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
    """Return only ``writing`` and ``carry`` of :func:`vector_scores`."""
    n, length, d = k.shape
    writing, total, size = k.clone(memory_format=torch.contiguous_format), gates, 1
    while size < length:
        first, second = total.view(-1, 2, 1, d).unbind(1)
        writing.view(-1, 2, size, d).unbind(1)[0].mul_(second)
        total, size = first * second, 2 * size
    return writing, total.view(n, 1, d)


def vector_backward(
    q: Tensor,
    k: Tensor,
    gates: Tensor,
    joins: list[Join],
    d_scores: Tensor,
    d_reading: Tensor,
    d_writing: Tensor,
    kept: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of :func:`vector_scores` for q, k and the log decays.

    Args:
        q: As in :func:`vector_scores`, like ``k``, ``gates`` and ``joins``.
        k: See q.
        gates: See q.
        joins: See q; emptied.
        d_scores: ``[N, C * G, C]``; what is ahead is ignored.
        d_reading: ``[N, C * G, D]``, overwritten.
        d_writing: ``[N, C, D]``, overwritten.
        kept: ``carry`` times its gradient, ``[N, 1, D]``, or ``None`` if no log decay wants one.
    """
    n, length, d = k.shape
    groups = q.shape[1] // length
    while joins:
        rows, keys, first, second = joins.pop()
        size = keys.shape[1]
        _, d_rows = d_reading.view(-1, 2, size * groups, d).unbind(1)
        d_keys, _ = d_writing.view(-1, 2, size, d).unbind(1)
        d_rows.mul_(first)
        d_keys.mul_(second)
        if kept is not None:  # each block's total has decayed itself, and the other block's part
            by_first, by_second = (rows * d_rows).sum(1), (keys * d_keys).sum(1)
            kept = (torch.stack([by_first, by_second], 1) + kept).view(-1, 1, d)
        block = _between(d_scores, size, groups).reshape(-1, size * groups, size)
        d_rows.add_(torch.bmm(block, keys))
        d_keys.add_(torch.bmm(block.mT, rows))
    per_token = (n, length, groups, d)
    dq = d_reading.view(per_token) * gates.unsqueeze(2)
    d_log = None
    if kept is not None:
        d_log = torch.sum(dq * q.view(per_token), 2).add_(kept.view(n, length, d))
    own = _diagonal(d_scores).mT.unsqueeze(-1)  # [N, C, G, 1]
    dk = d_writing.add_((own * q.view(per_token)).sum(2))
    return dq.addcmul_(own, k.unsqueeze(2)).view(q.shape), dk, d_log


def _diagonal(scores: Tensor) -> Tensor:
    """View each token's scores with its own key, ``[N, G, C]``."""
    n, rows, length = scores.shape
    return scores.view(n, length, rows // length, length).diagonal(dim1=1, dim2=3)


def _between(scores: Tensor, size: int, groups: int) -> Tensor:
    """View what each second block of s tokens reads in the first, ``[N, C / 2s, s * G, s]``."""
    n, rows, length = scores.shape
    return scores.as_strided(
        (n, length // (2 * size), size * groups, size),
        (rows * length, 2 * size * (groups * length + 1), length, 1),
        scores.storage_offset() + size * groups * length,
    )
