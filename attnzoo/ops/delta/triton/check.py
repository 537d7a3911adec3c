"""Check of the Triton kernels of the delta rule on a device, against torch and float64.

    python -m attnzoo.ops.delta.triton.check scalar 128 plain cuda:0

As :mod:`attnzoo.ops.linear.triton.check`, whose kernels these run too.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.contract.sequences import Sequences
from attnzoo.contract.states import DeltaState
from attnzoo.ops.delta.api import delta_attention
from attnzoo.ops.linear.triton.check import nan_padded, wrong_results_by_name
from attnzoo.runtime.verdicts import run_check

KINDS = ("plain", "any", "wide")
NAMES = ("q", "k", "v", "beta", "state", "log_decay")


@dataclass(frozen=True, kw_only=True)
class DeltaCase:
    """One call; what differs between kinds makes the compiler generate other code."""

    decay: str  # "none", "scalar" or "vector"
    d: int
    e: int
    dtype: torch.dtype = torch.bfloat16
    groups: int = 1
    ragged: bool = False  # sequences in one row, with gaps; one token: in slots of a pool
    largest_beta: float = 1.0
    scale: float = 0.7
    mean: float = 0.0  # of values
    B: int = 2
    Hkv: int = 3
    T: int = 150
    strong_gates: bool = False

    def __str__(self) -> str:
        gates = " strong gates" if self.strong_gates else ""
        scale = f" scale {self.scale}" if self.scale != 0.7 else ""
        return f"{self.T} tokens of {self.d} and {self.e}{gates}{scale}"


def cases(decay: str, size: int, kind: str, small: bool) -> Iterator[DeltaCase]:
    """Yield the cases of a kind: several chunks, strong gates, less than a chunk, one token.

    ``small`` cases are for the interpreter.
    """
    case = DeltaCase(decay=decay, d=size, e=size)
    if kind == "any":
        case = replace(case, d=size - 4, e=size - 24, groups=2, ragged=True)
    if kind == "wide":
        case = replace(case, dtype=torch.float32, largest_beta=2.0)
    if small:
        case = replace(case, B=1, Hkv=1, T=70)
    yield case
    if decay != "none":
        yield replace(case, strong_gates=True)
    if not small:
        yield replace(case, T=17)
        yield replace(case, T=513)
    if kind == "wide":
        yield replace(case, dtype=torch.float16, scale=1e-3)
    if kind == "plain":
        yield replace(case, mean=1.0)
    yield replace(case, T=1)


class Inputs:
    """Tensors of a case: inputs, sequences, and weights of the sum whose gradients are compared."""

    def __init__(self, case: DeltaCase, device: torch.device) -> None:
        self.case = case
        generator = torch.Generator().manual_seed(0)  # on the CPU: the same on every device

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        b, h, t, count = case.B, case.Hkv, case.T, case.B
        self.sequences: Sequences | None = None
        self.slots: Tensor | None = None
        if case.ragged and t > 1:
            b, t = 1, b * t
            lengths = torch.tensor([t // 3, 0, 1, t // 5, 0, t - t // 3 - t // 5 - 6])
            starts = lengths.cumsum(0) - lengths + torch.tensor([0, 1, 1, 2, 2, 2])
            count, longest = len(lengths), int(lengths.max())
            self.sequences = Sequences(starts.to(device), lengths.to(device), longest)
        elif case.ragged:
            count = b + 2
            self.slots = torch.arange(b, 0, -1, device=device)
            self.slots[1:2] = -1
        q, k = (F.normalize(draw(b, n, t, case.d), dim=3) for n in (h * case.groups, h))
        beta = case.largest_beta * torch.rand(b, h, t, generator=generator)
        shape = {"none": None, "scalar": (b, h, t), "vector": (b, h, t, case.d)}[case.decay]
        log_decay = None if shape is None else -draw(*shape).abs() / 2
        if case.strong_gates and log_decay is not None:
            log_decay[:, :, 10:13] = -40.0
            log_decay[:, :, t // 2 :: 31] = -torch.inf
        narrow = [x.to(case.dtype) for x in (q, k, case.mean + draw(b, h, t, case.e))]
        tensors = [*narrow, beta, draw(count, h, case.d, case.e), log_decay]
        if self.sequences is not None:
            outside = self.sequences.index(t).cpu() == count
            for x in (*narrow, beta, log_decay):
                if x is not None:
                    x[:, :, outside] = torch.nan
        self.tensors = [None if x is None else nan_padded(x.to(device)) for x in tensors]
        self.weights = [draw(b, h * case.groups, t, case.e), draw(count, h, case.d, case.e)]
        # With a small scale, gradients of the keys come from the state
        self.weights = [
            x.to(device) * y for x, y in zip(self.weights, (1, 0.1 / case.scale), strict=True)
        ]


def results(x: Inputs, impl: str, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Return output, state and, for more than one token, gradients, by name."""
    train = x.case.T > 1
    leaves = [
        None if t is None else t.detach().to(dtype or t.dtype).requires_grad_(train)
        for t in x.tensors
    ]
    q, k, v, beta, kv, log_decay = leaves
    assert q is not None
    assert k is not None
    assert v is not None
    assert beta is not None
    assert kv is not None
    with torch.set_grad_enabled(train):
        out, state, *_ = delta_attention(
            *(q, k, v, beta),
            sequences=x.sequences,
            slots=x.slots,
            log_decay=log_decay,
            scale=x.case.scale,
            impl=impl,
            state=DeltaState(kv),
            return_state=True,
        )
    assert isinstance(state, DeltaState)
    found = {"out": out, "state": state.kv}
    if not train:
        return found
    total = sum((y * w.to(y.dtype)).sum() for y, w in zip(found.values(), x.weights, strict=True))
    assert isinstance(total, Tensor)
    named = {name: leaf for name, leaf in zip(NAMES, leaves, strict=True) if leaf is not None}
    grads = torch.autograd.grad(total, list(named.values()))
    return {name: y.detach() for name, y in found.items()} | {
        f"d_{name}": g for name, g in zip(named, grads, strict=True)
    }


def wrong_results(case: DeltaCase, device: torch.device) -> Iterator[str]:
    """Yield a message for each error in the kernels' results of a case."""
    of_case = partial(results, Inputs(case, device))
    yield from wrong_results_by_name(str(case), case.dtype, of_case, "reference")


if __name__ == "__main__":
    run_check(cases, wrong_results, *sys.argv[1:])
