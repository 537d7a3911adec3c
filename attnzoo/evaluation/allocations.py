"""Count the bytes that operations allocate, without allocating them.

Operations run on fake tensors, which have shapes and no data. Integers and
booleans are computed for real, because models and backends read them: positions, padding, blocks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from attnzoo.errors import AttnzooError, UnsupportedError

REAL_ELEMENTS = 2**24  # tensors of integers with more elements are fake


class AllocationTracker(TorchDispatchMode):
    """Count the bytes of the storages that operations on fake tensors create.

    Buffers that a kernel allocates and frees within one operation are not counted.

    Attributes:
        current: Bytes of the counted storages that are alive.
        peak: The largest ``current`` since a caller set it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current = self.peak = 0
        self._alive: dict[int, int] = {}  # storage -> bytes; 0 for those of inputs

    def peak_of(self, run: Callable[[], Any]) -> int:
        """Return the most bytes that a function allocates at any time."""
        before = self.peak = self.current
        run()
        return self.peak - before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation and count its new storages."""
        kwargs = kwargs or {}
        inputs = _tensors((args, kwargs))
        for x in inputs:
            self._add(x, 0)
        result = _run(func, args, kwargs, inputs)
        for x in _tensors(result):
            self._add(x, x.untyped_storage().nbytes())
        return result

    def _add(self, x: Tensor, count: int) -> None:
        storage = x.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return
        self._alive[key] = count
        self.current += count
        self.peak = max(self.peak, self.current)
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.current -= self._alive.pop(key)


def _run(func: Any, args: Any, kwargs: Any, inputs: list[Tensor]) -> Any:
    """Run an operation on fake tensors, or on real ones if it has integers only."""
    fake = any(isinstance(x, FakeTensor) for x in inputs)
    if fake or any(map(_is_float, inputs)):
        return func(*args, **kwargs)
    if not inputs:  # it creates tensors: of which size and dtype, fake ones show
        outputs = _tensors(func(*args, **kwargs))
        if not outputs or any(map(_is_float, outputs)):
            return func(*args, **kwargs)
        inputs = outputs
    if sum(x.numel() for x in inputs) > REAL_ELEMENTS:
        return func(*args, **kwargs)
    with _disable_current_modes():
        return func(*args, **kwargs)


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def _is_float(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


class SharedFakeTensorMode(FakeTensorMode):
    """A mode that copies of its tensors share.

    A deep copy of a mode copies its weak references to storages, which are then freed twice.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return the mode itself."""
        return self


def fake_model(build: Callable[[], PreTrainedModel]) -> tuple[PreTrainedModel, FakeTensorMode]:
    """Build a model whose parameters and buffers of floats are fake, and return its mode.

    Args:
        build: Builds the model with random weights.
    """
    with init_empty_weights(include_buffers=False):  # buffers of integers are read
        model = build()
    model.tie_weights()  # accelerate copies each parameter that a module registers
    mode = SharedFakeTensorMode(allow_non_fake_inputs=True)
    made: dict[int, Tensor] = {}  # tied tensors stay tied
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, x in tensors.items():
                if x is not None and _is_float(x):
                    if id(x) not in made:
                        made[id(x)] = _fake(x, mode)
                    tensors[name] = made[id(x)]  # type: ignore[assignment]
    return model, mode


def _fake(x: Tensor, mode: FakeTensorMode) -> Tensor:
    with mode:
        made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")
    return nn.Parameter(made, x.requires_grad) if isinstance(x, nn.Parameter) else made


@contextmanager
def counted(mode: FakeTensorMode) -> Iterator[AllocationTracker]:
    """Context manager in which allocations are counted on the fake tensors of a mode.

    Raises:
        UnsupportedError: An operation needs the value of a number, which fake tensors lack, or has
            no form for them.
    """
    try:
        with mode, AllocationTracker() as tracker:
            yield tracker
    except AttnzooError:
        raise
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise UnsupportedError(
            f"the memory cannot be computed without running the model: {error.func} depends on "
            "values of floats"
        ) from error
    except RuntimeError as error:
        raise UnsupportedError(
            "the memory cannot be computed without running the model: "
            f"{str(error).strip().splitlines()[0]}"
        ) from error
