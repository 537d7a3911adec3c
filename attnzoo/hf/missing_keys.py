"""What a cache layer with a state returns in place of keys and values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnzoo.errors import UnsupportedError

_METADATA = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "layout", "ndim")),
        *(getattr(Tensor, name).__get__ for name in ("is_cpu", "is_cuda", "is_meta", "nbytes")),
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.__len__),
        *(Tensor.is_floating_point, Tensor.element_size, Tensor.untyped_storage),
    }
)


class MissingKeys(Tensor):
    """The keys or values that a layer with a state does not keep: shape, dtype and device only.

    Code that counts the tokens of a cache works. Memory is that of one number.

    Raises:
        UnsupportedError: An operation reads the elements, or attention is computed with them.
    """

    backend: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return metadata, and refuse every other operation."""
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        names = {x.backend for x in torch.utils._pytree.tree_leaves(args) if isinstance(x, cls)}
        operation = getattr(func, "__name__", str(func))
        raise UnsupportedError(
            f"{operation} needs the cached keys or values of a layer that runs backend "
            f"{', '.join(map(repr, sorted(names)))}, which keeps a state of fixed size instead. "
            "Keep the layers that fill this cache exact: name 'flash' for them under layers"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        """Return the shape and the backend."""
        return f"MissingKeys(shape={tuple(self.shape)}, backend={self.backend!r})"
