"""What mLSTM and RWKV-6 share: their inputs, and the step of one token in C++ and Triton."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from attnzoo.contract.context_parallel import LOG_ZERO, SequenceShard
from attnzoo.contract.implementation import select, select_if_supported
from attnzoo.contract.sequences import Sequences
from attnzoo.contract.states import (
    ImplChoice,
    LinearState,
    MatrixState,
    StabilizedState,
    check_slots,
    run_at_slots,
)
from attnzoo.contract.validation import (
    check_qkv,
    check_sequences,
    check_shard,
    empty_output,
    is_empty_call,
)
from attnzoo.errors import UnsupportedError
from attnzoo.ops.features.functional import widen
from attnzoo.ops.linear.common import LinearInputs, StepGate, state_dtype
from attnzoo.ops.linear.cpu.linear_step import kernel_reasons, run_step_cpp
from attnzoo.ops.linear.triton.run import triton_reasons
from attnzoo.ops.linear.triton.verdicts import kernel_verdict
from attnzoo.ops.linear.validation import check_state
from attnzoo.runtime.memory import with_contiguous_states

# The output, the next state, and the next m of mLSTM
GatedResult = tuple[Tensor, LinearState | None, Tensor | None]


class Places(NamedTuple):
    """The places of sequences among the tokens of a call."""

    first: Tensor  # [1, T] bool: tokens that begin a sequence, or follow one
    inside: Tensor | None  # [1, T] bool: tokens of a sequence; None: all
    sequence: Tensor | None  # [T]: the sequence of each; None: each row is one
    ends: Tensor | None  # [S]: the last token of each sequence, -1 if it is empty

    def at_first(self, x: Tensor) -> Tensor:
        """Return numbers of each sequence ``[S, X]`` at its tokens, ``[1, X, T]``."""
        if self.sequence is None:
            return x.unsqueeze(2)
        return x[self.sequence.clamp(max=x.shape[0] - 1)].T.unsqueeze(0)

    def last(self, x: Tensor, before: Tensor | None = None) -> Tensor:
        """Return ``[B, H, T, ...]`` at the last token of each sequence, ``[S, H, ...]``.

        Empty sequences have ``before``, or zeros.
        """
        ends = self.ends
        if not x.shape[2]:
            count = x.shape[0] if ends is None else ends.shape[0]
            zeros = x.new_zeros(count, x.shape[1], *x.shape[3:])
            return zeros if before is None else before.to(x.dtype)
        if ends is None:
            return x[:, :, -1]
        found = x[0, :, ends.clamp(min=0)].transpose(0, 1)
        is_empty = (ends < 0).view(-1, *(1,) * (found.dim() - 1))
        return torch.where(is_empty, 0 if before is None else before.to(x.dtype), found)


class GatedInputs(NamedTuple):
    """Inputs of mLSTM or RWKV-6, checked.

    With ``sequences``, B is 1 for tokens and S, the number of sequences, for states.
    """

    q: Tensor  # features, [B, H, T, D]
    k: Tensor  # [B, Hkv, T, D]
    v: Tensor  # [B, Hkv, T, E]
    log_decay: Tensor  # mLSTM, [B, Hkv, T]; RWKV-6, [B, Hkv, T, D]
    state: LinearState | None  # sums over the earlier tokens; None: zeros
    gate: StepGate  # log_input of mLSTM is that of all tokens, [B, Hkv, T]
    normalize: bool = False  # whether RWKV-6 divides by the sum of weights
    eps: float = 0.0  # added to that sum
    sequences: Sequences | None = None
    return_state: bool = True
    chunk_size: int | None = None
    reuse_state: bool = False  # whether the next state, m included, may overwrite the given one
    slots: Tensor | None = None  # of one token: [B], row of each in the state, -1 for no token

    @property
    def is_mlstm(self) -> bool:
        """Whether the recurrence is mLSTM, or else RWKV-6."""
        return self.gate.log_input is not None

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return the tensors of the call but for the values."""
        return (self.q, self.k, self.log_decay, *(self.state or ()), *self.gate)

    def pools(self) -> list[Tensor]:
        """Return the tensors of the state, with m if there is one."""
        assert self.state is not None
        return [x for x in (*self.state, self.gate.m) if x is not None]

    def with_state(self) -> GatedInputs:
        """Return the inputs with zeros if there is no state."""
        if self.state is not None:
            return self
        batch = self.k.shape[0] if self.sequences is None else self.sequences.count
        shape = batch, self.k.shape[1], self.k.shape[3], self.v.shape[3]
        kv = self.k.new_zeros(shape, dtype=state_dtype(self.q, self.k, self.v))
        m = kv.new_zeros(shape[:2]) if self.is_mlstm else None
        state = LinearState(kv, kv.new_zeros(shape[:3]))
        return self._replace(state=state, gate=self.gate._replace(m=m))

    def places(self) -> Places:
        """Return the places of sequences among the tokens."""
        tokens, sequences = self.k.shape[2], self.sequences
        if sequences is None:
            return Places(torch.arange(tokens, device=self.k.device)[None] == 0, None, None, None)
        index = sequences.index(tokens)
        ends = torch.where(sequences.lengths > 0, sequences.ends - 1, -1)
        inside = sequences.inside(tokens)
        inside = None if inside is None else inside[None]
        return Places(sequences.is_first(tokens)[None], inside, index, ends)

    def rows(self) -> GatedInputs:
        """Return one row a sequence, with zeros after its end, where no weight is added."""
        if self.sequences is None:
            return self
        q, k, v = (self.sequences.to_rows(x) for x in (self.q, self.k, self.v))
        if not self.is_mlstm:
            decay = self.sequences.to_rows(self.log_decay)
            return self._replace(q=q, k=k, v=v, log_decay=decay, sequences=None)
        log_input = self.gate.log_input
        assert log_input is not None
        gates = torch.stack([self.log_decay, log_input, torch.ones_like(log_input)], 3)
        decay, log_input, real = self.sequences.to_rows(gates).unbind(3)
        log_input = log_input.masked_fill(real == 0, LOG_ZERO)
        gate = self.gate._replace(log_input=log_input)
        return self._replace(q=q, k=k, v=v, log_decay=decay, gate=gate, sequences=None)


