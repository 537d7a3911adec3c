r"""Attention transfer: train each swapped layer to match the output of softmax attention.

Teacher and student run in one forward pass. Each layer returns softmax's output, so every layer
gets the queries, keys and values of the original model. The loss of a layer is its relative error,

.. math:: \ell = \frac{\sum_t |o_t - o^*_t|^2}{\sum_t |o^*_t|^2} \qquad \text{(without padding)},

with a gradient for the backend's own parameters only. All layers train in one pass, independently
of each other's errors, and the backward pass runs through the backends only.
Source: the first stage of Zhang et al., 2024, arXiv:2410.10254 (LoLCATs).

The loss can compare the attention weights a instead, by their divergence from softmax's,

.. math:: \ell = \frac{1}{T} \sum_{t,j} a^*_{tj} \log \frac{a^*_{tj}}{a_{tj}} - a^*_{tj} + a_{tj},

in which each term is non-negative. It penalises a missed key by its logarithm, while an output
averages it with others. Every mechanism is linear in the values, so value columns that are one at a
key and zero elsewhere return the weights of that key. E such columns replace a layer's values and
cover every n-th key; n steps cover all keys.
Source: Zhang et al., 2024, arXiv:2402.04347 (Hedgehog), which minimises the cross-entropy of all
weights.

The output is not differentiable with respect to parameters that select keys, those of the indexer
of ``block_sparse``. They have a loss of their own, which replaces either one: the divergence of the
indexer's weights from softmax's, :mod:`attnzoo.ops.block_sparse.selection_loss`. Other letters: n
keys whose weights are compared.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Self, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from attnzoo.backends.block_sparse import BlockSparseBackend
from attnzoo.contract.backend import AttentionBackend
from attnzoo.contract.config import Geometry
from attnzoo.contract.context_parallel import SequenceShard
from attnzoo.contract.inputs import AttentionInputs
from attnzoo.contract.masks import AttentionMask
from attnzoo.contract.states import AttentionOutput
from attnzoo.errors import SpecError, did_you_mean
from attnzoo.ops.block_sparse.options import IndexTensors, SparseOptions
from attnzoo.ops.block_sparse.selection_loss import selection_loss
from attnzoo.ops.window.cpu.band import band_cpp_reasons
from attnzoo.registry import build_backend

MIN_WEIGHT = 1e-20  # smaller or negative attention weights are clamped and get no gradient
# options that the kernel of the softmax target does not support
RESTRICTIONS = ("shard", "bias", "softcap", "sinks")
Target = Literal["output", "attention"]


def swapped_layers(model: nn.Module) -> dict[str, AttentionBackend]:
    """Return a model's backends by the qualified names of their attention layers."""
    return {m.geometry.name: m for m in model.modules() if isinstance(m, AttentionBackend)}


