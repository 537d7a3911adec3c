"""The base of backends whose memory is a state of fixed size: features, forms and the window."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import repeat
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from attnzoo.backends.feature_maps.base import FeatureMap, FeatureMapConfig, get_feature_map
from attnzoo.contract import states
from attnzoo.contract.backend import AttentionBackend
from attnzoo.contract.capabilities import Capabilities
from attnzoo.contract.config import (
    MAX_SINKS,
    MAX_STATE,
    BackendConfig,
    Geometry,
    check_num_sinks,
    sinks_shard_reasons,
)
from attnzoo.contract.implementation import impl_names
from attnzoo.contract.inputs import AttentionInputs
from attnzoo.contract.states import (
    AttentionOutput,
    CountedLinearState,
    LinearState,
    put_slots,
    read_slots,
)
from attnzoo.errors import ConfigError, UnsupportedError
from attnzoo.ops.features.functional import MapWeights
from attnzoo.ops.hybrid.api import run_hybrid_attention
from attnzoo.ops.hybrid.parts import HybridInputs, LinearBranch, with_window
from attnzoo.ops.linear.api import run_linear_attention
from attnzoo.ops.linear.common import LinearInputs
from attnzoo.runtime.kernel_calls import autocast_disabled

# -- positions within a sequence ------------------------------------------------------------------


class TokenCounts(NamedTuple):
    """The positions of one call's tokens, and the number of tokens after the call."""

    positions: Tensor  # [B, T], integers from 0; [1, T] of one row of sequences
    total: Tensor  # [B]: tokens of each sequence, over this and all earlier calls


def count_tokens(inputs: AttentionInputs) -> TokenCounts:
    """Return the positions of the tokens, which continue from the state.

    Raises:
        UnsupportedError: Queries and keys are not the same tokens.
    """
    batch, length, queries = inputs.k.shape[0], inputs.k.shape[2], inputs.q.shape[2]
    if queries != length:
        raise UnsupportedError(
            f"there are {queries} queries and {length} keys, so the positions of the queries are "
            "unknown (the weights of feature map 'cosine' depend on the distance; take another)"
        )
    sequences, slots, device = inputs.sequences, inputs.slots, inputs.k.device
    before = None if inputs.state is None else inputs.state.tokens
    if inputs.shard is not None:
        rows = batch if inputs.shard.layout is None else inputs.shard.layout.shape[0]
        before = inputs.shard.tokens_before(rows, device)
        before = inputs.shard.states(LinearState(before, before), sequences).kv
    if slots is not None:
        assert before is not None
        (here,) = read_slots([before], slots)
        (total,) = put_slots([before], slots, [here + 1], in_place=inputs.reuse_state)
        return TokenCounts(here[:, None], total)
    if sequences is None:
        positions = torch.arange(length, device=device).expand(batch, -1)
        total = torch.full((batch,), length, device=device)
        if before is not None:
            positions, total = positions + before[:, None], total + before
        return TokenCounts(positions, total)
    positions = sequences.positions(length)
    if before is not None:
        positions = positions + before[sequences.index(length).clamp(max=before.shape[0] - 1)]
    total = sequences.lengths if before is None else sequences.lengths + before
    return TokenCounts(positions[None], total)


def without_count(inputs: AttentionInputs) -> AttentionInputs:
    """Return the inputs with a :class:`LinearState`, as the op takes it."""
    state = inputs.state
    return inputs if state is None else inputs._replace(state=LinearState(state.kv, state.k))


def with_count(output: AttentionOutput, counts: TokenCounts) -> AttentionOutput:
    """Return the output with a :class:`CountedLinearState`."""
    state = output.state
    if state is None:
        return output
    return output._replace(state=CountedLinearState(state.kv, state.k, counts.total))