AnyState = LinearState | StabilizedState | MatrixState


def check_gated(
    op: str,
    kind: type[AnyState],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: Sequences | None,
    slots: Tensor | None,
    state: AnyState | None,
    shard: SequenceShard | None,
) -> None:
    """Raise ``UnsupportedError`` if a causal op does not support the inputs."""
    check_qkv(q, k, v)
    check_shard(shard, state)
    batch = check_sequences(sequences, slots, q, k)
    if state is not None:
        check_state(kind, state, k, v, batch if slots is None else state[0].shape[0])
    if q.shape[2] != k.shape[2]:
        raise UnsupportedError(
            f"{op} needs queries and keys of the same tokens, got {q.shape[2]} queries and "
            f"{k.shape[2]} keys; pass earlier tokens as state=."
        )


def run_gated(
    op: str, step: str, x: GatedInputs, impl: str
) -> tuple[Tensor, LinearState | None, Tensor | None, ImplChoice]:
    """Run the step if the call is one token that a step supports, else the op."""
    if x.q.shape[2] == 1 and x.q.shape[0] and x.sequences is None:
        token = x.with_state()
        if found := select_if_supported(step, token, impl):
            return *found[0].run(token), found[1]
        x = token if x.slots is not None else x
    chosen, choice = select(op, x, impl)
    if is_empty_call(x.q, x.k):
        out, before = empty_output(x.q, x.k, x.v, x.log_decay, *x.gate[:2]), x.with_state()
        return out, before.state, before.gate.m, choice
    return *on_slots(chosen.run)(x), choice


def gated_cpp_reasons(x: GatedInputs) -> list[str]:
    """Return why :func:`run_gated_step_cpp` does not compute a call."""
    return _state_reasons(x) or kernel_reasons(x.v, *x.tensors())


def gated_triton_reasons(x: GatedInputs) -> list[str]:
    """Return why :func:`run_gated_step_triton` does not compute a call."""
    reasons = _state_reasons(x) + triton_reasons(x.q, x.k, x.v)
    tensors = (x.v, *x.tensors())
    if torch.is_grad_enabled() and any(y is not None and y.requires_grad for y in tensors):
        reasons.append("the kernel of one token has no derivative")
    return reasons


def gated_triton_verdict(x: GatedInputs) -> tuple[str, str]:
    """Return ``kernel_verdict`` of the kernels of linear attention for a call."""
    return kernel_verdict("linear", x.log_decay, x.k, x.v)


