"""Causal convolutions of recurrent layers on CPUs, and the borders of packed sequences.

Letters: B batch, T tokens, X channels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN

from attnzoo.contract.by_sequence import assert_one_segment
from attnzoo.contract.masks import AttentionMask
from attnzoo.contract.sequences import (
    RowLayout,
    Sequences,
    sequences_of_mask,
    values_are_known,
)
from attnzoo.errors import UnsupportedError
from attnzoo.ops.convolution import causal_convolution
from attnzoo.runtime.memory import empty_huge_pages

TOKENS = 128  # convolved at once, so that they stay in the cache


def convolve_sequences(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    sequences: Sequences,
) -> Tensor:
    """Compute a causal convolution that does not cross the borders of packed sequences.

    Args:
        hidden_states: ``[B, X, T]``.
        weight: ``[X, width]``.
        bias: ``[X]``.
        activation: Name of the activation function.
        sequences: Those of all rows, one after another.
    """
    x = hidden_states.to(weight.dtype).transpose(1, 2)
    row = x.reshape(1, -1, x.shape[2])
    out = causal_convolution(row, weight, sequences=sequences).view(x.shape).transpose(1, 2)
    out = out if bias is None else out + bias[:, None]
    out = out if activation is None else ACT2FN[activation](out)
    return out.to(hidden_states.dtype)


def can_convolve_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether :func:`convolve_rows` computes a call, and is faster than torch."""
    needs_grad = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (x, weight, bias)
    )
    if needs_grad or torch.compiler.is_compiling():
        return False
    return x.stride(1) == 1 and x.dtype == weight.dtype == torch.float32


def convolve_rows(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> Tensor:
    """Compute a causal convolution of tokens whose channels are adjacent in memory.

    torch copies them, so that tokens are adjacent; what follows copies them back.

    Args:
        hidden_states: ``[B, X, T]``, a view of ``[B, T, X]``.
        weight: ``[X, width]``.
        bias: ``[X]``.
        activation: Name of the activation function.

    Returns:
        ``[B, X, T]``, a view of ``[B, T, X]``.
    """
    x, taps = hidden_states.transpose(1, 2), weight.t().contiguous()
    out = empty_huge_pages(x, x.shape)
    for start in range(0, x.shape[1], TOKENS):
        stop = min(start + TOKENS, x.shape[1])
        block = torch.mul(x[:, start:stop], taps[-1], out=out[:, start:stop])
        for shift in range(1, len(taps)):
            if (first := max(start, shift)) < stop:
                earlier = x[:, first - shift : stop - shift]
                block[:, first - start :].addcmul_(earlier, taps[-1 - shift])
        if bias is not None:
            block += bias
        if activation == "silu":
            F.silu(block, inplace=True)
        elif activation is not None:
            block.copy_(ACT2FN[activation](block))
    return out.transpose(1, 2)


def read_sequences(
    batch: int, tokens: int, kwargs: dict[str, Any], *, one_each: bool = False
) -> tuple[Sequences, RowLayout] | None:
    """Return the sequences of packed rows, one row after another, and their places in the rows.

    Args:
        batch: B.
        tokens: Tokens of the call, after those that a cache puts before them.
        kwargs: Arguments of a layer: ``seq_idx``, ``[B, T]``; or ``cu_seqlens`` or
            ``cu_seq_lens_q``, the first tokens of the sequences of one row, and their number.
        one_each: Whether each row must be one sequence if their number is unknown, in a compiled
            graph: the number of states is then that of the rows.

    Returns:
        ``None`` if each row is one sequence.

    Raises:
        UnsupportedError: There are several rows, and the borders are those of one.
    """
    ids = kwargs.get("seq_idx")
    if ids is None:
        borders = kwargs.get("cu_seqlens")
        borders = kwargs.get("cu_seq_lens_q") if borders is None else borders
        if borders is None:
            return None
        if batch != 1:
            raise UnsupportedError(
                f"cu_seq_lens_q describes the sequences of one row, got a batch of {batch}; pass "
                "one row, or seq_idx"
            )
        length = tokens if torch.compiler.is_compiling() else int(borders[-1])
        positions = torch.arange(length, device=borders.device)
        ids = torch.bucketize(positions, borders[1:], right=True)[None]
    if (earlier := tokens - ids.shape[1]) > 0:
        ids = torch.cat([ids[:, :1].expand(-1, earlier), ids], 1)
    if one_each and not values_are_known(ids):
        assert_one_segment(ids)
        return None
    mask = AttentionMask(causal=True, segment_ids=ids)
    return sequences_of_mask(mask, (batch, tokens), ids.device)
