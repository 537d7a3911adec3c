"""Script that tests start as two ranks; it runs the same checks in each process.

torchrun --nproc-per-node 2 two_processes.py CHECK,CHECK,... MODEL TEXT OUT
"""

import gc
import hashlib
import json
import sys
from contextlib import suppress
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import transformers as hf

import attnzoo
from attnzoo.errors import ConfigError
from attnzoo.hf import logits
from attnzoo.training.recover import recover
from attnzoo.training.trainer import StageTrainer
from tests.training.engines import engine, engine_arguments, reset_state
from tests.training.short_runs import arguments, shorten_runs

SPEC = attnzoo.AttentionSpec("gated_linear", feature_map="hedgehog", window=4)
# an exact layer, and a random feature map, whose buffers checkpoints have
MIXED = attnzoo.AttentionSpec(
    "gated_linear",
    feature_map="random",
    num_features=16,
    window=4,
    layers={1: "flash"},
)
# cross-entropy, so that softmax is trained too: three stages
STAGES = {
    "transfer_steps": 2,
    "max_steps": 4,
    "cross_entropy": 0.5,
    "learning_rate": 3e-3,
    "train": "full",
}


class Stopped(Exception):
    pass


def train(model, text, out, spec=SPEC, stop=None, **changes):
    """Recover, or stop after a number of steps of all stages; processes that a launcher starts."""
    done, step = [], StageTrainer.training_step

    def count(trainer, *given, **options):
        if len(done) == stop:
            raise Stopped
        done.append(1)
        return step(trainer, *given, **options)

    with mock.patch.object(StageTrainer, "training_step", count), suppress(Stopped):
        recover(model, spec, [text], arguments(out, **{"use_cpu": False, **changes}))


def options_of(name, **changes):
    """Return the arguments of a run with an engine; each process has a half of the rows."""
    return {**STAGES, "per_device_train_batch_size": 2, **engine_arguments(name), **changes}


def lora(model, text, out):
    with engine("fsdp2"):
        train(model, text, out / "lora", **options_of("fsdp2", train="lora"))


def engines(model, text, out):
    """Train with several engines; logits are computed in chunks of 64 tokens."""
    logits.CHUNK_LOGITS = 0
    for name in ("ddp", "fsdp2"):
        with engine(name):
            train(model, text, out / name, **options_of(name))


def again(model, text, out):
    """Stop a sharded run in both stages, and resume it."""
    options = options_of("fsdp2", cross_entropy=0.0, save_steps=2, transfer_steps=4)
    for name, stops in (("whole", (None,)), ("again", (3, 3, None))):
        for number, stop in enumerate(stops):
            resume = {"resume_from_checkpoint": "True"} if number else {}
            with engine("fsdp2"):
                train(model, text, out / f"sharded-{name}", stop=stop, **options, **resume)


def deepspeed(model, text, out):
    for name in ("deepspeed_zero2", "deepspeed_zero3"):
        for kind in ("full", "lora"):
            with engine(name):
                train(model, text, out / f"{name}-{kind}", **options_of(name, train=kind))


def shared(model, text, out):
    """Split rows; the last layer is exact."""
    reset_state()
    options = {"cp_size": 2, "hidden_states": 0.5, "train": "lora", "use_cpu": True}
    train(model, text, out / "shared", MIXED, **{**STAGES, **options})


def idle(model, text, out):
    """Train with a window wider than the rows: the linear branch gets no gradient."""
    reset_state()
    spec = attnzoo.AttentionSpec("linear", feature_map="hedgehog", window=64)
    train(model, text, out / "idle", spec, use_cpu=True, always_train=True)


def ignored(model, text, out):
    """Ask for shards on plain CPU processes, where Accelerate makes none."""
    reset_state()
    message = ""
    try:
        train(model, text, out / "ignored", use_cpu=True, fsdp=True)
    except ConfigError as error:
        message = str(error)
    (out / f"ignored-{dist.get_rank()}.txt").write_text(message)


def draws(model, text, out):
    rank = dist.get_rank()
    torch.manual_seed(rank)
    ids = torch.arange(3, 67)[None]
    found = []
    for spec in (
        attnzoo.AttentionSpec("performer", num_features=16),
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
    for check in (lora, engines, again, shared, idle, ignored, draws, deepspeed):
        if check.__name__ in names.split(","):
            check(*map(Path, paths))
    # gloo's threads drop their tensors some time after an operation, which may abort a process that
    # ends meanwhile
    dist.destroy_process_group()
    gc.collect()
