"""Feature maps as modules, with their weights, and the table that the option names them from.

A map of your own is a function of queries or keys, or a :class:`FeatureMap` where the two differ or
something is learned::

    @register_feature_map("square")
    def square(x: Tensor) -> Tensor:
        return x * x

A function at the top level of a module can be given as it is, ``feature_map=square``; a config
keeps it as ``"your_module:square"``, and imports that module when it is loaded.

Letters: B batch, H heads, T tokens, D head size, F features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from types import FunctionType
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor, nn

from attnzoo.backends.config import BackendConfig, Geometry
from attnzoo.errors import ConfigError, did_you_mean
from attnzoo.ops.feature_maps import (
    cosine,
    dpfp,
    elu_plus_one,
    exp_keys,
    exp_queries,
    random_fourier,
    relu,
    softmax,
    taylor,
    widen,
)
from attnzoo.ops.random_features import random_projection


class FeatureMap(nn.Module):
    """What queries and keys of one layer pass through; without weights unless a subclass adds some.

    Args:
        config: The backend's options.
        geometry: Shape of the layer.
    """

    learned: ClassVar[bool] = False
    fused: ClassVar[str] = ""  # what ops.linear calls it, where kernels apply it themselves
    positional: ClassVar[bool] = False  # whether ``queries`` and ``keys`` take ``positions`` too
    # The options of the config that it takes, and their defaults
    options: ClassVar[Mapping[str, int | None]] = {}

    def __init__(self, config: BackendConfig, geometry: Geometry) -> None:
        super().__init__()
        self.geometry = geometry
        self.given = {name: getattr(config, name, None) for name in self.options}

    @classmethod
    def option_reason(cls, name: str, value: int) -> str:
        """Say what is wrong with an option's value, beyond being too small; "" if nothing is."""
        return ""

    def option(self, name: str) -> int:
        """Return an option of the config, or this map's default."""
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
        """Map queries or keys. Backends call this, so that hooks on the module run.

        Args:
            x: ``[B, H, T, D]``, or ``[B, Hkv, S, D]`` for keys.
            scale: What multiplies query-key products in softmax attention.
            of: Which of the two ``x`` are.
            positions: Where each token stands among the real ones of its sequence, ``[B, T]``;
                given to positional maps.
        """
        mapped = self.queries if of == "queries" else self.keys
        return mapped(x, scale, positions) if self.positional else mapped(x, scale)

    def queries(self, q: Tensor, scale: float, positions: Tensor | None = None) -> Tensor:
        """Map ``[B, H, T, D]`` to ``[B, H, T, F]``, float32 or wider.

        Products with the features of keys are weights; where these are normalised, they should not
        be negative.
        """
        raise NotImplementedError

    def keys(self, k: Tensor, scale: float, positions: Tensor | None = None) -> Tensor:
        """Map ``[B, Hkv, S, D]`` to ``[B, Hkv, S, F]``, float32 or wider."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Give the weights their initial values."""

    def layer_reasons(self) -> list[str]:
        """Say why this map cannot serve its layer, all at once."""
        return []


class SameMap(FeatureMap):
    """A map that does the same with queries and keys."""

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
    """One function of the head size for queries and keys alike, which takes no scale."""

    registered: ClassVar[str] = ""

    @staticmethod
    def function(x: Tensor) -> Tensor:
        """Map ``[..., D]`` to ``[..., F]``."""
        raise NotImplementedError

    def __reduce__(self) -> tuple[Callable[[str], FunctionMap], tuple[str], dict[str, Any]]:
        """Pickle by the registered name: the class was made from a function and has none."""
        return _empty_map, (self.registered,), self.__dict__

    @property
    def size(self) -> int:
        """F, found by trial."""
        trial = torch.zeros(1, 1, 1, self.geometry.head_dim, device="cpu")
        return int(self.function(trial).shape[-1])

    def features(self, x: Tensor, scale: float, positions: Tensor | None = None) -> Tensor:
        """Apply the function."""
        return self.function(widen(x))


# -- the table -------------------------------------------------------------------------------------

