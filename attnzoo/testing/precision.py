"""Rules on precision: gradients, and errors in 16 bits.

Budgets come from data: twice the error of rounding only the inputs, with the computation in the
widest dtype, plus one unit in the last place.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from attnzoo.contract.backend import AttentionBackend
from attnzoo.testing.trial import Broken, Sequence, Trial

LONG = 8192  # tokens, at which a normalised sum in low precision loses its gradient
LONG_QUADRATIC = 512
STEP = 1e-6  # of the finite differences that gradients are compared with


def gradients(trial: Trial) -> str | None:
    """Gradients equal finite differences, also of parameters, padding, packing and state."""
    if trial.dtype is not torch.float64:
        return "differences of outputs need float64"
    length = trial.chunk + 3
    real = torch.ones(2, length, dtype=torch.bool, device=trial.device)
    real[0, :3] = real[1, -2:] = False
    ids = (torch.arange(length, device=trial.device) >= 4).long().expand(2, -1)
    _slopes_agree(trial, "one token", 1)
    _slopes_agree(trial, "a short sequence", 5)
    _slopes_agree(trial, f"{length} tokens with padding", length, padding=real)
    _slopes_agree(trial, f"{length} tokens in two packed segments", length, segment_ids=ids)
    if trial.carries_state:
        _slopes_agree(trial, "through a state", trial.chunk + 4, cut=trial.chunk + 1)
    return None


def _slopes_agree(
    trial: Trial, what: str, length: int, cut: int | None = None, **fields: Any
) -> None:
    x = trial.sequence(2, length)
    names = [name for name, p in trial.backend.named_parameters() if p.requires_grad]
    extras = [p.detach() for _, p in trial.backend.named_parameters() if p.requires_grad]
    options = {"mask": trial.mask(**fields)}

    def attend(*tensors: Tensor) -> Tensor:
        given = Sequence(*tensors[:4])
        changed = dict(zip(names, tensors[4:], strict=True))

        def call(part: Sequence, **more: Any) -> Any:
            kwargs = {"hidden_states": part.hidden, **options, **more}
            return functional_call(trial.backend, changed, part[:3], kwargs)

        if cut is None:
            return call(given).out  # type: ignore[no-any-return]
        first = call(given.tokens(slice(cut)), return_state=True)
        rest = call(given.tokens(slice(cut, None)), state=first.state)
        return torch.cat([first.out, rest.out], 2)

    leaves = [t.detach().clone().requires_grad_() for t in (*x, *extras)]
    out = attend(*leaves)
    draw = torch.Generator().manual_seed(9)
    upstream = torch.randn(out.shape, generator=draw, dtype=out.dtype).to(out.device)
    found = torch.autograd.grad(out, leaves, upstream, allow_unused=True)
    for i, (name, leaf) in enumerate(zip((*x._fields, *names), leaves, strict=True)):
        step = torch.randn(leaf.shape, generator=draw, dtype=leaf.dtype).to(leaf.device)
        moved = [[*leaves[:i], leaf + sign * STEP * step, *leaves[i + 1 :]] for sign in (1, -1)]
        with torch.no_grad():
            above, below = (attend(*tensors) for tensors in moved)
        slope = float(((above - below) * upstream).sum()) / (2 * STEP)
        gradient = torch.zeros_like(leaf) if (given := found[i]) is None else given
        error = abs(float((gradient * step).sum()) - slope)
        budget = 1e-5 * max(float(gradient.norm()), 1e-2)
        if not error <= budget:
            raise Broken(
                f"{what}: along a random direction of {name} the outputs rise by {slope:.6g}, "
                f"which its gradient misses by {error:.2g}; the budget is {budget:.2g}"
            )


def precision(trial: Trial) -> str | None:
    """Errors of outputs and gradients in low precision are close to those of rounding inputs."""
    if not trial.low_dtypes:
        return "no dtype below the widest was asked for"
    _compare(trial, trial.low_dtypes, trial.length, mean=0.0)
    return None


def long_gradients(trial: Trial) -> str | None:
    """The same for long sequences of values with mean 1, where differences cancel."""
    dtypes = [dtype for dtype in trial.low_dtypes if dtype.itemsize == 2]
    if not dtypes:
        return "no 16-bit dtype was asked for"
    quadratic = trial.backend.capabilities.exact or trial.backend.keeps_all_keys
    quadratic |= trial.config.impl == "reference"  # may be quadratic
    _compare(trial, dtypes, LONG_QUADRATIC if quadratic else LONG, mean=1.0)
    return None


def _compare(trial: Trial, dtypes: Iterable[torch.dtype], length: int, mean: float) -> None:
    """Compare outputs and gradients in some dtypes with those in the widest."""
    x = trial.sequence(1, length, mean=mean)
    draw = torch.Generator().manual_seed(6)
    shape = (1, x.q.shape[1], length, x.v.shape[3])
    upstream = torch.randint(-4, 5, shape, generator=draw).to(x.q) / 4  # exact in every dtype
    exact = _answers(trial, trial.unrounded, x, upstream)
    for dtype in dtypes:
        _narrow(trial, dtype, x, upstream, exact, f"{length} tokens with values of mean {mean:g}")


def _narrow(
    trial: Trial,
    dtype: torch.dtype,
    x: Sequence,
    upstream: Tensor,
    exact: dict[str, Tensor],
    inputs: str,
) -> None:
    """Compare outputs and gradients in ``dtype`` with the exact ones."""
    ours_backend = deepcopy(trial.unrounded).to(dtype)
    plain_backend = deepcopy(ours_backend).to(trial.wide)
    rounded = x.map(lambda t: t.to(dtype))
    plain = _answers(trial, plain_backend, rounded.map(lambda t: t.to(trial.wide)), upstream)
    ours = _answers(trial, ours_backend, rounded, upstream.to(dtype))
    units = 1 if dtype.itemsize == 2 else 256  # sums in float32 add up their own rounding
    name = f"{str(dtype).removeprefix('torch.')}, {inputs}"
    for what, right in exact.items():
        if float(right.abs().max()) > torch.finfo(dtype).max:
            continue  # the exact result overflows this dtype
        got, rounding = ours[what].to(trial.wide), plain[what].to(dtype).to(trial.wide) - right
        if not bool(torch.isfinite(got).all()):
            raise Broken(f"{name}: the {what} is not finite")
        size = max(float(right.norm()), torch.finfo(trial.wide).tiny)
        budget = 2 * float(rounding.norm()) + units * torch.finfo(dtype).eps * size
        error = float((got - right).norm())
        if not error <= budget:
            raise Broken(
                f"{name}: the {what} is off by {error / size:.2g} of its size, "
                f"the budget is {budget / size:.2g}"
            )


def _answers(
    trial: Trial, backend: AttentionBackend, x: Sequence, upstream: Tensor
) -> dict[str, Tensor]:
    """Return the output, and the gradients of inputs and parameters that have one."""
    leaves = x.map(lambda t: t.detach().clone().requires_grad_())
    backend.zero_grad()
    out = backend(*leaves[:3], hidden_states=leaves.hidden, mask=trial.mask()).out
    (out * upstream).sum().backward()
    found = {"output": out.detach()}
    named = [*zip(Sequence._fields, leaves, strict=True), *backend.named_parameters()]
    for name, leaf in named:
        if leaf.grad is not None:
            found[f"gradient of {name}"] = leaf.grad
    backend.zero_grad()
    return found
