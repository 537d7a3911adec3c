"""Causal softmax over a window of the latest keys, with the log-sum-exp and a state.

For mechanisms that combine it with a state over all earlier tokens. Time O(T W D), memory O(T D) in
C++; the state has a fixed size. In one row of sequences, queries see the keys of their own
sequence. With a state or first tokens, each sequence becomes a row, padded at its end, where no
query sees the padding. Other letters: W window, G first tokens of a sequence, N tokens of one row
of sequences, R rows or sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.contract.context_parallel import SequenceShard, latest_before
from attnzoo.contract.implementation import (
    CPP,
    TORCH,
    Implementation,
    register_implementation,
    select,
)
from attnzoo.contract.masks import AttentionMask
from attnzoo.contract.padding import fill_padding, gather_tokens
from attnzoo.contract.sequences import Sequences, take
from attnzoo.contract.states import ImplChoice, put_slots, read_slots
from attnzoo.contract.validation import check_sequences, check_size, is_empty_call
from attnzoo.ops.window import flex
from attnzoo.ops.window.band import LocalOptions, band_attention, dense_softmax
from attnzoo.ops.window.cpu.band import OutsideSums, band_attention_cpp, band_cpp_reasons
from attnzoo.ops.window.pattern import Band, GlobalIndices, SinkKeys, split_sinks


class WindowState(NamedTuple):
    """The keys and values of the first tokens and of the window; of a fixed size."""

    k: Tensor  # [B, Hkv, G + W, D]: first keys, then the latest, the newest last; zeros if fewer
    v: Tensor  # [B, Hkv, G + W, E]
    seen: Tensor  # [B], int64: number of tokens so far


# Attention within a band and to the first keys, for queries from an offset among the keys on, plus
# the sums over other keys if the implementation adds these: the output and the log-sum-exp
AttendBand = Callable[
    [Tensor, Tensor, Tensor, LocalOptions, int, OutsideSums | None], tuple[Tensor, Tensor]
]


class WindowInputs(NamedTuple):
    """Inputs of a call: rows, or one row of sequences without a state and first tokens."""

    q: Tensor
    k: Tensor
    v: Tensor
    size: int  # W, in tokens, with the query's own
    scale: float  # multiplies query-key products
    ids: Tensor | None  # of one row: [1, N], the sequence of each token
    state: WindowState | None = None
    num_sinks: int = 0  # G, first tokens of each row that are seen outside the window too


def causal_window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int,
    scale: float,
    sequences: Sequences | None = None,
    state: WindowState | None = None,
    return_state: bool = False,
    shard: SequenceShard | None = None,
    impl: str = "auto",
    num_sinks: int = 0,
    slots: Tensor | None = None,
    reuse_state: bool = False,
) -> tuple[Tensor, Tensor, WindowState | None, ImplChoice]:
    """Compute softmax attention to the W latest keys.

    Args:
        q: Queries, ``[B, H, T, D]``.
        k: Keys, ``[B, Hkv, T, D]``; H is a multiple of Hkv.
        v: Values, ``[B, Hkv, T, E]``.
        window: W, with the query's own key.
        scale: Multiplies query-key products.
        sequences: The sequences of one row, B = 1, which do not see each other; there is a state
            for each. ``None``: each row is a sequence.
        state: The window of an earlier call.
        return_state: Whether to return the window after the last token.
        shard: This rank's part of sequences that several ranks hold, in place of ``state``.
        impl: ``"cpp"`` (CPUs), ``"flex"`` (CUDA), ``"torch"``, ``"reference"``, which computes with
            a dense mask, or ``"auto"``. One token after a state is computed in torch.
        num_sinks: G, first tokens of each sequence that are seen outside the window too; not
            together with ``shard``.
        slots: For one token of each of B sequences: the row of each in ``state``, which is a pool
            of states, ``[B]`` integers; -1 for a sequence without a token, whose output is 0. The
            returned state is the pool.
        reuse_state: Whether the tensors of a pool are overwritten; without gradients.

    Returns:
        The output ``[B, H, T, E]`` and the log-sum-exp of the scores, ``[B, H, T, 1]``, both
        float32 or wider and 0 outside of sequences, the state, and the implementation.
    """
    check_size("window", window)
    check_sequences(sequences, slots, q, k)
    assert not num_sinks or shard is None
    pool = state
    if slots is not None:
        assert state is not None
        state = WindowState._make(read_slots(state, slots))
    if shard is not None:
        state = shard.states(_state_before_shard(k, v, window, shard), sequences)
    given = WindowInputs(q, k, v, window, scale, None, state, num_sinks)
    x, in_rows = given, sequences is not None and (state is not None or num_sinks > 0)
    if sequences is not None and in_rows:
        rows = [sequences.to_rows(y) for y in (q, k, v)]
        x = given._replace(q=rows[0], k=rows[1], v=rows[2])
    elif sequences is not None:
        ids = sequences.index(q.shape[2])[None]
        inside = ids < sequences.count
        q, k, v = (fill_padding(y, inside) for y in (q, k, v))
        x = given._replace(q=q, k=k, v=v, ids=ids)
    chosen, choice = select("causal_window_attention", x, impl)
    out, lse = chosen.run(x)
    if sequences is not None and in_rows:
        out, lse = (sequences.to_row(y, q.shape[2]) for y in (out, lse))
    elif sequences is not None:
        lse = fill_padding(lse, inside)
    after = next_window(given, sequences) if return_state else None
    if slots is not None:
        is_none = slots[:, None, None, None] < 0
        out, lse = out.masked_fill(is_none, 0), lse.masked_fill(is_none, 0)
        if pool is not None and after is not None:
            in_place = reuse_state and not torch.is_grad_enabled()
            after = WindowState._make(put_slots(pool, slots, after, in_place=in_place))
    return out, lse, after, choice


def _state_before_shard(k: Tensor, v: Tensor, window: int, shard: SequenceShard) -> WindowState:
    """Return the window before the tokens of a rank's rows."""
    k, v = shard.rows(k), shard.rows(v)
    latest_k, latest_v = latest_before((k, v), shard, window)
    return WindowState(latest_k, latest_v, shard.tokens_before(k.shape[0], k.device))


