"""The spec of a swap as plain data: a backend, its options, and exceptions for some layers."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, pairwise, repeat
from typing import Any, NamedTuple, Self

from attnzoo.contract.config import BackendConfig
from attnzoo.errors import SpecError, did_you_mean, short_repr
from attnzoo.registry import available_backends, get_backend

VERSION = 1
_KEYS = ("version", "backend", "options", "layers", "else")
_RANGE = re.compile(r"\s*(\d{1,5})\s*(?:-\s*(\d{1,5})\s*)?")
_MODULE = re.compile(r"[A-Za-z_]\w*(?:\.\w+)*")  # "encoder_attn", "decoder.layers.0.self_attn"
_PART = re.compile(r"(?P<part>[A-Za-z_]\w*(?:\.\w+)*)\.(?P<numbers>[\d\s,-]+)")


def _plain(value: Any) -> Any:
    """Convert tuples to lists, so that data are equal before and after JSON."""
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class LayerSpec:
    """A backend and its options, validated once.

    Attributes:
        backend: Name of the backend.
        options: The options that differ from their defaults, as plain data.
        config: The config made from them, from which each layer's backend is built.
    """

    backend: str
    options: Mapping[str, Any]
    config: BackendConfig = field(compare=False, repr=False)

    def to_dict(self, *, defaults: bool = False) -> dict[str, Any]:
        """Return plain JSON data: the options that differ from their defaults, or all of them."""
        options = self.config.all_options() if defaults else self.options
        return {"backend": self.backend, **({"options": _plain(options)} if options else {})}


def _short(entry: dict[str, Any]) -> str | dict[str, Any]:
    """Return an entry of a spec's plain data as its backend's name, if it has no options."""
    name: str = entry["backend"]
    return entry if "options" in entry else name


def split_pair(text: str, expected: str) -> tuple[str, str]:
    """Split ``NAME=VALUE``.

    Raises:
        SpecError: A part is missing; the message begins with ``expected``.
    """
    name, separator, value = (part.strip() for part in text.partition("="))
    if not separator or not name or not value:
        raise SpecError(f"{expected}; got {short_repr(text)}")
    return name, value


def _parse_option(text: str, expected: str) -> tuple[str, Any]:
    """Split ``NAME=VALUE`` and parse the value: JSON (numbers, true, null, lists), or else text."""
    name, value = split_pair(text, expected)
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError):  # also of too many digits, or brackets
        return name, value


def parse_backend(text: str, expected: str) -> dict[str, Any]:
    """Parse ``NAME`` or ``NAME:OPTION=VALUE,OPTION=VALUE``; a value may be a JSON list.

    Returns:
        The same as ``{"backend": NAME, "options": {...}}``.

    Raises:
        SpecError: The text is malformed, or contains an option twice; the message begins with
            ``expected``.
    """
    name, _, options = text.partition(":")
    found: dict[str, Any] = {}
    for part in re.split(r",(?=\s*\w+=)", options) if options else ():
        option, value = _parse_option(part, expected)
        if option in found:
            raise SpecError(f"{expected}; got {short_repr(option)} twice in {short_repr(text)}")
        found[option] = value
    return {"backend": name.strip(), "options": found}


def format_backend(name: str, options: Mapping[str, Any]) -> str:
    """Return the text of a backend with options, the inverse of :func:`parse_backend`."""
    parts = (
        f"{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in options.items()
    )
    return f"{name}:{','.join(parts)}".rstrip(":")


def _layer_spec(value: object, where: str) -> LayerSpec:
    """Return an entry from one of its forms, validated.

    They are ``"flash"``, ``"flash:window=64"`` and ``{"backend": "flash", "options": {...}}``.
    """
    if isinstance(value, LayerSpec):
        return value
    if isinstance(value, str):
        value = {"backend": value}
    if not isinstance(value, Mapping) or "backend" not in value:
        raise SpecError(
            f'{where} must be a backend\'s name, "NAME:OPTION=VALUE,..." or {{"backend": name, '
            f'"options": {{...}}}}, got {short_repr(value)}'
        )
    _refuse_unknown_keys(value, where, ("backend", "options"))
    name, options = value["backend"], {} if value.get("options") is None else value["options"]
    if not isinstance(options, Mapping):
        raise SpecError(f"{where}: options must map names to values, got {short_repr(options)}")
    if isinstance(name, str) and ":" in name and name not in available_backends():
        parsed = parse_backend(
            name,
            f'{where} takes "NAME:OPTION=VALUE,...", such as "flash:window=64", or '
            '{"backend": "flash", "options": {"window": 64}}',
        )
        name = parsed["backend"]
        for option in parsed["options"].keys() & options.keys():
            raise SpecError(
                f"{where} has the option {short_repr(option)} twice, after the name and apart"
            )
        options = {**parsed["options"], **options}
    config_class = get_backend(name).config_class
    config = config_class.from_options(name, options)
    return LayerSpec(name, config.changed_options(), config)


def _refuse_unknown_keys(value: Mapping[Any, Any], where: str, known: tuple[str, ...]) -> None:
    """Raise ``SpecError`` if a mapping has other keys, such as options beside its backend."""
    unknown = {key: value[key] for key in value if key not in known}
    if not unknown:
        return
    key = next(iter(unknown))
    hint = did_you_mean(str(key), known)
    if not hint:
        given = value.get("options")
        options = {**given, **unknown} if isinstance(given, Mapping) else unknown
        form = short_repr({"backend": value["backend"], "options": options})
        hint = f' Write options as {form}, or behind the name as "NAME:OPTION=VALUE,...".'
    raise SpecError(
        f"{where} has an unknown key {short_repr(key)}.{hint} It takes {', '.join(known)}."
    )


def parse_layers(text: str) -> list[range]:
    """Return the ranges of layer numbers of a text such as ``"0-1,11"``, in ascending order.

    They are not expanded: a text of a few characters can name a hundred thousand layers.

    Raises:
        SpecError: The text is not a list of numbers and ranges, or contains a number twice.
    """
    found: list[range] = []
    for part in str(text).split(","):
        match = _RANGE.fullmatch(part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last < first:
            raise SpecError(
                f"Layers {short_repr(text)} are invalid at {short_repr(part.strip())}; write "
                'numbers and ascending ranges separated by commas, such as "0-1,11"'
            )
        found.append(range(first, last + 1))
    found.sort(key=lambda numbers: numbers.start)
    for one, other in pairwise(found):
        if other.start < one.stop:
            raise SpecError(f"Layer {other.start} is named twice in {short_repr(text)}")
    return found


class LayerKey(NamedTuple):
    """A parsed key of ``layers``: layer numbers, numbers within a submodule, or a module name."""

    part: str  # name of the submodule; "" with plain numbers
    numbers: Sequence[range] | None  # ascending; None if ``part`` is the end of a module name

    @classmethod
    def read(cls, text: str) -> Self:
        """Parse a key: ``"0-1,11"``, ``"decoder.0-1"`` or ``"encoder_attn"``.

        Raises:
            SpecError: The key is invalid, or names a layer twice.
        """
        match = _PART.fullmatch(text)
        if match is None and _MODULE.fullmatch(text):
            return cls(text, None)
        part, numbers = (match["part"], match["numbers"]) if match else ("", text)
        return cls(part, parse_layers(numbers))

    def names(self, number: int, name: str) -> bool:
        """Return whether the key names layer ``number``, whose module is ``name``."""
        if self.numbers is None:
            return f".{name}".endswith(f".{self.part}")
        index = bisect_right(self.numbers, number, key=lambda numbers: numbers.start) - 1
        return index >= 0 and number in self.numbers[index] and self._within(name)

    def _within(self, name: str) -> bool:
        return not self.part or f".{self.part}." in f".{name}."

    def refuse_missing(self, text: str, present: list[tuple[int, str]]) -> None:
        """Raise ``SpecError`` if the key ``text`` names no layer of a model."""
        if self.numbers is None:
            if not any(self.names(*layer) for layer in present):
                ends = sorted({name.rpartition(".")[2] for _, name in present})
                raise SpecError(
                    f"The spec names {short_repr(text)}, but no attention module of the model has "
                    "this name; their names end in "
                    f"{', '.join(ends) or 'nothing, as there are none'}. "
                    'Layers also have numbers, such as "0-1,11" or "decoder.0-1"'
                )
            return
        numbers = sorted({number for number, name in present if self._within(name)})
        known = set(numbers)
        absent = (str(number) for number in chain(*self.numbers) if number not in known)
        missing = list(islice(absent, 9))
        if missing:
            missing[8:] = ["..."] if len(missing) > 8 else []
            span = f"{numbers[0]} to {numbers[-1]}" if numbers else "none"
            whose = (
                f"those within {short_repr(self.part)}"
                if self.part
                else "the model's attention layers"
            )
            raise SpecError(f"The spec names layer {', '.join(missing)}, but {whose} are {span}.")


class AttentionSpec:
    """The backend of each attention layer of a model: validated on construction, saved as JSON.

    Args:
        backend: Name of the backend for all layers without an entry in ``layers``; options may
            follow it, as on the command line: ``"flash:window=64"``.
        layers: Exceptions: maps layers to a backend in the same form, or to ``{"backend": name,
            "options": {...}}``. A key is a layer number or range, ``"0-1,11"``; a number within a
            submodule, ``"decoder.0-1"``; or the end of a module name, ``"encoder_attn"``.
        else_: The backend, in the same form, for layers that the selected backend does not support
            (cross-attention, a sliding window); without it, such a layer is an error.
        **options: Options of ``backend``.

    Raises:
        UnknownBackendError: No backend has this name.
        ConfigError: An option has an unknown name, a wrong type or is out of range.
        SpecError: ``layers`` is malformed, or names a layer twice.

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
        """Validate and store all parts."""
        whole = {"backend": backend, "options": options}
        self.default = _layer_spec(whole, "The spec")
        self.else_ = None if else_ is None else _layer_spec(else_, '"else"')
        if layers is not None and not isinstance(layers, Mapping):
            raise SpecError(
                'layers must map layer numbers to backends, such as {"0-1": "flash"}, '
                f"got {short_repr(layers)}"
            )
        self.layers: dict[str, LayerSpec] = {}
        self._keys: dict[str, LayerKey] = {}
        plain: list[tuple[range, str]] = []
        for given, value in (layers or {}).items():
            text = str(given)
            self.layers[text] = _layer_spec(value, f"layers[{short_repr(given)}]")
            key = self._keys[text] = LayerKey.read(text)
            plain += [] if key.part else [(numbers, text) for numbers in key.numbers or ()]
        plain.sort(key=lambda named: named[0].start)
        for (one, by), (other, again) in pairwise(plain):
            if other.start < one.stop:
                raise SpecError(
                    f"Layer {other.start} is named twice under layers, by {short_repr(by)} and "
                    f"{short_repr(again)}"
                )

    def for_layer(self, number: int, name: str = "") -> LayerSpec:
        """Return the entry of layer ``number``, whose attention module is ``name``."""
        named = (text for text, key in self._keys.items() if key.names(number, name))
        return self.layers.get(next(named, ""), self.default)

    def check_layers(self, numbers: Iterable[int], names: Iterable[str] = ()) -> None:
        """Raise ``SpecError`` if the spec names a missing layer, or a layer twice.

        Args:
            numbers: The number of each attention layer of the model.
            names: The name of the module of each.

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
                    f"Layer {number} ({name}) is named twice under layers, by "
                    f"{short_repr(by[0])} and {short_repr(by[1])}"
                )

    def to_dict(self, *, defaults: bool = False) -> dict[str, Any]:
        """Return the spec as plain JSON data, which :meth:`from_dict` reads.

        Args:
            defaults: Whether options with their default values are included. A saved model includes
                them, so that a later version with other defaults computes the same.
        """
        data: dict[str, Any] = {"version": VERSION, **self.default.to_dict(defaults=defaults)}
        if self.layers:
            data["layers"] = {
                key: entry.to_dict(defaults=defaults) for key, entry in self.layers.items()
            }
        if self.else_ is not None:
            data["else"] = self.else_.to_dict(defaults=defaults)
        return data

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """Return the spec of plain data, such as a saved config, without importing code by name.

        Names refer to registered backends, feature maps and gates, and to installed plugins.

        Args:
            data: The return value of :meth:`to_dict`.

        Raises:
            SpecError: The data is malformed, or has a newer version.
            UnknownBackendError: The data names an unknown backend.
            ConfigError: The data contains an invalid option.
        """
        if not isinstance(data, Mapping) or "backend" not in data:
            raise SpecError(
                f'A spec is plain data such as {{"version": {VERSION}, "backend": "linear"}}, '
                f"got {short_repr(data)}"
            )
        version = data.get("version", VERSION)
        if not isinstance(version, int) or isinstance(version, bool) or version < 1:
            raise SpecError(
                f"The spec's version must be an integer of at least 1, got {short_repr(version)}"
            )
        if version > VERSION:
            raise SpecError(
                f"The spec has version {version}, but this attnzoo reads up to {VERSION}; "
                "upgrade attnzoo"
            )
        _refuse_unknown_keys(data, "The spec", _KEYS)
        spec = cls.__new__(cls)  # options are one mapping, so that none is taken for an argument
        parts = (data["backend"], data.get("options"), data.get("layers"), data.get("else"))
        spec._read(*parts)
        return spec

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as plain data, which the loading process validates."""
        return type(self).from_dict, (self.to_dict(),)

    def __eq__(self, other: object) -> bool:
        """Return whether both specs have the same plain data."""
        return isinstance(other, AttentionSpec) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        """Return the call that makes this spec, without options that have their default values."""
        data = self.to_dict()
        layers = {key: _short(entry) for key, entry in data.get("layers", {}).items()}
        keywords = data.get("options", {}) | ({"layers": layers} if layers else {})
        if "else" in data:
            keywords["else_"] = _short(data["else"])
        arguments = [repr(data["backend"]), *(f"{k}={v!r}" for k, v in keywords.items())]
        return f"AttentionSpec({', '.join(arguments)})"
