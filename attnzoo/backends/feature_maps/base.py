"""Feature maps as modules with weights, and the registry that ``feature_map`` refers to.

A map of your own is a function of queries or keys, or a :class:`FeatureMap` if the two differ or
the map has weights::

    @register_feature_map("square")
    def square(x: Tensor) -> Tensor:
        return x * x

A function at the top level of a module can be passed as it is, ``feature_map=square``; a config
stores it as ``"your_module:square"``. Loading that config does not import the module: register the
map under the name in the config first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import FunctionType
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
        self.geometry = geometry
        self.given = {name: getattr(config, name, None) for name in self.options}

    @classmethod
    def option_reason(cls, name: str, value: int) -> str:
        """Return why an option's value is invalid, other than being too small, or ``""``."""
        return ""

    def option(self, name: str) -> int:
        """Return the value of an option, or the map's default."""
        given = self.given[name]
        value = self.options[name] if given is None else given
        assert value is not None
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
    """Return a map without attributes, which unpickling sets; unpickling imports modules anyway."""
    cls = import_feature_map(name)
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
    module, colon, path = name.partition(":")
    is_short = len(name) <= 200  # the message quotes the parts of a plausible name
    if (
        colon
        and is_short
        and all(part.isidentifier() for part in (*module.split("."), *path.split(".")))
    ):
        raise ConfigError(
            f"The feature map {name!r} is not registered, and a name in a file, in plain data or "
            "on the command line does not import code. If you trust the module, register the map "
            f"in Python first: import {module}; "
            f"attnzoo.register_feature_map({name!r})({module}.{path}). Or pass it from Python, "
            f"AttentionSpec(..., feature_map={name!r})"
        )
    raise ConfigError(
        f"No feature map is called {short_repr(name)}.{did_you_mean(name, FEATURE_MAPS)} "
        f"Available: {', '.join(FEATURE_MAPS)}."
    )


def import_feature_map(name: str) -> type[FeatureMap]:
    """Return the map called ``name``; imports and registers it if the name is ``"module:name"``.

    Only for names that come from a Python caller.

    Raises:
        ConfigError: No map has this name, or it cannot be imported.
    """
    if name not in FEATURE_MAPS and ":" in name:
        FEATURE_MAPS[name] = _as_class(name, _import(name))
    return get_feature_map(name)


def feature_map_name(value: Any) -> str:
    """Return the registered name of a function or class; without one, register ``"module:name"``.

    Raises:
        ConfigError: It cannot be imported by a name, so no config can refer to it.
    """
    for name, cls in FEATURE_MAPS.items():
        if value in (cls, getattr(cls, "function", None)):
            return name
    is_map = isinstance(value, type) and issubclass(value, FeatureMap)
    if not isinstance(value, FunctionType) and not is_map:
        raise ConfigError(
            f"A feature map is a registered name, a Python function of one tensor, or a subclass "
            f"of attnzoo.FeatureMap; got {value!r} of type {type(value).__name__}. Write a "
            "function that calls it, with @attnzoo.register_feature_map('name') above it, and pass "
            "the name"
        )
    module, qualname = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if module and qualname and module != "__main__" and "<" not in qualname:
        name = f"{module}:{qualname}"
        if _import(name) is value:
            import_feature_map(name)
            return name
    raise ConfigError(
        f"{value!r} cannot be stored in a config, which refers to a map by name. Register a name, "
        "with @attnzoo.register_feature_map('name') above a function of one tensor or a "
        "FeatureMap, or define it at the top level of a module that can be imported"
    )


def _import(name: str) -> Any:
    """Import and return ``"module:name"``, a function or a subclass of :class:`FeatureMap`."""
    module, _, path = name.partition(":")
    try:
        found: Any = import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"The feature map {name!r} cannot be imported: {error}; install its module, or add the "
            "module's folder to PYTHONPATH"
        ) from error
    if isinstance(found, FunctionType) or (
        isinstance(found, type) and issubclass(found, FeatureMap)
    ):
        return found
    raise ConfigError(
        f"The feature map {name!r} is {found!r}; it must be a Python function of one tensor, or a "
        "class derived from attnzoo.backends.feature_maps.base.FeatureMap"
    )


# -- the options -----------------------------------------------------------------------------------

# The smallest value of each option of a map
MINIMUM = {"nu": 1, "num_features": 2, "seed": 0, "max_length": 1}


@dataclass(frozen=True, kw_only=True)
class FeatureMapConfig(BackendConfig):
    """Settings of attention through a feature map.

    An option that is left out gets the map's default, so that saved specs contain it.

    Attributes:
        feature_map: phi, a name (see :mod:`attnzoo.backends.feature_maps.base`); in Python,
            a function or a class, or in an ``AttentionSpec`` its ``"module:name"``.
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
            if callable(self.feature_map):
                object.__setattr__(self, "feature_map", feature_map_name(self.feature_map))
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

    @classmethod
    def import_options(cls, options: Mapping[str, Any]) -> None:
        """Import and register the feature map that a Python caller names as ``"module:name"``."""
        name = options.get("feature_map")
        if not isinstance(name, str) or ":" not in name:
            return
        try:
            import_feature_map(name)
        except ConfigError as error:
            raise ConfigError(f"{cls.__name__}.feature_map: {error}") from None
