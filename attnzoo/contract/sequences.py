r"""Sequences of different lengths in one row: the only form of a batch that is not full rows.

Padded and packed rows become one row ``[1, H, N, D]`` that has the real tokens of all sequences,
one after another, and a table of where each begins. So an op knows neither padding nor segments,
padding costs nothing, and there is one state per sequence. Backends with the capability
``sequences`` get this form; the others get the mask.

The tokens are counted once for all layers that share a mask. Their number depends on the values of
the mask, which are not known in a compiled graph, under a transform of ``torch.func`` and while a
CUDA graph is captured. Sizes are then those of the full rows: real tokens come first, and those
after the last sequence belong to none.

Other letters: T tokens of a row, N tokens of all sequences, X any size, S sequences, L tokens of
the longest sequence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.contract.masks import AttentionMask
from attnzoo.contract.padding import values_are_known
from attnzoo.errors import UnsupportedError
from attnzoo.runtime.kernel_calls import is_transformed

SEQUENCES = "sequences must follow one another within the {tokens} tokens of the row"
PACKED_IN_GRAPH = (
    "packed rows cannot be unpacked under torch.compile; do not compile, or pass one sequence a "
    "row (in position_ids, seq_idx and cu_seq_lens_* too)"
)


@dataclass(frozen=True, eq=False)
class Sequences:
    """The sequences of one row.

    Tokens between and after them belong to none: what they hold has no effect, NaN included, and
    their outputs and gradients are zeros.

    Attributes:
        starts: First token of each sequence, ``[S]`` int64, not decreasing.
        lengths: Tokens of each sequence, ``[S]`` int64; may be 0.
        longest: At least 1; no sequence is longer. Known without reading a device.
        rows: If the number of sequences is unknown, that of the rows that they are packed in; S is
            then the number of tokens, and the last sequences are empty.
    """

    starts: Tensor
    lengths: Tensor
    longest: int
    rows: int | None = None

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor, longest: int | None = None) -> Sequences:
        """Return the sequences between cumulative lengths, ``[S + 1]``, which begin with 0.

        Args:
            cu_seqlens: As flash attention and fla take them.
            longest: Tokens of the longest sequence; ``None`` reads it from the device.

        Raises:
            UnsupportedError: The tensor is no list of cumulative lengths.
        """
        if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2 or cu_seqlens.is_floating_point():
            raise UnsupportedError(
                "cu_seqlens must be [sequences + 1] integers, cumulative lengths that begin with "
                f"0, got {list(cu_seqlens.shape)} {str(cu_seqlens.dtype).removeprefix('torch.')}."
            )
        ends = cu_seqlens.to(torch.int64)
        lengths = ends.diff()
        if longest is None:
            longest = max(int(lengths.max()), 1)
        return cls(ends[:-1].contiguous(), lengths, longest)

    def check(self, tokens: int) -> None:
        """Raise ``UnsupportedError`` unless the sequences follow one another in a row of N tokens.

        A kernel in C++ checks them itself. On a GPU, the error is an assertion there, for which
        nothing waits. In a graph of ``torch.compile`` they are not checked: its operations check
        their indices.
        """
        checked: float = vars(self).get("checked", math.inf)
        if torch.compiler.is_compiling() or is_transformed() or tokens >= checked:
            return
        on_gpu = self.starts.is_cuda
        if not on_gpu and not values_are_known(self.starts, self.lengths):
            return
        ends = F.pad(self.ends, (1, 0))[: self.count]  # of those before; a wrong sum is wrong here
        is_inside = (self.starts >= ends) & (self.starts <= tokens - self.lengths)
        is_inside &= (self.lengths >= 0) & (self.lengths <= self.longest)
        if on_gpu:
            torch._assert_async(is_inside.all(), SEQUENCES.format(tokens=tokens))
        elif not is_inside.all():
            refuse_sequences(self.starts, self.lengths, self.longest, tokens)
        vars(self)["checked"] = tokens  # of the shortest row

    @property
    def count(self) -> int:
        """S."""
        return self.starts.shape[0]

    @property
    def ends(self) -> Tensor:
        """The token after the last of each sequence, ``[S]``."""
        return self.starts + self.lengths

    def cu_seqlens(self, tokens: int) -> Tensor:
        """Return cumulative lengths of N tokens, ``[S + 1]``; those of none follow a sequence.

        The same tensor for each layer: fla counts chunks once for it, waiting for the device.
        """
        self.check(tokens)
        found: Tensor | None = vars(self).get("cu_seqlens_found")
        if found is None or vars(self)["cu_seqlens_tokens"] != tokens:
            ends = self.starts.new_full((1,), tokens)
            found = torch.cat([torch.zeros_like(ends), self.starts[1:], ends])
            vars(self).update(cu_seqlens_found=found, cu_seqlens_tokens=tokens)
        return found

    def covers(self, tokens: int) -> bool:
        """Return whether each of N tokens is known to be in one; does not wait for a device."""
        if self.lengths.device.type != "cpu" or not values_are_known(self.lengths):
            return False
        return int(self.lengths.sum()) == tokens

    def index(self, tokens: int) -> Tensor:
        """Return the sequence of each of N tokens, ``[N]``; S for those of none."""
        self.check(tokens)
        token = torch.arange(tokens, device=self.starts.device)
        sequence = torch.searchsorted(self.starts, token, right=True) - 1
        found = sequence.clamp(min=0)
        is_inside = (sequence >= 0) & (token < self.ends[found])
        return torch.where(is_inside, found, self.count)

    def inside(self, tokens: int) -> Tensor | None:
        """Return which of N tokens are of a sequence, ``[N]`` bool; ``None``: known to be all."""
        return None if self.covers(tokens) else self.index(tokens) < self.count

    def positions(self, tokens: int) -> Tensor:
        """Return the position of each of N tokens in its sequence, ``[N]``; from 0."""
        self.check(tokens)
        token = torch.arange(tokens, device=self.starts.device)
        sequence = torch.searchsorted(self.starts, token, right=True) - 1
        return token - self.starts[sequence.clamp(min=0)]

    def is_first(self, tokens: int) -> Tensor:
        """Return which of N tokens begin a sequence, or follow one, ``[N]`` bool."""
        index = self.index(tokens)
        first = torch.ones_like(index, dtype=torch.bool)
        first[1:] = index[1:] != index[:-1]
        return first

    def without_first(self, tokens: int) -> Sequences:
        """Return the sequences of a row that lacks its first tokens, as lag between two rows.

        Token ``i`` of a sequence there is token ``i + tokens`` here.
        """
        lengths = (self.lengths - tokens).clamp(min=0)
        return replace(self, lengths=lengths, longest=max(self.longest - tokens, 1))

    def to_rows(self, x: Tensor, token_dim: int = 2) -> Tensor:
        """Return ``[1, H, N, X]`` as one zero-padded row a sequence, ``[S, H, L, X]``.

        Args:
            x: The row; ``[1, N, ...]`` with ``token_dim=1``.
            token_dim: The dimension of the tokens.

        The result is stored token by token, ``[S, L, H, X]``.
        """
        count, index, is_inside = self._row_index(x.shape[token_dim])
        tokens = x.movedim(token_dim, 1)
        flat = tokens.reshape(-1, *tokens.shape[2:])
        found = take(flat, index, is_inside)
        return found.view(count, self.longest, *flat.shape[1:]).movedim(1, token_dim)

    def inside_rows(self) -> Tensor:
        """Return which places of :meth:`to_rows` are tokens, ``[S, L]`` bool."""
        if self.rows is not None:
            return self.starts.new_ones(self.rows, self.longest, dtype=torch.bool)
        return torch.arange(self.longest, device=self.starts.device) < self.lengths[:, None]

    def to_row(self, x: Tensor, tokens: int, token_dim: int = 2) -> Tensor:
        """Return the inverse of :meth:`to_rows`, ``[1, H, N, X]``, zero outside of sequences."""
        rows = x.movedim(token_dim, 1)
        index = self.index(tokens)
        place = index * self.longest + self.positions(tokens)
        if self.rows is not None:
            place, index = torch.arange(tokens, device=x.device), torch.zeros_like(index)
        flat = rows.reshape(-1, *rows.shape[2:])
        found = take(flat, place, index < self.count)
        return found.unsqueeze(0).movedim(1, token_dim)

    def _row_index(self, tokens: int) -> tuple[int, Tensor, Tensor]:
        """Return how many rows there are, the token of each place, and whether it is one."""
        self.check(tokens)
        device = self.starts.device
        if self.rows is not None:  # unknown how many sequences: they must be the rows
            token = torch.arange(tokens, device=device)
            is_row = (self.is_first(tokens) == (token % self.longest == 0)).all()
            torch._assert_async(is_row, PACKED_IN_GRAPH)
            return self.rows, token, torch.ones_like(token, dtype=torch.bool)
        place = torch.arange(self.longest, device=device)
        index = (self.starts[:, None] + place).flatten()
        return self.count, index, self.inside_rows().flatten()


# Starts, lengths and the longest length of sequences, as C++ kernels take them
Bounds = tuple[Tensor | None, Tensor | None, int]
NO_BOUNDS: Bounds = (None, None, 0)


def bounds_of(sequences: Sequences) -> Bounds:
    """Return the starts, the lengths and the longest length."""
    return sequences.starts, sequences.lengths, sequences.longest


def refuse_sequences(
    starts: Tensor | None, lengths: Tensor | None, longest: int, tokens: int
) -> NoReturn:
    """Raise ``UnsupportedError`` for the first of the sequences that is not where it must be."""
    assert starts is not None
    assert lengths is not None
    end = 0
    for i, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        if not (0 <= length <= longest and end <= start <= tokens - length):
            raise UnsupportedError(
                f"{SEQUENCES.format(tokens=tokens)}, with 0 to {longest} (longest) tokens each; "
                f"sequence {i} has {length} tokens from {start} on, after one that ends at {end}. "
                "Sequences.from_cu_seqlens makes them from cumulative lengths."
            )
        end = start + length
    raise AssertionError("all sequences are within the row")


# -- moving tokens ---------------------------------------------------------------------------------


def _take(x: Tensor, index: Tensor, where: Tensor | None) -> Tensor:
    if where is None:
        return x.index_select(0, index)
    if not x.shape[0]:
        return x.new_zeros(index.shape[0], *x.shape[1:])
    found = x.index_select(0, torch.where(where, index, 0))
    return found.masked_fill(~where.view(-1, *(1,) * (x.dim() - 1)), 0)


def put(x: Tensor, index: Tensor, tokens: int, where: Tensor | None = None) -> Tensor:
    """Return zeros ``[tokens, ...]`` with ``x`` at ``index``, where ``where`` is true."""
    if where is None:
        return x.new_zeros(tokens, *x.shape[1:]).index_copy(0, index, x)
    found = x.new_zeros(tokens + 1, *x.shape[1:])  # the last collects what is not taken
    return found.index_copy(0, torch.where(where, index, tokens), x)[:tokens]


class _Take(torch.autograd.Function):
    """Take tokens; the gradient is put back by copying, a fraction of the time of adding."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, where: Tensor | None) -> Tensor:
        ctx.save_for_backward(index, where)
        ctx.tokens = x.shape[0]
        return _take(x, index, where)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        index, where = ctx.saved_tensors
        return put(grad, index, ctx.tokens, where), None, None


