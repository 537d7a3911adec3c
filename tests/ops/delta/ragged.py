"""Sequences of mixed lengths in one row, and the results of each of them alone."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attnzoo.contract.sequences import Sequences


def make_sequences(lengths: list[int], device: torch.device | str = "cpu") -> Sequences:
    """Return sequences with up to 2 tokens of none before each; 3 follow the last one."""
    sizes = torch.tensor(lengths)
    gaps = torch.arange(len(lengths)) % 3
    starts = sizes.cumsum(0) - sizes + gaps.cumsum(0)
    return Sequences(starts.to(device), sizes.to(device), max(lengths))


def row_length(sequences: Sequences) -> int:
    """Return N, with 3 tokens after the last sequence."""
    return int(sequences.ends[-1]) + 3


def outside(sequences: Sequences, tokens: int) -> Tensor:
    """Return which tokens are in no sequence, ``[N]``."""
    return sequences.index(tokens) == sequences.count


def nan_outside(x: Tensor | None, sequences: Sequences) -> Tensor | None:
    """Return ``[1, H, N, ...]`` with NaN at tokens that are in no sequence."""
    if x is None or x.dim() < 3:
        return x
    x = x.detach().clone()
    x[:, :, outside(sequences, x.shape[2])] = torch.nan
    return x


def each_alone(
    attend: Callable[..., tuple[Tensor, Tensor]],
    inputs: list[Tensor | None],
    kv: Tensor | None,
    sequences: Sequences,
) -> tuple[Tensor, Tensor]:
    """Return the output in one row, zeros outside of sequences, and the states.

    Args:
        attend: ``attend(*inputs, kv)`` returns the output and the state of one sequence.
        inputs: Tensors ``[1, H, N, ...]``, others, or ``None``.
        kv: The states before the sequences.
        sequences: The sequences.
    """
    pieces: list[Any] = []
    states = []
    for i, (start, end) in enumerate(zip(sequences.starts, sequences.ends, strict=True)):
        part = [x if x is None or x.dim() < 3 else x[:, :, start:end] for x in inputs]
        out, state = attend(*part, None if kv is None else kv[i : i + 1])
        pieces.append((int(start), out))
        states.append(state)
    first, width = inputs[0], pieces[0][1].shape[3]
    assert first is not None
    row = pieces[0][1].new_zeros(*first.shape[:3], width)
    for start, out in pieces:
        row = torch.cat([row[:, :, :start], out, row[:, :, start + out.shape[2] :]], 2)
    return row, torch.cat(states)
