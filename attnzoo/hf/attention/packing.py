"""Packed sequences that a model passes to its layers as keyword arguments.

Padding-free collators (``DataCollatorWithFlattening``, TRL's with ``packing=True``) send
``position_ids`` that restart, from which transformers makes a mask, and repeat the boundaries as
``seq_idx`` and ``cu_seq_lens_*``.

Other letters: N sequences in a row.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.contract.masks import AttentionMask
from attnzoo.contract.padding import values_are_known
from attnzoo.errors import UnsupportedError
from attnzoo.hf.masks import ModelMask


class Packing(NamedTuple):
    """The arguments of an attention call that describe packed sequences."""

    seq_idx: Tensor | None = None  # [B or 1, S]: equal for neighbouring tokens of one sequence
    cu_seq_lens_q: Tensor | None = None  # [N + 1]: cumulative lengths, as flash attention takes
    cu_seq_lens_k: Tensor | None = None

    def given(self) -> dict[str, Tensor]:
        """Return the arguments that are not ``None``, each tensor once.

        Raises:
            UnsupportedError: One is not a tensor.
        """
        found = self._asdict()
        if self.cu_seq_lens_k is self.cu_seq_lens_q:
            del found["cu_seq_lens_k"]
        found = {name: x for name, x in found.items() if x is not None}
        for name, x in found.items():
            if not isinstance(x, Tensor):
                form = "[batch, tokens]" if name == "seq_idx" else "[sequences + 1]"
                raise UnsupportedError(
                    f"{name} is a {type(x).__name__}; pass a tensor {form}, torch.tensor(...)"
                )
        return found

    @property
    def has_lengths(self) -> bool:
        """Whether cumulative lengths are given."""
        return self.cu_seq_lens_q is not None or self.cu_seq_lens_k is not None

    def shape_reasons(self, batch: int, tokens: int) -> list[str]:
        """Return every reason why the shapes do not fit B rows of S tokens."""
        reasons = []
        if self.has_lengths and batch != 1:
            reasons.append(f"there are {batch} rows (put all sequences into one)")
        for name, x in self.given().items():
            shape = tuple(x.shape)
            if name != "seq_idx" and (len(shape) != 1 or shape[0] == 0):
                reasons.append(f"{name} has the shape {shape}, not [sequences + 1]")
            elif name == "seq_idx" and shape not in ((batch, tokens), (1, tokens)):
                rows = (batch, tokens)
                reasons.append(f"seq_idx has the shape {shape}, not [batch, tokens] = {rows}")
        return reasons

    def starts(self, tokens: int) -> dict[str, Tensor]:
        """Return by argument the tokens after the first that begin a sequence, ``[B or 1, S - 1]``.

        Raises:
            UnsupportedError: Lengths are not cumulative lengths of such a row.
        """
        return {name: _starts(name, x, tokens) for name, x in self.given().items()}

    def is_before_end(self, tokens: int) -> Tensor | bool:
        """Return which tokens after the first are of a sequence; padding may follow the last."""
        lengths = (x for name, x in self.given().items() if name != "seq_idx")
        inside: Tensor | bool = True
        for x in lengths:
            inside = inside & (torch.arange(1, max(tokens, 1), device=x.device) < x[-1])
        return inside


def add_packing(
    mask: AttentionMask, packing: Packing, sizes: tuple[int, int, int], *, sharded: bool = False
) -> AttentionMask:
    """Return the mask with ``segment_ids`` from the packing arguments of an attention call.

    ``position_ids``, from which the mask may have segments, and all arguments must agree. The
    comparison costs one device synchronisation per mask, shared by the layers that use it. A
    compiled graph compares when it runs.

    Args:
        mask: The mask.
        packing: The arguments.
        sizes: B, T and S.
        sharded: Whether the rows are split over several processes.

    Raises:
        UnsupportedError: The arguments do not fit the call, or disagree.
    """
    given = packing.given()
    reasons = _unsupported_reasons(mask, packing, sizes, sharded=sharded)
    if reasons:
        raise UnsupportedError(
            f"{' and '.join(given)} are not supported here: {'; '.join(reasons)}"
        )
    if torch.compiler.is_compiling():
        return replace(mask, segment_ids=_segment_ids(mask, packing, sizes))
    shared = mask.shared if isinstance(mask, ModelMask) else {}
    tensors = (mask.segment_ids, *given.values())
    key = ("packing", *map(id, tensors))
    if key not in shared:  # keeping the tensors alive keeps their ids unique
        shared[key] = tensors, _segment_ids(mask, packing, sizes)
    return replace(mask, segment_ids=shared[key][1])


def _unsupported_reasons(
    mask: AttentionMask, packing: Packing, sizes: tuple[int, int, int], *, sharded: bool
) -> list[str]:
    """Return every reason why the packing arguments do not fit an attention call."""
    batch, queries, keys = sizes
    reasons = []
    if queries != keys:
        reasons.append(f"there are {queries} queries and {keys} keys (packed rows take no cache)")
    if sharded:
        reasons.append("rows are split over several processes (give position_ids instead)")
    if mask.function is not None:
        reasons.append(f"the mask is {mask.function_name} (leave the attention mask out)")
    reasons += packing.shape_reasons(batch, keys)
    if packing.has_lengths and mask.padding is not None:
        reasons.append("an attention mask is given too (leave it out)")
    return reasons


def _segment_ids(
    mask: AttentionMask, packing: Packing, sizes: tuple[int, int, int]
) -> Tensor | None:
    """Return the segments of all descriptions, ``[B, S]``; ``None`` if each row is one sequence.

    Raises:
        UnsupportedError: Two descriptions disagree.
    """
    batch, _, keys = sizes
    starts = packing.starts(keys)
    if mask.segment_ids is not None:
        starts["position_ids"] = mask.segment_ids.diff(dim=1) != 0
    union = join_starts(starts, packing.is_before_end(keys)).expand(batch, -1)
    ids = F.pad(union.long().cumsum(1), (1, 0)) if keys else union.long()
    return ids if torch.compiler.is_compiling() or bool(union.any()) else None


def join_starts(starts: dict[str, Tensor], is_compared: Tensor | bool) -> Tensor:
    """Return the tokens after the first that begin a sequence, ``[B or 1, T - 1]`` bool.

    Args:
        starts: The same by each description of the rows.
        is_compared: Where the descriptions must agree, ``[T - 1]`` or ``[B, T - 1]``.

    Raises:
        UnsupportedError: Two descriptions disagree. A compiled graph raises when it runs.
    """
    tensors = list(starts.values())
    union = tensors[0]
    for x in tensors[1:]:
        union = union | x
    for name, x in starts.items():
        differs = (x ^ union) & is_compared
        if not values_are_known(differs):
            torch._assert_async(
                ~differs.any(), f"the packed sequences of {', '.join(starts)} differ"
            )
        elif bool(differs.any()):
            row, token = differs.nonzero()[0].tolist()
            others = ", ".join(other for other in starts if other != name)
            raise UnsupportedError(
                f"the packed sequences of {name} and of {others} differ: by {name}, no sequence "
                f"begins at token {token + 1} of row {row}; pass arguments that agree, or "
                "position_ids alone, which restart with each sequence"
            )
    return union


def packed_starts(
    packing: Packing, positions: Tensor | None, real: Tensor | None, shape: tuple[int, int]
) -> tuple[Tensor, Tensor | bool]:
    """Return the tokens after the first that begin a sequence, ``[B, T - 1]``, and which agree.

    Args:
        packing: The packing arguments, one at least.
        positions: Positions, ``[B or 1, T]``, which agree where they do not go up by 1 anywhere.
        real: False at padding, ``[B, T]``.
        shape: B and T.
    """
    starts, is_compared = packing.starts(shape[1]), packing.is_before_end(shape[1])
    if real is not None:
        is_compared = is_compared & (real[:, 1:] & real[:, :-1])
    if positions is not None:
        _add_position_starts(starts, positions, is_compared)
    return join_starts(starts, is_compared).expand(shape[0], -1), is_compared


def _add_position_starts(
    starts: dict[str, Tensor], positions: Tensor, is_compared: Tensor | bool
) -> None:
    """Add to ``starts`` where positions do not go up by 1; such that all do say nothing."""
    steps = (positions.diff(dim=1) != 1) & is_compared
    if not values_are_known(steps):
        starts["position_ids"] = steps | (~steps.any() & join_starts(starts, False))
    elif bool(steps.any()):
        starts["position_ids"] = steps


def restarting_positions(
    starts: Tensor,
    positions: Tensor | None = None,
    *,
    real: Tensor | None = None,
    is_compared: Tensor | bool = True,
    first: int = 0,
) -> Tensor:
    """Return positions whose steps are not 1 where sequences begin, and only there, ``[B, T]``.

    Args:
        starts: The tokens after the first that begin a sequence, ``[B, T - 1]`` bool.
        positions: Positions that are returned if they are such.
        real: False at padding, ``[B, T]`` bool; sequences begin at their first real token.
        is_compared: As in :func:`join_starts`.
        first: The position of the first token of a sequence.
    """
    token = torch.arange(starts.shape[1] + 1, device=starts.device)
    begins = F.pad(starts, (1, 0), value=True)
    if real is not None:
        before = real.cumsum(1) - real.long()
        begins = begins | (real & (before == torch.where(begins, before, 0).cummax(1).values))
    made = token - torch.where(begins, token, 0).cummax(1).values + first
    if positions is None:
        return made
    differs = ((positions.diff(dim=1) != 1) != starts) & is_compared
    return torch.where(differs.any(), made, positions)


def _starts(name: str, x: Tensor, length: int) -> Tensor:
    """Return the tokens after the first that begin a sequence, ``[B or 1, S - 1]`` bool."""
    if name == "seq_idx":
        return x.diff(dim=1) != 0
    is_cumulative = (x[0] == 0) & (x[-1] <= length) & (x.diff() >= 0).all()
    rule = "cumulative lengths begin with 0, do not decrease, and end at most where the row does"
    if not values_are_known(x):
        torch._assert_async(is_cumulative, f"{name}: {rule}")
    elif not is_cumulative:
        raise UnsupportedError(f"{name} is {x.tolist()} for {length} tokens; {rule}")
    tokens = torch.arange(length, device=x.device)[1:]
    return (tokens[:, None] == x).any(1)[None]
