"""Check of the Triton kernels of linear attention on a device, against torch and float64.

    python -m attnzoo.ops.linear.triton.check scalar 128 mapped cuda:0

Each case runs twice.
Results must be equal bit for bit, and differ from float64 by at most twice as much as the torch
form in the same dtype. Inputs lie in storage that continues with NaN, and memory that kernels
should write is filled with NaN. :mod:`attnzoo.runtime.verdicts` reads the output.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from attnzoo.contract.sequences import Sequences
from attnzoo.contract.states import LinearState
from attnzoo.ops.gated.common import GatedStep, run_step_torch, run_step_triton
from attnzoo.ops.linear.api import linear_attention
from attnzoo.ops.linear.common import LinearInputs, StepGate
from attnzoo.runtime.verdicts import run_check

SCALE, EPS, FEATURE_SCALE = 0.7, 1e-6, 0.25
Results = TypeVar("Results")
GRADIENTS = ("dq", "dk", "dv", "dkv", "dz", "d_log_decay")


@dataclass(frozen=True, kw_only=True)
class CheckCase:
    """One call; what differs between kinds makes the compiler generate other code."""

    decay: str  # "none", "scalar" or "vector"
    d: int
    e: int
    dtype: torch.dtype = torch.bfloat16
    groups: int = 1
    normalize: bool = True
    feature_map: str = "elu+1"
    varlen: bool = False  # sequences in one row, or one token of each in slots
    has_state: bool = True  # whether states are given and returned
    B: int = 2
    Hkv: int = 3
    T: int = 150
    strong_gates: bool = False

    def __str__(self) -> str:
        gates = " strong gates" if self.strong_gates else ""
        return f"{self.T} tokens of {self.d} and {self.e}{gates}"


def base_case(decay: str, size: int, kind: str) -> CheckCase:
    """Return the case of a kind of calls with a decay and sizes up to ``size``."""
    case = CheckCase(decay=decay, d=size, e=size)
    if kind == "mapped":
        return replace(case, groups=2)
    if kind == "bare":
        return replace(case, normalize=False, feature_map="identity")
    if kind == "any":
        case = replace(case, d=size - 4, e=size - 24)
        return replace(case, groups=2, feature_map="exp", varlen=True)
    assert kind == "wide"
    return replace(case, dtype=torch.float32)


KINDS = ("bare", "mapped", "any", "wide")


def cases(decay: str, size: int, kind: str, small: bool) -> Iterator[CheckCase]:
    """Yield the cases of a kind: several chunks, strong gates, without states, one token.

    ``small`` cases are for the interpreter.
    """
    case = base_case(decay, size, kind)
    if small:
        case = replace(case, B=1, Hkv=1, T=70)
    yield case
    if decay != "none":
        yield replace(case, strong_gates=True)
    if not small:
        yield replace(case, T=17, has_state=False)
        yield replace(case, T=513, has_state=False)
    yield replace(case, T=1)


def nan_padded(x: Tensor) -> Tensor:
    """Copy a tensor into storage that continues with NaN, so that a read past the end shows."""
    storage = torch.full((x.numel() + 4096,), torch.nan, dtype=x.dtype, device=x.device)
    storage[: x.numel()] = x.flatten()
    return storage[: x.numel()].view(x.shape)


def mixed_sequences(tokens: int, device: torch.device) -> Sequences:
    """Return sequences of mixed lengths in one row, with tokens of none between them."""
    lengths = [tokens // 2, 0, 1, tokens // 3]
    lengths.append(max(tokens - sum(lengths) - 6, 0))
    starts = [i + sum(lengths[:i]) for i in range(len(lengths))]
    tables = (torch.tensor(x, device=device) for x in (starts, lengths))
    return Sequences(*tables, max(lengths))


class Inputs:
    """Tensors of a case: inputs, and the weights of the sum whose gradients are compared.

    Tokens outside of sequences are NaN, and so are the weights of their outputs.
    """

    def __init__(self, case: CheckCase, device: torch.device) -> None:
        self.case = case
        generator = torch.Generator().manual_seed(0)  # on the CPU: the same on every device

        def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            x = torch.randn(shape, generator=generator).to(device, dtype)
            return nan_padded(x)

        b, h, t = case.B, case.Hkv, case.T
        self.sequences = self.slots = None
        count = b
        if case.varlen and t > 1:
            b, self.sequences = 1, mixed_sequences(t, device)
            count = self.sequences.count
        elif case.varlen:
            count += 1
            self.slots = torch.arange(b, 0, -1, device=device)
            if b > 1:
                self.slots[0] = -1
        q, k = (draw(b, n, t, case.d, dtype=case.dtype) for n in (h * case.groups, h))
        v = draw(b, h, t, case.e, dtype=case.dtype)
        shape = {"none": None, "scalar": (b, h, t), "vector": (b, h, t, case.d)}[case.decay]
        log_decay = None if shape is None else nan_padded(-draw(*shape).abs() / 2)
        if case.strong_gates and log_decay is not None:
            log_decay[:, :, 10:13] = -40.0
            log_decay[:, :, t // 2 :: 31] = -torch.inf
        kv, z = draw(count, h, case.d, case.e), nan_padded(draw(count, h, case.d).abs())
        self.weights = [draw(b, h * case.groups, t, case.e), draw(*kv.shape), draw(*z.shape)]
        if self.sequences is not None:
            outside = self.sequences.index(t) == self.sequences.count
            for x in (q, k, v, log_decay, self.weights[0]):
                if x is not None:
                    x[:, :, outside] = torch.nan
        state = (kv, z) if case.has_state else (None, None)
        self.tensors = [q, k, v, *state, log_decay]


Compute = Callable[[Inputs, list[Tensor | None]], tuple[Tensor, ...]]


def run_op(impl: str) -> Compute:
    """Return a function that computes a case with an implementation of the op."""

    def compute(x: Inputs, tensors: list[Tensor | None]) -> tuple[Tensor, ...]:
        q, k, v, kv, z, log_decay = tensors
        assert q is not None
        assert k is not None
        assert v is not None
        out, state, *_ = linear_attention(
            *(q, k, v),
            sequences=x.sequences,
            slots=x.slots,
            log_decay=log_decay,
            normalize=x.case.normalize,
            scale=SCALE,
            eps=EPS,
            impl=impl,
            state=None if kv is None or z is None else LinearState(kv, z),
            return_state=x.case.has_state,
            feature_map=x.case.feature_map,
            feature_scale=FEATURE_SCALE,
        )
        return (out,) if state is None else (out, state.kv, state.k)

    return compute


def run_kernels(x: Inputs, tensors: list[Tensor | None]) -> tuple[Tensor, ...]:
    """Compute a case with the kernels of a sequence."""
    from attnzoo.ops.linear.triton.custom_op import linear_triton

    q, k, v, kv, z, log_decay = tensors
    case = x.case
    table = (None, None) if x.sequences is None else (x.sequences.starts, x.sequences.lengths)
    options = (case.feature_map, FEATURE_SCALE**0.5, SCALE, case.normalize, EPS)
    found = linear_triton(q, k, v, log_decay, kv, z, *table, *options, case.has_state)
    return found if case.has_state else found[:1]  # type: ignore[no-any-return]


def results(
    x: Inputs, compute: Compute, dtype: torch.dtype | None, train: bool
) -> dict[str, Tensor]:
    """Return results and, for training, gradients, by name."""
    leaves = [
        None if t is None else t.detach().to(dtype or t.dtype).requires_grad_(train)
        for t in x.tensors
    ]
    with torch.set_grad_enabled(train):
        computed = compute(x, leaves)
    named = dict(zip(("out", "kv", "z"), computed, strict=False))
    if not train:
        return named
    given = {n: y for n, y in zip(GRADIENTS, leaves, strict=True) if y is not None}
    weights = [w.to(y.dtype) for y, w in zip(computed, x.weights, strict=False)]
    grads = torch.autograd.grad(computed, list(given.values()), weights)
    return {n: y.detach() for n, y in named.items()} | dict(zip(given, grads, strict=True))


def budget(plain: Tensor, exact: Tensor, dtype: torch.dtype) -> float:
    """Return the largest error allowed: twice that of the torch form, and a rounding of operands.

    Operands are rounded to bfloat16; products of float32 operands are sums of three tf32 products.
    """
    rounding = 1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    plain_error = (plain.double() - exact).abs().max().item()
    return 2 * plain_error + rounding * exact.abs().max().item()


def wrong_results(case: CheckCase, device: torch.device) -> Iterator[str]:
    """Yield a message for each error in the kernels' results of a case."""
    x, train = Inputs(case, device), case.T > 1
    exact = results(x, run_op("reference"), torch.float64, train)
    plain = results(x, run_op("torch"), None, train)
    compute = run_kernels if train else run_op("triton")
    first, second = compute_twice(lambda: results(x, compute, None, train))
    for name, ours in first.items():
        found = ours, second[name], plain[name], exact[name]
        yield from wrong_result(name, str(case), case.dtype, *found)
    if case.T == 1 and case.decay != "none":
        yield from wrong_gated_step(x)