def take(x: Tensor, index: Tensor, where: Tensor | None = None) -> Tensor:
    """Return tokens ``x[index]`` of ``[N, ...]`` where ``where`` is true, else zeros.

    What ``x`` has elsewhere has no effect, NaN included, and gets no gradient. No token may be
    taken twice.
    """
    if torch.compiler.is_compiling() or is_transformed() or not x.requires_grad:
        return _take(x, index, where)
    taken: Tensor = _Take.apply(x, index, where)  # type: ignore[no-untyped-call]
    return taken


# -- between rows and sequences --------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class RowLayout:
    """How the tokens of one row of sequences are placed in padded or packed rows.

    Attributes:
        shape: B and T.
        index: The place of each token in the flattened rows, ``[N]``; ``None``: the same place.
        real: Which tokens are real, ``[N]`` bool; ``None``: all.
        first: The first sequence of each row, ``[B]``; S for a row without tokens. ``None``: each
            row is one sequence, which may be empty.
        last: The last sequence of each row, ``[B]``; like ``first``.
    """

    shape: tuple[int, int]
    index: Tensor | None
    real: Tensor | None
    first: Tensor | None = None
    last: Tensor | None = None

    def to_row(self, x: Tensor, token_dim: int = 2) -> Tensor:
        """Return the tokens of ``[B, H, T, X]`` as one row, ``[1, H, N, X]``."""
        tokens = x.movedim(token_dim, 1)
        flat = tokens.reshape(-1, *tokens.shape[2:])
        found = flat if self.index is None else take(flat, self.index, self.real)
        return found.unsqueeze(0).movedim(1, token_dim)

    def to_rows(self, x: Tensor, token_dim: int = 2) -> Tensor:
        """Return ``[1, H, N, X]`` in its rows, ``[B, H, T, X]``, with zeros at padding."""
        batch, length = self.shape
        tokens = x.movedim(token_dim, 1).squeeze(0)
        if self.index is not None:
            tokens = put(tokens, self.index, batch * length, self.real)
        return tokens.view(batch, length, *tokens.shape[1:]).movedim(1, token_dim)

    def state_to_sequences(self, state: Any, count: int) -> Any:
        """Return the state of each sequence: that of its row if it is the row's first, else zeros.

        Args:
            state: A named tuple of tensors, ``[B, ...]`` each.
            count: S.
        """
        first = self.first
        if first is None:
            return state
        return type(state)(*(put(x, first, count, first < count) for x in state))

    def state_to_rows(self, state: Any, count: int) -> Any:
        """Return the state after each row: that of the row's last sequence."""
        last = self.last
        if last is None:
            return state
        return type(state)(*(take(x, last, last < count) for x in state))


