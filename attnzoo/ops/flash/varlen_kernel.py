"""Torch's varlen kernel: its sequences, and its calls.

Other letters: N real tokens.
"""

from __future__ import annotations

from functools import cache
from inspect import signature
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.contract.masks import AttentionMask, Window

UNLIMITED = -1  # of a window's side, for the kernel


class Sequences(NamedTuple):
    """The sequences of a batch, one after another; each ends with its queries' own keys."""

    q_indices: Tensor | None  # [N of queries], into the flattened rows; None means all tokens
    k_indices: Tensor | None  # the same for keys
    cu_seqlens_q: Tensor  # int32: cumulative numbers of queries, from 0 on
    cu_seqlens_k: Tensor
    max_q: int
    max_k: int


def sequences(
    mask: AttentionMask, batch: int, queries: int, keys: int, device: torch.device
) -> Sequences:
    """Return the sequences of a batch whose queries are the last of its keys.

    Synchronises with the device if rows are padded or packed. Keys of sequences without queries are
    left out.
    """
    if mask.padding is None and mask.segment_ids is None:
        steps = torch.arange(batch + 1, dtype=torch.int32, device=device)
        return Sequences(None, None, steps * queries, steps * keys, queries, keys)
    token = torch.arange(batch * keys, device=device)
    if mask.padding is not None:
        token = token[mask.padding.expand(batch, keys).flatten()]
    row, position = token // keys, token % keys
    begins = row.diff(prepend=row.new_full((1,), -1)) != 0
    if mask.segment_ids is not None:
        ids = mask.segment_ids.expand(batch, keys).flatten()[token]
        begins |= ids.diff(prepend=ids[:1]) != 0
    sequence = begins.cumsum(0) - 1
    is_query = position >= keys - queries
    none = sequence.new_zeros(batch * keys)  # there are not more sequences
    counts = torch.stack(
        [none.index_add(0, sequence, y.long()) for y in (is_query, torch.ones_like(is_query))]
    )
    has_queries = counts[0] > 0
    counts = counts[:, has_queries]
    kept = has_queries[sequence]
    starts = F.pad(counts.cumsum(1), (1, 0)).int()
    longest = counts.amax(1).tolist() if counts.shape[1] else [0, 0]
    q_indices = (row * queries + position - (keys - queries))[is_query]
    return Sequences(q_indices, token[kept], starts[0], starts[1], *longest)


def attend_sequences(
    q: Tensor, k: Tensor, v: Tensor, found: Sequences, window: Window, scale: float
) -> Tensor:
    """Return attention within the sequences of the rows, ``[B, H, T, E]``; zeros elsewhere."""
    if not found.max_q:
        return q.new_zeros(*q.shape[:3], v.shape[3])
    rows = pack(q, found.q_indices), pack(k, found.k_indices), pack(v, found.k_indices)
    out, _ = call_varlen_attn(*rows, found, window, scale)
    return unpack(out, found.q_indices, q.shape[0], q.shape[2])


def pack(x: Tensor, indices: Tensor | None) -> Tensor:
    """Return the tokens of ``[B, H, T, X]`` at indices of the flattened rows, ``[N, H, X]``."""
    rows = x.transpose(1, 2).flatten(0, 1)
    return rows if indices is None else rows[indices]


def unpack(
    rows: Tensor, indices: Tensor | None, batch: int, tokens: int, fill: float = 0.0
) -> Tensor:
    """Return ``[B, H, T, X]`` with the given rows at their indices, ``fill`` elsewhere."""
    if indices is not None:
        others = rows.new_full((batch * tokens, *rows.shape[1:]), fill)
        rows = others.index_copy(0, indices, rows)
    return rows.view(batch, tokens, *rows.shape[1:]).transpose(1, 2)


# -- the kernel, whose arguments differ between torch versions -------------------------------------


