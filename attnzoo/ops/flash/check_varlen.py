"""Check of torch's varlen kernel on a device, against a dense mask and float64.

    python -m attnzoo.ops.flash.check_varlen 128 cuda:0

Output and gradients of each case differ from float64 by at most twice as much as those of a dense
mask in the same dtype, plus one rounding. The kernel adds gradients in no fixed order, so two equal
calls need not agree bit for bit. :mod:`attnzoo.runtime.verdicts` reads the output.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnzoo.contract.masks import AttentionMask, Window
from attnzoo.ops.flash.call import FlashCall
from attnzoo.ops.flash.varlen import run_varlen
from attnzoo.ops.flash.varlen_kernel import (
    accepts_window,
    backward_reason,
    returns_lse,
)
from attnzoo.ops.softmax.api import softmax_attention
from attnzoo.runtime.verdicts import run_cases

B, H, HKV = 2, 4, 2


class VarlenCase(NamedTuple):
    """One call; rows are left-padded, packed, or neither."""

    queries: int
    keys: int
    causal: bool = True
    window: Window | None = None
    padded: bool = False
    packed: bool = False
    later: int = 0  # keys after the last query, as in a static cache
    num_sinks: int = 0  # first tokens, which queries see outside the window too
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        flags = ("causal", "padded", "packed")
        names = [name for name in flags if getattr(self, name)]
        names += [f"window {self.window}"] if self.window else []
        names += [f"{self.later} later keys"] if self.later else []
        names += [f"{self.num_sinks} first tokens"] if self.num_sinks else []
        return f"{self.queries} queries, {self.keys} keys, {', '.join(names)}, {self.dtype}"

    def mask(self, device: torch.device) -> AttentionMask:
        """Return the mask of the call."""
        padding = ids = None
        token = torch.arange(self.keys, device=device)
        if self.padded:
            padding = token >= torch.tensor([[0], [self.keys // 3]], device=device)
        if self.packed:
            ends = torch.tensor([self.keys // 4, self.keys - self.queries + 1], device=device)
            ids = (token[:, None] >= ends).sum(1).expand(B, -1)
        return AttentionMask(
            causal=self.causal,
            padding=padding,
            segment_ids=ids,
            window=self.window,
            q_offset=self.keys - self.later - self.queries,
            num_sinks=self.num_sinks,
        )


def cases() -> Iterator[VarlenCase]:
    """Yield the cases: each way in which calls differ, and pairs of them."""
    yield VarlenCase(150, 150, padded=True)
    yield VarlenCase(150, 150, packed=True, dtype=torch.float16)
    yield VarlenCase(150, 150, causal=False, packed=True, padded=True)
    yield VarlenCase(37, 150)
    yield VarlenCase(37, 150, later=20)
    yield VarlenCase(37, 150, padded=True, packed=True)
    if accepts_window():
        yield VarlenCase(513, 513, window=(63, 0))
        yield VarlenCase(513, 513, causal=False, window=(32, 17))
        yield VarlenCase(150, 150, window=(0, 0))
        yield VarlenCase(150, 150, window=(31, 0), packed=True, padded=True)
        yield VarlenCase(37, 150, window=(31, 0), padded=True)
        yield VarlenCase(1, 150, window=(31, 0))
    if accepts_window() and returns_lse() and not backward_reason():
        yield VarlenCase(513, 513, window=(63, 0), num_sinks=4)
        yield VarlenCase(150, 150, causal=False, window=(9, 17), padded=True, num_sinks=20)
        yield VarlenCase(37, 150, window=(31, 0), num_sinks=3, dtype=torch.float16)


def _run_dense(x: FlashCall) -> Tensor:
    """Compute a call with a dense mask, in plain operations; zeros where a query is padding."""
    out = softmax_attention(x.q, x.k, x.v, mask=x.mask, scale=x.scale).out
    if x.mask.padding is None:
        return out
    assert isinstance(x.mask.q_offset, int)
    padding = x.mask.padding[:, x.mask.q_offset :][:, : x.q.shape[2]]
    return out * padding[:, None, :, None]


def _results(run: Any, tensors: list[Tensor], weights: Tensor, case: VarlenCase) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    q, k, v = leaves
    out = run(FlashCall(q, k, v, case.mask(q.device), q.shape[3] ** -0.5))
    return [out.detach(), *torch.autograd.grad((out * weights.to(out.dtype)).sum(), leaves)]


def wrong_results(case: VarlenCase, size: int, device: torch.device) -> Iterator[str]:
    """Yield a message for each error in the kernel's results of a case."""
    generator = torch.Generator().manual_seed(0)  # on the CPU: the same on every device

    def draw(heads: int, tokens: int) -> Tensor:
        return torch.randn(B, heads, tokens, size, generator=generator).to(device, case.dtype)

    tensors = [draw(H, case.queries), draw(HKV, case.keys), draw(HKV, case.keys)]
    weights = draw(H, case.queries)
    exact = _results(_run_dense, [x.double() for x in tensors], weights, case)
    plain = _results(_run_dense, tensors, weights, case)
    ours = _results(run_varlen, tensors, weights, case)
    for name, found, p, e in zip(("out", "dq", "dk", "dv"), ours, plain, exact, strict=True):
        error, plain_error = ((y.double() - e).abs().max().item() for y in (found, p))
        allowed = 2 * plain_error + 2 * torch.finfo(case.dtype).eps * e.abs().max().item()
        if not error <= allowed:  # NaN, too
            yield f"{name} differs from float64 by {error:.2g} (allowed {allowed:.2g}) in {case}"


def main(size: str, device: str) -> None:
    """Check heads of one size; prints events."""

    def check(case: VarlenCase, target: torch.device) -> Iterator[str]:
        return wrong_results(case, int(size), target)

    run_cases(cases(), check, torch.device(device))


if __name__ == "__main__":
    main(*sys.argv[1:])
