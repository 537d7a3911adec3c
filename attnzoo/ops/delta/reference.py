r"""The oracle of the delta rule: its recurrence, token by token, differentiated by autograd.

It shares no code with the implementations that tests compare with it. T steps of O(D E).
"""

from __future__ import annotations

import torch
from einops import einsum, rearrange, repeat
from torch import Tensor

from attnzoo.contract.states import DeltaState
from attnzoo.ops.delta.common import DeltaInputs, Result, normalized


def run_reference(x: DeltaInputs) -> Result:
    r"""Compute :math:`S_t = (I - \beta_t k_t k_t^T)\, e^{g_t} S_{t-1} + \beta_t k_t v_t^T`.

    The output is :math:`o_t = s\, q_t S_t`.
    """
    x = normalized(x)
    state = x.first_state().kv
    q, k, v, beta, decay = (y.to(state.dtype) for y in (x.q, x.k, x.v, x.beta, _decay(x)))
    q = rearrange(q, "b (h g) t d -> t b h g d", h=k.shape[1])
    eye = torch.eye(k.shape[3], dtype=state.dtype, device=state.device)
    outs = [q.new_zeros(0, *q.shape[1:4], v.shape[3])]
    for t in range(k.shape[2]):
        key, value, strength = k[:, :, t], v[:, :, t], beta[:, :, t, None, None]
        state = decay[:, :, t].unsqueeze(-1) * state
        state = (eye - strength * einsum(key, key, "b h d, b h c -> b h d c")) @ state
        state = state + strength * einsum(key, value, "b h d, b h e -> b h d e")
        outs.append(x.scale * einsum(q[t], state, "b h g d, b h d e -> b h g e").unsqueeze(0))
    return rearrange(torch.cat(outs), "t b h g e -> b (h g) t e").to(x.v.dtype), DeltaState(state)


def _decay(x: DeltaInputs) -> Tensor:
    """Return the decay of each token, ``[B, Hkv, T, D or 1]``."""
    batch, heads, tokens, _ = x.k.shape
    if x.log_decay is None:
        return x.k.new_ones(batch, heads, tokens, 1)
    decay = x.log_decay.to(x.state_dtype).exp()
    if decay.dim() == 1:
        return repeat(decay, "h -> b h t 1", b=batch, t=tokens)
    return decay if decay.dim() == 4 else decay.unsqueeze(-1)
