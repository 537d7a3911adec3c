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
from attnzoo.ops.feature_maps import widen


class FeatureMap(nn.Module):
    """What queries and keys of one layer pass through; without weights unless a subclass adds some.

    Args:
        config: The backend's options.
        geometry: Shape of the layer.
    """

    learned: ClassVar[bool] = False
    fused: ClassVar[str] = ""  # what ops.linear calls it, where kernels apply it themselves
    positional: ClassVar[bool] = False  # whether ``queries`` and ``keys`` take ``positions`` too
    signed: ClassVar[bool] = False  # whether weights may be negative, so that sums may be zero
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
