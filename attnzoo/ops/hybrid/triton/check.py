"""Check of the Triton kernels of the window hybrid on a device, against torch and float64.

    python -m attnzoo.ops.hybrid.triton.check vector 128 plain cuda:0

As :mod:`attnzoo.ops.linear.triton.check`, whose verdicts do not cover the kernels of the
window, of the merge, and of sums without a division. mLSTM and RWKV-6 run on the latter.

Other letters: W window.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnzoo.contract.sequences import Sequences
from attnzoo.ops.hybrid.api import hybrid_attention
from attnzoo.ops.hybrid.parts import HybridState, LinearBranch
from attnzoo.ops.linear.triton.check import (
    compute_twice,
    nan_padded,
    wrong_result,
)
from attnzoo.runtime.verdicts import run_check

NAMES = ("q", "k", "v", "q_features", "k_features", "log_weight", "log_decay")
KINDS = ("plain", "learned", "state", "any", "wide")
DECODED = 4  # tokens


@dataclass(frozen=True, kw_only=True)
class HybridCase:
    """One call; what differs between kinds makes the compiler generate other code."""

    decay: str  # "none", "scalar" or "vector"
    d: int
    e: int
    features: int
    dtype: torch.dtype = torch.bfloat16
    groups: int = 1
    relative: bool = True
    mean: bool = True
    packed: bool = False  # one row of sequences, with tokens of none between them
    cut: int = 0  # the call continues from the state after that many tokens
    num_sinks: int = 0
    causal: bool = True
    B: int = 2
    Hkv: int = 2
    T: int = 150
    W: int = 24
    strong_gates: bool = False

    def __str__(self) -> str:
        gates = " strong gates" if self.strong_gates else ""
        sinks = f", {self.num_sinks} first tokens" if self.num_sinks else ""
        sinks += "" if self.causal else ", bidirectional"
        packed = " in sequences" if self.packed else ""
        sizes = f"of {self.d}, {self.e} and {self.features} features"
        return f"{self.T} tokens {sizes}{packed}{sinks}{gates}"


def base_case(decay: str, size: int, kind: str) -> HybridCase:
    """Return the case of a kind of calls with a decay and sizes up to ``size``."""
    case = HybridCase(decay=decay, d=size, e=size, features=size)
    if kind == "plain":
        return replace(case, groups=2)
    if kind == "learned":  # twice as many features as channels, as in hedgehog
        half = size // 2
        return replace(case, d=half, e=half, relative=False, mean=False)
    if kind == "state":
        return replace(case, cut=60)
    if kind == "any":
        case = replace(case, d=size - 4, e=size - 24, features=size - 8)
        return replace(case, groups=2, packed=True, B=1)
    assert kind == "wide"
    return replace(case, dtype=torch.float32)


def cases(decay: str, size: int, kind: str, small: bool) -> Iterator[HybridCase]:
    """Yield the cases of a kind: several splits, strong gates, fewer tokens than the window.

    ``small`` cases are for the interpreter.
    """
    case = base_case(decay, size, kind)
    if small:
        case = replace(case, B=1, Hkv=1, T=70, W=16, cut=min(case.cut, 30))
    yield case
    if decay != "none":
        yield replace(case, strong_gates=True)
    if kind == "state":
        yield replace(case, num_sinks=4)
    if not small:
        yield replace(case, T=1400)
    if not case.cut:
        yield replace(case, T=case.W - 3)
        if decay == "none":
            yield replace(case, causal=False)


class Inputs:
    """Tensors of a case, its sequences, and the weights of the sum whose gradients are compared."""

    def __init__(self, case: HybridCase, device: torch.device) -> None:
        self.case, self.device = case, device
        generator = torch.Generator().manual_seed(0)  # on the CPU: the same on every device

        def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return nan_padded(torch.randn(shape, generator=generator).to(device, dtype))

        b, h, t = case.B, case.Hkv, case.T
        heads = h * case.groups
        q, k = (draw(b, n, t, case.d, dtype=case.dtype) for n in (heads, h))
        v = draw(b, h, t, case.e, dtype=case.dtype)
        features = [
            nan_padded(draw(b, n, t, case.features, dtype=case.dtype).abs()) for n in (heads, h)
        ]
        shape = {"none": None, "scalar": (b, h, t), "vector": (b, h, t, case.features)}[case.decay]
        log_decay = None if shape is None else nan_padded(-draw(*shape).abs() / 2)
        if case.strong_gates and log_decay is not None:
            log_decay[:, :, 40:43] = -40.0
            log_decay[:, :, t // 2 :: 31] = -torch.inf
        self.sequences = None
        if case.packed:
            starts = torch.tensor([2, t // 2, t // 2, t // 2 + 4], device=device)
            lengths = torch.tensor([t // 2 - 2, 0, 1, max(t // 2 - 7, 0)], device=device)
            self.sequences = Sequences(starts, lengths, t // 2)
        log_weight = draw(b, heads, t, 1)  # the gradient of one for all tokens would cancel
        self.tensors = [q, k, v, *features, log_weight, log_decay]
        self.weights = draw(b, heads, t - case.cut, case.e)


def attend(
    x: Inputs,
    tensors: list[Tensor | None],
    state: HybridState | None,
    impl: str,
    *,
    sequences: Sequences | None = None,
    return_state: bool = True,
    slots: Tensor | None = None,
    reuse_state: bool = False,
) -> tuple[Tensor, HybridState | None]:
    """Return the output of a call, and the state after it if it is requested."""
    q, k, v, q_features, k_features, log_weight, log_decay = tensors
    assert q is not None
    assert k is not None
    assert v is not None
    assert q_features is not None
    assert k_features is not None
    assert log_weight is not None
    case = x.case
    branch = LinearBranch(q_features, k_features, log_weight, log_decay, case.relative, case.mean)
    out, after, *_ = hybrid_attention(
        *(q, k, v, branch),
        window=case.W,
        scale=case.d**-0.5,
        causal=case.causal,
        sequences=sequences,
        state=state,
        return_state=case.causal and return_state,
        impl=impl,
        num_sinks=case.num_sinks,
        reuse_state=reuse_state,
        slots=slots,
    )
    assert after is None or isinstance(after, HybridState)
    return out, after


def tokens_of(tensors: list[Tensor | None], tokens: slice) -> list[Tensor | None]:
    """Return some tokens of all tensors."""
    return [None if y is None else y[:, :, tokens] for y in tensors]


def results(x: Inputs, impl: str, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Return output, state and gradients by name."""
    leaves = [
        None if t is None else t.detach().to(dtype or t.dtype).requires_grad_() for t in x.tensors
    ]
    case, state = x.case, None
    if case.cut:  # in torch, so that only the call after it is compared
        before = "reference" if dtype == torch.float64 else "torch"
        _, state = attend(x, tokens_of(leaves, slice(case.cut)), None, before)
    rest = tokens_of(leaves, slice(case.cut, case.T))
    # packed rows are trained on, without a state
    out, state = attend(x, rest, state, impl, sequences=x.sequences, return_state=not case.packed)
    found = {"out": out}
    if state is not None:
        found |= {"kv": state.kv, "z": state.z}
    total = (out.float() * x.weights if dtype is None else out * x.weights).sum()
    total = total + sum(0.1 * found[name].sum() for name in found if name != "out")
    named = {name: leaf for name, leaf in zip(NAMES, leaves, strict=True) if leaf is not None}
    grads = torch.autograd.grad(total, list(named.values()), allow_unused=True)
    return {name: y.detach() for name, y in found.items()} | {
        f"d_{name}": g for name, g in zip(named, grads, strict=True) if g is not None
    }


