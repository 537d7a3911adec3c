"""Rules on states: decoding, batching, beam search, and the size of a state."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from attnzoo.ops.softmax.api import softmax_attention
from attnzoo.testing.trial import Sequence, Trial


def decoding(trial: Trial) -> str | None:
    """A sequence split into several calls at any position equals one call."""
    if not trial.geometry.causal:
        return "the layer is bidirectional"
    by_state, by_keys = trial.carries_state, trial.backend.keeps_all_keys
    if not (by_state or by_keys):
        return "it takes no state and keeps no keys"
    chunk, length = trial.chunk, trial.length
    x = trial.sequence(2, length)
    exact, plain = trial.exact_and_plain(x)
    for cuts in (
        tuple(range(1, min(9, length))),  # token by token from the first on
        (chunk - 1, chunk, chunk + 1),  # a chunk ends among single tokens
        (5, 5 + chunk, 5 + chunk + 2),  # pieces of several tokens
        (length - 1,),
    ):
        cuts = tuple(sorted({cut for cut in cuts if 0 < cut < length}))
        pieces = list(pairwise((0, *cuts, length)))
        name = f"one pass cut at {', '.join(map(str, cuts))}"
        if by_state:
            trial.agree(name, _by_state(trial, x, pieces), exact, plain)
        if by_keys:
            ours = _by_keys(trial, x, pieces)
            whole = [exact, plain]
            if trial.backend.capabilities.exact_steps:
                whole = [
                    _with_exact_steps(trial, x, pieces, out, dtype)
                    for out, dtype in ((exact, torch.float64), (plain, trial.dtype))
                ]
            trial.agree(f"{name}, over cached keys", ours, *whole)
    return None


def _by_state(trial: Trial, x: Sequence, pieces: list[tuple[int, int]]) -> Tensor:
    """Run the pieces in order, each from the state of the previous one."""
    outs: list[Tensor] = []
    state: Any = None
    for start, stop in pieces:
        given = [] if state is None else _fields(trial, state)
        before = [field.clone() for field in given]
        output = trial.run(x.tokens(slice(start, stop)), state=state, return_state=True)
        if not all(torch.equal(now, then) for now, then in zip(given, before, strict=True)):
            trial.fail("the state that was passed in is changed in place")
        outs.append(output.out)
        state = output.state
    return torch.cat(outs, 2)


def _by_keys(trial: Trial, x: Sequence, pieces: list[tuple[int, int]]) -> Tensor:
    """Run the pieces in order, each over all keys so far, as with a KV cache."""
    outs = []
    for start, stop in pieces:
        seen = x.tokens(slice(stop))
        outs.append(trial.run(seen._replace(q=seen.q[:, :, start:]), q_offset=start).out)
    return torch.cat(outs, 2)


def _with_exact_steps(
    trial: Trial, x: Sequence, pieces: list[tuple[int, int]], whole: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return the output with exact softmax attention for pieces of a single token."""
    outs = []
    for start, stop in pieces:
        if stop - start > 1:
            outs.append(whole[:, :, start:stop])
            continue
        q, k, v = (y[:, :, :stop].to(dtype) for y in x[:3])
        step = softmax_attention(q[:, :, start:], k, v, scale=trial.geometry.scale)
        outs.append(step.out.to(whole))
    return torch.cat(outs, 2)


def batching(trial: Trial) -> str | None:
    """A batch equals its rows separately; a state can be reordered by beam."""
    length = trial.chunk + 2
    x, later = trial.sequence(4, length), trial.sequence(5, 3, seed=4)
    output = trial.run(x, return_state=trial.carries_state)
    for row in range(4):
        alone = x.rows([row])
        exact, plain = trial.exact_and_plain(alone)
        trial.agree(f"row {row} of a batch of 4", output.out[[row]], exact, plain)
    if not trial.carries_state:
        return None
    fields = _fields(trial, output.state)
    if any(field.shape[:1] != (4,) for field in fields):
        trial.fail("the batch is not the first dimension of every tensor of the state")
    beams = torch.tensor([2, 0, 0, 3, 1], device=trial.device)
    state = type(fields)(*(field.index_select(0, beams) for field in fields))
    ours = trial.run(later, state=state).out
    whole = x.rows(beams).join(later)
    exact, plain = (out[:, :, length:] for out in trial.exact_and_plain(whole))
    trial.agree("after reordering the state by beam", ours, exact, plain)
    return None


def _fields(trial: Trial, state: Any) -> Any:
    """Return a state after checking that it is a named tuple of tensors."""
    if not isinstance(state, tuple) or not hasattr(state, "_fields"):
        trial.fail(f"the state is a {type(state).__name__}, not a named tuple of tensors")
    if not all(isinstance(field, Tensor) for field in state):
        trial.fail("the state holds something else than tensors")
    return state


def state_size(trial: Trial) -> str | None:
    """A state has constant size, is smaller than the keys, or contains them, as stated."""
    if not trial.carries_state:
        return "it carries no state"
    if trial.backend.keeps_all_keys or trial.backend.capabilities.state_keeps_keys:
        return "it keeps every key"
    window = getattr(trial.config, "window", None)
    enough = 2 * max(trial.chunk, window if isinstance(window, int) else 0)

    def count(length: int) -> int:
        state = trial.run(trial.sequence(1, length), return_state=True).state
        return sum(field.numel() for field in _fields(trial, state))

    longest = 2 * enough + 5
    if trial.backend.capabilities.state_grows:
        x, size = trial.sequence(1, longest), count(longest)
        keys = x.k.numel() + x.v.numel()
        if size >= keys:
            trial.fail(
                f"the state of {longest} tokens is no smaller than their keys and values: "
                f"{size} numbers against {keys}"
            )
        return None
    sizes = {length: count(length) for length in (enough, enough + 1, longest)}
    if len(set(sizes.values())) > 1:
        counts = ", ".join(f"{size} after {length} tokens" for length, size in sizes.items())
        trial.fail(f"the state grows although keeps_all_keys is false: its numbers are {counts}")
    return None
