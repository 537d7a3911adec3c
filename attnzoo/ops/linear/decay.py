r"""Decay inside one chunk of linear attention: exact for any gate, however strong.

Query i sees key j with weight ``exp(b_i - b_j)``, where b is the cumulative sum of the log decays.

- *Scalar* decay (one per token): for float32 results, the differences are computed in float64,
  which is cheap as there are few, and then rounded. For float64 results, the log decays between two
  tokens are summed instead. Nothing overflows and nothing cancels.
- Decay *per channel* (of the keys): every pair has one weight per channel, and the split into
  ``exp(b_i) exp(-b_j)`` overflows. Instead, blocks of 1, 2, 4 ... tokens are joined in pairs. The
  scores between the second block's queries and the first block's keys are one product of queries
  decayed from the border and keys decayed to it; then each block is decayed by the other's total.
  All factors are at most 1, every gate takes one exponential, and half of the products of a dense
  form are computed. The backward pass runs the same joins in reverse and needs no difference and
  no quotient, not even for the gradients of the log decays.

Other letters: N batch times key heads, M pairs of blocks of s tokens. Queries are folded to ``[N, C
* G, D]``, token by token.
"""

from __future__ import annotations

from math import exp
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

LOWEST_LOG_DECAY = -1e4  # its exponential is 0 in every dtype; lower log decays are clamped to it
LOWEST_NORMAL = {torch.float32: -87.0, torch.float64: -708.0}  # logarithms of normal numbers


def exp_flush_denormals(x: Tensor) -> Tensor:
    """Return exponentials, computed in place, with denormal results flushed to zero.

    Operations on denormal numbers are several times slower.
    """
    lowest = LOWEST_NORMAL[x.dtype]
    return torch.threshold_(x.clamp_(min=lowest).exp_(), 1.25 * exp(lowest), 0.0)


# -- scalar ----------------------------------------------------------------------------------------


class ScalarDecays(NamedTuple):
    """Scalar decays inside a chunk, in the dtype of the sums."""

    log: Tensor  # log decays, float64, [N, C, 1]
    sums: Tensor  # their cumulative sums
    q: Tensor  # from the chunk's start through the token, [N, C, 1]
    k: Tensor  # after the token to the chunk's end, [N, C, 1]
    state: Tensor  # over the chunk, [N, 1, 1]


def scalar_decays(log_decay: Tensor, dtype: torch.dtype) -> ScalarDecays:
    """Return the decays of log decays ``[N, C, 1]``."""
    log = log_decay.double().clamp(min=LOWEST_LOG_DECAY)
    sums = log.cumsum(1)
    if dtype == torch.float64:
        after = pad(log[:, 1:].flip(1).cumsum(1).flip(1), (0, 0, 0, 1))
    else:
        after = sums[:, -1:] - sums
    q = sums.exp().to(dtype)
    return ScalarDecays(log, sums, q, after.exp().to(dtype), q[:, -1:])


def scalar_pairs(decays: ScalarDecays, dtype: torch.dtype) -> Tensor:
    """Return the weight of key j for query i, ``[N, C, C]``; future keys get weight 0."""
    if dtype == torch.float64:
        between = decays.log.expand(-1, -1, decays.log.shape[1]).tril(-1).cumsum_(1)
    else:
        between = (decays.sums - decays.sums.mT).to(dtype)
    return exp_flush_denormals(between.clamp_(max=0)).tril_()


def scalar_backward(pairs: Tensor, q: Tensor, k: Tensor, state: Tensor) -> Tensor:
    """Return the gradients of the log decays, ``[N, C, 1]``.

    A log decay acts between a query and the keys before it, between a query and the incoming state,
    between a key and the outgoing state, and between the two states. Each contributes the decayed
    value times its gradient.

    Args:
        pairs: Score times gradient for query i and key j, ``[N, C, C]``; future keys are ignored.
        q: Decayed query times gradient, summed over channels, ``[N, C, 1]``.
        k: Decayed key times gradient, summed over channels, ``[N, C, 1]``.
        state: Decayed state times gradient, summed over channels, ``[N, 1, 1]``.
    """
    up_to = pairs.cumsum(-1).tril_(-1).sum(-2)  # at j: keys up to j, queries after j
    between = pad(up_to[:, :-1], (1, 0)).unsqueeze(-1)
    from_state = q.flip(1).cumsum(1).flip(1)
    to_state = pad(k[:, :-1].cumsum(1), (0, 0, 1, 0))
    return between.add_(from_state).add_(to_state).add_(state)


# -- per channel -----------------------------------------------------------------------------------


class Join(NamedTuple):
    """M pairs of blocks of s tokens, before each pair becomes one block."""

    queries: Tensor  # of the second block, decayed from the border, [M, s * G, D]
    keys: Tensor  # of the first block, decayed to the border, [M, s, D]
    first: Tensor  # decay over the first block, [M, 1, D]
    second: Tensor  # decay over the second block, [M, 1, D]


