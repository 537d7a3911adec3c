"""RWKV-6 as linear attention over inputs that are shifted by one token, and its step in torch.

Source: RWKV-6, Peng et al., 2024, arXiv:2404.05892.
Letters: B batch, H heads, Hkv key heads, G = H / Hkv, T tokens, D key size, E value size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.contract.states import LinearState
from attnzoo.ops.linear.common import state_dtype
from attnzoo.ops.linear.gated_step import GatedInputs, GatedResult, Places
from attnzoo.ops.linear.sums import ComputeSums, SumsCall, wide_values


def run(x: GatedInputs, *, sums: ComputeSums) -> GatedResult:
    """Compute all tokens by linear attention to the tokens before each, and add its own."""
    tokens = x.places()
    if tokens.inside is not None:
        inside = tokens.inside[..., None]
        q, k, v, log_decay = (torch.where(inside, y, 0) for y in (x.q, x.k, x.v, x.log_decay))
        x = x._replace(q=q, k=k, v=v, log_decay=log_decay)
    k, log_decay, values, state = x.k, x.log_decay, wide_values(x), x.state
    if x.normalize:  # the output of one more value channel, of ones, is the sum of weights
        values = F.pad(values, (0, 1), value=1.0)
        if state is not None:
            state = LinearState(torch.cat([state.kv, state.k.unsqueeze(-1)], -1), state.k)
    first = tokens.first[..., None]
    k_before, v_before, decay_before = (
        torch.where(first, 0, shift_right(y)) for y in (k, values, log_decay)
    )
    call = SumsCall(
        x.q,
        k_before,
        v_before,
        decay_before,
        *(state, x.sequences, x.return_state, x.chunk_size, x.normalize, x.v.dtype),
    )
    from_state, last, divide = sums(call)
    weight = _own_weight(x, values.dtype)
    out = from_state + (weight * values.unsqueeze(2)).flatten(1, 2)
    if x.normalize:
        out = divide(out[..., :-1], out[..., -1:] + x.eps)
    if last is not None:
        last = add_last_token(last, k, values, log_decay, tokens, normalized=x.normalize)
    return out.to(x.v.dtype), last, None


def run_step(x: GatedInputs) -> GatedResult:
    """Compute one token, which reads the state and then enters it."""
    dtype = state_dtype(x.q, x.k, x.v)
    assert x.state is not None
    kv, z = (y.to(dtype) for y in x.state)
    k, v = x.k.to(dtype), x.v.to(dtype)
    queries = x.q.to(dtype).unflatten(1, (k.shape[1], -1))  # [B, Hkv, G, 1, D]
    assert x.gate.bonus is not None
    own_k = x.gate.bonus.to(dtype).unsqueeze(1) * k
    weight = (queries * own_k.unsqueeze(2)).sum(-1, keepdim=True)
    out = queries @ kv.unsqueeze(2) + weight * v.unsqueeze(2)
    if x.normalize:
        out = out / (queries @ z[:, :, None, :, None] + weight + x.eps)
    decay = x.log_decay.to(dtype).exp()
    if x.reuse_state and not torch.is_grad_enabled():
        kv.mul_(decay.mT).addcmul_(k.mT, v), z.mul_(decay.squeeze(2)).add_(k.squeeze(2))
    else:
        kv = torch.addcmul(kv * decay.mT, k.mT, v)
        z = z * decay.squeeze(2) + k.squeeze(2)
    return out.flatten(1, 2).to(x.v.dtype), LinearState(kv, z), None


def _own_weight(x: GatedInputs, dtype: torch.dtype) -> Tensor:
    """Return the weight of each token's own value, ``[B, Hkv, G, T, 1]``."""
    bonus, k = x.gate.bonus, x.k
    assert bonus is not None
    weighted = bonus.to(k.dtype).unsqueeze(1) * k
    products = x.q.unflatten(1, (k.shape[1], -1)) * weighted.unsqueeze(2)
    weight: Tensor = products.sum(-1, keepdim=True, dtype=dtype)
    return weight


def shift_right(x: Tensor) -> Tensor:
    """Return ``[B, H, T, X]`` shifted right by one token, with zeros for the first token."""
    return F.pad(x[:, :, :-1], (0, 0, 1, 0)) if x.shape[2] else x


def add_last_token(
    state: LinearState,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    tokens: Places,
    *,
    normalized: bool,
) -> LinearState:
    """Return the state with the last token, which the shift leaves out.

    Args:
        state: Sums over the tokens before the last.
        k: ``[B, Hkv, T, D]``.
        v: ``[B, Hkv, T, E]``; ``[B, Hkv, T, E + 1]`` if normalised, with ones in the last channel.
        log_decay: ``[B, Hkv, T, D]``.
        tokens: The places of sequences among the tokens.
        normalized: Whether values and ``state.kv`` have the channel of ones, which is dropped.
    """
    kv, z = state
    if k.shape[2]:
        decay, key, value = tokens.last(log_decay).exp(), tokens.last(k), tokens.last(v)
        kv = kv * decay.unsqueeze(-1) + key.unsqueeze(-1) * value.unsqueeze(2)
        z = z * decay + key
    return LinearState(kv[..., :-1] if normalized else kv, z)
