"""Gates as modules with weights, and the registry that the option ``gate`` refers to.

A gate of your own derives from :class:`Gate` and returns log decays::

    @register_gate("halving")
    class HalvingGate(Gate):
        def log_decay(self, k, hidden_states):
            return k.new_full((k.shape[1],), math.log(0.5))

Letters: B batch, H heads, Hkv key heads, S tokens, F features of a key, M hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from attnzoo.backends.gates.functional import (
    TEMPERATURE,
    alibi_log_decay,
    channel_log_decay,
    hgrn2_gate,
    mamba2_gate,
    mask_log_decay,
    retnet_log_decay,
    token_log_decay,
)
from attnzoo.contract.config import BackendConfig, Geometry
from attnzoo.contract.inputs import AttentionInputs
from attnzoo.contract.states import AttentionOutput
from attnzoo.errors import ConfigError, check_registered_class, check_registered_name, did_you_mean
from attnzoo.ops.linear.api import linear_attention

# Initial bias of learned gates: log sigmoid(2) / 16 = -0.0079, so a token keeps 99.2% of the state,
# and 1/e remains after 126 tokens. A larger bias gives a longer memory, but a smaller gradient to
# learn forgetting from (here 12% of an open gate's). On the embedded model (hedgehog, only extras
# trained, 80 steps of Adam), initial biases of 0, 2 and 5 went from 4.08, 4.37 and 4.40 bits per
# byte to 1.71, 1.77 and 1.84; but 0 is a memory of 23 tokens, beyond which gradients nearly vanish.
GATE_BIAS = 2.0

# The initial decay rate per token, for gates with another parametrisation
INITIAL_RATE = math.log1p(math.exp(-GATE_BIAS)) / TEMPERATURE

Attend = Callable[[Tensor, Tensor], AttentionOutput]  # of keys and log decay

RANK = 16  # of the projection from hidden states to channels (arXiv:2312.06635)


class Gate(nn.Module):
    """Base class of gates: the decay of one layer's state at each token.

    Args:
        config: The backend's options.
        geometry: Shape of the layer.
        features: F, the size of a key after the feature map.

    Attributes:
        needs_hidden_states: Whether the gate is computed from hidden states.
        only_decays: Whether the gate is a decay of the sums and nothing else. If not, it overrides
            ``forward`` with an op and a state of its own.
        scales_keys: Whether the gate multiplies keys too; :meth:`gate_keys` is then overridden.
        reads_keys: Whether ``log_decay`` reads the values of keys. If not, keys may be NaN, because
            the op computes their features later.
        expected_keys: With a window, the number of keys that share ``far_weight`` before training.
            A gated state weighs no more than its memory, whereas without gates the sum is divided
            by the number of keys.
        has_weights: Whether all value channels share one matrix of attention weights.
        no_weight_decay: Parameters that set a decay or a mixture, to which weight decay does not
            apply. Biases need no entry.
        ops: The ops that compute the gate, whose implementations ``impl`` may name.
        fixed_options: Options that must keep their defaults, and why.
    """

    needs_hidden_states: ClassVar[bool] = False
    only_decays: ClassVar[bool] = True
    scales_keys: ClassVar[bool] = False
    reads_keys: ClassVar[bool] = False
    expected_keys: ClassVar[float] = 1024
    has_weights: ClassVar[bool] = True
    no_weight_decay: ClassVar[tuple[str, ...]] = ()
    ops: ClassVar[tuple[str, ...]] = ("linear_attention", "linear_step")
    fixed_options: ClassVar[Mapping[str, str]] = {}

    def __init__(self, config: BackendConfig, geometry: Geometry, features: int) -> None:
        super().__init__()
        self.geometry = geometry
        self.features = features

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        inputs: AttentionInputs,
        options: dict[str, Any],
        attend: Attend | None = None,
    ) -> AttentionOutput:
        """Compute attention with this gate. Backends call the module, so that its hooks run.

        Args:
            q: Queries after the feature map, ``[B, H, T, F]``, float32 or wider; before it if
                ``options`` name a feature map.
            k: Keys, ``[B, Hkv, S, F]``, likewise; features are zero at padding.
            inputs: The inputs of the backend.
            options: Options of the op, from ``FeatureMapBackend.op_options``.
            attend: Called with keys and log decay instead of the op, for a gate that only decays.
        """
        if options.get("feature_map"):  # the op maps k
            dtype = torch.promote_types(k.dtype, torch.float32)
            log_decay = self.log_decay(
                k.new_full((), torch.nan, dtype=dtype).expand(*k.shape[:3], self.features),
                inputs.hidden_states,
            )
        else:
            k, log_decay = self.gate_keys(k, inputs.hidden_states)
        if inputs.mask.padding is not None:
            log_decay = mask_log_decay(log_decay, inputs.mask.padding)
        if attend is not None:
            return attend(k, log_decay)
        reuse = inputs.reuse_state
        return linear_attention(q, k, inputs.v, log_decay=log_decay, reuse_state=reuse, **options)

    def gate_keys(self, k: Tensor, hidden_states: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the keys, multiplied by the gate if it scales them, and the log decays."""
        return k, self.log_decay(k, hidden_states)

    def log_decay(self, k: Tensor, hidden_states: Tensor | None) -> Tensor:
        """Return the natural logarithm of the decay at each token, at most 0.

        Args:
            k: Keys after the feature map, ``[B, Hkv, S, F]``, float32 or wider.
            hidden_states: ``[B, S, M]`` if the gate needs them.

        Returns:
            ``[Hkv]``, ``[B, Hkv, S]`` or ``[B, Hkv, S, F]``, float32 or wider.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define log_decay(...)")

    def reset_parameters(self) -> None:
        """Initialise the weights."""


G = TypeVar("G", bound="type[Gate]")
GATES: dict[str, type[Gate]] = {}


def register_gate(name: str) -> Callable[[G], G]:
    """Class decorator: register a gate as ``gate=name``. A name can be registered only once."""
    check_registered_name("register_gate", name)

    def add(cls: G) -> G:
        check_registered_class("register_gate", name, cls, Gate)
        owner = GATES.setdefault(name, cls)
        if owner is not cls:
            raise ValueError(
                f"gate {name!r} belongs to {owner.__module__}.{owner.__qualname__}; "
                f"register {cls.__qualname__} under another name"
            )
        return cls

    return add


def get_gate(name: str) -> type[Gate]:
    """Return the gate registered as ``name``.

    Raises:
        ConfigError: No gate has this name.
    """
    if name in GATES:
        return GATES[name]
    raise ConfigError(
        f"No gate is called {name!r}.{did_you_mean(name, GATES)} Available: {', '.join(GATES)}."
    )


# -- fixed decays ----------------------------------------------------------------------------------


@register_gate("retnet")
class RetNetGate(Gate):
    r"""RetNet (arXiv:2307.08621): :math:`g = \log(1 - 2^{-5-h})`, one fixed decay per key head.

    No parameters; computed in every call, so that nothing is loaded or rounded to 16 bits.
    """

    def log_decay(self, k: Tensor, hidden_states: Tensor | None) -> Tensor:
        """Return the decays of all tokens, ``[Hkv]``."""
        return retnet_log_decay(k.shape[1], device=k.device, dtype=k.dtype)


@register_gate("alibi")
class AlibiGate(Gate):
    r"""ALiBi (arXiv:2108.12409): :math:`g = -2^{-8h/H}`, one fixed decay per key head.

    It equals ALiBi's bias if the feature map's kernel is an exponential. The slopes are those of
    the key heads. No parameters.
    """

    def log_decay(self, k: Tensor, hidden_states: Tensor | None) -> Tensor:
        """Return the decays of all tokens, ``[Hkv]``."""
        return alibi_log_decay(k.shape[1], device=k.device, dtype=k.dtype)


# -- learned decays --------------------------------------------------------------------------------


class LearnedGate(Gate):
    """Base class of gates with weights that are applied to the hidden states."""

    needs_hidden_states = True

    def __init__(self, config: BackendConfig, geometry: Geometry, features: int) -> None:
        super().__init__(config, geometry, features)
        # A layer without a hidden size is refused after it is built; until then 1 is a placeholder
        self.hidden_size = geometry.hidden_size or 1


@register_gate("gated_retention")
class GatedRetentionGate(LearnedGate):
    r"""Gated retention (arXiv:2405.05254): :math:`g = \log \sigma(x w + b) / 16`.

    One learned decay per token and key head.
    """

    def __init__(self, config: BackendConfig, geometry: Geometry, features: int) -> None:
        super().__init__(config, geometry, features)
        heads = geometry.num_key_heads
        self.weight = nn.Parameter(torch.empty(heads, self.hidden_size))
        self.bias = nn.Parameter(torch.empty(heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise to the same long memory for every token."""
        nn.init.zeros_(self.weight)
        nn.init.constant_(self.bias, GATE_BIAS)

    def log_decay(self, k: Tensor, hidden_states: Tensor | None) -> Tensor:
        """Return one decay per token, ``[B, Hkv, S]``."""
        assert hidden_states is not None
        return token_log_decay(hidden_states, self.weight, self.bias)


