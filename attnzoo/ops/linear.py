r"""Linear attention: one op for the plain, normalised, gated, causal and bidirectional kinds.

Computes :math:`S_t = e^{g_t} S_{t-1} + k_t v_t^T` and :math:`o_t = q_t S_t`, or, normalised,
:math:`o_t = q_t S_t / (q_t z_t + \epsilon)` with z the same recurrence over the keys alone. The
state is updated before it is read. Queries and keys come after the feature map. Not causal, the
sums run over all keys: :math:`o_t = q_t \sum_j k_j v_j^T / (q_t \sum_j k_j + \epsilon)`.

| form | time | memory beyond the results | for |
|---|---|---|---|
| ``parallel`` | O(T^2 D) | O(T^2), times D for vector decay | comparing with |
| ``recurrent`` | O(T D E), T steps | the state | decoding |
| ``chunk`` | O(T C D + T D E) | some states and chunks | training, prompts |

Sources: Katharopoulos et al., 2020, arXiv:2006.16236 (the sums); Sun et al., 2023, arXiv:2307.08621
(decay per head, the chunk form); Yang et al., 2024, arXiv:2312.06635 (decay per key channel).
Letters: B batch, H heads, Hkv key heads, T queries, S keys, D key size, E value size, C chunk.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from attnzoo.errors import UnsupportedError, did_you_mean
from attnzoo.ops.context_parallel import Shard, earlier_sums
from attnzoo.ops.feature_maps import elu_plus_one, exp_keys, exp_queries, relu
from attnzoo.ops.linear_check import check
from attnzoo.ops.linear_chunk import linear_chunk
from attnzoo.ops.linear_cpp import cpp_reasons
from attnzoo.ops.linear_everywhere import everywhere
from attnzoo.ops.linear_reference import (
    LinearInputs,
    Result,
    dense,
    dense_chunks,
    empty_state,
    recurrent,
    state_dtype,
    step,
)
from attnzoo.ops.linear_triton import Fused, refuse_triton, run_triton, triton_reasons
from attnzoo.ops.linear_walk import as_given
from attnzoo.state import AttentionOutput, LinearState

CHUNK_SIZE = 64
COMPILED = "the forward pass is compiled for this CPU"


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor | None = None,
    normalize: bool = False,
    scale: float | None = None,
    form: str = "chunk",
    impl: str = "auto",
    state: LinearState | None = None,
    return_state: bool = False,
    chunk_size: int | None = None,
    causal: bool = True,
    segment_ids: Tensor | None = None,
    eps: float = 1e-6,
    feature_map: str = "identity",
    feature_scale: float = 1.0,
    real: Tensor | None = None,
    shard: Shard | None = None,
) -> AttentionOutput:
    r"""Attend through sums of keys and values.

    Sums are kept in float32 (float64 for float64 inputs), gradients included. Heads may be grouped:
    there is one state per *key* head, and keys and values are never repeated.

    Args:
        q: Queries, ``[B, H, T, D]``; after the feature map, unless it is named.
        k: Keys, ``[B, Hkv, S, D]``, likewise; H is a multiple of Hkv.
        v: Values, ``[B, Hkv, S, E]``.
        log_decay: Natural logarithm of what is left of the state at each token, at most 0:
            ``[Hkv]`` (constant per head), ``[B, Hkv, S]`` (per token) or ``[B, Hkv, S, D]`` (per
            key channel). However strong, it neither overflows nor cancels; minus infinity forgets
            everything.
        normalize: Divide by ``q_t z_t + eps``; then queries and keys should not be negative.
        scale: Multiplies q; ``None`` means 1. Where normalised it cancels, but for ``eps``.
        form: ``"parallel"``, ``"recurrent"`` or ``"chunk"``; see the table above.
        impl: ``"reference"`` (plain operations, differentiated by autograd), ``"torch"`` (fast, on
            any device), ``"triton"`` (causal, on NVIDIA GPUs), ``"cpp"`` (the chunk form, on CPUs;
            the backward pass is torch's), or ``"auto"`` (see :func:`choose_impl`). A named one is
            never replaced.
        state: Sums over the earlier tokens; ``None`` starts a sequence. Gradients flow through it.
        return_state: Whether to return the sums after the last token.
        chunk_size: C, in tokens; ``None`` picks one. T need not divide by it. Of ``"triton"``, 16,
            32 or 64.
        causal: Whether a token sees only itself and the tokens before it; then T equals S.
        segment_ids: ``[B, S]``, integer, never falling along a row: sequences packed into one row.
            Nothing passes from one to another; ``state`` belongs to the first, the returned state
            to the last.
        eps: Added to the denominator.
        feature_map: What queries and keys pass through first, so that a kernel can do it on the
            way: ``"identity"``, ``"elu+1"``, ``"relu"`` or ``"exp"`` (:data:`FEATURE_MAPS`).
        feature_scale: s of ``"exp"``; see :func:`attnzoo.ops.feature_maps.exp_queries`.
        real: ``[B, S]`` bool, false where a key is padding: its features are zero.
        shard: The share of the rows that these tokens are, where others lie on other processes;
            in place of ``state``, and with ``feature_map="identity"``.

    Returns:
        ``out`` as ``[B, H, T, E]`` in the dtype of ``v``; ``state`` where it was asked for.

    Raises:
        ValueError: Shapes, types or options do not fit; says what came and what would.
    """
    check(q, k, v, log_decay, state, segment_ids, causal)
    _check_options(form, impl, chunk_size, causal, feature_map)
    if impl == "auto":
        impl, _ = choose_impl(form, q, k, v, causal=causal, chunk_size=chunk_size)
    if impl != "triton":
        q, k = map_features(q, k, Fused(feature_map, feature_scale, real))
    if shard is not None:
        assert state is None
        assert feature_map == "identity"
        state = earlier_sums(k, v, log_decay, shard, causal=causal)
    if state is None:
        state = empty_state(q, k, v)
    state = LinearState(*(x.to(state_dtype(q, k, v)) for x in state))
    scale = 1.0 if scale is None else float(scale)
    x = LinearInputs(
        q,
        k,
        v,
        log_decay,
        normalize,
        scale,
        state,
        chunk_size or CHUNK_SIZE,
        causal,
        segment_ids,
        eps,
    )
    _refuse(impl, x, form, chunk_size)
    if causal and q.shape[2] == 0:
        out, last = v.new_zeros(*q.shape[:3], v.shape[3]), state
    else:
        with as_given(q):
            if impl == "triton":
                out, last = run_triton(x, Fused(feature_map, feature_scale, real), chunk_size)
            else:
                out, last = _RUN[form, impl](x)
    return AttentionOutput(out, last if return_state else None)


def choose_impl(
    form: str,
    q: Tensor | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    causal: bool = True,
    chunk_size: int | None = None,
) -> tuple[str, str]:
    """Pick the implementation for ``impl="auto"`` and say why; without tensors, one for any.

    Args:
        form: As in :func:`linear_attention`.
        q: Queries.
        k: Keys.
        v: Values.
        causal: As there.
        chunk_size: C, if one is asked for.
    """
    if form == "parallel":
        return "reference", "the parallel form is there to compare with"
    if q is None or k is None or v is None:
        return "torch", "it runs on every device"
    if q.device.type != "cuda" and form == "recurrent":
        return "torch", "the step of a token is torch's"
    if q.device.type != "cuda":
        reasons = cpp_reasons(q, form=form, causal=causal, chunk_size=chunk_size)
        return ("torch", f"cpp cannot: {'; '.join(reasons)}") if reasons else ("cpp", COMPILED)
    reasons = triton_reasons(q, k, v, form=form, causal=causal)
    if reasons:
        return "torch", f"triton cannot: {'; '.join(reasons)}"
    return "triton", "it is made for this GPU"


def map_features(q: Tensor, k: Tensor, fused: Fused) -> tuple[Tensor, Tensor]:
    """Apply the named feature map to queries and keys, and clear the features of padding."""
    if fused.name == "exp":
        q, k = exp_queries(q, fused.scale), exp_keys(k, fused.scale)
    elif fused.name != "identity":
        phi = {"elu+1": elu_plus_one, "relu": relu}[fused.name]
        q, k = phi(q), phi(k)
    if fused.real is not None:
        k = k.masked_fill(~fused.real[:, None, :, None], 0)
    return q, k


def _refuse(impl: str, x: LinearInputs, form: str, chunk_size: int | None) -> None:
    """Raise ``UnsupportedError`` if the named implementation cannot run a call."""
    if impl == "triton":
        refuse_triton(x, form)
    if impl != "cpp":
        return
    reasons = cpp_reasons(x.q, form=form, causal=x.causal, chunk_size=chunk_size)
    if reasons:
        raise UnsupportedError(f"impl='cpp' cannot run: {'; '.join(reasons)}.")


def _compiled(x: LinearInputs) -> Result:
    return _chunked(x, compiled=True)


def _chunked(x: LinearInputs, compiled: bool = False) -> Result:
    """Take the tokens chunk by chunk, with a backward pass of its own."""
    if not x.causal:
        return everywhere(x)
    if x.k.shape[2] == 1:
        return step(x)
    out, kv, z = linear_chunk(
        x.q,
        x.k,
        x.v,
        x.log_decay,
        *x.state,
        x.segment_ids,
        x.scale,
        x.normalize,
        x.eps,
        x.chunk_size,
        compiled,
    )
    return out, LinearState(kv, z)


def _one_chunk(x: LinearInputs) -> Result:
    """Take all tokens as one chunk."""
    return _chunked(x._replace(chunk_size=max(x.k.shape[2], 1)))


_RUN: dict[tuple[str, str], Callable[[LinearInputs], Result]] = {
    ("parallel", "reference"): dense,
    ("parallel", "torch"): _one_chunk,
    ("recurrent", "reference"): recurrent,
    ("recurrent", "torch"): recurrent,
    ("chunk", "reference"): lambda x: dense_chunks(x) if x.causal else dense(x),
    ("chunk", "torch"): _chunked,
    ("recurrent", "cpp"): _compiled,
    ("chunk", "cpp"): _compiled,
}
FORMS = tuple(dict.fromkeys(form for form, _ in _RUN))
IMPLS = (*dict.fromkeys(impl for _, impl in _RUN), "triton")
FEATURE_MAPS = ("identity", "elu+1", "relu", "exp")  # that kernels apply on the way


def _check_options(
    form: str, impl: str, chunk_size: int | None, causal: bool, feature_map: str
) -> None:
    """Refuse what no implementation can do, before anything runs."""
    if form not in FORMS:
        raise UnsupportedError(
            f"linear_attention has no form {form!r}.{did_you_mean(form, FORMS)} "
            f"It has {', '.join(FORMS)}."
        )
    if impl not in ("auto", *IMPLS):
        raise UnsupportedError(
            f"linear_attention has no impl {impl!r}.{did_you_mean(impl, IMPLS)} "
            f"It has auto, {', '.join(IMPLS)}."
        )
    if not causal and form == "recurrent":
        raise UnsupportedError(
            "form='recurrent' takes tokens in order and cannot see the later ones; "
            "with causal=False use form='chunk'."
        )
    if feature_map not in FEATURE_MAPS:
        raise UnsupportedError(
            f"linear_attention applies no feature map {feature_map!r}."
            f"{did_you_mean(feature_map, FEATURE_MAPS)} It applies {', '.join(FEATURE_MAPS)}; "
            "apply others to q and k before."
        )
    if chunk_size is not None and (type(chunk_size) is not int or chunk_size < 1):
        raise UnsupportedError(
            f"chunk_size counts tokens and must be an integer of at least 1, got {chunk_size!r}; "
            f"None picks one."
        )
