r"""Attention transfer: each swapped layer learns to give what softmax would have given.

Teacher and student run in one forward pass. A layer's backend sees the queries, keys and values of
the model as it was, for every layer passes *softmax's* output on; what its own output differs by,

.. math:: \ell = \frac{\sum_t |o_t - o^*_t|^2}{\sum_t |o^*_t|^2} \qquad \text{(over real tokens)},

is the loss of that layer, and only what the backend added is trained by it. So all layers learn at
once, none from the mistakes of another, and nothing but the backends needs a backward pass.
Source: the first stage of Zhang et al., 2024, arXiv:2410.10254 (LoLCATs).

The loss may be about the weights a that give the output instead: their divergence from softmax's,

.. math:: \ell = \frac{1}{T} \sum_{t,j} a^*_{tj} \log \frac{a^*_{tj}}{a_{tj}} - a^*_{tj} + a_{tj},

each term of which is at least zero. A far key that matters and is missed then costs its logarithm,
where an output hides it among others. Every mechanism is linear in the values, so columns that are
one at some keys and zero elsewhere are put beside them and read the weights of those keys: in a
step every n-th key, in the next its neighbour. Time is that of twice as many values.
Source: Zhang et al., 2024, arXiv:2402.04347 (Hedgehog), who take the cross-entropy of all weights.
Letters: B batch, H heads, T queries, S keys, E value size.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from attnzoo.backends.base import AttentionBackend
from attnzoo.errors import SpecError
from attnzoo.masks import AttentionMask
from attnzoo.ops.context_parallel import Shard
from attnzoo.registry import build_backend
from attnzoo.state import AttentionOutput
from attnzoo.training.sharding import is_sharded

SMALLEST = 1e-20  # a weight below this counts as this, and learns nothing: it may be negative
Target = Literal["output", "attention"]


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
        target: What is compared: the layer's ``"output"``, or its ``"attention"``.

    Attributes:
        step: Set it before every step: it decides which keys' weights are compared.

    Raises:
        SpecError: The model is not swapped, no named layer has anything to learn, or one of them
            has no attention weights.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Iterable[str] | None = None,
        *,
        target: Target = "output",
    ) -> None:
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
        without = [name for name in self.learning if not self.backends[name].has_weights]
        if target == "attention" and without:
            raise SpecError(
                f"The backends of {', '.join(without)} have no attention weights to compare; take "
                "target='output'"
            )
        self.model, self.target, self.step = model, target, 0
        self.errors: dict[str, Tensor] = {}  # relative squared error of each learning layer
        self.sharded = False

    def __enter__(self) -> Self:
        """Hook the backends."""
        self.handles = [self.model.register_forward_pre_hook(self._look)]
        for name, backend in self.backends.items():
            teacher = build_backend("flash", {}, backend.geometry)
            given: Any = self._detached
            if self.target == "attention" and name in self.learning:
                given = self._with_columns
            self.handles += [
                backend.register_forward_pre_hook(given, with_kwargs=True),
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

    def _detached(
        self, backend: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Cut a backend's inputs off the model: the loss of a layer is about that layer alone."""

        def cut(x: Any) -> Any:
            return x.detach() if isinstance(x, Tensor) else x

        return tuple(map(cut, args)), {name: cut(x) for name, x in kwargs.items()}

    def _with_columns(
        self, backend: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Put columns that read the weights of some keys beside the values, as many again."""
        (q, k, v), kwargs = self._detached(backend, args, kwargs)
        shard = kwargs.get("shard")
        whole = v.shape[2] if shard is None else shard.size * shard.length
        columns = key_columns(whole, v.shape[3], self.step).to(v)
        if shard is not None:
            columns = shard.own(columns[None])[0]
        return (q, k, torch.cat([v, columns.expand_as(v)], 3)), kwargs

    def _hook(self, name: str, teacher: AttentionBackend) -> Any:
        learns = name in self.learning
        read = learns and self.target == "attention"

        def hook(
            backend: nn.Module, args: Any, kwargs: dict[str, Any], output: AttentionOutput
        ) -> AttentionOutput:
            q, k, values = args
            pieces = values.chunk(2, 3) if read else [values]
            with torch.no_grad():
                own = {k: x for k, x in kwargs.items() if k not in ("state", "return_state")}
                own["return_weights"] = False
                exact = [teacher(q, k, x, **own).out for x in pieces]
            if learns:
                mask, given = kwargs.get("mask"), output.out.chunk(len(exact), 3)
                shard = kwargs.get("shard")
                if read:
                    length, count = pieces[1].shape[2:]
                    error = weights_error(given[1], exact[1], mask, shard)
                    error = error * key_stride(length * (shard.size if shard else 1), count)
                else:
                    error = relative_error(given[0], exact[0], mask, shard)
                # a pass that gradient checkpointing repeats, in a backward pass, counts once
                if torch._C._current_graph_task_id() == -1:
                    self.errors[name] = error
                if self.sharded:
                    exact[0] = exact[0] + 0 * error
            return output._replace(out=exact[0])

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


def relative_error(
    out: Tensor, exact: Tensor, mask: AttentionMask | None, shard: Shard | None = None
) -> Tensor:
    """Return the squared difference over the square of what is right, a float32 scalar.

    Args:
        out: What a layer gave, ``[B, H, T, E]``.
        exact: What softmax gives, the same shape.
        mask: Whose padding does not count.
        shard: The share of the rows that these tokens are: the mean over its processes is what one
            process has.
    """
    real = None if mask is None else mask.query_padding(out.shape[2], out.shape[2])
    difference, size = (out.float() - exact.float()).square(), exact.float().square()
    if real is not None:
        difference, size = (x * real[:, None, :, None] for x in (difference, size))
    total = _mean(size.sum(), shard)
    return difference.sum() / total.clamp(min=torch.finfo(torch.float32).tiny)


def _mean(x: Tensor, shard: Shard | None) -> Tensor:
    """Return the mean of a number without gradient over the processes that share rows."""
    if shard is None:
        return x
    total = x.detach().clone()
    dist.all_reduce(total, group=shard.group)
    return total / shard.size


def key_stride(length: int, count: int) -> int:
    """Return n, where ``count`` columns read the weights of every n-th of ``length`` keys."""
    return -(-length // count)


def key_columns(length: int, count: int, step: int) -> Tensor:
    """Return values that read the weights of some keys off an output: those of a step.

    Args:
        length: S.
        count: How many columns; those that are not needed stay zero.
        step: Another one begins at another key, until all had their turn.

    Returns:
        ``[S, count]``, one where a column's key stands.
    """
    stride = key_stride(length, count)
    place = torch.arange(step % stride, length, stride)
    columns = torch.zeros(length, count)
    columns[place, torch.arange(len(place))] = 1
    return columns


def weights_error(
    weights: Tensor, exact: Tensor, mask: AttentionMask | None, shard: Shard | None = None
) -> Tensor:
    """Return what some keys add to the divergence of the weights from what is right, in nats.

    Args:
        weights: What a layer gives some keys, ``[B, H, T, n]``.
        exact: What softmax gives them, the same shape.
        mask: Whose padding does not count.
        shard: As in :func:`relative_error`.

    Returns:
        The mean over queries and heads, a float32 scalar.
    """
    weights, exact = weights.float().clamp(min=SMALLEST), exact.float()
    logs = exact.clamp(min=SMALLEST).log() - weights.log()
    each = (exact * logs - exact + weights).sum(-1)
    real = None if mask is None else mask.query_padding(*each.shape[2:] * 2)
    if real is None:
        return each.mean()
    count = _mean((real.sum() * each.shape[1]).float(), shard)
    return (each * real[:, None]).sum() / count.clamp(min=1)
