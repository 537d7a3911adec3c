"""The C++ kernel of linear attention: its source, its arguments, and the call.

Other letters: B rows or sequences, N rows of the matrix of a feature map, F decays per token (0, 1
or the number of features).
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnzoo.contract.sequences import refuse_sequences
from attnzoo.ops.features.functional import FIXED, LEARNED
from attnzoo.ops.linear.common import log_decay_per_token
from attnzoo.runtime import cpp
from attnzoo.runtime.cpp.layout import Function
from attnzoo.runtime.kernel_calls import TYPE_NAMES, Rows, rows_of, with_contiguous_rows

KERNEL_CHUNK = 16  # the largest chunk; CHUNK of linear_chunk.h
SPAN = 512  # tokens between the states that the forward pass keeps; SPAN of linear_chunk.h
BUNDLE = 128  # sequences that begin in as many tokens are computed together; BUNDLE there


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
