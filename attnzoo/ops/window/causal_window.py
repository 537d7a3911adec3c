"""Causal softmax over a window of the latest keys, with the log-sum-exp and a state.

For mechanisms that combine it with a state over all earlier tokens. Time O(T W D), memory O(T D) on
a CPU; the state has a fixed size. Windows count real tokens: padding is moved to the end of the
rows, so that windows are contiguous, and back.
Letters: B batch, H query heads, Hkv key heads, T queries, D key size, E value size, W window,
G first tokens of a row, S keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.contract.context_parallel import SequenceShard, latest_before
from attnzoo.contract.implementation import Implementation, register_implementation, select
from attnzoo.contract.masks import AttentionMask
from attnzoo.contract.padding import gather_tokens
from attnzoo.contract.states import ImplChoice
from attnzoo.contract.validation import check_size, is_empty_call
from attnzoo.ops.window.band import band_softmax
from attnzoo.ops.window.blockwise_cpu import LocalOptions, blockwise_local_attention
from attnzoo.ops.window.cpu.band import OutsideSums, band_attention_cpp, band_cpp_reasons
from attnzoo.ops.window.pattern import Band, GlobalIndices
from attnzoo.ops.window.sinks import SinkKeys, split_sinks


class WindowState(NamedTuple):
    """The keys and values of the first tokens and of the window; of a fixed size."""

    k: Tensor  # [B, Hkv, G + W, D]: first keys, then the latest, the newest last; zeros if fewer
    v: Tensor  # [B, Hkv, G + W, E]
    seen: Tensor  # [B], int64: number of real tokens so far


# Attention within a band and to the first keys, for queries from an offset among the keys on, plus
# the sums over other keys if the implementation adds these: the output and the log-sum-exp
AttendBand = Callable[
    [Tensor, Tensor, Tensor, LocalOptions, int, OutsideSums | None], tuple[Tensor, Tensor]
]


class Window(NamedTuple):
    """Options of a call whose padding is at the end of the rows."""

    size: int  # W, in tokens, with the query's own
    scale: float  # multiplies query-key products
    padding_mask: Tensor | None  # [B, T] bool, true at real tokens
    segment_ids: Tensor | None  # [B, T]
    attend: AttendBand
    num_sinks: int = 0  # G, first tokens of each row that are seen outside the window too


class WindowCall(NamedTuple):
    """Inputs of a call whose padding is at the end of the rows."""

    q: Tensor
    k: Tensor
    v: Tensor
    window: int
    scale: float
    padding_mask: Tensor | None
    segment_ids: Tensor | None
    state: WindowState | None
    num_sinks: int

    def options(self, attend: AttendBand) -> Window:
        """Return the options of the call."""
        masks = self.padding_mask, self.segment_ids
        return Window(self.window, self.scale, *masks, attend, self.num_sinks)


def causal_window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int,
    scale: float,
    mask: AttentionMask,
    state: WindowState | None = None,
    return_state: bool = False,
    shard: SequenceShard | None = None,
    impl: str = "auto",
    num_sinks: int = 0,
) -> tuple[Tensor, Tensor, WindowState | None, ImplChoice]:
    """Compute softmax attention to the W latest real keys of the same segment.

    Args:
        q: Queries, ``[B, H, T, D]``.
        k: Keys, ``[B, Hkv, T, D]``; H is a multiple of Hkv.
        v: Values, ``[B, Hkv, T, E]``.
        window: W, with the query's own key.
        scale: Multiplies query-key products.
        mask: Padding and segments of a causal call.
        state: The window of an earlier call; not together with segments.
        return_state: Whether to return the window after the last real token.
        shard: This rank's part of sequences that several ranks hold, in place of ``state``.
        impl: ``"cpp"`` (CPUs), ``"torch"``, ``"reference"``, which computes with a dense mask, or
            ``"auto"``. One token after a state is computed in torch.
        num_sinks: G, first real tokens of each row that are seen outside the window too; not
            together with segments or ``shard``.

    Returns:
        The output ``[B, H, T, E]`` and the log-sum-exp of the scores, ``[B, H, T, 1]``, both
        float32 or wider and 0 at padding, the state, and the implementation.
    """
    check_size("window", window)
    assert not num_sinks or (mask.segment_ids is None and shard is None)
    padding_mask, ids, order = mask.padding, mask.segment_ids, None
    if shard is not None:
        latest_k, latest_v = latest_before((k, v), shard, window)
        state = WindowState(latest_k, latest_v, shard.tokens_before(k.shape[0], k.device))
    if padding_mask is not None:
        order, padding_mask, ids = padding_last(padding_mask, ids)
        q, k, v = (gather_tokens(x, order) for x in (q, k, v))
    call = WindowCall(q, k, v, window, scale, padding_mask, ids, state, num_sinks)
    chosen, choice = select("causal_window_attention", call, impl)
    out, lse = chosen.run(call)
    last = None
    if return_state:
        options = call.options(attend_torch)
        latest_k, latest_v, seen = next_window((k, v), state, options)
        last = WindowState(latest_k, latest_v, seen)
    if order is not None and padding_mask is not None:
        is_padding, back = ~padding_mask[:, None, :, None], order.argsort(1)
        out, lse = (gather_tokens(x.masked_fill(is_padding, 0), back) for x in (out, lse))
    return out, lse, last, choice


def padding_last(
    padding_mask: Tensor, segment_ids: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the order that moves padding to the end of rows, and the masks in that order."""
    order = padding_mask.int().argsort(dim=1, descending=True, stable=True)
    padding_mask = padding_mask.gather(1, order)
    if segment_ids is not None:
        ids = segment_ids.gather(1, order)
        segment_ids = torch.where(padding_mask, ids, (ids * padding_mask).amax(1, keepdim=True))
    return order, padding_mask, segment_ids


