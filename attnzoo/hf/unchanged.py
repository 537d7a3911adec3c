"""Leave a model or a cache as it was if an error is raised while it is changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from attnzoo.hf import seam


@contextmanager
def unchanged_on_error(model: nn.Module) -> Iterator[None]:
    """Context manager that resets the modules and configs of a model if the body raises.

    Parameters, buffers, submodules, hooks and fields that were set, replaced or removed are as
    before. Values that were written into a tensor are not: replace the tensor.
    """
    target: Any = model
    trained = {x: x.requires_grad for x in model.parameters()}
    done = False
    try:
        with reset_on_error((*model.modules(), *seam.all_configs(target))):
            yield
        done = True
    finally:
        if not done:
            for parameter, requires_grad in trained.items():
                parameter.requires_grad_(requires_grad)


@contextmanager
def reset_on_error(owners: Iterable[object]) -> Iterator[None]:
    """Context manager that resets the attributes of objects, and those that are containers."""
    before = []
    for fields in map(vars, owners):
        kept = {k: x.copy() for k, x in fields.items() if isinstance(x, dict | list | set)}
        before.append((fields, dict(fields), kept))
    done = False
    try:
        yield
        done = True
    finally:
        for fields, values, kept in () if done else before:
            fields.clear()
            fields.update(values)
            for name, content in kept.items():  # in place: handles of hooks refer to containers
                values[name].clear()
                add = "extend" if isinstance(content, list) else "update"
                getattr(values[name], add)(content)
