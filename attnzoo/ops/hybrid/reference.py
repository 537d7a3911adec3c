r"""The oracle of the window hybrid: the formula of ``api.py`` over all pairs, in plain operations.

It shares no code with the implementations that tests compare with it, and autograd differentiates
it. Quadratic in T, with a decay per feature O(T^2 F) in memory too.

Other letters: R rows, g = H / Hkv, S stored and new keys, W window, G first tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnzoo.contract.states import LinearState
from attnzoo.ops.hybrid.parts import HybridInputs

LOWEST_LOG_DECAY = -1e4  # its exponential is 0; sums of -inf would give NaN
LOWEST_SCORE = -1e30  # of a key that a query does not see; finite, so that gradients are
LEAST_TOTAL = 1e-30  # a smaller sum of linear weights counts as 0


def run_reference(x: HybridInputs) -> tuple[Tensor, LinearState | None]:
    """Compute the output, and the linear sums after the last token, whose values end in ones."""
    rows = x.in_rows()
    dtype = torch.promote_types(x.v.dtype, torch.float32)
    near, lse = _window(rows, dtype)
    values, total, counts, last = _causal(rows, dtype) if x.causal else _bidirectional(rows, dtype)
    logit, branch = rows.branch.log_weight.to(dtype), rows.branch
    if branch.mean:
        logit = logit - counts.clamp(min=1).log()
    is_far = total > LEAST_TOTAL
    total = torch.where(is_far, total, 1.0)
    base = torch.zeros_like(lse) if branch.relative else lse
    far = torch.where(is_far, logit + total.log(), LOWEST_SCORE)
    share = torch.sigmoid(far - base)  # of the keys outside the window
    out = (1 - share) * near + share * values / total
    return (out if x.sequences is None else x.sequences.to_row(out, x.q.shape[2])), last


def _window(x: HybridInputs, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return softmax over the keys of the window and the first keys, and its log-sum-exp."""
    k, v, new = x.k.to(dtype), x.v.to(dtype), torch.arange(x.q.shape[2], device=x.q.device)
    rank = new.expand(k.shape[0], -1)  # of the queries in their sequences
    key_rank = rank
    if x.state is not None:
        k, v = torch.cat([x.state.k.to(dtype), k], 2), torch.cat([x.state.v.to(dtype), v], 2)
        seen = x.state.seen[:, None]
        first = torch.arange(x.num_sinks, device=new.device).expand(k.shape[0], -1)
        latest = seen + torch.arange(-x.window, 0, device=new.device)
        rank = new + seen
        # places without a key, and first keys that the window repeats, get the rank -1
        first, latest = first.where(first < seen, -1), latest.where(latest >= x.num_sinks, -1)
        key_rank = torch.cat([first, latest, rank], 1)
    distance = rank[:, :, None] - key_rank[:, None]
    if x.causal:
        is_near = (distance < x.window) | (key_rank < x.num_sinks)[:, None]
        is_near = is_near & (distance >= 0) & (key_rank >= 0)[:, None]
    else:
        is_near = distance.abs() <= x.window
        if x.lengths is not None:
            is_near = is_near & (key_rank < x.lengths[:, None])[:, None]
    q = x.q.to(dtype).unflatten(1, (k.shape[1], -1)) * x.scale
    scores = torch.einsum("rhgtd,rhsd->rhgts", q, k)
    scores = scores.masked_fill(~is_near[:, None, None], LOWEST_SCORE)
    lse = scores.logsumexp(-1, keepdim=True)
    out = torch.einsum("rhgts,rhse->rhgte", (scores - lse).exp(), v)
    return out.flatten(1, 2), lse.flatten(1, 2)


