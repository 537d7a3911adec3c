"""The output of the window hybrid, from the window and the linear sums over one denominator."""

from __future__ import annotations

import torch
from torch import Tensor

from attnzoo.ops.hybrid.state import LinearBranch
from attnzoo.ops.linear.triton.run import divide_sums

MIN_WEIGHT = 1e-30  # a smaller sum of linear weights, before scaling, counts as 0


def combine(
    near: Tensor, lse: Tensor, values: Tensor, total: Tensor, logit: Tensor, branch: LinearBranch
) -> Tensor:
    """Return the window and the linear sums over one denominator.

    Args:
        near: Softmax attention inside the window, ``[B, H, T, E]``.
        lse: Log-sum-exp of its scores, ``[B, H, T, 1]``.
        values: Linear sums of values, ``[B, H, T, E]``.
        total: Linear sums of weights, ``[B, H, T, 1]``.
        logit: Logit of the linear sums, broadcastable to ``[B, H, T, 1]``.
        branch: Options of the linear branch.
    """
    has_linear = total > MIN_WEIGHT
    window_weight, linear_weight = _weights(lse, total, has_linear, logit, branch)
    numerator = window_weight * near + linear_weight * values
    return numerator / (window_weight + linear_weight * total)


def combine_kernels(
    near: Tensor,
    lse: Tensor,
    values: Tensor,
    total: Tensor,
    logit: Tensor,
    branch: LinearBranch,
    dtype: torch.dtype,
) -> Tensor:
    """Return :func:`combine` of linear sums whose gradients Triton kernels round to ``dtype``.

    It is a mean of the outputs of both branches, so that :func:`divide_sums` makes the gradients of
    the linear sums of values and of weights consistent.
    """
    has_linear = total > MIN_WEIGHT
    far = divide_sums(values, total.clamp(min=MIN_WEIGHT), dtype)
    window_weight, linear_weight = _weights(lse, total, has_linear, logit, branch)
    linear_weight = linear_weight * total.clamp(min=MIN_WEIGHT)
    share = linear_weight / (window_weight + linear_weight)
    return near + share * (far - near)


def _weights(
    lse: Tensor, total: Tensor, has_linear: Tensor, logit: Tensor, branch: LinearBranch
) -> tuple[Tensor, Tensor]:
    """Return the factors of the window and of the linear sums, the larger of both terms 1."""
    if branch.relative:
        lse = torch.zeros_like(lse)  # the window's sum is a factor of both terms and cancels
    if branch.linear_only_heads is not None:
        heads = branch.linear_only_heads.view(1, -1, 1, 1)
        lse = lse.masked_fill(has_linear & heads, -torch.inf)
    log_total = total.clamp(min=MIN_WEIGHT).log()
    maximum = torch.where(has_linear, torch.maximum(lse, logit + log_total), lse).detach()
    linear_weight = (logit - maximum).masked_fill(~has_linear, -torch.inf).exp()
    return (lse - maximum).exp(), linear_weight
