"""Activations in CPU memory, from the forward to the backward pass.

Autograd saves tensors for the backward pass. Each is copied to CPU memory when it is saved, and
back when its gradient is computed, so that the GPU has those of the layer that runs. With gradient
checkpointing, autograd saves the inputs of layers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

MIN_BYTES = 1 << 16  # a smaller tensor stays: starting two copies would take longer than they do
PLAIN = (Tensor, FakeTensor)  # fake tensors stand for plain ones, whose memory is computed


def pinned_memory(x: Tensor) -> Tensor:
    """Return memory of the CPU for the copy of a tensor."""
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=torch.accelerator.is_available())


@contextmanager
def offload_activations(
    model: nn.Module,
    device: torch.device,
    *,
    min_bytes: int = MIN_BYTES,
    enabled: bool = True,
    allocate: Callable[[Tensor], Tensor] = pinned_memory,
) -> Iterator[None]:
    """Context of a forward pass whose activations are in CPU memory until the backward pass.

    Weights and buffers of the model stay, as do small tensors, tensors on other devices and
    subclasses of tensors. A tensor that several operations save is copied once. Copies are queued
    on the current stream, from and to pinned memory.

    Args:
        model: The model, possibly wrapped for several processes or sharded by FSDP2.
        device: Device of the activations.
        min_bytes: Size of the smallest tensor that is moved.
        enabled: Whether activations are moved.
        allocate: Returns the memory of a copy.
    """
    if not enabled:
        yield
        return
    offload = _Offload(model, device, min_bytes, allocate)
    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, FSDPModule):  # it has whole weights while it runs
                hook = module.register_forward_pre_hook(lambda unit, _: offload.keep(unit))
                stack.callback(hook.remove)
        stack.enter_context(saved_tensors_hooks(offload.pack, _unpack))
        yield


class _Copy:
    """A copy of consecutive elements in CPU memory.

    Args:
        elements: The elements.
        allocate: Returns the memory.
    """

    def __init__(
        self, elements: Tensor, allocate: Callable[[Tensor], Tensor] = pinned_memory
    ) -> None:
        self.device = elements.device
        self.host = allocate(elements)
        self.host.copy_(elements, non_blocking=True)
        self._restored: weakref.ref[Tensor] | None = None

    def restored(self) -> Tensor:
        """Return the elements on their device, where they are at most once."""
        found = None if self._restored is None else self._restored()
        if found is None:
            found = self.host.to(self.device, non_blocking=True, copy=True)
            self._restored = weakref.ref(found)
        return found


class _Saved(NamedTuple):
    """What autograd keeps in the place of a tensor."""

    copy: _Copy
    size: torch.Size
    stride: tuple[int, ...]


class _Offload:
    """Copies the tensors that one forward pass saves.

    Args:
        model: The model.
        device: Device of the activations.
        min_bytes: Size of the smallest tensor that is moved.
        allocate: Returns the memory of a copy.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        min_bytes: int,
        allocate: Callable[[Tensor], Tensor] = pinned_memory,
    ) -> None:
        self.device, self.min_bytes, self.allocate = device, min_bytes, allocate
        self.copies: weakref.WeakValueDictionary[Any, _Copy] = weakref.WeakValueDictionary()
        # A weak reference keeps the address of a storage from being used again, but not its data
        self.storages: dict[int, StorageWeakRef] = {}
        self.kept: set[int] = set()
        self.keep(model)

    def keep(self, module: nn.Module) -> None:
        """Leave the weights and buffers of a module where they are."""
        for x in (*module.parameters(), *module.buffers()):
            local: Tensor = x.to_local() if isinstance(x, DTensor) else x.data
            self.kept.add(self._address(local))

    def _address(self, x: Tensor) -> int:
        reference = StorageWeakRef(x.untyped_storage())
        address: int = reference.cdata
        self.storages.setdefault(address, reference)
        return address

    @torch.no_grad()
    def pack(self, x: Tensor) -> Tensor | _Saved:
        """Return what autograd keeps of a tensor."""
        if type(x) not in PLAIN or x.device.type != self.device.type:
            return x
        if x.layout is not torch.strided or x.is_complex() or x.is_neg():
            return x
        repeats = [stride == 0 for stride in x.stride()]  # of expanded dimensions
        once = x.detach()[tuple(slice(0, 1) if again else slice(None) for again in repeats)]
        address = self._address(once)
        if once.numel() * once.element_size() < self.min_bytes or address in self.kept:
            return x
        dense = _is_dense(once)
        layout = (once.numel(),) if dense else (once.shape, once.stride())
        key = (address, once.storage_offset(), layout, once.dtype, once._version)
        ordered = once if dense else once.contiguous()
        copy = self.copies.get(key)
        if copy is None:
            copy = _Copy(ordered.as_strided((once.numel(),), (1,)), self.allocate)
            self.copies[key] = copy
        strides = zip(repeats, ordered.stride(), strict=True)
        return _Saved(copy, x.shape, tuple(0 if again else stride for again, stride in strides))


def _is_dense(x: Tensor) -> bool:
    """Return whether the elements of a tensor are consecutive in memory, in any order."""
    least = 1
    for stride, count in sorted(zip(x.stride(), x.shape, strict=True)):
        if count > 1 and stride != least:
            return False
        least *= count
    return True


def _unpack(saved: Tensor | _Saved) -> Tensor:
    """Return the tensor that autograd has saved, on its device."""
    if not isinstance(saved, _Saved):
        return saved
    return saved.copy.restored().as_strided(saved.size, saved.stride)
