"""Memory of one of several GPUs: the buffers of FSDP2, allocated while one whole model runs.

Under FSDP2 each process has a part of the weights, gradients and optimizer state. A unit (a decoder
layer, the embedding, the last norm with the head, the rest) is gathered before it runs: a flat
buffer first, then the weights, which are freed after it. In the backward pass the next unit is
gathered ahead, and gradients of a unit are whole until they are copied to the buffer that
reduce-scatter reads. Hooks allocate these buffers at these times, so that the peak is that of all
allocations at one time. Activations are those of the process's own rows.

Source: Zhao et al., 2023, arXiv:2304.11277; units as in Accelerate's ``fsdp2_prepare_model``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from attnzoo.hf.layers import attention_layers, running_units
from attnzoo.hf.seam import base_model_name


def _empty(count: int) -> Tensor:
    """Return a tensor of floats, which is not allocated in fake runs, of so many bytes."""
    return torch.empty(count // 2, dtype=torch.bfloat16)


def _size(parameters: Sequence[Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in parameters)


class Unit:
    """Weights that are gathered together.

    Args:
        modules: They run one after the other.
        parameters: Their weights that no other unit has.
        resharded: Whether the weights are freed after the forward pass.
    """

    def __init__(
        self, modules: Sequence[nn.Module], parameters: list[nn.Parameter], *, resharded: bool
    ) -> None:
        self.modules, self.resharded = modules, resharded
        self.size = _size(parameters)
        self.trained = [x for x in parameters if x.requires_grad]
        self.weights: Tensor | None = None
        self.flat: Tensor | None = None  # gathered ahead
        self.kept: Tensor | None = None  # whole gradients of micro-batches before
        self.waits = 0  # trained parameters without a gradient
        self.reached: list[Tensor] = []  # by a gradient that is not reduced


class GatheredUnits:
    """Allocate the buffers of FSDP2 while a whole model runs.

    Args:
        model: The whole model.
        gpus: Processes, each of which keeps one part.
        wide: Bytes of a weight of a part over those of a gathered weight.
        accumulate: Micro-batches of a step, of which the last one runs: it needs the most memory.
    """

    def __init__(self, model: nn.Module, *, gpus: int, wide: int = 1, accumulate: int = 1) -> None:
        self.model, self.gpus, self.wide, self.accumulate = model, gpus, wide, accumulate
        self.units = fsdp2_units(model)
        self.order: list[Unit] = []  # of the forward pass
        self.flat: Tensor | None = None  # of the last unit that was gathered in a forward pass
        self.reduced: Tensor | None = None  # gradients on their way to the other processes
        self.shards: list[Tensor] = []

    @contextmanager
    def running(self, mark: Callable[[], None]) -> Iterator[None]:
        """Context in which the model runs.

        Args:
            mark: Called when a parameter has its gradient.
        """
        handles: list[Any] = []
        for unit in self.units:
            first, last = unit.modules[0], unit.modules[-1]
            handles.append(first.register_forward_pre_hook(self._before(unit), prepend=True))
            handles.append(last.register_forward_hook(self._after(unit)))
            handles += [
                x.register_post_accumulate_grad_hook(self._with_gradient(unit, mark))
                for x in unit.trained
            ]
        handles.append(self.model.register_forward_hook(self._end_forward))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def reset(self) -> None:
        """Free all buffers, before a step."""
        self.order.clear()
        self.shards.clear()
        self.flat = self.reduced = None
        for unit in self.units:
            unit.weights = unit.flat = unit.kept = None
            unit.waits = len(unit.trained)
            unit.reached = []

    def start(self) -> None:
        """Allocate what earlier micro-batches leave."""
        for unit in self.units if self.accumulate > 1 else ():
            unit.kept = _empty(_size(unit.trained))

    def end_of_step(self) -> None:
        """Reduce what is left after the backward pass."""
        for unit in self.units:
            self._release(unit)

    def _end_forward(self, *_: Any) -> None:
        self.flat = None

    def _narrow(self, size: int) -> Tensor | None:
        """Return a process's part in the dtype of gathered weights, if it is kept in another."""
        return _empty(size // self.gpus) if self.wide > 1 else None

    def _flat(self, unit: Unit) -> Tensor:
        """Return the buffer to which a unit is gathered, after its part is cast."""
        part = self._narrow(unit.size)
        flat = _empty(unit.size)
        del part
        return flat

    def _gather(self, unit: Unit) -> Tensor | None:
        """Gather a unit that is not; return the flat buffer."""
        if unit.weights is not None:
            return None
        flat, unit.flat = unit.flat, None
        if flat is None:
            flat = self._flat(unit)
        unit.weights = _empty(unit.size)
        return flat

    def _before(self, unit: Unit) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            backward = torch._C._current_graph_task_id() != -1  # gradient checkpointing
            flat = self._gather(unit)
            if flat is not None and not backward:
                self.flat = flat
            if unit.modules[0] is not self.model:
                self._release_with_input(unit, args)

        return hook

    def _release_with_input(self, unit: Unit, args: Any) -> None:
        for x in tree_leaves(args):
            if isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled():
                x.register_hook(lambda _: self._release(unit))
                unit.waits = -1  # the gradient of the input is the last
                return

    def _after(self, unit: Unit) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if torch._C._current_graph_task_id() != -1:
                return
            if unit.resharded:
                unit.weights = None
            for x in tree_leaves(output):
                if isinstance(x, Tensor) and x.requires_grad:
                    self.order.append(unit)
                    x.register_hook(self._before_backward(unit, len(self.order) - 1))
                    return

        return hook

    def _before_backward(self, unit: Unit, place: int) -> Any:
        def hook(_: Tensor) -> None:
            for later in self.order[place + 1 :]:
                if later.waits < 0:  # this is the gradient of its input, and it is complete
                    self._release(later)
            self._gather(unit)
            before = self.order[place - 1] if place else unit
            if before.weights is None and before.flat is None:
                before.flat = self._flat(before)

        return hook

    def _with_gradient(self, unit: Unit, mark: Callable[[], None]) -> Any:
        def hook(parameter: Tensor) -> None:
            mark()
            unit.reached.append(parameter)
            if self.accumulate > 1:  # added to that of earlier micro-batches
                parameter.grad = None
            if unit.waits > 0:
                unit.waits -= 1
                if unit.waits == 0:
                    self._release(unit)

        return hook

    def _release(self, unit: Unit) -> None:
        """Free a unit's weights, and replace its gradients by a part of them."""
        unit.weights = None
        reached, unit.reached = unit.reached, []
        if not reached:
            return
        self.reduced = None
        self.reduced = _empty(_size(reached))
        unit.kept = None
        for x in reached:
            x.grad = None
        part = self._narrow(_size(reached))
        self.shards.append(_empty(self.wide * _size(reached) // self.gpus))
        del part


def gather_parts(model: nn.Module, wide: int = 1) -> list[RemovableHandle]:
    """Register hooks that allocate the weights of each layer while it runs without gradients.

    Between stages of a run, and in a teacher that is a copy, processes have parts of them.

    Args:
        model: The whole model.
        wide: Bytes of a gathered weight over those of one of the model.

    Returns:
        The handles of the hooks.
    """
    gathered: dict[nn.Module, Tensor] = {}
    handles = []

    def before(size: int) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            gathered[module] = _empty(wide * size)

        return hook

    def after(module: nn.Module, args: Any, output: Any) -> None:
        del gathered[module]

    for module, owners in running_units(model):
        found = {id(x): x for owner in owners for x in owner.parameters(recurse=False)}
        if found:
            handles.append(module.register_forward_pre_hook(before(_size(list(found.values())))))
            handles.append(module.register_forward_hook(after))
    return handles


class AccumulatedGradients:
    """Keep the gradients of earlier micro-batches while a model runs, to which new ones are added.

    Args:
        model: The whole model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.trained = [x for x in model.parameters() if x.requires_grad]
        self.kept: Tensor | None = None

    @contextmanager
    def running(self, mark: Callable[[], None]) -> Iterator[None]:
        """Context in which the model runs.

        Args:
            mark: Called when a parameter has its gradient.
        """

        def hook(parameter: Tensor) -> None:
            mark()
            parameter.grad = None

        handles = [x.register_post_accumulate_grad_hook(hook) for x in self.trained]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def start(self) -> None:
        """Allocate what earlier micro-batches leave."""
        self.kept = _empty(_size(self.trained))

    def reset(self) -> None:
        """Free it, before a step."""
        self.kept = None

    def end_of_step(self) -> None:
        """Do nothing: the gradients stay."""


def fsdp2_units(model: nn.Module) -> list[Unit]:
    """Return the units of FSDP2 as Accelerate makes them, the rest of the model last."""
    taken: set[int] = set()
    units: list[Unit] = []

    def add(modules: Sequence[nn.Module], *, resharded: bool = True) -> None:
        found = {id(x): x for module in modules for x in module.parameters()}
        own = [x for key, x in found.items() if key not in taken]
        taken.update(map(id, own))
        if own:
            units.append(Unit(modules, own, resharded=resharded))

    for name in dict.fromkeys(x.name.rpartition(".")[0] for x in attention_layers(model)):
        add([model.get_submodule(name)])
    embedding: Any = getattr(model, "get_input_embeddings", lambda: None)()
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    tied = embedding is not None and head is not None and embedding.weight is head.weight
    if embedding is not None and not tied:
        add([embedding])
    tail = [x for x in (_final_norm(model), embedding if tied else None, head) if x is not None]
    if tied:
        tail = [embedding, *(x for x in tail if x is not embedding)]
    if tail:
        add(tail, resharded=False)
    add([model], resharded=False)
    return units


def _final_norm(model: Any) -> nn.Module | None:
    """Return the last norm among the children of the base model, as Accelerate finds it."""
    base = getattr(model, base_model_name(model), model)
    norms = [x for x in base.children() if "Norm" in type(x).__name__]
    return norms[-1] if norms else None
