"""The base class of all backends, and the decorator that registers a backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, ClassVar, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from attnzoo.contract.by_sequence import attend_to_sequences, unpack_and_attend
from attnzoo.contract.capabilities import Capabilities, check_declarations
from attnzoo.contract.config import BackendConfig, Geometry
from attnzoo.contract.context_parallel import SequenceShard
from attnzoo.contract.inputs import (
    AttentionInputs,
    attend_to_nothing,
    context_parallel_reasons,
    drop_keys,
    sequence_reasons,
    weights_reasons,
    zero_padding,
)
from attnzoo.contract.masks import PLAIN, AttentionMask
from attnzoo.contract.sequences import Sequences
from attnzoo.contract.states import AttentionOutput, ImplChoice, keep_pool
from attnzoo.contract.validation import DTYPES, qkv_reasons, refuse_output
from attnzoo.errors import UnsupportedError, check_registered_class, check_registered_name

B = TypeVar("B", bound="type[AttentionBackend]")
ONLY_IMPLEMENTATION = ImplChoice("reference", "the only implementation")
BACKENDS: dict[str, type[AttentionBackend]] = {}
BUILT_IN_MODULES = "attnzoo.backends"  # a module of it is the backend of its name


def register(name: str) -> Callable[[B], B]:
    """Class decorator: register a backend under a name, which must be free."""
    check_registered_name("register", name)

    def add(cls: B) -> B:
        check_registered_class("register", name, cls, AttentionBackend)
        built_in = f"{BUILT_IN_MODULES}.{name}"
        if cls.__module__ != built_in and name.isidentifier() and find_spec(built_in):
            raise ValueError(
                f"backend name {name!r} belongs to {built_in}; "
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


class AttentionBackend(nn.Module):
    """One mechanism in one attention layer of a model.

    A subclass implements :meth:`attend` and declares its ``capabilities``. The base class refuses
    every call that needs another capability, so ``attend`` receives supported inputs only: shapes
    are valid, and queries, keys, values and hidden states are zero at padding.

    Args:
        config: The backend's options.
        geometry: Shape of the layer.

    Attributes:
        capabilities: What the backend supports. A class declares those of its default options; an
            instance has those of its options and layer, from :meth:`layer_capabilities`.
        ran: The implementation that the last call ran, and why; ``None`` before the first call and
            under ``torch.compile``.
        shard: This rank's part of the sequences under context parallelism, else ``None``.
        no_weight_decay: Names of the parameters that set a decay or a mixture.
        seeded_by_layer: Whether outputs depend on ``geometry.layer``, beyond the saved tensors.
    """

    name: ClassVar[str] = ""
    config_class: ClassVar[type[BackendConfig]] = BackendConfig
    dtypes: ClassVar[frozenset[torch.dtype]] = DTYPES
    capabilities: Capabilities = Capabilities()
    no_weight_decay: ClassVar[tuple[str, ...]] = ()
    seeded_by_layer: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        check_declarations(cls)

    def __init__(self, config: BackendConfig, geometry: Geometry) -> None:
        super().__init__()
        self.config = config
        self.geometry = geometry
        self.capabilities = self.layer_capabilities()
        self.ran: ImplChoice | None = None
        self.shard: SequenceShard | None = None  # set by attnzoo.context_parallel

    # -- implemented by backends -----------------------------------------------------------------

    def attend(self, inputs: AttentionInputs) -> AttentionOutput:
        """Compute the mechanism; ``out`` is ``[B, H, T, E]`` in the dtype of the values.

        ``impl`` of the output is the implementation that ran. A backend with one implementation
        can leave it out.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define attend(inputs)")

    def reset_parameters(self) -> None:
        """Initialise the parameters, on construction and where a checkpoint lacks them."""

    def share_with(self, earlier: Sequence[AttentionBackend]) -> None:
        """Share parameters with the backends of earlier layers; called once all are built.

        Do not define ``__deepcopy__`` for it: PEFT's wrapper around a backend would take it for its
        own, and be lost in a copy of the model. Define it in an object that refers to the layer.
        """

    def layer_capabilities(self) -> Capabilities:
        """Return the capabilities with these options in this layer; those of the class by default.

        Called once, on construction, when ``config`` and ``geometry`` are set.
        """
        return type(self).capabilities

    def layer_reasons(self) -> list[str]:
        """Return every reason why this backend does not support its layer."""
        geometry, can, reasons = self.geometry, self.capabilities, []
        if geometry.cross_attention and not can.cross_attention:
            reasons.append("the layer is cross-attention (it attends within one sequence only)")
        if geometry.causal and not can.causal and not geometry.cross_attention:
            reasons.append("the layer is causal (it is bidirectional only)")
        if not geometry.causal and not can.bidirectional:
            reasons.append("the layer is bidirectional (it is causal only)")
        if geometry.window is not None and not can.windowed:
            reasons.append(
                f"the layer has a sliding window of {geometry.window} tokens, which it would "
                "ignore (config.sliding_window=None removes the window)"
            )
        if (size := geometry.chunk_size) is not None and not can.arbitrary_mask:
            reasons.append(f"the layer attends in chunks of {size} tokens, which it would ignore")
        if geometry.softcap is not None and not can.softcap:
            reasons.append(
                f"the layer caps its scores at {geometry.softcap}, which it would ignore"
            )
        if geometry.sinks and not can.sinks:
            reasons.append("the layer has attention sinks, which it would ignore")
        if geometry.position_bias and not can.additive_bias:
            reasons.append("the layer adds a position bias to its scores, which it would ignore")
        if geometry.own_mask and not can.arbitrary_mask:
            reasons.append(f"{geometry.own_mask}, which it does not support")
        if geometry.last_tokens and can.needs_hidden_states:
            reasons.append(
                "the model may compute only the last tokens in this layer or in one with its "
                "keys, and it needs the hidden states of all tokens"
            )
        if geometry.dropout > 0 or self.config.attention_dropout != "auto":
            reasons += self.dropout_reasons()
        return reasons

    def dropout_reasons(self) -> list[str]:
        """Return every reason why its form of attention dropout is unsupported."""
        if self.dropout_form == "weights" and not self.capabilities.dropout:
            return [
                "attention_dropout='weights' is set, but it does not compute single weights that "
                "could be dropped (leave the option out, which drops whole keys, or set 'off')"
            ]
        return []

    def shard_reasons(self) -> list[str]:
        """Return every reason why this layer does not support context parallelism."""
        reasons = []
        if not self.capabilities.context_parallel:
            why = self.capabilities.needs_full_sequences
            reasons.append(f"it does not support context parallelism ({why})")
        if self.geometry.cross_attention:
            reasons.append(
                "the layer is cross-attention, where context parallelism is unsupported (its keys "
                "are not sharded)"
            )
        if self.geometry.position_bias:
            reasons.append(
                "the layer adds a position bias, where context parallelism is unsupported (the "
                "bias covers one shard only)"
            )
        return reasons

    @property
    def dropout_form(self) -> str:
        """What attention dropout drops: ``"weights"``, ``"keys"``, or nothing, ``"off"``."""
        form = self.config.attention_dropout
        return form if form != "auto" else "weights" if self.capabilities.dropout else "keys"

    @property
    def keeps_all_keys(self) -> bool:
        """Whether decoding needs all earlier keys and values, as a KV cache holds them."""
        return not self.capabilities.recurrent

    @property
    def continues_from_keys(self) -> bool:
        """Whether the latest queries of a sequence and all its keys suffice, without a state."""
        can = self.capabilities
        keeps_keys = can.state_keeps_keys or can.exact  # a window of keys is a state too
        return self.keeps_all_keys or (keeps_keys and can.state_from_keys)

    def empty_state(self, like: Tensor, batch: int = 1) -> Any:
        """Return the states of sequences without tokens.

        Args:
            like: Has the dtype and the device of the keys.
            batch: Number of sequences.

        Raises:
            UnsupportedError: Zeros are not the state of no tokens here (``capabilities``).
        """
        if not self.capabilities.zero_state:
            raise UnsupportedError(
                f"{self.geometry.name}: backend {self.name!r} has no state before the first token"
            )
        geometry, size = self.geometry, self.geometry.head_dim
        shape = batch, geometry.num_key_heads, 1
        with torch.no_grad():
            output = self(
                like.new_zeros(batch, geometry.num_heads, 1, size),
                like.new_zeros(*shape, size),
                like.new_zeros(*shape, geometry.value_dim or size),
                hidden_states=like.new_zeros(batch, 1, geometry.hidden_size or 1),
                return_state=True,
            )
        return type(output.state)(*map(torch.zeros_like, output.state))

    # -- called by models ------------------------------------------------------------------------

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
        shard: SequenceShard | None = None,
        reuse_state: bool = False,
        sequences: Sequences | None = None,
        slots: Tensor | None = None,
    ) -> AttentionOutput:
        """Validate the inputs, set padding to zero, and compute the mechanism.

        Args:
            q: Queries, ``[B, H, T, D]``.
            k: Keys, ``[B, Hkv, S, D]``; with a ``state``, the new keys only.
            v: Values, ``[B, Hkv, S, E]``.
            mask: Which keys each query attends to; ``None`` means the layer's own causality.
            scale: Multiplies query-key products; ``None`` means the layer's own.
            state: The state that an earlier call returned, from which this call continues.
            hidden_states: ``[B, S, M]``, for backends that compute gates.
            bias: Added to the scores, broadcastable to ``[B, H, T, S]``.
            softcap: Soft cap on the scores.
            sinks: A logit per head, ``[H]``, or per head and query, ``[B, H, T, 1]``, that takes
                part in the softmax and has no value.
            dropout: Probability of dropping an attention weight, or all weights of a key of a
                head; the config's ``attention_dropout`` says which.
            return_state: Whether to return the state after the last token.
            return_weights: Whether to return the effective attention matrix, ``[B, H, T, S]``,
                which takes quadratic memory.
            shard: This rank's part of the sequences under context parallelism.
            reuse_state: Whether the tensors of ``state`` may be overwritten by the returned state;
                without gradients.
            sequences: The sequences of one row, B = 1, in place of padding and segments of a mask.
                They do not see each other, and each has a state of its own: ``state`` is ``[S,
                ...]`` before their first tokens, and the returned one after their last.
            slots: For one token of each of B sequences: the row of each in ``state``, which is a
                pool of states, ``[B]`` integers; -1 for no token, whose output is not used. The
                returned state is the pool, which ``reuse_state`` overwrites. There may be gaps
                between its states.

        Raises:
            UnsupportedError: These inputs are unsupported; the message gives every reason.
        """
        scale = scale if scale is not None else self.geometry.scale
        assert scale is not None
        form = self.dropout_form if dropout > 0 else "off"
        inputs = AttentionInputs(
            q=q,
            k=k,
            v=v,
            mask=mask if mask is not None else PLAIN[self.geometry.causal],
            scale=scale,
            state=state,
            hidden_states=hidden_states if self.capabilities.needs_hidden_states else None,
            bias=bias,
            softcap=softcap,
            sinks=sinks,
            dropout=dropout if form == "weights" else 0.0,
            return_state=return_state,
            shard=shard,
            reuse_state=reuse_state and not return_weights and not torch.is_grad_enabled(),
            sequences=sequences,
            slots=slots,
        )
        reasons = self.unsupported_reasons(inputs)
        reasons += self.dropout_reasons() if dropout > 0 else []
        reasons += weights_reasons(inputs) if return_weights else []
        if reasons:
            self._refuse_call(reasons)
        if shard is not None:
            inputs = inputs._replace(mask=shard.mask(inputs.mask))
        if inputs.mask.padding is not None and not self.capabilities.sequences:
            crossed, exact = self.geometry.cross_attention, self.capabilities.exact
            inputs = zero_padding(inputs, crossed=crossed, exact=exact)
        inputs, factors = drop_keys(inputs, dropout) if form == "keys" else (inputs, None)
        is_mapped = torch._C._functorch.peek_interpreter_stack() is not None
        attend = self._attend if is_mapped or 0 in (*q.shape, *k.shape) else self._attend_tokens
        output = attend(inputs)
        if slots is not None and inputs.reuse_state:
            output = keep_pool(state, slots, output)
        return self._with_weights(inputs, output, factors) if return_weights else output

    def _refuse_call(self, reasons: list[str]) -> NoReturn:
        raise UnsupportedError(
            f"{self.geometry.name}: backend {self.name!r} cannot run this call: "
            f"{'; '.join(reasons)}."
        )

    def unsupported_reasons(self, inputs: AttentionInputs) -> list[str]:
        """Return every reason why these inputs are unsupported; empty if they are supported."""
        q, k, mask, can = inputs.q, inputs.k, inputs.mask, self.capabilities
        reasons = qkv_reasons(q, k, inputs.v, mask, self.dtypes)
        if not q.ndim == k.ndim == 4:
            return reasons
        if inputs.sequences is not None or inputs.slots is not None:
            reasons += sequence_reasons(inputs, can)
        length, keys = q.shape[2], k.shape[2]
        if length != keys and not (can.cross_attention or self.continues_from_keys):
            reasons.append(
                f"{length} queries and {keys} keys are given, but it needs as many of each (pass "
                "earlier tokens as a state)"
            )
        if inputs.state is not None and mask.segment_ids is not None:
            reasons.append(
                "packed rows cannot continue from a state (run the sequences as rows of a batch)"
            )
        given = []
        if mask.function is not None and not can.arbitrary_mask:
            given.append(f"the mask is {mask.function_name or 'arbitrary'}")
        if mask.window is not None and not can.windowed:
            given.append(f"the mask has a sliding window of {mask.window}")
        if inputs.bias is not None and not can.additive_bias:
            given.append("an additive bias is given")
        if inputs.softcap is not None and not can.softcap:
            given.append(f"a soft cap of {inputs.softcap} is given")
        if inputs.sinks is not None and not can.sinks:
            given.append("attention sinks are given")
        if (inputs.state is not None or inputs.return_state) and not can.recurrent:
            given.append("a state is requested")
        for what in given:
            reasons.append(f"{what}, which it does not support (softmax and flash do)")
        if length > 1 and not (can.causal if mask.causal else can.bidirectional):
            kind = "causal" if mask.causal else "bidirectional"
            reasons.append(f"the mask is {kind}, which it does not support")
        if can.needs_hidden_states and inputs.hidden_states is None:
            what = can.from_hidden_states
            reasons.append(f"hidden_states are missing, from which it computes {what}")
        elif inputs.hidden_states is not None and self.geometry.hidden_size is not None:
            shape, expected = inputs.hidden_states.shape, (*k.shape[::2], self.geometry.hidden_size)
            if shape != expected:
                reader = can.from_hidden_states
                reasons.append(
                    f"hidden_states have shape {tuple(shape)} ({reader} take {expected})"
                )
        if inputs.shard is not None:
            reasons += self.shard_reasons() + context_parallel_reasons(inputs, inputs.shard)
            if inputs.shard.segment_ids is not None and not (can.packing or can.sequences):
                reasons.append("it does not support packed rows under context parallelism")
        return reasons

    def causal_mask(self, inputs: AttentionInputs) -> AttentionMask:
        """Return the mask, causal for one query of a causal layer, where it may not say so."""
        mask, (length, keys) = inputs.mask, (inputs.q.shape[2], inputs.k.shape[2])
        if mask.causal or not self.geometry.causal or length != 1:
            return mask
        return replace(mask, causal=True, q_offset=keys - 1)

    def _with_weights(
        self, inputs: AttentionInputs, output: AttentionOutput, factors: Tensor | None
    ) -> AttentionOutput:
        """Return the output with its attention matrix, after dropout of weights or keys."""
        weights, groups = output.weights, inputs.q.shape[1] // inputs.v.shape[1]
        if weights is None:
            weights = self.effective_weights(inputs)
            if inputs.dropout > 0:  # the weights have new dropout, which the output must match
                output = output._replace(out=weights @ inputs.v.repeat_interleave(groups, 1))
        if factors is not None:
            columns = factors.transpose(2, 3).repeat_interleave(groups, 1)  # [B, H, 1, S]
            weights = (weights * columns).to(weights.dtype)
        return output._replace(weights=weights)

    def effective_weights(self, inputs: AttentionInputs) -> Tensor:
        """Return the matrix that this backend multiplies the values with, ``[B, H, T, S]``.

        Every mechanism is linear in the values, so its output for the identity is that matrix.
        """
        if not self.capabilities.has_weights:
            raise UnsupportedError(
                f"{self.geometry.name}: backend {self.name!r} ({self.extra_repr()}) has no single "
                "matrix of attention weights, because the weights differ between value channels; "
                "set output_attentions=False"
            )
        if inputs.state is not None:
            raise UnsupportedError(
                f"{self.geometry.name}: a state does not contain the attention weights of earlier "
                "tokens; request weights without a cache (use_cache=False)"
            )
        length = inputs.k.shape[2]
        if length == 0:
            return inputs.v.new_zeros(*inputs.q.shape[:3], 0)
        identity = torch.eye(length, dtype=inputs.v.dtype, device=inputs.v.device)
        values = identity.expand(*inputs.v.shape[:2], length, length)
        return self._attend(inputs._replace(v=values, return_state=False)).out

    def _attend(self, inputs: AttentionInputs) -> AttentionOutput:
        """Run :meth:`attend`, also on empty inputs and packed rows, and set ``ran``."""
        if 0 in (*inputs.q.shape, *inputs.k.shape):
            return attend_to_nothing(self._attend, inputs)
        mapped = torch._C._functorch.peek_interpreter_stack() is not None
        is_traced = not mapped or torch.compiler.is_compiling()
        fields = "" if is_traced else inputs.mask.mapped_fields()
        try:
            return self._attend_tokens(inputs)
        except RuntimeError as error:  # a value is read, or an operator is not mapped
            if not fields:
                raise
            raise UnsupportedError(
                f"{self.geometry.name}: backend {self.name!r} cannot run under torch.vmap with a "
                f"mapped mask ({fields}), whose values decide what it computes. Make the mapped "
                "dimension a part of the batch, or do not map the mask"
            ) from error

    def _attend_tokens(self, inputs: AttentionInputs) -> AttentionOutput:
        """Run :meth:`attend` on tokens."""
        mask, can = inputs.mask, self.capabilities
        if can.sequences and not (mask.padding is None and mask.segment_ids is None):
            is_crossed = inputs.q.shape[2] != inputs.k.shape[2]
            crossed = self.geometry.cross_attention or is_crossed
            output = attend_to_sequences(self._attend, inputs, crossed=crossed)
        elif mask.segment_ids is not None and not (can.packing or can.sequences):
            output = unpack_and_attend(self.attend, inputs)
        else:
            output = self.attend(inputs)
        if not isinstance(output, AttentionOutput):
            refuse_output(self, output)
        if not torch.compiler.is_compiling():
            vars(self)["ran"] = output.impl or ONLY_IMPLEMENTATION  # faster than Module.__setattr__
        return output

    def extra_repr(self) -> str:
        """Return the options that differ from their defaults."""
        return ", ".join(
            f"{name}={value!r}" for name, value in self.config.changed_options().items()
        )
