"""Calls of the delta rule for ``ops.py``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnzoo.evaluation.timing import BenchmarkCase, Run
from attnzoo.ops.delta.api import delta_attention


def delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """Normalise queries and keys, and run the chunk form of the delta rule."""
    options: dict[str, Any] = {"log_decay": log_decay, "normalize_qk": True, "impl": impl}
    return delta_attention(q, k, v, beta, **options).out


def write_strengths(case: BenchmarkCase) -> tuple[Tensor, ...]:
    """Return random write strengths in (0, 1)."""
    return (torch.rand(case.B, case.Hkv, case.T),)


def delta_step(prompt: Sequence[Tensor], now: Sequence[Tensor]) -> tuple[Run, int]:
    """Return the call that decodes one token after a prompt, and the size of the state in bytes."""
    options: dict[str, Any] = {"normalize_qk": True, "return_state": True}
    state = delta_attention(*prompt[:4], log_decay=(*prompt, None)[4], **options).state
    assert state is not None
    options |= {"log_decay": (*now, None)[4], "state": state}
    return torch.no_grad()(lambda: delta_attention(*now[:4], **options)), state.kv.nbytes
