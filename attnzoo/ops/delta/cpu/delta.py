"""The delta rule in C++, for CPUs: both passes, and the step of one token.

Other letters: F decays per token (0, 1 or D), S sequences (B if rows are sequences), P panels:
groups of columns of the values, which are pieces of work.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.contract.sequences import NO_BOUNDS, bounds_of, refuse_sequences
from attnzoo.contract.states import DeltaState, refuse_slots, run_on_slots
from attnzoo.ops.delta.common import NORM_EPS, DeltaInputs, Result, normalized
from attnzoo.ops.linear.common import log_decay_per_token
from attnzoo.runtime import cpp
from attnzoo.runtime.cpp.layout import Function
from attnzoo.runtime.kernel_calls import (
    LANES,
    TYPE_NAMES,
    check_reverse_mode,
    differentiable_op,
    empty_huge_pages,
    is_plain_call,
    pad_to_simd,
    rows_in,
    state_dtype,
    unpad,
    with_contiguous_states,
)

CPP_CHUNK = 16  # the largest chunk size, in tokens
SPAN = 128  # tokens between the states that the forward pass keeps; SPAN of delta.cpp
PANELS = (128, 64, 32)  # columns of a panel; as wide as leaves BACKWARD_PIECES pieces of work
BACKWARD_PIECES = 4  # not the number of threads, so that gradients do not depend on it


class _Task(ctypes.Structure):
    """The arguments of both passes; ``Task`` of ``delta.cpp``."""

    _fields_ = [
        *cpp.fields(
            ctypes.c_int64,
            "threads batch heads groups tokens key_size value_size sequences longest panel chunk "
            "decays",
        ),
        *cpp.fields(ctypes.c_int64 * 3, "q_steps k_steps v_steps beta_steps decay_steps out_steps"),
        ("scale", ctypes.c_double),
        *cpp.fields(
            ctypes.c_void_p, "q k v beta log_decay state out last_state kept starts lengths"
        ),
    ]


class _Gradients(ctypes.Structure):
    """The further arguments of the backward pass; ``Gradients`` of ``delta.cpp``."""

    _fields_ = [
        ("d_out_steps", ctypes.c_int64 * 3),
        *cpp.fields(ctypes.c_void_p, "d_out d_last_state dq dk d_beta d_log_decay dv d_state"),
    ]


class _Step(ctypes.Structure):
    """The arguments of the step; ``Step`` of ``delta.cpp``."""

    _fields_ = [
        *cpp.fields(
            ctypes.c_int64,
            "threads batch states heads groups key_size value_size decays "
            "q_row q_head k_row k_head v_row v_head beta_row beta_head decay_row decay_head "
            "state_row",
        ),
        *cpp.fields(ctypes.c_double, "scale eps"),
        *cpp.fields(ctypes.c_void_p, "q k v beta log_decay state out last_state slots"),
    ]


ARGUMENTS = {"forward": (_Task,), "backward": (_Task, _Gradients), "step": (_Step,)}
DELTA = cpp.Source(
    Path(__file__).with_name("delta.cpp"),
    {
        f"delta_{form}_{name}": Function(arguments, ctypes.c_int64)
        for form, arguments in ARGUMENTS.items()
        for name in TYPE_NAMES.values()
    },
)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _build_reasons() -> tuple[str, ...]:
    return tuple(filter(None, (cpp.unavailable_reason(DELTA),)))


def cpp_reasons(x: DeltaInputs) -> list[str]:
    """Return every reason why the C++ kernel does not support a call."""
    reasons = []
    if x.chunk_size is not None and x.chunk_size > CPP_CHUNK:
        reasons.append(f"chunk_size is {x.chunk_size} (at most {CPP_CHUNK})")
    return reasons or list(_build_reasons())


def run_step_cpp(x: DeltaInputs) -> Result:
    """Run the kernel of one token; with gradients, that of a sequence."""
    is_step = x.k.shape[2] == 1 and type(x.v) is Tensor
    if is_step and is_plain_call(x.q, x.k, x.v, x.beta, x.log_decay, *(x.state or ())):
        return _run_step(x)
    return run_on_slots(x, run_cpp)


def run_cpp(x: DeltaInputs) -> Result:
    """Run the kernel.

    For the backward pass, the state before every 128th token of a sequence but its first is kept:
    as many bytes per token and key head as ``D E / 128`` numbers of the state take.
    """
    x = normalized(x)
    kv = None if x.state is None else x.state.kv
    tensors = (x.q, x.k, x.v, x.beta, x.log_decay, kv)
    check_reverse_mode("delta_attention", *tensors)
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    options = (x.scale, x.chunk_size or CPP_CHUNK, x.return_state, needs_grad)
    bounds = NO_BOUNDS if x.sequences is None else bounds_of(x.sequences)
    out, state, _ = delta_cpp(*tensors, *bounds, *options)
    return out, DeltaState(state) if x.return_state else None


def _run_step(x: DeltaInputs) -> Result:
    """Run the kernel on one token, in the place of the state if ``x.reuse_state``.

    It normalises queries and keys if ``x.normalize``.

    Raises:
        UnsupportedError: A slot is no row of the pool.
    """
    assert x.state is not None  # of a step
    given, slots = x.state.kv, x.slots
    (kv,) = with_contiguous_states(given)
    in_place = x.reuse_state and kv is given
    if not in_place:  # the next state has the stride of the one before
        kv = kv.contiguous()
    if slots is not None:  # the kernel writes the next states of some sequences only
        kv = kv if in_place else kv.clone()
        slots = slots.to(torch.int64).contiguous()
    last = kv if in_place or slots is not None else torch.empty_like(kv)
    dtype, batch = kv.dtype, x.q.shape[0]
    q, k, v = rows_in(dtype, x.q, x.k, x.v)
    beta, log_decay = x.beta.to(dtype), x.log_decay
    states, heads, size, columns = kv.shape
    decay_steps, decays = (0, 0), 0
    if log_decay is not None:
        is_wide = log_decay.dim() == 4
        log_decay = rows_in(dtype, log_decay)[0] if is_wide else log_decay.to(dtype)
        decays = size if log_decay.dim() == 4 else 1
        steps = log_decay.stride()
        decay_steps = (0, steps[0]) if len(steps) == 1 else (steps[0], steps[1])
    out = v.new_empty(batch, q.shape[1], 1, columns)
    task = _Step(
        *(torch.get_num_threads(), batch, states, heads, q.shape[1] // heads, size, columns),
        decays,
        *(*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *beta.stride()[:2], *decay_steps),
        kv.stride(0),
        *(x.scale, NORM_EPS if x.normalize else -1.0),
        *(q.data_ptr(), k.data_ptr(), v.data_ptr(), beta.data_ptr()),
        None if log_decay is None else log_decay.data_ptr(),
        *(kv.data_ptr(), out.data_ptr(), last.data_ptr()),
        None if slots is None else slots.data_ptr(),
    )
    if getattr(cpp.load(DELTA), f"delta_step_{TYPE_NAMES[dtype]}")(task):
        refuse_slots(slots, states)
    return out.to(x.v.dtype), DeltaState(last)


class _Arguments:
    """The tensors of a call as the kernels read them, and the struct that refers to them.

    Attributes:
        is_full: Whether each token is in a sequence; results of others are zeros.
    """

    def __init__(
        self,
        panel: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor,
        log_decay: Tensor | None,
        state: Tensor | None,
        starts: Tensor | None,
        lengths: Tensor | None,
        longest: int,
        scale: float,
        chunk_size: int,
    ) -> None:
        dtype, self.sizes = state_dtype(q, k, v), (k.shape[3], v.shape[3])
        self.q, self.k, self.v = map(pad_to_simd, (q.to(dtype), k.to(dtype), v.to(dtype)))
        self.beta = beta.to(dtype)
        self.log_decay = self.k.new_empty(*self.k.shape[:3], 0)
        if log_decay is not None:
            log_decay = log_decay_per_token(log_decay, self.k).to(dtype)
            self.log_decay = pad_to_simd(log_decay) if log_decay.shape[3] > 1 else log_decay
        read = (self.q, self.k, self.v, self.beta, self.log_decay)
        batch, heads, tokens, size = self.k.shape
        sequences, self.is_full = batch, True
        if starts is not None and lengths is not None:
            starts, lengths = starts.to(torch.int64), lengths.to(torch.int64)
            starts, lengths = starts.contiguous(), lengths.contiguous()
            sequences, self.is_full = len(starts), int(lengths.sum()) == tokens
        self.sequences = starts, lengths, longest
        self.state_shape = sequences, heads, size, self.v.shape[3]
        self.state = self.pad_state(state)
        steps, addresses = _views(*read)
        self.task = _Task(
            *(torch.get_num_threads(), batch, heads, q.shape[1] // heads, tokens, size),
            *(self.v.shape[3], sequences, longest, panel, chunk_size, self.log_decay.shape[3]),
            *(*steps, steps[0]),  # the last are replaced by those of out
            *(scale, *addresses),
            None if self.state is None else self.state.data_ptr(),
        )
        if starts is not None and lengths is not None:
            self.task.starts, self.task.lengths = starts.data_ptr(), lengths.data_ptr()
        self.functions = cpp.load(DELTA), TYPE_NAMES[dtype]

    def pad_state(self, state: Tensor | None) -> Tensor | None:
        """Return a state ``[S, Hkv, D, E]`` with D and E padded, in the dtype of all sums."""
        if state is None:
            return None
        state = pad_to_simd(state.to(self.q.dtype))
        return F.pad(state, (0, 0, 0, self.k.shape[3] - state.shape[2])).contiguous()

    def empty(self, *shape: int) -> Tensor:
        """Return a tensor for results by token: empty, or zeros if some are in no sequence."""
        x = empty_huge_pages(self.q, shape)
        return x if self.is_full else x.zero_()

    def run(self, direction: str, *structs: ctypes.Structure) -> None:
        """Call the kernel of one direction.

        Raises:
            UnsupportedError: Sequences do not follow one another within the row.
        """
        library, type_name = self.functions
        if getattr(library, f"delta_{direction}_{type_name}")(self.task, *structs):
            refuse_sequences(*self.sequences, self.task.tokens)


def _forward(
    q: Tensor,  # [B, H, T, D]
    k: Tensor,  # [B, Hkv, T, D]
    v: Tensor,  # [B, Hkv, T, E]
    beta: Tensor,  # write strengths, [B, Hkv, T]
    log_decay: Tensor | None,  # [Hkv], [B, Hkv, T] or [B, Hkv, T, D]
    state: Tensor | None,  # before the first token, [S, Hkv, D, E]; None: zeros
    starts: Tensor | None,  # first tokens of sequences of one row, [S]; None: rows are sequences
    lengths: Tensor | None,  # [S]
    longest: int,  # no sequence of the one row is longer
    scale: float,  # multiplies q
    chunk_size: int,  # C, at most CPP_CHUNK
    return_state: bool,  # whether to return the state after the last token
    keep: bool,  # whether to keep states for the backward pass
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, the state after the last token, and the states kept for the backward pass.

    Those are the states before every :data:`SPAN` th token of a sequence but its first, ``[B, (T -
    1) / SPAN, Hkv, D, E]`` with D and E padded. What is not returned has no elements.
    """
    panel = _panel(k, v, torch.get_num_threads(), lengths)
    bounds = starts, lengths, longest
    x = _Arguments(panel, q, k, v, beta, log_decay, state, *bounds, scale, chunk_size)
    out = x.empty(*q.shape[:3], x.v.shape[3])
    last = x.q.new_empty(x.state_shape if return_state else 0)
    spans = (k.shape[2] - 1) // SPAN if keep else 0
    kept = empty_huge_pages(x.q, (k.shape[0], spans, *x.state_shape[1:]))
    (x.task.out_steps,), (x.task.out,) = _views(out)
    x.task.last_state = last.data_ptr() if return_state else None
    x.task.kept = kept.data_ptr() if spans else None
    x.run("forward")
    last = _unpad_state(last, x.sizes) if return_state else last
    return unpad(out, x.sizes[1]).to(v.dtype), last, kept


