r"""Linear attention, plain, normalised or gated, causal or bidirectional: in chunks, or by token.

Computes :math:`S_t = e^{g_t} S_{t-1} + k_t v_t^T` and :math:`o_t = q_t S_t`, or, normalised,
:math:`o_t = q_t S_t / (q_t z_t + \epsilon)`, where z is the same recurrence over the keys alone.
Token t updates the state before its query reads it. Queries and keys are features. Without a causal
mask, the sums run over all keys:
:math:`o_t = q_t \sum_j k_j v_j^T / (q_t \sum_j k_j + \epsilon)`.

T tokens take O(T C D + T D E) time, and some states and chunks of memory beyond the results. One
causal token takes the step of decoding, an op of its own in the registry of implementations,
``linear_step``: O(D E).

Sources: Katharopoulos et al., 2020, arXiv:2006.16236 (the sums); Sun et al., 2023, arXiv:2307.08621
(decay per head, the chunk form); Yang et al., 2024, arXiv:2312.06635 (decay per key channel).
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnzoo.contract.context_parallel import SequenceShard
from attnzoo.contract.implementation import (
    CPP,
    TORCH,
    TRITON,
    Implementation,
    register_implementation,
    select,
    select_if_supported,
)
from attnzoo.contract.sequences import Sequences
from attnzoo.contract.states import AttentionOutput, LinearState, run_on_slots
from attnzoo.contract.validation import (
    check_log_decay,
    check_qkv,
    check_sequences,
    check_shard,
    check_size,
)
from attnzoo.errors import UnsupportedError
from attnzoo.ops.features.functional import MapWeights, num_features
from attnzoo.ops.fla import FLA, linear_reasons, linear_verdict, run_linear
from attnzoo.ops.linear.common import (
    LinearInputs,
    check_feature_map,
    check_state,
    like_features,
    map_inputs,
    on_rows,
)
from attnzoo.ops.linear.context_parallel import state_from_earlier_ranks
from attnzoo.ops.linear.cpu.linear import cpp_reasons, fuses_map, run_cpp
from attnzoo.ops.linear.cpu.linear_step import run_step_cpp, step_reasons
from attnzoo.ops.linear.reference import run_reference
from attnzoo.ops.linear.torch import run_torch, step
from attnzoo.ops.linear.triton.run import run_step_triton, run_triton, triton_reasons
from attnzoo.runtime.gpu_verdicts import linear_case, own_verdict
from attnzoo.runtime.kernel_calls import autocast_disabled, state_dtype, widen


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    sequences: Sequences | None = None,
    query_sequences: Sequences | None = None,
    log_decay: Tensor | None = None,
    normalize: bool = False,
    scale: float | None = None,
    impl: str = "auto",
    state: LinearState | None = None,
    return_state: bool = False,
    chunk_size: int | None = None,
    eps: float = 1e-6,
    feature_map: str = "identity",
    feature_scale: float = 1.0,
    map_weights: MapWeights | None = None,
    shard: SequenceShard | None = None,
    reuse_state: bool = False,
    slots: Tensor | None = None,
) -> AttentionOutput:
    r"""Compute attention through sums over keys and values, in chunks.

    One causal token takes the step that decoding takes. The sums and their gradients are float32,
    or float64 for float64 inputs. Heads may be grouped: there is one state per *key* head, and keys
    and values are not repeated.

    Args:
        q: Queries, ``[B, H, T, D]``, to which ``feature_map`` is applied.
        k: Keys, ``[B, Hkv, S, D]``, likewise; H is a multiple of Hkv.
        v: Values, ``[B, Hkv, S, E]``.
        causal: Whether a query sees keys up to its own token only; T then equals S.
        sequences: The sequences of one row, B = 1, which do not see each other; there is a state
            for each. ``None``: each row is a sequence.
        query_sequences: Those of the queries, in the same order, if they are other tokens than the
            keys; not causal.
        log_decay: Natural logarithm of the decay at each token, at most 0: ``[Hkv]`` (constant per
            head), ``[B, Hkv, S]`` (per token) or ``[B, Hkv, S, D]`` (per key channel). No value
            overflows or cancels; minus infinity sets the state to 0.
        normalize: Divide by ``q_t z_t + eps``; features should then not be negative.
        scale: Multiplies the features of q; ``None`` means 1. It cancels with ``normalize``, except
            for ``eps``.
        impl: ``"triton"`` (causal, NVIDIA GPUs), ``"fla"`` (causal, 16 bits, GPUs with
            flash-linear-attention), ``"cpp"`` (causal, CPUs), ``"torch"`` (every device),
            ``"reference"`` (plain operations and autograd), or ``"auto"``, which selects the
            fastest one that supports the call; ``"triton"`` only after its kernels passed a check
            on the device, ``"fla"`` after its first call agreed with torch. A named implementation
            is never replaced.
        state: Sums over the earlier tokens; ``None`` starts a sequence. Gradients flow through it.
        return_state: Whether to return the state after the last token.
        chunk_size: C, in tokens; ``None`` picks one. T need not be a multiple. ``"triton"`` takes
            none, and ``"cpp"`` at most 32, where chunks have at most 16 tokens.
        eps: Added to the denominator.
        feature_map: Applied to q and k: a name of ``FIXED`` or, with weights, of ``LEARNED`` in
            :mod:`attnzoo.ops.features.functional`, such as ``"elu+1"`` or ``"hedgehog"``.
            D is the number of features where a state or a decay has D.
        map_weights: Weights of a learned map, as the functions in
            :mod:`attnzoo.ops.features.functional` take them.
        feature_scale: s of ``"exp"``; see
            :func:`attnzoo.ops.features.functional.exp_queries`.
        shard: This rank's part of sequences that several ranks hold; not together with ``state``.
        reuse_state: Whether one token may overwrite the tensors of ``state``, which are then
            returned: the state is read and written once. Only without gradients.
        slots: For one token of each of B sequences: the row of each in ``state``, which is a pool
            of states, ``[B]`` int64; -1 for a sequence without a token, whose output is 0. The
            returned state is the pool.

    Returns:
        ``out`` as ``[B, H, T, E]`` in the dtype of ``v``; also ``state`` and ``impl``.

    Raises:
        ValueError: Shapes, dtypes or options are not supported; the message says which are.

    Example:
        >>> q, k = torch.rand(2, 1, 4, 1000, 16)  # features; positive, to be normalised
        >>> v = torch.randn(1, 4, 1000, 8)
        >>> whole = attnzoo.ops.linear_attention(q, k, v, normalize=True)
        >>> first = [x[:, :, :999] for x in (q, k, v)]
        >>> last = [x[:, :, 999:] for x in (q, k, v)]
        >>> before = attnzoo.ops.linear_attention(*first, normalize=True, return_state=True)
        >>> after = attnzoo.ops.linear_attention(*last, normalize=True, state=before.state)
        >>> torch.allclose(after.out, whole.out[:, :, 999:], atol=1e-5)
        True
    """
    if chunk_size is not None:
        check_size("chunk_size", chunk_size)
    check_qkv(q, k, v)
    check_feature_map(feature_map, map_weights, q, k)
    _check_tokens(q, k, causal, sequences, query_sequences, slots)
    x = LinearInputs(
        *(q, k, v, log_decay, state, causal, normalize),
        scale=1.0 if scale is None else float(scale),
        eps=eps,
        chunk_size=chunk_size,
        feature_map=feature_map,
        feature_scale=feature_scale,
        map_weights=map_weights,
        sequences=sequences,
        query_sequences=query_sequences,
        return_state=return_state,
        reuse_state=reuse_state and not torch.is_grad_enabled(),
        slots=slots,
    )
    return run_linear_attention(x, impl, shard)


def run_linear_attention(
    x: LinearInputs, impl: str = "auto", shard: SequenceShard | None = None
) -> AttentionOutput:
    """Compute :func:`linear_attention` of tokens that fit each other, as those of a backend do.

    Decays and a state are checked here: a gate or an earlier call has made them.

    Args:
        x: Queries, keys, values and options.
        impl: As in :func:`linear_attention`.
        shard: See impl.
    """
    if x.log_decay is not None:
        features = num_features(x.k, x.feature_map, x.map_weights)
        check_log_decay(x.log_decay, (*x.k.shape[:3], features), x.q.device, x.causal)
        if x.log_decay.dim() == 1:  # its gradient sums all tokens
            x = x._replace(log_decay=widen(x.log_decay))
    if x.state is not None:
        x = _with_checked_state(x)
    if shard is not None:
        check_shard(shard, x.state)
        with autocast_disabled(x.q.device):
            x = map_inputs(x)
            before = (x.k, x.v, x.log_decay, shard, x.sequences)
            x = x._replace(state=state_from_earlier_ranks(*before, causal=x.causal))
    found = None
    if x.q.shape[2] == 1 and x.causal and x.sequences is None:
        step = x if x.state is not None else x._replace(state=x.first_state())
        found = select_if_supported("linear_step", step, impl)
        x = step if found or x.slots is not None else x
    chosen, choice = found or select("linear_attention", x, impl)
    if x.q.shape[0] == 0 or (x.causal and x.q.shape[2] == 0):
        out = x.empty_output()
        last: LinearState | None = x.first_state()
    else:
        out, last = chosen.run(x) if found or x.slots is None else run_on_slots(x, chosen.run)
    return AttentionOutput(out, last if x.return_state else None, None, choice)


def _with_checked_state(x: LinearInputs) -> LinearInputs:
    """Return the inputs with a state that fits them, in the dtype of the sums.

    Raises:
        UnsupportedError: The state is of another call; kernels read it by address.
    """
    state, k, v, dtype = x.state, x.k, x.v, state_dtype(x.q, x.k, x.v)
    assert state is not None
    batch = k.shape[0] if x.sequences is None else x.sequences.count
    batch = batch if x.slots is None else len(state[0])
    features = num_features(k, x.feature_map, x.map_weights)
    shape = (batch, k.shape[1], features, v.shape[3])
    if len(state) == 2:
        kv, z = state
        fits = kv.shape == shape and z.shape == shape[:3] and kv.dtype == z.dtype == dtype
        if fits and kv.device == z.device == k.device:
            return x
    check_state(LinearState, state, like_features(k, x.feature_map, x.map_weights), v, batch)
    return x._replace(state=LinearState(*(y.to(dtype) for y in state)), reuse_state=False)


def _check_tokens(
    q: Tensor,
    k: Tensor,
    causal: bool,
    sequences: Sequences | None,
    query_sequences: Sequences | None,
    slots: Tensor | None,
) -> None:
    """Raise ``UnsupportedError`` if queries and keys are not of the tokens that a call needs."""
    if causal and q.shape[2] != k.shape[2]:
        raise UnsupportedError(
            "causal attention needs queries and keys of the same tokens, got "
            f"{q.shape[2]} queries and {k.shape[2]} keys; pass earlier tokens as state=, or "
            "causal=False."
        )
    batch = check_sequences(sequences, slots, q, k)
    if query_sequences is not None:
        query_count = check_sequences(query_sequences, None, k, q)
        if causal or query_count != batch:
            raise UnsupportedError(
                "query_sequences are as many as sequences, and need causal=False, got "
                f"{query_count} and {batch}."
            )


# -- implementations -------------------------------------------------------------------------------


def _features(x: LinearInputs) -> Tensor:
    """Return a tensor with the shape and device of the features of keys."""
    return like_features(x.k, x.feature_map, x.map_weights)


def _triton_reasons(x: LinearInputs) -> list[str]:
    return triton_reasons(x.q, _features(x), x.v, causal=x.causal, chunk_size=x.chunk_size)


def _step_triton_reasons(x: LinearInputs) -> list[str]:
    return triton_reasons(x.q, _features(x), x.v)


def _triton_verdict(x: LinearInputs) -> tuple[str, str]:
    return own_verdict(x.q.device, linear_case(x.log_decay, normalize=x.normalize))


def _cpp_reasons(x: LinearInputs) -> list[str]:
    return cpp_reasons(causal=x.causal, chunk_size=x.chunk_size)


def _map_in_cpp(x: LinearInputs) -> str:
    """Return which feature map the kernel computes."""
    is_fused = x.feature_map != "identity" and fuses_map(x)
    return f"{x.feature_map} fused" if is_fused else ""


def _map_in_triton(x: LinearInputs) -> str:
    """Return which feature map the kernels compute; learned maps are computed in torch."""
    is_fused = x.feature_map != "identity" and x.map_weights is None
    return f"{x.feature_map} fused" if is_fused else ""


register_implementation(
    Implementation(
        op="linear_attention",
        **TRITON,
        run=run_triton,
        reasons=_triton_reasons,
        form="chunk form",
        verdict=_triton_verdict,
        note=_map_in_triton,
        step=run_step_triton,
        step_reasons=_step_triton_reasons,
    ),
    Implementation(
        op="linear_attention",
        **FLA,
        run=run_linear,
        reasons=linear_reasons,
        verdict=linear_verdict,
    ),
    Implementation(
        op="linear_attention",
        **CPP,
        run=run_cpp,
        reasons=_cpp_reasons,
        form="chunk form",
        note=_map_in_cpp,
        step=run_step_cpp,
        step_reasons=step_reasons,
    ),
    Implementation(
        op="linear_attention",
        **TORCH,
        run=on_rows(run_torch),
        form="chunk form",
        step=step,
    ),
    Implementation(
        op="linear_attention", name="reference", run=on_rows(run_reference), form="chunk form"
    ),
)
