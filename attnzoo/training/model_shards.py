"""Models of a run between its stages: under FSDP2 and ZeRO-3, processes have parts of each weight.

The weights are DTensors then. transformers reads only a process's part of them; while a model is
evaluated, all processes gather the weights of each layer for as long as it runs; and a stage gets
its weights one after the other. So no process ever holds a whole model. The parameters of backends
and adapters, which are few, are whole on every process. Under any other distribution, every process
has whole models.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import fsdp2_canonicalize_names
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor
from torch.utils.hooks import RemovableHandle

from attnzoo.hf.layers import running_units
from attnzoo.hf.names import NAME
from attnzoo.hf.swap.backends import when_built
from attnzoo.training.zero3 import free_partition, gathered, partition, uses_zero3

# The others wait until the main process has written a file. If it fails, its connections close.
WAIT = timedelta(days=30)
M = TypeVar("M", bound=nn.Module)
Groups = list[dict[str, Any]]


class ModelShards:
    """Loads, evaluates, trains and saves models of which each process has a part.

    It does so under FSDP2 and ZeRO-3. Under any other distribution, under FSDP2 with
    ``fsdp_offload_params``, and with parameters on NVMe, models are whole, and this class does
    nothing to them.

    Args:
        accelerator: The run's; all processes create this object at the same point.

    Attributes:
        enabled: Whether processes have parts of the weights.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.enabled = shards_models(accelerator)
        self._group: Any = None
        self._zero3 = uses_zero3(accelerator)
        if self.enabled:
            if not self._zero3:
                plugin: Any = accelerator.state.fsdp_plugin
                plugin.cpu_ram_efficient_loading = False  # whole weights on the main process
            device, count = accelerator.device.type, accelerator.num_processes
            self.mesh = init_device_mesh(device, (count,))
            # NCCL's groups have a timeout of 10 minutes, and occupy the GPU while they wait
            self._group = dist.new_group(backend="gloo", timeout=WAIT)

    def close(self) -> None:
        """Close the connections between the processes."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None

    def wait(self) -> None:
        """Wait for all processes, for as long as it takes."""
        if self.enabled:
            dist.barrier(self._group)

    def load(self, build: Callable[[], M]) -> M:
        """Return a model that a function loads, with parts of its weights.

        The model has parts, without data, before transformers reads the weights, so that it reads
        no more of them.

        Args:
            build: Calls ``from_pretrained``.
        """
        if not self.enabled:
            return build()
        with when_built(self._shard):
            model = build()
        self._shard(model)
        self._share(model)
        return model

    def _shard(self, model: nn.Module) -> None:
        """Replace the weights of a model, with data or without, by this process's parts."""
        new: dict[int, nn.Parameter] = {}
        for name, p in model.named_parameters():
            if is_shared(name) or p.ndim == 0:
                new[id(p)] = p
            elif isinstance(p, DTensor):  # what was read may be a view of a whole file
                new[id(p)] = nn.Parameter(map_part(p.detach(), _without_rest), p.requires_grad)
            else:
                part = shard(p.detach(), self.mesh, [Shard(0)])
                new[id(p)] = nn.Parameter(part, p.requires_grad)
        replace_parameters(model, new)

    @torch.no_grad()
    def _share(self, model: nn.Module) -> None:
        """Give all processes the main process's values of what is whole: random draws differ."""
        for x in (*model.parameters(), *model.buffers()):
            if not isinstance(x, DTensor):
                on_device = x.detach().to(self.accelerator.device).contiguous()
                dist.broadcast(on_device, src=0)
                x.copy_(on_device)

    def to_device(self, model: M) -> M:
        """Return a model, moved to this process's device."""
        device = self.accelerator.device
        if not self.enabled:
            return model.to(device)
        new = {}
        for p in model.parameters():
            moved = map_part(p.detach(), lambda part: part.to(device))
            new[id(p)] = p if p.device == device else nn.Parameter(moved, p.requires_grad)
        replace_parameters(model, new)
        for module in model.modules():
            for name, x in module._buffers.items():
                module._buffers[name] = x if x is None else x.to(device)
        return model

    @contextmanager
    def running(self, model: nn.Module) -> Iterator[None]:
        """Context in which a model runs without gradients; called by all processes."""
        handles = gather_while_running(model, self.accelerator.device) if self.enabled else []
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def fetch(self, x: Tensor) -> Tensor:
        """Return the whole data of a weight on this process's device; called by all processes."""
        return gather(x, self.accelerator.device) if isinstance(x, DTensor) else x.detach()

    def prepare(
        self,
        model: nn.Module,
        groups: Groups,
        make_optimizer: Callable[[Groups], tuple[torch.optim.Optimizer, Any]],
        loader: Any,
    ) -> Any:
        """Return the prepared model, optimizer, schedule and loader, as ``Accelerator.prepare``.

        If models are sharded, this one has no data while Accelerate prepares it, so that Accelerate
        cannot tell its parameters apart by their addresses; the optimizer gets them afterwards.

        Args:
            model: The model, which is sharded in place.
            groups: Parameter groups of the optimizer.
            make_optimizer: Returns the optimizer and the schedule, given the groups.
            loader: The loader.
        """
        if not self.enabled:
            return self.accelerator.prepare(model, *make_optimizer(groups), loader)
        taken, empty = take_weights(model)
        groups = [{**g, "params": [empty[id(p)] for p in g["params"]]} for g in groups]
        optimizer, schedule = make_optimizer(groups)
        names = {id(p): name for name, p in model.named_parameters()}
        trained = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        if self._zero3:
            new = partition(self.accelerator, model, lambda name: self._take(taken, name))
            replace_parameters(model, new)
            _set_trained(optimizer, model, trained)
            return self.accelerator.prepare(model, optimizer, schedule, loader)
        prepared = self.accelerator.prepare(model, optimizer, schedule, loader)
        self._give_weights(prepared[0], taken)
        _set_trained(prepared[1], prepared[0], trained)
        return prepared

    def _take(self, taken: dict[str, Tensor], name: str) -> Tensor:
        """Return the whole data of a weight, whose part others may still refer to: it is freed."""
        x = taken.pop(name)
        full = self.fetch(x)
        if isinstance(x, DTensor):
            x.to_local().untyped_storage().resize_(0)
        return full

    def _give_weights(self, model: nn.Module, taken: dict[str, Tensor]) -> None:
        """Give a prepared model without data the weights of a model, one after the other."""
        given: dict[int, nn.Parameter] = {}
        for name, empty in dict(model.named_parameters()).items():
            (known,) = fsdp2_canonicalize_names({name: None})
            part = self._take(taken, known).to(empty.dtype)  # Accelerate widens 16 bits to 32
            if isinstance(empty, DTensor):
                part = shard(part, empty.device_mesh, empty.placements)
            given[id(empty)] = nn.Parameter(part, empty.requires_grad)
        replace_parameters(model, given)

    @torch.no_grad()
    def collect(self, trained: nn.Module, empty: M) -> M:
        """Return a model with the weights of a trained one, of which it takes the parts.

        Args:
            trained: The model that is sharded.
            empty: An unprepared model of the same architecture, without data.
        """
        if self._zero3:
            return self._collect_zero3(self.accelerator.unwrap_model(trained), empty)
        for module in trained.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        found = fsdp2_canonicalize_names(dict(trained.named_parameters()))
        new = {}
        for name, p in empty.named_parameters():
            x = found[name].detach()
            new[id(p)] = nn.Parameter(self.fetch(x) if is_shared(name) else x, requires_grad=False)
        return _filled(empty, new, trained)

    def _collect_zero3(self, trained: nn.Module, empty: M) -> M:
        found = dict(trained.named_parameters())
        new = {}
        for name, p in empty.named_parameters():
            with gathered(found[name]):
                full = found[name].detach().to(p.dtype)
                part = full.clone() if is_shared(name) else shard(full, self.mesh, [Shard(0)])
            new[id(p)] = nn.Parameter(part, requires_grad=False)
            free_partition(found[name])
        return _filled(empty, new, trained)

    @contextmanager
    def whole_on_disk(
        self, model: nn.Module, folder: Path, types: Mapping[str, torch.dtype]
    ) -> Iterator[None]:
        """Context in which the main process has whole weights, in files.

        Its memory does not have to hold them. Called by all processes; the others keep their parts.

        Args:
            model: The model, which is not used after the context.
            folder: The files' folder, which is removed before and afterwards.
            types: Data types of weights by name, where not their own.
        """
        if not self.enabled:
            yield
            return
        main = self.accelerator.is_main_process
        if main:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        try:
            new: dict[int, nn.Parameter] = {}
            for number, (name, p) in enumerate(model.named_parameters()):
                new[id(p)] = p
                if isinstance(p, DTensor):
                    full = self.fetch(p)
                    if main:
                        full = full.to(types.get(name, p.dtype))
                        new[id(p)] = _in_file(full, folder / str(number))
            replace_parameters(model, new)
            yield
        finally:
            if main:
                shutil.rmtree(folder, ignore_errors=True)


