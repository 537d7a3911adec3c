"""The window hybrid on a GPU as custom operators of torch, with fake tensors and autograd.

Five launches compute it, with three more if few heads divide the sequence into splits: the window,
the linear sums, and their merge; the gradients take ten to sixteen.

Other letters: N = T - W, W window, S sequences of one row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnzoo.ops.hybrid.triton.merge import MergeOptions, merge, merge_backward
from attnzoo.ops.linear.triton.launch import (
    KernelLauncher,
    LinearOptions,
    LinearTensors,
    empty_rows,
    empty_states,
)
from attnzoo.ops.window.extra_keys import extra_key_gradients, merge_extra_keys
from attnzoo.ops.window.triton.window import (
    launch_window,
    launch_window_backward,
)
from attnzoo.runtime.kernel_calls import refuse_derivative


@torch.library.custom_op("attnzoo::hybrid_triton", mutates_args=())
def hybrid_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_features: Tensor,
    k_features: Tensor,
    logit: Tensor,
    log_decay: Tensor | None,
    kv: Tensor | None,
    z: Tensor | None,
    ids: Tensor | None,
    starts: Tensor | None,
    lengths: Tensor | None,
    counts: Tensor | None,
    first_k: Tensor | None,
    first_v: Tensor | None,
    first_seen: Tensor | None,
    window: int,
    scale: float,
    relative: bool,
    mean: bool,
    min_weight: float,
    return_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the window hybrid, the state after the last token, and tensors for the backward pass.

    Token t of the linear attention has the query of token t and the key of token t - W.

    Args:
        q: Queries, ``[B, H, T, D]``.
        k: Keys, ``[B, Hkv, T, D]``.
        v: Values, ``[B, Hkv, T, E]``.
        q_features: ``[B, H, T, F]``.
        k_features: ``[B, Hkv, T, F]``; those of token t are zero if token t + W is not to see them.
        logit: Logit of the linear branch, expanded to ``[B, H, T]``, float32.
        log_decay: ``[Hkv]``, or that of the tokens from W on, ``[B, Hkv, N]`` or
            ``[B, Hkv, N, F]``; or ``None``.
        kv: The linear state before token W, ``[B, Hkv, F, E]``, float32; ``None``: zeros.
        z: Its sum of keys, ``[B, Hkv, F]``.
        ids: The sequence of each token, ``[B, T]`` int32, negative for tokens of none; ``None``:
            each row is one sequence.
        starts: First query with linear sums of each sequence of one row, counted from token W,
            ``[S]``; no state then.
        lengths: Their queries with linear sums, ``[S]``.
        counts: Number of keys in the linear sums of each token, ``[B, T]``; see ``merge``.
        first_k: Keys of the first tokens, which queries see outside the window too,
            ``[B, Hkv, G, D]``, or ``None``.
        first_v: Their values, ``[B, Hkv, G, E]``.
        first_seen: Which of them each query sees only because they are first tokens,
            ``[1 or B, T, G]`` bool.
        window: W.
        scale: Multiplies query-key products in the window.
        relative: See ``MergeOptions``.
        mean: See ``MergeOptions``.
        min_weight: See ``MergeOptions``.
        return_state: Whether to return the state, which otherwise has no elements.

    Returns:
        The output ``[B, H, T, E]``; the state; the window's output and log-sum-exp, the linear sums
        of values, and the factors of ``merge``.
    """
    options = _merge_options(q, window, relative, mean, min_weight)
    near, lse = launch_window(q, k, v, ids, (window - 1, 0), scale, torch.float32)
    if first_k is not None and first_v is not None and first_seen is not None:
        rows, lse = merge_extra_keys(
            near.transpose(1, 2), lse, q, first_k, first_v, first_seen, scale
        )
        near = rows.transpose(1, 2).contiguous()
    linear = LinearTensors(q_features, k_features, v, log_decay, kv, z, starts, lengths)
    if options.first < q.shape[2]:
        sums_options = LinearOptions(return_state=return_state)
        values, total, *last = _launcher(linear, options.first, sums_options).forward_sums()
    else:
        values = near.new_empty(q.shape[0], 0, *near.shape[2:])
        total, last = lse.new_empty(*lse.shape[:2], 0), _same_state(linear, return_state)
    out, p, r = merge(near, lse, values, total, logit, counts, options, v.dtype)
    return out.transpose(1, 2), last[0], last[1], near, lse, values, p, r


