"""Activations in CPU memory; here the device that they come from is the CPU, too."""

import weakref
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.reductions import StorageWeakRef

import attnzoo
from attnzoo.errors import ConfigError
from attnzoo.hf.adapters.lora import with_adapters
from attnzoo.runtime import activation_offload
from attnzoo.runtime.activation_offload import offload_activations
from attnzoo.training import loop as training_loop
from attnzoo.training import settings
from attnzoo.training.finetune import FinetuneConfig, finetune
from attnzoo.training.loop import LoopConfig, read_losses
from attnzoo.training.settings import require_offloading

CPU = torch.device("cpu")
TOKENS = torch.arange(5, 45).view(2, 20)


@pytest.fixture
def copies(monkeypatch):
    """The number of elements of each copy, the addresses that they are from, and living copies."""
    found = SimpleNamespace(counts=[], addresses=set(), references=[])
    found.alive = lambda: sum(reference() is not None for reference in found.references)

    class Recorded(activation_offload._Copy):
        def __init__(self, elements, *options):
            super().__init__(elements, *options)
            found.counts.append(elements.numel())
            found.addresses.add(elements.untyped_storage().data_ptr())
            found.references.append(weakref.ref(self))

    monkeypatch.setattr(activation_offload, "_Copy", Recorded)
    return found


@pytest.fixture
def offload():
    return activation_offload._Offload(nn.Module(), CPU, 1)


def run_config(**loop):
    options = {"steps": 3, "row_length": 32, "judged_rows": 2, "tune_softmax": False}
    return FinetuneConfig(train="full", loop=LoopConfig(batch_size=4, **loop), **options)


