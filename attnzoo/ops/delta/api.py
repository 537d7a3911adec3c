r"""The delta rule: a state that overwrites what it holds for a key, with or without decay.

Computes :math:`S_t = (I - \beta_t k_t k_t^T)\, e^{g_t} S_{t-1} + \beta_t k_t v_t^T` and
:math:`o_t = s\, q_t S_t`. The state decays first; then the value that it holds for the key moves
towards the new value by :math:`\beta_t`, and then the query reads it. With keys of norm 1, a beta
of 1 replaces the value. Without a decay this is DeltaNet, with a decay per token Gated DeltaNet,
and with a decay per key channel Kimi Delta Attention (KDA).

T tokens take O(T C D + T D E) time, and some states and chunks of memory beyond the results. One
token takes the step of decoding, an op of its own in the registry of implementations,
``delta_step``: O(D E).

Sources: Schlag et al., 2021, arXiv:2102.11174 (the rule in attention); Yang et al., 2024,
arXiv:2406.06484 (the chunk form), arXiv:2412.06464 (decay per token); Kimi Team, 2025,
arXiv:2510.26692 (decay per channel).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnzoo.contract.context_parallel import (
    SequenceShard,
    clear_finished_sequences,
    gather_from_earlier_ranks,
    reset_new_sequences,
)
from attnzoo.contract.implementation import (
    CPP,
    TORCH,
    Implementation,
    register_implementation,
    select,
    select_if_supported,
)
from attnzoo.contract.sequences import Sequences
from attnzoo.contract.states import AttentionOutput, DeltaState, run_on_slots
from attnzoo.contract.validation import (
    check_log_decay,
    check_qkv,
    check_sequences,
    check_shape,
    check_shard,
    check_size,
    check_state_field,
    empty_output,
)
from attnzoo.errors import UnsupportedError
from attnzoo.ops.delta.common import DeltaInputs, normalized, on_rows
from attnzoo.ops.delta.cpu.delta import cpp_reasons, run_cpp, run_step_cpp
from attnzoo.ops.delta.reference import run_reference
from attnzoo.ops.delta.torch import run_chunks, step
from attnzoo.ops.fla import FLA, delta_reasons, delta_verdict, run_delta
from attnzoo.runtime.kernel_calls import autocast_disabled, state_dtype, widen


def delta_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    sequences: Sequences | None = None,
    log_decay: Tensor | None = None,
    scale: float | None = None,
    normalize_qk: bool = False,
    impl: str = "auto",
    state: DeltaState | None = None,
    return_state: bool = False,
    chunk_size: int | None = None,
    shard: SequenceShard | None = None,
    reuse_state: bool = False,
    slots: Tensor | None = None,
) -> AttentionOutput:
    r"""Compute attention through a state that the delta rule updates, in chunks.

    One token takes the step that decoding takes. The state and its gradients are float32, or
    float64 for float64 inputs. Heads may be grouped: there is one state per *key* head, and keys
    and values are not repeated.

    Args:
        q: Queries, ``[B, H, T, D]``.
        k: Keys, ``[B, Hkv, T, D]``; H is a multiple of Hkv. Their norm should be at most 1 (see
            ``normalize_qk``): with :math:`\beta \|k\|^2 > 2` the state grows without bound.
        v: Values, ``[B, Hkv, T, E]``.
        beta: Write strengths, ``[B, Hkv, T]``: in (0, 1), or in (0, 2), which gives the
            transition matrix negative eigenvalues.
        sequences: The sequences of one row, B = 1, which do not see each other; there is a state
            for each. ``None``: each row is a sequence.
        log_decay: Natural logarithm of the decay at each token, at most 0: ``[Hkv]`` (constant per
            head), ``[B, Hkv, T]`` (per token) or ``[B, Hkv, T, D]`` (per key channel). No value
            overflows or cancels; minus infinity sets the state to 0.
        scale: Multiplies q; ``None`` means 1.
        normalize_qk: Divide each query and key by :math:`\sqrt{\|x\|^2 + 10^{-6}}`.
        impl: ``"cpp"`` (CPUs; forward and backward pass), ``"fla"`` (16 bits, GPUs with
            flash-linear-attention), ``"torch"`` (every device), ``"reference"`` (the recurrence and
            autograd), or ``"auto"``, which selects the fastest one that supports the call;
            ``"fla"`` only after its first call agreed with torch. A named implementation is never
            replaced.
        state: The state after the earlier tokens; ``None`` starts a sequence. Gradients flow
            through it.
        return_state: Whether to return the state after the last token.
        chunk_size: C, in tokens; ``None`` picks one. T need not be a multiple. ``"cpp"`` takes at
            most 16.
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
        >>> q, k, v = torch.randn(3, 1, 4, 1000, 8)
        >>> beta = torch.rand(1, 4, 1000)
        >>> attnzoo.ops.delta_attention(q, k, v, beta, normalize_qk=True).out.shape
        torch.Size([1, 4, 1000, 8])
    """
    if chunk_size is not None:
        check_size("chunk_size", chunk_size)
    _check_inputs(q, k, v, beta, sequences, slots)
    x = DeltaInputs(
        q=q,
        k=k,
        v=v,
        beta=beta,
        log_decay=log_decay,
        state=state,
        scale=1.0 if scale is None else float(scale),
        chunk_size=chunk_size,
        normalize=normalize_qk,
        sequences=sequences,
        return_state=return_state,
        reuse_state=reuse_state and not torch.is_grad_enabled(),
        slots=slots,
    )
    with autocast_disabled(q.device):
        return run_delta_attention(x, impl, shard)


def run_delta_attention(
    x: DeltaInputs, impl: str = "auto", shard: SequenceShard | None = None
) -> AttentionOutput:
    """Compute :func:`delta_attention` of tokens that fit each other, as those of a backend do.

    Decays and a state are checked here: a gate or an earlier call has made them. Autocast is
    disabled by the caller.

    Args:
        x: Queries, keys, values and options.
        impl: As in :func:`delta_attention`.
        shard: See impl.
    """
    if x.log_decay is not None:
        check_log_decay(x.log_decay, x.k.shape, x.k.device, causal=True)
        if x.log_decay.dim() == 1:  # its gradient sums all tokens
            x = x._replace(log_decay=widen(x.log_decay))
    if (state := x.state) is not None:
        batch = x.k.shape[0] if x.sequences is None else x.sequences.count
        batch = batch if x.slots is None else state.kv.shape[0]
        shape = (batch, x.k.shape[1], x.k.shape[3], x.v.shape[3])
        check_state_field("state.kv", state.kv, shape, x.q.device)
        if state.kv.dtype != (dtype := state_dtype(x.q, x.k, x.v)):
            x = x._replace(state=DeltaState(state.kv.to(dtype)), reuse_state=False)
    if shard is not None:
        check_shard(shard, x.state)
        x = normalized(x)
        x = x._replace(state=_state_from_earlier_ranks(x, shard))
    found = None
    if x.q.shape[2] == 1 and x.sequences is None:
        step = x if x.state is not None else x._replace(state=x.first_state())
        found = select_if_supported("delta_step", step, impl)
        x = step if found or x.slots is not None else x
    chosen, choice = found or select("delta_attention", x, impl)
    if _has_no_token(x):
        parameters = (x.beta,) if x.log_decay is None else (x.beta, x.log_decay)
        out = empty_output(x.q, x.k, x.v, *parameters)
        last: DeltaState | None = x.first_state() if x.return_state else None
    else:
        out, last = chosen.run(x) if found or x.slots is None else run_on_slots(x, chosen.run)
    return AttentionOutput(out, last if x.return_state else None, None, choice)


def _check_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    sequences: Sequences | None,
    slots: Tensor | None,
) -> None:
    """Raise ``UnsupportedError`` for tensors that do not fit each other."""
    check_qkv(q, k, v)
    if q.shape[2] != k.shape[2]:
        raise UnsupportedError(
            f"delta_attention needs queries and keys of the same tokens, got {q.shape[2]} queries "
            f"and {k.shape[2]} keys; pass earlier tokens as state=."
        )
    check_shape("beta", beta, tuple(k.shape[:3]), "B, Hkv, T", q.device)
    check_sequences(sequences, slots, q, k)


def _state_from_earlier_ranks(x: DeltaInputs, shard: SequenceShard) -> DeltaState:
    r"""Return the state over the tokens of all earlier ranks, from this rank's inputs.

    Over a shard, the recurrence is the affine map :math:`S \mapsto P S + Q`: P is the product of
    the tokens' transition matrices, and Q the state from zero. A rank computes both in one pass, as
    the state of D + E value channels, of which D start at the identity and are written nothing. It
    sends D (D + E) numbers per key head, whatever T is. Gradients flow back to the ranks that the
    tokens are on.
    """
    k, v, beta, log_decay = x.k, x.v, x.beta, x.log_decay
    if shard.layout is not None and log_decay is not None and log_decay.dim() == 1:
        log_decay = log_decay[None, :, None].expand(k.shape[:3])  # none at padding
    log_decay = log_decay if log_decay is None or log_decay.dim() == 1 else shard.rows(log_decay)
    k, v, beta = (shard.rows(y) for y in (k, v, beta))
    k = clear_finished_sequences(k, shard, 0)
    size, width = k.shape[3], v.shape[3]
    eye = torch.eye(size, dtype=x.state_dtype, device=k.device).expand(*k.shape[:2], -1, -1)
    first = DeltaState(pad(eye, (width, 0)))
    _, after = run_chunks(
        DeltaInputs(k, k, pad(v, (0, size)), beta, log_decay, first, x.scale, x.chunk_size)
    )
    assert after is not None
    last, transition = after.kv.split([width, size], 3)
    if (starts := shard.segment_starts()) is not None:
        ended = starts[0][:, shard.rank] | starts[1][:, shard.rank]
        transition = transition.masked_fill(ended[:, None, None, None], 0)
    total = torch.zeros_like(last)
    for other, other_transition in gather_from_earlier_ranks([last, transition], shard):
        total = other_transition @ total + other
    return shard.states(DeltaState(reset_new_sequences(total, shard)), x.sequences)


def _has_no_token(x: DeltaInputs) -> bool:
    """Return whether no sequence has a token, or there is no sequence."""
    sequences = x.sequences
    if 0 in x.k.shape:
        return True
    return sequences is not None and 0 in (sequences.count, sequences.longest)


# -- implementations -------------------------------------------------------------------------------

register_implementation(
    Implementation(
        op="delta_attention",
        **CPP,
        run=run_cpp,
        reasons=cpp_reasons,
        form="chunk form",
        step=run_step_cpp,
        step_reasons=cpp_reasons,
    ),
    Implementation(
        op="delta_attention",
        **FLA,
        run=run_delta,
        reasons=delta_reasons,
        verdict=delta_verdict,
    ),
    Implementation(
        op="delta_attention",
        **TORCH,
        run=on_rows(run_chunks),
        form="chunk form",
        step=step,
    ),
    Implementation(op="delta_attention", name="reference", run=on_rows(run_reference)),
)
