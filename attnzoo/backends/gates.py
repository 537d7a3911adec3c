"""Gates as modules, with their weights, and the table from which the option takes them by name.

Letters: B batch, Hkv key heads, S tokens, F features of a key, M hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from attnzoo.backends.config import BackendConfig, Geometry
from attnzoo.backends.inputs import AttentionInputs
from attnzoo.errors import ConfigError, did_you_mean
from attnzoo.ops.gates import (
    TEMPERATURE,
    alibi_log_decay,
    channel_log_decay,
    hgrn2_gate,
    keep_at_padding,
    mamba2_gate,
    retnet_log_decay,
    token_log_decay,
)
from attnzoo.ops.linear import linear_attention
from attnzoo.state import AttentionOutput

# Where learned gates start: log sigmoid(2) / 16 = -0.0079, so a step keeps 99.2% and a token
# weighs 1/e of its first weight after 126 others. Further up the memory is longer, but the
# gradient by which it learns to forget is smaller (here 12% of an open gate's). On the embedded
# model (hedgehog, extras alone, 80 steps of Adam) starts at 0, 2 and 5 went from 4.08, 4.37 and
# 4.40 bits per byte to 1.71, 1.77 and 1.84; but 0 is a memory of 23 tokens, beyond which hardly
# any gradient would reach.
GATE_BIAS = 2.0

# The part of the state that a step then loses, for gates that are written in another way
LOSS = math.log1p(math.exp(-GATE_BIAS)) / TEMPERATURE

Attend = Callable[[Tensor, Tensor], AttentionOutput]  # of keys and log decay

RANK = 16  # of the map from hidden states to the channels' gates (arXiv:2312.06635)


class Gate(nn.Module):
    """How much each step keeps of one layer's state.

    Args:
        config: The backend's options.
        geometry: Shape of the layer.
        features: F, the size of a key after the feature map.
    """

    needs_hidden_states: ClassVar[bool] = False
    plain: ClassVar[bool] = True  # a decay of the sums, and nothing else
    writes: ClassVar[bool] = False  # decides what is written, too: ``gated`` changes the keys
    # How many keys share ``far_weight`` beside a window, before training: what a state weighs is
    # bounded by its memory, and without gates by nothing, where the far keys share it themselves
    memory: ClassVar[float] = 1024
    has_weights: ClassVar[bool] = True  # one matrix of weights for all value channels
    forms: ClassVar[tuple[str, ...]] = ("recurrent", "chunk")
    fixed: ClassVar[Mapping[str, str]] = {}  # options that must stay as they are, and why

    def __init__(self, config: BackendConfig, geometry: Geometry, features: int) -> None:
        super().__init__()
        self.geometry = geometry

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        inputs: AttentionInputs,
        options: dict[str, Any],
        attend: Attend | None = None,
    ) -> AttentionOutput:
        """Attend under this gate. Backends call this, so that hooks on the module run.

        Args:
            q: Queries after the feature map, ``[B, H, T, F]``, float32 or wider; before it where
                ``options`` name it.
            k: Keys, ``[B, Hkv, S, F]``, likewise, zero in padding.
            inputs: What the backend was given.
            options: What the op is told, as by ``RecurrentBackend.op_options``.
            attend: Takes keys and log decay in place of the op; given to plain gates only.
        """
        if options.get("feature_map"):  # k is still to be mapped: only its shape is of use
            of = k.new_zeros((), dtype=torch.promote_types(k.dtype, torch.float32)).expand(k.shape)
            log_decay = self.log_decay(of, inputs.hidden_states)
        else:
            k, log_decay = self.gated(k, inputs.hidden_states)
        if inputs.mask.padding is not None:
            log_decay = keep_at_padding(log_decay, inputs.mask.padding)
        if attend is not None:
            return attend(k, log_decay)
        return linear_attention(q, k, inputs.v, log_decay=log_decay, **options)

    def gated(self, k: Tensor, hidden_states: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return keys and log decay, for gates that decide what is written, too."""
        return k, self.log_decay(k, hidden_states)

    def log_decay(self, k: Tensor, hidden_states: Tensor | None) -> Tensor:
        """Return natural logarithms, ``[Hkv]``, ``[B, Hkv, S]`` or ``[B, Hkv, S, F]``.

        Args:
            k: Keys after the feature map, ``[B, Hkv, S, F]``, float32 or wider, as is the result.
            hidden_states: ``[B, S, M]``, given where the gate needs them.
        """
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Give the weights their initial values."""


G = TypeVar("G", bound="type[Gate]")
GATES: dict[str, type[Gate]] = {}


def register_gate(name: str) -> Callable[[G], G]:
    """Class decorator: make a gate available as ``gate=name``, which no other may hold."""

    def add(cls: G) -> G:
        owner = GATES.setdefault(name, cls)
        if owner is not cls:
            raise ValueError(
                f"gate {name!r} belongs to {owner.__module__}.{owner.__qualname__}; "
                f"register {cls.__qualname__} under another name"
            )
        return cls

    return add


def get_gate(name: str) -> type[Gate]:
    """Return the gate called ``name``.

    Raises:
        ConfigError: No gate has this name.
    """
    if name in GATES:
        return GATES[name]
    raise ConfigError(
        f"No gate is called {name!r}.{did_you_mean(name, GATES)} Available: {', '.join(GATES)}."
    )


@register_gate("retnet")
class RetNetGate(Gate):
    """A fixed decay per key head, from 1/32 of the state a token for head 0 (arXiv:2307.08621).

    Computed in every call, not stored: nothing to load, to cast to 16 bits or to lose.
    """

    def log_decay(self, k: Tensor, hidden_states: Tensor | None) -> Tensor:
        """Return the same for all tokens, ``[Hkv]``."""
        return retnet_log_decay(k.shape[1], device=k.device, dtype=k.dtype)


@register_gate("alibi")
class AlibiGate(Gate):
    """ALiBi's slopes as decays per key head (arXiv:2108.12409).

    Exactly its bias where the kernel is an exponential; the slopes are those of the key heads.
    """

    def log_decay(self, k: Tensor, hidden_states: Tensor | None) -> Tensor:
        """Return the same for all tokens, ``[Hkv]``."""
        return alibi_log_decay(k.shape[1], device=k.device, dtype=k.dtype)


class LearnedGate(Gate):
    """A gate with weights that apply to the hidden states."""

    needs_hidden_states = True

    def __init__(self, config: BackendConfig, geometry: Geometry, features: int) -> None:
        super().__init__(config, geometry, features)
        # A layer without a hidden size is refused; until then its weights need some shape
        self.hidden_size = geometry.hidden_size or 1


@register_gate("gated_retention")
class GatedRetentionGate(LearnedGate):
    """One decay per token and key head (arXiv:2405.05254)."""

    def __init__(self, config: BackendConfig, geometry: Geometry, features: int) -> None:
        super().__init__(config, geometry, features)
        heads = geometry.num_key_heads
        self.weight = nn.Parameter(torch.empty(heads, self.hidden_size))
        self.bias = nn.Parameter(torch.empty(heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start with the same long memory for every token."""
        nn.init.zeros_(self.weight)
        nn.init.constant_(self.bias, GATE_BIAS)

    def log_decay(self, k: Tensor, hidden_states: Tensor | None) -> Tensor:
        """Return one per token, ``[B, Hkv, S]``."""
        assert hidden_states is not None
        return token_log_decay(hidden_states, self.weight, self.bias)