def causal_window(
    x: WindowInputs, attend: AttendBand, outside: OutsideSums | None = None
) -> tuple[Tensor, Tensor]:
    """Return softmax attention to the W latest keys, and its log-sum-exp.

    ``outside`` are sums over earlier keys, if ``attend`` adds these.
    """
    q, k, v, state = x.q, x.k, x.v, x.state
    if q.shape[2] == 0:
        x = x._replace(state=None, num_sinks=0)
        return local_softmax(x, (x.size - 1, 0), attend, outside)
    if x.num_sinks:
        return _window_and_sinks(x, attend, outside)
    if state is None:
        return local_softmax(x, (x.size - 1, 0), attend, outside)
    assert x.ids is None
    one_token = q.shape[2] == 1
    first = int(one_token)  # one token does not see the oldest key of the state
    k = torch.cat([state.k[:, :, first:].to(k.dtype), k], 2)
    v = torch.cat([state.v[:, :, first:].to(v.dtype), v], 2)
    stored = is_filled(state.seen, x.size)[:, first:]
    seen = F.pad(stored, (0, q.shape[2]), value=True)
    if one_token:
        return dense_softmax(q, k, v, seen[:, None, None], x.scale)
    options = LocalOptions(Band(x.size - 1, 0, 1), True, x.scale, seen, return_lse=True)
    return (attend_dense if is_empty_call(q, k) else attend)(q, k, v, options, x.size, outside)


def next_window(x: WindowInputs, sequences: Sequences | None) -> WindowState:
    """Return the window after a call; ``x`` is in the layout of the call, before rows."""
    old_k, old_v = (None, None) if x.state is None else x.state[:2]
    seen = tokens_after(x.state, x.k, sequences)
    if not x.num_sinks:
        k = latest_tokens(x.k, x.size, old_k, sequences)
        return WindowState(k, latest_tokens(x.v, x.size, old_v, sequences), seen)

    def latest(new: Tensor, old: Tensor | None) -> Tensor:
        of_window = None if old is None else old[:, :, x.num_sinks :]
        found = latest_tokens(new, x.size, of_window, sequences)
        before = None if old is None or x.state is None else (old, x.state.seen)
        return torch.cat([first_tokens(new, x.num_sinks, before, sequences), found], 2)

    return WindowState(latest(x.k, old_k), latest(x.v, old_v), seen)


def grow_window(x: Tensor, rows: int, num_sinks: int) -> Tensor:
    """Return first and latest keys or values ``[B, Hkv, G + W, X]`` with zeros before the latest.

    Args:
        x: The rows of a state, the newest last.
        rows: The new W.
        num_sinks: G.
    """
    sinks, latest = x.tensor_split([num_sinks], 2)
    return torch.cat([sinks, F.pad(latest, (0, 0, rows - latest.shape[2], 0))], 2)


