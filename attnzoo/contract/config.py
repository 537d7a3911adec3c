"""The validated options of a backend, and the geometry of its layer."""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Literal, Self, Union, get_args, get_origin, get_type_hints

from attnzoo.contract.implementation import impl_names
from attnzoo.errors import ConfigError, did_you_mean, short_repr

MAX_STATE = 2**20  # largest number of latest tokens of which a state keeps the keys
MAX_SINKS = 2**12  # largest number of first tokens; a state has rows for all of them
MAX_SIZE = 2**24  # largest number of tokens, rows or features that an option or an op accepts
MAX_SEED = 2**63 - 1


def _accepts(value: object, hint: Any) -> bool:
    """Return whether a plain value matches a type annotation; bool is no number, NaN no float."""
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
        if not isinstance(value, int | float) or isinstance(value, bool):
            return False
        return abs(value) <= sys.float_info.max  # false for NaN
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(hint, type) and isinstance(value, hint)


def format_type(hint: Any) -> str:
    """Return a type annotation as an error message shows it."""
    if get_origin(hint) is Literal:
        return " or ".join(repr(choice) for choice in get_args(hint))
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(format_type(part) for part in get_args(hint))
    if get_origin(hint) is tuple:
        return f"a list of {format_type(get_args(hint)[0])}"
    if hint is type(None):
        return "None"
    return str(getattr(hint, "__name__", hint))


