"""Banded softmax in C++, for CPUs: windows, dilation, global keys, both passes.

The sums of another mechanism over the keys outside the band may share the denominator.

See ``band.cpp`` and ``attnzoo/runtime/cpp``. Other letters: G global keys, P pieces.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnzoo.errors import UnsupportedError, short_repr
from attnzoo.ops.window.band import LocalOptions
from attnzoo.runtime import cpp
from attnzoo.runtime.cpp.layout import Function
from attnzoo.runtime.kernel_calls import (
    LANES,
    TYPE_NAMES,
    Rows,
    autocast_disabled,
    check_reverse_mode,
    differentiable_op,
    empty_huge_pages,
    pad_to_simd,
    rows_of,
    unpad,
    with_contiguous_rows,
)

MAX_PIECES = 8  # of a key head in the backward pass; each has gradients of all keys and values
INSTEAD = "impl='reference' of the op, or backend 'softmax' in a model"  # for second derivatives


class _Task(ctypes.Structure):
    """The arguments of the C++ functions; ``Task`` of ``band.cpp``."""

    _fields_ = [
        *cpp.fields(
            ctypes.c_int64,
            "threads batch heads groups queries keys key_size value_size key_width value_width "
            "before after dilation offset causal num_global relative far_start far_size pieces",
        ),
        *cpp.fields(ctypes.c_int64 * 3, "out_steps d_out_steps far_steps"),
        ("scale", ctypes.c_double),
        *cpp.fields(ctypes.c_void_p, "ids key_mask global_keys global_is_valid"),
        *cpp.fields(Rows, "q k v"),
        *cpp.fields(
            ctypes.c_void_p,
            "out lse far far_totals logit d_out d_lse dq dk dv d_far d_far_totals d_logit",
        ),
    ]


BAND = cpp.Source(
    Path(__file__).with_name("band.cpp"),
    {
        f"band_{direction}_{name}": Function((_Task,), ctypes.c_int64)
        for direction in ("forward", "backward")
        for name in TYPE_NAMES.values()
    },
)


class OutsideSums(NamedTuple):
    """Sums over keys outside the band, which share the denominator with the band's weights.

    With the band's output n and log-sum-exp l, the sums u of values and s of weights, and their
    logit f, outputs are ``(exp(l) n + exp(f) u) / (exp(l) + exp(f) s)``. Where s is 0 or below
    ``MIN_WEIGHT`` of the kernel, they are n.
    """

    sums: Tensor  # u of the last R queries, [B, H, R, E]
    totals: Tensor  # s of the same queries, [B, H, R]
    logit: Tensor  # f, [B, H, T]
    relative: bool  # whether l is 0 in this formula, so that weights are relative to the band's


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _build_reasons() -> tuple[str, ...]:
    return tuple(filter(None, (cpp.unavailable_reason(BAND),)))


def band_cpp_reasons() -> list[str]:
    """Return why the kernel is unavailable; an empty list if it is not."""
    return list(_build_reasons())


def band_attention_cpp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: LocalOptions,
    offset: int = 0,
    outside: OutsideSums | None = None,
) -> tuple[Tensor, Tensor]:
    """Return attention within a band and to global keys.

    Time O(T (w + G) D), memory O(T (D + E)).

    Args:
        q: Queries, ``[B, H, T, D]``; all heads have the same band.
        k: Keys, ``[B, Hkv, S, D]``.
        v: Values, ``[B, Hkv, S, E]``.
        options: Band, scale and masks. Segments are runs of equal ids of the keys.
        offset: Position of query 0 among the keys; T + offset is at most S.
        outside: Sums over other keys to be added.

    Returns:
        The output ``[B, H, T, E]`` and the log-sum-exp of each query's scores, ``[B, H, T, 1]``,
        both float32 or wider. A query that sees no key gives 0 and a finite log-sum-exp.
    """
    sums, totals, logit, relative = outside or (None, None, None, False)
    check_reverse_mode("sliding-window attention", q, k, v, sums, totals, logit, instead=INSTEAD)
    batch = q.shape[0]
    masks = [options.key_mask, options.segment_ids, *(options.global_indices or (None, None))]
    for i, x in enumerate(masks):
        masks[i] = None if x is None else x.expand(batch, -1).contiguous()
    band = [*options.band, offset, int(options.causal), int(relative)]
    with autocast_disabled(q.device):
        tensors = (q, k, v, sums, totals, logit, *masks)
        out, lse = band_softmax_cpp(*tensors, band, options.scale)
    return out, lse.unsqueeze(3)


class _Arguments:
    """The tensors of one call, and the task that points to them."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        outside: tuple[Tensor | None, ...],
        masks: tuple[Tensor | None, ...],
        band: list[int],
        scale: float,
    ) -> None:
        dtype = torch.promote_types(q.dtype, torch.float32)
        self.dtype, self.sizes = dtype, (q.shape[3], v.shape[3])
        self.widths = q.shape[3] + -q.shape[3] % LANES, v.shape[3] + -v.shape[3] % LANES
        self.q, self.k, self.v = with_contiguous_rows(q, k, v)
        key_mask, ids, global_keys, valid = masks
        ids = None if ids is None else ids.to(torch.int64).contiguous()
        if global_keys is not None:
            global_keys = global_keys.to(torch.int64).contiguous()
        self.masks = ids, key_mask, global_keys, valid
        sums, totals, logit = outside
        if sums is not None and totals is not None and logit is not None:
            (sums,) = with_contiguous_rows(sums.to(dtype))
            totals, logit = totals.to(dtype).contiguous(), logit.to(dtype).contiguous()
        self.outside = sums, totals, logit
        batch, heads, keys, _ = self.k.shape
        threads = torch.get_num_threads()
        self.task = _Task(
            threads=threads,
            batch=batch,
            heads=heads,
            groups=q.shape[1] // heads,
            queries=q.shape[2],
            keys=keys,
            key_size=self.sizes[0],
            value_size=self.sizes[1],
            key_width=self.widths[0],
            value_width=self.widths[1],
            before=min(band[0], keys),
            after=min(band[1], keys),
            dilation=min(band[2], max(keys, 1)),
            offset=band[3],
            causal=band[4],
            num_global=0 if global_keys is None else global_keys.shape[1],
            relative=band[5],
            far_start=0 if sums is None else q.shape[2] - sums.shape[2],
            far_size=v.shape[3],
            pieces=min(-(-threads // (batch * heads)), MAX_PIECES),
            scale=scale,
            **dict(zip("qkv", rows_of(self.q, self.k, self.v), strict=True)),
        )
        given = {"far": sums, "far_totals": totals, "logit": logit, "ids": ids}
        _set_pointers(
            self.task, **given, key_mask=key_mask, global_keys=global_keys, global_is_valid=valid
        )
        if sums is not None:
            self.task.far_steps = _steps(sums)

    def run(self, direction: str) -> None:
        """Call the kernel of a direction.

        Raises:
            UnsupportedError: Positions are outside of the keys.
        """
        function = getattr(cpp.load(BAND), f"band_{direction}_{TYPE_NAMES[self.dtype]}")
        if function(self.task):
            task = self.task
            raise UnsupportedError(
                f"queries and global keys must be among the {task.keys} keys; got {task.queries} "
                f"queries from position {task.offset} on, and global keys at "
                f"{[] if self.masks[2] is None else short_repr(self.masks[2].tolist())}."
            )


def _forward(
    q: Tensor,  # [B, H, T, D]
    k: Tensor,  # [B, Hkv, S, D]
    v: Tensor,  # [B, Hkv, S, E]
    sums: Tensor | None,  # as in OutsideSums, like the next two
    totals: Tensor | None,  # [B, H, R]
    logit: Tensor | None,  # [B, H, T]
    key_mask: Tensor | None,  # keys that the band may see, [B, S] bool
    segment_ids: Tensor | None,  # [B, S]
    global_keys: Tensor | None,  # increasing positions, [B, G]
    global_is_valid: Tensor | None,  # [B, G] bool
    band: list[int],
    scale: float,  # multiplies the products
) -> tuple[Tensor, Tensor]:
    """Return the output ``[B, H, T, E]`` and the log-sum-exp ``[B, H, T]``.

    ``band`` has the keys before and after, the dilation, the position of query 0, whether later
    global keys are masked, and whether the logit is relative to the band's weights.
    """
    outside, masks = (
        (sums, totals, logit),
        (key_mask, segment_ids, global_keys, global_is_valid),
    )
    x = _Arguments(q, k, v, outside, masks, band, scale)
    # Threads take the next piece of a key head as they finish one, so that 3 heads occupy 2 threads
    # to the end; pieces cost no memory
    units = x.task.batch * x.task.heads
    if units % x.task.threads:
        x.task.pieces = -(-4 * x.task.threads // units)
    batch, heads, length, _ = q.shape
    # stored as [B, T, H, E], so that the layer can join its heads without a copy
    out = empty_huge_pages(x.v, (batch, length, heads, x.widths[1]), x.dtype)
    lse = out.new_empty(batch, heads, length)
    x.task.out, x.task.lse, x.task.out_steps = (
        out.data_ptr(),
        lse.data_ptr(),
        _steps(out.transpose(1, 2)),
    )
    x.run("forward")
    out = out if x.widths[1] == x.sizes[1] else unpad(out, x.sizes[1])
    return out.transpose(1, 2), lse


def _backward(
    d_outs: Sequence[Tensor | None], saved: Sequence[Tensor], needed: list[bool], *inputs: Any
) -> list[Tensor | None]:
    """Return the gradients of q, k, v, sums, totals, logit and four masks.

    Those of q, k and v are computed if needed.
    """
    q, k, v, sums, totals, logit, *masks, band, scale = inputs
    (d_out, d_lse), (out, lse) = d_outs, saved
    x = _Arguments(q, k, v, (sums, totals, logit), tuple(masks), band, scale)
    d_out = out.new_zeros(1).expand(out.shape) if d_out is None else d_out.to(out.dtype)
    out, d_out, lse = pad_to_simd(out), pad_to_simd(d_out), lse.contiguous()
    d_lse = None if d_lse is None else d_lse.contiguous()
    pieces = x.task.pieces
    dq = empty_huge_pages(x.q, (*q.shape[:3], x.widths[0]), x.dtype) if needed[0] else None
    dk, dv = (
        empty_huge_pages(y, (pieces, *y.shape[:3], width), x.dtype).zero_() if need else None
        for y, width, need in zip((x.k, x.v), x.widths, needed[1:3], strict=True)
    )
    x.task.out_steps, x.task.d_out_steps = _steps(out), _steps(d_out)
    d_sums, d_totals, d_logit = (lse.new_empty(0) for _ in range(3))
    if sums is not None:
        d_sums, d_logit = empty_huge_pages(lse, tuple(sums.shape)), torch.zeros_like(lse)
        d_totals = lse.new_empty(sums.shape[:3])
    given = {"out": out, "lse": lse, "d_out": d_out, "d_lse": d_lse, "dq": dq, "dk": dk, "dv": dv}
    given |= {"d_far": d_sums, "d_far_totals": d_totals, "d_logit": d_logit}
    _set_pointers(x.task, **given)
    x.run("backward")
    dk, dv = (y if y is None else y[0] if pieces == 1 else y.sum(0) for y in (dk, dv))
    keys, values = x.sizes

    def narrow(d: Tensor | None, x: Tensor, size: int) -> Tensor | None:
        return None if d is None else unpad(d, size).to(x.dtype)

    return [
        narrow(dq, q, keys),
        narrow(dk, k, keys),
        narrow(dv, v, values),
        None if sums is None else d_sums.to(sums.dtype),
        None if totals is None else d_totals.to(totals.dtype),
        None if logit is None else d_logit.to(logit.dtype),
        *[None] * 4,
    ]


def _steps(x: Tensor) -> Any:
    """Return the strides of batch, heads and tokens."""
    return (ctypes.c_int64 * 3)(*x.stride()[:3])


def _set_pointers(task: _Task, **tensors: Tensor | None) -> None:
    """Set the addresses of tensors by the names of fields; those of ``None`` stay null."""
    for name, x in tensors.items():
        if x is not None:
            setattr(task, name, x.data_ptr())


def _fake(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(q.dtype, torch.float32)
    batch, heads, length, _ = q.shape
    out = q.new_empty(batch, length, heads, v.shape[3], dtype=dtype).transpose(1, 2)
    return out, q.new_empty(batch, heads, length, dtype=dtype)


band_softmax_cpp, band_softmax_cpp_backward = differentiable_op(
    "attnzoo::band_softmax_cpp",
    _forward,
    _backward,
    fake=_fake,
    op="sliding-window attention",
    instead=INSTEAD,
)
