"""Script that tests start as two ranks: measure the memory of a step under a launch config.

torchrun --nproc-per-node 2 two_gpus.py CASE.json OUT.json
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from attnzoo.evaluation.memory import build_model
from attnzoo.evaluation.memory_case import MemoryCase
from attnzoo.evaluation.timing import profile_allocations
from attnzoo.runtime.activation_offload import offload_activations
from attnzoo.training import (
    distil_memory,  # noqa: F401 - registers the loss "distil"
    sharding,
)
from attnzoo.training.distil import distil_loss, softmax_teacher
from tests.training.engines import engine, require_engine


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

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        for rank, part in enumerate(output_tensor.chunk(group.size())):
            sent = self.sent(input_tensor if rank == group.rank() else part)
            dist.broadcast(sent, rank, group=group)
            part.copy_(sent)


class ReduceScatter(AllGather):
    """The same for reduce-scatter."""

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        for rank, part in enumerate(input_tensor.chunk(group.size())):
            dist.reduce(sent := self.sent(part), rank, op=dist.ReduceOp.SUM, group=group)
            if rank == group.rank():
                output_tensor.copy_(sent)


def make_loss(model, case):
    """Return a function of the prepared model and tokens that returns the loss of a case."""
    if case.loss == "lm":
        return lambda prepared, x: prepared(input_ids=x, labels=x, use_cache=False).loss
    options = {"weights_change": case.copies_teacher, "dtype": case.kept_dtype}
    loss = distil_loss(softmax_teacher(model, **options))
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
    with engine(case.sharding, ACCELERATE_MIXED_PRECISION=precision):
        accelerator = sharding.make_accelerator(0, tracker=None, logs=Path())
        model = build_model(case)
        trained = [x for x in model.parameters() if x.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-5)
        loss = make_loss(model, case)
        model, optimizer = accelerator.prepare(model, optimizer)
        require_engine(case.sharding, accelerator, model, 1)
        buffer = torch.empty(sum(x.nbytes for x in model.parameters()), dtype=torch.uint8)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(AllGather(buffer))
                module.set_custom_reduce_scatter(ReduceScatter(buffer))
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


if __name__ == "__main__":
    cases, out = map(Path, sys.argv[1:])
    dist.init_process_group("gloo")
    found = [measure(MemoryCase(**options)) for options in json.loads(cases.read_text())]
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))