@torch.no_grad()
def decoded(x: Inputs, impl: str, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Return the outputs of a few tokens, decoded in place, and the state after them, by name."""
    if not x.case.causal:
        return {}
    tensors = [None if t is None else t.to(dtype or t.dtype) for t in x.tensors]
    start, before = x.case.T // 2, "reference" if dtype == torch.float64 else "torch"
    outs, slots, sequences = [], None, x.sequences
    given = tensors if sequences is not None else tokens_of(tensors, slice(start))
    _, state = attend(x, given, None, before, sequences=sequences)
    if sequences is not None:  # a token of each sequence, and of none
        slots = torch.arange(-1, sequences.count - 1, device=x.device)
    for t in range(start, start + DECODED):
        one = tokens_of(tensors, slice(t, t + 1))
        if sequences is not None:
            some = tokens_of(tensors, slice(t, t + sequences.count))
            one = [None if y is None else y.transpose(0, 2) for y in some]
        out, state = attend(x, one, state, impl, slots=slots, reuse_state=True)
        outs.append(out)
    assert state is not None
    found = {"out": torch.cat(outs, 2), **state._asdict()}
    del found["seen"]
    return {f"{name} after decoding": value for name, value in found.items()}


def wrong_results(case: HybridCase, device: torch.device) -> Iterator[str]:
    """Yield a message for each error in the kernels' results of a case."""
    x = Inputs(case, device)
    exact = results(x, "reference", torch.float64) | decoded(x, "reference", torch.float64)
    plain = results(x, "torch") | decoded(x, "torch")
    first, second = compute_twice(lambda: results(x, "triton") | decoded(x, "triton"))
    for name, expected in exact.items():
        found = (first[name], second[name], plain[name], expected)
        yield from wrong_result(name, str(case), case.dtype, *found)


if __name__ == "__main__":
    run_check(cases, wrong_results, *sys.argv[1:])
