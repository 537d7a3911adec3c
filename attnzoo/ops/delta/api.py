r"""The delta rule: a state that overwrites what it holds for a key, with or without decay.

Computes :math:`S_t = (I - \beta_t k_t k_t^T)\, e^{g_t} S_{t-1} + \beta_t k_t v_t^T` and
:math:`o_t = s\, q_t S_t`. The state decays first; then the value that it holds for the key moves
towards the new value by :math:`\beta_t`, and then the query reads it. With keys of norm 1, a beta
of 1 replaces the value. Without a decay this is DeltaNet, with a decay per token Gated DeltaNet,
and with a decay per key channel Kimi Delta Attention (KDA).

| form | time | memory beyond the results | used for |
|---|---|---|---|
| ``parallel`` | O(T^2 D) | O(T^2) | comparison |
| ``recurrent`` | O(T D E), T steps | the state | decoding |
| ``chunk`` | O(T C D + T D E) | some states and chunks | training, prefill |

Sources: Schlag et al., 2021, arXiv:2102.11174 (the rule in attention); Yang et al., 2024,
arXiv:2406.06484 (the chunk form), arXiv:2412.06464 (decay per token); Kimi Team, 2025,
arXiv:2510.26692 (decay per channel).
Letters: B batch, H heads, Hkv key heads, T tokens, D key size, E value size, C chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnzoo.contract.context_parallel import SequenceShard
from attnzoo.contract.implementation import Implementation, select
from attnzoo.contract.masks import AttentionMask
from attnzoo.contract.padding import fill_padding, padding_if_any
from attnzoo.contract.states import AttentionOutput, DeltaState, ImplChoice
from attnzoo.contract.validation import check_shard, check_size, empty_output, is_empty_call
from attnzoo.errors import UnsupportedError, did_you_mean
from attnzoo.ops.delta.chunk import run_chunks
from attnzoo.ops.delta.common import NORM_EPS, DeltaInputs, Result
from attnzoo.ops.delta.context_parallel import state_from_earlier_ranks
from attnzoo.ops.delta.cpu.delta import cpp_reasons, run_cpp
from attnzoo.ops.delta.cpu.delta_step import is_step
from attnzoo.ops.delta.reference import run_reference
from attnzoo.ops.delta.step import run_steps, step
from attnzoo.ops.delta.triton.run import run_triton, triton_reasons, triton_verdict
from attnzoo.ops.delta.validation import check_inputs
from attnzoo.ops.linear.common import decay_of_real_tokens, state_dtype
from attnzoo.runtime.autocast import autocast_disabled

FORMS = ("parallel", "recurrent", "chunk")
CAUSAL = AttentionMask(causal=True)


def delta_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    mask: AttentionMask | None = None,
    log_decay: Tensor | None = None,
    scale: float | None = None,
    normalize_qk: bool = False,
    form: str = "chunk",
    impl: str = "auto",
    state: DeltaState | None = None,
    return_state: bool = False,
    chunk_size: int | None = None,
    shard: SequenceShard | None = None,
) -> AttentionOutput:
    r"""Compute attention through a state that the delta rule updates.

    The state and its gradients are float32, or float64 for float64 inputs. Heads may be grouped:
    there is one state per *key* head, and keys and values are not repeated.

    Args:
        q: Queries, ``[B, H, T, D]``.
        k: Keys, ``[B, Hkv, T, D]``; H is a multiple of Hkv. Their norm should be at most 1 (see
            ``normalize_qk``): with :math:`\beta \|k\|^2 > 2` the state grows without bound.
        v: Values, ``[B, Hkv, T, E]``.
        beta: Write strengths, ``[B, Hkv, T]``: in (0, 1), or in (0, 2), which gives the
            transition matrix negative eigenvalues.
        mask: Padding and segments; causal, as is ``None``. A padding token changes no state, and
            its output is 0. Packed segments do not see each other: ``state`` belongs to the first
            segment, and the returned state to the last.
        log_decay: Natural logarithm of the decay at each token, at most 0: ``[Hkv]`` (constant per
            head), ``[B, Hkv, T]`` (per token) or ``[B, Hkv, T, D]`` (per key channel). No value
            overflows or cancels; minus infinity sets the state to 0.
        scale: Multiplies q; ``None`` means 1.
        normalize_qk: Divide each query and key by :math:`\sqrt{\|x\|^2 + 10^{-6}}`.
        form: ``"parallel"``, ``"recurrent"`` or ``"chunk"``; see the table above.
        impl: ``"cpp"`` (CPUs; forward and backward pass), ``"triton"`` (NVIDIA GPUs; the same, for
            every form but ``"parallel"``), ``"torch"`` (every device), ``"reference"`` (the
            recurrence and autograd, whatever the form), or ``"auto"``, which selects the fastest
            one that supports the call; ``"triton"`` only on devices where it passed a check. A
            named implementation is never replaced.
        state: The state after the earlier tokens; ``None`` starts a sequence. Gradients flow
            through it.
        return_state: Whether to return the state after the last token.
        chunk_size: C, in tokens; ``None`` picks one. T need not be a multiple. ``"cpp"`` takes at
            most 16.
        shard: This rank's part of sequences that several ranks hold; not together with ``state``.

    Returns:
        ``out`` as ``[B, H, T, E]`` in the dtype of ``v``; also ``state`` and ``impl``.

    Raises:
        ValueError: Shapes, dtypes or options are not supported; the message says which are.

    Example:
        >>> q, k, v = torch.randn(3, 1, 4, 1000, 8)
        >>> beta = torch.rand(1, 4, 1000)
        >>> attnzoo.ops.delta_attention(q, k, v, beta, normalize_qk=True).out.shape
        torch.Size([1, 4, 1000, 8])
    """
    mask = CAUSAL if mask is None else mask
    check_inputs(q, k, v, beta, log_decay, state, mask)
    _check_options(form, chunk_size)
    check_shard(shard, state)
    padding = padding_if_any(mask.padding)
    if log_decay is not None:
        log_decay = decay_of_real_tokens(log_decay, k, padding)
    dtype = state_dtype(q, k, v)
    if state is None:
        empty = torch.zeros(*k.shape[:2], k.shape[3], v.shape[3], dtype=dtype, device=v.device)
        state = DeltaState(empty)
    if state.kv.dtype != dtype:
        state = DeltaState(state.kv.to(dtype))
    scale = 1.0 if scale is None else float(scale)
    with autocast_disabled(q.device):
        x = DeltaInputs(q, k, v, beta, log_decay, state, mask.segment_ids, form, scale, chunk_size)
        x = x if padding is None else _clear_padding(x, padding)
        chosen, choice = select("delta_attention", IMPLEMENTATIONS, x, impl)
        if normalize_qk and chosen.name == "cpp" and shard is None and is_step(x):
            x = x._replace(normalize=True)
        elif normalize_qk:
            x = x._replace(q=_l2_normalize(x.q.to(dtype)), k=_l2_normalize(x.k.to(dtype)))
        if shard is not None:
            x = x._replace(state=state_from_earlier_ranks(x, shard))
        if is_empty_call(q, k):
            parameters = (beta,) if log_decay is None else (beta, log_decay)
            out, last = empty_output(q, k, v, *parameters), x.state
        else:
            out, last = chosen.run(x)
    choice = ImplChoice(choice.impl, f"{form} form; {choice.reason}")
    return AttentionOutput(out, last if return_state else None, None, choice)


def _check_options(form: str, chunk_size: int | None) -> None:
    """Raise ``UnsupportedError`` for options that no implementation supports."""
    if form not in FORMS:
        raise UnsupportedError(
            f"delta_attention has no form {form!r}.{did_you_mean(form, FORMS)} "
            f"It has {', '.join(FORMS)}."
        )
    if chunk_size is not None:
        check_size("chunk_size", chunk_size)


def _clear_padding(x: DeltaInputs, padding_mask: Tensor) -> DeltaInputs:
    """Set inputs at padding to 0, so that padding tokens neither write nor decay."""
    q, k, v, beta = (fill_padding(each, padding_mask) for each in x[:4])
    return x._replace(q=q, k=k, v=v, beta=beta)


def _l2_normalize(x: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * (norm.square() + NORM_EPS).rsqrt()


# -- implementations -------------------------------------------------------------------------------


def _run_torch(x: DeltaInputs) -> Result:
    """Compute a call in torch; the parallel form is one chunk."""
    tokens = x.k.shape[2]
    if x.form == "recurrent":
        return run_steps(x)
    if x.form == "parallel":
        x = x._replace(chunk_size=tokens)
    return step(x) if tokens == 1 else run_chunks(x)


IMPLEMENTATIONS: tuple[Implementation[DeltaInputs, Result], ...] = (
    Implementation(name="cpp", run=run_cpp, reasons=cpp_reasons, automatic="compiled for this CPU"),
    Implementation(
        name="triton",
        run=run_triton,
        reasons=triton_reasons,
        automatic="compiled for this GPU",
        verdict=triton_verdict,
    ),
    Implementation(name="torch", run=_run_torch, automatic="runs on every device"),
    Implementation(name="reference", run=run_reference),
)