@pytest.mark.parametrize("train", ["full", "lora"])
def test_gradients_are_equal_and_weights_are_not_copied(model, copies, train):
    attnzoo.swap(model, "gated_linear", feature_map="hedgehog", window=4)
    trained = with_adapters(model, 4, "CAUSAL_LM") if train == "lora" else model
    trained.train()

    def gradients(context):
        trained.zero_grad()
        with context:
            loss = trained(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss
        kept = copies.alive()
        loss.backward()
        return kept, {n: p.grad for n, p in trained.named_parameters() if p.grad is not None}

    _, expected = gradients(nullcontext())
    counts = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        copies.counts.clear()
        kept, found = gradients(offload_activations(trained, CPU, min_bytes=1))
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert kept > 0
        assert copies.alive() == 0
        weights = (*trained.parameters(), *trained.buffers())
        assert not copies.addresses & {x.untyped_storage().data_ptr() for x in weights}
        counts.append(sum(copies.counts))
    assert counts[1] < counts[0] / 2  # the inputs of layers


VIEWS = {
    "whole": lambda x: x,
    "transposed": lambda x: x.transpose(0, 2),
    "part": lambda x: x[1:3].permute(1, 2, 0),
    "with gaps": lambda x: x[:, 1:3, ::2],
    "expanded": lambda x: x[:, :, None].expand(-1, -1, 5, -1),
    "expanded with gaps": lambda x: x[:, ::2, None].expand(-1, -1, 5, -1),
    "overlapping": lambda x: x.flatten().unfold(0, 5, 2),
    "as integers": lambda x: x.view(torch.int16),
    "no dimension": lambda x: x[0, 0, 0],
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_are_restored(offload, name):
    view = VIEWS[name](base := torch.randn(4, 6, 8))
    saved = offload.pack(view)
    before = view.clone()
    base.zero_()
    found = activation_offload._unpack(saved)
    assert torch.equal(found, before)
    expanded = "expanded" in name
    assert saved.copy.host.numel() == view.numel() // (5 if expanded else 1)
    if "gaps" not in name and name != "overlapping":
        assert found.stride() == view.stride()


def test_a_tensor_is_copied_once_until_it_changes(offload, copies):
    x = torch.randn(6, 8)
    first, second = offload.pack(x), offload.pack(x.t())
    assert len(copies.counts) == 1
    gaps = offload.pack(x[:, ::2]), offload.pack(x[:, ::2])
    assert len(copies.counts) == 2
    assert gaps[0].copy is gaps[1].copy
    other = offload.pack(x[:3]), offload.pack(x[3:])
    assert len(copies.counts) == 4
    before = x.clone()
    x.add_(1)
    third = offload.pack(x)
    restored = [activation_offload._unpack(s) for s in (first, second, third, *other)]
    for found, exact in zip(restored, (before, before.t(), x, before[:3], before[3:]), strict=True):
        assert torch.equal(found, exact)


def test_memory_that_is_used_again_is_another_tensor(offload):
    saved = []
    for value in range(20):
        saved.append(offload.pack(torch.full((1000,), float(value))))
    assert [float(activation_offload._unpack(x)[-1]) for x in saved] == list(range(20))


def test_a_tensor_is_on_its_device_once_and_no_longer_than_it_is_needed(offload):
    saved = offload.pack(x := torch.randn(6, 8)), offload.pack(x.t())
    one, two = (activation_offload._unpack(s) for s in saved)
    assert one.data_ptr() == two.data_ptr() != x.data_ptr()
    storage = StorageWeakRef(one.untyped_storage())
    del one
    assert not storage.expired()
    del two
    assert storage.expired()
    assert torch.equal(activation_offload._unpack(saved[0]), x)


def test_activations_are_freed_in_the_forward_pass_and_copies_in_the_backward_pass(copies):
    x = torch.randn(300, requires_grad=True)
    with offload_activations(nn.Module(), CPU, min_bytes=1):
        y = x.exp()  # saved as a result here, and as an argument next
        storage = StorageWeakRef(y.untyped_storage())
        loss = y.sin().sum()
    del y
    assert storage.expired()
    assert copies.alive() == 1
    loss.backward()
    assert copies.alive() == 0
    exact = x.detach().double()
    torch.testing.assert_close(x.grad, (exact.exp() * exact.exp().cos()).float())


def test_weights_small_tensors_and_other_devices_stay():
    model = nn.Linear(8, 8)
    model.register_buffer("table", torch.randn(8, 8))
    offload = activation_offload._Offload(model, CPU, 256)
    for x in (
        *(model.weight, model.weight.t(), model.weight.detach(), model.table[2:]),
        *(torch.randn(63), torch.randn(1).expand(1000), torch.randn(1000, device="meta")),
        torch.randn(1000).to_sparse(),
    ):
        assert offload.pack(x) is x
    assert offload.pack(torch.randn(64)) is not None


def test_a_run_with_offloading_has_the_same_losses(
    saved, text, spec, tmp_path, copies, monkeypatch
):
    monkeypatch.setattr(settings, "require_offloading", lambda accelerator: None)
    everything = partial(offload_activations, min_bytes=1)
    monkeypatch.setattr(training_loop, "offload_activations", everything)
    for name, offloading in (("without", False), ("with", True)):
        config = run_config(activation_offloading=offloading)
        finetune(saved, spec, [text], tmp_path / name, config)
        assert bool(copies.counts) == offloading
    assert read_losses(tmp_path / "with") == read_losses(tmp_path / "without")


def test_without_a_gpu_it_is_refused(saved, text, spec, tmp_path):
    config = run_config(activation_offloading=True)
    with pytest.raises(ConfigError, match="they are there already; leave it out"):
        finetune(saved, spec, [text], tmp_path / "out", config)
    assert not (tmp_path / "out").exists()


def test_compiled_layers_are_refused():
    with pytest.raises(ConfigError, match="not tested with the tensors that layers of torch_comp"):
        LoopConfig(activation_offloading=True, torch_compile=True)


def test_deepspeed_is_refused():
    kinds = (DistributedType.NO, DistributedType.FSDP, DistributedType.DEEPSPEED)
    *others, deepspeed = (
        SimpleNamespace(device=torch.device("cuda"), distributed_type=kind) for kind in kinds
    )
    for accelerator in others:
        require_offloading(accelerator)
    with pytest.raises(ConfigError, match="ZeRO-3 replaces the data of weights"):
        require_offloading(deepspeed)


@pytest.fixture
def process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_weights_that_fsdp2_gathers_are_not_copied(copies):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
    x = torch.randn(8, 16)

    def gradients(context):
        model.zero_grad()
        with context:
            loss = model(x).square().sum()
        loss.backward()
        return [p.grad.full_tensor() for p in model.parameters()]

    expected = gradients(nullcontext())
    found = gradients(offload_activations(model, CPU, min_bytes=1))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert sorted(copies.counts) == [8 * 4, 8 * 16, 8 * 32]  # the input, that of ReLU, the output
