"""torch.compile of the layers of a model in training steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from attnzoo.hf.layers import attention_layers


def compile_layer(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return what a layer's call runs compiled."""
    return torch.compile(call)


class CompiledLayers:
    """Context in which the layers of a model run compiled, in place.

    They are compiled when they first run; those with the same attention share their graphs. Out of
    the context they run as they are, because evaluation decodes rows of many lengths, each of which
    would be compiled. What cannot be compiled, such as hooks of transfer, runs as it is.

    Args:
        model: A model, before Accelerate wraps it.
    """

    def __init__(self, model: nn.Module) -> None:
        names = dict.fromkeys(x.name.rpartition(".")[0] for x in attention_layers(model))
        layers = [model.get_submodule(name) for name in names]
        self.calls: dict[nn.Module, Any] = {x: compile_layer(x._call_impl) for x in layers}

    def __enter__(self) -> None:
        for layer, call in self.calls.items():
            layer._compiled_call_impl = call

    def __exit__(self, *error: object) -> None:
        for layer in self.calls:
            layer._compiled_call_impl = None