class LowRankGate(LearnedGate):
    """Base class of gates per key channel: a low-rank projection of the hidden states."""

    initial_bias: ClassVar[float] = GATE_BIAS

    def __init__(self, config: BackendConfig, geometry: Geometry, features: int) -> None:
        super().__init__(config, geometry, features)
        heads = geometry.num_key_heads
        self.down = nn.Parameter(torch.empty(RANK, self.hidden_size))
        self.up = nn.Parameter(torch.empty(heads * features, RANK))
        self.bias = nn.Parameter(torch.empty(heads, features))
        LowRankGate.reset_parameters(self)

    def reset_parameters(self) -> None:
        """Initialise to the same long memory for every token.

        ``up`` is zero, so ``down`` has no effect on the first output. ``down`` must not be zero
        too, because then neither would have a gradient.
        """
        nn.init.eye_(self.down)
        nn.init.zeros_(self.up)
        nn.init.constant_(self.bias, self.initial_bias)


@register_gate("gla")
class GLAGate(LowRankGate):
    r"""GLA (arXiv:2312.06635): :math:`g = \log \sigma(x W_1 W_2 + b) / 16`.

    One learned decay per token and key channel, with projections of rank 16.
    """

    def log_decay(self, k: Tensor, hidden_states: Tensor | None) -> Tensor:
        """Return one decay per token and feature, ``[B, Hkv, S, F]``."""
        assert hidden_states is not None
        return channel_log_decay(hidden_states, self.down, self.up, self.bias)