def causal_window(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: WindowState | None,
    x: Window,
    outside: OutsideSums | None = None,
) -> tuple[Tensor, Tensor]:
    """Return softmax attention to the W latest keys, and its log-sum-exp.

    ``outside`` are sums over earlier keys, if ``x.attend`` adds these.
    """
    padding_mask, ids, reach = x.padding_mask, x.segment_ids, (x.size - 1, 0)
    if x.num_sinks:
        return _window_and_sinks(q, k, v, state, x, outside)
    if state is None:
        return local_softmax(q, k, v, reach, x, outside)
    one_token = q.shape[2] == 1
    first = int(one_token)  # one token does not see the oldest key of the state
    k = torch.cat([state.k[:, :, first:].to(k.dtype), k], 2)
    v = torch.cat([state.v[:, :, first:].to(v.dtype), v], 2)
    if padding_mask is None:
        padding_mask = torch.ones(q.shape[0], q.shape[2], dtype=torch.bool, device=q.device)
    padding_mask = torch.cat([is_filled(state.seen, x.size)[:, first:], padding_mask], 1)
    if one_token:
        return dense_softmax(q, k, v, padding_mask[:, None, None], x.scale)
    if ids is not None:  # the state belongs to the first segment
        ids = torch.cat([ids[:, :1].expand(-1, x.size), ids], 1)
    x = x._replace(padding_mask=padding_mask, segment_ids=ids)
    attend = attend_dense if is_empty_call(q, k) else x.attend
    return attend(q, k, v, _options(reach, x), x.size, outside)


def next_window(
    new: Sequence[Tensor], state: WindowState | None, x: Window, old: Sequence[Tensor] = ()
) -> tuple[Tensor, ...]:
    """Return the W latest real tokens of some tensors, and the number of tokens seen, ``[B]``.

    Args:
        new: Keys, values and others of this call, ``[B, Hkv, T, X]`` each.
        state: The window before this call.
        x: Options of the call.
        old: The others before this call, ``[B, Hkv, W, X]`` each.
    """
    length = new[0].shape[2]
    if state is None:
        tokens = [F.pad(y, (0, 0, x.size, 0)) for y in new]
        seen = torch.zeros(len(new[0]), dtype=torch.long, device=new[0].device)
    else:
        latest_of_state = (y[:, :, x.num_sinks :] for y in (state.k, state.v))
        before = (*latest_of_state, *old)
        tokens = [torch.cat([a.to(b.dtype), b], 2) for a, b in zip(before, new, strict=True)]
        seen = state.seen
    if x.padding_mask is None:
        latest = [y[:, :, length:].clone() for y in tokens]
        count = torch.full_like(seen, length)
    else:
        count = x.padding_mask.sum(1)
        index = count[:, None] + torch.arange(x.size, device=seen.device)
        latest = [gather_tokens(y, index) for y in tokens]
    if x.segment_ids is not None:  # the next token belongs to the last segment
        in_last = x.segment_ids == x.segment_ids[:, -1:]
        count = (in_last if x.padding_mask is None else in_last & x.padding_mask).sum(1)
    if x.num_sinks:
        for i, sinks in enumerate(next_sinks(new[:2], state, seen, count, x.num_sinks)):
            latest[i] = torch.cat([sinks, latest[i]], 2)
    return *latest, seen + count


def next_sinks(
    new: Sequence[Tensor], state: WindowState | None, seen: Tensor, count: Tensor, num_sinks: int
) -> list[Tensor]:
    """Return keys and values of the first tokens after a call, ``[B, Hkv, G, X]`` each."""
    place = torch.arange(num_sinks, device=seen.device)
    index = place - seen[:, None]  # of the first tokens among the new ones
    is_new = ((index >= 0) & (index < count[:, None]))[:, None, :, None]
    length = new[0].shape[2]
    made = []
    for i, y in enumerate(new):
        old = y.new_zeros(*y.shape[:2], num_sinks, y.shape[3])
        if state is not None:
            old = state[i][:, :, :num_sinks].to(y.dtype)
        fresh = gather_tokens(y, index.clamp(0, length - 1)) if length else old
        made.append(torch.where(is_new, fresh, old))
    return made