def extras(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that backends add to a model, by name."""
    found = {}
    for prefix, module in model.named_modules():
        if isinstance(module, AttentionBackend):
            found.update({f"{prefix}.{name}": p for name, p in module.named_parameters()})
    return found


def has_indexer(backend: AttentionBackend) -> TypeGuard[BlockSparseBackend]:
    """Return whether a backend's parameters select keys, so the output gives them no gradient."""
    return isinstance(backend, BlockSparseBackend) and backend.indexer is not None


def output_extras(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of :func:`extras` that receive gradients from a model's output."""
    selecting = {
        id(p)
        for backend in swapped_layers(model).values()
        if has_indexer(backend)
        for p in backend.parameters()
    }
    return {name: p for name, p in extras(model).items() if id(p) not in selecting}


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Context in which no module is in training mode."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def trainable_layers(model: nn.Module) -> list[str]:
    """Return the names of the swapped layers whose backends have parameters, in model order."""
    layers = swapped_layers(model)
    return [name for name, backend in layers.items() if any(True for _ in backend.parameters())]


class Transfer:
    """Context in which swapped layers return softmax's output and record their own error.

    Example::

        with Transfer(model) as transfer:
            model(**batch)
            transfer.loss().backward()

    Args:
        model: A swapped model, or a wrapper around one.
        layers: Names of the layers to train, for models whose activations do not fit in memory at
            once; all layers with parameters when ``None``.
        target: What to compare with softmax: a layer's ``"output"`` or its ``"attention"`` weights.

    Attributes:
        step: Index of the step, to be set before each; it selects the keys whose weights are
            compared.
        errors: Losses of the trained layers in the last forward pass, by name.

    Raises:
        SpecError: The model is not swapped, a layer of ``layers`` or every layer has no parameters
            to train, or ``target`` is ``"attention"`` and a layer has no attention weights.
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
        trainable = trainable_layers(model)
        given = [layers] if isinstance(layers, str) else layers
        self.trained = trainable if given is None else list(given)
        others = [name for name in self.trained if name not in trainable]
        if others or not self.trained:
            which = f"{others[0]!r} is no swapped layer that" if others else "No layer"
            raise SpecError(
                f"{which} has parameters of its own to train "
                f"({', '.join(sorted({b.name for b in self.backends.values()}))}); choose a "
                "backend that has some (hedgehog features, learned gates, a window), or fine-tune "
                f"instead.{did_you_mean(others[0], trainable) if others else ''}"
            )
        without = [x for x in self.trained if not self.backends[x].capabilities.has_weights]
        if target == "attention" and without:
            raise SpecError(
                f"The backends of {', '.join(without)} have no attention weights to compare; use "
                "target='output'"
            )
        self.model, self.target, self.step = model, target, 0
        self.errors: dict[str, Tensor] = {}
        self.sharded = False

    def __enter__(self) -> Self:
        """Replace what the layers compute."""
        self.handle = self.model.register_forward_pre_hook(self._check_sharding)
        for name, backend in self.backends.items():
            teachers = softmax_teachers(backend.geometry)
            vars(backend)["forward"] = partial(self._forward, name, backend.forward, teachers)
        return self

    def __exit__(self, *error: object) -> None:
        """Let layers return their own output."""
        self.handle.remove()
        for backend in self.backends.values():
            del vars(backend)["forward"]

    def _check_sharding(self, model: nn.Module, args: Any) -> None:
        self.sharded = any(isinstance(p, DTensor) for p in model.parameters())  # by FSDP2

    def _forward(
        self,
        name: str,
        forward: Any,
        teachers: Mapping[str, AttentionBackend],
        *inputs: Tensor,
        **options: Any,
    ) -> AttentionOutput:
        """Return softmax's output in place of a layer's, and record the layer's loss.

        Inputs are detached, so that the loss has a gradient in this layer only. There is no
        attention dropout, which would be another one in the teacher.
        """
        q, k, v = (x.detach() for x in inputs)
        options = {n: x.detach() if isinstance(x, Tensor) else x for n, x in options.items()}
        options["dropout"] = 0.0
        of_softmax = {n: x for n, x in options.items() if n not in ("state", "return_state")}
        of_softmax["return_weights"] = False
        backend, columns, found = self.backends[name], v, []
        compare_weights = self.target == "attention" and not has_indexer(backend)
        if name in self.trained and compare_weights:
            columns = self._key_indicators(v, options.get("shard"))
        if name in self.trained and has_indexer(backend):
            backend.on_index = lambda *given: found.append(indexer_loss(backend, *given))
        output: AttentionOutput = forward(q, k, columns, **options)
        exact = softmax_output(teachers, q, k, v, of_softmax)
        if name not in self.trained:
            return output._replace(out=exact)
        mask, shard = options.get("mask"), options.get("shard")
        if has_indexer(backend):
            backend.on_index = None
            error = found[-1]
        elif compare_weights:
            weights = softmax_output(teachers, q, k, columns, of_softmax)
            length, count = columns.shape[2:]
            error = weights_divergence(output.out, weights, mask, shard)
            error = error * key_stride(length * (shard.size if shard else 1), count)
        else:
            error = relative_error(output.out, exact, mask, shard)
        # not in the backward pass, where gradient checkpointing repeats the forward pass
        if torch._C._current_graph_task_id() == -1:
            self.errors[name] = error
        return output._replace(out=exact + 0 * error if self.sharded else exact)

    def _key_indicators(self, v: Tensor, shard: SequenceShard | None) -> Tensor:
        """Return as many columns of indicators as values have."""
        length = v.shape[2] if shard is None else shard.size * shard.length
        columns = key_indicators(length, v.shape[3], self.step).to(v)
        return (columns if shard is None else shard.local(columns[None])[0]).expand_as(v)

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the trained layers."""
        return [p for name in self.trained for p in self.backends[name].parameters()]

    def run(self, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        """Return the loss of a forward pass of a model, possibly wrapped, on its arguments.

        The logits of one token are computed, where the model can do so: they are not compared, and
        can take more memory than all else.
        """
        known = inspect.signature(type(self.model).forward).parameters
        one = {"logits_to_keep": 1} if "logits_to_keep" in known else {}
        return self.loss(model(**inputs, **one)[0])

    def loss(self, logits: Tensor | None = None) -> Tensor:
        """Return the mean loss of the trained layers in the last forward pass, a scalar.

        Args:
            logits: The model's output, needed if FSDP2 shards the model. FSDP2 gathers a layer's
                weights in the backward pass when the layer's output gets a gradient, so the loss
                includes the output with weight 0.

        Raises:
            SpecError: The model has not run since the last call.
        """
        if not self.errors:
            raise SpecError("Transfer.loss() needs a forward pass of the model first; run one")
        total = torch.stack(list(self.errors.values())).mean()
        self.errors = {}
        if self.sharded and logits is not None:
            total = total + 0 * logits.float().sum()
        return total


def indexer_loss(
    backend: BlockSparseBackend, inputs: AttentionInputs, index: IndexTensors
) -> Tensor:
    """Return the loss of an indexer, whose scores are compared for blocks of one query."""
    x = backend.config
    options = SparseOptions(
        inputs.mask.causal, x.window, x.num_sinks, x.top_k, x.block_size, query_block=1
    )
    return selection_loss(
        inputs.q, inputs.k, index, mask=inputs.mask, scale=inputs.scale, options=options
    )


def relative_error(
    out: Tensor, exact: Tensor, mask: AttentionMask | None, shard: SequenceShard | None = None
) -> Tensor:
    """Return the relative squared error of an output, a float32 scalar.

    Args:
        out: A layer's output, ``[B, H, T, E]``.
        exact: Softmax's output, the same shape.
        mask: Attention mask; its padding is left out.
        shard: This process's tokens under context parallelism. The mean of the result over the
            processes equals the result of one process.
    """
    valid = None if mask is None else mask.query_padding(out.shape[2], out.shape[2])
    error, norm = (out.float() - exact.float()).square(), exact.float().square()
    if valid is not None:
        error, norm = (x * valid[:, None, :, None] for x in (error, norm))
    total = _mean(norm.sum(), shard)
    return error.sum() / total.clamp(min=torch.finfo(torch.float32).tiny)


def _mean(x: Tensor, shard: SequenceShard | None) -> Tensor:
    """Return the mean of a scalar over the processes of a shard, without a gradient."""
    if shard is None:
        return x
    total = x.detach().clone()
    dist.all_reduce(total, group=shard.group)
    return total / shard.size


def weights_divergence(
    weights: Tensor, exact: Tensor, mask: AttentionMask | None, shard: SequenceShard | None = None
) -> Tensor:
    """Return the contribution of some keys to the divergence of the attention weights, in nats.

    Args:
        weights: A layer's attention weights of n keys, ``[B, H, T, n]``.
        exact: Softmax's weights of the same keys, the same shape.
        mask: Attention mask; its padding is left out.
        shard: As in :func:`relative_error`.

    Returns:
        The mean over queries and heads, a float32 scalar.
    """
    weights, exact = weights.float().clamp(min=MIN_WEIGHT), exact.float()
    log_ratio = exact.clamp(min=MIN_WEIGHT).log() - weights.log()
    terms = (exact * log_ratio - exact + weights).sum(-1)
    valid = None if mask is None else mask.query_padding(*terms.shape[2:] * 2)
    if valid is None:
        return terms.mean()
    count = _mean((valid.sum() * terms.shape[1]).float(), shard)
    return (terms * valid[:, None]).sum() / count.clamp(min=1)


def key_stride(length: int, count: int) -> int:
    """Return n such that ``count`` columns cover every n-th of ``length`` keys."""
    return -(-length // count)


def key_indicators(length: int, count: int, step: int) -> Tensor:
    """Return value columns for which an attention's output is the weight of one key per column.

    The keys are ``step % n``, ``step % n + n``, ... with n = :func:`key_stride`.

    Args:
        length: S.
        count: Number of columns; unused ones are zero.
        step: Selects the keys.

    Returns:
        ``[S, count]``, one at each column's key and zero elsewhere.
    """
    stride = key_stride(length, count)
    keys = torch.arange(step % stride, length, stride)
    columns = torch.zeros(length, count)
    columns[keys, torch.arange(len(keys))] = 1
    return columns


@torch.no_grad()
def softmax_output(
    teachers: Mapping[str, AttentionBackend],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: Mapping[str, Any],
) -> Tensor:
    """Return softmax's output for the options of a backend's call, ``[B, H, T, E]``.

    On CPUs a call without padding runs in C++, where 512 tokens take half the time of PyTorch's
    kernel.
    """
    mask = options.get("mask")
    plain = mask is None or (
        replace(mask, segment_ids=None).is_plain
        and isinstance(mask.q_offset, int)
        and not mask.q_offset
    )
    restricted = any(options.get(name) is not None for name in RESTRICTIONS)
    on_cpu = q.device.type == "cpu" and not band_cpp_reasons()
    fast = on_cpu and plain and not restricted and 0 < q.shape[2] == k.shape[2]
    found: Tensor = teachers["cpp" if fast else "auto"](q, k, v, **options).out
    return found


def softmax_teachers(geometry: Geometry) -> dict[str, AttentionBackend]:
    """Return softmax attention for a layer by implementation."""
    return {x: build_backend("flash", {"impl": x}, geometry) for x in ("auto", "cpp")}
