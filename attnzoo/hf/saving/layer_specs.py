"""Whether the spec of a swap describes the layers as they are now.

Backends are parts of the layers, so they move with them where layers are removed, reordered or
repeated. The spec in the config has the numbers and names of the swap.
"""

from __future__ import annotations

from collections.abc import Iterator
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
from attnzoo.spec import AttentionSpec


def require_spec_of_layers(model: nn.Module) -> None:
    """Raise if layers were moved so that the specs in the configs of a model do not describe them.

    Raises:
        SpecError: A loaded model would have other layers, or other backends in them.
    """
    seen = set()
    for inner in seam.pretrained_models(model):  # outer models first
        config = inner.config
        spec: Any = read_field(config, NAME)
        if id(config) in seen or spec is None or config._attn_implementation != NAME:
            continue
        seen.add(id(config))
        spec = spec if isinstance(spec, AttentionSpec) else AttentionSpec.from_dict(spec)
        if reason := _other_layers(inner, spec):
            raise SpecError(
                f"layers of this {type(inner).__name__} were removed, reordered or repeated after "
                f"the swap, and its spec does not describe the result ({reason}); nothing was "
                "written. Swap the model again: attnzoo.swap(model, ..., keep_extras=True)"
            )


def _other_layers(model: Any, spec: AttentionSpec) -> str:
    """Return which layers a loaded model would have with other backends, or ``""``."""
    places = list(_places(model))
    layers, backends = [x for x, _ in places], [x for _, x in places]
    try:
        spec.check_layers((x.geometry.layer for x in layers), (x.name for x in layers))
        if all(_same_name(x.name, backend.geometry.name) for x, backend in places):
            return ""
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


def _shapes(backend: nn.Module) -> dict[str, torch.Size]:
    return {name: x.shape for name, x in backend.state_dict().items()}
