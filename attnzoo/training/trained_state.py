"""What training changes: state dicts without frozen weights, and a context that restores it.

A resumed run reads frozen weights from the model's folder again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from attnzoo.training.transfer import extras


@contextmanager
def without_frozen_weights(model: nn.Module) -> Iterator[None]:
    """Context in which a model's state dict lacks its frozen weights, and loads without them.

    Parameters of backends are in it even if they are frozen, because an earlier stage of the run
    may have trained them, and so are all buffers.

    Args:
        model: A model, possibly wrapped for several processes or sharded by FSDP2.
    """
    kept = {id(p) for p in extras(model).values()}
    frozen = {
        name
        for name, p in model.named_parameters(remove_duplicate=False)  # tied weights have two
        if not p.requires_grad and id(p) not in kept
    }

    def remove_frozen(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
        for name in list(state):  # those in 4 bits have scales, whose names begin as theirs
            if name in frozen or name.rpartition(".weight.")[0] + ".weight" in frozen:
                del state[name]

    def accept_missing(module: nn.Module, keys: Any) -> None:
        keys.missing_keys[:] = [name for name in keys.missing_keys if name not in frozen]

    hooks = (
        model.register_state_dict_post_hook(remove_frozen),
        model.register_load_state_dict_post_hook(accept_missing),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Context after which a model has the parameters, buffers and modes that it had before."""
    modes = {module: module.training for module in model.modules()}
    tensors = [p for p in model.parameters() if p.requires_grad] + list(model.buffers())
    saved = [x.detach().clone() for x in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for x, before in zip(tensors, saved, strict=True):
                x.copy_(before)
                x.grad = None
        for module, training in modes.items():
            module.training = training
