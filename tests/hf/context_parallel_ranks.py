"""Script of several ranks: compare backends and models on them with one process.

torchrun --nproc-per-node 4 context_parallel_ranks.py OUT

Writes to ``OUT/RANK.json``, for every case and number of processes, the largest errors of the
outputs, of the input gradients (of models: the loss), and of the parameter gradients.
"""

import json
import sys
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
import transformers as hf
from accelerate import ParallelismConfig

import attnzoo
from attnzoo.contract.backend import AttentionBackend
from attnzoo.contract.context_parallel import SequenceShard
from attnzoo.contract.masks import AttentionMask
from tests import helpers

B, H, HKV, D, M, T = 2, 4, 2, 8, 16, 48
PLAIN, LEFT, RIGHT, HOLES, PACKED = "plain", "left", "right", "holes", "packed"
ALL = (PLAIN, LEFT, RIGHT, HOLES, PACKED)
GATES = ("retnet", "gla", "rwkv6", "matrix")
HEADS = {"window": [3, 3, 9, 9], "dilation": [1, 2, 1, 2]}
SOME = (PLAIN, HOLES, PACKED)
CASES = {
    "linear": ("linear", {"feature_map": "hedgehog"}, True, SOME),
    "linear cosine": ("linear", {"feature_map": "cosine", "max_length": 64}, True, ALL),
    "linear bidirectional": ("linear", {}, False, (PLAIN, LEFT, HOLES)),
    "linear hybrid": ("linear", {"window": 5}, True, ALL),
    "linear wide hybrid": ("linear", {"window": 17}, True, (HOLES, PACKED)),
    **{f"gated {g}": ("gated_linear", {"gate": g}, True, (HOLES, PACKED)) for g in GATES},
    "gated hybrid": ("gated_linear", {"gate": "gla", "window": 5}, True, SOME),
    "delta": ("delta", {"gate": "vector"}, True, SOME),
    "delta window": ("delta", {"window": 17}, True, (HOLES, PACKED)),
    "delta convolution": ("delta", {"short_convolution": 4, "output_gate": True}, True, ALL),
    "performer": ("performer", {"num_features": 32}, True, (HOLES, PACKED)),
    "performer hybrid": ("performer", {"num_features": 32, "window": 5}, True, (PLAIN, PACKED)),
    "longformer": ("longformer", {"window": 5}, True, ALL),
    "longformer heads": ("longformer", HEADS, True, (PLAIN, HOLES)),
    "longformer bidirectional": ("longformer", {"window": 5}, False, (PLAIN, LEFT, RIGHT, HOLES)),
    "longformer bidirectional wide": ("longformer", {"window": 20}, False, (PLAIN, HOLES)),
    "flash": ("flash", {}, True, SOME),
    "flash window": ("flash", {"window": 7}, True, ALL),
    "flash bidirectional": ("flash", {}, False, (PLAIN, LEFT, HOLES)),
    "softmax": ("softmax", {}, True, (HOLES, PACKED)),
}  # fmt: skip


# On two processes: each kind of what ranks exchange, in groups that are not all processes
OF_TWO = ("linear hybrid", "delta convolution", "longformer bidirectional", "flash", "llama packed")


def padding_and_segments(kind):
    """Return padding and segment ids of full rows."""
    real = torch.ones(B, T, dtype=torch.bool)
    if kind == LEFT:
        real[0, :15] = False
    elif kind == RIGHT:
        real[1, 33:] = False
    elif kind == HOLES:
        real[0, 10:21], real[1, ::3] = False, False
    elif kind == PACKED:  # starts on and between shard boundaries; one sequence spans three of four
        begins = torch.zeros(B, T, dtype=torch.long)
        begins[0, [5, 24, 40]], begins[1, 10] = 1, 1
        return None, begins.cumsum(1)
    return (None, None) if kind == PLAIN else (real, None)


def build_noisy(name, options, causal, dtype):
    torch.manual_seed(0)
    # with noise: initial values may have no effect
    sizes = {"value_dim": D, "hidden_size": M}
    return helpers.build(name, dtype, noise=0.3, causal=causal, sizes=sizes, **options)


def run(backend, inputs, mask, real, shard=None):
    """Return the outputs and all gradients of a loss with random weights."""
    *tensors, weight = inputs
    tensors = [x.clone().requires_grad_() for x in tensors]
    q, k, v, hidden = tensors
    out = backend(q, k, v, mask=mask, hidden_states=hidden, shard=shard).out
    if real is not None:
        out = out * real[:, None, :, None]
    (out * weight).sum().backward()
    zero = [torch.zeros_like(x) if x.grad is None else x.grad for x in tensors]
    params = [torch.zeros_like(p) if p.grad is None else p.grad for p in backend.parameters()]
    return [out.detach(), *zero], params


@cache
def one_process(case, kind):
    """Return inputs, and the results and gradients of parameters of one process in float64."""
    name, options, causal, _ = CASES[case]
    padding, ids = padding_and_segments(kind)
    generator = torch.Generator().manual_seed(1)
    shapes = [(B, H, T, D), (B, HKV, T, D), (B, HKV, T, D), (B, T, M), (B, H, T, D)]
    full = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    mask = AttentionMask(causal=causal, padding=padding, segment_ids=ids)
    return full, *run(build_noisy(name, options, causal, torch.float64), full, mask, padding)