def wrong_gated_step(x: Inputs) -> Iterator[str]:
    """Yield the errors in one token of mLSTM (scalar decay) or RWKV-6 (vector decay)."""
    name = "rwkv6" if x.case.decay == "vector" else "mlstm"
    with torch.no_grad():
        exact = _gated_results(run_step_torch, x, torch.float64)
        plain = _gated_results(run_step_torch, x, torch.float32)
        first, second = compute_twice(lambda: _gated_results(run_step_triton, x, None))
    for result, *found in zip(("out", "kv", "z"), first, second, plain, exact, strict=True):
        yield from wrong_result(f"{result} of {name}", str(x.case), x.case.dtype, *found)


def _gated_results(
    run: Callable[[GatedStep], tuple[Tensor, list[Tensor]]], x: Inputs, dtype: torch.dtype | None
) -> list[Tensor]:
    """Return output and sums of one token with the numbers of a case."""
    tensors = [None if t is None else t.to(dtype or t.dtype) for t in x.tensors]
    q, k, v, kv, z, log_decay = tensors
    assert q is not None
    assert k is not None
    assert v is not None
    assert kv is not None
    assert z is not None
    kv, z, others = (y[: len(q)] for y in (kv, z, x.weights[2].to(kv.dtype)))
    gate = StepGate(None, others[:, :, :1], others[:, :, 1].contiguous())
    if x.case.decay == "vector":
        gate = StepGate(others[0].abs())
    inputs = LinearInputs(
        *(q.abs(), k.abs(), v, log_decay, LinearState(kv, z)),
        *(True, True, 1.0, EPS, None, "identity", 1.0),
    )
    out, state = run(GatedStep(inputs, gate))
    return [out, *state[:2]]


