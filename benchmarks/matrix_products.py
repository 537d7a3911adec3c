"""Rates of plain matrix products, which bound the rate of the chunk form; see ops.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from attnzoo.evaluation.timing import BenchmarkCase, Run, as_row, time_together
from attnzoo.ops.linear.common import CHUNK_SIZE

MATMUL = 2048  # rows and columns of the square product that rates are measured against


def measure_tiles(base: BenchmarkCase) -> list[dict[str, Any]]:
    """Time only the matrix products of the chunk form; their rate is its upper bound."""
    n, c, d, e = base.B * base.Hkv, CHUNK_SIZE, base.D, base.E
    q, k, v, scores, state = (
        torch.randn(n, *shape) for shape in ((c, d), (c, d), (c, e), (c, c), (d, e))
    )
    runs: dict[str, Run] = {
        "bmm q k^T": lambda: torch.bmm(q, k.mT),
        "bmm scores v": lambda: torch.bmm(scores, v),
        "bmm q state": lambda: torch.bmm(q, state),
        "bmm k^T v": lambda: torch.bmm(k.mT, v),
    }
    flops: dict[str, float] = dict(
        zip(runs, (c * d * c, c * c * e, c * d * e, d * c * e), strict=True)
    )
    square = torch.randn(MATMUL, MATMUL)
    runs["matmul"], flops["matmul"] = lambda: square @ square, MATMUL**3 / n
    taken = time_together(runs, rounds=5)
    rows = []
    for name, timing in taken.items():
        case = replace(
            base, op=name, impl="torch", mode="product", T=MATMUL if name == "matmul" else c
        )
        rows.append(as_row(case, timing, gflops=2 * n * flops[name] / timing.min_ms / 1e6))
    return rows
