"""Script that tests start as two ranks; it runs the same checks in each process.

torchrun --nproc-per-node 2 two_processes.py CHECK,CHECK,... MODEL TEXT OUT
"""

import gc
import hashlib
import json
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import transformers as hf

import attnzoo
from attnzoo.errors import ConfigError
from attnzoo.evaluation.timing import profile_allocations
from attnzoo.hf import logits
from attnzoo.training import best_state, sharding
from attnzoo.training.finetune import FinetuneConfig, finetune
from attnzoo.training.loop import LoopConfig
from attnzoo.training.model_shards import ModelShards
from attnzoo.training.recover import RecoverConfig, recover
from tests.evaluation.two_gpus import gathered_through, send_through, static_buffers
from tests.training.engines import engine, require_engine
from tests.training.short_runs import HELD_OUT_ROWS, shorten_runs


def config(**changes):
    options = {"transfer_steps": 3, "distil_steps": 4, "row_length": 32, "judged_rows": 2}
    loop = LoopConfig(batch_size=4)
    return RecoverConfig(**{**options, "train": "full", "loop": loop, **changes})


SPEC = attnzoo.AttentionSpec("gated_linear", feature_map="hedgehog", window=4)
# random features are buffers, which checkpoints of models have
DEEP = attnzoo.AttentionSpec(
    "linear",
    feature_map="random",
    num_features=16,
    layers={0: {"backend": "gated_linear", "options": {"window": 4}}},
)


class Stopped(Exception):
    pass


def stop_at(total):
    """Return an ``on_step`` that stops a run after a number of steps, in all processes."""
    steps = iter(range(1, total + 1))

    def on_step(stage, step, loss):
        if next(steps) == total:
            raise Stopped

    return on_step


def train(name, *given, on_step=lambda *_: None, **options):
    """Recover with a launch config, which each step must run on."""
    with engine(name) as prepared:

        def require(stage, step, loss):
            accelerator, model = prepared[-1]
            require_engine(name, accelerator, model(), step + 1)
            on_step(stage, step, loss)

        # a resumed stage counts from its checkpoint
        recover(*given, **options, on_step=on_step if options.get("resume") else require)


def stopped(name, model, text, out, stops, **changes):
    """Train with a launch config, stop after numbers of steps of each process, and resume."""
    options = config(loop=LoopConfig(batch_size=4, checkpoint_every=2), **changes)
    for number, steps in enumerate(stops):
        with suppress(Stopped):
            resume = {"resume": number > 0, "on_step": stop_at(steps)}
            train(name, model, SPEC, [text], out, options, **resume)
    train(name, model, SPEC, [text], out, options, resume=True)


def losses(names, model, text, out):
    """Train with launch configs, with one micro-batch a step and with four.

    Logits are computed in chunks of 64 tokens, of which each process has 128 or 32.
    """
    logits.CHUNK_LOGITS = 0
    for name in names:
        for parts in (1, 4):
            folder = out / f"{name}-{parts}"
            train(name, model, SPEC, [text], folder, ten_steps(parts))


def measure_peak(start, file):
    """Write the peak of memory of a run; it sends parts of a buffer that stays.

    gloo frees what it sends some time after it was sent.
    """
    buffer = torch.empty(1 << 24, dtype=torch.uint8)
    prepare = ModelShards.prepare

    def prepare_to_send(self, *given):
        prepared = prepare(self, *given)
        send_through(prepared[0], buffer)
        return prepared

    with gathered_through(buffer), mock.patch.object(ModelShards, "prepare", prepare_to_send):
        peak, _ = profile_allocations(start)
    file.write_text(json.dumps(peak))


def deep_run(train):
    """Return settings whose activations are few beside the weights of :func:`save_deep`."""
    loop = LoopConfig(batch_size=2)
    small = {"row_length": 8, "lora_rank": 2, "evaluate_every": 0}
    return config(train=train, transfer_steps=1, distil_steps=1, loop=loop, **small)


