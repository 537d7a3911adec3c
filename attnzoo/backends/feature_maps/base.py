"""Feature maps as modules with weights, and the registry that ``feature_map`` refers to.

A map of your own is a function of queries or keys, or a :class:`FeatureMap` if the two differ or
the map has weights::

    @register_feature_map("square")
    def square(x: Tensor) -> Tensor:
        return x * x

A config stores the name. Loading it imports no code: register the map first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor, nn

from attnzoo.contract.config import BackendConfig, Geometry
from attnzoo.errors import (
    ConfigError,
    check_registered_class,
    check_registered_name,
    did_you_mean,
    short_repr,
)
from attnzoo.ops.features.functional import FIXED
from attnzoo.runtime.kernel_calls import widen


class FeatureMap(nn.Module):
    """Base class of feature maps: the features of one layer's queries and keys.

    Args:
        config: The backend's options.
        geometry: Shape of the layer.

    Attributes:
        learned: Whether the map has weights.
        fused: The name by which ``linear_attention`` applies the map itself; ``""`` if it does not.
            Subclasses do not inherit it, because they may compute other features.
        fused_weights: Names of the parameters that ``linear_attention`` takes as ``map_weights`` in
            that case, in the order of ``MapWeights``.
        positional: Whether ``queries`` and ``keys`` take ``positions`` too.
        signed: Whether the products of features may be negative, so that sums may be zero.
        options: The options of the config that the map takes, and their defaults; ``None`` is the
            model's own value.
    """

    learned: ClassVar[bool] = False
    fused: ClassVar[str] = ""
    fused_weights: ClassVar[tuple[str, ...]] = ()
    positional: ClassVar[bool] = False
    signed: ClassVar[bool] = False
    options: ClassVar[Mapping[str, int | None]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.fused = cls.__dict__.get("fused", "")

    def __init__(self, config: BackendConfig, geometry: Geometry) -> None:
        super().__init__()
        self.config = config
        self.geometry = geometry

    @classmethod
    def option_reason(cls, name: str, value: int) -> str:
        """Return why an option's value is invalid, other than being too small, or ``""``."""
        return ""

    def option(self, name: str) -> int:
        """Return the value of an option; that of one left out is the map's default."""
        value: int = getattr(self.config, name)
        return value

    @property
    def size(self) -> int:
        """F, features per head."""
        return self.geometry.head_dim

    def forward(
        self,
        x: Tensor,
        scale: float,
        *,
        of: Literal["queries", "keys"],
        positions: Tensor | None = None,
    ) -> Tensor:
        """Return the features of queries or keys. Backends call the module, so that its hooks run.

        Args:
            x: ``[B, H, T, D]``, or ``[B, Hkv, S, D]`` for keys.
            scale: Multiplies query-key products in softmax attention.
            of: Whether ``x`` are queries or keys.
            positions: For positional maps, the position of each token among the real tokens of its
                sequence, ``[B, T]``.
        """
        function = self.queries if of == "queries" else self.keys
        return function(x, scale, positions) if self.positional else function(x, scale)

    def queries(self, q: Tensor, scale: float, positions: Tensor | None = None) -> Tensor:
        """Map ``[B, H, T, D]`` to ``[B, H, T, F]``, float32 or wider.

        The products with the features of keys are the attention weights. They should not be
        negative if outputs are normalised.
        """
        raise NotImplementedError

    def keys(self, k: Tensor, scale: float, positions: Tensor | None = None) -> Tensor:
        """Map ``[B, Hkv, S, D]`` to ``[B, Hkv, S, F]``, float32 or wider."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Initialise the weights."""

    def layer_reasons(self) -> list[str]:
        """Return every reason why this map does not support its layer."""
        return []


class SameMap(FeatureMap):
    """Base class of maps that are equal for queries and keys."""

    def features(self, x: Tensor, scale: float, positions: Tensor | None = None) -> Tensor:
        """Map ``[B, H, T, D]`` to ``[B, H, T, F]``, float32 or wider."""
        raise NotImplementedError

    def queries(self, q: Tensor, scale: float, positions: Tensor | None = None) -> Tensor:
        """Map queries."""
        return self.features(q, scale, positions)

    def keys(self, k: Tensor, scale: float, positions: Tensor | None = None) -> Tensor:
        """Map keys."""
        return self.features(k, scale, positions)


class FunctionMap(SameMap):
    """A function of one tensor, for queries and keys; it does not use the scale."""

    registered: ClassVar[str] = ""

    @staticmethod
    def function(x: Tensor) -> Tensor:
        """Map ``[..., D]`` to ``[..., F]``."""
        raise NotImplementedError

    def __reduce__(self) -> tuple[Callable[[str], FunctionMap], tuple[str], dict[str, Any]]:
        """Pickle by the registered name, because the class is created from a function."""
        return _empty_map, (self.registered,), self.__dict__

    @property
    def size(self) -> int:
        """F, from a call of the function."""
        x = torch.zeros(1, 1, 1, self.geometry.head_dim, device="cpu")
        return int(self.function(x).shape[-1])

    def features(self, x: Tensor, scale: float, positions: Tensor | None = None) -> Tensor:
        """Apply the function."""
        features = self.function(widen(x))
        if not isinstance(features, Tensor):
            raise ConfigError(
                f"feature map {self.registered!r} must return a tensor, got "
                f"{type(features).__name__}"
            )
        return features