M = TypeVar("M", bound="type[FeatureMap] | Callable[[Tensor], Tensor]")
FEATURE_MAPS: dict[str, type[FeatureMap]] = {}


def _empty_map(name: str) -> FunctionMap:
    """Make a map to be filled by unpickling."""
    cls = get_feature_map(name)
    assert issubclass(cls, FunctionMap)
    return cls.__new__(cls)


def _as_class(name: str, given: type[FeatureMap] | Callable[[Tensor], Tensor]) -> type[FeatureMap]:
    """Return a map as a class, made if it is a function."""
    if isinstance(given, type):
        return given
    members = {"function": staticmethod(given), "registered": name, "__module__": given.__module__}
    return type(given.__name__, (FunctionMap,), members)


def register_feature_map(name: str) -> Callable[[M], M]:
    """Decorator: make a map available as ``feature_map=name``, which no other may hold."""

    def add(given: M) -> M:
        if name in FEATURE_MAPS:
            owner = FEATURE_MAPS[name]
            raise ValueError(
                f"feature map {name!r} belongs to {owner.__module__}.{owner.__qualname__}; "
                "register yours under another name"
            )
        FEATURE_MAPS[name] = _as_class(name, given)
        return given

    return add


def get_feature_map(name: str) -> type[FeatureMap]:
    """Return the map called ``name``, or import it when the name is ``"module:name"``.

    Raises:
        ConfigError: No map has this name, or it cannot be imported.
    """
    if name not in FEATURE_MAPS and ":" in name:
        FEATURE_MAPS[name] = _as_class(name, _imported(name))
    if name in FEATURE_MAPS:
        return FEATURE_MAPS[name]
    raise ConfigError(
        f"No feature map is called {name!r}.{did_you_mean(name, FEATURE_MAPS)} "
        f"Available: {', '.join(FEATURE_MAPS)}."
    )


def feature_map_name(given: Any) -> str:
    """Return what a config writes for a function or a class: its name, or ``"module:name"``.

    Raises:
        ConfigError: It has neither, so that no config could bring it back.
    """
    for name, cls in FEATURE_MAPS.items():
        if given in (cls, getattr(cls, "function", None)):
            return name
    module, qualname = getattr(given, "__module__", None), getattr(given, "__qualname__", None)
    if module and qualname and module != "__main__" and "<" not in qualname:
        name = f"{module}:{qualname}"
        if _imported(name) is given:
            return name
    raise ConfigError(
        f"{given!r} cannot be written into a config, which has to find it again when it is loaded. "
        "Give it a name, @attnzoo.register_feature_map('name') above a function of one tensor or "
        "a FeatureMap, or define it at the top level of a module that can be imported"
    )


def _imported(name: str) -> Any:
    """Import ``"module:name"``, which must be a function or a map's class."""
    module, _, path = name.partition(":")
    try:
        found: Any = import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"The feature map {name!r} cannot be imported: {error}; install what holds it, or run "
            "where it can be found"
        ) from error
    if isinstance(found, FunctionType) or (
        isinstance(found, type) and issubclass(found, FeatureMap)
    ):
        return found
    raise ConfigError(
        f"The feature map {name!r} is {found!r}; it must be a Python function of one tensor, or a "
        "class derived from attnzoo.backends.feature_maps.FeatureMap"
    )


# -- maps without weights --------------------------------------------------------------------------

register_feature_map("elu+1")(elu_plus_one)
register_feature_map("relu")(relu)
FEATURE_MAPS["elu+1"].fused, FEATURE_MAPS["relu"].fused = "elu+1", "relu"


@register_feature_map("exp")
class ExpMap(FeatureMap):
    """The exponential of every entry, with the layer's scale; see :func:`exp_queries`."""

    fused = "exp"

    def queries(self, q: Tensor, scale: float, positions: Tensor | None = None) -> Tensor:
        """Map queries, each row divided by its largest feature."""
        return exp_queries(q, scale)

    def keys(self, k: Tensor, scale: float, positions: Tensor | None = None) -> Tensor:
        """Map keys, bounded."""
        return exp_keys(k, scale)


register_feature_map("softmax")(softmax)


