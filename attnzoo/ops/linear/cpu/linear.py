"""Linear attention in C++, for CPUs: both passes.

The forward pass keeps the state before every 512th token for the backward pass, which computes the
states in between again. Tensors are read and written in their own dtypes; sums have the dtype of
the state.

Other letters: B rows or sequences, N rows of the matrix of a feature map, F decays per token (0, 1
or the number of features), S sequences (or rows, if each row is one).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnzoo.contract.context_parallel import SequenceShard
from attnzoo.contract.sequences import NO_BOUNDS, Sequences, bounds_of, refuse_sequences
from attnzoo.contract.states import LinearState
from attnzoo.ops.features.functional import FIXED, LEARNED, SCALED, MapWeights
from attnzoo.ops.linear.common import LinearInputs, Result, log_decay_per_token, map_inputs
from attnzoo.ops.linear.context_parallel import state_from_earlier_ranks
from attnzoo.runtime import cpp
from attnzoo.runtime.cpp.layout import Function
from attnzoo.runtime.kernel_calls import (
    TYPE_NAMES,
    Rows,
    autocast_disabled,
    check_reverse_mode,
    differentiable_op,
    empty_huge_pages,
    rows_of,
    state_dtype,
    with_contiguous_rows,
)

KERNEL_CHUNK = 16  # the largest chunk; CHUNK of linear_chunk.h
SPAN = 512  # tokens between the states that the forward pass keeps; SPAN of linear_chunk.h
BUNDLE = 128  # sequences that begin in as many tokens are computed together; BUNDLE there
CPP_CHUNK = 32  # the largest chunk size that a call may ask for, in tokens
LANES = 16  # numbers of the rows that the feature maps of the kernel compute are a multiple of it


@cache
def map_numbers(source: cpp.Source, feature_map: str) -> tuple[int, int]:
    """Return the numbers of a map's functions of queries and keys in a library."""
    names = cpp.load(source).feature_map_names().decode().split()
    numbers = {name: number for number, name in enumerate(names)}
    learned = LEARNED.get(feature_map)
    queries, keys = FIXED[feature_map].cpp if learned is None else (learned.cpp, learned.cpp)
    return numbers[queries], numbers[keys]


class _Map(ctypes.Structure):
    """A feature map of queries or keys; ``MapTask`` of ``feature_maps.h``."""

    _fields_ = [
        *cpp.fields(ctypes.c_int64, "kind size"),
        ("scale", ctypes.c_double),
        *cpp.fields(ctypes.c_void_p, "weight bias d_weight d_bias"),
    ]


class Task(ctypes.Structure):
    """The arguments of both C++ functions; ``Task`` of ``linear_chunk.h``."""

    _fields_ = [
        *cpp.fields(
            ctypes.c_int64,
            "threads batch heads groups tokens longest key_size value_size given_size normalize "
            "chunk decays",
        ),
        *cpp.fields(ctypes.c_double, "scale eps"),
        *cpp.fields(Rows, "q k v log_decay out"),
        *cpp.fields(ctypes.c_void_p, "starts lengths kv z last_kv last_z kept sums"),
        *cpp.fields(_Map, "q_map k_map"),
    ]


class Gradients(ctypes.Structure):
    """The further arguments of the backward pass; ``Gradients`` of ``linear_chunk.h``."""

    _fields_ = [
        *cpp.fields(Rows, "d_out dq dk dv d_log_decay"),
        *cpp.fields(ctypes.c_void_p, "d_totals d_last_kv d_last_z d_kv d_z"),
    ]


MAP_NAMES = {"feature_map_names": Function(result=ctypes.c_char_p)}  # of feature_maps.h
ARGUMENTS = {"forward": (Task,), "backward": (Task, Gradients)}
LINEAR = cpp.Source(
    Path(__file__).with_name("linear.cpp"),
    {
        f"linear_{direction}_{name}": Function(arguments, ctypes.c_int64)
        for direction, arguments in ARGUMENTS.items()
        for name in TYPE_NAMES.values()
    }
    | MAP_NAMES,
)


