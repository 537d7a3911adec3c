"""The plain-data description of a swap: which backend, its options, and which layers differ."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any, NamedTuple, Self

from attnzoo.errors import SpecError, did_you_mean
from attnzoo.registry import get_backend

VERSION = 1
_KEYS = ("version", "backend", "options", "layers", "else")
_RANGE = re.compile(r"\s*(\d{1,5})\s*(?:-\s*(\d{1,5})\s*)?")
_MODULE = re.compile(r"[A-Za-z_]\w*(?:\.\w+)*")  # "encoder_attn", "decoder.layers.0.self_attn"
_PART = re.compile(r"(?P<part>[A-Za-z_]\w*(?:\.\w+)*)\.(?P<numbers>[\d\s,-]+)")


def _plain(value: Any) -> Any:
    """Turn tuples into lists, so that data are the same before and after a trip through JSON."""
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class LayerSpec:
    """A backend and its options, for the layers that take them."""

    backend: str
    options: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data; options only where some were given."""
        return {
            "backend": self.backend,
            **({"options": _plain(self.options)} if self.options else {}),
        }


def _layer_spec(value: object, where: str) -> LayerSpec:
    """Read and check an entry: ``"flash"`` or ``{"backend": "flash", "options": {...}}``."""
    if isinstance(value, LayerSpec):
        value = value.to_dict()
    if isinstance(value, str):
        value = {"backend": value}
    if not isinstance(value, Mapping) or "backend" not in value:
        raise SpecError(
            f'{where} must be a backend\'s name or {{"backend": name, "options": {{...}}}}, '
            f"got {value!r}"
        )
    for key in value:
        if key not in ("backend", "options"):
            raise SpecError(
                f"{where} has an unknown key {key!r}."
                f"{did_you_mean(str(key), ('backend', 'options'))} It takes backend and options."
            )
    options = {} if value.get("options") is None else value["options"]
    if not isinstance(options, Mapping):
        raise SpecError(f"{where}: options must map names to values, got {options!r}")
    config = get_backend(value["backend"]).config_class.from_options(value["backend"], options)
    return LayerSpec(value["backend"], config.changed_options())


