"""Memory of one of several GPUs under DeepSpeed: the buffers of ZeRO-2 and ZeRO-3.

As in :mod:`attnzoo.evaluation.memory_sharding`, hooks allocate buffers while one whole model runs.
ZeRO-2 copies gradients to a bucket, reduces it when it is full, and keeps those of its own part.
ZeRO-3 also gathers the weights of a module before it runs, and those of later modules ahead.

Source: Rajbhandari et al., 2020, arXiv:1910.02054; buffers as in DeepSpeed 0.19.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from attnzoo.evaluation.memory_8bit import embedding_weights, flat_state_bytes
from attnzoo.evaluation.memory_case import MemoryCase
from attnzoo.evaluation.memory_optimizer import tensor_bytes, trained_parameters

STEP_BYTES = 4  # the optimizer's weights, gradients and moments are in float32
NORM_BYTES = 8  # the norm of gradients is computed in float64


def _empty(count: int) -> Tensor:
    """Return a tensor of so many bytes, which is not allocated in fake runs."""
    return torch.empty(count // 2, dtype=torch.bfloat16)


class Bucket:
    """The bucket to which gradients are copied until it is reduced.

    Args:
        size: Elements of it.
        itemsize: Bytes of an element.
    """

    def __init__(self, size: int, itemsize: int) -> None:
        self.size, self.itemsize = size, itemsize
        self.filled: list[nn.Parameter] = []
        self.elements = 0

    def add(self, parameter: nn.Parameter, reduce: Callable[[], None]) -> None:
        """Copy a gradient to the bucket, which is reduced before if there is no space for it."""
        count = parameter.numel()
        if self.elements + count > self.size:
            reduce()
        if count <= self.size:
            parameter.grad = None  # a larger one stays until it is reduced
        self.filled.append(parameter)
        self.elements += count

    def clear(self) -> None:
        """Free all gradients."""
        for parameter in self.filled:
            parameter.grad = None
        self.filled.clear()
        self.elements = 0


class ZeroBuffers:
    """What ZeRO-2 and ZeRO-3 share: gradients go to a bucket.

    Args:
        model: The whole model.
        case: The case.
    """

    def __init__(self, model: nn.Module, case: MemoryCase) -> None:
        self.model, self.gpus, self.sizes = model, case.gpus, case.zero_sizes
        self.accumulate = case.accumulate
        self.trained = [x for x in model.parameters() if x.requires_grad]
        self.itemsize = case.compute_dtype.itemsize
        self.bucket = Bucket(self.sizes.reduce_bucket, self.itemsize)

    @contextmanager
    def running(self, mark: Callable[[], None]) -> Iterator[None]:
        """Context in which the model runs.

        Args:
            mark: Called when a parameter has its gradient.
        """

        def hook(parameter: Tensor) -> None:
            mark()
            self.with_gradient(parameter)  # type: ignore[arg-type]

        handles = [x.register_post_accumulate_grad_hook(hook) for x in self.trained]
        handles += self.module_hooks()
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def module_hooks(self) -> list[Any]:
        """Return the handles of hooks of modules."""
        return []

    def prepare(self, step: Callable[[], None]) -> None:
        """Learn the order of modules from a step."""

    def start(self) -> None:
        """Allocate what earlier micro-batches leave."""

    def with_gradient(self, parameter: nn.Parameter) -> None:
        """Copy a gradient to the bucket."""
        self.bucket.add(parameter, self.reduce)

    def reduce(self) -> None:
        """Reduce the bucket."""
        raise NotImplementedError

    def reset(self) -> None:
        """Free all buffers, before a step."""
        self.bucket.clear()

    def end_of_step(self) -> None:
        """Reduce what is left after the backward pass."""
        self.reduce()


class ZeroTwo(ZeroBuffers):
    """Allocate the buffers of ZeRO-2, on the first GPU."""

    def __init__(self, model: nn.Module, case: MemoryCase) -> None:
        super().__init__(model, case)
        self.partition = partition_elements(self.trained, case)
        starts = [0]
        for x in self.trained:
            starts.append(starts[-1] + x.numel())
        # the processes that have a part of a weight
        self.owners = {
            id(x): range(first // self.partition, (last - 1) // self.partition + 1)
            for x, first, last in zip(self.trained, starts, starts[1:], strict=False)
        }
        self.own = [x for x in self.trained if 0 in self.owners[id(x)]]
        self.buffer: Tensor | None = None
        self.gradients: Tensor | None = None  # of weights of which this process has a part
        self.kept: Tensor | None = None  # those of earlier micro-batches

    def start(self) -> None:
        """Allocate the gradients of earlier micro-batches."""
        if self.accumulate > 1:
            self.kept = self._own_gradients()

    def reset(self) -> None:
        """Free all buffers, before a step."""
        super().reset()
        self.buffer = self.gradients = self.kept = None

    def with_gradient(self, parameter: nn.Parameter) -> None:
        """Copy a gradient to the bucket, which the first one allocates."""
        if self.buffer is None:
            self.buffer = _empty(self.sizes.reduce_bucket * self.itemsize)
        super().with_gradient(parameter)

    def reduce(self) -> None:
        """Reduce the bucket, and keep the gradients of the process's own part."""
        filled = self.bucket.filled
        if not filled:
            return
        owners = [rank for x in filled for rank in self.owners[id(x)]]
        if len(set(owners)) > 1:  # slices of several processes are concatenated
            flat = _empty(self.bucket.elements * self.itemsize)
            del flat
        if self.gradients is None and 0 in owners:
            self.gradients = self._own_gradients()
        self.bucket.clear()

    def _own_gradients(self) -> Tensor:
        return _empty(sum(x.numel() for x in self.own) * self.itemsize)

    def end_of_step(self) -> None:
        """Reduce the rest, and make the gradients of the optimizer."""
        super().end_of_step()
        self.buffer = None
        if self.kept is not None:
            self.gradients = None  # added to them
        norm = _empty(NORM_BYTES * max(min(x.numel(), self.partition) for x in self.own))
        del norm
        flat = _empty(self.partition * self.itemsize)
        wide = _empty(self.partition * STEP_BYTES) if self.itemsize < STEP_BYTES else None
        del flat, wide


