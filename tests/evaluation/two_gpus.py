"""Script that tests start as two ranks: measure the memory of a step under a launch config.

torchrun --nproc-per-node 2 two_gpus.py CASE.json OUT.json
"""

import gc
import importlib
import json
import sys
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from attnzoo.evaluation.memory import build_model
from attnzoo.evaluation.memory_case import MemoryCase, ZeroSizes
from attnzoo.evaluation.timing import profile_allocations
from attnzoo.runtime.activation_offload import offload_activations
from attnzoo.training import (
    distil_memory,  # noqa: F401 - registers the loss "distil"
    model_shards,
    sharding,
)
from attnzoo.training.distil import distil_loss, softmax_teacher
from attnzoo.training.model_shards import ModelShards
from attnzoo.training.optimizer import make_optimizer
from tests.training.engines import engine, require_engine

NAMES = {  # of sizes in DeepSpeed's config
    "reduce_bucket": "reduce_bucket_size",
    "prefetch_bucket": "stage3_prefetch_bucket_size",
    "persistence_threshold": "stage3_param_persistence_threshold",
    "max_live": "stage3_max_live_parameters",
    "max_reuse_distance": "stage3_max_reuse_distance",
}


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


def prepare(shards, model, optimizer):
    """Return the prepared model and optimizer, as a stage of a run has them."""
    groups = [{"params": [x for x in model.parameters() if x.requires_grad], "lr": 1e-5}]

    def make(groups):
        made = optimizer(groups)
        return made, LambdaLR(made, lambda step: 1.0)

    loader = DataLoader(range(4), batch_size=2)
    return shards.prepare(model, groups, make, loader)[:2]


def make_loss(model, case, shards):
    """Return a function of the prepared model and tokens that returns the loss of a case."""
    if case.loss == "lm":
        return lambda prepared, x: prepared(input_ids=x, labels=x, use_cache=False).loss
    options = {"weights_change": case.copies_teacher, "dtype": case.kept_dtype}
    loss = distil_loss(softmax_teacher(model, **options, shards=shards))
    return lambda prepared, x: loss(prepared, {"input_ids": x, "labels": x})


def offloading(model, case):
    """Return a context in which activations are copied to memory that the profiler does not see."""
    return offload_activations(
        model,
        torch.device("cpu"),
        enabled=case.activation_offloading,
        allocate=lambda x: torch.from_numpy(np.empty(x.nbytes, np.uint8)).view(x.dtype),
    )


def measure(case):
    """Return the bytes of a process: of weights, of gradients, and of forward + backward."""
    torch.manual_seed(0)
    precision = "bf16" if case.precision == "bf16" else "no"
    buffer = torch.empty(1 << 24, dtype=torch.uint8)
    with engine(case.sharding, ACCELERATE_MIXED_PRECISION=precision), gathered_through(buffer):
        accelerator = sharding.make_accelerator(0, tracker=None, logs=Path())
        shards = ModelShards(accelerator)
        model = shards.load(lambda: build_model(case))
        loss = make_loss(model, case, shards)
        model, optimizer = prepare(shards, model, torch.optim.AdamW)
        require_engine(case.sharding, accelerator, model, 1)
        send_through(model, buffer)
        tokens = torch.randint(100, (case.rows, case.length))

        def run():
            for number in range(1, case.accumulate + 1):
                last = number == case.accumulate
                with sharding.accumulate_gradients(accelerator, model, last=last):
                    with accelerator.autocast(), offloading(model, case):
                        total = loss(model, tokens)
                    accelerator.backward(total)

        def local(x):
            return x.to_local() if hasattr(x, "to_local") else x

        run()
        optimizer.zero_grad()
        peak, _ = profile_allocations(run)
        gradients = [local(x.grad) for x in model.parameters() if x.grad is not None]
        weights = [local(x) for x in model.parameters()]
        optimizer.step()
        states = [local(x) for s in optimizer.state.values() for x in s.values()]
        found = {"parameters": weights, "gradients": gradients, "optimizer": states}
        sizes = {k: sum(x.numel() * x.element_size() for x in v) for k, v in found.items()}
        return {**sizes, "backward": peak}


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


def measure_zero(case):
    """Return the bytes of a process under DeepSpeed: between steps, and of a step beyond these."""
    torch.manual_seed(0)
    name, kept = f"deepspeed_{case.sharding}", []
    precision = "bf16" if case.precision == "bf16" else "no"
    buffer = torch.empty(1 << 24, dtype=torch.uint8)
    tokens = torch.randint(100, (case.rows, case.length))
    with (
        engine(name, ACCELERATE_MIXED_PRECISION=precision),
        static_buffers(buffer),
        gathered_through(buffer),
    ):
        accelerator = sharding.make_accelerator(0, tracker=None, logs=Path(), clip=1.0)
        config = accelerator.state.deepspeed_plugin.deepspeed_config
        config["train_micro_batch_size_per_gpu"] = case.rows
        config["zero_optimization"] |= {
            NAMES[x]: size for x, size in asdict(case.zero_sizes).items()
        }

        def build():
            shards = ModelShards(accelerator)
            model = shards.load(lambda: build_model(case))
            optim = "adamw_torch" if case.optimizer == "adamw" else case.optimizer
            optimizer = partial(make_optimizer, optim, model, weight_decay=0.0)
            loss = make_loss(model, case, shards)
            kept.extend((*prepare(shards, model, optimizer), loss))
            send_through(kept[0], buffer)
            for _ in range(3):  # DeepSpeed learns the order of modules
                step()

        def step():
            model, optimizer, loss = kept
            for number in range(1, case.accumulate + 1):
                last = number == case.accumulate
                with sharding.accumulate_gradients(accelerator, model, last=last):
                    accelerator.backward(loss(model, tokens))
            optimizer.step()
            optimizer.zero_grad()

        _, between = profile_allocations(build)
        require_engine(name, accelerator, kept[0], 3)
        peak, _ = profile_allocations(step)
    return {"between": between, "step": peak}


def read_case(options):
    """Return a case from plain data."""
    return MemoryCase(**{**options, "zero_sizes": ZeroSizes(**options.get("zero_sizes", {}))})


if __name__ == "__main__":
    cases, out = map(Path, sys.argv[1:])
    dist.init_process_group("gloo")
    found = []
    for case in map(read_case, json.loads(cases.read_text())):
        gc.collect()  # the profiler counts when what it saw in an earlier case is freed
        found.append(measure_zero(case) if case.zero else measure(case))
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))
