"""What a gate is, the registry that the option ``gate`` refers to, and the gates that only decay.

A gate of your own derives from :class:`Gate` and returns log decays::

    @register_gate("halving")
    class HalvingGate(Gate):
        def log_decay(self, k, hidden_states):
            return k.new_full((k.shape[1],), math.log(0.5))

A gate of this repository is the same class here, or in a module of this folder. Other letters: D
features of a key, R rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import ClassVar, NamedTuple, TypeVar

import torch
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

# Initial decay of a token in the delta rule's gates: the state keeps 1/e after 512 tokens
DELTA_RATE = 1 / 512

RANK = 16  # of the projection from hidden states to channels (arXiv:2312.06635)

# The parameters of a gate by name: the sizes of each, in letters, and its initial value. "HF R" is
# [Hkv * F, R], and "Q" stands for the query heads. None means the identity.
Shapes = Mapping[str, tuple[str, float | None]]


def per_head(bias: float) -> Shapes:
    """Return the parameters of :math:`x w + b` for each key head, equal for all tokens."""
    return {"weight": ("H M", 0.0), "bias": ("H", bias)}


def per_channel(bias: float) -> Shapes:
    """Return the parameters of :math:`x W_1 W_2 + b` for each key channel, with rank R.

    ``up`` is zero, so all tokens are equal at first and ``down`` has no effect. ``down`` must not
    be zero too, because then neither would have a gradient.
    """
    return {"down": ("R M", None), "up": ("HF R", 0.0), "bias": ("H F", bias)}


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
        shapes: The parameters, which the constructor creates and initialises.
    """

    needs_hidden_states: ClassVar[bool] = False
    no_weight_decay: ClassVar[tuple[str, ...]] = ()
    shapes: ClassVar[Shapes] = {}
    weight: Tensor  # of per_head
    bias: Tensor
    down: Tensor  # of per_channel
    up: Tensor

    def __init__(self, config: BackendConfig, geometry: Geometry) -> None:
        super().__init__()
        self.geometry = geometry
        # A layer without a hidden size is refused after it is built; until then 1 is a placeholder
        self.hidden_size = geometry.hidden_size or 1
        sizes = {"H": geometry.num_key_heads, "Q": geometry.num_heads, "M": self.hidden_size}
        sizes |= {"F": geometry.head_dim, "E": geometry.value_dim or 1, "R": RANK}
        for name, (letters, _) in self.shapes.items():
            shape = (math.prod(sizes[letter] for letter in word) for word in letters.split())
            self.register_parameter(name, nn.Parameter(torch.empty(*shape)))
        GateModule.reset_parameters(self)

    def reset_parameters(self) -> None:
        """Initialise the weights."""
        for name, (_, value) in self.shapes.items():
            weight: Tensor = getattr(self, name)
            if value is not None:
                nn.init.constant_(weight, value)
            elif not weight.is_meta:  # where torch.eye fails if the default device is another one
                nn.init.eye_(weight)

    def head_logits(self, hidden_states: Tensor | None) -> Tensor:
        """Return :math:`x w + b` of each head, ``[B, Hkv, S]``, float32 or wider."""
        assert hidden_states is not None
        x = widen(hidden_states)
        return F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype)).transpose(1, 2)

    def channel_logits(
        self, hidden_states: Tensor | None, activation: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """Return :math:`x W_1 W_2 + b` of each head, ``[B, Hkv, S, F]``, float32 or wider.

        The activation is applied to :math:`x W_1`.
        """
        assert hidden_states is not None
        x = widen(hidden_states)
        inner = F.linear(x, self.down.to(x.dtype))
        inner = inner if activation is None else activation(inner)
        logits = F.linear(inner, self.up.to(x.dtype), self.bias.flatten().to(x.dtype))
        return logits.view(*x.shape[:2], *self.bias.shape).transpose(1, 2)


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


# -- gates without weights: one decay per key head -------------------------------------------------


@register_gate("retnet")
class RetNetGate(Gate):
    r"""RetNet (arXiv:2307.08621): :math:`g = \log(1 - 2^{-5-h})`, one fixed decay per key head.

    After 2^(5+h) tokens, 1/e of the state remains. No parameters; computed in every call, so that
    nothing is loaded or rounded to 16 bits.
    """

    def log_decay(self, k: Tensor, hidden_states: Tensor | None) -> Tensor:
        """Return the decays of all tokens, ``[Hkv]``."""
        head = torch.arange(k.shape[1], device=k.device, dtype=k.dtype)
        return torch.log1p(-torch.exp2(-5 - head))


def alibi_log_decay(
    heads: int, *, device: torch.device | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return the slopes of ALiBi as decays, ``[Hkv]``, which they are under the exponential.

    The paper's code uses another sequence if the number of heads is not a power of two.
    """
    head = torch.arange(1, heads + 1, device=device, dtype=dtype)
    return -torch.exp2(-8 * head / heads)


@register_gate("alibi")
class AlibiGate(Gate):
    r"""ALiBi (arXiv:2108.12409): :math:`g = -2^{-8h/H}`, one fixed decay per key head.

    It equals ALiBi's bias if the feature map's kernel is an exponential. The slopes are those of
    the key heads. No parameters.
    """

    def log_decay(self, k: Tensor, hidden_states: Tensor | None) -> Tensor:
        """Return the decays of all tokens, ``[Hkv]``."""
        return alibi_log_decay(k.shape[1], device=k.device, dtype=k.dtype)


# -- gates with weights, which compute decays from hidden states -----------------------------------


@register_gate("gated_retention")
class GatedRetentionGate(Gate):
    r"""Gated retention (arXiv:2405.05254): :math:`g = \log \sigma(x w + b) / 16`.

    One learned decay per token and key head.
    """

    needs_hidden_states = True
    shapes = per_head(GATE_BIAS)

    def log_decay(self, k: Tensor, hidden_states: Tensor | None) -> Tensor:
        """Return one decay per token, ``[B, Hkv, S]``."""
        return F.logsigmoid(self.head_logits(hidden_states)) / TEMPERATURE


@register_gate("gla")
class GLAGate(Gate):
    r"""GLA (arXiv:2312.06635): :math:`g = \log \sigma(x W_1 W_2 + b) / 16`.

    One learned decay per token and key channel, with projections of rank 16.
    """

    needs_hidden_states = True
    shapes = per_channel(GATE_BIAS)

    def log_decay(self, k: Tensor, hidden_states: Tensor | None) -> Tensor:
        """Return one decay per token and feature, ``[B, Hkv, S, F]``."""
        return F.logsigmoid(self.channel_logits(hidden_states)) / TEMPERATURE


class SoftplusGate(Gate):
    r"""Base class of gates :math:`g = -e^a \Delta` with the step :math:`\Delta` of a token."""

    needs_hidden_states = True
    no_weight_decay = ("log_rate",)
    log_rate: Tensor  # [Hkv], a

    def decay_and_step(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log decays and the steps, the softplus of ``[B, Hkv, S, ...]``.

        The softplus of a contiguous tensor, because torch.compile (2.13, 2.14) traces its gradient
        with the layout of the input, and the operator returns that of the incoming gradient.
        """
        step = F.softplus(logits.contiguous())
        rate = self.log_rate.to(step.dtype).exp()
        return -rate.view(-1, *(1,) * (step.dim() - 2)) * step, step


@register_gate("scalar")
class ScalarGate(SoftplusGate):
    r"""Gated DeltaNet (arXiv:2412.06464): :math:`g = -e^a\, \mathrm{softplus}(x w + b)`.

    One learned decay per token and key head; a is ``A_log`` and b ``dt_bias`` of Gated DeltaNet.
    """

    shapes: ClassVar = {**per_head(math.log(math.expm1(DELTA_RATE))), "log_rate": ("H", 0.0)}

    def log_decay(self, k: Tensor, hidden_states: Tensor | None) -> Tensor:
        """Return one decay per token, ``[B, Hkv, S]``."""
        return self.decay_and_step(self.head_logits(hidden_states))[0]


@register_gate("vector")
class VectorGate(SoftplusGate):
    r"""KDA (arXiv:2510.26692): :math:`g = -e^a\, \mathrm{softplus}(x W_1 W_2 + b)`.

    One learned decay per token and key channel, with projections of rank 16 and one a per key head.
    """

    shapes: ClassVar = {**per_channel(math.log(math.expm1(DELTA_RATE))), "log_rate": ("H", 0.0)}

    def log_decay(self, k: Tensor, hidden_states: Tensor | None) -> Tensor:
        """Return one decay per token and feature, ``[B, Hkv, S, F]``."""
        return self.decay_and_step(self.channel_logits(hidden_states))[0]


@register_gate("mamba2")
class Mamba2Gate(SoftplusGate):
    r"""Mamba-2 (arXiv:2405.21060): :math:`g = -e^a \Delta`.

    One learned decay per token and key head, with the step
    :math:`\Delta = \mathrm{softplus}(x w + b)`, by which the key is multiplied. In the paper the
    step multiplies the value, which is the same without a normaliser.
    """

    scales_keys = True
    expected_keys = 1  # a token enters the state with the weight that the state loses
    shapes: ClassVar = {**per_head(math.log(math.expm1(INITIAL_RATE))), "log_rate": ("H", 0.0)}

    def forward(self, k: Tensor, hidden_states: Tensor | None) -> Decay:
        """Return one log decay per token, ``[B, Hkv, S]``, and the steps that multiply the keys."""
        log_decay, step = self.decay_and_step(self.head_logits(hidden_states))
        return Decay(log_decay, step.unsqueeze(-1))


@register_gate("hgrn2")
class HGRN2Gate(Gate):
    r"""HGRN-2 (arXiv:2404.07904): :math:`g = \log f`, and keys are multiplied by 1 - f.

    One learned decay per token and key channel: :math:`f = l + (1 - l) \sigma(x W_1 W_2 + b)` with
    the lower bound :math:`l = \sigma(c)`. In HGRN-2, 1 - f is the key. A swapped layer has
    pretrained keys, so here 1 - f multiplies their features; if these are ones, this is HGRN-2.
    """

    needs_hidden_states = True
    scales_keys = True
    expected_keys = 1  # a token enters the state with the weight that the state loses
    no_weight_decay = ("bound",)
    # with a lower bound of 1/2
    shapes: ClassVar = {**per_channel(math.log(0.5 / INITIAL_RATE - 1)), "bound": ("H F", 0.0)}
    bound: Tensor

    def forward(self, k: Tensor, hidden_states: Tensor | None) -> Decay:
        """Return log f, and 1 - f, which multiplies the keys, ``[B, Hkv, S, F]`` each."""
        logits = self.channel_logits(hidden_states)
        one_minus_bound = torch.sigmoid(-self.bound.to(logits.dtype)).unsqueeze(1)
        # 1 - f as a product of sigmoids does not cancel where f is nearly 1. The clamp keeps the
        # gradient of the logarithm finite.
        largest = 1 - torch.finfo(logits.dtype).eps
        key = (one_minus_bound * torch.sigmoid(-logits)).clamp(max=largest)
        return Decay(torch.log1p(-key), key)