@dataclass(eq=False)
class _Gather:
    """Weights that are gathered at once."""

    parameters: Sequence[nn.Parameter]
    buffer: Tensor
    complete: bool = False


@dataclass(eq=False)
class _State:
    """Of a weight under ZeRO-3.

    Attributes:
        weight: The whole weight.
        gather: What gathers it and was not waited for.
        users: Modules that run with it.
        fetched_for: The step for which it was fetched.
    """

    persistent: bool
    weight: Tensor | None = None
    gather: _Gather | None = None
    users: set[int] = field(default_factory=set)
    fetched_for: int = -1

    @property
    def available(self) -> bool:
        """Whether it is whole, or will be."""
        return self.persistent or self.weight is not None or self.gather is not None


class ZeroThree(ZeroBuffers):
    """Allocate the buffers of ZeRO-3."""

    def __init__(self, model: nn.Module, case: MemoryCase) -> None:
        super().__init__(model, case)
        parameters = list(model.parameters())
        self.place = {id(x): place for place, x in enumerate(parameters)}
        small = self.sizes.persistence_threshold
        self.states = {id(x): _State(x.numel() <= small) for x in parameters}
        self.order: list[nn.Module] = []  # of the modules of a step
        self.recorded = False
        self.queue: deque[tuple[nn.Parameter, int]] = deque()
        self.running_backward: dict[int, nn.Module] = {}
        self.step = 0
        self.gathered = 0  # elements

    def prepare(self, step: Callable[[], None]) -> None:
        """Learn the order of modules from a step, as DeepSpeed does in the second one."""
        with self.running(lambda: None):
            step()
        self.end_of_step()
        self.recorded = True

    def reset(self) -> None:
        """Free all buffers, before a step."""
        super().reset()
        self._release_all()
        self.step = self.gathered = 0
        self.queue.clear()
        for step, module in enumerate(self.order):
            self.queue += [(x, step) for x in self._own(module)]

    def _release_all(self) -> None:
        self.running_backward.clear()
        for state in self.states.values():
            state.weight = state.gather = None
            state.users.clear()
            state.fetched_for = -1

    def end_of_step(self) -> None:
        """Reduce the rest, and release all weights."""
        super().end_of_step()
        self._release_all()

    def reduce(self) -> None:
        """Reduce the bucket: gradients are concatenated, and a part of them is kept."""
        filled = self.bucket.filled
        if len(filled) > 1 or (filled and filled[0].numel() % self.gpus):
            count = sum(padded_elements(x, self.gpus) for x in filled)
            flat = _empty(count * self.itemsize)
            del flat
        self.bucket.clear()

    def _own(self, module: nn.Module) -> list[nn.Parameter]:
        found = {id(x): x for x in module.parameters(recurse=False)}
        return sorted(found.values(), key=lambda x: self.place[id(x)])

    def module_hooks(self) -> list[Any]:
        """Return the handles of hooks of all modules with weights."""
        handles: list[Any] = []
        for module in self.model.modules():
            if self._own(module):
                handles.append(module.register_forward_pre_hook(self._before, prepend=True))
                handles.append(module.register_forward_hook(self._after))
        return handles

    def _before(self, module: nn.Module, args: Any) -> Any:
        self._fetch(module)

        def wrap(x: Any) -> Any:
            if isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled():
                x = x.view_as(x)
                x.register_hook(lambda _: self._release(module, backward=True))
            return x

        return tree_map(wrap, args)

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        self._release(module)
        for x in tree_leaves(output):
            if isinstance(x, Tensor) and x.requires_grad:
                x.register_hook(lambda _: self._fetch(module, backward=True))
                return

    def _fetch(self, module: nn.Module, *, backward: bool = False) -> None:
        """Gather the weights of a module, and those of later ones ahead."""
        if backward:
            self.running_backward[id(module)] = module
        own = self._own(module)
        self._gather([x for x in own if not self.states[id(x)].available])
        for x in own:
            state = self.states[id(x)]
            state.users.add(id(module))
            if state.gather is not None:
                self._wait(state.gather)
                state.gather = None
        if self.recorded:
            self._prefetch(own)
        else:
            self.order.append(module)
        self.step += 1

    def _gather(self, parameters: Sequence[nn.Parameter]) -> None:
        if not parameters:
            return
        count = sum(padded_elements(x, self.gpus) for x in parameters)
        gather = _Gather(parameters, _empty(count * self.itemsize))
        self.gathered += sum(x.numel() for x in parameters)
        for x in parameters:
            self.states[id(x)].gather = gather

    def _wait(self, gather: _Gather) -> None:
        """Copy weights out of the buffer to which they are gathered; a single one stays in it."""
        if gather.complete:
            return
        gather.complete = True
        for x in gather.parameters:
            single = len(gather.parameters) == 1
            weight = gather.buffer if single else _empty(x.numel() * self.itemsize)
            self.states[id(x)].weight = weight

    def _prefetch(self, own: Sequence[nn.Parameter]) -> None:
        new = {id(x) for x in own if self.states[id(x)].fetched_for < self.step}
        while self.queue and new:
            parameter, step = self.queue.popleft()
            self.states[id(parameter)].fetched_for = step
            new.discard(id(parameter))
        most = min(self.sizes.max_live - self.gathered, self.sizes.prefetch_bucket)
        chosen: dict[int, nn.Parameter] = {}
        count = 0
        while self.queue and count < most:
            parameter, step = self.queue.popleft()
            state = self.states[id(parameter)]
            state.fetched_for = max(state.fetched_for, step)
            if not state.available and id(parameter) not in chosen:
                chosen[id(parameter)] = parameter
                count += parameter.numel()
        self._gather(list(chosen.values()))

    def _release(self, module: nn.Module, *, backward: bool = False) -> None:
        """Free the weights of a module, but for those that run again soon."""
        if backward:
            self.running_backward.pop(id(module), None)
        soon = self._used_soon() if self.recorded else set()
        for x in self._own(module):
            state = self.states[id(x)]
            state.users.discard(id(module))
            again = id(x) in soon or (self.recorded and state.fetched_for > self.step)
            if state.weight is not None and not state.users and not again:
                state.weight = None
                self.gathered -= x.numel()

    def _used_soon(self) -> set[int]:
        """Return the weights of the next modules, up to the distance of reuse."""
        found: set[int] = set()
        count = 0
        for module in self.order[self.step :]:
            if count >= self.sizes.max_reuse_distance:
                break
            for x in self._own(module):
                found.add(id(x))
                count += x.numel()
        return found


