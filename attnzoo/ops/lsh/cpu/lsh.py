"""The asymmetric form of LSH attention in C++, for CPUs: ``impl="cpp"``.

The sort of the hash rounds runs in PyTorch. The kernels need no gathered blocks and write no
scores, so their time is that of the products. See ``attnzoo/runtime/cpp``. Other letters: U key
heads of a work item, N = G T.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from attnzoo.ops.lsh.asymmetric_plan import window_ranks
from attnzoo.ops.lsh.options import LSHInputs
from attnzoo.ops.lsh.voronoi_hashing import BLOCK_KEYS, HashRounds
from attnzoo.ops.lsh.work_items import KEYS, QUERIES, WorkItem
from attnzoo.runtime import cpp
from attnzoo.runtime.cpp.layout import Function
from attnzoo.runtime.kernel_calls import LANES, TYPE_NAMES, empty_huge_pages, pad_to_simd

KERNELS = Path(__file__).parent


class _PivotTask(ctypes.Structure):
    _fields_ = [
        *cpp.fields(ctypes.c_int64, "threads units tokens size pivots rounds bits"),
        *cpp.fields(ctypes.c_void_p, "pivots_per_round x p offsets out"),
    ]


class _HashRound(ctypes.Structure):
    _fields_ = cpp.fields(ctypes.c_void_p, "keys key_ranks centers queries begin end")


class _Task(ctypes.Structure):
    _fields_ = [
        *cpp.fields(
            ctypes.c_int64,
            "threads units groups queries keys key_size value_size position before after "
            "first_tokens chunk_size rounds windows block_keys",
        ),
        ("scale", ctypes.c_double),
        ("hash_rounds", ctypes.POINTER(_HashRound)),
    ]


class _Tensors(ctypes.Structure):
    _fields_ = cpp.fields(ctypes.c_void_p, "q k v out lse d_out delta dq dk dv")


LSH = cpp.Source(
    KERNELS / "lsh.cpp",
    {
        f"lsh_{direction}_{name}": Function((_Task, _Tensors))
        for direction in ("forward", "backward")
        for name in TYPE_NAMES.values()
    },
)
PIVOTS = cpp.Source(KERNELS / "pivots.cpp", {"best_pivots": Function((_PivotTask,))})


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _build_reasons() -> tuple[str, ...]:
    return tuple(filter(None, (cpp.unavailable_reason(LSH), cpp.unavailable_reason(PIVOTS))))


def cpp_reasons(inputs: LSHInputs) -> list[str]:
    """Return why the kernel does not support a call; an empty list if it does."""
    reasons = []
    if inputs.bias is not None:
        reasons.append("the kernel has no additive bias")
    return reasons or list(_build_reasons())


def best_pivots(
    x: Tensor, pivots: Tensor, offset: Tensor | None, groups: list[tuple[int, int]]
) -> Tensor:
    """Compute :func:`attnzoo.ops.lsh.voronoi_hashing.best_pivots` in C++."""
    counts = torch.tensor([count for rounds, count in groups for _ in range(rounds)])
    out = torch.empty(len(counts), *x.shape[:2], dtype=torch.int32)
    x, pivots = x.contiguous(), pivots.contiguous()
    (units, tokens, size), most = x.shape, int(counts.max())
    task = _PivotTask(
        threads=torch.get_num_threads(),
        units=units,
        tokens=tokens,
        size=size,
        pivots=pivots.shape[1],
        rounds=len(counts),
        bits=(most - 1).bit_length(),
        pivots_per_round=counts.data_ptr(),
        x=x.data_ptr(),
        p=pivots.data_ptr(),
        offsets=None if offset is None else offset.data_ptr(),
        out=out.data_ptr(),
    )
    cpp.load(PIVOTS).best_pivots(task)
    return out


class CppTensors:
    """Tensors of one work item, for the C++ kernel.

    Args:
        item: The work item.
        inputs: Inputs of the call.
    """

    def __init__(self, item: WorkItem, inputs: LSHInputs) -> None:
        assert inputs.bias is None
        options, level, seed = inputs.options, item.level, tuple(inputs.seed.tolist())
        q = item.gather(inputs.q, QUERIES).contiguous()
        k = item.gather(inputs.k, KEYS).contiguous()
        v = item.gather(inputs.v, KEYS).contiguous()
        hashed = HashRounds(q.float(), k[:, 0].float(), options, level, seed, best_pivots)
        self.type_name = TYPE_NAMES[q.dtype]
        self.key_size, self.value_size = q.shape[3], v.shape[3]
        self.qkv = []
        for x in (q, k, v):
            self.qkv.append(pad_to_simd(x.flatten(0, 2)).contiguous())
        rounds = []
        for found in hashed.rounds:
            rounds.append(_HashRound())
            for name, _ in _HashRound._fields_:
                setattr(rounds[-1], name, getattr(found, name).data_ptr())
        windows = [window_ranks(hashed)] if rounds and not options.causal else []
        for ranks, centers in windows:
            rounds.append(_HashRound(key_ranks=ranks.data_ptr(), centers=centers.data_ptr()))
        self.referenced = hashed.rounds, windows  # keeps the tensors behind data_ptr alive
        before = options.window - options.causal if level.pivot_keys else level.keys
        block_keys = min(2 * options.chunk_size, level.keys)
        block_keys = max(BLOCK_KEYS, block_keys, hashed.first_tokens)
        self.task = _Task(
            threads=torch.get_num_threads(),
            units=hashed.units,
            groups=hashed.groups,
            queries=hashed.length,
            keys=level.keys,
            key_size=self.qkv[0].shape[1],
            value_size=self.qkv[2].shape[1],
            position=level.begin,
            before=before,
            after=0 if options.causal else before,
            first_tokens=hashed.first_tokens,
            chunk_size=options.chunk_size,
            rounds=len(hashed.rounds),
            windows=len(windows),
            block_keys=-(-block_keys // LANES) * LANES,
            scale=inputs.scale,
            hash_rounds=(_HashRound * len(rounds))(*rounds),
        )

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return the output ``[U N, E]`` and the log-sum-exp ``[U N, 1]``."""
        q, _, v = self.qkv
        out, lse = (
            empty_huge_pages(v, (q.shape[0], v.shape[1])),
            empty_huge_pages(v, (q.shape[0], 1)),
        )
        self._run("forward", [*self.qkv, out, lse])
        return out[:, : self.value_size], lse

    def backward(
        self, d_out: Tensor, delta: Tensor, lse: Tensor, d_bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v; see :class:`WorkItemTensors`."""
        d_out = pad_to_simd(d_out).contiguous()
        dq, dk, dv = (empty_huge_pages(x, x.shape).zero_() for x in self.qkv)
        self._run("backward", [*self.qkv, None, lse, d_out, delta, dq, dk, dv])
        return dq[:, : self.key_size], dk[:, : self.key_size], dv[:, : self.value_size]

    def _run(self, direction: str, tensors: list[Tensor | None]) -> None:
        function = getattr(cpp.load(LSH), f"lsh_{direction}_{self.type_name}")
        pointers = _Tensors()
        for (name, _), x in zip(_Tensors._fields_, tensors, strict=False):
            setattr(pointers, name, None if x is None else x.data_ptr())
        function(self.task, pointers)
