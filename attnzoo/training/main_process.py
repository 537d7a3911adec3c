"""Whole weights on the main process alone, while FSDP2 shards them over all processes.

The other processes build models on the meta device, without data. They wait while the main process
evaluates a model or loads it, and get its result; when a stage begins, each gets its shard of the
weights, one tensor after the other. Under any other distribution every process has whole weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import fsdp2_canonicalize_names
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor, distribute_tensor

from attnzoo.errors import AttnzooError

# The others wait for an evaluation. If the main process fails, its connections close at once.
WAIT = timedelta(days=30)
T = TypeVar("T")
M = TypeVar("M", bound=nn.Module)
Groups = list[dict[str, Any]]


class MainProcess:
    """Runs what needs whole weights: on the main process alone under FSDP2, else on each process.

    Under FSDP2 with ``fsdp_offload_params``, every process has whole weights.

    Args:
        accelerator: The run's; all processes create this object at the same point.

    Attributes:
        alone: Whether the main process alone has whole weights.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.alone = is_alone(accelerator)
        if self.alone:  # Accelerate's own distribution of weights knows no buffers
            plugin: Any = accelerator.state.fsdp_plugin
            plugin.cpu_ram_efficient_loading = False
        # NCCL's groups have a timeout of 10 minutes, and occupy the GPU while they wait
        self._group: Any = dist.new_group(backend="gloo", timeout=WAIT) if self.alone else None

    @property
    def lacks_weights(self) -> bool:
        """Whether this process builds models without data."""
        return self.alone and not self.accelerator.is_main_process

    def close(self) -> None:
        """Close the connections between the processes."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None

    def run(self, compute: Callable[[], T]) -> T:
        """Return the result of a function on every process; called by all processes.

        Args:
            compute: The function. Where the main process alone calls it, its result can be pickled
                and has tensors on the CPU only.

        Raises:
            AttnzooError: The function raises it; all processes do.
        """
        if not self.alone:
            return compute()
        found: list[Any] = [None, None]  # the result, the error
        if self.accelerator.is_main_process:
            try:
                found[0] = compute()
            except AttnzooError as error:
                found[1] = error
        shared = list(found)
        dist.broadcast_object_list(shared, 0, self._group, device=torch.device("cpu"))
        if not self.accelerator.is_main_process:
            found = shared
        if found[1] is not None:
            raise found[1]
        result: T = found[0]
        return result

    def wait(self) -> None:
        """Wait for the main process, for as long as it takes."""
        self.run(lambda: None)

    def to_device(self, model: M) -> M:
        """Return a model, moved to this process's device if it has data."""
        return model if self.lacks_weights else model.to(self.accelerator.device)

    def share_buffers(self, model: nn.Module) -> None:
        """Give the buffers of the main process's model to the models of the others."""

        def read() -> dict[str, Tensor]:
            named = model.named_buffers(remove_duplicate=False)
            return {name: x.detach().cpu() for name, x in named}

        buffers = self.run(read)
        if self.lacks_weights:
            for name, x in buffers.items():
                prefix, _, last = name.rpartition(".")
                module = model.get_submodule(prefix)
                module._buffers[last] = x.to(self.accelerator.device)

    def fetch(self, x: Tensor) -> Tensor:
        """Return the data of a weight of the main process's model; called by all processes.

        Args:
            x: The weight, which has no data on the other processes.
        """
        if not self.alone:
            return x.detach()
        device = self.accelerator.device
        if self.accelerator.is_main_process:
            full = x.detach().to(device).contiguous()
        else:
            full = torch.empty(x.shape, dtype=x.dtype, device=device)
        dist.broadcast(full, src=0)
        return full

    def prepare(
        self,
        model: nn.Module,
        groups: Groups,
        make_optimizer: Callable[[Groups], tuple[torch.optim.Optimizer, Any]],
        loader: Any,
    ) -> Any:
        """Return the prepared model, optimizer, schedule and loader, as ``Accelerator.prepare``.

        If it is alone, the weights of the main process's model are moved to the memory of its CPU,
        and from there to the shards. The model has no data while Accelerate prepares it, so that
        Accelerate cannot tell its parameters apart by their addresses; the optimizer gets them
        afterwards.

        Args:
            model: The model, which FSDP2 shards in place.
            groups: Parameter groups of the optimizer.
            make_optimizer: Returns the optimizer and the schedule, given the groups.
            loader: The loader.
        """
        if not self.alone:
            return self.accelerator.prepare(model, *make_optimizer(groups), loader)
        whole, empty = take_weights(model)
        self.share_buffers(model)
        groups = [{**g, "params": [empty[id(p)] for p in g["params"]]} for g in groups]
        optimizer, schedule = make_optimizer(groups)
        names = {id(p): name for name, p in model.named_parameters()}
        trained = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        prepared = self.accelerator.prepare(model, optimizer, schedule, loader)
        self._give_weights(prepared[0], whole)
        found = fsdp2_canonicalize_names(dict(prepared[0].named_parameters()))
        for group, chosen in zip(prepared[1].param_groups, trained, strict=True):
            group["params"] = [found[name] for name in chosen]
        return prepared

    def _give_weights(self, model: nn.Module, whole: dict[str, Tensor]) -> None:
        """Give a prepared model without data the weights of the main process, a shard to each."""
        given: dict[int, nn.Parameter] = {}
        empty = dict(model.named_parameters())
        for name, x in empty.items():
            (known,) = fsdp2_canonicalize_names({name: None})
            full = self.fetch(whole.pop(known) if self.accelerator.is_main_process else x)
            given[id(x)] = nn.Parameter(_shard_like(full, x), x.requires_grad)
        _replace_parameters(model, given)


def is_alone(accelerator: Accelerator) -> bool:
    """Return whether the main process alone has whole weights: under FSDP2."""
    if not accelerator.is_fsdp2 or accelerator.num_processes == 1:
        return False
    plugin: Any = accelerator.state.fsdp_plugin
    return not isinstance(plugin.cpu_offload, CPUOffloadPolicy)


def take_weights(model: nn.Module) -> tuple[dict[str, Tensor], dict[int, nn.Parameter]]:
    """Move a model to the meta device, without its buffers, and return its weights on the CPU.

    Parameters that code outside of the model still refers to lose their data.

    Returns:
        The weights by name, and the parameters in their place by the id of those that they replace.
    """
    before = list(model.named_parameters())
    whole = {name: p.detach().cpu() if not p.is_meta else p.detach() for name, p in before}
    empty = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for _, p in before
    }
    _replace_parameters(model, empty)
    for _, p in before:
        if not p.is_meta:
            p.data = p.data.new_empty(0)
    return whole, empty


def _replace_parameters(model: nn.Module, new: Mapping[int, nn.Parameter]) -> None:
    """Replace parameters by id, those that several modules share in each of them."""
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                module._parameters[name] = new[id(p)]


def _shard_like(full: Tensor, empty: nn.Parameter) -> Tensor:
    """Return this process's part of a tensor, which all processes have, as in a sharded one."""
    if not isinstance(empty, DTensor):
        return full
    mesh, placements = empty.device_mesh, empty.placements
    local = distribute_tensor(full, mesh, placements, src_data_rank=None).to_local()
    return DTensor.from_local(
        local.clone(),  # not a view, which would keep the whole tensor
        mesh,
        placements,
        run_check=False,
        shape=empty.shape,
        stride=empty.stride(),
    )
