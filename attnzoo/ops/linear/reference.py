r"""The oracle of linear attention: plain tensor operations, differentiated by autograd.

It shares no code with the implementations that tests compare with it. The dense form is quadratic
in T (with a decay per key channel, O(T^2 D) in memory too). Other letters: F decays per token (1 or
D).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from einops import rearrange, repeat
from torch import Tensor

from attnzoo.contract.states import LinearState
from attnzoo.ops.linear.common import LinearInputs, Result

LOWEST_LOG_DECAY = -1e4  # its exponential is 0; sums of -inf would give NaN


def run_reference(x: LinearInputs) -> Result:
    """Compute the parallel form: of all keys, or of one causal chunk after another."""
    x = x._replace(state=x.first_state())
    return _in_pieces(x, x.chunk_size or 64, _dense) if x.causal else _dense(x)


# Factors from decay: from key to query, [B, Hkv, T, S, F]; from the incoming state to each query,
# [B, Hkv, T, F]; from each key to the outgoing state, [B, Hkv, S, F]; from state to state
_Weights = tuple[Tensor, Tensor, Tensor, Tensor]


def _dense(x: LinearInputs) -> Result:
    r"""Compute :math:`o_i = \sum_j p_{ij} v_j` with :math:`p_{ij} = \sum_d q_{id} k_{jd} w_{ijd}`.

    The weight w is the decay from token j to token i, and 0 where i does not see j. A causal call
    has at least one token.
    """
    assert x.state is not None
    dtype = x.state.kv.dtype
    q = rearrange(x.q.to(dtype), "b (h g) t d -> b h g t d", h=x.k.shape[1]) * x.scale
    k, v = x.k.to(dtype), x.v.to(dtype)
    weights = _causal_weights(x) if x.causal else _bidirectional_weights(x)
    pairs, reads, writes, state_decay = (weight.to(dtype) for weight in weights)
    if pairs.shape[-1] == 1:
        scores = (q @ k.mT.unsqueeze(2)) * pairs.squeeze(-1).unsqueeze(2)
    else:
        scores = torch.einsum("bhgid,bhjd,bhijd->bhgij", q, k, pairs)
    q_decayed, k_decayed = q * reads.unsqueeze(2), k * writes
    out = scores @ v.unsqueeze(2) + q_decayed @ x.state.kv.unsqueeze(2)
    if x.normalize:
        from_state = (q_decayed * x.state.k[:, :, None, None]).sum(-1, keepdim=True)
        out = out / (scores.sum(-1, keepdim=True) + from_state + x.eps)
    kv = x.state.kv * state_decay.unsqueeze(-1) + k_decayed.mT @ v
    last = LinearState(kv, x.state.k * state_decay + k_decayed.sum(2))
    return rearrange(out, "b h g t e -> b (h g) t e").to(x.v.dtype), last


def _causal_weights(x: LinearInputs) -> _Weights:
    """Return the decay between tokens; future tokens get weight 0."""
    log_decay = _log_decay(x).double().clamp(min=LOWEST_LOG_DECAY)
    tokens = log_decay.shape[2]
    seen = torch.ones(tokens, tokens, dtype=torch.bool, device=log_decay.device).tril()
    # Sums of the tokens after key j up to query i; differences of longer sums would cancel
    after = seen.tril(-1)[..., None]
    between = torch.where(after, log_decay.unsqueeze(3), 0.0).cumsum(2)
    pairs = between.exp() * seen[..., None]
    reads = log_decay.cumsum(2).exp()
    return pairs, reads, pairs[:, :, -1], reads[:, :, -1]


def _bidirectional_weights(x: LinearInputs) -> _Weights:
    """Return weight 1 between all tokens."""
    batch, heads, keys, _ = x.k.shape
    pairs = x.k.new_ones(batch, heads, x.q.shape[2], keys, 1)
    reads, writes = pairs.new_ones(*pairs.shape[:3], 1), pairs.new_ones(batch, heads, keys, 1)
    return pairs, reads, writes, pairs.new_ones(batch, heads, 1)


def _in_pieces(x: LinearInputs, size: int, run: Callable[[LinearInputs], Result]) -> Result:
    """Run pieces of ``size`` tokens in order, each from the state that the one before leaves."""
    outs, state = [x.v.new_empty(*x.q.shape[:2], 0, x.v.shape[3])], x.state
    for start in range(0, x.k.shape[2], size):
        out, state = run(x.tokens(start, start + size)._replace(state=state))
        outs.append(out)
    return torch.cat(outs, 2), state


def _log_decay(x: LinearInputs) -> Tensor:
    """Return the log decays as ``[B, Hkv, S, F]``, zeros if there are none."""
    batch, heads, keys, _ = x.k.shape
    if x.log_decay is None:
        return x.k.new_zeros(batch, heads, keys, 1)
    if x.log_decay.dim() == 1:
        return repeat(x.log_decay, "h -> b h s 1", b=batch, s=keys)
    return x.log_decay if x.log_decay.dim() == 4 else x.log_decay.unsqueeze(-1)
