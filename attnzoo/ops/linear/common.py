"""Inputs and feature maps that all implementations of linear attention share.

Other letters: N rows of a matrix, F decays per token (1 or D) or features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from attnzoo.contract.sequences import Sequences
from attnzoo.contract.states import LinearState, MatrixState, StabilizedState
from attnzoo.contract.validation import check_shape, check_state_field, empty_output
from attnzoo.errors import UnsupportedError, did_you_mean
from attnzoo.ops.features.functional import (
    LEARNED,
    NAMES,
    MapWeights,
    map_features,
    num_features,
)
from attnzoo.runtime.kernel_calls import autocast_disabled, state_dtype

CHUNK_SIZE = 64  # tokens per chunk, unless the call sets it

# The output, and the state after the last token of each sequence, None if it is not requested
Result = tuple[Tensor, LinearState | None]


class LinearInputs(NamedTuple):
    """Inputs of :func:`attnzoo.ops.linear.api.linear_attention`, checked and complete.

    With ``sequences``, B is 1 for tokens and S, the number of sequences, for states.
    """

    q: Tensor  # [B, H, T, D]
    k: Tensor  # [B, Hkv, S, D]
    v: Tensor  # [B, Hkv, S, E]
    log_decay: Tensor | None  # [Hkv], [B, Hkv, S] or [B, Hkv, S, D]
    state: LinearState | None  # before the first token; None: zeros
    causal: bool
    normalize: bool
    scale: float
    eps: float
    chunk_size: int | None
    feature_map: str  # still to be applied to q and k
    feature_scale: float
    map_weights: MapWeights | None = None  # of a learned map
    sequences: Sequences | None = None  # of the one row; None: each row is a sequence
    return_state: bool = True  # if not, the returned state may be None
    reuse_state: bool = False  # whether the tensors of the state may be overwritten
    slots: Tensor | None = None  # of one token: [B], row of each in the state, -1 for no token
    query_sequences: Sequences | None = None  # if queries are other tokens than keys

    @property
    def state_dtype(self) -> torch.dtype:
        """The dtype of all sums."""
        return state_dtype(self.q, self.k, self.v)

    def first_state(self) -> LinearState:
        """Return the state before the first token."""
        if self.state is not None:
            return self.state
        batch = self.k.shape[0] if self.sequences is None else self.sequences.count
        features = num_features(self.k, self.feature_map, self.map_weights)
        shape = batch, self.k.shape[1], features, self.v.shape[3]
        kv = torch.zeros(shape, dtype=self.state_dtype, device=self.v.device)
        return LinearState(kv, kv.new_zeros(shape[:3]))

    def empty_output(self) -> Tensor:
        """Return the output of an empty call, whose gradients are zeros."""
        return empty_output(self.q, self.k, self.v, self.log_decay, *(self.map_weights or ()))

    def rows(self) -> LinearInputs:
        """Return features in one row a sequence, with zeros after its end, which change no sum."""
        sequences, log_decay = self.sequences, self.log_decay
        if sequences is None:
            return map_inputs(self)
        if log_decay is not None and log_decay.dim() == 1:
            log_decay = log_decay[None, :, None].expand(self.k.shape[:3])
        k, v = sequences.to_rows(self.k), sequences.to_rows(self.v)
        q = (self.query_sequences or sequences).to_rows(self.q)
        decays = None if log_decay is None else sequences.to_rows(log_decay)
        x = self._replace(q=q, k=k, v=v, log_decay=decays, sequences=None)
        if x.feature_map == "identity":
            return x
        x = map_inputs(x)  # the features of a zero key are not zero
        return x._replace(k=torch.where(sequences.inside_rows()[:, None, :, None], x.k, 0))

    def tokens(self, start: int, stop: int) -> LinearInputs:
        """Return the inputs of tokens ``start`` to ``stop`` of rows."""
        assert self.sequences is None
        log_decay = self.log_decay
        if log_decay is not None and log_decay.dim() > 1:
            log_decay = log_decay[:, :, start:stop]
        q, k, v = (x[:, :, start:stop] for x in (self.q, self.k, self.v))
        return self._replace(q=q, k=k, v=v, log_decay=log_decay)


def on_rows(run: Callable[[LinearInputs], Result]) -> Callable[[LinearInputs], Result]:
    """Return an implementation for rows as one for sequences too; it gets features."""

    def run_rows(x: LinearInputs) -> Result:
        with autocast_disabled(x.q.device):
            out, state = run(x.rows())
            if sequences := x.query_sequences or x.sequences:
                out = sequences.to_row(out, x.q.shape[2])
        return out, state

    return run_rows


class StepGate(NamedTuple):
    """Inputs of one token of mLSTM or RWKV-6 besides its decay, in the dtype of the state."""

    bonus: Tensor | None = None  # RWKV-6, [Hkv, D]: multiplies the key that its own query reads
    log_input: Tensor | None = None  # mLSTM, [B, Hkv]: logarithm of the weight of the key
    m: Tensor | None = None  # mLSTM, [B, Hkv]: logarithm of the largest weight so far


def log_decay_per_token(log_decay: Tensor, k: Tensor) -> Tensor:
    """Return log decays of any accepted shape as ``[B, Hkv, S, F]``."""
    if log_decay.dim() == 1:
        log_decay = log_decay[None, :, None].expand(k.shape[:3])
    return log_decay if log_decay.dim() == 4 else log_decay.unsqueeze(3)


AnyState = LinearState | StabilizedState | MatrixState


def check_state(
    kind: type[AnyState], state: AnyState, k: Tensor, v: Tensor, batch: int | None = None
) -> None:
    """Raise ``UnsupportedError`` if a state is not of a kind, or does not fit keys and values.

    ``batch`` is the number of states, if it is not that of rows.
    """
    if len(state) != len(kind._fields):
        raise UnsupportedError(
            f"state must be a {kind.__name__} of {', '.join(kind._fields)}, got "
            f"{type(state).__name__} of length {len(state)}; pass the state that the same op "
            "returned."
        )
    rows, heads, _, size = k.shape
    batch = rows if batch is None else batch
    shape = (batch, heads, size, v.shape[3])
    check_state_field("state.kv", state[0], shape, k.device)
    check_state_field("state.k", state[1], shape if kind is MatrixState else shape[:3], k.device)
    if len(state) == 3:
        check_state_field("state.m", state[2], shape[:2], k.device)


# -- feature maps that implementations apply -------------------------------------------------------


def check_feature_map(name: str, weights: MapWeights | None, q: Tensor, k: Tensor) -> None:
    """Raise ``UnsupportedError`` if the map is unknown, or its weights do not fit q and k."""
    if name not in NAMES:
        raise UnsupportedError(
            f"linear_attention has no feature map {name!r}.{did_you_mean(name, NAMES)} "
            f"It has {', '.join(NAMES)}; apply others to q and k before the call."
        )
    if (weights is None) == (name in LEARNED):
        raise UnsupportedError(
            f"feature_map={name!r} needs map_weights."
            if weights is None
            else f"feature_map={name!r} has no weights; leave map_weights out, or take one "
            f"of {', '.join(LEARNED)}."
        )
    if weights is None:
        return
    size, learned = q.shape[3], LEARNED[name]
    rows = size if learned.is_residual or weights.k.dim() != 3 else weights.k.shape[1]
    heads, key_heads, device = q.shape[1], k.shape[1], q.device
    check_shape("map_weights.q", weights.q, (heads, rows, size), "H, N, D", device)
    check_shape("map_weights.k", weights.k, (key_heads, rows, size), "Hkv, N, D", device)
    for field, bias, shape in (
        ("map_weights.q_bias", weights.q_bias, (heads, rows)),
        ("map_weights.k_bias", weights.k_bias, (key_heads, rows)),
    ):
        if (bias is not None) != learned.has_bias:
            raise UnsupportedError(
                f"feature_map={name!r} {'has a' if learned.has_bias else 'has no'} bias, and "
                f"{field} is {'missing' if bias is None else 'given'}."
            )
        if bias is not None:
            check_shape(field, bias, shape, "heads, N", device)


def like_features(k: Tensor, name: str, weights: MapWeights | None) -> Tensor:
    """Return a tensor with the shape and dtype of the features of keys; its values are not used."""
    if weights is None:
        return k
    return k.new_zeros(()).expand(*k.shape[:3], num_features(k, name, weights))


def map_inputs(x: LinearInputs) -> LinearInputs:
    """Apply the feature map."""
    if x.feature_map == "identity":
        return x
    options = (x.feature_map, x.feature_scale, x.map_weights)
    q, k = x.q, x.k
    inside = None if x.sequences is None else x.sequences.inside(k.shape[2])
    if inside is not None:  # NaN between sequences would give NaN gradients
        q = torch.where(inside[:, None], q, 0) if q.shape[2] == k.shape[2] else q
        k = torch.where(inside[:, None], k, 0)
    q = map_features(q, *options, of_keys=False)
    k = map_features(k, *options, of_keys=True)
    return x._replace(q=q, k=k, feature_map="identity", map_weights=None)
