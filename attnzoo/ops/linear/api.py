r"""Linear attention: one op for the plain, normalised, gated, causal and bidirectional variants.

Computes :math:`S_t = e^{g_t} S_{t-1} + k_t v_t^T` and :math:`o_t = q_t S_t`, or, normalised,
:math:`o_t = q_t S_t / (q_t z_t + \epsilon)`, where z is the same recurrence over the keys alone.
Token t updates the state before its query reads it. Queries and keys are features. Without a causal
mask, the sums run over all keys:
:math:`o_t = q_t \sum_j k_j v_j^T / (q_t \sum_j k_j + \epsilon)`.

| form | time | memory beyond the results | used for |
|---|---|---|---|
| ``parallel`` | O(T^2 D) | O(T^2), times D for decay per channel | comparison |
| ``recurrent`` | O(T D E), T steps | the state | decoding |
| ``chunk`` | O(T C D + T D E) | some states and chunks | training, prefill |

Sources: Katharopoulos et al., 2020, arXiv:2006.16236 (the sums); Sun et al., 2023, arXiv:2307.08621
(decay per head, the chunk form); Yang et al., 2024, arXiv:2312.06635 (decay per key channel).
Letters: B batch, H heads, Hkv key heads, T queries, S keys, D key size, E value size, C chunk.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attnzoo.contract.context_parallel import SequenceShard
from attnzoo.contract.implementation import Implementation, select
from attnzoo.contract.masks import PLAIN, AttentionMask
from attnzoo.contract.padding import padding_if_any
from attnzoo.contract.states import AttentionOutput, ImplChoice, LinearState
from attnzoo.contract.validation import check_mask_fields, check_qkv, check_shard, check_size
from attnzoo.errors import UnsupportedError, did_you_mean
from attnzoo.ops.features.functional import FIXED
from attnzoo.ops.linear.bidirectional import run_bidirectional
from attnzoo.ops.linear.chunk import run_chunks
from attnzoo.ops.linear.common import (
    LinearInputs,
    MapWeights,
    Result,
    check_feature_map,
    decay_of_real_tokens,
    empty_output,
    empty_state,
    like_features,
    map_inputs,
    state_dtype,
)
from attnzoo.ops.linear.common import StepGate as StepGate
from attnzoo.ops.linear.context_parallel import state_from_earlier_ranks
from attnzoo.ops.linear.cpu.linear import (
    cpp_reasons,
    fuses_map,
    run_cpp,
)
from attnzoo.ops.linear.cpu.linear_step import run_step, supports_step
from attnzoo.ops.linear.gated_step import GatedResult as GatedResult
from attnzoo.ops.linear.gated_step import gated_step as gated_step
from attnzoo.ops.linear.reference import run_reference
from attnzoo.ops.linear.step import run_steps, step
from attnzoo.ops.linear.triton.run import divide_sums as divide_sums
from attnzoo.ops.linear.triton.run import linear_sums as linear_sums
from attnzoo.ops.linear.triton.run import round_features as round_features
from attnzoo.ops.linear.triton.run import run_triton
from attnzoo.ops.linear.triton.run import triton_reasons as triton_reasons
from attnzoo.ops.linear.triton.verdicts import kernel_verdict as kernel_verdict
from attnzoo.ops.linear.validation import (
    check_log_decay,
    check_packed_tokens,
    check_state,
)
from attnzoo.runtime.autocast import autocast_disabled

FORMS = ("parallel", "recurrent", "chunk")
STEP_IN_CPP = ImplChoice("cpp", "one token, compiled for this CPU")


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: AttentionMask | None = None,
    log_decay: Tensor | None = None,
    normalize: bool = False,
    scale: float | None = None,
    form: str = "chunk",
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
) -> AttentionOutput:
    r"""Compute attention through sums over keys and values.

    The sums and their gradients are float32, or float64 for float64 inputs. Heads may be grouped:
    there is one state per *key* head, and keys and values are not repeated.

    Args:
        q: Queries, ``[B, H, T, D]``, to which ``feature_map`` is applied.
        k: Keys, ``[B, Hkv, S, D]``, likewise; H is a multiple of Hkv.
        v: Values, ``[B, Hkv, S, E]``.
        mask: Causality, padding and segments; ``None`` means causal. With a causal mask, T equals
            S. The features and values of padding keys are set to 0. Packed segments do not see each
            other: ``state`` belongs to the first segment, and the returned state to the last.
        log_decay: Natural logarithm of the decay at each token, at most 0: ``[Hkv]`` (constant per
            head), ``[B, Hkv, S]`` (per token) or ``[B, Hkv, S, D]`` (per key channel). No value
            overflows or cancels; minus infinity sets the state to 0. It decays the state at padding
            too, where the caller sets it to 0 if it should not.
        normalize: Divide by ``q_t z_t + eps``; features should then not be negative.
        scale: Multiplies the features of q; ``None`` means 1. It cancels with ``normalize``, except
            for ``eps``.
        form: ``"parallel"``, ``"recurrent"`` or ``"chunk"``; see the table above.
        impl: ``"triton"`` (causal, NVIDIA GPUs), ``"cpp"`` (causal, CPUs), ``"torch"`` (every
            device), ``"reference"`` (plain operations and autograd), or ``"auto"``, which selects
            the fastest one that supports the call; ``"triton"`` only after its kernels passed a
            check on the device. A named implementation is never replaced.
        state: Sums over the earlier tokens; ``None`` starts a sequence. Gradients flow through it.
        return_state: Whether to return the state after the last token.
        chunk_size: C, in tokens; ``None`` picks one. T need not be a multiple. ``"triton"`` takes
            16, 32 or 64, and ``"cpp"`` at most 32, where chunks have at most 16 tokens; for 16 or
            more, those of bfloat16 tensors have 64 tokens on CPUs with AMX.
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
    mask = PLAIN[True] if mask is None else mask
    causal, segment_ids, padding = mask.causal, mask.segment_ids, mask.padding
    _check_options(form, chunk_size, causal)
    check_qkv(q, k, v, mask)
    if mask is not PLAIN[True]:
        check_mask_fields("linear_attention", mask, "segment_ids")
        padding = None if padding is None else padding_if_any(padding)
    check_feature_map(feature_map, map_weights, q, k)
    keys = like_features(k, feature_map, map_weights)
    _check_tensors(q, k, keys, v, log_decay, state, mask)
    check_shard(shard, state)
    if log_decay is not None:
        log_decay = decay_of_real_tokens(log_decay, k, None)
    if state is None:
        state = empty_state(q, keys, v)
    elif state.kv.dtype != (dtype := state_dtype(q, k, v)) or state.k.dtype != dtype:
        state = LinearState(state.kv.to(dtype), state.k.to(dtype))
    x = LinearInputs(
        *(q, k, v, log_decay, state, padding, segment_ids, causal, form, normalize),
        *(1.0 if scale is None else float(scale), eps, chunk_size, feature_map, feature_scale),
        map_weights=map_weights,
        reuse_state=reuse_state and not torch.is_grad_enabled(),
    )
    if q.shape[2] == 1 and impl in ("auto", "cpp") and shard is None and supports_step(x):
        out, last = run_step(x)
        return AttentionOutput(out, last if return_state else None, None, STEP_IN_CPP)
    if map_weights is not None and (impl == "triton" or q.device.type != "cpu"):
        with autocast_disabled(q.device):  # no other kernel computes learned maps
            x = map_inputs(x)
    on_gpu = q.device.type == "cuda"
    table = AUTOMATIC[form, on_gpu] if impl == "auto" else IMPLEMENTATIONS
    chosen, choice = select("linear_attention", table, x, impl)
    fuses_map = shard is None and _fuses_map(x, chosen.name)
    with autocast_disabled(q.device):
        out, last = _run(chosen, x if fuses_map else map_inputs(x), shard)
    fused = f", {feature_map} fused" if fuses_map and x.feature_map != "identity" else ""
    choice = ImplChoice(choice.impl, f"{form} form{fused}; {choice.reason}")
    return AttentionOutput(out, last if return_state else None, None, choice)