def save_deep(folder, tokenizer, layers=16):
    """Save a model in bfloat16, whose head is the embedding, with a tokenizer."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": True}
    tokens = {"vocab_size": 384, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, **heads, **tokens))
    model.to(torch.bfloat16).save_pretrained(folder)
    hf.AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)


def deep(model, text, out):
    """Train a deep model with sharded weights; each process writes its peak of memory."""
    folder = out / "deep-model"
    if dist.get_rank() == 0:
        save_deep(folder, model)
    dist.barrier()
    for kind in ("lora", "full"):
        name = f"deep-{kind}"
        start = partial(train, "fsdp2", folder, DEEP, [text], out / name, deep_run(kind))
        measure_peak(start, out / f"{name}-{dist.get_rank()}.json")


def deep_zero3(model, text, out):
    """Train adapters under ZeRO-3 with small buckets; each process writes its peak of memory."""
    folder = out / "deep-model"
    if dist.get_rank() == 0:
        save_deep(folder, model, layers=24)
    dist.barrier()
    set_up = sharding.set_up_deepspeed

    def set_up_small(options, clip):
        set_up(options, clip)
        sizes = dict.fromkeys(("reduce_bucket_size", "stage3_prefetch_bucket_size"), 50_000)
        sizes |= dict.fromkeys(("sub_group_size", "stage3_max_live_parameters"), 100_000)
        options["zero_optimization"] |= {**sizes, "stage3_param_persistence_threshold": 1_000}

    sharding.set_up_deepspeed = set_up_small
    start = partial(train, "deepspeed_zero3", folder, DEEP, [text], out / "deep", deep_run("lora"))
    with static_buffers(torch.empty(1 << 24, dtype=torch.uint8)):
        measure_peak(start, out / f"deep-{dist.get_rank()}.json")
    sharding.set_up_deepspeed = set_up


def ten_steps(accumulate):
    """Return ten steps: four of the softmax baseline, two of transfer, four of distillation."""
    return config(
        transfer_steps=2,
        distil_steps=4,
        cross_entropy=0.5,
        weights_lr=3e-3,
        loop=LoopConfig(batch_size=8, accumulate=accumulate),
    )


def engines(model, text, out):
    losses(("ddp", "fsdp2"), model, text, out)


def deepspeed(model, text, out):
    losses(("deepspeed_zero2", "deepspeed_zero3"), model, text, out)
    stops = {"deepspeed_zero2": (5,), "deepspeed_zero3": (3, 4)}
    for name, steps in stops.items():
        kind = "lora" if name == "deepspeed_zero2" else "full"
        whole = config(loop=LoopConfig(batch_size=4, checkpoint_every=2), train=kind)
        train(name, model, SPEC, [text], out / f"{name}-whole", whole)
        stopped(name, model, text, out / f"{name}-again", steps, train=kind)


def in_8_bits():
    """Return a run whose optimizer has its state in 8 bits."""
    loop = LoopConfig(batch_size=4, checkpoint_every=2, optim="adamw_8bit")
    return config(transfer_steps=0, distil_steps=6, weights_lr=3e-3, loop=loop)


def eight_bits(model, text, out):
    """Train with DeepSpeed and a state in 8 bits, and again with a stop after a checkpoint."""

    def require_8_bits(stage, step, loss):
        states = prepared[-1][1]().optimizer.optimizer.state.values()
        dtypes = {state["state1"].dtype for state in states}
        assert dtypes == {torch.uint8, torch.float32}  # that of embeddings

    for name in ("deepspeed_zero2", "deepspeed_zero3"):
        given = model, SPEC, [text]
        with engine(name) as prepared:
            recover(*given, out / name, in_8_bits(), on_step=require_8_bits)
        with engine(name):
            with suppress(Stopped):
                recover(*given, out / f"{name}-again", in_8_bits(), on_step=stop_at(5))
            recover(*given, out / f"{name}-again", in_8_bits(), resume=True)


def sharded(model, text, out):
    """Train with sharded weights; repeat each run with stops after a checkpoint.

    The full run is stopped in both stages. The LoRA run is stopped in the second one only, because
    the first one trains no adapters.
    """
    for kind, stops in (("full", (3, 4)), ("lora", (6,))):  # steps of each process
        loop = LoopConfig(batch_size=4, checkpoint_every=2)
        train("fsdp2", model, SPEC, [text], out / kind, config(train=kind, loop=loop))
        stopped("fsdp2", model, text, out / f"{kind}-again", stops, train=kind)
    loop = LoopConfig(batch_size=4, checkpoint_every=2)
    train("ddp", model, SPEC, [text], out / "ddp", config(train="lora", loop=loop))
    stopped("ddp", model, text, out / "ddp-again", (6,), train="lora")
    both = LoopConfig(batch_size=4, cp_size=2)
    train("fsdp2", model, SPEC, [text], out / "shared", config(loop=both))


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


def searched():
    """Return a run whose rates are searched; its transfer would depend on the rows of a process."""
    loop = LoopConfig(batch_size=4, warmup=0.0, lr_find_steps=4)
    rates = {"weights_lr": 0.03, "extras_lr": 0.03}
    return config(transfer_steps=0, distil_steps=6, judged_rows=8, loop=loop, **rates)


def rates(model, text, out):
    """Search rates under DDP; each process writes what it chose."""
    best_state.ROWS = HELD_OUT_ROWS  # a search decides by standard errors over them
    said = []
    train("ddp", model, SPEC, [text], out / "rates", searched(), log=said.append)
    lines = [x for x in said if "the rates are multiplied" in x or ", rates times" in x]
    (out / f"rates-{dist.get_rank()}.json").write_text(json.dumps(lines))


def idle(model, text, out):
    """Train with a window wider than the rows: the linear branch gets no gradient."""
    spec = attnzoo.AttentionSpec("linear", feature_map="hedgehog", window=64)
    options = config(always_train=True, report_to="tensorboard")
    recover(model, spec, [text], out / "idle", options)


def unshared(model, text, out):
    """Each process has a folder of its own, as nodes without a shared file system."""
    sharding.SECONDS_UNTIL_SEEN = 0.2
    message = ""
    try:
        recover(model, SPEC, [text], out / f"node-{dist.get_rank()}" / "out", config())
    except ConfigError as error:
        message = str(error)
    (out / f"unshared-{dist.get_rank()}.txt").write_text(message)


def resize(model, text, out):
    """Resume a run of one process, and stop a run that one process will resume."""
    loop = LoopConfig(batch_size=4, checkpoint_every=2)
    options = config(transfer_steps=0, distil_steps=7, loop=loop)
    with suppress(Stopped):
        recover(model, SPEC, [text], out / "to-one", options, on_step=stop_at(5))
    recover(model, SPEC, [text], out / "to-two", options, resume=True)


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
    checks = (sharded, shared, idle, draws, engines, deepspeed, unshared, resize, rates)
    checks += (deep, deep_zero3, eight_bits)
    for check in checks:
        if check.__name__ in names.split(","):
            check(*map(Path, paths))
    # gloo's threads drop their tensors some time after an operation, which may abort a process that
    # ends meanwhile
    dist.destroy_process_group()
    gc.collect()