class CallArguments:
    """The tensors of a call as the kernels read them, and the struct that refers to them.

    Attributes:
        task: The struct.
        has_sequences: Whether tokens are one row of sequences.
        covers_all: Whether each token belongs to a sequence, so that kernels write all outputs.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None,
        state: tuple[Tensor | None, Tensor | None],
        weights: tuple[Tensor | None, ...],
        sequences: tuple[Tensor | None, Tensor | None, int],
        options: tuple[Any, ...],
    ) -> None:
        scale, normalize, eps, chunk_size, feature_map, feature_scale = options
        decays = k.new_empty(*k.shape[:3], 0)
        if log_decay is not None:
            decays = log_decay_per_token(log_decay, k)
        q, k, v, decays = with_contiguous_rows(q, k, v, decays)
        batch, heads, tokens, size = k.shape
        (kv, z), (starts, lengths, longest) = state, sequences
        self.has_sequences, self.covers_all = starts is not None, True
        if starts is not None and lengths is not None:
            batch = starts.shape[0]
            starts, lengths = (
                starts.to(torch.int64).contiguous(),
                lengths.to(torch.int64).contiguous(),
            )
            self.covers_all = int(lengths.sum()) == tokens
        self.task = Task(
            *(torch.get_num_threads(), batch, heads, q.shape[1] // heads, tokens, longest),
            *(count_features(k, feature_map, weights[1]), v.shape[3], size, normalize),
            *(min(chunk_size, KERNEL_CHUNK), decays.shape[3]),
            *(scale, eps, *rows_of(q, k, v, decays)),
        )
        if starts is not None and lengths is not None:
            self.task.starts, self.task.lengths = pointer_to(starts), pointer_to(lengths)
        if kv is not None and z is not None:
            kv, z = kv.contiguous(), z.contiguous()
            self.task.kv, self.task.z = pointer_to(kv), pointer_to(z)
        # kept alive, because the struct refers to them
        self.read = (q, k, v, decays, kv, z, weights)
        self.sequences = starts, lengths, longest
        q_kind, k_kind = map_numbers(LINEAR, feature_map)
        for kind, weight, bias, field in (
            (q_kind, weights[0], weights[2], self.task.q_map),
            (k_kind, weights[1], weights[3], self.task.k_map),
        ):
            field.kind, field.scale = kind, feature_scale
            field.size = size if weight is None else weight.shape[1]
            if weight is not None:
                field.weight = weight.data_ptr()
                field.bias = None if bias is None else bias.data_ptr()

    def run(self, direction: str, dtype: torch.dtype, *structs: ctypes.Structure) -> None:
        """Call the kernel of one direction, whose sums have this dtype.

        Raises:
            UnsupportedError: Sequences do not follow one another within the row.
        """
        function = getattr(cpp.load(LINEAR), f"linear_{direction}_{TYPE_NAMES[dtype]}")
        if function(self.task, *structs):
            refuse_sequences(*self.sequences, self.task.tokens)


def count_features(k: Tensor, feature_map: str, weight: Tensor | None) -> int:
    """Return the number of features of a key; ``weight`` is the matrix of a learned map."""
    return k.shape[3] if weight is None else weight.shape[1] * LEARNED[feature_map].features


def pointer_to(x: Tensor | None) -> int | None:
    """Return the address of the elements of a tensor; ``None``, for null, if it has none."""
    return None if x is None or not x.numel() else x.data_ptr()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _build_reasons() -> tuple[str, ...]:
    return tuple(filter(None, (cpp.unavailable_reason(LINEAR),)))


def cpp_reasons(*, causal: bool = True, chunk_size: int | None = None) -> list[str]:
    """Return every reason why the C++ kernel does not support a call.

    Args:
        causal: Whether a token sees only itself and earlier tokens.
        chunk_size: C, or ``None``.
    """
    reasons = []
    if not causal:
        reasons.append("attention is bidirectional (the kernel is causal)")
    if chunk_size is not None and chunk_size > CPP_CHUNK:
        reasons.append(f"chunk_size is {chunk_size} (at most {CPP_CHUNK})")
    return reasons or list(_build_reasons())


def fuses_map(x: LinearInputs) -> bool:
    """Return whether the kernel computes the features of a call."""
    if x.k.shape[2] == 1:
        return False
    if x.feature_map == "identity":
        return True
    rows = x.k.shape[3] if x.map_weights is None else x.map_weights.k.shape[1]
    return x.scale == 1.0 and rows % LANES == 0


def run_cpp(x: LinearInputs) -> Result:
    """Run the kernel, which computes the features if it can."""
    with autocast_disabled(x.q.device):
        out, _, state = _run(x if fuses_map(x) else map_inputs(x), totals=False)
    return out, state


def weighted_sums(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    sequences: Sequences | None,
    log_decay: Tensor | None,
    state: LinearState | None,
    return_state: bool,
    chunk_size: int | None,
    feature_map: str = "identity",
    feature_scale: float = 1.0,
    map_weights: MapWeights | None = None,
    shard: SequenceShard | None = None,
) -> tuple[Tensor, Tensor, LinearState | None]:
    """Return the sums of values and of weights that a normalised output divides.

    Arguments are those of a causal ``linear_attention``. The sums have the dtype of the state: of
    values ``[B, H, T, E]``, of weights ``[B, H, T]``, and the last state if it is requested.
    """
    x = LinearInputs(
        *(q, k, v, log_decay, state, True, False, 1.0, 0.0, chunk_size, feature_map),
        *(feature_scale, map_weights, sequences, return_state),
    )
    with autocast_disabled(q.device):
        if not fuses_map(x) or shard is not None:
            x = map_inputs(x)
        if shard is not None:
            before = state_from_earlier_ranks(x.k, v, log_decay, shard, sequences)
            x = x._replace(state=before)
        if q.shape[0] == 0 or q.shape[2] == 0:
            out = x.empty_output().to(x.state_dtype)
            return out, out.sum(3), x.first_state() if return_state else None
        return _run(x, totals=True)


def _matrices(name: str, weights: MapWeights, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
    """Return the matrices ``[H, N, D]`` of queries and keys, and their biases ``[H, N]``."""
    q, k, q_bias, k_bias = weights.q.to(dtype), weights.k.to(dtype), weights.q_bias, weights.k_bias
    if LEARNED[name].is_residual:
        identity = torch.eye(q.shape[1], dtype=dtype, device=q.device)
        q, k = q + identity, k + identity
    if q_bias is None or k_bias is None:
        return q.contiguous(), k.contiguous(), None, None
    return q.contiguous(), k.contiguous(), *(x.to(dtype).contiguous() for x in (q_bias, k_bias))


def _run(x: LinearInputs, *, totals: bool) -> tuple[Tensor, Tensor, LinearState | None]:
    weights: tuple[Tensor | None, ...] = (None,) * 4
    if x.map_weights is not None:
        weights = _matrices(x.feature_map, x.map_weights, state_dtype(x.q, x.k, x.v))
    state = (None, None) if x.state is None else x.state
    tensors = (x.q, x.k, x.v, x.log_decay, *state, *weights)
    check_reverse_mode("linear_attention", *tensors)
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    chunk_size = KERNEL_CHUNK if x.chunk_size is None else x.chunk_size
    feature_scale = x.feature_scale**0.5 if x.feature_map in SCALED else 1.0
    options = (x.scale, x.normalize, x.eps, chunk_size, x.feature_map, feature_scale)
    bounds = NO_BOUNDS if x.sequences is None else bounds_of(x.sequences)
    out, kv, z, sums, _ = linear_cpp(
        *(*tensors, *bounds, *options, totals, needs_grad, x.return_state)
    )
    last = LinearState(kv, z) if x.return_state else None
    return (out if totals else out.to(x.v.dtype)), sums, last


def _forward(
    q: Tensor,  # [B, H, T, D]
    k: Tensor,  # [B, Hkv, T, D]
    v: Tensor,  # [B, Hkv, T, E]
    log_decay: Tensor | None,  # [Hkv], [B, Hkv, T] or [B, Hkv, T, F]
    kv: Tensor | None,  # before the first token, [S, Hkv, F, E]; None: zeros
    z: Tensor | None,  # its sum of keys, [S, Hkv, F]
    q_weight: Tensor | None,  # of a learned feature map, [H, N, D]
    k_weight: Tensor | None,  # [Hkv, N, D]
    q_bias: Tensor | None,  # [H, N]
    k_bias: Tensor | None,  # [Hkv, N]
    starts: Tensor | None,  # first tokens of sequences of one row, [S]; None: rows are sequences
    lengths: Tensor | None,  # [S]; outputs outside of them are 0
    longest: int,  # no sequence of the one row is longer
    scale: float,  # multiplies q
    normalize: bool,  # whether to divide by the sum of weights
    eps: float,  # added to it
    chunk_size: int,  # C; chunks have at most KERNEL_CHUNK tokens
    feature_map: str,  # of FIXED or LEARNED
    feature_scale: float,  # factor of exponents
    totals: bool,  # whether to return the sums of weights
    keep: bool,  # whether to keep the states for the backward pass
    return_state: bool,  # whether to return the last state
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the output, both sums of the last state, the sums of weights, and the states kept.

    With ``totals``, outputs are not divided by the sums of weights, ``[B, H, T]``, which are
    returned. With ``normalize`` and ``keep``, the reciprocals of these sums are returned for the
    backward pass, which reads outputs too. In both cases outputs have the dtype of the state. The
    states kept are those before every :data:`SPAN` th token of a sequence but its first, ``[B, Hkv,
    (T - 1) / SPAN, F (E + 1)]``. What is not returned has no elements.
    """
    weights, sequences = (q_weight, k_weight, q_bias, k_bias), (starts, lengths, longest)
    options = (scale, normalize, eps, chunk_size, feature_map, feature_scale)
    x = CallArguments(q, k, v, log_decay, (kv, z), weights, sequences, options)
    dtype = state_dtype(q, k, v)
    out, sums = _new_outputs(q, v, dtype, totals or (normalize and keep))
    if not x.covers_all:
        _clear_outside(x, out, sums)
    features = x.task.key_size if return_state else None
    last_kv, last_z = _new_state(k, v, x.task.batch, features, dtype)
    kept = empty_huge_pages(v, _kept_shape(k, v, x.task.key_size, keep), dtype)
    (x.task.out,), x.task.kept, x.task.sums = rows_of(out), kept.data_ptr(), sums.data_ptr()
    if return_state:
        x.task.last_kv, x.task.last_z = last_kv.data_ptr(), last_z.data_ptr()
    x.run("forward", dtype)
    return out, last_kv, last_z, sums, kept


