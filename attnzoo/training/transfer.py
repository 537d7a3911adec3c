r"""Attention transfer: each swapped layer learns to give what softmax would have given.

Teacher and student run in one forward pass. A layer's backend sees the queries, keys and values of
the model as it was, for every layer passes *softmax's* output on; what its own output differs by,

.. math:: \ell = \frac{\sum_t |o_t - o^*_t|^2}{\sum_t |o^*_t|^2} \qquad \text{(over real tokens)},

is the loss of that layer, and only what the backend added is trained by it. So all layers learn at
once, none from the mistakes of another, and nothing but the backends needs a backward pass.
Source: the first stage of Zhang et al., 2024, arXiv:2410.10254 (LoLCATs).
"""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from attnzoo.backends.base import AttentionBackend
from attnzoo.errors import SpecError
from attnzoo.masks import AttentionMask
from attnzoo.registry import build_backend
from attnzoo.state import AttentionOutput
from attnzoo.training.sharding import is_sharded


def swapped_layers(model: nn.Module) -> dict[str, AttentionBackend]:
    """Return the backends in a model, by the qualified names of their attention layers."""
    return {m.geometry.name: m for m in model.modules() if isinstance(m, AttentionBackend)}


def extras(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that backends added to a model, by name."""
    found = {}
    for prefix, module in model.named_modules():
        if isinstance(module, AttentionBackend):
            found.update({f"{prefix}.{name}": p for name, p in module.named_parameters()})
    return found


def learning_layers(model: nn.Module) -> list[str]:
    """Return the names of the swapped layers whose backends have parameters, in order."""
    layers = swapped_layers(model)
    return [name for name, backend in layers.items() if any(True for _ in backend.parameters())]


class Transfer:
    """While entered, every swapped layer passes softmax's output on, and notes how far off it is.

    Example::

        with Transfer(model) as transfer:
            model(**batch)
            transfer.loss().backward()

    Args:
        model: A swapped model, or a wrapper around one.
        layers: Names of the layers that learn, for models that do not fit at once; all of them
            that have something to learn without.

    Raises:
        SpecError: The model is not swapped, or no named layer has anything to learn.
    """

    def __init__(self, model: nn.Module, layers: Iterable[str] | None = None) -> None:
        self.backends = swapped_layers(model)
        if not self.backends:
            raise SpecError(
                f"{type(model).__name__} is not swapped, so there is nothing to transfer to; "
                'call attnzoo.swap(model, "linear", ...) first'
            )
        able = learning_layers(model)
        self.learning = able if layers is None else [name for name in layers if name in able]
        if not self.learning:
            which = "its layers" if layers is None else f"the layers {', '.join(layers)}"
            raise SpecError(
                f"None of {which} has parameters of its own to learn "
                f"({', '.join(sorted({b.name for b in self.backends.values()}))}); choose a "
                "backend that has (hedgehog features, learned gates, a window), or go on to "
                "fine-tuning"
            )
        self.model = model
        self.errors: dict[str, Tensor] = {}  # relative squared error of each learning layer
        self.sharded = False

    def __enter__(self) -> Self:
        """Hook the backends."""
        self.handles = [self.model.register_forward_pre_hook(self._look)]
        for name, backend in self.backends.items():
            teacher = build_backend("flash", {}, backend.geometry)
            self.handles += [
                backend.register_forward_pre_hook(_detached, with_kwargs=True),
                backend.register_forward_hook(self._hook(name, teacher), with_kwargs=True),
            ]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Take the hooks out; layers give their own output again."""
        for handle in self.handles:
            handle.remove()

    def _look(self, model: nn.Module, args: Any) -> None:
        self.sharded = is_sharded(model)

    def _hook(self, name: str, teacher: AttentionBackend) -> Any:
        def hook(
            backend: nn.Module, args: Any, kwargs: dict[str, Any], output: AttentionOutput
        ) -> AttentionOutput:
            with torch.no_grad():
                own = {k: x for k, x in kwargs.items() if k not in ("state", "return_state")}
                exact = teacher(*args, **{**own, "return_weights": False}).out
            if name in self.learning:
                error = relative_error(output.out, exact, kwargs.get("mask"))
                # a pass that gradient checkpointing repeats, in a backward pass, counts once
                if torch._C._current_graph_task_id() == -1:
                    self.errors[name] = error
                if self.sharded:
                    exact = exact + 0 * error
            return output._replace(out=exact)

        return hook

    def loss(self, logits: Tensor | None = None) -> Tensor:
        """Return the mean of the learning layers' errors in the last forward pass, a scalar.

        Args:
            logits: What the model gave, needed where FSDP2 shards it. FSDP2 gathers a layer's
                weights for the backward pass when a gradient arrives at what the layer gave, so
                one of zeros is sent through the model.

        Raises:
            SpecError: Nothing has run since the last call.
        """
        if not self.errors:
            raise SpecError("Transfer.loss() comes after a forward pass of the model")
        total = torch.stack(list(self.errors.values())).mean()
        self.errors = {}
        if self.sharded and logits is not None:
            total = total + 0 * logits.float().sum()
        return total


def relative_error(out: Tensor, exact: Tensor, mask: AttentionMask | None) -> Tensor:
    """Return the squared difference over the square of what is right, a float32 scalar.

    Args:
        out: What a layer gave, ``[B, H, T, E]``.
        exact: What softmax gives, the same shape.
        mask: Whose padding does not count.
    """
    real = None if mask is None else mask.query_padding(out.shape[2], out.shape[2])
    difference, size = (out.float() - exact.float()).square(), exact.float().square()
    if real is not None:
        difference, size = (x * real[:, None, :, None] for x in (difference, size))
    return difference.sum() / size.sum().clamp(min=torch.finfo(torch.float32).tiny)


def _detached(
    backend: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Cut a backend's inputs off the model: the loss of a layer is about that layer alone."""

    def cut(x: Any) -> Any:
        return x.detach() if isinstance(x, Tensor) else x

    return tuple(map(cut, args)), {name: cut(x) for name, x in kwargs.items()}