def sequences_of_rows(shape: tuple[int, int], device: torch.device) -> tuple[Sequences, RowLayout]:
    """Return one sequence a full row, and their places in these rows; arguments as below."""
    batch, length = shape
    rows = torch.arange(batch, device=device)
    sequences = Sequences(rows * length, torch.full_like(rows, length), length)
    return sequences, RowLayout(shape, None, None)


def sequences_of_mask(
    mask: AttentionMask, shape: tuple[int, int], device: torch.device
) -> tuple[Sequences, RowLayout]:
    """Return the sequences of padded or packed rows, and their places in these rows.

    Args:
        mask: Padding and segments.
        shape: B and T.
        device: The device of the tokens.
    """
    if torch.compiler.is_compiling() or is_transformed():
        return _sequences_of_mask(mask, shape, device)
    kept: dict[tuple[int, int], tuple[Sequences, RowLayout]] = vars(mask).setdefault("kept", {})
    if shape not in kept:  # layers share a mask
        kept[shape] = _sequences_of_mask(mask, shape, device)
    return kept[shape]


def _sequences_of_mask(
    mask: AttentionMask, shape: tuple[int, int], device: torch.device
) -> tuple[Sequences, RowLayout]:
    batch, length = shape
    padding, ids = mask.padding, mask.segment_ids
    index, real = torch.arange(batch * length, device=device), None
    if padding is not None:
        padding = padding.expand(batch, -1)
        flat = padding.flatten()
        if values_are_known(padding) and bool(flat.any()):
            index = flat.nonzero()[:, 0]
        else:
            index = (~flat).int().argsort(stable=True)
            real = flat[index]
    if ids is None:
        assert padding is not None
        lengths = padding.sum(1)
        starts = lengths.cumsum(0) - lengths
        known = values_are_known(padding) and batch > 0
        longest = max(int(lengths.max()), 1) if known else length
        return Sequences(starts, lengths, longest), RowLayout(shape, index, real)
    flat_ids = ids.expand(batch, -1).flatten()[index]
    row = index // max(length, 1)
    begins = torch.ones_like(index, dtype=torch.bool)
    begins[1:] = (row[1:] != row[:-1]) | (flat_ids[1:] != flat_ids[:-1])
    if real is not None:
        begins = begins & real
    count = index.shape[0] if real is None else real.sum()
    known = values_are_known(ids) and real is None
    if known:
        starts, rows_unknown = begins.nonzero()[:, 0], None
    else:
        starts = (~begins).int().argsort(stable=True)
        place = torch.arange(index.shape[0], device=device)
        starts, rows_unknown = torch.where(place < begins.sum(), starts, count), batch
    ends = torch.cat([starts[1:], starts.new_zeros(1) + count])
    lengths = ends - starts
    longest = int(lengths.max()) if known and lengths.shape[0] else length
    place = torch.arange(starts.shape[0], device=device)
    row_of = row[starts.clamp(max=max(index.shape[0] - 1, 0))]
    has_tokens = lengths > 0
    none = starts.shape[0]
    first = torch.full((batch,), none, device=device).scatter_reduce(
        0, row_of, torch.where(has_tokens, place, none), "amin"
    )
    last = torch.full((batch,), -1, device=device).scatter_reduce(
        0, row_of, torch.where(has_tokens, place, -1), "amax"
    )
    last = torch.where(last < 0, none, last)
    sequences = Sequences(starts, lengths, longest, rows_unknown)
    return sequences, RowLayout(shape, None if padding is None else index, real, first, last)


def without_needless_padding(mask: AttentionMask) -> AttentionMask:
    """Return the mask without padding if it is known that all tokens are real.

    On a GPU this waits for the device once for each mask, which layers share.
    """
    if mask.padding is None or not values_are_known(mask.padding):
        return mask
    kept = vars(mask)
    if "all_real" not in kept:
        kept["all_real"] = bool(mask.padding.all())
    return replace(mask, padding=None) if kept["all_real"] else mask