def tokens_after(state: WindowState | None, new: Tensor, sequences: Sequences | None) -> Tensor:
    """Return the number of tokens of each sequence after a call, ``[R]`` int64."""
    if sequences is None:
        count = torch.full((new.shape[0],), new.shape[2], device=new.device)
    else:
        count = sequences.lengths.clone()  # a step may overwrite it
    return count if state is None else state.seen + count


def latest_tokens(
    new: Tensor, count: int, old: Tensor | None, sequences: Sequences | None
) -> Tensor:
    """Return the latest tokens of each sequence, the newest last; zeros if there are fewer.

    Args:
        new: ``[B, Hkv, T, X]``.
        count: Tokens to return.
        old: Those before the call, ``[R, Hkv, count, X]``; ``None``: zeros.
        sequences: Those of ``new``, if it is one row.

    Returns:
        ``[R, Hkv, count, X]``.
    """
    if sequences is None:
        length = new.shape[2]
        if old is None and torch.compiler.is_compiling():
            return F.pad(new, (0, 0, count, 0))[:, :, length:]
        if old is None:
            return F.pad(new[:, :, max(length - count, 0) :], (0, 0, max(count - length, 0), 0))
        if torch.compiler.is_compiling():  # a minimum of lengths would limit an exported program
            return torch.cat([old.to(new.dtype), new], 2)[:, :, length:]
        kept = old[:, :, min(length, count) :].to(new.dtype)
        return torch.cat([kept, new[:, :, max(length - count, 0) :]], 2)
    place = sequences.lengths[:, None] - count + torch.arange(count, device=new.device)
    latest = _tokens_at(new, sequences.starts[:, None] + place, place >= 0)
    if old is None:
        return latest
    index = (place + count).clamp(0, count - 1)
    kept = gather_tokens(old.to(new.dtype), index)
    return torch.where((place >= 0)[:, None, :, None], latest, kept)


def first_tokens(
    new: Tensor,
    count: int,
    before: tuple[Tensor, Tensor] | None,
    sequences: Sequences | None,
) -> Tensor:
    """Return the first tokens of each sequence after a call; zeros if there are fewer.

    Args:
        new: ``[B, Hkv, T, X]``.
        count: G.
        before: Tokens before the call, of which the first G are those, and how many tokens there
            were, ``[R]``.
        sequences: Those of ``new``, if it is one row.

    Returns:
        ``[R, Hkv, G, X]``.
    """
    place = torch.arange(count, device=new.device)
    if before is None and sequences is None:
        return F.pad(new[:, :, :count], (0, 0, 0, max(count - new.shape[2], 0)))
    if sequences is None:
        steps = torch.arange(new.shape[0], device=new.device) * new.shape[2]
        lengths = torch.full_like(steps, new.shape[2])
        new = new.transpose(1, 2).flatten(0, 1).unsqueeze(0).transpose(1, 2)
    else:
        steps, lengths = sequences.starts, sequences.lengths
    index = place if before is None else place - before[1][:, None]
    is_new = (index >= 0) & (index < lengths[:, None])
    first = _tokens_at(new, steps[:, None] + index, is_new)
    if before is None:
        return first
    return torch.where(is_new[:, None, :, None], first, before[0][:, :, :count].to(new.dtype))


def _tokens_at(row: Tensor, index: Tensor, where: Tensor) -> Tensor:
    """Return tokens ``[R, C]`` of one row ``[1, Hkv, N, X]`` as rows; zeros where not true."""
    tokens = row.squeeze(0).transpose(0, 1)
    found = take(tokens, index.flatten(), where.expand_as(index).flatten())
    return found.view(*index.shape, *tokens.shape[1:]).transpose(1, 2)


