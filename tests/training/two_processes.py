"""Script that tests start as two ranks; it runs the same checks in each process.

torchrun --nproc-per-node 2 two_processes.py CHECK,CHECK,... MODEL TEXT OUT

``sharded`` patches Accelerate's state, so it comes last.
"""

import hashlib
import json
import sys
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
import transformers as hf
from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

import attnzoo
from attnzoo.training import runs
from attnzoo.training.finetune import FinetuneConfig, finetune
from attnzoo.training.loop import LoopConfig
from attnzoo.training.recover import RecoverConfig, recover
from tests.training.short_runs import shorten_runs


def sharding(**options):
    """Return an Accelerator with FSDP2 on CPUs, which it refuses: its state is patched."""
    accelerator = Accelerator(**options)
    parallel = ParallelismConfig(dp_shard_size=accelerator.num_processes)
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    AcceleratorState._shared_state.update(
        distributed_type=DistributedType.FSDP,
        parallelism_config=parallel,
        device_mesh=parallel.get_device_mesh("cpu"),
        fsdp_plugin=FullyShardedDataParallelPlugin(  # as in launch_configs/fsdp2.yaml
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            reshard_after_forward=True,
            state_dict_type="SHARDED_STATE_DICT",
            cpu_ram_efficient_loading=False,
        ),
    )
    assert accelerator.is_fsdp2
    return accelerator


def config(**changes):
    options = {"transfer_steps": 3, "distil_steps": 4, "row_length": 32, "judged_rows": 2}
    loop = LoopConfig(batch_size=4)
    return RecoverConfig(**{**options, "train": "full", "loop": loop, **changes})


SPEC = attnzoo.AttentionSpec("gated_linear", feature_map="hedgehog", window=4)


class Stopped(Exception):
    pass


def stop_at(total):
    """Return an ``on_step`` that stops a run after a number of steps, in all processes."""
    steps = iter(range(1, total + 1))

    def on_step(stage, step, loss):
        if next(steps) == total:
            raise Stopped

    return on_step


def sharded(model, text, out):
    """Train with sharded weights; repeat each run with stops after a checkpoint.

    The full run is stopped in both stages. The LoRA run is stopped in the second one only, because
    the first one trains no adapters.
    """
    runs.Accelerator = sharding
    loop = LoopConfig(batch_size=4, checkpoint_every=2)
    for train, stops in (("full", (3, 4)), ("lora", (6,))):  # steps of each process
        given = model, SPEC, [text]
        recover(*given, out / train, config(train=train, loop=loop))
        again = out / f"{train}-again"
        for number, steps in enumerate(stops):
            with suppress(Stopped):
                options = {"resume": number > 0, "on_step": stop_at(steps)}
                recover(*given, again, config(train=train, loop=loop), **options)
        recover(*given, again, config(train=train, loop=loop), resume=True)
    both = LoopConfig(batch_size=4, cp_size=2)
    recover(model, SPEC, [text], out / "shared", config(loop=both))


def shared(model, text, out):
    """Train with context parallelism; the last layer is exact."""
    loop = LoopConfig(batch_size=4, accumulate=2, cp_size=2)
    spec = attnzoo.AttentionSpec(
        "gated_linear", feature_map="hedgehog", window=4, layers={1: "flash"}
    )
    given = {"train": "lora", "cross_entropy": 0.5, "hidden_states": 0.5}
    given["gradient_checkpointing"] = True
    recover(model, spec, [text], out / "lora", config(loop=loop, **given))
    tuned = FinetuneConfig(steps=3, row_length=32, judged_rows=2, train="full", loop=loop)
    finetune(model, spec, [text], out / "finetune", tuned)


def idle(model, text, out):
    """Train with a window wider than the rows: the linear branch gets no gradient."""
    spec = attnzoo.AttentionSpec("linear", feature_map="hedgehog", window=64)
    recover(model, spec, [text], out / "idle", config())


def draws(model, text, out):
    rank = dist.get_rank()
    torch.manual_seed(rank)
    ids = torch.arange(3, 67)[None]
    found = []
    for spec in (
        attnzoo.AttentionSpec("performer", num_features=16, redraw=1),
        attnzoo.AttentionSpec("linear", feature_map="random", num_features=16),
        attnzoo.AttentionSpec("reformer", chunk_size=8),
    ):
        swapped = hf.AutoModelForCausalLM.from_pretrained(model)
        attnzoo.swap(swapped, spec)
        swapped.train()
        for _ in range(3):
            logits = swapped(ids).logits
        x = [logits, *(buffer for name, buffer in swapped.named_buffers() if "attnzoo" in name)]
        data = b"".join(t.detach().double().numpy().tobytes() for t in x)
        found.append(hashlib.sha256(data).hexdigest())
    (out / f"draws-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    names, *paths = sys.argv[1:]
    dist.init_process_group("gloo")
    shorten_runs(setattr)
    checks = {"sharded": sharded, "shared": shared, "idle": idle, "draws": draws}
    for name in names.split(","):
        checks[name](*map(Path, paths))
