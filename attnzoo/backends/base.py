"""The contract of a backend, and the table in which backends register themselves.

Letters: B batch, H query heads, Hkv key heads, T queries, S keys, D key size, E value size,
M hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from attnzoo.backends.config import BackendConfig, Geometry
from attnzoo.backends.inputs import AttentionInputs, call_reasons, clear_padding, shape_reasons
from attnzoo.backends.packing import attend_apart
from attnzoo.errors import UnsupportedError
from attnzoo.masks import AttentionMask
from attnzoo.ops.context_parallel import Shard
from attnzoo.state import AttentionOutput

B = TypeVar("B", bound="type[AttentionBackend]")
BACKENDS: dict[str, type[AttentionBackend]] = {}
BUILTIN = {  # name to module, imported on first use; no other class may take these names
    "softmax": "attnzoo.backends.softmax",
    "flash": "attnzoo.backends.flash",
    "linear": "attnzoo.backends.linear",
    "gated_linear": "attnzoo.backends.gated_linear",
    "longformer": "attnzoo.backends.longformer",
    "linformer": "attnzoo.backends.linformer",
    "performer": "attnzoo.backends.performer",
    "reformer": "attnzoo.backends.reformer",
}


def register(name: str) -> Callable[[B], B]:
    """Class decorator: make a backend available as ``name``, which no other may hold."""

    def add(cls: B) -> B:
        if BUILTIN.get(name, cls.__module__) != cls.__module__:
            raise ValueError(
                f"backend name {name!r} belongs to {BUILTIN[name]}; "
                f"register {cls.__qualname__} under another name"
            )
        owner = BACKENDS.setdefault(name, cls)
        if owner is not cls:
            raise ValueError(
                f"backend name {name!r} belongs to {owner.__module__}.{owner.__qualname__}; "
                f"register {cls.__qualname__} under another name"
            )
        cls.name = name
        return cls

    return add


class ImplChoice(NamedTuple):
    """Which implementation the last call ran, and why."""

    impl: str
    reason: str


class AttentionBackend(nn.Module):
    """One mechanism, brought to one attention layer of a model.

    A subclass implements :meth:`attend` and states what it can do. Everything that it does not
    state is refused before ``attend`` runs, so ``attend`` never meets what it cannot honour.
    ``attend`` may rely on checked shapes, and on zeros wherever the mask says padding (queries,
    keys, values and hidden states).

    Args:
        config: The backend's options.
        geometry: Shape of the layer.
    """

    name: ClassVar[str] = ""
    config_class: ClassVar[type[BackendConfig]] = BackendConfig
    impls: ClassVar[tuple[str, ...]] = ("reference", "torch")
    dtypes: ClassVar[frozenset[torch.dtype]] = frozenset(
        {torch.float16, torch.bfloat16, torch.float32, torch.float64}
    )

    exact: ClassVar[bool] = False  # computes softmax attention, up to rounding
    causal: ClassVar[bool] = True
    bidirectional: ClassVar[bool] = True
    cross_attention: ClassVar[bool] = False
    packing: ClassVar[bool] = False  # takes segment ids; otherwise rows are taken apart around it
    windowed: ClassVar[bool] = False  # honours the mask's sliding window
    arbitrary_mask: ClassVar[bool] = False  # honours a mask function
    additive_bias: ClassVar[bool] = False
    softcap: ClassVar[bool] = False
    sinks: ClassVar[bool] = False
    dropout: ClassVar[bool] = False
    recurrent: ClassVar[bool] = False  # takes and returns a state: decoding goes on from it
    exact_steps: ClassVar[bool] = False  # a single new token sees all cached keys, as softmax does
    state_grows: ClassVar[bool] = False  # with the sequence, though by less than its keys
    needs_hidden_states: ClassVar[bool] = False
    has_weights: ClassVar[bool] = True  # one matrix of weights per head, for all value channels
    # takes a share of the rows, while others lie on other processes; else why not
    context_parallel: ClassVar[bool] = False
    needs_whole_rows: ClassVar[str] = "it needs whole rows in one process"

    def __init__(self, config: BackendConfig, geometry: Geometry) -> None:
        super().__init__()
        self.config = config
        self.geometry = geometry
        self.ran: ImplChoice | None = None
        self.shard: Shard | None = None  # set from outside, while rows lie on several processes

    # -- what a backend implements ---------------------------------------------------------------

    def attend(self, inputs: AttentionInputs) -> AttentionOutput:
        """Compute the mechanism; ``out`` is ``[B, H, T, E]`` in the dtype of the values."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Give the extras their initial values: when built, and where a checkpoint lacks them."""

    def share_with(self, earlier: Sequence[AttentionBackend]) -> None:
        """Take over what layers share, given those before this one; once all are built."""

    def layer_reasons(self) -> list[str]:
        """Say why this backend cannot serve its layer, all at once; called when it is built."""
        geometry, reasons = self.geometry, []
        if geometry.cross_attention and not self.cross_attention:
            reasons.append("the layer is cross-attention (it attends within one sequence only)")
        if geometry.causal and not self.causal and not geometry.cross_attention:
            reasons.append("the layer is causal (it is bidirectional only)")
        if not geometry.causal and not self.bidirectional:
            reasons.append("the layer is bidirectional (it is causal only)")
        if geometry.window is not None and not self.windowed:
            reasons.append(
                f"the layer has a sliding window of {geometry.window} tokens, which it would ignore"
            )
        if geometry.softcap is not None and not self.softcap:
            reasons.append(
                f"the layer caps its scores at {geometry.softcap}, which it would ignore"
            )
        if geometry.sinks and not self.sinks:
            reasons.append("the layer has attention sinks, which it would ignore")
        if geometry.position_bias and not self.additive_bias:
            reasons.append("the layer adds a position bias to its scores, which it would ignore")
        return reasons

    def shard_reasons(self) -> list[str]:
        """Say why this layer cannot run on a share of its rows, all at once."""
        reasons = []
        if not self.context_parallel:
            reasons.append(f"the rows lie on several processes ({self.needs_whole_rows})")
        if self.geometry.cross_attention:
            reasons.append("the layer is cross-attention, whose other rows are not in shares")
        if self.geometry.position_bias:
            reasons.append("the layer adds a position bias, which is made for one share only")
        return reasons

    @property
    def keeps_all_keys(self) -> bool:
        """Whether decoding needs all earlier keys and values, so that a KV cache can hold them."""
        return not self.recurrent

    # -- the way in ------------------------------------------------------------------------------

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: AttentionMask | None = None,
        scale: float | None = None,
        state: Any | None = None,
        hidden_states: Tensor | None = None,
        bias: Tensor | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        dropout: float = 0.0,
        return_state: bool = False,
        return_weights: bool = False,
        shard: Shard | None = None,
    ) -> AttentionOutput:
        """Check the inputs, clear what stands in padding, and compute the mechanism.

        Args:
            q: Queries, ``[B, H, T, D]``.
            k: Keys, ``[B, Hkv, S, D]``; with a ``state``, the new keys only.
            v: Values, ``[B, Hkv, S, E]``.
            mask: Which keys are seen; the layer's own causality when ``None``.
            scale: Multiplies query-key products; the layer's own when ``None``.
            state: What an earlier call returned, to go on from.
            hidden_states: ``[B, S, M]``, for backends that compute gates.
            bias: Added to the scores, broadcastable to ``[B, H, T, S]``.
            softcap: Bound on the scores.
            sinks: A logit that takes part in the softmax, per head ``[H]``, or per head and query
                ``[B, H, T, 1]``.
            dropout: Probability with which attention weights are dropped.
            return_state: Whether to return the state after the last token.
            return_weights: Whether to return the effective attention matrix, ``[B, H, T, S]``;
                quadratic.
            shard: The share of the rows that the tokens are, where others lie on other processes.

        Raises:
            UnsupportedError: The backend cannot run these inputs; every reason is given.
        """
        scale = scale if scale is not None else self.geometry.scale
        assert scale is not None
        inputs = AttentionInputs(
            q=q,
            k=k,
            v=v,
            mask=mask if mask is not None else AttentionMask(causal=self.geometry.causal),
            scale=scale,
            state=state,
            hidden_states=hidden_states if self.needs_hidden_states else None,
            bias=bias,
            softcap=softcap,
            sinks=sinks,
            dropout=dropout,
            return_state=return_state,
            shard=shard,
        )
        self.refuse_unsupported(inputs)
        if shard is not None:
            if return_weights:
                raise UnsupportedError(
                    f"{self.geometry.name}: attention weights over rows that lie on several "
                    "processes are nowhere whole; ask for them on one (output_attentions=False)"
                )
            inputs = inputs._replace(mask=shard.mask(inputs.mask))
        inputs = clear_padding(inputs, cross_attention=self.geometry.cross_attention)
        output = self._attend(inputs)
        if return_weights and output.weights is None:
            weights = self.effective_weights(inputs)
            output = output._replace(weights=weights)
            if inputs.dropout > 0:  # they were drawn again: the output is what they give
                output = output._replace(out=_weighted(weights, inputs.v))
        return output

    def refuse_unsupported(self, inputs: AttentionInputs) -> None:
        """Raise with every reason why these inputs cannot run, if there is one."""
        reasons = self.unsupported_reasons(inputs)
        if reasons:
            raise UnsupportedError(
                f"{self.geometry.name}: backend {self.name!r} cannot run this call: "
                + "; ".join(reasons)
                + "."
            )

    def unsupported_reasons(self, inputs: AttentionInputs) -> list[str]:
        """Say why these inputs cannot run, all at once; an empty list means that they can."""
        reasons = shape_reasons(inputs, self.dtypes)
        mask = inputs.mask
        if not inputs.q.ndim == inputs.k.ndim == 4:
            return reasons
        length, keys = inputs.q.shape[2], inputs.k.shape[2]
        if length != keys and not (self.cross_attention or self.keeps_all_keys):
            reasons.append(
                f"{length} queries and {keys} keys are given (it needs as many of each, "
                "and a state for what came before)"
            )
        if inputs.state is not None and mask.segment_ids is not None:
            reasons.append(
                "packed rows cannot go on from a state (run the sequences as rows of a batch)"
            )
        for given, can, what in (
            (
                mask.function is not None,
                self.arbitrary_mask,
                f"the mask is {mask.function_name or 'arbitrary'}",
            ),
            (
                mask.window is not None,
                self.windowed,
                f"the mask has a sliding window of {mask.window}",
            ),
            (inputs.bias is not None, self.additive_bias, "an additive bias is given"),
            (inputs.softcap is not None, self.softcap, f"a soft cap of {inputs.softcap} is given"),
            (inputs.sinks is not None, self.sinks, "attention sinks are given"),
            (
                inputs.dropout > 0,
                self.dropout,
                f"attention dropout of {inputs.dropout} is given (set it to 0 in the config)",
            ),
            (
                inputs.state is not None or inputs.return_state,
                self.recurrent,
                "a state is asked for",
            ),
        ):
            if given and not can:
                reasons.append(f"{what}, which it cannot honour (softmax and flash can)")
        if inputs.q.shape[2] > 1 and not (self.causal if mask.causal else self.bidirectional):
            kind = "causal" if mask.causal else "bidirectional"
            reasons.append(f"the mask is {kind}, and it has no {kind} form")
        if self.needs_hidden_states and inputs.hidden_states is None:
            reasons.append("hidden_states are missing; its gates are computed from them")
        if inputs.shard is not None:
            reasons += self.shard_reasons() + call_reasons(inputs, inputs.shard)
            if inputs.shard.segment_ids is not None and not self.packing:
                reasons.append("packed rows are taken apart, but lie on several processes")
        return reasons

    def effective_weights(self, inputs: AttentionInputs) -> Tensor:
        """Return the matrix that this backend applies to the values, ``[B, H, T, S]``.

        Every mechanism is linear in the values: attending to an identity matrix reads it off.
        """
        if not self.has_weights:
            raise UnsupportedError(
                f"{self.geometry.name}: backend {self.name!r} ({self.extra_repr()}) has no one "
                "matrix of attention weights, for it weighs every value channel differently; "
                "do not ask for weights (output_attentions=False)"
            )
        if inputs.state is not None:
            raise UnsupportedError(
                f"{self.geometry.name}: attention weights over earlier tokens are not kept in a "
                "state; ask for them without a cache (use_cache=False)"
            )
        length = inputs.k.shape[2]
        identity = torch.eye(length, dtype=inputs.v.dtype, device=inputs.v.device)
        values = identity.expand(*inputs.v.shape[:2], length, length)
        return self._attend(inputs._replace(v=values, return_state=False)).out

    def _attend(self, inputs: AttentionInputs) -> AttentionOutput:
        if inputs.mask.segment_ids is not None and not self.packing:
            return attend_apart(self.attend, inputs)
        return self.attend(inputs)

    def record(self, impl: str, reason: str) -> None:
        """Remember which implementation ran; not while compiling, before anything has run."""
        if not torch.compiler.is_compiling():
            self.ran = ImplChoice(impl, reason)

    def extra_repr(self) -> str:
        """Show the options that differ from their defaults."""
        return ", ".join(
            f"{name}={value!r}" for name, value in self.config.changed_options().items()
        )


def _weighted(weights: Tensor, v: Tensor) -> Tensor:
    """Weigh values ``[B, Hkv, S, E]`` by a matrix ``[B, H, T, S]``."""
    return weights @ v.repeat_interleave(weights.shape[1] // v.shape[1], 1)
