"""The shift by one token that turns RWKV-6's recurrence into linear attention.

Source: RWKV-6, Peng et al., 2024, arXiv:2404.05892.
Letters: B batch, H heads, Hkv key heads, T tokens, D key size, E value size.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from attnzoo.contract.states import LinearState


def shift_right(x: Tensor) -> Tensor:
    """Return ``[B, H, T, X]`` shifted right by one token, with zeros for the first token."""
    return F.pad(x[:, :, :-1], (0, 0, 1, 0)) if x.shape[2] else x


def add_last_token(
    state: LinearState, k: Tensor, v: Tensor, log_decay: Tensor, *, normalized: bool
) -> LinearState:
    """Return the state with the last token, which the shift leaves out.

    Args:
        state: Sums over the tokens before the last.
        k: ``[B, Hkv, T, D]``.
        v: ``[B, Hkv, T, E]``; ``[B, Hkv, T, E + 1]`` if normalised, with ones in the last channel.
        log_decay: ``[B, Hkv, T, D]``.
        normalized: Whether values and ``state.kv`` have the channel of ones, which is dropped.
    """
    kv, z = state
    if k.shape[2]:
        decay, key = log_decay[:, :, -1].exp(), k[:, :, -1]
        kv = kv * decay.unsqueeze(-1) + key.unsqueeze(-1) * v[:, :, -1:]
        z = z * decay + key
    return LinearState(kv[..., :-1] if normalized else kv, z)
