"""Linear attention token by token in torch: the step that decoding takes.

O(D E) per token. Letters as in :mod:`attnzoo.ops.linear.common`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from attnzoo.contract.states import LinearState
from attnzoo.ops.linear.common import LinearInputs, Result, log_decay_per_token, map_inputs
from attnzoo.runtime.autocast import autocast_disabled


def step(x: LinearInputs) -> Result:
    """Compute one token: a few operations of fixed shapes, which a CUDA graph can capture."""
    dtype = x.state.kv.dtype
    batch, heads, _, size = x.q.shape
    key_heads = x.k.shape[1]
    q = x.q.to(dtype).reshape(batch, key_heads, heads // key_heads, size)
    if x.scale != 1.0:
        q = q * x.scale
    k, v = x.k.to(dtype), x.v.to(dtype)
    kv, z = x.state
    if x.log_decay is not None:
        decay = log_decay_per_token(x.log_decay, x.k).to(dtype).exp()  # [B, Hkv, 1, F]
        if x.reuse_state:
            kv.mul_(decay.mT), z.mul_(decay.squeeze(2))
        else:
            kv, z = kv * decay.mT, z * decay.squeeze(2)
    if x.reuse_state:
        kv.addcmul_(k.mT, v), z.add_(k.squeeze(2))
    else:
        kv, z = torch.addcmul(kv, k.mT, v), z + k.squeeze(2)
    out = q @ kv
    if x.normalize:
        out = out / (q @ z.unsqueeze(-1) + x.eps)
    return out.view(batch, heads, 1, v.shape[3]).to(x.v.dtype), LinearState(kv, z)


def run_steps(x: LinearInputs, step: Callable[[LinearInputs], Result]) -> Result:
    """Compute all tokens, one step after another, with the implementation of one token."""
    with autocast_disabled(x.q.device):
        x = map_inputs(x)
    outs, state = [], x.state
    for t in range(x.k.shape[2]):
        if x.segment_ids is not None and t > 0:
            state = _reset(state, x.segment_ids[:, t - 1] != x.segment_ids[:, t])
        out, state = step(x.tokens(t, t + 1)._replace(state=state))
        outs.append(out)
    return torch.cat(outs, 2), state


def _reset(state: LinearState, starts: Tensor) -> LinearState:
    """Set the state to zero in the rows ``[B]`` where a segment starts."""
    kept = (~starts)[:, None, None].to(state.k.dtype)
    return LinearState(state.kv * kept.unsqueeze(-1), state.k * kept)
