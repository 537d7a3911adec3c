"""Custom operators whose backward pass is a custom operator too.

``torch.compile`` sees one call per pass. The backward operator has no derivative.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import CustomOpDef, infer_schema

from attnzoo.runtime.derivatives import refuse_derivative

Gradients = Sequence[Tensor | None]


def _same_shape(number: int, x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _all_outputs(inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> Sequence[Tensor]:
    return output


class _Schema:
    """The arguments of an operator.

    Attributes:
        text: Their declarations.
        num_outputs: The number of tensors that it returns.
    """

    def __init__(self, forward: Callable[..., tuple[Tensor, ...]]) -> None:
        given, returned = infer_schema(forward, mutates_args=()).rsplit(" -> ", 1)
        self.text, self.num_outputs = given[1:-1], returned.count("Tensor")
        self.are_tensors = [x.startswith(("Tensor ", "Tensor? ")) for x in self.text.split(", ")]

    def tensors(self, args: tuple[Any, ...]) -> list[Any]:
        """Return the arguments that are tensors or ``None``, or what belongs to these."""
        return [x for x, is_tensor in zip(args, self.are_tensors, strict=True) if is_tensor]

    def options(self, args: tuple[Any, ...]) -> list[Any]:
        """Return the other arguments."""
        return [x for x, is_tensor in zip(args, self.are_tensors, strict=True) if not is_tensor]

    def join(self, tensors: Sequence[Any], options: Sequence[Any]) -> list[Any]:
        """Return all arguments in their order."""
        first, second = iter(tensors), iter(options)
        return [next(first) if is_tensor else next(second) for is_tensor in self.are_tensors]


def differentiable_op(
    name: str,
    forward: Callable[..., tuple[Tensor, ...]],
    backward: Callable[..., Gradients],
    *,
    fake: Callable[..., tuple[Tensor, ...]],
    op: str,
    save: Callable[[tuple[Any, ...], tuple[Tensor, ...]], Sequence[Tensor]] = _all_outputs,
    num_saved: int | None = None,
    instead: str = "impl='reference'",
    fake_gradient: Callable[[int, Tensor], Tensor] = _same_shape,
) -> tuple[CustomOpDef, CustomOpDef]:
    """Define an operator and that of its gradients, whose name ends in ``_backward``.

    The arguments of the second are the gradients of the outputs (``None`` for zeros), saved
    outputs, the inputs, and for each tensor of the inputs whether its gradient is needed.

    Args:
        name: Name of the operator.
        forward: Computes it, returns a tuple of tensors; its annotations give the schema.
        backward: Gets gradients of the outputs, saved outputs and needs as three lists, then the
            inputs, and returns a gradient for each tensor of the inputs; ``None`` where not needed.
        fake: Returns outputs without data.
        op: Name of the public op, for errors.
        save: Returns the outputs that the backward pass reads, from inputs and outputs. Default:
            all of them.
        num_saved: Their number. Default: that of the outputs.
        instead: The implementation that supports higher derivatives.
        fake_gradient: Returns a gradient without data, from the number of a tensor among the
            inputs and that tensor.
    """
    schema = _Schema(forward)
    num_saved = schema.num_outputs if num_saved is None else num_saved
    forward_op = torch.library.custom_op(name, forward, mutates_args=())
    forward_op.register_fake(fake)
    backward_op = _define_backward(f"{name}_backward", schema, backward, num_saved, fake_gradient)
    refuse_derivative(backward_op, op, instead)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*save(inputs, output), *schema.tensors(inputs))
        ctx.options = schema.options(inputs)
        ctx.set_materialize_grads(False)

    def differentiate(ctx: Any, *d_outs: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # read once: a checkpoint gives each tensor once
        inputs = schema.join(saved[num_saved:], ctx.options)
        needed = schema.tensors(ctx.needs_input_grad)
        gradients = backward_op(*d_outs, *saved[:num_saved], *inputs, needed)
        found = [x if need else None for x, need in zip(gradients, needed, strict=True)]
        return tuple(schema.join(found, [None] * len(ctx.options)))

    forward_op.register_autograd(differentiate, setup_context=setup_context)
    return forward_op, backward_op


def _define_backward(
    name: str,
    schema: _Schema,
    backward: Callable[..., Gradients],
    num_saved: int,
    fake_gradient: Callable[[int, Tensor], Tensor],
) -> CustomOpDef:
    """Define the operator of the gradients."""
    count = schema.num_outputs
    first = count + num_saved  # of the inputs
    arguments = [
        *(f"Tensor? d_out_{i}" for i in range(count)),
        *(f"Tensor saved_{i}" for i in range(num_saved)),
        schema.text,
        "bool[] needed",
    ]

    def run(*args: Any) -> list[Tensor]:
        inputs, needed = args[first:-1], args[-1]
        gradients = backward(args[:count], args[count:first], needed, *inputs)
        return [
            inputs[0].new_empty(0) if x is None or not need else x
            for x, need in zip(gradients, needed, strict=True)
        ]

    def fake(*args: Any) -> list[Tensor]:
        inputs, needed = args[first:-1], args[-1]
        return [
            fake_gradient(i, x) if need and x is not None else inputs[0].new_empty(0)
            for i, (x, need) in enumerate(zip(schema.tensors(inputs), needed, strict=True))
        ]

    text = f"({', '.join(arguments)}) -> Tensor[]"
    op = torch.library.custom_op(name, run, mutates_args=(), schema=text)
    op.register_fake(fake)
    return op