def _backward(
    d_outs: Sequence[Tensor | None], saved: Sequence[Tensor], needed: list[bool], *inputs: Any
) -> list[Tensor | None]:
    """Return the gradients of q, k, v, log_decay, kv, z, the weights and the bounds.

    The state has gradients if one of its sums needs them.
    """
    d_out, d_last_kv, d_last_z, d_totals, _ = d_outs
    kept, out, inverse = saved
    q, k, v, log_decay, *_ = inputs
    weights, options = inputs[6:10], inputs[13:19]
    x = CallArguments(q, k, v, log_decay, inputs[4:6], weights, inputs[10:13], options)
    normalize = options[1]
    x.task.kept = pointer_to(kept)
    if normalize:
        x.task.out, x.task.sums = *rows_of(out), pointer_to(inverse)
    trained = tuple(w if need else None for w, need in zip(weights, needed[6:10], strict=True))
    d_weights = _new_weight_gradients(x, kept, trained)
    zeros = v.new_zeros(v.shape[3]).expand(*q.shape[:3], v.shape[3])
    (d_out,) = with_contiguous_rows(zeros if d_out is None else d_out)
    d_last_kv, d_last_z, d_totals = (
        None if d is None else d.contiguous() for d in (d_last_kv, d_last_z, d_totals)
    )
    dq, dk, dv = (
        empty_huge_pages(t, t.shape) if need else t.new_empty(0)
        for t, need in zip((q, k, v), needed, strict=False)
    )
    d_log = _new_decay_gradient(k, log_decay if needed[3] else None, kept.dtype)
    _clear_outside(x, dq, dk, dv, d_log)
    gradients = Gradients(*rows_of(d_out), *map(_rows, (dq, dk, dv, d_log)))
    gradients.d_totals = pointer_to(d_totals)
    gradients.d_last_kv, gradients.d_last_z = pointer_to(d_last_kv), pointer_to(d_last_z)
    features = x.task.key_size if needed[4] or needed[5] else None
    d_kv, d_z = _new_state(k, v, x.task.batch, features, kept.dtype)
    gradients.d_kv, gradients.d_z = pointer_to(d_kv), pointer_to(d_z)
    x.run("backward", kept.dtype, gradients)
    if needed[3] and log_decay is not None:
        d_log = _sum_decay_gradient(d_log, log_decay)
    sums = (d if w is None else d.sum((0, 2)) for d, w in zip(d_weights, trained, strict=True))
    return [dq, dk, dv, d_log, d_kv, d_z, *sums, None, None]