def padded_elements(parameter: Tensor, gpus: int) -> int:
    """Return the elements of a weight of which each process has an equal part."""
    return gpus * math.ceil(parameter.numel() / gpus)


def partition_elements(trained: Sequence[Tensor], case: MemoryCase) -> int:
    """Return the trained weights that a process updates."""
    if case.zero == 3:
        return sum(padded_elements(x, case.gpus) for x in trained) // case.gpus
    alignment = 2 * case.gpus
    count = sum(x.numel() for x in trained)
    return alignment * math.ceil(count / alignment) // case.gpus


class ZeroPartitions(NamedTuple):
    """Bytes that a process holds between the operations of a step.

    Attributes:
        parameters: Weights that run, or its part of them and small ones, and its part in float32.
        gradients: Its part of the gradients.
        bucket: Of ZeRO-3, which keeps it.
        optimizer: State of the optimizer.
        update: Of the optimizer's step, beside the gradients.
    """

    parameters: int
    gradients: int
    bucket: int
    optimizer: int
    update: int


def zero_partitions(model: nn.Module, case: MemoryCase) -> ZeroPartitions:
    """Return the bytes that a process holds under ZeRO.

    Args:
        model: The whole model.
        case: The case.
    """
    trained = trained_parameters(model)
    part = partition_elements(trained, case)
    running = {id(x): x for x in model.parameters()}.values()
    itemsize, sizes = case.compute_dtype.itemsize, case.zero_sizes
    update = 2 * STEP_BYTES * part if case.optimizer == "adamw" else 0
    optimizer = 2 * STEP_BYTES * part if case.optimizer == "adamw" else 0
    if case.optimizer == "adamw_8bit":
        wide = {id(x) for x in embedding_weights(model)}
        tables = partition_elements([x for x in trained if id(x) in wide], case)
        optimizer = 2 * STEP_BYTES * tables + flat_state_bytes(part - tables)
    buffers = tensor_bytes(model.buffers())
    if case.zero == 2:
        weights = tensor_bytes(running) + buffers
        return ZeroPartitions(weights + STEP_BYTES * part, STEP_BYTES * part, 0, optimizer, update)
    elements = sum(padded_elements(x, case.gpus) for x in running) // case.gpus
    elements += sum(x.numel() for x in running if x.numel() <= sizes.persistence_threshold)
    # gradients are copied to float32 for the optimizer, by way of a flat tensor of their own type
    copies = (STEP_BYTES + (itemsize if itemsize < STEP_BYTES and not update else 0)) * part
    return ZeroPartitions(
        parameters=elements * itemsize + buffers + STEP_BYTES * part,
        gradients=part * itemsize,
        bucket=sizes.reduce_bucket * itemsize,
        optimizer=optimizer,
        update=update + copies,
    )


def zero_buffers(model: nn.Module, case: MemoryCase) -> ZeroBuffers:
    """Return the buffers of a stage of ZeRO."""
    return (ZeroTwo if case.zero == 2 else ZeroThree)(model, case)
