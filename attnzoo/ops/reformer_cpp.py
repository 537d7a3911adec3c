"""The asymmetric form of Reformer's attention in C++, for CPUs: who meets whom is found in torch.

The kernels need no blocks laid out for them and write no scores: what remains is the time of
products. See ``attnzoo/kernels/cpp``.
Letters: U key heads at hand, G query heads that share one, T queries, S keys, N = G T, D key size,
E value size.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from attnzoo.kernels import cpp
from attnzoo.ops.reformer_asymmetric import REACH, Orders
from attnzoo.ops.reformer_blocks import Sums
from attnzoo.ops.reformer_parts import KEYS, QUERIES, Hashing, Part
from attnzoo.ops.reformer_steps import window_order
from attnzoo.ops.room import LANES, in_lanes, room

NAMES = {torch.float32: "float", torch.float64: "double"}


class _Pivots(ctypes.Structure):
    _fields_ = [
        *cpp.fields(ctypes.c_int64, "threads units tokens size pivots rounds bits"),
        *cpp.fields(ctypes.c_void_p, "counts x p offsets out"),
    ]


class _Round(ctypes.Structure):
    _fields_ = cpp.fields(ctypes.c_void_p, "keys places middles queries begin end")


class _Task(ctypes.Structure):
    _fields_ = [
        *cpp.fields(
            ctypes.c_int64,
            "threads units groups queries keys key_size value_size position before after first "
            "chunk rounds others reach",
        ),
        ("scale", ctypes.c_double),
        ("orders", ctypes.POINTER(_Round)),
    ]


class _Rows(ctypes.Structure):
    _fields_ = cpp.fields(ctypes.c_void_p, "q k v out lse d_out delta dq dk dv")


def why_not(q: Tensor, shared: bool, bias: Tensor | None) -> str:
    """Say why the kernel cannot serve these inputs; empty if it can."""
    if q.device.type != "cpu":
        return f"the inputs are on {q.device.type}"
    if shared:
        return "it has no form whose keys are the queries"
    if bias is not None:
        return "it adds no bias"
    found: str = _why_no_kernel()
    return found


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _why_no_kernel() -> str:
    return cpp.why_not("lsh") or cpp.why_not("pivots")


def best_pivots(
    x: Tensor, pivots: Tensor, offset: Tensor | None, kinds: list[tuple[int, int]]
) -> Tensor:
    """Return what :func:`attnzoo.ops.reformer_asymmetric.best_pivots` does."""
    counts = torch.tensor([count for rounds, count in kinds for _ in range(rounds)])
    out = torch.empty(len(counts), *x.shape[:2], dtype=torch.int32)
    x, pivots = x.contiguous(), pivots.contiguous()
    (units, tokens, size), most = x.shape, int(counts.max())
    task = _Pivots(
        threads=torch.get_num_threads(),
        units=units,
        tokens=tokens,
        size=size,
        pivots=pivots.shape[1],
        rounds=len(counts),
        bits=(most - 1).bit_length(),
        counts=counts.data_ptr(),
        x=x.data_ptr(),
        p=pivots.data_ptr(),
        offsets=None if offset is None else offset.data_ptr(),
        out=out.data_ptr(),
    )
    cpp.load("pivots").pivots(ctypes.byref(task))
    return out


class CompiledShare:
    """What the kernel works on: a part, as :class:`attnzoo.ops.reformer_parts.Share` has it.

    Args:
        orders: Whom the queries meet.
        q: Queries, ``[U N, D]``.
        k: Keys, ``[U S, D]``.
        v: Values, ``[U S, E]``.
        scale: Multiplies the products.
    """

    def __init__(self, orders: Orders, q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
        rule, level = orders.rule, orders.level
        self.name = NAMES[q.dtype]
        self.size, self.value_size = q.shape[1], v.shape[1]
        self.given = [in_lanes(x).contiguous() for x in (q, k, v)]
        names = [name for name, _ in _Round._fields_]
        rounds = [_Round(*(getattr(x, name).data_ptr() for name in names)) for x in orders.list]
        others = [window_order(orders)] if rounds and not rule.causal else []
        rounds += [_Round(places=a.data_ptr(), middles=b.data_ptr()) for a, b in others]
        self.held = orders.list, others  # pointed at
        before = rule.window - rule.causal if level.past else level.keys
        reach = max(REACH, 2 * rule.chunk, orders.first)
        self.task = _Task(
            threads=torch.get_num_threads(),
            units=orders.units,
            groups=orders.groups,
            queries=orders.length,
            keys=level.keys,
            key_size=self.given[0].shape[1],
            value_size=self.given[2].shape[1],
            position=level.begin,
            before=before,
            after=0 if rule.causal else before,
            first=orders.first,
            chunk=rule.chunk,
            rounds=len(orders.list),
            others=len(others),
            reach=-(-reach // LANES) * LANES,
            scale=scale,
            orders=(_Round * len(rounds))(*rounds),
        )

    @classmethod
    def of(
        cls,
        part: Part,
        hashing: Hashing,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        bias: Tensor | None,
    ) -> CompiledShare:
        """Take a part's share."""
        assert bias is None
        q, k, v = part.take(q, QUERIES), part.take(k, KEYS), part.take(v, KEYS)
        q, k, v = (x.contiguous() for x in (q, k, v))
        level = part.level
        orders = Orders(q.float(), k[:, 0].float(), hashing.rule, level, hashing.seed, best_pivots)
        return cls(orders, q.flatten(0, 2), k.flatten(0, 2), v.flatten(0, 2), scale)

    def attend(self) -> Sums:
        """Return the output ``[U N, E]`` and what :class:`Sums` calls lse."""
        q, _, v = self.given
        out, lse = room(v, (len(q), v.shape[1])), room(v, (len(q), 1))
        self._run("forward", [*self.given, out, lse])
        return Sums(out[:, : self.value_size], lse)

    def backward(
        self, d_out: Tensor, delta: Tensor, lse: Tensor, d_bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of queries, k and v."""
        dq, dk, dv = (room(x, x.shape).zero_() for x in self.given)
        self._run(
            "backward", [*self.given, None, lse, in_lanes(d_out).contiguous(), delta, dq, dk, dv]
        )
        return dq[:, : self.size], dk[:, : self.size], dv[:, : self.value_size]

    def _run(self, which: str, tensors: list[Tensor | None]) -> None:
        call = getattr(cpp.load("lsh"), f"lsh_{which}_{self.name}")
        rows = _Rows(*(None if x is None else x.data_ptr() for x in tensors))
        call(ctypes.byref(self.task), ctypes.byref(rows))
