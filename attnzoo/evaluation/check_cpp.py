"""Check of the C++ kernels on this CPU: results and gradients are those of torch.

    CXX="c++ -mno-avx512f" python -m attnzoo.evaluation.check_cpp

checks the kernels as they are compiled for a CPU without these instructions.
``tools/sanitize.py`` and ``tools/wheels`` read the output.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from attnzoo.contract.masks import AttentionMask
from attnzoo.contract.states import AttentionOutput
from attnzoo.ops import (
    block_sparse_attention,
    delta_attention,
    flash_attention,
    linear_attention,
    lsh_attention,
)
from attnzoo.ops.block_sparse.cpu.block_sparse import BLOCK_SPARSE
from attnzoo.ops.delta.cpu.delta import DELTA
from attnzoo.ops.features.functional import MapWeights
from attnzoo.ops.hybrid.api import hybrid_attention
from attnzoo.ops.hybrid.cpu.hybrid_step import HYBRID_STEP
from attnzoo.ops.hybrid.parts import HybridState, LinearBranch
from attnzoo.ops.linear.cpu.linear import LINEAR
from attnzoo.ops.linear.cpu.linear_step import LINEAR_STEP
from attnzoo.ops.lsh.cpu.lsh import LSH, PIVOTS
from attnzoo.ops.window.cpu.band import BAND
from attnzoo.runtime.cpp import Source, build_error

B, H, HKV, T, D, E = 1, 4, 2, 150, 24, 20
CAUSAL = AttentionMask(causal=True)
# Relative to the largest element. Hashes and selected blocks may differ in narrower types.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 2e-2}

Call = Callable[[Tensor, Tensor, Tensor, Tensor, str], Tensor]


class CppKernel(NamedTuple):
    """C++ sources, a call that runs them, and the implementation to compare with."""

    name: str
    sources: tuple[Source, ...]
    call: Call  # of q, k, v, a log decay [B, Hkv, T] and impl
    expected: str
    dtypes: tuple[torch.dtype, ...]
    has_gradients: bool = True

    def __str__(self) -> str:
        return self.name


def _linear(q: Tensor, k: Tensor, v: Tensor, gates: Tensor, impl: str) -> Tensor:
    options = {"normalize": True, "feature_map": "elu+1", "impl": impl}
    return linear_attention(q, k, v, log_decay=gates, **options).out  # type: ignore[arg-type]


def _linear_step(q: Tensor, k: Tensor, v: Tensor, gates: Tensor, impl: str) -> Tensor:
    options = {"normalize": True, "feature_map": "elu+1", "impl": impl, "return_state": True}
    outs, state = [], None
    for t in range(3):
        x = (y[:, :, t : t + 1] for y in (q, k, v))
        gate = gates[:, :, t : t + 1]
        output = linear_attention(*x, log_decay=gate, state=state, **options)  # type: ignore[arg-type]
        outs.append(output.out)
        state = output.state
    return torch.cat(outs, 2)


def _hedgehog(q: Tensor, k: Tensor, v: Tensor, gates: Tensor, impl: str) -> Tensor:
    q, k = q[..., :16], k[..., :16]
    weights = MapWeights(*(0.1 * x.detach()[0, :, :16] for x in (q, k)))
    weight = q.new_zeros(1, H, 1, 1)
    branch = LinearBranch(q, k, weight, gates, feature_map="hedgehog", map_weights=weights)
    return hybrid_attention(q, k, v, branch, window=16, scale=0.2, impl=impl).out


def _delta(q: Tensor, k: Tensor, v: Tensor, gates: Tensor, impl: str) -> Tensor:
    beta = gates.exp()
    return delta_attention(q, k, v, beta, log_decay=gates, normalize_qk=True, impl=impl).out


def _block_sparse(q: Tensor, k: Tensor, v: Tensor, gates: Tensor, impl: str) -> Tensor:
    return block_sparse_attention(q, k, v, mask=CAUSAL, top_k=4, impl=impl).out


def _lsh(q: Tensor, k: Tensor, v: Tensor, gates: Tensor, impl: str) -> Tensor:
    sizes = {"num_hashes": 2, "chunk_size": 16, "window": 8}
    return lsh_attention(q, k, v, mask=CAUSAL, impl=impl, **sizes).out  # type: ignore[arg-type]


def _window(q: Tensor, k: Tensor, v: Tensor, gates: Tensor, impl: str) -> Tensor:
    mask = AttentionMask(causal=True, window=(15, 0))
    return flash_attention(q, k, v, mask=mask, impl=impl).out


def _hybrid_step(q: Tensor, k: Tensor, v: Tensor, gates: Tensor, impl: str) -> Tensor:
    size = 16
    prompt, token = slice(T - 1), slice(T - 1, T)

    def run(part: slice, state: HybridState | None, impl: str) -> AttentionOutput:
        features = q[:, :, part].exp(), k[:, :, part].exp()
        weight = q.new_zeros(1, H, 1, 1)
        branch = LinearBranch(*features, weight, gates[:, :, part], mean=True)
        inputs = q[:, :, part], k[:, :, part], v[:, :, part]
        options = {"window": size, "scale": 0.2, "return_state": True}
        return hybrid_attention(*inputs, branch, state=state, impl=impl, **options)  # type: ignore[arg-type]

    state = run(prompt, None, "reference").state
    return run(token, state, impl).out


BOTH = (torch.float32, torch.float64)
ALL = (*BOTH, torch.bfloat16)  # of kernels that read bfloat16 tensors in place
KERNELS = (
    CppKernel("linear", (LINEAR, BAND), _linear, "reference", ALL),
    CppKernel("decoding", (LINEAR_STEP, LINEAR), _linear_step, "reference", BOTH, False),
    CppKernel("feature maps", (LINEAR, BAND), _hedgehog, "reference", ALL),
    CppKernel("delta", (DELTA,), _delta, "reference", BOTH),
    CppKernel("block_sparse", (BLOCK_SPARSE,), _block_sparse, "reference", (torch.float64,)),
    CppKernel("sliding windows", (BAND,), _window, "sdpa", ALL),
    CppKernel("decoding with windows", (HYBRID_STEP,), _hybrid_step, "reference", BOTH, False),
    CppKernel("reformer", (LSH, PIVOTS), _lsh, "torch", (torch.float64,)),
)


def unavailable(kernel: CppKernel) -> str:
    """Return why a kernel is not available, or ""."""
    return next(filter(None, map(build_error, kernel.sources)), "")


def _results(
    kernel: CppKernel, impl: str, dtype: torch.dtype, wider: torch.dtype | None = None
) -> list[Tensor]:
    """Return the output and, if the kernel has them, the gradients of q, k and v.

    Inputs are rounded to ``dtype``, and then widened to ``wider`` if it is given.
    """
    generator = torch.Generator().manual_seed(0)

    def rounded(x: Tensor) -> Tensor:
        return x.to(dtype).to(wider or dtype)

    shapes = (B, H, T, D), (B, HKV, T, D), (B, HKV, T, E)
    leaves = [rounded(torch.randn(shape, generator=generator)) for shape in shapes]
    gates = -rounded(torch.rand(B, HKV, T, generator=generator))
    weights = rounded(torch.randn(B, H, T, E, generator=generator))
    leaves = [x.requires_grad_(kernel.has_gradients) for x in leaves]
    q, k, v = leaves
    out = kernel.call(q, k, v, gates, impl)
    if not kernel.has_gradients:
        return [out]
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), leaves)]


def wrong_results(kernel: CppKernel) -> Iterator[str]:
    """Yield a message for each error in a kernel's results."""
    for dtype in kernel.dtypes:
        expected = _results(kernel, kernel.expected, dtype, torch.float64)
        ours = _results(kernel, "cpp", dtype)
        names = ("out", "dq", "dk", "dv")[: len(ours)]
        for name, x, y in zip(names, ours, expected, strict=True):
            error = ((x.double() - y).abs().max() / y.abs().max()).item()
            if not error <= TOLERANCES[dtype]:
                yield f"{name} of {str(dtype).removeprefix('torch.')} differs by {error:.1e}"


def main() -> None:
    """Check all kernels; prints a line of JSON for each, for each wrong result, and at the end."""

    def print_event(event: str, text: str = "") -> None:
        print(json.dumps({"event": event, "text": text}), flush=True)

    for reason in map(unavailable, KERNELS):
        if reason:
            raise SystemExit(reason)
    for kernel in KERNELS:
        print_event("case", str(kernel))
        for text in wrong_results(kernel):
            print_event("wrong", f"{kernel}: {text}")
    print_event("done")


if __name__ == "__main__":
    main()