def parse_layers(text: str) -> list[int]:
    """Read layer numbers such as ``"0-1,11"``, both ends of a range included.

    Raises:
        SpecError: The text is not a list of numbers and ranges.
    """
    numbers: list[int] = []
    for part in str(text).split(","):
        match = _RANGE.fullmatch(part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last < first:
            raise SpecError(
                f"Layers {text!r} are not understood at {part.strip()!r}; write numbers and rising "
                'ranges separated by commas, such as "0-1,11"'
            )
        numbers.extend(range(first, last + 1))
    return numbers


class LayerKey(NamedTuple):
    """What a key of ``layers`` names: numbers, numbers within a part, or modules by their name."""

    part: str  # "" with plain numbers
    numbers: tuple[int, ...] | None  # None where the key is a module's name, or the end of one

    @classmethod
    def read(cls, text: str) -> Self:
        """Read a key: ``"0-1,11"``, ``"decoder.0-1"`` or ``"encoder_attn"``.

        Raises:
            SpecError: It is none of them, or names a layer twice.
        """
        match = _PART.fullmatch(text)
        if match is None and _MODULE.fullmatch(text):
            return cls(text, None)
        part, numbers = (match["part"], match["numbers"]) if match else ("", text)
        found = parse_layers(numbers)
        twice = [number for number in found if found.count(number) > 1]
        if twice:
            raise SpecError(f"Layer {twice[0]} is named twice in {text!r}")
        return cls(part, tuple(found))

    def names(self, number: int, name: str) -> bool:
        """Whether the key names the layer ``number``, the module ``name``."""
        if self.numbers is None:
            return f".{name}".endswith(f".{self.part}")
        return number in self.numbers and self._within(name)

    def _within(self, name: str) -> bool:
        return not self.part or f".{self.part}." in f".{name}."

    def refuse_missing(self, text: str, present: list[tuple[int, str]]) -> None:
        """Refuse the key, written ``text``, if a model does not have what it names."""
        if self.numbers is None:
            if not any(self.names(*layer) for layer in present):
                ends = sorted({name.rpartition(".")[2] for _, name in present})
                raise SpecError(
                    f"The spec names {text!r}, but no attention module of the model is called so; "
                    f"their names end in {', '.join(ends) or 'nothing, for there are none'}. "
                    'Layers go by number too, such as "0-1,11" or "decoder.0-1"'
                )
            return
        numbers = sorted({number for number, name in present if self._within(name)})
        missing = [str(number) for number in self.numbers if number not in numbers]
        if missing:
            span = f"{numbers[0]} to {numbers[-1]}" if numbers else "none"
            whose = f"those within {self.part!r}" if self.part else "the model's attention layers"
            raise SpecError(f"The spec names layer {', '.join(missing)}, but {whose} are {span}.")


class AttentionSpec:
    """Which backend each attention layer of a model gets; validated when made, plain when stored.

    Args:
        backend: Name of the backend for all layers that ``layers`` does not name.
        layers: Exceptions: layers to a backend's name, or to ``{"backend": name, "options":
            {...}}``. Layers are named by number, ``"0-1,11"``; by number within a part of the
            model, ``"decoder.0-1"``; or by the end of a module's name, ``"encoder_attn"``.
        else_: The backend, in the same form, for layers that the chosen one refuses
            (cross-attention, a sliding window); without it a refusal is an error.
        **options: Options of ``backend``.

    Raises:
        UnknownBackendError: No backend has this name.
        ConfigError: An option has an unknown name, a wrong type or is out of range.
        SpecError: ``layers`` is malformed or names a layer twice.

    Example:
        >>> spec = AttentionSpec("linear", feature_map="relu", layers={"0-1": "flash"})
        >>> spec.for_layer(1).backend, spec.for_layer(2).backend
        ('flash', 'linear')
    """

    def __init__(
        self,
        backend: str,
        *,
        layers: Mapping[str, Any] | None = None,
        else_: Any | None = None,
        **options: Any,
    ) -> None:
        self._read(backend, options, layers, else_)

    def _read(self, backend: object, options: object, layers: object, else_: object) -> None:
        """Check all parts and keep them."""
        self.default = _layer_spec({"backend": backend, "options": options}, "The spec")
        self.else_ = None if else_ is None else _layer_spec(else_, '"else"')
        if layers is not None and not isinstance(layers, Mapping):
            raise SpecError(
                'layers must map layer numbers to backends, such as {"0-1": "flash"}, '
                f"got {layers!r}"
            )
        self.layers: dict[str, LayerSpec] = {}
        self._keys: dict[str, LayerKey] = {}
        plain: set[int] = set()
        for given, value in (layers or {}).items():
            text = str(given)
            self.layers[text] = _layer_spec(value, f"layers[{given!r}]")
            key = self._keys[text] = LayerKey.read(text)
            numbers = () if key.part else key.numbers or ()
            for number in plain.intersection(numbers):
                raise SpecError(
                    f"Layer {number} is named twice under layers, the second time by {text!r}"
                )
            plain.update(numbers)

    def for_layer(self, number: int, name: str = "") -> LayerSpec:
        """Return the entry of layer ``number``, the attention module ``name``."""
        named = (text for text, key in self._keys.items() if key.names(number, name))
        return self.layers.get(next(named, ""), self.default)

    def check_layers(self, numbers: Iterable[int], names: Iterable[str] = ()) -> None:
        """Refuse a spec that names layers which a model does not have, or one of them twice.

        Args:
            numbers: The number of each of the model's attention layers.
            names: The name of each of their modules.

        Raises:
            SpecError: A key names no layer, or two keys name the same one.
        """
        names = chain(names, repeat(""))
        present = list(zip(numbers, names, strict=False))
        for text, key in self._keys.items():
            key.refuse_missing(text, present)
        for number, name in present:
            by = [text for text, key in self._keys.items() if key.names(number, name)]
            if len(by) > 1:
                raise SpecError(
                    f"Layer {number} ({name}) is named twice under layers, by {by[0]!r} and "
                    f"{by[1]!r}"
                )

    def to_dict(self) -> dict[str, Any]:
        """Return the spec as plain JSON data, as it stands in ``config.attnzoo``."""
        data: dict[str, Any] = {"version": VERSION, **self.default.to_dict()}
        if self.layers:
            data["layers"] = {key: entry.to_dict() for key, entry in self.layers.items()}
        if self.else_ is not None:
            data["else"] = self.else_.to_dict()
        return data

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """Read a spec from plain data.

        Raises:
            SpecError: The data is malformed or of a newer version.
            UnknownBackendError: It names an unknown backend.
            ConfigError: It holds a wrong option.
        """
        if not isinstance(data, Mapping) or "backend" not in data:
            raise SpecError(
                f'A spec is plain data such as {{"version": {VERSION}, "backend": "linear"}}, '
                f"got {data!r}"
            )
        version = data.get("version", VERSION)
        if not isinstance(version, int) or isinstance(version, bool) or version < 1:
            raise SpecError(f"The spec's version must be a number from 1 on, got {version!r}")
        if version > VERSION:
            raise SpecError(
                f"The spec has version {version}, but this attnzoo reads up to {VERSION}; "
                "upgrade attnzoo"
            )
        for key in data:
            if key not in _KEYS:
                raise SpecError(
                    f"The spec has an unknown key {key!r}.{did_you_mean(str(key), _KEYS)} "
                    f"It takes {', '.join(_KEYS)}."
                )
        spec = cls.__new__(cls)  # options go by mapping: none may pass for an argument
        spec._read(data["backend"], data.get("options"), data.get("layers"), data.get("else"))
        return spec

    def __eq__(self, other: object) -> bool:
        """Two specs are equal when their plain data are."""
        return isinstance(other, AttentionSpec) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        """Write the spec as its plain data."""
        return f"AttentionSpec.from_dict({self.to_dict()!r})"
