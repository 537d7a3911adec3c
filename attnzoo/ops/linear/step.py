"""One token of linear attention in torch: the step that decoding takes.

O(D E) per token. Letters as in :mod:`attnzoo.ops.linear.common`.
"""

from __future__ import annotations

import torch

from attnzoo.contract.states import LinearState, run_on_slots
from attnzoo.ops.linear.common import (
    LinearInputs,
    Result,
    log_decay_per_token,
    map_inputs,
)
from attnzoo.runtime.autocast import autocast_disabled


def step(x: LinearInputs) -> Result:
    """Compute one token: a few operations of fixed shapes, which a CUDA graph can capture."""
    with autocast_disabled(x.q.device):
        return run_on_slots(x, _step_on_rows)


def _step_on_rows(x: LinearInputs) -> Result:
    x = map_inputs(x)
    kv, z = x.first_state()
    dtype = kv.dtype
    batch, heads, _, size = x.q.shape
    key_heads = x.k.shape[1]
    q = x.q.to(dtype).reshape(batch, key_heads, heads // key_heads, size)
    if x.scale != 1.0:
        q = q * x.scale
    k, v = x.k.to(dtype), x.v.to(dtype)
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