class LowRankGate(LearnedGate):
    """A gate per key channel, of low rank in the hidden states."""

    start: ClassVar[float] = GATE_BIAS

    def __init__(self, config: BackendConfig, geometry: Geometry, features: int) -> None:
        super().__init__(config, geometry, features)
        heads = geometry.num_key_heads
        self.down = nn.Parameter(torch.empty(RANK, self.hidden_size))
        self.up = nn.Parameter(torch.empty(heads * features, RANK))
        self.bias = nn.Parameter(torch.empty(heads, features))
        LowRankGate.reset_parameters(self)

    def reset_parameters(self) -> None:
        """Start with the same long memory for every token.

        With ``up`` at zero, ``down`` does not show in the first output, but it must not be zero
        too, for then neither would have a gradient.
        """
        nn.init.eye_(self.down)
        nn.init.zeros_(self.up)
        nn.init.constant_(self.bias, self.start)


@register_gate("gla")
class GLAGate(LowRankGate):
    """One decay per token and key channel, of low rank in the hidden states (arXiv:2312.06635)."""

    def log_decay(self, k: Tensor, hidden_states: Tensor | None) -> Tensor:
        """Return one per token and feature, ``[B, Hkv, S, F]``."""
        assert hidden_states is not None
        return channel_log_decay(hidden_states, self.down, self.up, self.bias)


@register_gate("mamba2")
class Mamba2Gate(LearnedGate):
    """A step per token and key head, by which it forgets and writes (arXiv:2405.21060)."""

    writes = True
    memory = 1  # a state weighs what it forgets

    def __init__(self, config: BackendConfig, geometry: Geometry, features: int) -> None:
        super().__init__(config, geometry, features)
        heads = geometry.num_key_heads
        self.weight = nn.Parameter(torch.empty(heads, self.hidden_size))
        self.bias = nn.Parameter(torch.empty(heads))
        self.log_rate = nn.Parameter(torch.empty(heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start with the same small step for every token."""
        nn.init.zeros_(self.weight)
        nn.init.constant_(self.bias, math.log(math.expm1(LOSS)))
        nn.init.zeros_(self.log_rate)

    def gated(self, k: Tensor, hidden_states: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return keys times their step, and a log decay per token, ``[B, Hkv, S]``."""
        assert hidden_states is not None
        log_decay, step = mamba2_gate(hidden_states, self.weight, self.bias, self.log_rate)
        return k * step.unsqueeze(-1), log_decay


@register_gate("hgrn2")
class HGRN2Gate(LowRankGate):
    """One decay per token and key channel, bounded from below, that also writes: 1 less the decay.

    HGRN-2 has no keys beside 1 - f (arXiv:2404.07904). A swapped layer has, and would lose what it
    learned: 1 - f multiplies its features, and where those are ones it is HGRN-2 itself.
    """

    writes = True
    memory = 1  # a state weighs what it forgets

    start = math.log(0.5 / LOSS - 1)  # beside a bound of 1/2, where half of the range is left

    def __init__(self, config: BackendConfig, geometry: Geometry, features: int) -> None:
        super().__init__(config, geometry, features)
        self.bound = nn.Parameter(torch.empty(geometry.num_key_heads, features))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start with the same long memory for every token, and a bound of 1/2."""
        super().reset_parameters()
        nn.init.zeros_(self.bound)

    def gated(self, k: Tensor, hidden_states: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return keys times 1 - f, and the log of f, ``[B, Hkv, S, F]`` both."""
        assert hidden_states is not None
        log_decay, write = hgrn2_gate(hidden_states, self.down, self.up, self.bias, self.bound)
        return k * write, log_decay
