"""What a gate is, and the registry that the option ``gate`` refers to.

A gate of your own derives from :class:`Gate` and returns log decays::

    @register_gate("halving")
    class HalvingGate(Gate):
        def log_decay(self, k, hidden_states):
            return k.new_full((k.shape[1],), math.log(0.5))

A gate of this repository is the same class in a module of this folder.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar, NamedTuple, TypeVar

import torch.nn.functional as F
from torch import Tensor, nn

from attnzoo.contract.config import BackendConfig, Geometry
from attnzoo.errors import (
    ConfigError,
    UnsupportedError,
    check_registered_class,
    check_registered_name,
    did_you_mean,
    short_repr,
)
from attnzoo.runtime.kernel_calls import widen


class GateModule(nn.Module):
    """Base class of what the option ``gate`` names: numbers per token that a backend's op takes.

    Args:
        config: The backend's options.
        geometry: Shape of the layer; its ``head_dim`` is F, the size of a key after the feature
            map.

    Attributes:
        needs_hidden_states: Whether the numbers are computed from hidden states.
        no_weight_decay: Parameters that set a decay or a mixture, to which weight decay does not
            apply. Biases need no entry.
    """

    needs_hidden_states: ClassVar[bool] = False
    no_weight_decay: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: BackendConfig, geometry: Geometry) -> None:
        super().__init__()
        self.geometry = geometry
        # A layer without a hidden size is refused after it is built; until then 1 is a placeholder
        self.hidden_size = geometry.hidden_size or 1

    def reset_parameters(self) -> None:
        """Initialise the weights."""


class Decay(NamedTuple):
    """What a gate returns."""

    log_decay: Tensor  # [Hkv], [B, Hkv, S] or [B, Hkv, S, F], at most 0
    key_scale: Tensor | None = None  # [B, Hkv, S, 1] or [B, Hkv, S, F]: multiplies the keys


class Gate(GateModule):
    """Base class of gates: the decay of one layer's state at each token.

    A gate that only decays overrides :meth:`log_decay`; one that scales keys too overrides
    :meth:`forward`.

    Attributes:
        scales_keys: Whether the gate multiplies keys too.
        reads_keys: Whether ``log_decay`` reads the values of keys. If not, keys may be NaN, because
            the op computes their features later.
        expected_keys: With a window, the number of keys that share ``far_weight`` before training.
            A gated state weighs no more than its memory, whereas without gates the sum is divided
            by the number of keys.
    """

    scales_keys: ClassVar[bool] = False
    reads_keys: ClassVar[bool] = False
    expected_keys: ClassVar[float] = 1024

    def forward(self, k: Tensor, hidden_states: Tensor | None) -> Decay:
        """Return the decays. Backends call the module, so that its hooks run.

        Args:
            k: Keys after the feature map, ``[B, Hkv, S, F]``, float32 or wider.
            hidden_states: ``[B, S, M]`` if the gate needs them.

        Raises:
            UnsupportedError: ``log_decay`` returned another shape.
        """
        log_decay = self.log_decay(k, hidden_states)
        accepted = (k.shape[1:2], k.shape[:3], k.shape)
        if log_decay.shape not in accepted:
            raise UnsupportedError(
                f"{type(self).__name__}.log_decay must return [Hkv], [B, Hkv, S] or "
                f"[B, Hkv, S, F], here {' or '.join(str(list(x)) for x in accepted)}; got "
                f"{list(log_decay.shape)}"
            )
        return Decay(log_decay)

    def log_decay(self, k: Tensor, hidden_states: Tensor | None) -> Tensor:
        """Return the natural logarithm of the decay at each token, at most 0.

        Args:
            k: Keys after the feature map, ``[B, Hkv, S, F]``, float32 or wider.
            hidden_states: ``[B, S, M]`` if the gate needs them.

        Returns:
            ``[Hkv]``, ``[B, Hkv, S]`` or ``[B, Hkv, S, F]``, float32 or wider.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define log_decay(...)")


# -- projections of hidden states to gates, of rank R ---------------------------------------------

# Learned gates are the 16th root of a sigmoid, so that the memory is hundreds of tokens long while
# the gradient of the sigmoid is not small (arXiv:2312.06635; arXiv:2405.05254).
TEMPERATURE = 16.0

# Initial bias of learned gates: log sigmoid(2) / 16 = -0.0079, so a token keeps 99.2% of the state,
# and 1/e remains after 126 tokens. A larger bias gives a longer memory, but a smaller gradient to
# learn forgetting from (here 12% of an open gate's). On the embedded model (hedgehog, only extras
# trained, 80 steps of Adam), initial biases of 0, 2 and 5 went from 4.08, 4.37 and 4.40 bits per
# byte to 1.71, 1.77 and 1.84; but 0 is a memory of 23 tokens, beyond which gradients nearly vanish.
GATE_BIAS = 2.0

# The initial decay rate per token, for gates with another parametrisation
INITIAL_RATE = math.log1p(math.exp(-GATE_BIAS)) / TEMPERATURE

RANK = 16  # of the projection from hidden states to channels (arXiv:2312.06635)


def init_identity(x: Tensor) -> None:
    """Initialise a matrix to the identity; a model that is built without memory has no values."""
    if not x.is_meta:  # where torch.eye fails if the default device is another one
        nn.init.eye_(x)


def low_rank_projection(
    hidden_states: Tensor,
    down: Tensor,
    up: Tensor,
    bias: Tensor,
    *,
    activation: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return :math:`x W_1 W_2 + b` of each head, ``[B, Hkv, S, D]``, float32 or wider.

    Args:
        hidden_states: x, ``[B, S, M]``.
        down: W1 transposed, ``[R, M]``.
        up: W2 transposed, one block per head, ``[Hkv * D, R]``.
        bias: b of each head, ``[Hkv, D]``.
        activation: Applied to :math:`x W_1`.
    """
    x = widen(hidden_states)
    inner = F.linear(x, down.to(x.dtype))
    inner = inner if activation is None else activation(inner)
    logits = F.linear(inner, up.to(x.dtype), bias.flatten().to(x.dtype))
    return logits.view(*x.shape[:2], *bias.shape).transpose(1, 2)


# -- the registry ----------------------------------------------------------------------------------

G = TypeVar("G", bound="type[GateModule]")
GATES: dict[str, type[GateModule]] = {}


def register_gate(name: str) -> Callable[[G], G]:
    """Class decorator: register a gate as ``gate=name``. A name can be registered only once."""
    check_registered_name("register_gate", name)

    def add(cls: G) -> G:
        if not (isinstance(cls, type) and issubclass(cls, GateModule)):
            check_registered_class("register_gate", name, cls, Gate)
        if name == "none":
            raise ValueError("gate 'none' is the absence of a gate; take another name")
        owner = GATES.setdefault(name, cls)
        if owner is not cls:
            raise ValueError(
                f"gate {name!r} belongs to {owner.__module__}.{owner.__qualname__}; "
                f"register {cls.__qualname__} under another name"
            )
        return cls

    return add


def get_gate(name: str) -> type[GateModule]:
    """Return the gate registered as ``name``.

    Raises:
        ConfigError: No gate has this name.
    """
    if name in GATES:
        return GATES[name]
    raise ConfigError(
        f"No gate is called {short_repr(name)}.{did_you_mean(name, GATES)} "
        f"Available: {', '.join(GATES)}."
    )