# -- features, forms and the window ---------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RecurrentConfig(BackendConfig):
    """Options of attention through a state of fixed size, optionally next to a softmax window.

    Attributes:
        window: Keys with exact softmax weights: the latest ones in a causal layer, else so many on
            each side. ``None`` means none.
        num_sinks: Number of leading tokens of each sequence with exact softmax weights also outside
            the window of a causal layer (arXiv:2309.17453). Keys keep their positions.
        far_weight: Initial weight of all keys outside the window, relative to the window's.
        chunk_size: Tokens per parallel step. ``None`` lets the op choose.
    """

    ops: ClassVar[tuple[str, ...]] = ("linear_attention", "linear_step", "hybrid_attention")

    smallest: ClassVar[Mapping[str, str]] = {"window": "1 token", "chunk_size": "1 token"}
    largest: ClassVar[Mapping[str, int]] = {"window": MAX_STATE, "num_sinks": MAX_SINKS}
    window: int | None = None
    num_sinks: int = 0
    # On the embedded model with window 32, before training: 0.1 lowers the loss of the window alone
    # for every map and gate, by up to 0.012 bits per byte; 0.3 raises it by up to 0.044 without
    # decay
    far_weight: float = 0.1
    chunk_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        check_num_sinks(self, self.num_sinks, self.window)
        if self.far_weight <= 0:
            raise ConfigError(
                f"{name}.far_weight must be above 0, got {self.far_weight}; it is learned on a "
                "logarithmic scale, and a small initial value such as 0.1 is close to the window "
                "alone"
            )
        if self.window is None and self.far_weight != type(self).far_weight:
            raise ConfigError(
                f"{name}.far_weight needs a window, got far_weight={self.far_weight} with "
                "window=None; set window, or leave far_weight out"
            )


def check_features(q: Tensor, k: Tensor, inputs: AttentionInputs) -> None:
    """Raise ``UnsupportedError`` if features, which an op reads by address, do not fit a call."""
    given = (q.shape[:3], k.shape[:3], q.shape[3])
    if given != (inputs.q.shape[:3], inputs.k.shape[:3], k.shape[3]):
        raise UnsupportedError(
            "a feature map must return [B, H, T, F] of queries and [B, Hkv, S, F] of keys, here "
            f"of queries {list(inputs.q.shape)} and keys {list(inputs.k.shape)}; got "
            f"{list(q.shape)} and {list(k.shape)}"
        )


def check_eps(config: RecurrentConfig, eps: float, default: float) -> None:
    """Raise ``ConfigError`` if a number added to the sum of weights is not positive, or unused."""
    name = f"{type(config).__name__}.eps"
    if eps <= 0:
        raise ConfigError(
            f"{name} must be above 0, got {eps}; it keeps rows that see no key from dividing 0 by 0"
        )
    if config.window is not None and eps != default:
        raise ConfigError(
            f"{name} has no effect with a window, got eps={eps} with window={config.window}: the "
            "window's weights keep the sum above 0; leave one of the two out"
        )


@dataclass(frozen=True, kw_only=True)
class FeatureMapBackendConfig(RecurrentConfig, FeatureMapConfig):
    """Options of attention through a feature map and a state.

    Attributes:
        eps: Added to the sum of weights, by which outputs are divided.
        normalize: Whether to divide by the sum of weights, so that an output is a mean of values.
    """

    # Not the 1e-6 of arXiv:2006.16236: with hedgehog and queries and keys of standard deviation 10,
    # a quarter of the weights are below that, and one in 2,000 below 1e-12
    eps: float = 1e-12
    normalize: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_eps(self, self.eps, type(self).eps)
        name = type(self).__name__
        if get_feature_map(self.feature_map).signed and self.divides:
            raise ConfigError(
                f"{name}.feature_map={self.feature_map!r} needs normalize=False and no window: its "
                "weights may be negative, so their sum may be 0; set that, or take another map"
            )
        if self.window is not None and not self.normalize:
            raise ConfigError(
                f"{name}.window needs normalize=True, because the window and the linear part share "
                "one denominator; leave one of the two out"
            )
        if self.window is not None and get_feature_map(self.feature_map).positional:
            raise ConfigError(
                f"{name}.window does not support feature_map={self.feature_map!r}, whose weights "
                "depend on the distance; take another map, or no window"
            )

    @property
    def divides(self) -> bool:
        """Whether outputs are divided by the sum of their weights."""
        return self.normalize


