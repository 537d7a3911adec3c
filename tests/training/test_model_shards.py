"""Parts of models, in a process group that sends nothing; test_launch.py trains on two."""

import errno
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from accelerate.utils import DistributedType
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from attnzoo.hf.adapters.lora import with_adapters
from attnzoo.training import model_shards
from attnzoo.training.loading import load_causal
from attnzoo.training.model_shards import ModelShards, merge_shards, shards_models, take_weights


def fsdp2(*, policy=None, processes=2):
    plugin = SimpleNamespace(cpu_offload=policy or OffloadPolicy(), cpu_ram_efficient_loading=True)
    return SimpleNamespace(
        is_fsdp2=True,
        distributed_type=DistributedType.FSDP,
        num_processes=processes,
        device=torch.device("cpu"),
        state=SimpleNamespace(fsdp_plugin=plugin),
    )


@pytest.fixture
def second_of_two(monkeypatch):
    """This process is the second of two; nothing is sent to the other one."""
    monkeypatch.setattr(model_shards.dist, "new_group", lambda **options: None)
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def second_part(x):
    """Return the rows of the second process: the first has one more of an odd number."""
    return x[(len(x) + 1) // 2 :]


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.usefixtures("second_of_two")
def test_a_process_loads_its_part_of_each_weight(saved, spec, monkeypatch, device):
    whole = load_causal(saved, spec)
    split = []

    def shard(full, *given):
        split.append(full.device.type)
        return original(full, *given)

    original = model_shards.shard
    monkeypatch.setattr(model_shards, "shard", shard)
    if device == "cpu":  # what is done with a release of transformers that reads whole weights
        monkeypatch.setattr(model_shards, "when_built", lambda change: nullcontext())
    found = ModelShards(fsdp2()).load(lambda: load_causal(saved, spec))
    assert set(split) == {device}  # transformers reads parts of a model that was built with them
    expected = dict(whole.named_parameters())
    assert {n for n, _ in found.named_parameters()} == expected.keys()
    for name, p in found.named_parameters():
        assert p.shape == expected[name].shape
        if ".attnzoo." in name:
            assert not isinstance(p, DTensor)
            continue
        local = p.to_local()
        assert torch.equal(local, second_part(expected[name])), name
        assert local.untyped_storage().nbytes() == local.nbytes  # not a view of the file


@pytest.mark.usefixtures("second_of_two")
def test_adapters_are_added_to_a_part(saved, spec):
    whole = load_causal(saved, spec)
    parts = ModelShards(fsdp2()).load(lambda: load_causal(saved, spec))
    before = {n: p.detach().clone() for n, p in whole.named_parameters()}
    adapted = []
    for model in (whole, parts):
        torch.manual_seed(0)
        adapted.append(with_adapters(model, 2, "CAUSAL_LM"))
        for name, p in adapted[-1].named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(p)
    expected = dict(adapted[0].merge_and_unload().named_parameters())
    found = dict(merge_shards(adapted[1]).named_parameters())
    assert found.keys() == expected.keys() == before.keys()
    assert any(not torch.equal(x, before[name]) for name, x in expected.items())
    for name, p in found.items():
        if isinstance(p, DTensor):
            torch.testing.assert_close(p.to_local(), second_part(expected[name]), msg=name)
        else:
            assert torch.equal(p, expected[name])


@pytest.mark.usefixtures("second_of_two")
def test_whole_weights_are_in_files_until_they_are_saved(saved, spec, tmp_path, monkeypatch):
    accelerator = fsdp2()
    accelerator.is_main_process = True
    shards = ModelShards(accelerator)
    model = shards.load(lambda: load_causal(saved, spec))
    parts = {name for name, p in model.named_parameters() if isinstance(p, DTensor)}
    folder = tmp_path / "weights.partial"
    folder.mkdir()
    (folder / "of a run that was stopped").touch()
    with shards.whole_on_disk(model, folder, dict.fromkeys(parts, torch.bfloat16)):
        found = dict(model.named_parameters())
        assert {found[name].dtype for name in parts} == {torch.bfloat16}
        assert not any(isinstance(p, DTensor) for p in found.values())
        sizes = sorted(file.stat().st_size for file in folder.iterdir())
        assert sizes == sorted(2 * found[name].numel() for name in parts)
    assert not folder.exists()

    def fail(*given):
        raise OSError(errno.ENOSPC, "No space left on device")

    again = shards.load(lambda: load_causal(saved, spec))
    monkeypatch.setattr(model_shards, "_in_file", fail)
    with pytest.raises(OSError, match="No space"), shards.whole_on_disk(again, folder, {}):
        pytest.fail("it must not get here")
    assert not folder.exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_in_a_file_has_its_data(tmp_path, dtype):
    x = torch.randn(5, 3).to(dtype).T  # not contiguous
    found = model_shards._in_file(x, tmp_path / "x")
    assert torch.equal(found, x)
    assert (tmp_path / "x").stat().st_size == x.nbytes


def test_weights_are_parts_where_fsdp2_shards_on_the_devices():
    assert shards_models(fsdp2())
    assert not shards_models(fsdp2(policy=CPUOffloadPolicy()))
    assert not shards_models(fsdp2(processes=1))
    ddp = ModelShards(
        SimpleNamespace(is_fsdp2=False, num_processes=2, distributed_type=DistributedType.MULTI_CPU)
    )
    assert not ddp.enabled
    model = torch.nn.Linear(2, 2)
    assert ddp.load(lambda: model) is model
    with ddp.running(model):
        assert not model._forward_pre_hooks
    assert ddp.fetch(model.weight).data_ptr() == model.weight.data_ptr()


def test_a_model_without_weights_has_the_parameters_of_the_loaded_one(saved, spec):
    empty, loaded = (load_causal(saved, spec, empty=x) for x in (True, False))
    assert all(x.is_meta for x in (*empty.parameters(), *empty.buffers()))
    for kind in ("named_parameters", "named_buffers"):
        shapes = [
            {(name, x.shape, x.dtype) for name, x in getattr(model, kind)()}
            for model in (empty, loaded)
        ]
        assert shapes[0] == shapes[1]
    assert empty.training == loaded.training
    assert empty.config.to_dict() == loaded.config.to_dict()


def test_weights_are_taken_from_a_model():
    config = hf.LlamaConfig(
        **{"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1},
        **{"num_attention_heads": 2, "tie_word_embeddings": True},
    )
    model = hf.LlamaForCausalLM(config)
    before = {name: x.detach().clone() for name, x in model.named_parameters()}
    given = dict(model.named_parameters())
    given["model.norm.weight"].requires_grad_(False)
    taken, empty = take_weights(model)
    assert taken.keys() == before.keys()
    assert all(torch.equal(taken[name], x) for name, x in before.items())
    for name, p in model.named_parameters():
        assert p is empty[id(given[name])]
        assert p.is_meta
        assert p.requires_grad == (name != "model.norm.weight")
        assert given[name].numel() == 0  # no memory for those who still refer to it
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not any(x.is_meta for x in model.buffers())