def errors(case, kind, group):
    """Return the largest errors of a case's outputs, gradients, and parameters' gradients."""
    name, options, causal, _ = CASES[case]
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    padding, ids = padding_and_segments(kind)
    full, expected, grads = one_process(case, kind)
    length = T // size
    here = slice(rank * length, (rank + 1) * length)
    shard = SequenceShard(
        group=group, rank=rank, size=size, length=length, padding=padding, segment_ids=ids
    )
    parts = [(x[:, here] if x.dim() == 3 else x[:, :, here]).float() for x in full]
    backend = build_noisy(name, options, causal, torch.float32)
    real = None if padding is None else padding[:, here]
    actual, params = run(backend, parts, AttentionMask(causal=causal), real, shard)
    local = [x[:, here] if x.dim() == 3 else x[:, :, here] for x in expected]
    for x in params:
        dist.all_reduce(x, group=group)
    return [worst(actual[:1], local[:1]), worst(actual[1:], local[1:]), worst(params, grads)]


# -- models --------------------------------------------------------------------------------------

MIXED = {"layers": {"1": "longformer", "2": "performer", "3": "flash"}}
MODELS = {
    "llama": ("llama", attnzoo.AttentionSpec("gated_linear", window=5, **MIXED)),
    "llama padded": ("llama", attnzoo.AttentionSpec("linear", window=5, **MIXED)),
    "llama packed": ("llama", attnzoo.AttentionSpec("linear", window=5, **MIXED)),
    "llama repeated": ("llama", attnzoo.AttentionSpec("gated_linear", gate="mlstm", **MIXED)),
    "mistral": ("mistral", attnzoo.AttentionSpec("longformer", window=9, layers={"1": "softmax"})),
    "bert": ("bert", attnzoo.AttentionSpec("linear", **MIXED)),
}


def model_of(kind, spec):
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    if kind == "bert":
        config = hf.BertConfig(
            **sizes, num_attention_heads=4, hidden_dropout_prob=0, attention_probs_dropout_prob=0
        )
        model = hf.BertForMaskedLM(config)
    elif kind == "mistral":
        model = hf.MistralForCausalLM(hf.MistralConfig(**sizes, **heads, sliding_window=7))
    else:
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, **heads))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3)
    attnzoo.swap(model, spec)
    return model.train()


def batch_of(case):
    ids = torch.randint(64, (B, T), generator=torch.Generator().manual_seed(2))
    batch = {"input_ids": ids}
    if case == "bert":
        mask, _ = padding_and_segments(HOLES)
        return {**batch, "position_ids": torch.arange(T)[None], "attention_mask": mask}
    labels = ids.clone()
    labels[0, :20] = -100  # so that ranks have different numbers of labels
    if case == "llama padded":
        real = padding_and_segments(LEFT)[0]
        batch |= {"attention_mask": real.long(), "position_ids": real.cumsum(1) - 1}
        labels = labels.masked_fill(~real, -100)
    elif case == "llama packed":
        segments = padding_and_segments(PACKED)[1]
        positions = [(row == row[:, None]).tril().sum(1) - 1 for row in segments]
        batch["position_ids"] = torch.stack(positions)
    return {**batch, "labels": labels}


def loss_of(model, batch):
    out = model(**batch, use_cache=False)
    if "input_ids" in batch and "labels" in batch:
        return out.loss, out.logits
    weight = torch.linspace(-1, 1, out.logits.shape[-1])
    real = batch["attention_mask"][..., None]
    return (out.logits * weight * real).square().sum() / 1000, out.logits * real


def model_errors(case, mesh):
    """Return the largest errors of a model's logits, its loss and its parameters' gradients."""
    kind, spec = MODELS[case]
    rank, size = mesh.get_local_rank(), mesh.size()
    model, batch = model_of(kind, spec), batch_of(case)
    loss, logits = loss_of(model, batch)
    loss.backward()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    other = model_of(kind, spec)
    if case == "llama repeated":
        other.gradient_checkpointing_enable()
    with attnzoo.context_parallel(other, batch, mesh) as local_batch:
        ours, own = loss_of(other, local_batch)
        ours.backward()
    assert all(b.shard is None for b in other.modules() if isinstance(b, AttentionBackend))
    length = T // size
    here = logits[:, rank * length : (rank + 1) * length]
    if "attention_mask" in batch:
        real = batch["attention_mask"][:, rank * length : (rank + 1) * length, None]
        here, own = here * real, own * real
    found = [torch.zeros_like(p) if p.grad is None else p.grad for p in other.parameters()]
    ours = ours.detach()
    for x in (ours, *found):
        dist.all_reduce(x, group=mesh.get_group())
        if "labels" in batch:  # as DDP and Accelerate do
            x.div_(size)
    return [worst([own], [here]), worst([ours], [loss]), worst(found, grads)]


def worst(ours, exact):
    pairs = zip(ours, exact, strict=True)
    found = [float((a - b).abs().max() / b.abs().max().clamp(min=1)) for a, b in pairs]
    return max(found, default=0.0)


def main(out):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    two = ParallelismConfig(dp_shard_size=2, cp_size=2).get_device_mesh("cpu")["cp"]
    four = ParallelismConfig(cp_size=4).get_device_mesh("cpu")["cp"]
    found = {}
    for mesh, chosen in ((two, OF_TWO), (four, (*CASES, *MODELS))):
        size = mesh.size()
        for case in chosen:
            if case in MODELS:
                found[f"{case}/model/{size}"] = model_errors(case, mesh)
            for kind in CASES[case][-1] if case in CASES else ():
                found[f"{case}/{kind}/{size}"] = errors(case, kind, mesh.get_group())
    Path(out, f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
