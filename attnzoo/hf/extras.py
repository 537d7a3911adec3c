"""The extras of a swap: parameters and buffers that backends add to a model."""

from __future__ import annotations

import warnings
from collections.abc import Collection

import torch
from torch import nn

from attnzoo.contract.backend import AttentionBackend
from attnzoo.contract.validation import DTYPES
from attnzoo.errors import SpecError, SwapWarning
from attnzoo.hf import seam
from attnzoo.hf.layers import AttentionLayer
from attnzoo.hf.names import NAME
from attnzoo.registry import build_backend

MOST_NAMES = 8  # in a message


def warn(message: str, *, strict: bool = False) -> None:
    """Warn the caller of a public function, which called the function that calls this one.

    Raises:
        SpecError: ``strict`` is true.
    """
    if strict:
        raise SpecError(f"{message} (an error because of strict=True)")
    warnings.warn(message, SwapWarning, stacklevel=4)


def layer_names(names: Collection[str]) -> str:
    """Return the names of layers for a message; of many, the first ones and their number."""
    ordered = list(names)
    if len(ordered) <= MOST_NAMES:
        return ", ".join(ordered)
    return f"{', '.join(ordered[:MOST_NAMES])} and {len(ordered) - MOST_NAMES} more layers"


def layer_dtype(model: nn.Module, layer: nn.Module) -> torch.dtype:
    """Return the dtype in which a layer computes, which its extras take.

    It is the dtype of the layer's weights. That of quantized weights (float8, integers) is a format
    of storage, and adapters and scales beside them are float32, so a layer that has such weights
    takes the dtype of the innermost model around it: of its first module without such weights.
    """
    if own := _weight_dtypes(layer):
        return own[0]
    around = [x for x in seam.pretrained_models(model) if layer in set(x.modules())]
    for outer in reversed(around):  # pretrained_models lists outer models first
        for module in outer.modules():
            if found := _weight_dtypes(module, recurse=False):
                return found[0]
    return torch.get_default_dtype()


def _weight_dtypes(module: nn.Module, *, recurse: bool = True) -> list[torch.dtype]:
    """Return the dtypes of a module's weights; none if it has quantized weights."""
    found = [p.dtype for p in module.parameters(recurse=recurse)]
    return found if DTYPES.issuperset(found) else []


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
    layers: list[AttentionLayer],
    backends: list[AttentionBackend],
    *,
    keep: bool,
    strict: bool = False,
) -> None:
    """Copy the extras of the present swap into new backends, or warn that trained ones are lost.

    Args:
        layers: The attention layers, whose present backends are replaced.
        backends: The new backend of each.
        keep: Whether to copy extras where backend and shapes are the same.
        strict: Whether to raise instead of the warning.
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
        dropped = f"this swap drops the trained extras of {layer_names(lost)}: {reason}"
        warn(dropped, strict=strict)


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
