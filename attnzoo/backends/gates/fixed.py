"""Gates without weights: one fixed decay per key head."""

from __future__ import annotations

import torch
from torch import Tensor

from attnzoo.backends.gates.base import Gate, register_gate


def retnet_log_decay(
    heads: int, *, device: torch.device | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return the decays of RetNet, ``[Hkv]``; after 2^(5+h) tokens, 1/e of the state remains."""
    head = torch.arange(heads, device=device, dtype=dtype)
    return torch.log1p(-torch.exp2(-5 - head))


@register_gate("retnet")
class RetNetGate(Gate):
    r"""RetNet (arXiv:2307.08621): :math:`g = \log(1 - 2^{-5-h})`, one fixed decay per key head.

    No parameters; computed in every call, so that nothing is loaded or rounded to 16 bits.
    """

    def log_decay(self, k: Tensor, hidden_states: Tensor | None) -> Tensor:
        """Return the decays of all tokens, ``[Hkv]``."""
        return retnet_log_decay(k.shape[1], device=k.device, dtype=k.dtype)


def alibi_log_decay(
    heads: int, *, device: torch.device | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return the slopes of ALiBi as decays, ``[Hkv]``, which they are under the exponential.

    The paper's code uses another sequence if the number of heads is not a power of two.
    """
    head = torch.arange(1, heads + 1, device=device, dtype=dtype)
    return -torch.exp2(-8 * head / heads)


@register_gate("alibi")
class AlibiGate(Gate):
    r"""ALiBi (arXiv:2108.12409): :math:`g = -2^{-8h/H}`, one fixed decay per key head.

    It equals ALiBi's bias if the feature map's kernel is an exponential. The slopes are those of
    the key heads. No parameters.
    """

    def log_decay(self, k: Tensor, hidden_states: Tensor | None) -> Tensor:
        """Return the decays of all tokens, ``[Hkv]``."""
        return alibi_log_decay(k.shape[1], device=k.device, dtype=k.dtype)