@torch.library.custom_op("attnzoo::hybrid_triton_backward", mutates_args=())
def hybrid_triton_backward(
    d_out: Tensor,
    d_kv: Tensor,
    d_z: Tensor,
    kv_last: Tensor,
    z_last: Tensor,
    near: Tensor,
    lse: Tensor,
    values: Tensor,
    near_weight: Tensor,
    linear_weight: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_features: Tensor,
    k_features: Tensor,
    log_decay: Tensor | None,
    kv: Tensor | None,
    z: Tensor | None,
    ids: Tensor | None,
    starts: Tensor | None,
    lengths: Tensor | None,
    first_k: Tensor | None,
    first_v: Tensor | None,
    first_seen: Tensor | None,
    window: int,
    scale: float,
    relative: bool,
    mean: bool,
    min_weight: float,
    return_state: bool,
    needs_decay_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, features, logit, log_decay, kv, z, first_k and first_v.

    Those of log_decay, first_k and first_v are empty if they are ``None``.
    """
    options = _merge_options(q, window, relative, mean, min_weight)
    d_near, d_lse, d_values, delta, d_logit = merge_backward(
        d_out, near, values, near_weight, linear_weight, options, v.dtype
    )
    dq, dk, dv = launch_window_backward(
        d_near.transpose(1, 2), d_lse, q, k, v, near, lse, ids, (window - 1, 0), scale
    )
    d_first = q.new_empty(0), q.new_empty(0)
    if first_k is not None and first_v is not None and first_seen is not None:
        d_rows, delta_near = d_near.transpose(1, 2), (d_near.float() * near).sum(3)
        delta_near = (delta_near.transpose(1, 2) - d_lse).contiguous()
        dq_first, *d_first = extra_key_gradients(
            d_rows, delta_near, lse, q, first_k, first_v, first_seen, scale
        )
        dq += dq_first.transpose(1, 2)
    dq_features = empty_rows(q_features, q_features.shape[1], q_features.shape[3])
    dk_features = empty_rows(k_features, k_features.shape[1], k_features.shape[3])
    rows = tuple(x.transpose(1, 2) for x in (dq, dk, dv, dq_features, dk_features))
    first, length = options.first, q.shape[2]
    if starts is not None:  # tokens outside of sequences are not written
        dq_features.zero_(), dk_features.zero_()
    dq_features[:, :first].zero_()
    dk_features[:, length - first :].zero_()
    linear = LinearTensors(q_features, k_features, v, log_decay, kv, z, starts, lengths)
    if first == length:
        no_decay = q.new_empty(0) if log_decay is None else torch.zeros_like(log_decay)
        d_state = [d_kv.clone(), d_z.clone()]
        if kv is None:
            d_state = [x.new_empty(0) for x in d_state]
        elif not return_state:
            d_state = _same_state(linear._replace(kv=None), True)
        return *rows, d_logit, no_decay, *d_state, *d_first
    sums_options = LinearOptions(normalize=True, return_state=return_state)
    launcher = _launcher(linear, first, sums_options, needs_decay_grad)
    dv_linear = launcher.new_rows(launcher.v, v.shape[1], v.shape[3])
    d_rows = dq_features[:, first:], dk_features[:, : length - first], dv_linear
    d_log, d_kv, d_z = launcher.backward_sums(
        d_rows, d_values.transpose(1, 2), delta, (d_kv, d_z), (kv_last, z_last)
    )
    dv[:, : length - first] += dv_linear
    return *rows, d_logit, d_log, d_kv, d_z, *d_first


def _same_state(x: LinearTensors, return_state: bool) -> list[Tensor]:
    """Return the state of a call in which no key leaves the window."""
    if not return_state:
        return [x.v.new_empty(0, dtype=torch.float32) for _ in range(2)]
    if x.kv is not None and x.z is not None:
        return [x.kv.clone(), x.z.clone()]
    count = x.q.shape[0] if x.starts is None else x.starts.shape[0]
    return [y.zero_() for y in empty_states(x.q, x.k, x.v, count)]


def _merge_options(
    q: Tensor, window: int, relative: bool, mean: bool, min_weight: float
) -> MergeOptions:
    return MergeOptions(relative, mean, window, min(window, q.shape[2]), min_weight)


def _launcher(
    x: LinearTensors, first: int, options: LinearOptions, needs_decay_grad: bool = False
) -> KernelLauncher:
    """Return the launcher of the linear branch: queries from token ``first`` on, keys up to it."""
    count = x.q.shape[2] - first
    tensors = x._replace(q=x.q[:, :, first:], k=x.k[:, :, :count], v=x.v[:, :, :count])
    return KernelLauncher(tensors, options, needs_decay_grad)


@hybrid_triton.register_fake
def _hybrid_triton_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_features: Tensor,
    k_features: Tensor,
    logit: Tensor,
    log_decay: Tensor | None,
    kv: Tensor | None,
    z: Tensor | None,
    ids: Tensor | None,
    starts: Tensor | None,
    *options: Any,
) -> tuple[Tensor, ...]:
    first = min(options[5], q.shape[2])
    shape = (q.shape[0], q.shape[2], q.shape[1], v.shape[3])
    out = v.new_empty(shape).transpose(1, 2)
    near = v.new_empty(shape, dtype=torch.float32)
    values = near.new_empty(shape[0], shape[1] - first, *shape[2:])
    rows = tuple(near.new_empty(q.shape[:3]) for _ in range(3))
    last = near.new_empty(0), near.new_empty(0)
    if options[-1]:
        count = q.shape[0] if starts is None else starts.shape[0]
        last = empty_states(q_features, k_features, v, count)
    return out, *last, near, rows[0], values, rows[1], rows[2]


@hybrid_triton_backward.register_fake
def _hybrid_triton_backward_fake(*args: Any) -> tuple[Tensor, ...]:
    lse, q, k, v, q_features, k_features, log_decay, kv, z = args[6], *args[10:18]
    rows = (
        empty_rows(x, x.shape[1], x.shape[3]).transpose(1, 2)
        for x in (q, k, v, q_features, k_features)
    )
    has_decay = log_decay is not None and (args[-1] or args[24] >= q.shape[2])
    d_log = log_decay.new_empty(log_decay.shape) if has_decay else q.new_empty(0)
    d_state = (lse.new_empty(0 if x is None else x.shape) for x in (kv, z))
    d_first = (q.new_empty(0) if x is None else x.new_empty(x.shape) for x in args[21:23])
    return *rows, lse.new_empty(lse.shape), d_log, *d_state, *d_first


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, q_features, k_features, _, log_decay, *state_and_sequences = inputs[:12]
    tensors = q, k, v, q_features, k_features, log_decay, *state_and_sequences
    ctx.save_for_backward(*output[1:], *tensors, *inputs[13:16])
    ctx.options = inputs[16:]
    ctx.set_materialize_grads(False)  # zeros for what only the gradients read would be large


def _backward(
    ctx: Any, d_out: Tensor | None, d_kv: Tensor | None, d_z: Tensor | None, *_: Tensor | None
) -> tuple[Tensor | None, ...]:
    needs_decay_grad = ctx.needs_input_grad[6]
    kv, z, near = ctx.saved_tensors[0], ctx.saved_tensors[1], ctx.saved_tensors[2]
    if d_kv is None and d_z is None:  # one launch for both
        zeros = kv.new_zeros(kv.numel() + z.numel())
        d_kv, d_z = zeros[: kv.numel()].view(kv.shape), zeros[kv.numel() :].view(z.shape)
    d_kv = torch.zeros_like(kv) if d_kv is None else d_kv
    d_z = torch.zeros_like(z) if d_z is None else d_z
    d_out = torch.zeros_like(near.transpose(1, 2)) if d_out is None else d_out
    grads = hybrid_triton_backward(
        d_out, d_kv, d_z, *ctx.saved_tensors, *ctx.options, needs_decay_grad
    )
    needs = *ctx.needs_input_grad[:9], *ctx.needs_input_grad[13:15]
    needed = [g if need else None for g, need in zip(grads, needs, strict=True)]
    return *needed[:9], *[None] * 4, *needed[9:], *[None] * 7


hybrid_triton.register_autograd(_backward, setup_context=_setup_context)
refuse_derivative(hybrid_triton_backward, "hybrid_attention")