# -- the registry ----------------------------------------------------------------------------------

M = TypeVar("M", bound="type[FeatureMap] | Callable[[Tensor], Tensor]")
FEATURE_MAPS: dict[str, type[FeatureMap]] = {}


def _empty_map(name: str) -> FunctionMap:
    """Return a map without attributes, which unpickling sets."""
    cls = get_feature_map(name)
    assert issubclass(cls, FunctionMap)
    return cls.__new__(cls)


def _as_class(name: str, value: type[FeatureMap] | Callable[[Tensor], Tensor]) -> type[FeatureMap]:
    """Return a map's class; a function becomes a :class:`FunctionMap`."""
    if isinstance(value, type):
        return value
    members = {"function": staticmethod(value), "registered": name}
    members |= {"__module__": value.__module__, "__doc__": value.__doc__}
    if name in FIXED and value is FIXED[name].queries is FIXED[name].keys:
        members["fused"] = name
    return type(value.__name__, (FunctionMap,), members)


def register_feature_map(name: str) -> Callable[[M], M]:
    """Decorator: register a map as ``feature_map=name``. A name can be registered only once."""
    check_registered_name("register_feature_map", name)

    def add(value: M) -> M:
        if isinstance(value, type):
            check_registered_class("register_feature_map", name, value, FeatureMap)
        if name in FEATURE_MAPS:
            owner = FEATURE_MAPS[name]
            raise ValueError(
                f"feature map {name!r} belongs to {owner.__module__}.{owner.__qualname__}; "
                "register yours under another name"
            )
        FEATURE_MAPS[name] = _as_class(name, value)
        return value

    return add


def get_feature_map(name: str) -> type[FeatureMap]:
    """Return the map registered as ``name``; imports nothing, because a file may give the name.

    Raises:
        ConfigError: No map has this name.
    """
    if name in FEATURE_MAPS:
        return FEATURE_MAPS[name]
    raise ConfigError(
        f"No feature map is called {short_repr(name)}.{did_you_mean(name, FEATURE_MAPS)} "
        f"Available: {', '.join(FEATURE_MAPS)}. A map of your own needs a name before a spec or a "
        "file refers to it: @attnzoo.register_feature_map('name') above a function of one tensor."
    )


# -- the options -----------------------------------------------------------------------------------

# The smallest value of each option of a map
MINIMUM = {"nu": 1, "num_features": 2, "seed": 0, "max_length": 1}


@dataclass(frozen=True, kw_only=True)
class FeatureMapConfig(BackendConfig):
    """Settings of attention through a feature map.

    An option that is left out gets the map's default, so that saved specs contain it.

    Attributes:
        feature_map: phi, a registered name (see :mod:`attnzoo.backends.feature_maps.base`).
        nu: The number of offsets of ``dpfp``.
        num_features: The number of features of ``hedgehog_exp``, ``squared_relu`` or ``random``,
            where it is even.
        seed: Seed of the draw of these, together with the layer's index.
        max_length: M of ``cosine``, in tokens; later positions count as the last. ``None`` means
            that of the model.
    """

    largest: ClassVar[Mapping[str, int]] = {
        **BackendConfig.largest,
        "num_features": 2**16,
        "nu": 2**16,
    }
    feature_map: str = "elu+1"
    nu: int | None = None
    num_features: int | None = None
    seed: int | None = None
    max_length: int | None = None

    def __post_init__(self) -> None:
        name = type(self).__name__
        try:
            super().__post_init__()
            feature_map = get_feature_map(self.feature_map)
        except ConfigError as error:
            message = str(error)
            where = "" if message.startswith(name) else f"{name}.feature_map: "
            raise ConfigError(f"{where}{message}") from None
        for option, minimum in MINIMUM.items():
            value = getattr(self, option)
            if value is None:
                object.__setattr__(self, option, feature_map.options.get(option))
                continue
            if option not in feature_map.options:
                names = [repr(n) for n, cls in FEATURE_MAPS.items() if option in cls.options]
                raise ConfigError(
                    f"{name}.{option} is an option of feature_map={' or '.join(names)}, got "
                    f"{value} with feature_map={self.feature_map!r}; leave it out"
                )
            default = feature_map.options[option]
            default_text = "the model's own" if default is None else default
            if value < minimum:
                raise ConfigError(
                    f"{name}.{option} must be at least {minimum}, got {value}; leave it out to "
                    f"have {default_text}"
                )
            if reason := feature_map.option_reason(option, value):
                raise ConfigError(
                    f"{name}.{option} {reason}, got {value}; the default is {default_text}"
                )

    def changed_options(self) -> dict[str, Any]:
        """Return the options that differ from the defaults of the backend and of the map."""
        of_map = get_feature_map(self.feature_map).options
        changed = super().changed_options()
        return {key: x for key, x in changed.items() if key not in of_map or x != of_map[key]}
