"""Block-sparse attention in C++, for CPUs: ``impl="cpp"``.

See ``block_sparse.cpp`` and ``attnzoo/runtime/cpp``. The kernel reads copies in float32 or float64.
Other letters: U = B Hkv units, N = G T, M query blocks, K selected blocks, A heads with a selection
of their own.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from attnzoo.contract.padding import gather_tokens
from attnzoo.errors import UnsupportedError, short_repr
from attnzoo.ops.block_sparse.gather import SparseTensors, row_products
from attnzoo.ops.block_sparse.options import SparseCall
from attnzoo.ops.block_sparse.selection import Candidates
from attnzoo.runtime import cpp
from attnzoo.runtime.cpp.layout import Function
from attnzoo.runtime.kernel_calls import (
    DTYPE_NUMBERS,
    TYPE_NAMES,
    empty_huge_pages,
    pad_to_simd,
    unpad,
)

PANEL = 32  # keys of a panel, as in the kernel
COLUMNS = 16  # a multiple of these is computed at a time
SCORE_NAMES = ("mean", "moments", "bounds", "indexer")  # numbered in the kernel


class _Task(ctypes.Structure):
    _fields_ = [
        *cpp.fields(
            ctypes.c_int64,
            "threads units groups queries keys key_size value_size key_heads causal window "
            "num_sinks block_size query_block selections query_blocks selected_blocks",
        ),
        ("scale", ctypes.c_double),
        *cpp.fields(ctypes.c_void_p, "lengths counts selected"),
    ]


class _Tensors(ctypes.Structure):
    _fields_ = cpp.fields(ctypes.c_void_p, "q k v k_panels v_panels out lse d_out delta dq dk dv")


class _BestTask(ctypes.Structure):
    _fields_ = [
        *cpp.fields(
            ctypes.c_int64,
            "threads units shared heads queries size blocks pitch kept units_per_range first score "
            "q_type",
        ),
        ("scale", ctypes.c_double),
        *cpp.fields(ctypes.c_void_p, "q weights summary end begin stop out"),
    ]


BLOCK_SPARSE = cpp.Source(
    Path(__file__).with_name("block_sparse.cpp"),
    {
        f"sparse_{direction}_{name}": Function((_Task, _Tensors), ctypes.c_int64)
        for direction in ("forward", "backward")
        for name in TYPE_NAMES.values()
    }
    | {"select_best": Function((_BestTask,))},
)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _build_reasons() -> tuple[str, ...]:
    return tuple(filter(None, (cpp.unavailable_reason(BLOCK_SPARSE),)))


def cpp_reasons(call: SparseCall) -> list[str]:
    """Return why the kernel does not support a call; an empty list if it does."""
    reasons, size = [], call.options.block_size
    if PANEL % size and size % PANEL:
        reasons.append(f"block_size={size} neither divides {PANEL} nor is a multiple of it")
    return reasons or list(_build_reasons())


def best_blocks(queries: Tensor, summary: Tensor, allowed: Candidates, call: SparseCall) -> Tensor:
    """Return the selected blocks, ``[B, A, M, K]``, sorted; scores are computed on the way.

    Args:
        queries: ``[B, Hkv, A / Hkv, M, D]``; of an indexer and with the weights of its
            heads, ``[B, 1, I, M, P + 1]``.
        summary: ``[B, Hkv, N, Z]``, float32; of an indexer, ``[B, 1, N, P]``.
        allowed: Candidates of each query.
        call: The call; ``coverage`` is not supported.
    """
    heads, weights = 1, queries.new_empty(0)
    if call.selection.score == "indexer":  # one selection
        heads, weights = queries.shape[2], queries[..., -1].float().contiguous()
        queries = queries[..., :-1].flatten(2, 3)[:, :, None]
    batch, key_heads, shared, count, size = queries.shape
    count, blocks = count // heads, summary.shape[2]
    pitch = -(-blocks // COLUMNS) * COLUMNS
    columns = summary.new_zeros(batch, key_heads, summary.shape[3], pitch)
    columns[..., :blocks] = summary.mT
    queries = queries.contiguous()
    stop = torch.as_tensor(allowed.stop)
    rows = max(len(allowed.end), len(allowed.begin), len(stop) if stop.ndim else 1)
    end, begin, stop = (
        x.expand(rows, count).contiguous() for x in (allowed.end, allowed.begin, stop)
    )
    kept, units = min(call.options.top_k, blocks), key_heads * shared
    out = torch.empty(batch, units, count, kept, dtype=torch.int32)
    task = _BestTask(
        threads=torch.get_num_threads(),
        units=batch * units,
        shared=shared,
        heads=heads,
        queries=count,
        size=size,
        blocks=blocks,
        pitch=pitch,
        kept=kept,
        units_per_range=units if rows == batch else batch * units,
        first=allowed.first,
        score=SCORE_NAMES.index(call.selection.score),
        q_type=DTYPE_NUMBERS[queries.dtype],
        scale=call.scale,
        q=queries.data_ptr(),
        weights=weights.data_ptr(),
        summary=columns.data_ptr(),
        end=end.data_ptr(),
        begin=begin.data_ptr(),
        stop=stop.data_ptr(),
        out=out.data_ptr(),
    )
    cpp.load(BLOCK_SPARSE).select_best(task)
    return out


class CppTensors:
    """Contiguous tensors of one call, whose rows begin with their first real key."""

    def __init__(self, x: SparseTensors) -> None:
        batch, _, length, _ = x.q.shape
        key_heads, keys = x.k.shape[1:3]
        dtype = torch.promote_types(x.q.dtype, torch.float32)
        self.x, self.dtype = x, dtype
        self.q = _rows(x.q, dtype)
        self.k, self.v = (_rows(_align_left(y, x.lengths), dtype) for y in (x.k, x.v))
        full = torch.tensor([keys, length]).expand(batch, 2)
        lengths = full[:, 0] if x.lengths is None else x.lengths
        counts = full[:, 1] if x.counts is None else x.counts
        self.lengths, self.counts = (y.to(torch.int64).contiguous() for y in (lengths, counts))
        self.selected = x.selected.to(torch.int32).contiguous()
        heads, query_blocks, kept = self.selected.shape[1:]
        options = x.options
        self.task = _Task(
            threads=torch.get_num_threads(),
            units=batch * key_heads,
            groups=x.q.shape[1] // key_heads,
            queries=length,
            keys=keys,
            key_size=self.k.shape[1],
            value_size=self.v.shape[1],
            key_heads=key_heads,
            causal=int(options.causal),
            window=options.window,
            num_sinks=options.num_sinks,
            block_size=options.block_size,
            query_block=options.query_block,
            selections=heads // key_heads,
            query_blocks=query_blocks,
            selected_blocks=kept,
            scale=x.scale,
            lengths=self.lengths.data_ptr(),
            counts=self.counts.data_ptr(),
            selected=self.selected.data_ptr(),
        )

    def panels(self, rows: Tensor) -> Tensor:
        """Return keys or values in panels."""
        return _panels(rows, self.task.units, self.task.keys)

    def run(self, direction: str, **tensors: Tensor) -> None:
        """Call the kernel of a direction.

        Raises:
            UnsupportedError: Lengths do not fit the keys and queries.
        """
        given = {"q": self.q, "k": self.k, "v": self.v, "k_panels": self.panels(self.k), **tensors}
        pointers = _Tensors(**{name: x.data_ptr() for name, x in given.items()})
        function = getattr(cpp.load(BLOCK_SPARSE), f"sparse_{direction}_{TYPE_NAMES[self.dtype]}")
        if function(self.task, pointers):
            raise UnsupportedError(
                f"rows must have at most {self.task.keys} real keys, and at most as many real "
                f"queries, and {self.task.queries}; got lengths "
                f"{short_repr(self.lengths.tolist())} and counts "
                f"{short_repr(self.counts.tolist())}."
            )


def forward(x: SparseTensors) -> tuple[Tensor, Tensor]:
    """Return the output ``[B, H, T, E]`` and the base-2 log-sum-exp, ``[B, H, T, 1]``."""
    tensors = CppTensors(x)
    out = empty_huge_pages(tensors.v, (len(tensors.q), tensors.v.shape[1]))
    lse = empty_huge_pages(tensors.v, (len(tensors.q), 1))
    tensors.run("forward", out=out, lse=lse)
    del tensors  # before rows are copied without padding
    shape = x.q.shape[:3]
    return unpad(out, x.v.shape[3]).view(*shape, -1), lse.view(*shape, 1)


def backward(
    x: SparseTensors, d_out: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v; see :func:`gather.backward`."""
    tensors = CppTensors(x)
    given = {
        "lse": lse.contiguous(),
        "d_out": _rows(d_out, tensors.dtype),
        "delta": row_products(d_out, out, lse.dtype).contiguous(),
        "v_panels": tensors.panels(tensors.v),
    }
    names = {"dq": tensors.q, "dk": tensors.k, "dv": tensors.v}
    rows = {name: empty_huge_pages(y, y.shape).zero_() for name, y in names.items()}
    tensors.run("backward", **given, **rows)
    del tensors, given, names
    gradients = []
    for gradient, like in zip(rows.values(), (x.q, x.k, x.v), strict=True):
        part = unpad(gradient, like.shape[3]).view(like.shape)
        gradients.append(part if like is x.q else _align_right(part, x.lengths))
    return gradients[0], gradients[1], gradients[2]


