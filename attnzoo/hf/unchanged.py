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
    before = [_Attributes(x) for x in owners]
    done = False
    try:
        yield
        done = True
    finally:
        if not done:
            for attributes in before:
                attributes.reset()


class _Attributes:
    """The attributes of an object, and the contents of those that are containers."""

    def __init__(self, owner: Any) -> None:
        self.fields = vars(owner)
        self.values = dict(self.fields)
        self.contents = {
            name: (value, value.copy())
            for name, value in self.values.items()
            if isinstance(value, dict | list | set)
        }

    def reset(self) -> None:
        """Restore them in place: handles of hooks refer to the containers."""
        self.fields.clear()
        self.fields.update(self.values)
        for container, content in self.contents.values():
            container.clear()
            if isinstance(container, list):
                container.extend(content)
            else:
                container.update(content)
