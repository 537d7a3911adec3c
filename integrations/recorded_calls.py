"""The calls that a cache layer records, so that it can remove their last tokens."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnzoo.masks import AttentionMask
from attnzoo.state import AttentionOutput

State = Any  # a named tuple of tensors, batch first


class RecordedCall(NamedTuple):
    """One call of the backend, kept so that ``crop`` can replay a part of it."""

    length: int  # new tokens of the call
    replay: Callable[[State, int], State]  # (state before the call, number of tokens) -> state


def record_call(
    backend: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AttentionMask,
    options: dict[str, Any],
) -> RecordedCall:
    """Return a call of a backend from a state, with its options."""

    def replay(state: State, length: int) -> State:
        """Return the state after ``length`` of these tokens."""
        padding, hidden = mask.padding, options["hidden_states"]
        # autograd refuses the inputs of a call that ran in inference mode
        with torch.inference_mode() if query.is_inference() else nullcontext():
            replayed: AttentionOutput = backend(
                query[:, :, :length],
                key[:, :, :length],
                value[:, :, :length],
                mask=replace(mask, padding=None if padding is None else padding[:, :length]),
                state=state,
                return_state=True,
                scale=options["scale"],
                hidden_states=None if hidden is None else hidden[:, :length],
            )
        return replayed.state

    return RecordedCall(query.shape[2], replay)


class RecordsCalls:
    """The calls of a layer since the last ``crop``, and the state before them.

    A recorded call holds its backend, which a cache does not contain, so a pickle leaves the calls
    out: after unpickling, the state of that time is the one before the next recorded call.
    """

    _recorded: list[RecordedCall]
    _state_before_recorded: State | None

    def _clear_recorded(self) -> None:
        self._recorded, self._state_before_recorded = [], None

    def __getstate__(self) -> dict[str, Any]:
        """Return what a pickle contains."""
        return vars(self) | {"_recorded": [], "_state_before_recorded": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a copy, which keeps the calls."""
        memo[id(self)] = new = object.__new__(type(self))
        vars(new).update(copy.deepcopy(vars(self), memo))
        return new