def _causal(
    x: HybridInputs, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, LinearState | None]:
    """Return the linear sums of values and of weights, the number of keys, and the last sums."""
    tokens, size = x.q.shape[2], x.window
    token = torch.arange(tokens, device=x.q.device)
    k, v = x.branch.k.to(dtype), x.v.to(dtype)
    missing = min(size, tokens)  # keys before the first token that a token counts
    old_k, old_v = (x.new_zeros(*x.shape[:2], missing, x.shape[3]) for x in (k, v))
    count = token.expand(k.shape[0], -1) + 1 - size - x.num_sinks
    if x.state is not None:
        old_k, old_v = x.state.features.to(dtype), x.state.v[:, :, x.num_sinks :].to(dtype)
        count = count + x.state.seen[:, None]
    # the key that leaves the window at each token, if it is not a first key and the token exists
    is_counted = count >= 1 if x.lengths is None else (count >= 1) & (token < x.lengths[:, None])
    k = torch.cat([old_k, k], 2)[:, :, :tokens] * is_counted[:, None, :, None]
    v = torch.cat([old_v, v], 2)[:, :, :tokens]
    v = torch.cat([v, torch.ones_like(v[..., :1])], 3)
    between, reads = _decays(x.branch.log_decay, k)
    q = x.branch.q.to(dtype).unflatten(1, (k.shape[1], -1))
    if between.shape[4] == 1:
        weights = torch.einsum("rhgtf,rhsf->rhgts", q, k) * between.squeeze(4).mT.unsqueeze(2)
    else:
        weights = torch.einsum("rhgtf,rhsf,rhstf->rhgts", q, k, between)
    sums = torch.einsum("rhgts,rhse->rhgte", weights, v)
    last = None
    if tokens:
        last = torch.einsum("rhsf,rhse->rhfe", k * between[:, :, :, -1], v)
    if x.state is not None:
        kv = x.state.kv.to(dtype)
        sums = sums + torch.einsum("rhgtf,rhfe->rhgte", q * reads.unsqueeze(2), kv)
        last = kv if last is None else last + kv * reads[:, :, -1, :, None]
    sums = sums.flatten(1, 2)
    if last is None:
        last = sums.new_zeros(*k.shape[:2], k.shape[3], v.shape[3])
    state = LinearState(last, last[..., -1])
    return sums[..., :-1], sums[..., -1:], count[:, None, :, None].to(dtype), state


def _decays(log_decay: Tensor | None, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return the decays from keys to later queries and from the first state to each query.

    They are ``[R, Hkv, S, T, 1 or F]``, 0 for earlier queries, and ``[R, Hkv, T, 1 or F]``.
    """
    log_decay = k.new_zeros(k.shape[1]) if log_decay is None else log_decay
    if log_decay.dim() == 1:
        log_decay = log_decay[None, :, None]
    if log_decay.dim() == 3:
        log_decay = log_decay.unsqueeze(3)
    log_decay = log_decay.double().clamp(min=LOWEST_LOG_DECAY).expand(*k.shape[:3], -1)
    token = torch.arange(k.shape[2], device=k.device)
    key, query = token[:, None, None], token[:, None]
    # sums of the tokens after each key: differences of longer sums would cancel
    between = torch.where(query > key, log_decay.unsqueeze(2), 0.0).cumsum(3).exp()
    return (between * (query >= key)).to(k.dtype), log_decay.cumsum(2).exp().to(k.dtype)


def _bidirectional(
    x: HybridInputs, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, LinearState | None]:
    """Return the linear sums of values and of weights, and the number of keys."""
    token = torch.arange(x.q.shape[2], device=x.q.device)
    is_far = ((token[:, None] - token).abs() > x.window).expand(x.k.shape[0], -1, -1)
    if x.lengths is not None:
        is_far = is_far & (token < x.lengths[:, None])[:, None]
    q = x.branch.q.to(dtype).unflatten(1, (x.k.shape[1], -1))
    weights = torch.einsum("rhgtf,rhsf->rhgts", q, x.branch.k.to(dtype)) * is_far[:, None, None]
    values = torch.einsum("rhgts,rhse->rhgte", weights, x.v.to(dtype)).flatten(1, 2)
    total = weights.sum(-1, keepdim=True).flatten(1, 2)
    return values, total, is_far.sum(2)[:, None, :, None].to(dtype), None
