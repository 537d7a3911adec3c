"""Rules on masks: causality, padding, packing.

Each rule is a function of a :class:`~attnzoo.testing.trial.Trial`. It raises if the rule is
broken, and returns why if the rule does not apply.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnzoo.testing.trial import Sequence, Trial


def layout(trial: Trial) -> str | None:
    """Shape and dtype are correct, inputs are unchanged, and any strides are supported."""
    x, g = trial.sequence(2, trial.length), trial.geometry
    before = x.map(Tensor.clone)
    out = trial.run(x).out
    shape = (2, g.num_heads, trial.length, g.value_dim)
    if tuple(out.shape) != shape or out.dtype != trial.dtype:
        trial.fail(f"the output is {tuple(out.shape)} {out.dtype}, not {shape} {trial.dtype}")
    if not all(torch.equal(now, then) for now, then in zip(x, before, strict=True)):
        trial.fail("the inputs were changed in place")
    if not bool(torch.isfinite(out).all()):
        trial.fail("the output is not finite")
    exact = trial.run(x, trial.oracle).out
    transposed = x.map(lambda t: t.transpose(1, 2).contiguous().transpose(1, 2))
    trial.agree("transposed inputs", trial.run(transposed).out, exact, out)
    trial.agree(
        "inputs that NaN follows in memory", trial.run(x.map(_followed_by_nan)).out, exact, out
    )
    return None


def _followed_by_nan(x: Tensor) -> Tensor:
    """Copy a tensor into storage that continues with NaN, to detect reads past its end."""
    storage = torch.full((x.numel() + 4096,), torch.nan, dtype=x.dtype, device=x.device)
    storage[: x.numel()] = x.flatten()
    return storage[: x.numel()].view(x.shape)


def causality(trial: Trial) -> str | None:
    """Scaling all later tokens by 6 changes no earlier output, no bit of it."""
    if not trial.geometry.causal:
        return "the layer is bidirectional"
    x = trial.sequence(2, trial.length)
    out = trial.run(x).out
    for cut in (1, trial.chunk - 1, trial.chunk, trial.length // 2, trial.length - 1):
        changed = x.tokens(slice(cut)).join(x.tokens(slice(cut, None)).map(lambda t: 6 * t))
        other = trial.run(changed).out
        differ = (out != other)[:, :, :cut].any(-1).any(1).any(0).nonzero()
        if len(differ):
            first = int(differ[0])
            error = float((out - other).detach()[:, :, :cut].abs().max())
            trial.fail(
                f"output {first} changes when tokens {cut} and later are scaled by 6; "
                f"the worst change is {error:.2e}, the budget 0"
            )
    return None


def _paddings(trial: Trial) -> dict[str, Tensor]:
    """Make masks, ``[B, T]`` true where real: rows of several lengths, padded in each place."""
    length = trial.length
    counts = torch.tensor([1, trial.chunk - 1, trial.chunk + 1, length // 3 + 1, length])
    counts = counts.clamp(1, length)
    steps = torch.arange(length)
    right = steps < counts[:, None]
    drawn = torch.rand(5, length, generator=torch.Generator().manual_seed(3))
    interior = drawn.argsort(1).argsort(1) < counts[:, None]
    interior[:, 0] = interior[:, -1] = True
    masks = {"left": right.flip(1), "right": right, "interior": interior}
    return {place: mask.to(trial.device) for place, mask in masks.items()}


def padding(trial: Trial) -> str | None:
    """Outputs of tokens are those without padding; values at padding have no effect."""
    x, later = trial.sequence(5, trial.length), trial.sequence(5, 3, seed=4)
    for place, real in _paddings(trial).items():
        filled = x.fill(~real, torch.nan)
        first = trial.run(x, padding=real, return_state=trial.carries_state)
        again = trial.run(filled, padding=real, return_state=trial.carries_state)
        if not torch.equal(*(o.out.transpose(1, 2)[real] for o in (first, again))):
            trial.fail(f"{place} padding: NaN in it changes the outputs of real tokens")
        after = trial.run(later, state=again.state).out if trial.carries_state else None
        for row in range(5):
            alone = x.rows([row]).tokens(real[row])
            ours = first.out[[row]][:, :, real[row]]
            if after is not None:
                alone = alone.join(later.rows([row]))
                ours = torch.cat([ours, after[[row]]], 2)
            exact, plain = trial.exact_and_plain(alone)
            what = f"{place} padding around {int(real[row].sum())} tokens"
            trial.agree(what, ours, exact, plain)
    return None


def padding_gradients(trial: Trial) -> str | None:
    """Gradients equal those without padding; at padding they are zero, not NaN."""
    x = trial.sequence(5, trial.length)
    weights = trial.sequence(5, trial.length, seed=5).v
    upstream = weights.repeat_interleave(x.q.shape[1] // x.k.shape[1], 1)
    for place, real in _paddings(trial).items():
        ours, extras = _gradients(trial, x.fill(~real, torch.nan), upstream, real)
        totals = [torch.zeros_like(extra) for extra in extras]
        for row, kept in enumerate(real):
            alone, part = x.rows([row]).tokens(kept), upstream[[row]][:, :, kept]
            expected, shares = _gradients(trial, alone, part, kept[kept][None])
            totals = [total + share for total, share in zip(totals, shares, strict=True)]
            mine = ours.rows([row])
            for name, got, right in zip(x._fields, mine.tokens(kept), expected, strict=True):
                trial.agree(f"{place} padding: the gradient of {name}", got, right)
            if not all(bool((gradient == 0).all()) for gradient in mine.tokens(~kept)):
                trial.fail(f"{place} padding: gradients in the padding are not zero")
        names = [name for name, _ in trial.backend.named_parameters()]
        for name, got, right in zip(names, extras, totals, strict=True):
            trial.agree(f"{place} padding: the gradient of {name}", got, right)
    return None


def _gradients(
    trial: Trial, x: Sequence, upstream: Tensor, real: Tensor
) -> tuple[Sequence, list[Tensor]]:
    """Return the gradients of inputs and parameters, without the outputs at padding."""
    leaves = x.map(lambda t: t.detach().clone().requires_grad_())
    trial.backend.zero_grad()
    out = trial.run(leaves, padding=None if bool(real.all()) else real).out
    (out * upstream).masked_fill(~real[:, None, :, None], 0).sum().backward()
    found = [torch.zeros_like(p) if p.grad is None else p.grad for p in trial.backend.parameters()]
    trial.backend.zero_grad()
    return leaves.map(lambda t: torch.zeros_like(t) if t.grad is None else t.grad), found


def masked_rows(trial: Trial) -> str | None:
    """A query that attends to no key has a zero output and finite gradients."""
    length = 9
    x = trial.sequence(3, length)
    real = torch.ones(3, length, dtype=torch.bool, device=trial.device)
    real[0] = False
    real[1, :4] = False
    blind = ~real if trial.geometry.causal else ~real & ~real.any(1, keepdim=True)
    cases: list[tuple[str, Tensor, dict[str, Any]]] = [("padding", blind, {"padding": real})]
    if trial.backend.capabilities.arbitrary_mask:
        seen = real[:, None, :, None] & real[:, None, None, :]
        cases.append(("a mask function", ~real, {"function": lambda: seen}))
    for name, sightless, fields in cases:
        leaves = x.map(lambda t: t.clone().requires_grad_())
        out = trial.run(leaves, **fields).out
        rows = out.detach().transpose(1, 2)[sightless]
        if not bool((rows == 0).all()):
            worst = float(rows.abs().max())
            trial.fail(f"queries that see no key because of {name} give {worst:.2e}, not 0")
        if not bool(torch.isfinite(out).all()):
            trial.fail(f"some outputs beside rows that see no key ({name}) are not finite")
        out.sum().backward()
        extras = [p.grad for p in trial.backend.parameters()]
        trial.backend.zero_grad()
        for gradient in (*(t.grad for t in leaves), *extras):
            if gradient is not None and not bool(torch.isfinite(gradient).all()):
                trial.fail(f"rows that see no key ({name}) make a gradient that is not finite")
    return None


def packing(trial: Trial) -> str | None:
    """Packed sequences equal the same sequences separately, also their state."""
    length = trial.length
    lengths = [[trial.chunk + 1, 5, 1, length - trial.chunk - 7], [3, length - 10, 7]]
    ids = torch.stack(
        [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths]
    ).to(trial.device)
    real = torch.ones(2, length, dtype=torch.bool, device=trial.device)
    real[1, -2:] = False
    x, later = trial.sequence(2, length), trial.sequence(2, 3, seed=4)
    packed = trial.run(x, segment_ids=ids, padding=real, return_state=trial.carries_state)
    after = trial.run(later, state=packed.state).out if trial.carries_state else None
    for row, parts in enumerate(lengths):
        for segment in range(len(parts)):
            kept = (ids[row] == segment) & real[row]
            alone, ours = x.rows([row]).tokens(kept), packed.out[[row]][:, :, kept]
            if after is not None and segment == len(parts) - 1:
                alone = alone.join(later.rows([row]))
                ours = torch.cat([ours, after[[row]]], 2)
            exact, plain = trial.exact_and_plain(alone)
            trial.agree(f"segment {segment} of packed row {row}", ours, exact, plain)
    return None