def _run(
    chosen: Implementation[LinearInputs, Result], x: LinearInputs, shard: SequenceShard | None
) -> Result:
    """Run an implementation, from the state of earlier ranks if there are any."""
    if shard is not None:
        state = state_from_earlier_ranks(x.k, x.v, x.log_decay, shard, causal=x.causal)
        x = x._replace(state=state)
    if x.q.shape[0] == 0 or (x.causal and x.q.shape[2] == 0):
        return empty_output(x), x.state
    return chosen.run(x)


def _check_tensors(
    q: Tensor,
    k: Tensor,
    features: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    state: LinearState | None,
    mask: AttentionMask,
) -> None:
    """Raise ``UnsupportedError`` for tensors that do not fit each other."""
    causal, segment_ids = mask.causal, mask.segment_ids
    if causal and q.shape[2] != k.shape[2]:
        raise UnsupportedError(
            "causal attention needs queries and keys of the same tokens, got "
            f"{q.shape[2]} queries and {k.shape[2]} keys; pass earlier tokens as state=, or a mask "
            "that is not causal."
        )
    if log_decay is not None:
        check_log_decay(log_decay, features.shape, q.device, causal)
    if state is not None:
        check_state(LinearState, state, features, v)
    if segment_ids is not None:
        check_packed_tokens(q, k)


