"""What tests start under torchrun: one check by name, in every process.

torchrun --nproc-per-node 2 two_processes.py CHECK MODEL TEXT OUT
"""

import hashlib
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import transformers as hf
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

import attnzoo
from attnzoo.training import account, runs
from attnzoo.training.finetune import FinetuneConfig, finetune
from attnzoo.training.loop import LoopConfig
from attnzoo.training.recover import RecoverConfig, recover
from attnzoo.training.sharding import is_sharded


class ShardingAccelerator(Accelerator):
    """Shards by torch's ``fully_shard``, as Accelerate does on GPUs; on CPUs it would not."""

    distributed_type = DistributedType.FSDP

    def prepare(self, model, optimizer, schedule, loader):
        names = {id(p): name for name, p in model.named_parameters()}
        for layer in model.get_decoder().layers:
            fully_shard(layer)
        fully_shard(model)
        assert is_sharded(model)
        sharded = dict(model.named_parameters())
        for group in optimizer.param_groups:
            group["params"] = [sharded[names[id(p)]] for p in group["params"]]
        return model, optimizer, schedule, self.prepare_data_loader(loader)

    def backward(self, loss):
        loss.backward()

    def clip_grad_norm_(self, parameters, norm):
        torch.nn.utils.clip_grad_norm_(parameters, norm)

    def save_state(self, path, **options):  # Accelerate's own business
        pass

    def get_state_dict(self, model):
        return get_model_state_dict(
            model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
        )


def config(**changes):
    options = {"transfer_steps": 3, "distil_steps": 4, "row_length": 32, "judged_rows": 2}
    loop = LoopConfig(batch_size=4)
    return RecoverConfig(**{**options, "train": "full", "loop": loop, **changes})


SPEC = attnzoo.AttentionSpec("gated_linear", feature_map="hedgehog", window=4)


def sharded(model, text, out):
    runs.Accelerator = ShardingAccelerator
    recover(model, SPEC, [text], out / "full", config())
    recover(model, SPEC, [text], out / "lora", config(train="lora"))


def shared(model, text, out):
    """Each process holds half of every row; the last layer stays exact."""
    account.LENGTHS = (16,)
    loop = LoopConfig(batch_size=4, accumulate=2, cp_size=2)
    spec = attnzoo.AttentionSpec(
        "gated_linear", feature_map="hedgehog", window=4, layers={1: "flash"}
    )
    recover(model, spec, [text], out / "lora", config(train="lora", loop=loop, cross_entropy=0.5))
    recover(model, spec, [text], out / "full", config(loop=loop, gradient_checkpointing=True))
    tuned = FinetuneConfig(steps=3, row_length=32, judged_rows=2, train="full", loop=loop)
    finetune(model, spec, [text], out / "finetune", tuned)


def idle(model, text, out):
    """Rows end within the window, so what the linear branch has never gets a gradient."""
    spec = attnzoo.AttentionSpec("linear", feature_map="hedgehog", window=64)
    recover(model, spec, [text], out / "idle", config())


def draws(model, text, out):
    rank = int(dist.get_rank()) if dist.is_initialized() else 0
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
    check, *paths = sys.argv[1:]
    if check == "draws":
        dist.init_process_group("gloo")
    checks = {"sharded": sharded, "shared": shared, "idle": idle, "draws": draws}
    checks[check](*map(Path, paths))