def _state_reasons(x: GatedInputs) -> list[str]:
    """Return whether the state has another dtype than the sums."""
    dtype = state_dtype(x.q, x.k, x.v)
    state = (*(x.state or ()), x.gate.m)
    if all(y is None or y.dtype == dtype for y in state):
        return []
    assert x.state is not None
    return [f"the state is {x.state.kv.dtype} (the sums are {dtype})"]


def run_gated_step_cpp(x: GatedInputs) -> GatedResult:
    """Run the C++ kernel."""
    y, gate = _step_of(x)
    out, last = run_step_cpp(y, gate)
    return out, last, gate.m


def run_gated_step_triton(x: GatedInputs) -> GatedResult:
    """Run the Triton kernel."""
    from attnzoo.ops.linear.triton.step import linear_triton_step_

    if x.slots is not None:
        check_slots(x.slots, x.pools()[0].shape[0])
    if x.slots is not None and not all(y.is_contiguous() for y in x.pools()):
        return on_slots(run_gated_step_triton)(x)
    y, gate = _step_of(x)
    assert y.state is not None
    kv, z = y.state
    if not y.reuse_state:
        kv, z = (t.clone(memory_format=torch.contiguous_format) for t in y.state)
    options = ("identity", 1.0, 1.0, y.normalize, y.eps)
    out = linear_triton_step_(y.q, y.k, y.v, y.log_decay, kv, z, y.slots, *options, *gate)
    return out, y.state if y.reuse_state else LinearState(kv, z), gate.m


def _step_of(x: GatedInputs) -> tuple[LinearInputs, StepGate]:
    """Return the inputs of the kernels, and gates of one token, of which they overwrite ``m``."""
    assert x.state is not None
    dtype, (bonus, log_input, m) = x.state.kv.dtype, x.gate
    reuse = x.reuse_state and not torch.is_grad_enabled()
    reuse = reuse and all(y is None or with_contiguous_states(y) is y for y in (*x.state, m))
    if bonus is not None:
        bonus = bonus.to(dtype).contiguous()
    if log_input is not None:
        log_input = log_input[:, :, 0].to(dtype).contiguous()
    if m is not None and not reuse:
        m = m.clone(memory_format=torch.contiguous_format)
    y = LinearInputs(
        *(x.q, x.k, x.v, x.log_decay, x.state, True, x.normalize, 1.0, x.eps, None),
        *("identity", 1.0),
        reuse_state=reuse,
        slots=x.slots,
    )
    return y, StepGate(bonus, log_input, m)


def run_gated_steps(x: GatedInputs, step: Callable[[GatedInputs], GatedResult]) -> GatedResult:
    """Compute all tokens, one step after another, with the implementation of one token."""
    row, x = x, x.rows().with_state()
    outs, state, m = [], x.state, x.gate.m
    bonus = None if x.gate.bonus is None else widen(x.gate.bonus)  # its gradient sums all tokens
    for t in range(x.k.shape[2]):
        now = slice(t, t + 1)
        log_input = None if x.gate.log_input is None else x.gate.log_input[:, :, now]
        q, k, v, log_decay = (y[:, :, now] for y in (x.q, x.k, x.v, x.log_decay))
        gate = StepGate(bonus, log_input, m)
        out, state, m = step(x._replace(q=q, k=k, v=v, log_decay=log_decay, state=state, gate=gate))
        outs.append(out)
    out = torch.cat(outs, 2)
    return out if row.sequences is None else row.sequences.to_row(out, row.q.shape[2]), state, m


def on_slots(step: Callable[[GatedInputs], GatedResult]) -> Callable[[GatedInputs], GatedResult]:
    """Return a step of rows as one that reads and writes states at slots."""

    def run(x: GatedInputs) -> GatedResult:
        if x.slots is None:
            return step(x)
        pools = x.pools()

        def run_rows(state: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
            kv, z, *m = state
            gate = x.gate._replace(m=m[0] if m else None)
            out, last, last_m = step(x._replace(state=LinearState(kv, z), gate=gate, slots=None))
            return out, [y for y in (*(last or ()), last_m) if y is not None]

        in_place = x.reuse_state and not torch.is_grad_enabled()
        out, (kv, z, *m) = run_at_slots(run_rows, pools, x.slots, in_place=in_place)
        return out, LinearState(kv, z), m[0] if m else None

    return run
