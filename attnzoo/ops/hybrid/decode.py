"""Select what computes one token of the window hybrid after a state: decoding.

Letters: B batch, H query heads, Hkv key heads, D key size, E value size.
"""

from __future__ import annotations

from torch import Tensor

from attnzoo.contract.implementation import Implementation, select
from attnzoo.contract.masks import AttentionMask
from attnzoo.contract.states import AttentionOutput, ImplChoice
from attnzoo.ops.hybrid.cpu.hybrid_step import hybrid_step_cpp, supports_step_cpp
from attnzoo.ops.hybrid.merge import MIN_WEIGHT
from attnzoo.ops.hybrid.state import HybridState, LinearBranch
from attnzoo.ops.hybrid.step import hybrid_step, supports_step
from attnzoo.ops.hybrid.triton.run import (
    StepInputs,
    hybrid_verdict,
    run_step_triton,
    step_triton_reasons,
)
from attnzoo.ops.linear.api import STEP_IN_CPP


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    branch: LinearBranch,
    mask: AttentionMask,
    state: HybridState,
    impl: str,
    scale: float,
    in_place: bool,
) -> AttentionOutput | None:
    """Return the output of one token after a state; ``None`` if a step does not support it."""
    if impl in ("auto", "cpp") and supports_step_cpp(q, k, v, branch, mask, state):
        out, after = hybrid_step_cpp(q, k, v, branch, state, scale=scale, in_place=in_place)
        return AttentionOutput(out, after, None, STEP_IN_CPP)
    if impl not in ("auto", "triton", "torch") or q.shape[2] != 1:
        return None
    branch = branch.mapped(mask.padding)
    if not supports_step(q, k, v, branch, mask, state, in_place):
        return None
    x = StepInputs(q, k, v, branch, mask, state, scale, in_place)
    table = AUTOMATIC_STEPS[q.device.type == "cuda"] if impl == "auto" else STEPS
    chosen, choice = select("hybrid_attention", table, x, impl)
    out, after = chosen.run(x)
    choice = ImplChoice(choice.impl, f"softmax window + linear form; one token; {choice.reason}")
    return AttentionOutput(out, after, None, choice)


def _run_step_triton(x: StepInputs) -> tuple[Tensor, HybridState]:
    return run_step_triton(x, MIN_WEIGHT)


def _run_step_torch(x: StepInputs) -> tuple[Tensor, HybridState]:
    return hybrid_step(*x[:6], scale=x.scale, in_place=x.in_place)


STEPS = (  # of one token after a state; C++ has its own
    Implementation(
        name="triton",
        run=_run_step_triton,
        reasons=step_triton_reasons,
        automatic="compiled for this GPU",
        verdict=hybrid_verdict,
    ),
    Implementation(name="torch", run=_run_step_torch, automatic="runs on every device"),
)
# What impl="auto" selects from, by whether the tensors are on a GPU; the interpreter is for tests
AUTOMATIC_STEPS = {True: STEPS, False: STEPS[1:]}
