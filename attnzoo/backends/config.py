"""What a backend is made from: its options, checked, and the geometry of the layer it serves."""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, Self, Union, get_args, get_origin, get_type_hints

from attnzoo.errors import ConfigError, did_you_mean


def _accepts(value: object, hint: Any) -> bool:
    """Whether a plain value fits a type annotation; a bool is no number, NaN fits nothing."""
    origin = get_origin(hint)
    if hint is Any:
        return True
    if origin is Literal:
        return value in get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_accepts(value, part) for part in get_args(hint))
    if origin is tuple:
        inner = get_args(hint)[0]
        return isinstance(value, tuple) and all(_accepts(item, inner) for item in value)
    if hint is None or hint is type(None):
        return value is None
    if hint is float:
        return (
            isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        )
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(hint, type) and isinstance(value, hint)


def _spell(hint: Any) -> str:
    """Write a type annotation the way a user would say it."""
    if get_origin(hint) is Literal:
        return " or ".join(repr(choice) for choice in get_args(hint))
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_spell(part) for part in get_args(hint))
    if get_origin(hint) is tuple:
        return f"a list of {_spell(get_args(hint)[0])}"
    if hint is type(None):
        return "None"
    return str(getattr(hint, "__name__", hint))


@dataclass(frozen=True, kw_only=True)
class BackendConfig:
    """Options that every backend has; each backend adds its own in a subclass."""

    impl: str = "auto"  # who computes it; only "auto" chooses, any other name runs or raises

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, list):  # from JSON
                value = tuple(value)
                object.__setattr__(self, field.name, value)
            if not _accepts(value, hints[field.name]):
                raise ConfigError(
                    f"{type(self).__name__}.{field.name} must be {_spell(hints[field.name])}, "
                    f"got {value!r}"
                )

    @classmethod
    def from_options(cls, backend: str, options: Mapping[str, Any]) -> Self:
        """Make the config from plain options, as they stand in a spec.

        Raises:
            ConfigError: An option has an unknown name, a wrong type or is out of range.
        """
        known = [field.name for field in fields(cls)]
        for name in options:
            if name not in known:
                raise ConfigError(
                    f"Backend {backend!r} has no option {name!r}.{did_you_mean(str(name), known)} "
                    f"It has: {', '.join(known)}."
                )
        try:
            return cls(**options)
        except ConfigError as error:
            raise ConfigError(f"Backend {backend!r}: {error}") from None

    @classmethod
    def default_options(cls) -> dict[str, Any]:
        """Return every option with its default, as plain data."""
        return {field.name: field.default for field in fields(cls)}

    def changed_options(self) -> dict[str, Any]:
        """Return the options that differ from their defaults, as plain data."""
        plain = asdict(self)
        return {f.name: plain[f.name] for f in fields(self) if plain[f.name] != f.default}


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Shape of the attention layer that a backend serves.

    Attributes:
        num_heads: H, query heads.
        num_key_heads: Hkv, key heads; H is a multiple of it.
        head_dim: D, size of a query and a key.
        value_dim: E, size of a value; ``None`` means D.
        hidden_size: Size of the hidden states from which gates are computed.
        causal: Whether a query sees only keys up to its own position.
        cross_attention: Whether keys come from another sequence than queries.
        scale: What a query-key product is multiplied with; ``None`` means ``D ** -0.5``.
        window: The model's own sliding window in this layer, if it has one.
        softcap: The model's own bound on attention scores in this layer, if it has one.
        sinks: Whether the model adds a learned sink to each head's softmax in this layer.
        position_bias: Whether the model adds a bias to the scores in this layer, as T5 does.
        max_length: The longest sequence that the model was made for, if it says.
        layer: Number of the layer in the model.
        name: Qualified name of the attention module, for messages.
    """

    num_heads: int
    num_key_heads: int
    head_dim: int
    value_dim: int | None = None
    hidden_size: int | None = None
    causal: bool = True
    cross_attention: bool = False
    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    position_bias: bool = False
    max_length: int | None = None
    layer: int = 0
    name: str = "attention"

    def __post_init__(self) -> None:
        if (
            min(self.num_heads, self.num_key_heads, self.head_dim) < 1
            or self.num_heads % self.num_key_heads
        ):
            raise ConfigError(
                f"{self.name}: {self.num_heads} query heads over {self.num_key_heads} key heads of "
                f"size {self.head_dim} do not group; the number of query heads must be a positive "
                "multiple of the number of key heads"
            )
        if self.value_dim is None:
            object.__setattr__(self, "value_dim", self.head_dim)
        if self.scale is None:
            object.__setattr__(self, "scale", self.head_dim**-0.5)