def _clear_outside(x: CallArguments, *results: Tensor) -> None:
    """Set new results to 0 if there are tokens outside of sequences, which kernels do not write."""
    for each in () if x.covers_all else results:
        each.zero_()


def _new_weight_gradients(
    x: CallArguments, kept: Tensor, weights: tuple[Tensor | None, ...]
) -> list[Tensor]:
    """Return tensors for the weights' gradients, ``[B, H, pieces, ...]``, and refer to them.

    The pieces are the first spans of the sequences that begin in the same :data:`BUNDLE` tokens,
    and the other spans; see ``weight_gradient`` of ``linear_chunk.h``. Some may be unused. Their
    sum does not depend on the number of threads.
    """
    task = x.task
    firsts = -(-task.tokens // BUNDLE) if x.has_sequences else 1
    allocate = kept.new_zeros if x.has_sequences else kept.new_empty
    new = [
        kept.new_empty(0)
        if w is None
        else allocate((kept.shape[0], len(w), firsts + kept.shape[2], *w.shape[1:]))
        for w in weights
    ]
    task.q_map.d_weight, task.k_map.d_weight, task.q_map.d_bias, task.k_map.d_bias = map(
        pointer_to, new
    )
    return new


def _new_decay_gradient(k: Tensor, log_decay: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return an empty tensor for the gradients of the log decays, ``[B, Hkv, T, F]``."""
    if log_decay is None:
        return k.new_empty(0, dtype=dtype)
    channels = log_decay.shape[3] if log_decay.dim() == 4 else 1
    dtype = dtype if log_decay.dim() == 1 else log_decay.dtype  # its elements are added later
    return empty_huge_pages(k, (*k.shape[:3], channels), dtype)


def _rows(x: Tensor) -> Rows:
    """Return the rows of a tensor, or of none if it has no elements."""
    return rows_of(x)[0] if x.numel() else Rows()


def _sum_decay_gradient(d_log: Tensor, log_decay: Tensor) -> Tensor:
    """Return the gradient of the log decays from those of single tokens, ``[B, Hkv, T, F]``."""
    d_log = d_log.sum((0, 2, 3)) if log_decay.dim() == 1 else d_log
    return d_log.view(log_decay.shape).to(log_decay.dtype)


def _new_state(
    k: Tensor, v: Tensor, count: int, features: int | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return empty tensors for both sums of states; without elements if ``features`` is None."""
    if features is None:
        return v.new_empty(0, dtype=dtype), v.new_empty(0, dtype=dtype)
    kv = v.new_empty(count, k.shape[1], features, v.shape[3], dtype=dtype)
    return kv, kv.new_empty(kv.shape[:3])


def _new_outputs(
    q: Tensor, v: Tensor, state_dtype: torch.dtype, with_sums: bool
) -> tuple[Tensor, Tensor]:
    """Return an empty output and empty sums of weights.

    The output is stored as ``[B, T, H, E]``: joining its heads copies nothing.
    """
    batch, heads, tokens, _ = q.shape
    dtype = state_dtype if with_sums else v.dtype
    out = empty_huge_pages(v, (batch, tokens, heads, v.shape[3]), dtype).transpose(1, 2)
    return out, out.new_empty(q.shape[:3] if with_sums else 0, dtype=state_dtype)


def _kept_shape(k: Tensor, v: Tensor, features: int, keep: bool) -> tuple[int, ...]:
    """Return the shape of the states that the forward pass keeps."""
    spans = (k.shape[2] - 1) // SPAN if keep else 0
    return (*k.shape[:2], spans, features * (v.shape[3] + 1))


def _fake(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Any, kv: Any, z: Any, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    _, k_weight, _, _, starts, _ = rest[:6]
    _, _, normalize, _, _, feature_map, _, totals, keep, return_state = rest[6:]
    dtype, features = state_dtype(q, k, v), count_features(k, feature_map, k_weight)
    out, sums = _new_outputs(q, v, dtype, totals or (normalize and keep))
    count = k.shape[0] if starts is None else starts.shape[0]
    state = _new_state(k, v, count, features if return_state else None, dtype)
    return out, *state, sums, v.new_empty(_kept_shape(k, v, features, keep), dtype=dtype)


def _save(inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the states kept, and if outputs were divided these and the denominators."""
    out, _, _, inverse, kept = output
    is_normalized = inputs[14]
    return (kept, out, inverse) if is_normalized else (kept, kept.new_empty(0), kept.new_empty(0))


linear_cpp, linear_cpp_backward = differentiable_op(
    "attnzoo::linear_cpp",
    _forward,
    _backward,
    fake=_fake,
    save=_save,
    num_saved=3,
    op="linear_attention",
)