class RecurrentBackend(AttentionBackend):
    """Base class of backends with a state of fixed size and, optionally, a softmax window.

    A subclass computes the features of queries and keys.
    """

    config: RecurrentConfig
    feature_map: FeatureMap
    config_class: ClassVar[type[BackendConfig]] = RecurrentConfig
    capabilities = Capabilities(
        sequences=True, recurrent=True, state_from_keys=True, zero_state=True, context_parallel=True
    )
    no_weight_decay: ClassVar[tuple[str, ...]] = ("far_log_weight",)
    window_op: ClassVar[str] = "hybrid_attention"  # computes the window, whose names impl may take
    # whether the state of a wide window has all its rows from the first token on, as pools need it
    fixed_state_size = False

    def __init__(self, config: BackendConfig, geometry: Geometry) -> None:
        super().__init__(config, geometry)
        # log weight of the linear branch, one per query head
        self.far_log_weight: nn.Parameter | None = None
        if self.config.window is not None:
            self.far_log_weight = nn.Parameter(torch.empty(geometry.num_heads))

    def reset_parameters(self) -> None:
        """Initialise the linear branch.

        For N(0, 1) inputs, its total weight is then ``far_weight`` times the window's.
        """
        if self.far_log_weight is None or self.far_log_weight.is_meta:
            return
        with torch.no_grad():
            expected = self.expected_feature_product()
            self.far_log_weight.fill_(math.log(self.config.far_weight / expected))

    def expected_feature_product(self) -> float:
        """Return the mean product of a query's and a key's features, for N(0, 1) inputs."""
        raise NotImplementedError

    def layer_reasons(self) -> list[str]:
        """Return every reason why this backend does not support its layer."""
        reasons = super().layer_reasons()
        if self.config.num_sinks and not self.geometry.causal:
            reasons.append(
                f"the layer is bidirectional, where num_sinks={self.config.num_sinks} is "
                "unsupported (set num_sinks=0, or use flash)"
            )
        if self.config.window is None:
            names = impl_names(*(op for op in self.config.ops if op != self.window_op))
            if self.config.impl not in names:
                reasons.append(
                    f"impl={self.config.impl!r} computes windows, and window=None (use one of "
                    f"{', '.join(names)}, or set a window)"
                )
        else:
            if self.config.impl not in (names := impl_names(self.window_op)):
                reasons.append(
                    f"impl={self.config.impl!r} does not support a window (use one of "
                    f"{', '.join(names)}, or window=None)"
                )
            if self.geometry.cross_attention:
                reasons.append(
                    "the layer is cross-attention, in which queries and keys have no distance that "
                    f"window={self.config.window} could limit (leave window out for this layer)"
                )
        return reasons

    def fused_feature_map(self) -> str:
        """Return the feature map that the op applies, or ``""`` if the module applies it."""
        module = self.feature_map
        if not isinstance(module, FeatureMap):  # wrapped, for example by PEFT
            return ""
        hooks = module._forward_hooks or module._forward_pre_hooks
        # accelerate replaces the forward of modules whose weights it has moved away
        return "" if hooks or "forward" in module.__dict__ else module.fused

    def shard_reasons(self) -> list[str]:
        """Return every reason why this layer does not support context parallelism."""
        return super().shard_reasons() + sinks_shard_reasons(self.config.num_sinks)

    def unsupported_reasons(self, inputs: AttentionInputs) -> list[str]:
        """Return every reason why these inputs are unsupported."""
        reasons = super().unsupported_reasons(inputs)
        q, k, mask = inputs.q, inputs.k, inputs.mask
        if not q.ndim == k.ndim == 4:
            return reasons
        geometry = self.geometry
        layer = (geometry.num_heads, geometry.num_key_heads, geometry.head_dim)
        given = (q.shape[1], k.shape[1], k.shape[3])
        if given != layer:
            reasons.append(
                "the inputs have {} query and {} key heads of size {}".format(*given)
                + " (the layer has {} and {} of size {})".format(*layer)
            )
        if self.config.num_sinks and not mask.causal:
            reasons.append(
                f"the mask is bidirectional, where num_sinks={self.config.num_sinks} is "
                "unsupported (set num_sinks=0)"
            )
        lengths = ""  # formatted where they differ: a text fixes the lengths of a traced program
        if (mask.causal or self.config.window is not None) and q.shape[2] != k.shape[2]:
            lengths = f"there are {q.shape[2]} queries and {k.shape[2]} keys"
        if mask.causal:
            if lengths:
                reasons.append(
                    f"{lengths} under a causal mask (pass the state of the earlier tokens instead "
                    "of their keys)"
                )
            return reasons
        if inputs.state is not None or inputs.return_state:
            reasons.append("a state is requested without a causal mask (only causal calls have it)")
        if self.config.window is not None:
            if lengths:
                reasons.append(f"{lengths} with a window (it needs equal numbers)")
            if inputs.shard is not None:
                reasons.append(
                    "a bidirectional window with a linear branch does not support context "
                    "parallelism (use longformer, or window=None)"
                )
        return reasons

    def window_of_call(self, inputs: AttentionInputs) -> int:
        """Return the window, or the rows that the growing state of a wide window has so far."""
        window, state = self.config.window, inputs.state
        assert window is not None
        if window <= states.FULL_STATE or self.fixed_state_size:
            return window
        if inputs.shard is not None or inputs.slots is not None:
            return window
        held = seen = None
        if state is not None:
            held, seen = state.k.shape[2] - self.config.num_sinks, state.seen
        return states.rows_of_state(window, held, seen, inputs.k.shape[2])

    def attend_hybrid(self, inputs: AttentionInputs, branch: LinearBranch) -> AttentionOutput:
        """Compute softmax attention inside the window and linear attention outside."""
        assert self.config.window is not None
        window, state = self.config.window, inputs.state
        if window > states.FULL_STATE:
            window = self.window_of_call(inputs)
            if state is not None and inputs.slots is None:
                state = with_window(state, window)
        x = HybridInputs(
            q=inputs.q,
            k=inputs.k,
            v=inputs.v,
            branch=branch,
            window=window,
            scale=inputs.scale,
            causal=inputs.mask.causal,
            sequences=inputs.sequences,
            lengths=None,
            state=state,
            return_state=inputs.return_state,
            chunk_size=self.config.chunk_size,
            num_sinks=self.config.num_sinks,
        )
        in_place, slots = inputs.reuse_state, inputs.slots
        impl, shard = self.config.impl, inputs.shard
        return run_hybrid_attention(x, impl, shard, reuse_state=in_place, slots=slots)


