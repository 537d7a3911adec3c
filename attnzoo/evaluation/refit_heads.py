r"""Least-squares fit of output projections to what a model's attention returned before pruning.

For a layer that has lost heads, with the outputs x of its other heads and the output y of the whole
layer on some texts, the weights W and the bias b of the output projection minimise

.. math:: \sum_t |W x_t + b - y_t|^2 + \lambda |(W, b) - (W_0, b_0)|^2,

where W_0 and b_0 are those before the fit. Layers are fitted one after another, each on the states
that the fitted layers before it return. This is a closed form: nothing is trained.
Letters: B texts, T tokens, N all tokens, F features of the kept heads, M hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from attnzoo.hf.heads.projections import head_projections
from attnzoo.hf.layers import attention_layers

RIDGE = 1e-2  # lambda, relative to the mean square of the features
TEXTS_PER_STEP = 8


@torch.no_grad()
def refit_outputs(
    pruned: PreTrainedModel,
    original: PreTrainedModel,
    rows: Tensor,
    *,
    ridge: float = RIDGE,
    on_step: Callable[[str], None] = lambda text: None,
) -> list[str]:
    """Fit the output projections of layers that have lost heads, in place.

    Args:
        pruned: The model without some heads, in evaluation mode.
        original: The model with all heads, in evaluation mode.
        rows: Token ids, ``[B, T]``, without padding; more tokens than F are needed.
        ridge: Lambda.
        on_step: Called with the name of each step.

    Returns:
        Names of the fitted layers.
    """
    outputs = {x.name: head_projections(original, x).output for x in attention_layers(original)}
    fitted = []
    for layer in attention_layers(pruned):
        output: Any = head_projections(pruned, layer).output
        target = outputs[layer.name]
        if output.weight.shape == target.weight.shape:
            continue
        on_step(f"output projection, {layer.name}")
        _fit(output, *_normal_equations(pruned, output, original, target, rows), ridge)
        fitted.append(layer.name)
    return fitted


def _normal_equations(
    pruned: PreTrainedModel, output: Any, original: PreTrainedModel, target: nn.Module, rows: Tensor
) -> tuple[Tensor, Tensor]:
    """Return :math:`X^T X`, ``[F, F]``, and :math:`X^T Y`, ``[F, M]``, in float64.

    If the projection has a bias, the last of F + 1 features is one.
    """
    seen: dict[str, Tensor] = {}

    def keep_input(module: nn.Module, args: tuple[Any, ...], result: Tensor) -> None:
        seen["x"] = args[0].flatten(0, -2).double()

    def keep_output(module: nn.Module, args: tuple[Any, ...], result: Tensor) -> None:
        seen["y"] = result.flatten(0, -2).double()

    hooks = [
        output.register_forward_hook(keep_input),
        target.register_forward_hook(keep_output),
    ]
    gram: Any = 0
    cross: Any = 0
    try:
        for part in rows.split(TEXTS_PER_STEP):
            pruned(part)
            original(part)
            x = seen["x"]
            if output.bias is not None:
                x = torch.cat([x, x.new_ones(len(x), 1)], 1)
            gram, cross = gram + x.mT @ x, cross + x.mT @ seen["y"]
    finally:
        for hook in hooks:
            hook.remove()
    return gram, cross


def _fit(output: Any, gram: Tensor, cross: Tensor, ridge: float) -> None:
    """Set weights and bias of a projection to the solution of the normal equations."""
    transposed = not isinstance(output, Conv1D)  # Conv1D has [F, M]
    start = output.weight.mT if transposed else output.weight
    if output.bias is not None:
        start = torch.cat([start, output.bias[None]])
    start = start.double()
    damped = gram + ridge * gram.diagonal().mean() * torch.eye(len(gram)).to(gram)
    found = start + torch.linalg.solve(damped, cross - gram @ start)
    weight = found[: len(found) - (output.bias is not None)]
    output.weight.copy_(weight.mT if transposed else weight)
    if output.bias is not None:
        output.bias.copy_(found[-1])