def _check_options(form: str, chunk_size: int | None, causal: bool) -> None:
    """Raise ``UnsupportedError`` for options that no implementation supports."""
    if form not in FORMS:
        raise UnsupportedError(
            f"linear_attention has no form {form!r}.{did_you_mean(form, FORMS)} "
            f"It has {', '.join(FORMS)}."
        )
    if not causal and form == "recurrent":
        raise UnsupportedError(
            "form='recurrent' is causal; without a causal mask use form='chunk'."
        )
    if chunk_size is not None:
        check_size("chunk_size", chunk_size)


def _fuses_map(x: LinearInputs, impl: str) -> bool:
    """Return whether an implementation computes the features itself."""
    if impl == "triton":
        return x.feature_map in FIXED
    return impl == "cpp" and fuses_map(x)


# -- implementations -------------------------------------------------------------------------------


def _run_torch(x: LinearInputs) -> Result:
    """Compute a call in torch; the parallel form is one chunk."""
    tokens = x.k.shape[2]
    if x.form == "recurrent":
        return run_steps(x)
    if x.form == "parallel":
        x = x._replace(chunk_size=max(tokens, 1))
    if not x.causal:
        return run_bidirectional(x)
    return step(x) if tokens == 1 else run_chunks(x)


def _triton_reasons(x: LinearInputs) -> list[str]:
    return triton_reasons(x.q, x.k, x.v, form=x.form, causal=x.causal)


def _triton_verdict(x: LinearInputs) -> tuple[str, str]:
    return kernel_verdict("linear", x.log_decay, x.k, x.v)


def _cpp_reasons(x: LinearInputs) -> list[str]:
    return cpp_reasons(x.q, form=x.form, causal=x.causal, chunk_size=x.chunk_size)


IMPLEMENTATIONS = (
    Implementation(
        name="triton",
        run=run_triton,
        reasons=_triton_reasons,
        automatic="compiled for this GPU",
        verdict=_triton_verdict,
    ),
    Implementation(
        name="cpp",
        run=run_cpp,
        reasons=_cpp_reasons,
        automatic="compiled for this CPU",
    ),
    Implementation(name="torch", run=_run_torch, automatic="runs on every device"),
    Implementation(name="reference", run=run_reference),
)
_TRITON, _CPP, _TORCH, _REFERENCE = IMPLEMENTATIONS
_PARALLEL = (replace(_REFERENCE, automatic="the parallel form is for comparison"),)
# What impl="auto" selects from, by form and by whether the tensors are on a GPU
AUTOMATIC = {
    ("parallel", False): _PARALLEL,
    ("parallel", True): _PARALLEL,
    ("recurrent", False): (_TORCH,),
    ("recurrent", True): (_TRITON, _TORCH),
    ("chunk", False): (_CPP, _TORCH),
    ("chunk", True): (_TRITON, _TORCH),
}