class FeatureMapBackend(RecurrentBackend):
    """Attention as :math:`o_t = q_t S_t / (q_t z_t + eps)`, over features of queries and keys."""

    config: FeatureMapBackendConfig
    config_class: ClassVar[type[BackendConfig]] = FeatureMapBackendConfig
    capabilities = replace(RecurrentBackend.capabilities, reuses_state=True)

    def __init__(self, config: BackendConfig, geometry: Geometry) -> None:
        super().__init__(config, geometry)
        self.feature_map = get_feature_map(self.config.feature_map)(config, geometry)
        RecurrentBackend.reset_parameters(self)

    def reset_parameters(self) -> None:
        """Initialise the weights of the feature map and of the linear branch."""
        self.feature_map.reset_parameters()
        super().reset_parameters()

    def layer_reasons(self) -> list[str]:
        """Return every reason why this backend does not support its layer."""
        return super().layer_reasons() + self.feature_map.layer_reasons()

    def expected_feature_product(self) -> float:
        """Return the mean product of a query's and a key's features, for N(0, 1) inputs."""
        size, scale = self.geometry.head_dim, self.geometry.scale
        assert scale is not None
        assert self.far_log_weight is not None
        generator = torch.Generator("cpu").manual_seed(0)
        heads, key_heads = self.geometry.num_heads, self.geometry.num_key_heads
        q, k = (
            torch.randn(1, n, 64, size, generator=generator, dtype=torch.float32, device="cpu")
            for n in (heads, key_heads)
        )
        device = self.far_log_weight.device
        q = self.feature_map(q.to(device), scale, of="queries").mean((0, 1, 2))
        k = self.feature_map(k.to(device), scale, of="keys").mean((0, 1, 2))
        return max(float(q @ k), 1e-6)

    def attend(self, inputs: AttentionInputs) -> AttentionOutput:
        """Apply the feature map, here or in the op, and run the op."""
        # Features of 16-bit layers are float32, the dtype that the op computes in. Rounded to 16
        # bits they are no faster on a CPU (T=2048, D=64, forward and backward: 43 ms against 40),
        # the gradients of q and k lose up to twice as much (3.5e-3 against 1.7e-3, which is the
        # rounding of the gradients themselves), and features of exp overflow in float16.
        if torch._C._is_any_autocast_enabled():
            with autocast_disabled(inputs.q.device):
                return self.map_and_attend(inputs)
        return self.map_and_attend(inputs)

    def map_and_attend(self, inputs: AttentionInputs) -> AttentionOutput:
        """Run :meth:`attend` where autocast does not change the precision."""
        if name := self.fused_feature_map():
            return self.run_op(inputs.q, inputs.k, inputs, feature_map=name)
        counts = count_tokens(inputs) if self.feature_map.positional else None
        options = {} if counts is None else {"positions": counts.positions}
        q = self.feature_map(inputs.q, inputs.scale, of="queries", **options)
        k = self.feature_map(inputs.k, inputs.scale, of="keys", **options)
        if counts is None:
            return self.run_op(q, k, inputs)
        return with_count(self.run_op(q, k, without_count(inputs)), counts)

    def map_weights(self) -> MapWeights | None:
        """Return the weights of a map that the op applies, or ``None`` if it has none."""
        module = self.feature_map
        if not module.fused_weights:
            return None
        return MapWeights(*map(getattr, repeat(module), module.fused_weights))

    def run_op(
        self, q: Tensor, k: Tensor, inputs: AttentionInputs, *, feature_map: str = ""
    ) -> AttentionOutput:
        """Run the op on queries ``[B, H, T, F]`` and keys ``[B, Hkv, S, F]``.

        They are features, or the inputs of ``feature_map``.
        """
        if self.far_log_weight is not None:
            branch = self.linear_branch(q, k, inputs, feature_map)
            return self.attend_hybrid(inputs, branch._replace(mean=True))
        x = self.linear_inputs(q, k, inputs, feature_map)
        return run_linear_attention(x, self.config.impl, inputs.shard)

    def linear_branch(
        self, q: Tensor, k: Tensor, inputs: AttentionInputs, feature_map: str
    ) -> LinearBranch:
        """Return the linear branch of a window hybrid; arguments as in :meth:`run_op`."""
        own = self.far_log_weight
        assert own is not None
        weight = own.to(torch.promote_types(q.dtype, torch.float32)).view(1, -1, 1, 1)
        if not feature_map:
            return LinearBranch(q, k, weight)
        return LinearBranch(
            q,
            k,
            weight,
            feature_map=feature_map,
            feature_scale=inputs.scale,
            map_weights=self.map_weights(),
        )

    def linear_inputs(
        self, q: Tensor, k: Tensor, inputs: AttentionInputs, feature_map: str
    ) -> LinearInputs:
        """Return the inputs of linear attention; arguments as in :meth:`run_op`."""
        check_features(q, k, inputs)
        return LinearInputs(
            q=q,
            k=k,
            v=inputs.v,
            log_decay=None,
            state=inputs.state,
            causal=inputs.mask.causal,
            normalize=self.config.normalize,
            scale=1.0,
            eps=self.config.eps,
            chunk_size=self.config.chunk_size,
            feature_map=feature_map or "identity",
            feature_scale=inputs.scale if feature_map else 1.0,
            map_weights=self.map_weights() if feature_map else None,
            sequences=inputs.sequences,
            return_state=inputs.return_state,
            reuse_state=inputs.reuse_state,
            slots=inputs.slots,
            query_sequences=inputs.query_sequences,
        )
