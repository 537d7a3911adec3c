"""Support models whose weights accelerate offloads to the CPU or to disk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from attnzoo.contract.backend import AttentionBackend
from attnzoo.errors import UnsupportedError
from attnzoo.hf.layers import AttentionLayer


def layer_device(module: nn.Module) -> torch.device:
    """Return the device on which a layer computes.

    Offloaded weights are on the meta device between forward passes; the hook that loads them holds
    the execution device. Quantized layers may have integer weights only, or keep them as buffers.
    """
    weight = next(chain(module.parameters(), module.buffers()), None)
    if weight is None:
        return torch.device("cpu")
    if weight.is_meta:
        for part in module.modules():
            for hook in _offload_hooks(part):
                return torch.device(hook.execution_device)
    return weight.device


def refuse_offloaded_blocks(
    model: nn.Module, layers: Sequence[AttentionLayer], backends: Sequence[AttentionBackend]
) -> None:
    """Raise if a hook loads the weights of a whole block, to which a backend would add tensors.

    The hook has no stored values for the added tensors.

    Raises:
        UnsupportedError: A backend has tensors, and its layer is in such a block.
    """
    blocks = [
        (name, part)
        for name, part in model.named_modules()
        if any(hook.place_submodules for hook in _offload_hooks(part))
    ]
    for layer, backend in zip(layers, backends, strict=True):
        for name, block in blocks:
            has_tensors = any(True for _ in (*backend.parameters(), *backend.buffers()))
            if has_tensors and any(part is layer.module for part in block.modules()):
                raise UnsupportedError(
                    f"{layer.name}: backend {backend.name!r} adds weights, and "
                    f"{name or type(model).__name__!r} is offloaded as one block "
                    "(preload_module_classes), and accelerate cannot load them; call "
                    "attnzoo.swap before the model is offloaded"
                )


def _offload_hooks(module: nn.Module) -> Iterator[Any]:
    """Yield accelerate's hooks that load a module's weights for each forward pass."""
    hook = getattr(module, "_hf_hook", None)
    for part in getattr(hook, "hooks", (hook,)):  # of a SequentialHook
        if getattr(part, "offload", False):
            yield part
