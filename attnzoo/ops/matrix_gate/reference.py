"""Reference of the full-matrix gate: its recurrence, written out."""

from __future__ import annotations

import torch
from einops import einsum, rearrange
from torch import Tensor

from attnzoo.contract.states import MatrixState
from attnzoo.ops.matrix_gate.torch import MatrixGateInputs


def run_reference(x: MatrixGateInputs) -> tuple[Tensor, MatrixState]:
    r"""Compute :math:`S_t = e^{G_t} S_{t-1} + k_t v_t^T`, :math:`Z_t = e^{G_t} Z_{t-1} + k_t 1^T`.

    With weights w of the value channels, v_t and 1 are multiplied by w_t.
    The output is :math:`q_t S_t`, divided by :math:`q_t Z_t + \epsilon` if normalised.
    """
    kv, z = x.state
    q, k, v = (t.to(kv.dtype) for t in (x.q, x.k, x.v))
    q = rearrange(q, "b (h g) t d -> t b h g d", h=k.shape[1])
    outs = [q.new_zeros(0, *q.shape[1:4], v.shape[3])]
    for t in range(k.shape[2]):
        decay = x.decays(t, t + 1)[:, :, 0].exp()
        weight = 1.0 if x.value_weights is None else x.value_weights[:, :, t].to(kv.dtype)
        kv = decay * kv + einsum(k[:, :, t], weight * v[:, :, t], "b h d, b h e -> b h d e")
        ones = weight * torch.ones_like(v[:, :, t])
        z = decay * z + einsum(k[:, :, t], ones, "b h d, b h e -> b h d e")
        out = einsum(q[t], kv, "b h g d, b h d e -> b h g e")
        if x.normalize:
            out = out / (einsum(q[t], z, "b h g d, b h d e -> b h g e") + x.eps)
        outs.append(out.unsqueeze(0))
    return rearrange(torch.cat(outs), "t b h g e -> b (h g) t e").to(x.v.dtype), MatrixState(kv, z)
