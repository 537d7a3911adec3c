"""Subclasses of a mixin and a stock class, which an object gets in place, as FSDP2 does.

Such a class has the module and the name of the stock class, because transformers, PEFT and TRL look
both up: tasks of pipelines, losses, the labels that a Trainer shifts, auto classes, code files.
"""

from __future__ import annotations

import functools
from typing import Any

PREFIX = "Attnzoo"  # of the qualified name, which says in messages that it is another class


class Mixin:
    """Base of mixins: their objects are copied and pickled by the stock class."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        cls = type(self)
        made = super().__reduce_ex__(max(protocol, 2))
        if "_attnzoo_mixin" not in vars(cls):  # a subclass that another package has made
            return made
        return (_new, (vars(cls)["_attnzoo_mixin"], stock_class(cls)), *made[2:])


def _new(mixin: type, stock: type) -> Any:
    cls: Any = subclass(mixin, stock)
    return cls.__new__(cls)


def _subclass(mixin: type, stock: type) -> type:
    """Return the subclass of a mixin and a stock class, or the class itself if it has the mixin."""
    if issubclass(stock, mixin):
        return stock
    names = {
        "__module__": stock.__module__,
        "__qualname__": PREFIX + stock.__qualname__,
        "__doc__": stock.__doc__,
        "_attnzoo_mixin": mixin,
        "_attnzoo_stock": stock,
    }
    return type(stock.__name__, (mixin, stock), names)


subclass: Any = functools.cache(_subclass)  # Any: mypy takes types for not hashable


def stock_class(cls: type) -> type:
    """Return the class to which a mixin was added; other classes are returned as they are."""
    stock: type = vars(cls).get("_attnzoo_stock", cls)
    return stock