@register_feature_map("cosine")
class CosineMap(SameMap):
    """Relu, with nearer keys weighing more by a cosine of the distance; see :func:`cosine`.

    ``max_length`` is M, by default the model's longest; real tokens count, and a state goes on.
    """

    positional = True
    options: ClassVar = {"max_length": None}

    @property
    def length(self) -> int | None:
        """M, in tokens."""
        return self.given["max_length"] or self.geometry.max_length

    @property
    def size(self) -> int:
        """F, a cosine and a sine per entry."""
        return 2 * self.geometry.head_dim

    def layer_reasons(self) -> list[str]:
        """Say why this map cannot serve its layer, all at once."""
        reasons = []
        if self.geometry.cross_attention:
            reasons.append(
                "feature map 'cosine' weighs by the distance between query and key, and those of "
                "a cross-attention layer have none (every other map does without)"
            )
        if self.length is None:
            reasons.append(
                "feature map 'cosine' needs the length over which it fades, and the model does "
                "not say how long its sequences get (give max_length, in tokens)"
            )
        return reasons

    def features(self, x: Tensor, scale: float, positions: Tensor | None = None) -> Tensor:
        """Map queries or keys."""
        assert positions is not None
        assert self.length is not None
        return cosine(x, positions, self.length)


@register_feature_map("taylor")
class TaylorMap(SameMap):
    """The exponential's Taylor polynomial of order 2, with the layer's scale; :func:`taylor`."""

    @property
    def size(self) -> int:
        """F, of orders 0, 1 and 2."""
        size = self.geometry.head_dim
        return 1 + size + size * (size + 1) // 2

    def features(self, x: Tensor, scale: float, positions: Tensor | None = None) -> Tensor:
        """Map queries or keys."""
        return taylor(x, scale)


@register_feature_map("dpfp")
class DPFPMap(SameMap):
    """Products of neighbouring entries, of both signs; see :func:`dpfp`."""

    options: ClassVar = {"nu": 1}

    @property
    def size(self) -> int:
        """F, two features per entry and neighbour."""
        return 2 * self.geometry.head_dim * self.option("nu")

    def layer_reasons(self) -> list[str]:
        """Say why this map cannot serve its layer, all at once."""
        nu, most = self.option("nu"), 2 * self.geometry.head_dim - 1
        if nu <= most:
            return []
        return [f"nu is {nu}, and an entry has only {most} neighbours"]

    def features(self, x: Tensor, scale: float, positions: Tensor | None = None) -> Tensor:
        """Map queries or keys."""
        return dpfp(x, self.option("nu"))


@register_feature_map("random")
class RandomMap(SameMap):
    """Random Fourier features of queries and keys of length 1; see :func:`random_fourier`.

    The frequencies, one draw for all heads of a layer, are a persistent buffer drawn from the seed
    and the layer's number. Weights below zero are left as they are: a bound would put another wrong
    weight in their place. With 256 features of 64 entries, the weight of a key that points against
    the query, the smallest, lies 2.7 standard deviations above zero (1 in 400 is below).
    """

    options: ClassVar = {"num_features": 256, "seed": 0}
    frequencies: Tensor  # [M, D], half as many as features

    @classmethod
    def option_reason(cls, name: str, value: int) -> str:
        """Say what is wrong with an option's value."""
        odd = name == "num_features" and value % 2
        return "must be even, for every frequency has a cosine and a sine" if odd else ""

    def __init__(self, config: BackendConfig, geometry: Geometry) -> None:
        super().__init__(config, geometry)
        self.register_buffer("frequencies", torch.empty(self.size // 2, geometry.head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the frequencies: on the CPU, equal on every rank."""
        rows, size = self.frequencies.shape
        seed = (self.option("seed"), self.geometry.layer)
        with torch.no_grad():
            self.frequencies.copy_(random_projection(rows, size, seed=seed))

    @property
    def size(self) -> int:
        """F, two per frequency."""
        return self.option("num_features")

    def features(self, x: Tensor, scale: float, positions: Tensor | None = None) -> Tensor:
        """Map queries or keys; the scale goes with their lengths."""
        return random_fourier(x, self.frequencies)
