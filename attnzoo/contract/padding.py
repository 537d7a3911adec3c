"""Reorder tokens, and fill padding, so that its contents, NaN included, have no effect.

Other letters: N gathered tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


def padding_if_any(padding: Tensor | None) -> Tensor | None:
    """Return a padding mask, or ``None`` if it is known that all tokens are real.

    The mask of a decoded token is of that kind. Values are known on CPUs in eager calls.
    """
    if padding is None or (_values_are_on_cpu(padding) and bool(padding.all())):
        return None
    return padding


def fill_padding(
    x: Tensor, padding: Tensor | None, value: float = 0.0, *, token_dim: int = 2
) -> Tensor:
    """Return ``x`` with ``value`` at padding; ``x`` itself if there is none.

    Args:
        x: ``[B, H, S, ...]``, or ``[B, S, ...]`` with ``token_dim=1``.
        padding: ``[B, S]`` bool, false at padding.
        value: The new entries.
        token_dim: The dimension of the tokens.
    """
    if padding is None:
        return x
    if _values_are_on_cpu(x, padding):  # a copy and a few rows: a fifth of the time of masked_fill
        rows, tokens = (~padding).expand(len(x), -1).nonzero(as_tuple=True)
        if not len(rows):
            return x
        x = x.clone()
        index: tuple[Tensor | slice, ...] = (rows, *(slice(None),) * (token_dim - 1), tokens)
        x[index] = value
        return x
    is_padding = ~padding if token_dim == 1 else ~padding[:, None]
    return x.masked_fill(is_padding[(..., *(None,) * (x.dim() - is_padding.dim()))], value)


def gather_tokens(x: Tensor, index: Tensor) -> Tensor:
    """Gather the tokens at ``[1 or B, N]`` of ``[B, H, S, D]``, which gives ``[B, H, N, D]``."""
    batch, heads, _, size = x.shape
    # take_along_dim fixes the lengths that an exported program accepts
    return x.gather(2, index[:, None, :, None].expand(batch, heads, -1, size))


def padding_first(padding: Tensor) -> tuple[Tensor, Tensor]:
    """Return the order of tokens that puts padding first, and the inverse order, ``[B, S]`` each.

    Both kinds of tokens keep their order. There is no sort, which ONNX does not have.

    Args:
        padding: ``[B, S]`` bool, false at padding.
    """
    real, other = padding.long(), (~padding).long()
    place = torch.where(padding, other.sum(1, keepdim=True) + real.cumsum(1), other.cumsum(1)) - 1
    tokens = torch.arange(padding.shape[1], device=padding.device).expand_as(place)
    return torch.zeros_like(place).scatter(1, place, tokens), place


def has_gaps(padding: Tensor) -> bool:
    """Return whether padding lies between real tokens of a row, or may: values may be unknown.

    Waits for a device.
    """
    if not padding.shape[1]:
        return False
    if not values_are_known(padding):
        return True
    starts = padding[:, 0].int() + (padding[:, 1:] & ~padding[:, :-1]).sum(1)
    return bool((starts > 1).any())


def values_are_known(*tensors: Tensor) -> bool:
    """Return whether values may be read, which waits for a device.

    They are unknown in a compiled graph, in a tensor that ``torch.func`` transforms, while a CUDA
    graph is captured, and on the meta device.
    """
    if torch.compiler.is_compiling():
        return False
    if any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors)):
        return False
    if any(x.is_cuda for x in tensors) and torch.cuda.is_current_stream_capturing():
        return False
    return all(type(x) in (Tensor, torch.nn.Parameter) and not x.is_meta for x in tensors)


def _values_are_on_cpu(*tensors: Tensor) -> bool:
    """Return whether values can be read without waiting for a device."""
    return values_are_known(*tensors) and all(x.device.type == "cpu" for x in tensors)