@register_gate("mamba2")
class Mamba2Gate(LearnedGate):
    r"""Mamba-2 (arXiv:2405.21060): :math:`g = -e^a \Delta`.

    One learned decay per token and key head, with the step
    :math:`\Delta = \mathrm{softplus}(x w + b)`, by which the key is multiplied.
    """

    scales_keys = True
    expected_keys = 1  # a token enters the state with the weight that the state loses
    no_weight_decay = ("log_rate",)

    def __init__(self, config: BackendConfig, geometry: Geometry, features: int) -> None:
        super().__init__(config, geometry, features)
        heads = geometry.num_key_heads
        self.weight = nn.Parameter(torch.empty(heads, self.hidden_size))
        self.bias = nn.Parameter(torch.empty(heads))
        self.log_rate = nn.Parameter(torch.empty(heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise to the same small step for every token."""
        nn.init.zeros_(self.weight)
        nn.init.constant_(self.bias, math.log(math.expm1(INITIAL_RATE)))
        nn.init.zeros_(self.log_rate)

    def gate_keys(self, k: Tensor, hidden_states: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the keys times their step, and one log decay per token, ``[B, Hkv, S]``."""
        assert hidden_states is not None
        log_decay, step = mamba2_gate(hidden_states, self.weight, self.bias, self.log_rate)
        return k * step.unsqueeze(-1), log_decay


@register_gate("hgrn2")
class HGRN2Gate(LowRankGate):
    r"""HGRN-2 (arXiv:2404.07904): :math:`g = \log f`, and keys are multiplied by 1 - f.

    One learned decay per token and key channel: :math:`f = l + (1 - l) \sigma(x W_1 W_2 + b)` with
    the lower bound :math:`l = \sigma(c)`. In HGRN-2, 1 - f is the key. A swapped layer has
    pretrained keys, so here 1 - f multiplies their features; if these are ones, this is HGRN-2.
    """

    scales_keys = True
    expected_keys = 1  # a token enters the state with the weight that the state loses
    no_weight_decay = ("bound",)

    initial_bias = math.log(0.5 / INITIAL_RATE - 1)  # with the initial bound of 1/2

    def __init__(self, config: BackendConfig, geometry: Geometry, features: int) -> None:
        super().__init__(config, geometry, features)
        self.bound = nn.Parameter(torch.empty(geometry.num_key_heads, features))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise to the same long memory for every token, and a lower bound of 1/2."""
        super().reset_parameters()
        nn.init.zeros_(self.bound)

    def gate_keys(self, k: Tensor, hidden_states: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the keys times 1 - f, and log f, ``[B, Hkv, S, F]`` each."""
        assert hidden_states is not None
        log_decay, key = hgrn2_gate(hidden_states, self.down, self.up, self.bias, self.bound)
        return k * key, log_decay
