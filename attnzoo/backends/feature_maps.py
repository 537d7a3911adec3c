"""Feature maps as modules, with their weights, and the table that the option names them from.

A map of your own is a function of queries or keys, or a :class:`FeatureMap` where the two differ or
something is learned::

    @register_feature_map("square")
    def square(x: Tensor) -> Tensor:
        return x * x

Letters: B batch, H heads, T tokens, D head size, F features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from attnzoo.backends.config import BackendConfig, Geometry
from attnzoo.errors import ConfigError, did_you_mean
from attnzoo.ops.feature_maps import (
    elu_plus_one,
    exp_keys,
    exp_queries,
    hedgehog,
    relu,
    widen,
)


class FeatureMap(nn.Module):
    """What queries and keys of one layer pass through; without weights unless a subclass adds some.

    Args:
        config: The backend's options.
        geometry: Shape of the layer.
    """

    learned: ClassVar[bool] = False

    def __init__(self, config: BackendConfig, geometry: Geometry) -> None:
        super().__init__()
        self.geometry = geometry

    @property
    def size(self) -> int:
        """F, features per head."""
        return self.geometry.head_dim

    def queries(self, q: Tensor, scale: float) -> Tensor:
        """Map ``[B, H, T, D]`` to ``[B, H, T, F]``, not negative, float32 or wider."""
        raise NotImplementedError

    def keys(self, k: Tensor, scale: float) -> Tensor:
        """Map ``[B, Hkv, S, D]`` to ``[B, Hkv, S, F]``, not negative, float32 or wider."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Give the weights their initial values."""


class FunctionMap(FeatureMap):
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

    def queries(self, q: Tensor, scale: float) -> Tensor:
        """Apply the function."""
        return self.function(widen(q))

    def keys(self, k: Tensor, scale: float) -> Tensor:
        """Apply the function."""
        return self.function(widen(k))


M = TypeVar("M", bound="type[FeatureMap] | Callable[[Tensor], Tensor]")
FEATURE_MAPS: dict[str, type[FeatureMap]] = {}


def _empty_map(name: str) -> FunctionMap:
    """Make a map to be filled by unpickling."""
    cls = get_feature_map(name)
    assert issubclass(cls, FunctionMap)
    return cls.__new__(cls)


def register_feature_map(name: str) -> Callable[[M], M]:
    """Decorator: make a map available as ``feature_map=name``, which no other may hold."""

    def add(given: M) -> M:
        if name in FEATURE_MAPS:
            owner = FEATURE_MAPS[name]
            raise ValueError(
                f"feature map {name!r} belongs to {owner.__module__}.{owner.__qualname__}; "
                "register yours under another name"
            )
        if isinstance(given, type):
            FEATURE_MAPS[name] = given
        else:
            members = {"function": staticmethod(given), "registered": name}
            members["__module__"] = given.__module__
            FEATURE_MAPS[name] = type(given.__name__, (FunctionMap,), members)
        return given

    return add


def get_feature_map(name: str) -> type[FeatureMap]:
    """Return the map called ``name``.

    Raises:
        ConfigError: No map has this name.
    """
    if name in FEATURE_MAPS:
        return FEATURE_MAPS[name]
    raise ConfigError(
        f"No feature map is called {name!r}.{did_you_mean(name, FEATURE_MAPS)} "
        f"Available: {', '.join(FEATURE_MAPS)}."
    )


register_feature_map("elu+1")(elu_plus_one)
register_feature_map("relu")(relu)


@register_feature_map("exp")
class ExpMap(FeatureMap):
    """The exponential of every entry, with the layer's scale; see :func:`exp_queries`."""

    def queries(self, q: Tensor, scale: float) -> Tensor:
        """Map queries, each row divided by its largest feature."""
        return exp_queries(q, scale)

    def keys(self, k: Tensor, scale: float) -> Tensor:
        """Map keys, bounded."""
        return exp_keys(k, scale)


@register_feature_map("hedgehog")
class HedgehogMap(FeatureMap):
    """Two softmaxes over a learned map of every head; queries and keys have maps of their own.

    Kept is what a map differs from the identity by. So training starts at the identity, weight
    decay pulls towards it, and 16-bit weights can hold changes smaller than the gap of 2^-7
    (bfloat16) or 2^-10 (float16) between one and the next number above it.
    """

    learned = True

    def __init__(self, config: BackendConfig, geometry: Geometry) -> None:
        super().__init__(config, geometry)
        size = geometry.head_dim
        self.query_residual = nn.Parameter(torch.empty(geometry.num_heads, size, size))
        self.key_residual = nn.Parameter(torch.empty(geometry.num_key_heads, size, size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start at the identity."""
        nn.init.zeros_(self.query_residual)
        nn.init.zeros_(self.key_residual)

    @property
    def size(self) -> int:
        """F, two features per entry."""
        return 2 * self.geometry.head_dim

    def queries(self, q: Tensor, scale: float) -> Tensor:
        """Map queries; the scale is part of what is learned."""
        return hedgehog(q, self.query_residual)

    def keys(self, k: Tensor, scale: float) -> Tensor:
        """Map keys; the scale is part of what is learned."""
        return hedgehog(k, self.key_residual)
