"""The spec of a swap as its layers are now: they may be others than when they were swapped.

Backends are parts of the layers, so they move with them where layers are removed, reordered or
repeated. The spec in the config has the numbers and names of the swap.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from attnzoo.contract.backend import AttentionBackend
from attnzoo.errors import AttnzooError, SpecError
from attnzoo.hf import seam
from attnzoo.hf.attach import build_backends
from attnzoo.hf.configs import read_field
from attnzoo.hf.layers import AttentionLayer, number_in_name
from attnzoo.hf.names import NAME
from attnzoo.spec import AttentionSpec, LayerSpec


@contextmanager
def current_specs(model: nn.Module) -> Iterator[None]:
    """Context manager under which configs have the specs of the layers that a model has now.

    Raises:
        SpecError: No spec gives the layers of a loaded model the backends that they have here.
    """
    found = []
    seen = set()
    for inner in seam.pretrained_models(model):  # outer models first
        config = inner.config
        spec = read_field(config, NAME)
        if id(config) in seen or spec is None or config._attn_implementation != NAME:
            continue
        seen.add(id(config))
        found.append((config, spec, _current_spec(inner, AttentionSpec.from_dict(_plain(spec)))))
    try:
        for config, _, spec in found:
            setattr(config, NAME, spec.to_dict(defaults=True))
        yield
    finally:
        for config, spec, _ in found:
            setattr(config, NAME, spec)


def _plain(spec: Any) -> Any:
    return spec.to_dict() if isinstance(spec, AttentionSpec) else spec


def _current_spec(model: Any, spec: AttentionSpec) -> AttentionSpec:
    """Return the spec if it names the layers of a model as they are, else a new one."""
    places = list(_places(model))
    layers, backends = [x for x, _ in places], [x for _, x in places]
    moved = [x for x, backend in places if not _same_name(x.name, backend.geometry.name)]
    if not moved and _names_layers(spec, layers):
        return spec
    reason = ""
    for candidate in (spec, _explicit(model, spec, layers, backends)):
        reason = _other_backends(model, candidate, layers, backends)
        if not reason:
            return candidate
    raise SpecError(
        f"layers of this {type(model).__name__} were removed, reordered or repeated after the "
        f"swap, and no spec describes the result ({reason}); nothing was written. Swap the model "
        "again: attnzoo.swap(model, ..., keep_extras=True)"
    )


def _places(model: Any) -> Iterator[tuple[AttentionLayer, AttentionBackend]]:
    """Yield each layer of a model's own spec under each of its names, and its backend."""
    others = [
        part
        for inner in seam.pretrained_models(model)
        if read_field(inner.config, NAME) is not None and inner.config is not model.config
        for part in inner.modules()
    ]
    own = set(model.modules()).difference(others)
    for name, module in model.named_modules(remove_duplicate=False):
        found = module._modules.get(NAME)
        if found is None or module not in own:
            continue
        backend: Any = getattr(found, "original_module", found)  # in PEFT's wrapper
        geometry = backend.geometry
        number = geometry.layer
        if number == number_in_name(geometry.name):  # a loaded model counts its layers again
            number = number_in_name(name)
        yield AttentionLayer(name, module, replace(geometry, layer=number, name=name)), backend


def _same_name(first: str, second: str) -> bool:
    """Return whether two names are of one layer; a model with a head has a prefix more."""
    return f".{first}".endswith(f".{second}") or f".{second}".endswith(f".{first}")


def _names_layers(spec: AttentionSpec, layers: list[AttentionLayer]) -> bool:
    """Return whether a spec names layers that are there, each once."""
    try:
        spec.check_layers((x.geometry.layer for x in layers), (x.name for x in layers))
    except SpecError:
        return False
    return True


def _explicit(
    model: Any,
    spec: AttentionSpec,
    layers: list[AttentionLayer],
    backends: list[AttentionBackend],
) -> AttentionSpec:
    """Return a spec that names each layer whose backend is not the default one."""
    numbers = [layer.geometry.layer for layer in layers]
    is_unique = len(set(numbers)) == len(numbers)
    prefix = f"{seam.base_model_name(model)}."
    named: dict[str, dict[str, Any]] = {}
    for layer, backend in zip(layers, backends, strict=True):
        entry = LayerSpec(backend.name, backend.config.changed_options(), backend.config).to_dict()
        if entry != spec.default.to_dict():
            key = str(layer.geometry.layer) if is_unique else layer.name.removeprefix(prefix)
            named[key] = entry
    data = {key: x for key, x in spec.to_dict().items() if key not in ("layers", "else")}
    return AttentionSpec.from_dict({**data, "layers": named})


def _other_backends(
    model: Any,
    spec: AttentionSpec,
    layers: list[AttentionLayer],
    backends: list[AttentionBackend],
) -> str:
    """Return which layers a spec would give other backends than they have, or ``""``."""
    try:
        with torch.random.fork_rng(devices=[]):
            made = build_backends(model, layers, spec)
    except AttnzooError as error:
        return str(error)
    for layer, new, old in zip(layers, made, backends, strict=True):
        if (new.name, new.config) != (old.name, old.config) or _shapes(new) != _shapes(old):
            return f"{layer.name} would be loaded with backend {new.name!r} and other parameters"
        if old.seeded_by_layer and layer.geometry.layer != old.geometry.layer:
            return f"the random numbers of backend {old.name!r} depend on the number of its layer"
    return ""


def _shapes(backend: nn.Module) -> dict[str, torch.Size]:
    return {name: x.shape for name, x in backend.state_dict().items()}
