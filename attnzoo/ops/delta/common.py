"""Inputs that all implementations of the delta rule share.

Other letters: S sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from attnzoo.contract.sequences import Sequences
from attnzoo.contract.states import DeltaState
from attnzoo.runtime.kernel_calls import state_dtype

CHUNK_SIZE = 64  # tokens per chunk, unless the call sets it
NORM_EPS = 1e-6  # added to squared norms, as in the papers' code

# The output, and the state after the last token of each sequence, None if it is not requested
Result = tuple[Tensor, DeltaState | None]


class DeltaInputs(NamedTuple):
    """Inputs of :func:`attnzoo.ops.delta.api.delta_attention`, checked and complete.

    Each implementation normalises queries and keys if ``normalize`` is true. With ``sequences``, B
    is 1 for tokens and S, the number of sequences, for states.
    """

    q: Tensor  # [B, H, T, D]
    k: Tensor  # [B, Hkv, T, D]
    v: Tensor  # [B, Hkv, T, E]
    beta: Tensor  # [B, Hkv, T]
    log_decay: Tensor | None  # [Hkv], [B, Hkv, T] or [B, Hkv, T, D]
    state: DeltaState | None  # before the first token; None: zeros
    scale: float
    chunk_size: int | None
    normalize: bool = False  # q and k
    sequences: Sequences | None = None  # of the one row; None: each row is a sequence
    return_state: bool = True  # if not, the returned state may be None
    reuse_state: bool = False  # whether the tensors of the state may be overwritten
    slots: Tensor | None = None  # of one token: [B], row of each in the state, -1 for no token

    @property
    def state_dtype(self) -> torch.dtype:
        """The dtype of all sums."""
        return state_dtype(self.q, self.k, self.v)

    def first_state(self) -> DeltaState:
        """Return the state before the first token."""
        if self.state is not None:
            return self.state
        batch = self.k.shape[0] if self.sequences is None else self.sequences.count
        shape = batch, self.k.shape[1], self.k.shape[3], self.v.shape[3]
        return DeltaState(torch.zeros(shape, dtype=self.state_dtype, device=self.v.device))

    def rows(self) -> DeltaInputs:
        """Return one row a sequence, with zeros after its end, which do not change the state."""
        if self.sequences is None:
            return self
        log_decay, to_rows = self.log_decay, self.sequences.to_rows
        if log_decay is not None:
            if log_decay.dim() == 1:
                log_decay = log_decay[None, :, None].expand(self.k.shape[:3])
            log_decay = to_rows(log_decay)
        q, k, v, beta = (to_rows(x) for x in (self.q, self.k, self.v, self.beta))
        return self._replace(q=q, k=k, v=v, beta=beta, log_decay=log_decay, sequences=None)

    def tokens(self, start: int, stop: int) -> DeltaInputs:
        """Return the inputs of tokens ``start`` to ``stop`` of rows."""
        assert self.sequences is None
        log_decay = self.log_decay
        if log_decay is not None and log_decay.dim() > 1:
            log_decay = log_decay[:, :, start:stop]
        q, k, v, beta = (x[:, :, start:stop] for x in (self.q, self.k, self.v, self.beta))
        return self._replace(q=q, k=k, v=v, beta=beta, log_decay=log_decay)


def on_rows(run: Callable[[DeltaInputs], Result]) -> Callable[[DeltaInputs], Result]:
    """Return an implementation for rows as one for sequences too."""

    def run_rows(x: DeltaInputs) -> Result:
        out, state = run(x.rows())
        if x.sequences is not None:
            out = x.sequences.to_row(out, x.q.shape[2])
        return out, state

    return run_rows


def normalized(x: DeltaInputs) -> DeltaInputs:
    """Return the inputs with queries and keys that need no normalisation."""
    if not x.normalize:
        return x
    q, k, dtype = x.q, x.k, x.state_dtype
    inside = None if x.sequences is None else x.sequences.inside(k.shape[2])
    if inside is not None:  # the gradient of the norm of a NaN outside of sequences is NaN
        q, k = (torch.where(inside[:, None], y, 0) for y in (q, k))
    return x._replace(q=_l2_normalize(q.to(dtype)), k=_l2_normalize(k.to(dtype)), normalize=False)


def _l2_normalize(x: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * (norm.square() + NORM_EPS).rsqrt()