def _window_and_sinks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: WindowState | None,
    x: Window,
    outside: OutsideSums | None,
) -> tuple[Tensor, Tensor]:
    """Return softmax attention to the first tokens and the W latest keys.

    The band leaves the first tokens out, so that none is counted twice.
    """
    length, size, offset = q.shape[2], x.num_sinks, 0
    real = x.padding_mask
    if state is not None:
        k, v = (torch.cat([a.to(b.dtype), b], 2) for a, b in ((state.k, k), (state.v, v)))
        if real is None:
            real = torch.ones(q.shape[0], length, dtype=torch.bool, device=q.device)
        place = torch.arange(size + x.size, device=q.device)
        rank = torch.where(place < size, place, state.seen[:, None] + place - (size + x.size))
        stored = torch.where(place < size, rank < state.seen[:, None], rank >= size)
        real, offset = torch.cat([stored, real], 1), size + x.size
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
    dense = is_empty_call(q, k) or (state is not None and length == 1)
    return (attend_dense if dense else x.attend)(q, k, v, options, offset, outside)


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
    q: Tensor,
    k: Tensor,
    v: Tensor,
    reach: tuple[int, int],
    x: Window,
    outside: OutsideSums | None = None,
) -> tuple[Tensor, Tensor]:
    """Return softmax attention to ``reach`` keys on either side, and its log-sum-exp."""
    length = q.shape[2]
    reach = (min(reach[0], length - 1), min(reach[1], length - 1))
    attend = attend_dense if is_empty_call(q, k) else x.attend
    return attend(q, k, v, _options(reach, x), 0, outside)


def _options(reach: tuple[int, int], x: Window) -> LocalOptions:
    return LocalOptions(
        Band(*reach, 1),
        reach[1] == 0,
        x.scale,
        x.padding_mask,
        segment_ids=x.segment_ids,
        return_lse=True,
    )


def dense_softmax(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return softmax attention and its log-sum-exp; finite for queries that see no key."""
    wide = torch.promote_types(q.dtype, torch.float32)
    q = q.to(wide).unflatten(1, (k.shape[1], -1)) * scale
    scores = (q @ k.to(wide).unsqueeze(2).mT).flatten(1, 2)
    scores = scores.masked_fill(~seen, torch.finfo(wide).min / 8)
    lse = scores.logsumexp(-1, keepdim=True)
    weights = (scores - lse).exp().unflatten(1, (k.shape[1], -1))
    return (weights @ v.to(wide).unsqueeze(2)).flatten(1, 2), lse


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
    if q.device.type == "cpu" and not torch.compiler.is_compiling():
        wide = torch.promote_types(q.dtype, torch.float32)
        if options.key_mask is not None:
            options = replace(options, key_mask=options.key_mask.expand(q.shape[0], -1))
        out, lse = blockwise_local_attention(q.to(wide), k.to(wide), v.to(wide), options)
        return out[:, :, offset:], lse[:, :, offset:]
    mask = AttentionMask(padding=options.key_mask, segment_ids=options.segment_ids)
    reach = options.band[:2]
    near, near_lse = band_softmax(q, k, v, window=reach, scale=options.scale, mask=mask)
    q, near, near_lse = (x[:, :, offset:] for x in (q, near, near_lse))
    if options.global_indices is None:
        return near, near_lse
    assert options.key_mask is not None
    sinks = SinkKeys(options.global_indices, options.key_mask)
    first_k, first_v = (gather_tokens(y, sinks.columns(q.shape[0])) for y in (k, v))
    seen = sinks.seen(q.shape[2], causal=True, offset=offset)[:, None]
    first, first_lse = dense_softmax(q, first_k, first_v, seen, options.scale)
    lse = torch.logaddexp(near_lse, first_lse)
    return near * (near_lse - lse).exp() + first * (first_lse - lse).exp(), lse


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


def _run(x: WindowCall, attend: AttendBand) -> tuple[Tensor, Tensor]:
    return causal_window(x.q, x.k, x.v, x.state, x.options(attend))


register_implementation(
    Implementation(
        op="causal_window_attention",
        name="cpp",
        devices=("cpu",),
        run=partial(_run, attend=band_attention_cpp),
        reasons=lambda call: band_cpp_reasons(),
        automatic="compiled for this CPU",
    ),
    Implementation(
        op="causal_window_attention",
        name="torch",
        run=partial(_run, attend=attend_torch),
        automatic="runs on every device",
    ),
    Implementation(
        op="causal_window_attention",
        name="reference",
        run=partial(_run, attend=attend_dense),
    ),
)