def channel_scores(
    q: Tensor, k: Tensor, gates: Tensor, joins: list[Join] | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    r"""Compute :math:`\sum_d q_{id} k_{jd} \exp(b_{id} - b_{jd})`.

    Args:
        q: ``[N, C * G, D]``; C is a power of two.
        k: ``[N, C, D]``.
        gates: Exponentials of the log decays, ``[N, C, D]``.
        joins: A list to append the tensors to that the backward pass needs, or ``None``.

    Returns:
        The scores ``[N, C * G, C]``, 0 for future keys; q decayed from the chunk's start; k decayed
        to its end; and the decay of the state over the chunk, ``[N, 1, D]``.
    """
    n, length, d = k.shape
    groups = q.shape[1] // length
    q_per_token = q.view(n, length, groups, d)
    q_decayed = (q_per_token * gates.unsqueeze(2)).view(n, length * groups, d)
    k_decayed = k.clone(memory_format=torch.contiguous_format)
    scores = q.new_zeros(n, length * groups, length)
    _diagonal(scores).copy_((q_per_token * k.unsqueeze(2)).sum(-1).mT)
    total, size = gates, 1
    while size < length:
        _, queries = q_decayed.view(-1, 2, size * groups, d).unbind(1)
        keys, _ = k_decayed.view(-1, 2, size, d).unbind(1)
        first, second = total.view(-1, 2, 1, d).unbind(1)
        block = _between(scores, size, groups)
        block.copy_(torch.bmm(queries, keys.mT).view(block.shape))
        if joins is not None:
            joins.append(Join(queries.clone(), keys.clone(), first, second))
        queries.mul_(first)
        keys.mul_(second)
        total, size = first * second, 2 * size
    return scores, q_decayed, k_decayed, total.view(n, 1, d)


def channel_keys(k: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
    """Return only the last two of :func:`channel_scores`: decayed keys and the state's decay."""
    n, length, d = k.shape
    k_decayed, total, size = k.clone(memory_format=torch.contiguous_format), gates, 1
    while size < length:
        first, second = total.view(-1, 2, 1, d).unbind(1)
        k_decayed.view(-1, 2, size, d).unbind(1)[0].mul_(second)
        total, size = first * second, 2 * size
    return k_decayed, total.view(n, 1, d)


def channel_backward(
    q: Tensor,
    k: Tensor,
    gates: Tensor,
    joins: list[Join],
    d_scores: Tensor,
    d_q_decayed: Tensor,
    d_k_decayed: Tensor,
    d_log_state: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of q, k and the log decays of :func:`channel_scores`.

    Args:
        q: As in :func:`channel_scores`, like ``k``, ``gates`` and ``joins``.
        k: See q.
        gates: See q.
        joins: See q; emptied.
        d_scores: ``[N, C * G, C]``; future keys are ignored.
        d_q_decayed: ``[N, C * G, D]``, overwritten.
        d_k_decayed: ``[N, C, D]``, overwritten.
        d_log_state: Decay of the state times its gradient, ``[N, 1, D]``; ``None``: no log decays.
    """
    n, length, d = k.shape
    groups = q.shape[1] // length
    while joins:
        queries, keys, first, second = joins.pop()
        size = keys.shape[1]
        _, d_queries = d_q_decayed.view(-1, 2, size * groups, d).unbind(1)
        d_keys, _ = d_k_decayed.view(-1, 2, size, d).unbind(1)
        d_queries.mul_(first)
        d_keys.mul_(second)
        if d_log_state is not None:  # a block's total decays its own sum and the other block's part
            by_first, by_second = (queries * d_queries).sum(1), (keys * d_keys).sum(1)
            d_log_state = (torch.stack([by_first, by_second], 1) + d_log_state).view(-1, 1, d)
        block = _between(d_scores, size, groups).reshape(-1, size * groups, size)
        d_queries.add_(torch.bmm(block, keys))
        d_keys.add_(torch.bmm(block.mT, queries))
    per_token = (n, length, groups, d)
    dq = d_q_decayed.view(per_token) * gates.unsqueeze(2)
    d_log = None
    if d_log_state is not None:
        d_log = torch.sum(dq * q.view(per_token), 2).add_(d_log_state.view(n, length, d))
    diagonal = _diagonal(d_scores).mT.unsqueeze(-1)  # [N, C, G, 1]
    dk = d_k_decayed.add_((diagonal * q.view(per_token)).sum(2))
    return dq.addcmul_(diagonal, k.unsqueeze(2)).view(q.shape), dk, d_log


def _diagonal(scores: Tensor) -> Tensor:
    """View the scores of each token's queries with its own key, ``[N, G, C]``."""
    n, rows, length = scores.shape
    return scores.view(n, length, rows // length, length).diagonal(dim1=1, dim2=3)


def _between(scores: Tensor, size: int, groups: int) -> Tensor:
    """View the scores of second blocks' queries and first blocks' keys, ``[N, C/2s, s*G, s]``."""
    n, rows, length = scores.shape
    return scores.as_strided(
        (n, length // (2 * size), size * groups, size),
        (rows * length, 2 * size * (groups * length + 1), length, 1),
        scores.storage_offset() + size * groups * length,
    )
