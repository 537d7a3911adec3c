"""Memory of a step of an optimizer: its state, and its intermediate results."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from attnzoo.evaluation.allocations import Meter
from attnzoo.evaluation.memory_8bit import state_bytes
from attnzoo.evaluation.memory_case import MemoryCase
from attnzoo.hf.seam import trainer_optimizer


def planned_optimizer(model: nn.Module, case: MemoryCase, meter: Meter) -> tuple[int, int]:
    """Return the bytes of the state of an optimizer, and of its intermediate results.

    Args:
        model: The model, on fake tensors.
        case: The case.
        meter: Measures calls.
    """
    trained = trained_parameters(model)
    if case.optimizer == "sgd":
        return 0, 0
    if case.optimizer == "adamw_8bit":  # its kernels of GPUs update in place
        return state_bytes(model, trained), 0
    if case.optimizer == "adafactor":
        return _adafactor(trained, meter)
    sizes = [x.numel() * x.element_size() for x in trained]
    # a root and a quotient of each weight in turn, beside the quotient of the weight before it
    update = max(before + 2 * size for before, size in zip([0, *sizes], sizes, strict=False))
    return 2 * sum(sizes), update  # two moments


def measured_optimizer(model: nn.Module, case: MemoryCase, meter: Meter) -> tuple[int, int]:
    """Return what a step of an optimizer keeps, and what it uses.

    Args:
        model: The model.
        case: The case.
        meter: Measures calls.
    """
    trained = trained_parameters(model)
    if case.optimizer == "adafactor":
        return _adafactor(trained, meter)
    make = torch.optim.AdamW if case.optimizer == "adamw" else torch.optim.SGD
    optimizer: Any = make(trained, lr=1e-5)
    update = meter(optimizer.step).peak
    return bytes_of_state(optimizer), update


def _adafactor(trained: list[nn.Parameter], meter: Meter) -> tuple[int, int]:
    """Return what steps of Adafactor keep and use, which run: sizes depend on shapes.

    Gradients that accumulation or DDP has freed are made for it.
    """
    if all(x.grad is None for x in trained):
        for x in trained:
            x.grad = torch.empty_like(x)
    cls, options = trainer_optimizer("adafactor", (0.9, 0.95))
    optimizer = cls(trained, lr=1e-5, **options)
    optimizer.step()  # makes the state
    update = meter(optimizer.step).peak
    return bytes_of_state(optimizer), update


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that are trained."""
    return [x for x in model.parameters() if x.requires_grad]


def bytes_of_state(optimizer: Any) -> int:
    """Return the bytes of the tensors of an optimizer's state."""
    values = (x for entry in optimizer.state.values() for x in entry.values())
    return tensor_bytes(x for x in values if isinstance(x, Tensor))


def tensor_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Return the bytes of tensors; tied ones count once."""
    unique = {id(x): x for x in tensors if x is not None}
    return sum(x.numel() * x.element_size() for x in unique.values())
