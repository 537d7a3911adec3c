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
from attnzoo.errors import UnsupportedError
from attnzoo.hf.masks import ModelMask


class Packing(NamedTuple):
    """The arguments of an attention call that describe packed sequences."""

    seq_idx: Tensor | None = None  # [B or 1, S]: equal for neighbouring tokens of one sequence
    cu_seq_lens_q: Tensor | None = None  # [N + 1]: cumulative lengths, as flash attention takes
    cu_seq_lens_k: Tensor | None = None

    def given(self) -> dict[str, Tensor]:
        """Return the arguments that are not ``None``, each tensor once."""
        unique: dict[int, tuple[str, Tensor]] = {}
        for name, x in self._asdict().items():
            if x is not None:
                unique.setdefault(id(x), (name, x))
        return dict(unique.values())


def add_packing(
    mask: AttentionMask, packing: Packing, sizes: tuple[int, int, int], *, sharded: bool = False
) -> AttentionMask:
    """Return the mask with ``segment_ids`` from the packing arguments of an attention call.

    ``position_ids``, from which the mask may have segments, and all arguments must agree. The
    comparison costs one device synchronisation per mask, shared by the layers that use it. Under
    ``torch.compile`` nothing is compared: a sequence begins where any of them says so.

    Args:
        mask: The mask.
        packing: The arguments.
        sizes: B, T and S.
        sharded: Whether the rows are split over several processes.

    Raises:
        UnsupportedError: The arguments do not fit the call, or disagree.
    """
    given = packing.given()
    assert given
    reasons = _unsupported_reasons(mask, packing, sizes, sharded=sharded)
    if reasons:
        raise UnsupportedError(
            f"{' and '.join(given)} are not supported here: {'; '.join(reasons)}"
        )
    if torch.compiler.is_compiling():
        return replace(mask, segment_ids=_segment_ids(mask, given, sizes))
    shared = mask.shared if isinstance(mask, ModelMask) else {}
    tensors = (mask.segment_ids, *given.values())
    key = ("packing", *map(id, tensors))
    if key not in shared:  # keeping the tensors alive keeps their ids unique
        shared[key] = tensors, _segment_ids(mask, given, sizes)
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
    if packing.cu_seq_lens_q is not None or packing.cu_seq_lens_k is not None:
        if batch != 1:
            reasons.append(f"there are {batch} rows (put all sequences into one)")
        if mask.padding is not None:
            reasons.append("an attention mask is given too (leave it out)")
        shapes = {n: tuple(x.shape) for n, x in packing.given().items() if n != "seq_idx"}
        reasons += [
            f"{name} has the shape {shape}, not [sequences + 1]"
            for name, shape in shapes.items()
            if len(shape) != 1 or shape[0] == 0
        ]
    if packing.seq_idx is not None:
        shape = tuple(packing.seq_idx.shape)
        if shape not in ((batch, keys), (1, keys)):
            reasons.append(f"seq_idx has the shape {shape}, not [batch, tokens] = {(batch, keys)}")
    return reasons


def _segment_ids(
    mask: AttentionMask, given: dict[str, Tensor], sizes: tuple[int, int, int]
) -> Tensor | None:
    """Return the segments of all descriptions, ``[B, S]``; ``None`` if each row is one sequence.

    Raises:
        UnsupportedError: Two descriptions disagree.
    """
    batch, _, keys = sizes
    starts = {name: _starts(name, x, keys) for name, x in given.items()}
    if mask.segment_ids is not None:
        starts["position_ids"] = mask.segment_ids.diff(dim=1) != 0
    union = torch.zeros(batch, max(keys - 1, 0), dtype=torch.bool, device=_device(given))
    for x in starts.values():
        union = union | x
    ids = F.pad(union.long().cumsum(1), (1, 0)) if keys else union.long()
    if torch.compiler.is_compiling():
        return ids
    end = min([keys, *(int(x[-1]) for name, x in given.items() if name != "seq_idx")])
    for name, x in starts.items():  # padding may follow the last of cu_seq_lens
        differs = (x ^ union)[:, : max(end - 1, 0)]
        if bool(differs.any()):
            row, token = differs.nonzero()[0].tolist()
            others = ", ".join(other for other in starts if other != name)
            raise UnsupportedError(
                f"the packed sequences of {name} and of {others} differ: by {name}, no sequence "
                f"begins at token {token + 1} of row {row}; pass arguments that agree, or "
                "position_ids alone, which restart with each sequence"
            )
    return ids if bool(union.any()) else None


def _device(given: dict[str, Tensor]) -> torch.device:
    return next(iter(given.values())).device


def _starts(name: str, x: Tensor, length: int) -> Tensor:
    """Return the tokens after the first that begin a sequence, ``[B or 1, S - 1]`` bool."""
    if name == "seq_idx":
        return x.diff(dim=1) != 0
    tokens = torch.arange(length, device=x.device)[1:]
    return (tokens[:, None] == x).any(1)[None]
