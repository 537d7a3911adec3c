"""The extras of a swap: parameters and buffers that backends add to a model."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable

import torch
from torch import nn

from attnzoo.contract.backend import AttentionBackend
from attnzoo.errors import SwapWarning
from attnzoo.hf.layers import AttentionLayer
from attnzoo.hf.names import NAME
from attnzoo.registry import build_backend

MOST_NAMES = 8  # in a message


def warn(message: str) -> None:
    """Warn the caller of a public function, which called the function that calls this one."""
    warnings.warn(message, SwapWarning, stacklevel=4)


def layer_names(names: Collection[str]) -> str:
    """Return the names of layers for a message; of many, the first ones and their number."""
    ordered = list(names)
    if len(ordered) <= MOST_NAMES:
        return ", ".join(ordered)
    return f"{', '.join(ordered[:MOST_NAMES])} and {len(ordered) - MOST_NAMES} more layers"


def initialise_backend(backend: AttentionBackend) -> None:
    """Initialise a backend's tensors, except those that were loaded from a checkpoint."""
    tensors = [*backend.named_parameters(), *backend.named_buffers()]
    loaded = {n: x.detach().clone() for n, x in tensors if getattr(x, "_is_hf_initialized", False)}
    backend.reset_parameters()
    with torch.no_grad():
        for name, x in tensors:
            if name in loaded:
                x.copy_(loaded[name])


def carry_over(
    layers: list[AttentionLayer], backends: list[AttentionBackend], *, keep: bool
) -> None:
    """Copy the extras of the present swap into new backends, or warn that trained ones are lost.

    They are copied if ``keep`` is true, where backend and shapes are the same.
    """
    lost = []
    for layer, backend in zip(layers, backends, strict=True):
        present = layer.module._modules.get(NAME)
        if present is None:
            continue
        if keep and _fits(present, backend):
            backend.load_state_dict(present.state_dict())
        elif _is_trained(present):
            lost.append(layer.name)
    if lost:
        reason = (
            "the new backends have other extras"
            if keep
            else "swap(..., keep_extras=True) keeps those of the same backend and shapes"
        )
        warn(f"this swap drops the trained extras of {layer_names(lost)}: {reason}")


def _fits(present: nn.Module, backend: AttentionBackend) -> bool:
    """Return whether the extras of a backend have the names and shapes of another's."""

    def shapes(module: nn.Module) -> dict[str, torch.Size]:
        return {name: x.shape for name, x in module.state_dict().items()}

    same = isinstance(present, AttentionBackend) and present.name == backend.name
    return same and shapes(present) == shapes(backend)


def _is_trained(present: nn.Module) -> bool:
    """Return whether a backend's parameters differ from those of a new one.

    The comparison is not possible for weights without values (on the meta device) and for a backend
    in a wrapper of PEFT, which trains it.
    """
    parameters = dict(present.named_parameters())
    if not parameters or any(x.is_meta for x in parameters.values()):
        return False
    if not isinstance(present, AttentionBackend):
        return True
    new = build_backend(present.name, present.config, present.geometry)
    return any(
        not torch.equal(x.to(parameters[name]), parameters[name])
        for name, x in new.named_parameters()
        if name in parameters  # not of a module that is shared with another layer
    )


def without_exempt(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Return names of parameters without those that set a decay or a mixture of a backend.

    Weight decay would change how far a swapped layer looks back.
    """
    exempt = {
        f"{part_name}.{name}".removeprefix(".")
        for prefix, backend in model.named_modules(remove_duplicate=False)
        if isinstance(backend, AttentionBackend)
        for part_name, part in backend.named_modules(prefix=prefix)
        for name in getattr(part, "no_weight_decay", ())
    }
    return [name for name in names if name not in exempt]
