"""The calls that a cache layer records, so that it can remove their last tokens."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

State = Any  # a named tuple of tensors, batch first


class RecordedCall(NamedTuple):
    """One call of the backend, kept so that ``crop`` can replay a part of it."""

    length: int  # new tokens of the call
    replay: Callable[[State, int], State]  # (state before the call, number of tokens) -> state


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