@dataclass(frozen=True, kw_only=True)
class BackendConfig:
    """Base class of the options of a backend; a subclass adds the options of one backend.

    Attributes:
        ops: The ops that compute the backend; ``impl`` accepts the names of their registered
            implementations. A backend without ops has one implementation, ``"reference"``.
        smallest: The smallest value of an integer option and what it counts, ``"1 token"``; a class
            has those of its bases too.
        largest: The largest value of an integer option, if it is not :data:`MAX_SIZE`; of a base
            class too.
        impl: The implementation. ``"auto"`` selects one; any other name runs that one or raises.
        attention_dropout: What the model's attention dropout drops in training: single attention
            ``"weights"``, or whole ``"keys"`` of a head (see
            :func:`~attnzoo.contract.inputs.drop_keys`); ``"off"`` disables it. ``"auto"`` drops
            weights in backends that compute them, and keys in others.
    """

    ops: ClassVar[tuple[str, ...]] = ()
    smallest: ClassVar[Mapping[str, str]] = {}
    largest: ClassVar[Mapping[str, int]] = {"seed": MAX_SEED}
    impl: str = "auto"
    attention_dropout: Literal["auto", "weights", "keys", "off"] = "auto"

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, list):  # from JSON
                value = tuple(value)
                object.__setattr__(self, field.name, value)
            if not _accepts(value, hints[field.name]):
                accepted = format_type(hints[field.name])
                raise ConfigError(
                    f"{type(self).__name__}.{field.name} must be {accepted}, "
                    f"got {short_repr(value)}"
                )
            self._check_sizes(field.name, value, field.default)
        names = self.impl_names()
        if self.impl not in names:
            accepted = " or ".join(map(repr, names))
            raise ConfigError(
                f"{type(self).__name__}.impl must be {accepted}, got "
                f"{short_repr(self.impl)}."
                f"{did_you_mean(self.impl, names)}"
            )

    def _check_sizes(self, name: str, value: object, default: object) -> None:
        """Raise ``ConfigError`` if an integer, or one in a list, is too small or too large."""
        smallest = self._limit("smallest", name, "")
        largest = self._limit("largest", name, MAX_SIZE)
        for number in value if isinstance(value, tuple) else (value,):
            if not isinstance(number, int):
                continue
            if abs(number) > largest:
                raise ConfigError(
                    f"{type(self).__name__}.{name} must be at most {largest}, "
                    f"got {short_repr(number)}"
                )
            if smallest and number < int(smallest.split()[0]):
                raise ConfigError(
                    f"{type(self).__name__}.{name} must be at least {smallest}, got {number}; "
                    f"the default is {default}"
                )

    @classmethod
    def _limit(cls, table: str, name: str, default: Any) -> Any:
        """Return the limit of an option that the first class with one has."""
        tables = (vars(base).get(table, {}) for base in cls.__mro__)
        return next((limits[name] for limits in tables if name in limits), default)

    @classmethod
    def impl_names(cls) -> tuple[str, ...]:
        """Return the values that ``impl`` accepts."""
        return impl_names(*cls.ops) if cls.ops else ("auto", "reference")

    @classmethod
    def from_options(cls, backend: str, options: Mapping[str, Any]) -> Self:
        """Return the config with the given options, which are plain data as in a spec.

        Args:
            backend: Name of the backend, for error messages.
            options: Option names and values.

        Raises:
            ConfigError: An option has an unknown name, a wrong type or an invalid value.
        """
        known = [field.name for field in fields(cls)]
        for name in options:
            if name not in known:
                raise ConfigError(
                    f"Backend {backend!r} has no option {short_repr(name)}."
                    f"{did_you_mean(str(name), known)} "
                    f"Its options are: {', '.join(known)}."
                )
        try:
            return cls(**options)
        except ConfigError as error:
            raise ConfigError(f"Backend {backend!r}: {error}") from None

    @classmethod
    def default_options(cls) -> dict[str, Any]:
        """Return every option and its default value, as plain data."""
        return {field.name: field.default for field in fields(cls)}

    def changed_options(self) -> dict[str, Any]:
        """Return the options that differ from their defaults, as plain data."""
        plain = self.all_options()
        return {f.name: plain[f.name] for f in fields(self) if plain[f.name] != f.default}

    def all_options(self) -> dict[str, Any]:
        """Return every option and its value, as plain data."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Shape of an attention layer, for which a backend is built.

    Attributes:
        num_heads: H, query heads.
        num_key_heads: Hkv, key heads; H is a multiple of it.
        head_dim: D, size of queries and keys per head.
        value_dim: E, size of values per head; ``None`` means D.
        hidden_size: M, size of the hidden states from which gates are computed.
        causal: Whether the layer is causal: a query attends to keys up to its own position.
        cross_attention: Whether keys come from another sequence than queries.
        scale: Factor of query-key products; ``None`` means ``D ** -0.5``.
        window: Sliding window of the model in this layer, in tokens, if it has one.
        chunk_size: Size of the chunks within which the model attends in this layer, in tokens, if
            it does (Llama 4).
        softcap: Soft cap of the model on attention scores in this layer, if it has one.
        sinks: Whether the model has learned attention sinks in this layer.
        dropout: Probability with which the model drops attention weights in training.
        position_bias: Whether the model adds a position bias to the scores, as T5 does.
        own_mask: What the model puts into this layer's mask itself, as a tensor or by a function of
            its own, for a message; empty if nothing.
        last_tokens: Whether the model may compute only the last tokens in this layer, or in one
            that has its keys (Gemma 4).
        max_length: Maximum sequence length of the model, if the model defines one.
        layer: Index of the layer in the model.
        name: Qualified name of the attention module, for error messages.
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
    chunk_size: int | None = None
    softcap: float | None = None
    sinks: bool = False
    dropout: float = 0.0
    position_bias: bool = False
    own_mask: str = ""
    last_tokens: bool = False
    max_length: int | None = None
    layer: int = 0
    name: str = "attention"

    def __post_init__(self) -> None:
        if (
            min(self.num_heads, self.num_key_heads, self.head_dim) < 1
            or self.num_heads % self.num_key_heads
        ):
            raise ConfigError(
                f"{self.name}: {self.num_heads} query heads over {self.num_key_heads} key heads "
                f"of size {self.head_dim} are invalid; the number of query heads must be a "
                "positive multiple of the number of key heads"
            )
        if self.value_dim is None:
            object.__setattr__(self, "value_dim", self.head_dim)
        if self.scale is None:
            object.__setattr__(self, "scale", self.head_dim**-0.5)


def check_num_sinks(config: BackendConfig, num_sinks: int, window: int | None) -> None:
    """Raise ``ConfigError`` if a number of first tokens is negative, or there is no window."""
    name = f"{type(config).__name__}.num_sinks"
    if num_sinks < 0:
        raise ConfigError(f"{name} must be at least 0 tokens, got {num_sinks}; 4 is usual")
    if num_sinks and window is None:
        raise ConfigError(
            f"{name} needs a window, got num_sinks={num_sinks} with window=None; set window, or "
            "leave num_sinks out"
        )


def sinks_shard_reasons(num_sinks: int) -> list[str]:
    """Return why first tokens beside a window are unsupported under context parallelism."""
    if not num_sinks:
        return []
    return [f"num_sinks={num_sinks} is unsupported under context parallelism (set num_sinks=0)"]