def shards_models(accelerator: Accelerator) -> bool:
    """Return whether processes have parts of the weights between stages."""
    if accelerator.num_processes == 1:
        return False
    if not accelerator.is_fsdp2:
        return uses_zero3(accelerator)
    plugin: Any = accelerator.state.fsdp_plugin
    return not isinstance(plugin.cpu_offload, CPUOffloadPolicy)


def is_shared(name: str) -> bool:
    """Return whether all processes have a whole parameter: those of backends and adapters."""
    return f".{NAME}." in name or ".lora_" in name


def map_part(x: Tensor, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a tensor whose part on each process is changed, or a whole one, changed."""
    if not isinstance(x, DTensor):
        return change(x)
    return DTensor.from_local(
        *(change(x.to_local()), x.device_mesh, x.placements),
        run_check=False,
        shape=x.shape,
        stride=x.stride(),
    )


def _without_rest(x: Tensor) -> Tensor:
    """Return a tensor that is all of its storage."""
    return x if x.is_meta or x.untyped_storage().nbytes() == x.nbytes else x.clone()


def gather(x: DTensor, device: torch.device) -> Tensor:
    """Return a whole tensor on a device, where its parts are moved first."""
    full: Tensor = map_part(x.detach(), lambda part: part.to(device)).full_tensor()
    return full


def shard(full: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Any:
    """Return a tensor, which all processes have, as one that has a part on each."""
    parts = distribute_tensor(full, mesh, placements, src_data_rank=None)
    return map_part(parts, _without_rest)


def _set_trained(optimizer: Any, model: nn.Module, names: Sequence[Sequence[str]]) -> None:
    """Give the groups of an optimizer the parameters of a sharded model, by name."""
    found = fsdp2_canonicalize_names(dict(model.named_parameters()))
    for group, chosen in zip(optimizer.param_groups, names, strict=True):
        group["params"] = [found[name] for name in chosen]


def _filled(empty: M, new: Mapping[int, nn.Parameter], trained: nn.Module) -> M:
    """Return a model with other parameters, and with the buffers of a trained one."""
    replace_parameters(empty, new)
    buffers = dict(trained.named_buffers(remove_duplicate=False))
    for name, x in fsdp2_canonicalize_names(buffers).items():
        prefix, _, last = name.rpartition(".")
        empty.get_submodule(prefix)._buffers[last] = x
    return empty


def _in_file(x: Tensor, file: Path) -> nn.Parameter:
    """Return a frozen parameter whose data is in a file.

    Raises:
        OSError: The file cannot be written.
    """
    data = x.detach().cpu().contiguous().view(-1).view(torch.uint8)
    file.write_bytes(data.numpy().data)  # a full disk would end a process that writes to a map
    mapped = torch.from_numpy(np.memmap(file, mode="c"))
    return nn.Parameter(mapped.view(x.dtype).view(x.shape), requires_grad=False)


def take_weights(model: nn.Module) -> tuple[dict[str, Tensor], dict[int, nn.Parameter]]:
    """Move a model to the meta device, without its buffers, and return its weights.

    Whole parameters that code outside of the model still refers to lose their data.

    Returns:
        The weights by name, and the parameters in their place by the id of those that they replace.
    """
    before = list(model.named_parameters())
    taken = {name: p.detach() for name, p in before}
    empty = {}
    for _, p in before:
        meta = torch.empty(p.shape, dtype=p.dtype, device="meta")
        empty[id(p)] = nn.Parameter(meta, p.requires_grad)
    replace_parameters(model, empty)
    for _, p in before:
        if not isinstance(p, DTensor):
            p.data = p.data.new_empty(0)
    return taken, empty


def replace_parameters(model: nn.Module, new: Mapping[int, nn.Parameter]) -> None:
    """Replace parameters by id, those that several modules share in each of them."""
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                module._parameters[name] = new[id(p)]


@torch.no_grad()
def merge_shards(trained: Any) -> Any:
    """Return a PEFT model's own model, with LoRA adapters added to weights of which it has parts.

    Args:
        trained: The PEFT model; its adapters are whole.
    """
    from peft.tuners.lora import LoraLayer

    layers: list[Any] = [m for m in trained.modules() if isinstance(m, LoraLayer)]
    for layer in layers:
        weight: Any = layer.get_base_layer().weight
        for adapter in layer.active_adapters:
            delta = layer.get_delta_weight(adapter).to(weight.dtype)
            part = shard(delta, weight.device_mesh, weight.placements)
            weight.detach().to_local().add_(part.to_local())
    return trained.unload()


def gather_while_running(model: nn.Module, device: torch.device) -> list[RemovableHandle]:
    """Register hooks that give each layer whole weights while it runs, without gradients.

    Modules outside of layers, such as the embedding and the head, get them likewise.

    Args:
        model: A transformers model whose weights are parts; all processes run it together.
        device: The device on which it runs.

    Returns:
        The handles of the hooks.
    """
    handles: list[RemovableHandle] = []
    for module, owners in running_units(model):
        if any(isinstance(p, DTensor) for owner in owners for p in owner._parameters.values()):
            gathered = _Gathered(owners, device)
            handles += [
                module.register_forward_pre_hook(gathered.before, prepend=True),
                module.register_forward_hook(gathered.after, always_call=True),
            ]
    return handles


class _Gathered:
    """Hooks that put whole weights in the place of parts, and the parts back.

    Args:
        owners: The modules that own the weights.
        device: The device of the whole weights.
    """

    def __init__(self, owners: Iterable[nn.Module], device: torch.device) -> None:
        self.owners, self.device = list(owners), device
        self.parts: list[tuple[nn.Module, str, Any]] = []

    @torch.no_grad()
    def before(self, module: nn.Module, args: Any) -> None:
        """Gather the weights."""
        for owner in self.owners:
            for name, p in list(owner._parameters.items()):
                if isinstance(p, DTensor):
                    self.parts.append((owner, name, p))
                    owner._parameters[name] = nn.Parameter(gather(p, self.device), False)

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """Free the gathered weights."""
        for owner, name, p in self.parts:
            owner._parameters[name] = p
        self.parts = []