@cache
def _parameters() -> frozenset[str]:
    from torch.nn.attention import varlen

    return frozenset(signature(varlen.varlen_attn).parameters)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _accepts(name: str) -> bool:
    return name in _parameters()


def accepts_window() -> bool:
    """Return whether the kernel of this torch version has sliding windows."""
    accepts: bool = _accepts("window_size")
    return accepts


def returns_lse() -> bool:
    """Return whether the kernel of this torch version returns the log-sum-exp of the scores."""
    returns: bool = _accepts("return_aux")
    return returns


# Of the private operator that computes gradients from a given output and log-sum-exp; the public
# function computes them from its own only
BACKWARD_ARGUMENTS = (
    *("grad_out", "query", "key", "value", "out", "logsumexp", "cum_seq_q", "cum_seq_k"),
    *("max_q", "max_k", "dropout_p", "is_causal", "rng_state", "unused"),
)
BACKWARD_OPTIONS = {"scale", "window_size_left", "window_size_right"}


def backward_reason() -> str:
    """Return why :func:`call_varlen_attn_backward` does not run with this torch version, or ""."""
    reason: str = _backward_reason()
    return reason


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
@cache
def _backward_reason() -> str:
    found = torch._C._jit_get_schemas_for_operator("aten::_flash_attention_backward")
    if any(map(takes_lse, found)):
        return ""
    return f"the operator for its gradients has other arguments in torch {torch.__version__}"


def takes_lse(schema: torch.FunctionSchema) -> bool:
    """Return whether an operator has the arguments that :func:`call_varlen_attn_backward` gives."""
    named = [x for x in schema.arguments if x.kwarg_only]
    required = {x.name for x in named if not x.has_default_value()}
    return (
        tuple(x.name for x in schema.arguments if not x.kwarg_only) == BACKWARD_ARGUMENTS
        and required <= BACKWARD_OPTIONS <= {x.name for x in named}
        and [str(x.type) for x in schema.returns] == ["Tensor"] * 3
    )


def call_varlen_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    found: Sequences,
    window: Window,
    scale: float,
    *,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """Call ``varlen_attn`` on ``[N, H, D]``, with the keys that a query sees on either side.

    Returns the output and, if requested, the log-sum-exp of the scores, ``[H, N]``.
    """
    from torch.nn.attention import varlen

    options: dict[str, Any] = {}
    if _accepts("window_size"):
        options["window_size"] = window
    else:
        options["is_causal"] = window[1] == 0
    if _accepts("scale"):
        options["scale"] = scale
    else:
        q = q * (scale * q.shape[2] ** 0.5)
    if q.shape[1] != k.shape[1]:
        if _accepts("enable_gqa"):
            options["enable_gqa"] = True
        else:
            groups = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    lengths = found.cu_seqlens_q, found.cu_seqlens_k, found.max_q, found.max_k
    if not return_lse:
        out = varlen.varlen_attn(q, k, v, *lengths, **options)
        assert isinstance(out, Tensor)
        return out, out.new_empty(0)
    options["return_aux"] = varlen.AuxRequest(lse=True)
    out, lse = varlen.varlen_attn(q, k, v, *lengths, **options)
    # documented as [N, H]; the kernel and its fake tensors have [H, N]
    return out, lse if lse.shape == (q.shape[1], q.shape[0]) else lse.mT


def call_varlen_attn_backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    found: Sequences,
    window: Window,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, given an output ``[N, H, D]`` and a log-sum-exp."""
    generator = torch.zeros(2, dtype=torch.uint64, device=q.device)  # there is no dropout
    grads = torch.ops.aten._flash_attention_backward(
        *(d_out, q, k, v, out, lse, found.cu_seqlens_q, found.cu_seqlens_k),
        *(found.max_q, found.max_k, 0.0, window == (UNLIMITED, 0), generator, q.new_empty(0)),
        scale=scale,
        window_size_left=window[0],
        window_size_right=window[1],
    )
    dq, dk, dv = grads
    return dq, dk, dv
