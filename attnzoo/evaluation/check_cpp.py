"""Check of the C++ kernels on this CPU: results, gradients, and what they must refuse.

Results and gradients are compared with those of the torch implementations. Slots, sequences and
positions that are outside of the tensors must be refused: an address sanitizer
(``python -m tools.sanitize``) shows whether a kernel reads or writes anything before.

    CXX="c++ -mno-avx512f" python -m attnzoo.evaluation.check_cpp

checks the kernels as they are compiled for a CPU without these instructions.
:mod:`attnzoo.runtime.verdicts` reads the output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnzoo.contract.masks import AttentionMask
from attnzoo.contract.sequences import Sequences
from attnzoo.contract.states import AttentionOutput
from attnzoo.errors import UnsupportedError
from attnzoo.ops import (
    block_sparse_attention,
    delta_attention,
    flash_attention,
    linear_attention,
    lsh_attention,
    mlstm_attention,
    rwkv6_attention,
)
from attnzoo.ops.block_sparse.cpu import block_sparse
from attnzoo.ops.block_sparse.cpu.block_sparse import BLOCK_SPARSE
from attnzoo.ops.block_sparse.gather import SparseTensors
from attnzoo.ops.block_sparse.options import SparseOptions
from attnzoo.ops.delta.cpu.delta import DELTA
from attnzoo.ops.hybrid.api import hybrid_attention
from attnzoo.ops.hybrid.cpu.hybrid_step import HYBRID_STEP
from attnzoo.ops.hybrid.state import HybridState, LinearBranch
from attnzoo.ops.linear.common import MapWeights
from attnzoo.ops.linear.cpu.call import LINEAR
from attnzoo.ops.linear.cpu.linear_step import LINEAR_STEP
from attnzoo.ops.lsh.cpu.lsh import LSH, PIVOTS
from attnzoo.ops.window.blockwise_cpu import LocalOptions
from attnzoo.ops.window.cpu.band import BAND, band_attention_cpp
from attnzoo.ops.window.pattern import Band, GlobalIndices
from attnzoo.runtime.cpp import Source, build_error
from attnzoo.runtime.verdicts import run_cases

B, H, HKV, T, D, E = 1, 4, 2, 150, 24, 20
CAUSAL = AttentionMask(causal=True)
# Relative to the largest element. Hashes and selected blocks may differ in narrower types.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 2e-2}

Call = Callable[[Tensor, Tensor, Tensor, Tensor, str], Tensor]


Refused = tuple[str, Callable[[], object]]  # what is wrong with a call, and the call


class CppKernel(NamedTuple):
    """C++ sources, a call that runs them, and the implementation to compare with."""

    name: str
    sources: tuple[Source, ...]
    call: Call  # of q, k, v, a log decay [B, Hkv, T] and impl
    expected: str
    dtypes: tuple[torch.dtype, ...]
    has_gradients: bool = True
    refused: Callable[[], Iterable[Refused]] = tuple  # calls that must be refused

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


# -- refused calls ---------------------------------------------------------------------------------

SLOTS = ((0, 4), (-2, 1), (3, 2**62), (-(2**62), 0))  # some are no rows of a pool of 4 states
SEQUENCES = {  # starts, lengths and longest in a row of 64 tokens
    "past the end": ((0, 32), (32, 33), 64),
    "far": ((0, 10**9), (32, 32), 32),
    "before the row": ((-(10**8), 32), (32, 32), 32),
    "of a negative length": ((0, 32), (-5, 32), 32),
    "that overlap": ((0, 31), (32, 32), 32),
    "in another order": ((32, 0), (32, 32), 32),
    "whose ends overflow": ((2**62, 2**62), (2**62, 2**62), 2**62),
    "longer than longest": ((0, 32), (32, 32), 31),
}


def _rows(rows: int, tokens: int) -> list[Tensor]:
    """Return q, k and v of as many heads and channels, and gates ``[B, H, T]`` from 0 to 1."""
    generator = torch.Generator().manual_seed(0)
    shape = rows, HKV, tokens, 16
    gates = torch.rand(shape[:3], generator=generator)
    return [*(torch.randn(shape, generator=generator) for _ in range(3)), gates]


def _of_linear(q: Tensor, k: Tensor, v: Tensor, gates: Tensor, **options: Any) -> AttentionOutput:
    return linear_attention(q, k, v, log_decay=-gates, **options)


def _of_delta(q: Tensor, k: Tensor, v: Tensor, gates: Tensor, **options: Any) -> AttentionOutput:
    return delta_attention(q, k, v, gates, normalize_qk=True, **options)


def _of_mlstm(q: Tensor, k: Tensor, v: Tensor, gates: Tensor, **options: Any) -> AttentionOutput:
    return mlstm_attention(q, k, v, log_forget=-gates, log_input=gates, **options)


def _of_rwkv6(q: Tensor, k: Tensor, v: Tensor, gates: Tensor, **options: Any) -> AttentionOutput:
    return rwkv6_attention(q, k, v, log_decay=-k.abs(), bonus=k[0, :, 0], **options)


def _of_hybrid(q: Tensor, k: Tensor, v: Tensor, gates: Tensor, **options: Any) -> AttentionOutput:
    branch = LinearBranch(q.exp(), k.exp(), torch.zeros(()), -gates)
    return hybrid_attention(q, k, v, branch, window=4, scale=0.25, **options)


OPS: dict[str, Callable[..., AttentionOutput]] = {
    "linear": _of_linear,
    "delta": _of_delta,
    "mlstm": _of_mlstm,
    "rwkv6": _of_rwkv6,
    "hybrid": _of_hybrid,
}


def bad_slots(op: str, impl: str = "cpp") -> Iterator[Refused]:
    """Yield steps of an op from slots that are no rows of a pool."""
    pool = OPS[op](*_rows(4, 3), return_state=True).state
    options = {"state": pool, "impl": impl, "return_state": True, "reuse_state": True}
    for slots in SLOTS:
        step = partial(OPS[op], *_rows(2, 1), slots=torch.tensor(slots), **options)
        yield f"{op}: slots {slots}", torch.no_grad()(step)


def bad_sequences(op: str, impl: str = "cpp") -> Iterator[Refused]:
    """Yield calls of an op with sequences that do not fit a row."""
    for name, (starts, lengths, longest) in SEQUENCES.items():
        sequences = Sequences(torch.tensor(starts), torch.tensor(lengths), longest)
        options = {"sequences": sequences, "impl": impl, "return_state": True}
        yield f"{op}: sequences {name}", partial(OPS[op], *_rows(1, 64), **options)


def _bad_backward(op: str) -> Iterator[Refused]:
    """Yield a backward pass whose sequences are overwritten after the forward pass."""
    q, *others = _rows(1, 64)
    for starts in ((0, 10**9), (-(10**8), 32)):
        sequences = Sequences(torch.tensor((0, 32)), torch.tensor((32, 32)), 32)
        out = OPS[op](q.clone().requires_grad_(), *others, sequences=sequences, impl="cpp").out
        sequences.starts.data.copy_(torch.tensor(starts))
        yield f"{op}: backward pass of {starts}", out.sum().backward


def _refused_by_linear() -> Iterator[Refused]:
    for op in ("linear", "mlstm", "rwkv6", "hybrid"):
        yield from bad_sequences(op, "cpp" if op in ("linear", "hybrid") else "auto")
    yield from _bad_backward("linear")


def _refused_by_steps() -> Iterator[Refused]:
    for op in ("linear", "mlstm", "rwkv6"):
        yield from bad_slots(op)


def _refused_by_delta() -> Iterator[Refused]:
    yield from bad_sequences("delta")
    yield from bad_slots("delta")
    yield from _bad_backward("delta")


def _refused_by_hybrid_steps() -> Iterator[Refused]:
    yield from bad_slots("hybrid")
    state = _of_hybrid(*_rows(2, 3), return_state=True).state
    assert isinstance(state, HybridState)
    for seen in (-1, -(2**63), 2**63 - 1):
        wrong = state._replace(seen=torch.tensor([3, seen]))
        step = partial(_of_hybrid, *_rows(2, 1), impl="cpp", state=wrong, return_state=True)
        yield f"hybrid: a state of {seen} tokens", torch.no_grad()(step)


def _refused_by_windows() -> Iterator[Refused]:
    q, k, v, _ = _rows(1, 40)
    for position in (40, -1, 2**62):
        globals_ = GlobalIndices(torch.tensor([[0, position]]), torch.ones(1, 2, dtype=torch.bool))
        options = LocalOptions(Band(3, 0, 1), True, 0.25, global_indices=globals_)
        yield f"a global key at {position}", partial(band_attention_cpp, q, k, v, options)
    options = LocalOptions(Band(3, 0, 1), True, 0.25, segment_ids=torch.zeros(1, 40))
    for offset in (-9, 30):
        last = q[:, :, :20]
        yield f"queries from {offset} on", partial(band_attention_cpp, last, k, v, options, offset)


def _refused_by_block_sparse() -> Iterator[Refused]:
    q, k, v, _ = _rows(1, 40)
    options = SparseOptions(True, 4, 1, 2, 8, 8)
    selected = torch.zeros(1, HKV, 6, 2, dtype=torch.int32)
    for length, count in ((41, 40), (40, 41), (-1, -1), (8, 9), (2**62, 4)):
        lengths, counts = torch.tensor([length]), torch.tensor([count])
        x = SparseTensors(q, k, v, selected, lengths, counts, 0.25, options)
        yield f"{length} keys and {count} queries", partial(block_sparse.forward, x)


BOTH = (torch.float32, torch.float64)
ALL = (*BOTH, torch.bfloat16)  # of kernels that multiply bfloat16 tensors on AMX
KERNELS = (
    CppKernel("linear", (LINEAR, BAND), _linear, "reference", ALL, True, _refused_by_linear),
    CppKernel(
        *("decoding", (LINEAR_STEP, LINEAR), _linear_step, "reference", BOTH, False),
        _refused_by_steps,
    ),
    CppKernel("feature maps", (LINEAR, BAND), _hedgehog, "reference", ALL),
    CppKernel("delta", (DELTA,), _delta, "reference", BOTH, True, _refused_by_delta),
    CppKernel(
        *("block_sparse", (BLOCK_SPARSE,), _block_sparse, "reference", (torch.float64,), True),
        _refused_by_block_sparse,
    ),
    CppKernel("sliding windows", (BAND,), _window, "sdpa", ALL, True, _refused_by_windows),
    CppKernel(
        *("decoding with windows", (HYBRID_STEP,), _hybrid_step, "reference", BOTH, False),
        _refused_by_hybrid_steps,
    ),
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
    for name, call in kernel.refused():
        try:
            call()
        except UnsupportedError:
            continue
        yield f"{name} is not refused"


def main() -> None:
    """Check all kernels; prints events."""
    for reason in map(unavailable, KERNELS):
        if reason:
            raise SystemExit(reason)

    def check(kernel: CppKernel, device: torch.device) -> Iterator[str]:
        return (f"{kernel}: {text}" for text in wrong_results(kernel))

    run_cases(KERNELS, check, torch.device("cpu"))


if __name__ == "__main__":
    main()
