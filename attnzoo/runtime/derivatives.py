"""Refuse the derivatives that an implementation does not compute.

Implementations with a backward pass of their own compute first derivatives in reverse mode. Torch
returns zeros without an error if such a backward pass is differentiated again
(``once_differentiable``), or if a custom operator gets forward-mode tangents. The functions
here raise instead.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from attnzoo.errors import UnsupportedError

Backward = Callable[..., tuple[Tensor | None, ...]]


def check_reverse_mode(op: str, *tensors: Tensor | None, instead: str = "impl='reference'") -> None:
    """Raise ``UnsupportedError`` if a tensor is differentiated in forward mode or by torch.func.

    Args:
        op: Name of the op.
        tensors: Its inputs.
        instead: The implementation that supports these derivatives.
    """
    forward_mode = forward_ad._current_level >= 0
    if torch.compiler.is_compiling():  # a graph cannot contain the checks of single tensors
        refused = forward_mode
    elif not forward_mode and torch._C._functorch.peek_interpreter_stack() is None:
        return
    else:
        found = [x for x in tensors if x is not None]
        refused = any(map(_is_differentiated_by_func, found))
        refused = refused or (forward_mode and any(map(_has_tangent, found)))
    if refused:
        raise UnsupportedError(
            f"This implementation of {op} computes derivatives by backward() and "
            "torch.autograd.grad only, and got a tensor that forward-mode differentiation or "
            f"torch.func differentiates; use {instead}."
        )


def check_not_mapped(op: str, *tensors: Tensor | None, instead: str = "impl='reference'") -> None:
    """Raise ``UnsupportedError`` under torch.vmap, which maps no ``autograd.Function`` of ours.

    Arguments as in :func:`check_reverse_mode`.
    """
    if torch.compiler.is_compiling() or not is_transformed():
        return
    if any(is_mapped(x) for x in tensors if x is not None):
        raise UnsupportedError(
            f"This implementation of {op} does not support torch.vmap; make the mapped dimension "
            f"a part of the batch, or use {instead}."
        )


def is_transformed() -> bool:
    """Return whether forward-mode differentiation or a transform of torch.func is active."""
    return forward_ad._current_level >= 0 or (
        torch._C._functorch.peek_interpreter_stack() is not None
    )


def _has_tangent(x: Tensor) -> bool:
    return forward_ad.unpack_dual(x).tangent is not None


def is_mapped(x: Tensor) -> bool:
    """Return whether torch.vmap maps ``x``."""
    return _is_wrapped(x, torch._C._functorch.is_batchedtensor)


def _is_differentiated_by_func(x: Tensor) -> bool:
    """Return whether ``grad``, ``vjp`` or ``jvp`` of torch.func differentiates by ``x``."""
    return _is_wrapped(x, torch._C._functorch.is_gradtrackingtensor)


def _is_wrapped(x: Tensor, is_kind: Callable[[Tensor], bool]) -> bool:
    """Return whether one of the wrappers of torch.func around ``x`` is of a kind."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(x):
        if is_kind(x):
            return True
        x = functorch.get_unwrapped(x)
    return False


def first_derivative_only(op: str, instead: str = "impl='reference'") -> Callable[[Any], Any]:
    """Decorator of the backward pass of an autograd function: its gradients have no derivative.

    Differentiating them raises ``UnsupportedError``. Torch's ``once_differentiable`` raises only
    for derivatives with respect to the incoming gradients, and returns zeros for the others.

    Args:
        op: Name of the op.
        instead: The implementation that supports higher derivatives.
    """

    def decorate(backward: Backward) -> Backward:
        @wraps(backward)
        def run(ctx: Any, *d_outs: Tensor) -> tuple[Tensor | None, ...]:
            with torch.no_grad():
                gradients = backward(ctx, *d_outs)
            if not torch.is_grad_enabled():  # enabled by create_graph=True
                return gradients
            inputs = [x for x in (*d_outs, *ctx.saved_tensors) if x is not None and x.requires_grad]
            return tuple(
                x if x is None else _RefuseBackward.apply(op, instead, x, *inputs)
                for x in gradients
            )

        return run

    return decorate


def refuse_derivative(backward: Any, op: str, instead: str = "impl='reference'") -> None:
    """Make derivatives of a backward pass that is a custom operator raise ``UnsupportedError``."""

    def refuse(ctx: Any, *d_outs: Tensor) -> None:
        raise _second_derivative_error(op, instead)

    backward.register_autograd(refuse)


class _RefuseBackward(torch.autograd.Function):
    """Return a gradient whose derivative with respect to the inputs raises."""

    @staticmethod
    def forward(ctx: Any, op: str, instead: str, gradient: Tensor, *inputs: Tensor) -> Tensor:
        ctx.names = op, instead
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *d_outs: Tensor) -> None:
        raise _second_derivative_error(*ctx.names)


def _second_derivative_error(op: str, instead: str) -> UnsupportedError:
    return UnsupportedError(
        f"This implementation of {op} has first derivatives only, and its gradients are "
        f"differentiated again; use {instead}."
    )