def _window_and_sinks(
    x: WindowInputs, attend: AttendBand, outside: OutsideSums | None
) -> tuple[Tensor, Tensor]:
    """Return softmax attention to the first tokens and the W latest keys.

    The band leaves the first tokens out, so that none is counted twice.
    """
    q, k, v, state, size = x.q, x.k, x.v, x.state, x.num_sinks
    assert x.ids is None
    offset, real = 0, None
    if state is not None:
        k, v = (torch.cat([a.to(b.dtype), b], 2) for a, b in ((state.k, k), (state.v, v)))
        place = torch.arange(size + x.size, device=q.device)
        rank = torch.where(place < size, place, state.seen[:, None] + place - (size + x.size))
        stored = torch.where(place < size, rank < state.seen[:, None], rank >= size)
        real, offset = F.pad(stored, (0, q.shape[2]), value=True), size + x.size
    sinks = split_sinks(AttentionMask(padding=real, num_sinks=size), k.shape[2], q.device)
    reach = min(x.size, k.shape[2]) - 1
    options = LocalOptions(
        Band(reach, 0, 1),
        True,
        x.scale,
        sinks.others,
        GlobalIndices(*(y.expand(q.shape[0], -1) for y in sinks.indices)),
        return_lse=True,
    )
    dense = is_empty_call(q, k) or (state is not None and q.shape[2] == 1)
    return (attend_dense if dense else attend)(q, k, v, options, offset, outside)


def _dense_mask(sinks: SinkKeys, reach: int, queries: int, offset: int) -> Tensor:
    """Return which keys each query attends to, ``[1 or B, 1, T, S]`` bool."""
    positions, valid = sinks.indices
    key = torch.arange(sinks.others.shape[1], device=positions.device)
    distance = torch.arange(queries, device=key.device)[:, None] + offset - key
    is_sink = (positions[:, :, None] == key).logical_and(valid[:, :, None]).any(1)
    in_band = (distance >= 0) & (distance <= reach) & sinks.others[:, None]
    return (in_band | (is_sink[:, None] & (distance >= 0)))[:, None]


def is_filled(seen: Tensor, size: int) -> Tensor:
    """Return which of ``size`` places of the window hold a key, ``[B, W]`` bool."""
    place = torch.arange(size, device=seen.device)
    return place >= size - seen[:, None]


def local_softmax(
    x: WindowInputs,
    reach: tuple[int, int],
    attend: AttendBand,
    outside: OutsideSums | None = None,
) -> tuple[Tensor, Tensor]:
    """Return softmax attention to ``reach`` keys on either side, and its log-sum-exp."""
    assert x.state is None
    length = x.q.shape[2]
    reach = (min(reach[0], length - 1), min(reach[1], length - 1))
    options = LocalOptions(
        Band(*reach, 1), reach[1] == 0, x.scale, segment_ids=x.ids, return_lse=True
    )
    attend = attend_dense if 0 in x.k.shape else attend
    return attend(x.q, x.k, x.v, options, 0, outside)


# -- implementations -------------------------------------------------------------------------------


def attend_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: LocalOptions,
    offset: int,
    outside: OutsideSums | None,
) -> tuple[Tensor, Tensor]:
    """Compute :data:`AttendBand` in blocks of queries, without sums over other keys."""
    assert outside is None
    if offset:
        q = F.pad(q, (0, 0, offset, 0))
    out, lse = band_attention(q, k, v, options)
    return out[:, :, offset:], lse[:, :, offset:]


def attend_dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: LocalOptions,
    offset: int,
    outside: OutsideSums | None,
) -> tuple[Tensor, Tensor]:
    """Compute :data:`AttendBand` with a dense mask, without sums over other keys."""
    assert outside is None
    keys, reach = k.shape[2], options.band[:2]
    if options.global_indices is not None:
        assert options.key_mask is not None
        sinks = SinkKeys(options.global_indices, options.key_mask)
        seen = _dense_mask(sinks, reach[0], q.shape[2], offset)
    else:
        mask = AttentionMask(
            window=reach, padding=options.key_mask, segment_ids=options.segment_ids
        )
        dense = mask.dense(keys, keys, q.device)
        assert dense is not None
        seen = dense[:, :, offset:]
    return dense_softmax(q, k, v, seen, options.scale)


register_implementation(
    Implementation(
        op="causal_window_attention",
        **CPP,
        run=partial(causal_window, attend=band_attention_cpp),
        reasons=lambda call: band_cpp_reasons(),
    ),
    Implementation(
        op="causal_window_attention",
        **flex.FLEX,
        run=partial(causal_window, attend=flex.attend_flex),
        reasons=lambda call: flex.flex_reasons(call.q, call.k, call.v),
        auto_reasons=lambda call: ["one query needs one row of a mask"] * (call.q.shape[2] == 1),
    ),
    Implementation(
        op="causal_window_attention",
        **TORCH,
        run=partial(causal_window, attend=attend_torch),
    ),
    Implementation(
        op="causal_window_attention",
        name="reference",
        run=partial(causal_window, attend=attend_dense),
    ),
)