def _rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``[B, H, T, D]`` as contiguous rows ``[B H T, D]`` padded to vectors."""
    rows = x.to(dtype).contiguous().flatten(0, 2)
    return pad_to_simd(rows).contiguous()


def _panels(rows: Tensor, units: int, keys: int) -> Tensor:
    """Return rows ``[U S, D]`` transposed in panels, ``[U, S / PANEL, D, PANEL]``, and a margin."""
    size, count = rows.shape[1], -(-keys // PANEL)
    out = empty_huge_pages(rows, (units * count * size * PANEL + PANEL,))
    out[-PANEL:] = 0
    panels = out[:-PANEL].view(units, count, size, PANEL)
    rows = rows.view(units, keys, size)
    whole = keys // PANEL
    if whole:
        panels[:, :whole] = rows[:, : whole * PANEL].unflatten(1, (whole, PANEL)).mT
    if whole < count:
        panels[:, -1] = 0
        panels[:, -1, :, : keys - whole * PANEL] = rows[:, whole * PANEL :].mT
    return out


def _align_left(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Move the last ``lengths`` tokens of each row of ``[B, H, S, D]`` to its beginning."""
    return x if lengths is None else _rotate(x, x.shape[2] - lengths)


def _align_right(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Undo :func:`_align_left`."""
    return x if lengths is None else _rotate(x, lengths - x.shape[2])


def _rotate(x: Tensor, steps: Tensor) -> Tensor:
    """Move the tokens of each row of ``[B, H, S, D]`` by ``steps``, ``[B]``, to the front."""
    keys = x.shape[2]
    return gather_tokens(x, (torch.arange(keys) + steps[:, None]) % keys)
