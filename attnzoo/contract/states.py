"""The output of a call, and the states that layers keep between decoding steps.

All are named tuples of plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from attnzoo.contract.padding import values_are_known
from attnzoo.errors import UnsupportedError
from attnzoo.runtime.kernel_calls import is_transformed

FULL_STATE = 4096  # keys up to which a state has its full size from the first token on


class LinearState(NamedTuple):
    """Linear attention: sums over all tokens so far, of a fixed size."""

    kv: Tensor  # [B, Hkv, D, E], float32 or float64: the decayed sum of k v^T
    k: Tensor  # [B, Hkv, D]: the decayed sum of k, for the denominator


class CountedLinearState(NamedTuple):
    """Linear attention with positional features: the sums and the number of tokens."""

    kv: Tensor  # [B, Hkv, D, E], float32 or float64
    k: Tensor  # [B, Hkv, D]
    tokens: Tensor  # [B], integers, without padding: real tokens so far


class StabilizedState(NamedTuple):
    """mLSTM: sums with exponential weights, divided by the largest weight so far."""

    kv: Tensor  # [B, Hkv, D, E], float32 or float64: the sum of k v^T, times exp(-m)
    k: Tensor  # [B, Hkv, D]: the sum of k, times exp(-m)
    m: Tensor  # [B, Hkv]: the logarithm of that largest weight


class MatrixState(NamedTuple):
    """Linear attention with one decay per pair of a key channel and a value channel."""

    kv: Tensor  # [B, Hkv, D, E], float32 or float64: the decayed sum of k v^T
    k: Tensor  # [B, Hkv, D, E]: the decayed sum of k, for every value channel


class DeltaState(NamedTuple):
    """The delta rule: one matrix per key head, of a fixed size."""

    kv: Tensor  # [B, Hkv, D, E], float32 or float64: maps a key to the value written for it


class DeltaWindowState(NamedTuple):
    """The delta rule beside a softmax window of W keys and the first G: all keys and values."""

    kv: Tensor  # [B, Hkv, F, E], float32 or float64
    k: Tensor  # [B, Hkv, G + W, D]: first keys, then the latest, the newest last; zeros if fewer
    v: Tensor  # [B, Hkv, G + W, E]
    seen: Tensor  # [B], int64: number of real tokens so far


class DeltaConvolutionState(NamedTuple):
    """The delta rule after a short convolution: the matrix, and the latest convolved tokens."""

    kv: Tensor  # [B, Hkv, F, E], float32 or float64
    convolved: Tensor  # [B, W - 1, X]: their queries, keys and values; zeros if there are fewer


class DeltaWindowConvolutionState(NamedTuple):
    """The delta rule after a short convolution, beside a softmax window."""

    kv: Tensor  # [B, Hkv, F, E], float32 or float64
    k: Tensor  # [B, Hkv, W, D]: the window's keys, without convolution
    v: Tensor  # [B, Hkv, W, E]
    seen: Tensor  # [B], int64: number of real tokens so far
    convolved: Tensor  # [B, W - 1, X], W of the convolution


class KVState(NamedTuple):
    """The keys and values so far, or the latest of them under a sliding window."""

    k: Tensor  # [B, Hkv, S, D]
    v: Tensor  # [B, Hkv, S, E]
    positions: Tensor  # [B, S], int64: of each key's token in its row, -1 at padding
    length: Tensor  # [B], int64: tokens so far, padding included

    @property
    def real(self) -> Tensor:
        """The padding mask, ``[B, S]`` bool, false at padding."""
        return self.positions >= 0


def read_slots(pool: Sequence[Tensor], slots: Tensor) -> list[Tensor]:
    """Return the states at ``slots``, ``[B, ...]`` each; any state for -1; see :func:`put_slots`.

    Raises:
        UnsupportedError: A slot is no row of the pool.
    """
    check_slots(slots, pool[0].shape[0])
    index = slots.clamp(min=0)
    return [x[index] for x in pool]


def check_slots(slots: Tensor, states: int) -> None:
    """Raise ``UnsupportedError`` if slots are not rows of a pool of ``states``, or -1.

    A kernel in C++ checks them itself. On a GPU, the error is an assertion there, for which nothing
    waits. In a graph of ``torch.compile`` they are not checked: its operations check their indices.
    """
    if torch.compiler.is_compiling() or is_transformed():
        return
    if slots.is_cuda:
        is_inside = (slots >= -1) & (slots < states)
        torch._assert_async(is_inside.all(), f"slots must be below {states}, or -1")
    elif values_are_known(slots) and wrong_slot(slots, states) is not None:
        refuse_slots(slots, states)


def wrong_slot(slots: Tensor, states: int) -> int | None:
    """Return the index of the first slot that is no row of a pool, or ``None``."""
    values = slots.tolist()
    return next((i for i, slot in enumerate(values) if not -1 <= slot < states), None)


def refuse_slots(slots: Tensor | None, states: int) -> NoReturn:
    """Raise ``UnsupportedError`` for slots of which one is no row of a pool of ``states``."""
    assert slots is not None
    index = wrong_slot(slots, states)
    assert index is not None
    raise UnsupportedError(
        f"slots must be below {states}, the states of the pool, or -1 for no token; slot {index} "
        f"is {int(slots[index])}."
    )


def put_slots(
    pool: Sequence[Tensor], slots: Tensor, rows: Sequence[Tensor], *, in_place: bool
) -> list[Tensor]:
    """Return the tensors of a pool of states, with new rows at ``slots``.

    Args:
        pool: ``[P, ...]`` each.
        slots: Row of each new state, ``[B]``; -1 for none. No row may occur twice.
        rows: ``[B, ...]`` each.
        in_place: Whether the tensors of the pool are overwritten.
    """
    slots, is_new, after = slots.to(torch.int64), slots >= 0, []
    first = is_new.int().argmax(0, keepdim=True)  # a graph reads the value of a 0-D index
    for old, new in zip(pool, rows, strict=True):
        if not in_place:  # one more row collects those of -1
            longer = torch.cat([old, old[:1]])
            after.append(longer.index_copy(0, torch.where(is_new, slots, old.shape[0]), new)[:-1])
            continue
        index = torch.where(is_new, slots, slots[first].clamp(min=0))  # -1: the first row again
        row = is_new.view(-1, *(1,) * (new.dim() - 1))
        again = torch.where(row[first], new[first], old[slots[first].clamp(min=0)])
        after.append(old.index_copy_(0, index, torch.where(row, new, again)))
    return after


def run_at_slots(
    run: Callable[[list[Tensor]], tuple[Tensor, Sequence[Tensor]]],
    pool: Sequence[Tensor],
    slots: Tensor,
    *,
    in_place: bool,
) -> tuple[Tensor, list[Tensor]]:
    """Run one token of each sequence from its row of a pool of states.

    Args:
        run: Returns the output, ``[B, H, 1, E]``, and the next states from those at ``slots``.
        pool: As in :func:`put_slots`, like ``slots`` and ``in_place``.
        slots: See pool.
        in_place: See pool.

    Returns:
        The output, 0 for sequences without a token, and the pool with the next states.

    Raises:
        UnsupportedError: A slot is no row of the pool.
    """
    out, rows = run(read_slots(pool, slots))
    after = put_slots(pool, slots, rows, in_place=in_place)
    return out.masked_fill(slots[:, None, None, None] < 0, 0), after


def run_on_slots(x: Any, run: Callable[[Any], tuple[Tensor, Any]]) -> tuple[Tensor, Any]:
    """Run one token on the states at ``slots``, if there are any, and return the next pool.

    Args:
        x: The inputs of an op, a named tuple with ``state``, ``slots``, ``return_state`` and
            ``reuse_state``.
        run: Returns the output and the next state of inputs without slots.
    """
    if x.slots is None:
        return run(x)
    kind = type(x.state)

    def run_rows(state: list[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
        here = x._replace(state=kind(*state), slots=None, return_state=True, reuse_state=False)
        return run(here)

    out, pool = run_at_slots(run_rows, x.state, x.slots, in_place=x.reuse_state)
    return out, kind(*pool)


def keep_pool(pool: Any, slots: Tensor, output: AttentionOutput) -> AttentionOutput:
    """Return the output with ``pool`` as its state, to which the new rows are written.

    Args:
        pool: The state of the call, a named tuple of ``[P, ...]``.
        slots: ``[B]``; -1 for none.
        output: Its state is the next pool: the same tensors where the backend has overwritten them.
    """
    for old, new in zip(pool, output.state, strict=True):  # type: ignore[arg-type]
        if new is not old:
            put_slots([old], slots, [new[slots.clamp(min=0)]], in_place=True)
    return output._replace(state=pool)


class ImplChoice(NamedTuple):
    """The implementation that a call ran, and the reason."""

    impl: str
    reason: str


def rows_of_state(limit: int, held: int | None, seen: Tensor | None, tokens: int) -> int:
    """Return how many of the latest keys a state has space for after a call.

    A state of up to ``FULL_STATE`` keys has all rows from the first token on, so that its shape
    never changes; a larger one doubles with the tokens.

    Args:
        limit: Most keys.
        held: Rows of the state before the call; ``None`` without a state.
        seen: Tokens of each sequence before the call, ``[B]``.
        tokens: New tokens, at most.

    Raises:
        UnsupportedError: The state would have to grow in a compiled graph.
    """
    if limit <= FULL_STATE or held == limit:
        return limit
    if torch.compiler.is_compiling():
        if held is None:
            return limit
        raise UnsupportedError(
            f"a state of the {limit} latest keys grows with the tokens beyond {FULL_STATE}, which "
            "torch.compile does not support; take a window of at most so many keys, or decode "
            "without torch.compile"
        )
    if seen is not None and seen.numel():
        tokens += int(seen.max())
    return min(limit, 1 << (max(tokens, held or 0, FULL_STATE) - 1).bit_length())


class AttentionOutput(NamedTuple):
    """Output of attention; ``state`` and ``weights`` only if they are requested."""

    out: Tensor  # [B, H, T, E], in the dtype of the values
    state: Any | None = None  # a named tuple of tensors, batch first
    weights: Tensor | None = None  # [B, H, T, S]: the effective attention matrix
    impl: ImplChoice | None = None  # the implementation that ran
