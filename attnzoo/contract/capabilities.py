"""What a backend supports, as plain data that its base class, models and tests read."""

from __future__ import annotations

from dataclasses import dataclass, fields

from attnzoo.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a backend supports in its layer.

    Attributes:
        exact: Computes softmax attention, up to rounding.
        causal: Supports causal layers.
        bidirectional: Supports layers that are not causal.
        cross_attention: Supports keys from another sequence than queries.
        sequences: Takes padded and packed rows as one row of sequences (``inputs.sequences``), and
            one token of some rows as ``inputs.slots``, but never padding or segments of a mask.
        packing: Supports segment ids; otherwise packed rows are unpacked for it.
        windowed: Supports the mask's sliding window.
        arbitrary_mask: Supports a mask function.
        additive_bias: Supports a bias on the scores.
        softcap: Supports a soft cap on the scores.
        sinks: Supports attention sinks.
        dropout: Drops single attention weights; otherwise whole keys are dropped.
        recurrent: Takes and returns a state, with which decoding continues.
        reuses_state: May compute one token's state in the tensors that it is given.
        exact_steps: A single new token attends to all cached keys, as in softmax attention.
        state_grows: The state grows with the sequence, slower than its keys.
        state_keeps_keys: The state contains all keys and values, and more.
        state_from_keys: The state depends on keys and values, not on queries.
        zero_state: The size of the state is constant, and zeros are the state of no tokens.
        needs_hidden_states: Computes gates or other weights from hidden states.
        from_hidden_states: What it computes from hidden states, for error messages.
        has_weights: Has one matrix of attention weights per head, for all value channels.
        context_parallel: Supports sequences that are split over ranks.
        needs_full_sequences: Why it does not support context parallelism.
    """

    exact: bool = False
    causal: bool = True
    bidirectional: bool = True
    cross_attention: bool = False
    sequences: bool = False
    packing: bool = False
    windowed: bool = False
    arbitrary_mask: bool = False
    additive_bias: bool = False
    softcap: bool = False
    sinks: bool = False
    dropout: bool = False
    recurrent: bool = False
    reuses_state: bool = False
    exact_steps: bool = False
    state_grows: bool = False
    state_keeps_keys: bool = False
    state_from_keys: bool = False
    zero_state: bool = False
    needs_hidden_states: bool = False
    from_hidden_states: str = "gates"
    has_weights: bool = True
    context_parallel: bool = False
    needs_full_sequences: str = "it needs full sequences on each rank"


def check_declarations(cls: type) -> None:
    """Raise ``ConfigError`` if a class sets capabilities as attributes of its own."""
    names = [field.name for field in fields(Capabilities) if hasattr(cls, field.name)]
    if names:
        given = ", ".join(f"{name}=..." for name in names)
        raise ConfigError(
            f"{cls.__qualname__} sets {', '.join(names)} as a class attribute, which would be "
            f"ignored; declare capabilities = Capabilities({given}), or override "
            "layer_capabilities() if it depends on the options or the layer (from "
            "attnzoo.contract import Capabilities)"
        )
