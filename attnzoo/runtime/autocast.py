"""Disable autocast in ops that choose their own precision."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def autocast_disabled(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which autocast does not change the precision of operations."""
    if not torch._C._is_any_autocast_enabled():  # fast, for calls of one decoded token
        return nullcontext()
    kind = device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()