def _backward(
    d_outs: Sequence[Tensor | None], saved: Sequence[Tensor], needed: list[bool], *inputs: Any
) -> list[Tensor | None]:
    """Return the gradients of q, k, v, beta, log_decay, the state and the bounds."""
    q, k, v, beta, log_decay, *_ = inputs
    lengths, return_state = inputs[7], inputs[11]
    d_out, d_last_state, _ = d_outs
    (kept,) = saved
    panel = _panel(k, v, BACKWARD_PIECES, lengths)
    x = _Arguments(panel, *inputs[:11])
    x.task.kept = kept.data_ptr()
    panels = -(-x.v.shape[3] // panel)
    if d_out is None:
        d_out = x.v.new_zeros(1).expand(*q.shape[:3], v.shape[3])
    d_out = pad_to_simd(d_out.to(x.v.dtype))
    d_last = x.pad_state(d_last_state if return_state else None)
    shared = [(*x.q.shape,), (*x.k.shape,), (*k.shape[:3], 1), (*x.log_decay.shape,)]
    dq, dk, d_beta, d_log = (x.empty(panels, *shape) for shape in shared)
    dv, d_state = x.empty(*x.v.shape), None if x.state is None else torch.empty_like(x.state)
    steps, addresses = _views(d_out, dq, dk, d_beta, d_log, dv)
    of_states = [None if t is None else t.data_ptr() for t in (d_last, d_state)]
    addresses = [addresses[0], of_states[0], *addresses[1:], of_states[1]]
    x.run("backward", _Gradients(steps[0], *addresses))
    dq, dk, d_beta, d_log = (t[0] if panels == 1 else t.sum(0) for t in (dq, dk, d_beta, d_log))
    keys, values = x.sizes
    return [
        unpad(dq, keys).to(q.dtype),
        unpad(dk, keys).to(k.dtype),
        unpad(dv, values).to(v.dtype),
        d_beta.squeeze(3).to(beta.dtype),
        None if log_decay is None else _log_decay_gradient(d_log, log_decay, keys),
        None if d_state is None else _unpad_state(d_state, x.sizes),
        None,
        None,
    ]


def _panel(k: Tensor, v: Tensor, pieces: int, lengths: Tensor | None = None) -> int:
    """Return how many columns of the values a piece of work has, for at least ``pieces`` of them.

    The outputs do not depend on it. Gradients of queries and keys are sums over the panels.
    """
    rows, columns = k.shape[0], -(-v.shape[3] // LANES) * LANES
    if lengths is not None:  # of the longest sequence: as many keep as many threads busy
        rows = int(lengths.sum()) // max(int(lengths.max()), 1)
    heads = rows * k.shape[1]
    for panel in PANELS:
        if heads * -(-columns // panel) >= pieces:
            return panel
    return PANELS[-1]


def _views(*tensors: Tensor) -> tuple[list[Any], list[Any]]:
    """Return the strides of batch, heads and tokens of each tensor, and the addresses."""
    steps, addresses = [], []
    for x in tensors:
        steps.append((ctypes.c_int64 * 3)(*x.stride()[:3]))
        addresses.append(x.data_ptr())
    return steps, addresses


def _unpad_state(state: Tensor, sizes: tuple[int, int]) -> Tensor:
    return state[:, :, : sizes[0], : sizes[1]].contiguous()


def _log_decay_gradient(d_log: Tensor, log_decay: Tensor, keys: int) -> Tensor:
    """Return the gradient in the shape and dtype of ``log_decay``."""
    if log_decay.dim() == 4:
        return unpad(d_log, keys).to(log_decay.dtype)
    d_log = d_log.squeeze(3)
    return (d_log if log_decay.dim() == 3 else d_log.sum((0, 2))).to(log_decay.dtype)


def _fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    state: Tensor | None,
    starts: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    return_state, keep = rest[-2:]
    sums = v.new_empty(0, dtype=state_dtype(q, k, v))
    sizes = k.shape[3], v.shape[3]
    padded = [-(-size // LANES) * LANES for size in sizes]
    spans = (k.shape[2] - 1) // SPAN if keep else 0
    kept = sums.new_empty(k.shape[0], spans, k.shape[1], *padded)
    sequences = k.shape[0] if starts is None else starts.shape[0]
    last = sums.new_empty(sequences, k.shape[1], *sizes) if return_state else sums
    return v.new_empty(*q.shape[:-1], v.shape[-1]), last, kept


delta_cpp, delta_cpp_backward = differentiable_op(
    "attnzoo::delta_cpp",
    _forward,
    _backward,
    fake=_fake,
    save=lambda inputs, output: output[2:],
    num_saved=1,
    op="delta_attention",
)
