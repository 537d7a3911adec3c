"""Gates as modules, with their weights, and the table from which the option takes them by name.

Letters: B batch, Hkv key heads, S tokens, F features of a key, M hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, TypeVar

import torch
from torch import Tensor, nn

from attnzoo.backends.config import BackendConfig, Geometry
from attnzoo.errors import ConfigError, did_you_mean
from attnzoo.ops.gates import (
    alibi_log_decay,
    channel_log_decay,
    retnet_log_decay,
    token_log_decay,
)

# Where learned gates start: log sigmoid(2) / 16 = -0.0079, so a step keeps 99.2% and a token
# weighs 1/e of its first weight after 126 others. Further up the memory is longer, but the
# gradient by which it learns to forget is smaller (here 12% of an open gate's). On the embedded
# model (hedgehog, extras alone, 80 steps of Adam) starts at 0, 2 and 5 went from 4.08, 4.37 and
# 4.40 bits per byte to 1.71, 1.77 and 1.84; but 0 is a memory of 23 tokens, beyond which hardly
# any gradient would reach.
GATE_BIAS = 2.0

RANK = 16  # of the map from hidden states to the channels' gates (arXiv:2312.06635)


class Gate(nn.Module):
    """How much each step keeps of one layer's state.

    Args:
        config: The backend's options.
        geometry: Shape of the layer.
        features: F, the size of a key after the feature map.
    """

    needs_hidden_states: ClassVar[bool] = False

    def __init__(self, config: BackendConfig, geometry: Geometry, features: int) -> None:
        super().__init__()
        self.geometry = geometry

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


@register_gate("gla")
class GLAGate(LearnedGate):
    """One decay per token and key channel, of low rank in the hidden states (arXiv:2312.06635)."""

    def __init__(self, config: BackendConfig, geometry: Geometry, features: int) -> None:
        super().__init__(config, geometry, features)
        heads = geometry.num_key_heads
        self.down = nn.Parameter(torch.empty(RANK, self.hidden_size))
        self.up = nn.Parameter(torch.empty(heads * features, RANK))
        self.bias = nn.Parameter(torch.empty(heads, features))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start with the same long memory for every token.

        With ``up`` at zero, ``down`` does not show in the first output, but it must not be zero
        too, for then neither would have a gradient.
        """
        nn.init.eye_(self.down)
        nn.init.zeros_(self.up)
        nn.init.constant_(self.bias, GATE_BIAS)

    def log_decay(self, k: Tensor, hidden_states: Tensor | None) -> Tensor:
        """Return one per token and feature, ``[B, Hkv, S, F]``."""
        assert hidden_states is not None
        return channel_log_decay(hidden_states, self.down, self.up, self.bias)