def compute_twice(compute: Callable[[], Results]) -> tuple[Results, Results]:
    """Return the results of two equal calls; memory that they should write contains NaN before."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)  # empty tensors contain NaN
        try:
            return compute(), compute()
        finally:
            torch.use_deterministic_algorithms(False)


def wrong_result(
    name: str,
    case: str,
    dtype: torch.dtype,
    ours: Tensor,
    again: Tensor,
    plain: Tensor,
    exact: Tensor,
) -> Iterator[str]:
    """Yield the errors in a result of the kernels, and its differences from a second call."""
    error, allowed = (ours.double() - exact).abs().max().item(), budget(plain, exact, dtype)
    if not error <= allowed:  # NaN, too
        yield f"{name} differs from float64 by {error:.2g} (allowed {allowed:.2g}) in {case}"
    elif not torch.equal(ours, again):
        yield f"{name} differs between two equal calls in {case}"


def wrong_results_by_name(
    case: str, dtype: torch.dtype, results: Callable[..., dict[str, Tensor]], oracle: str
) -> Iterator[str]:
    """Yield a message for each error in the kernels' results of a case.

    Args:
        case: Describes the case.
        dtype: Dtype of its inputs.
        results: ``results(impl)`` and ``results(impl, dtype)`` return results by name.
        oracle: Implementation that runs in float64.
    """
    exact, plain = results(oracle, torch.float64), results("torch")
    first, second = compute_twice(lambda: results("triton"))
    for name, y in first.items():
        yield from wrong_result(name, case, dtype, y, second[name], plain[name], exact[name])


if __name__ == "__main__":
    run_check(cases, wrong_results, *sys.argv[1:])
