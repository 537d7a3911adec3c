"""Communication without buffers of its own, for tests that measure the memory of two ranks."""

import importlib
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from attnzoo.training import model_shards


class AllGather:
    """All-gather without buffers of its own, as NCCL's; gloo's copies the output.

    gloo's thread frees a tensor some time after it was sent, so what is sent is a part of a buffer
    that stays.

    Args:
        buffer: It has at least the bytes of a process's part.
    """

    def __init__(self, buffer):
        self.buffer = buffer

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def sent(self, part):
        return self.buffer[: part.nbytes].view(part.dtype).copy_(part)

    def __call__(self, output_tensor, input_tensor, group=None, async_op=False):
        group = group or dist.group.WORLD
        for rank, part in enumerate(output_tensor.chunk(group.size())):
            sent = self.sent(input_tensor if rank == group.rank() else part)
            dist.broadcast(sent, rank, group=group)
            part.copy_(sent)


class DeepSpeedAllGather(AllGather):
    """The same with a handle, which FSDP2 would wait for, and free buffers at other times."""

    def __call__(self, *args, **options):
        super().__call__(*args, **options)
        return SimpleNamespace(wait=lambda: None)


class ReduceScatter(AllGather):
    """The same for reduce-scatter."""

    def __call__(self, output_tensor, input_tensor, group=None, op=None, async_op=False):
        group = group or dist.group.WORLD
        for rank, part in enumerate(input_tensor.chunk(group.size())):
            dist.reduce(sent := self.sent(part), rank, op=dist.ReduceOp.SUM, group=group)
            if rank == group.rank():
                output_tensor.copy_(sent)


def send_through(model, buffer):
    """Let FSDP2 or DeepSpeed send parts of a buffer that stays, for a prepared model."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(AllGather(buffer))
            module.set_custom_reduce_scatter(ReduceScatter(buffer))
    if type(model).__name__ == "DeepSpeedEngine":
        backend = importlib.import_module("deepspeed.comm.comm").cdb
        backend.all_gather_function = DeepSpeedAllGather(buffer)
        backend.reduce_scatter_function = ReduceScatter(buffer)


@contextmanager
def gathered_through(buffer):
    """Context in which parts of weights are gathered by sending parts of a buffer that stays."""

    def gather(x, device):
        full = torch.empty(x.shape, dtype=x.dtype)
        for rank, part in enumerate(full.chunk(dist.get_world_size())):
            own = x.detach().to_local() if rank == dist.get_rank() else part
            sent = buffer[: part.nbytes].view(part.dtype).copy_(own.reshape(-1))
            dist.broadcast(sent, rank)
            part.copy_(sent.view_as(part))
        return full

    with mock.patch.object(model_shards, "gather", gather):
        yield


@contextmanager
def static_buffers(buffer):
    """Context in which DeepSpeed's broadcasts and reductions send parts of a buffer that stays."""
    backend = importlib.import_module("deepspeed.comm.torch").TorchBackend

    def through_buffer(run):
        def call(self, tensor, *args, **options):
            sent = buffer[: tensor.nbytes].view(tensor.dtype).copy_(tensor.detach().view(-1))
            handle = run(self, sent, *args, **options)
            if handle is not None:
                handle.wait()
            tensor.detach().copy_(sent.view_as(tensor))
            return SimpleNamespace(wait=lambda: None)

        return call

    with (
        mock.patch.object(backend, "broadcast", through_buffer(backend.broadcast)),
        mock.patch.object(backend, "all_reduce", through_buffer(backend.all_reduce)),
    ):
        yield
