"""The delta rule token by token in torch: the step that decoding takes.

O(D E) per token. Letters as in :mod:`attnzoo.ops.delta.common`; G = H / Hkv.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from attnzoo.contract.states import DeltaState
from attnzoo.ops.delta.common import DeltaInputs, Result, normalized, run_on_slots


def step(x: DeltaInputs) -> Result:
    """Compute one token: a few operations of fixed shapes, which a CUDA graph can capture."""
    return run_on_slots(x, _step)


def _step(x: DeltaInputs) -> Result:
    x = normalized(x)
    (kv,) = x.first_state()
    batch, heads, _, size = x.q.shape
    key_heads = x.k.shape[1]
    q = x.q.to(kv.dtype).reshape(batch, key_heads, heads // key_heads, size)
    if x.scale != 1.0:
        q = q * x.scale
    k, v, beta = x.k.to(kv.dtype), x.v.to(kv.dtype), x.beta.to(kv.dtype).unsqueeze(-1)
    if x.log_decay is not None:
        decay = _column(x).to(kv.dtype).exp()
        kv = kv.mul_(decay) if x.reuse_state else kv * decay
    update = beta * (v - k @ kv)
    kv = kv.addcmul_(k.mT, update) if x.reuse_state else torch.addcmul(kv, k.mT, update)
    return (q @ kv).view(batch, heads, 1, v.shape[3]).to(x.v.dtype), DeltaState(kv)


def run_steps(x: DeltaInputs, step: Callable[[DeltaInputs], Result]) -> Result:
    """Compute all tokens of rows, one step after another, with the implementation of one token."""
    x = normalized(x)
    outs, state = [x.v.new_empty(*x.q.shape[:2], 0, x.v.shape[3])], x.state
    for t in range(x.k.shape[2]):
        out, state = step(x.tokens(t, t + 1)._replace(state=state))
        outs.append(out)
    return torch.cat(outs, 2), state


def _column(x: DeltaInputs) -> torch.Tensor:
    """Return the log decays of one token as ``[B or 1, Hkv, D or 1, 1]``."""
    assert x.log_decay is not None
    if x.log_decay.dim() == 4:
        return x.log_decay.mT
    return x.log_decay.view(-1, x.k.shape[1], 1, 1)
