"""What the main process does alone under FSDP2; test_launch.py trains in two processes."""

import pickle
from types import SimpleNamespace

import pytest
import torch
import transformers as hf
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from attnzoo.errors import ConfigError
from attnzoo.evaluation import kernel_checks
from attnzoo.evaluation.quality import NonFiniteError
from attnzoo.training import main_process
from attnzoo.training.loading import load_causal
from attnzoo.training.main_process import MainProcess, is_alone, take_weights
from attnzoo.training.quality import Quality


def fsdp2(*, is_main=True, policy=None, processes=2):
    plugin = SimpleNamespace(cpu_offload=policy or OffloadPolicy(), cpu_ram_efficient_loading=True)
    return SimpleNamespace(
        is_fsdp2=True,
        is_main_process=is_main,
        num_processes=processes,
        device=torch.device("cpu"),
        state=SimpleNamespace(fsdp_plugin=plugin),
    )


@pytest.fixture
def pair(monkeypatch):
    """The main process and another one; what the main one sends, the other gets afterwards."""
    sent = []

    def broadcast(objects, src, group, device):
        if current[0] is main:
            sent.append(pickle.dumps(objects))
        else:
            objects[:] = pickle.loads(sent.pop(0))

    monkeypatch.setattr(main_process.dist, "new_group", lambda **options: options)
    monkeypatch.setattr(main_process.dist, "broadcast_object_list", broadcast)
    main, other = (MainProcess(fsdp2(is_main=x)) for x in (True, False))
    current = [main]

    def run(compute):
        found = []
        for process in (main, other):
            current[0] = process
            try:
                found.append(process.run(compute))
            except ValueError as error:
                found.append(error)
        return found

    return main, other, run


def test_the_others_get_the_result_of_the_main_process(pair):
    main, other, run = pair
    assert main.alone
    assert other.alone
    assert (main.lacks_weights, other.lacks_weights) == (False, True)
    calls = []

    def compute():
        calls.append(1)
        return Quality(loss=1.5, recall=None, loss_rows=(1.0, 2.0))

    first, second = run(compute)
    assert first == second
    assert len(calls) == 1


def test_all_processes_raise_the_error_of_the_main_process(pair):
    def compute():
        raise NonFiniteError("the loss is nan")

    for error in pair[2](compute):
        assert isinstance(error, NonFiniteError)
        assert str(error) == "the loss is nan"


def test_it_is_alone_where_fsdp2_shards_on_gpus():
    assert is_alone(fsdp2())
    assert not is_alone(fsdp2(policy=CPUOffloadPolicy()))
    assert not is_alone(fsdp2(processes=1))
    ddp = MainProcess(SimpleNamespace(is_fsdp2=False, is_main_process=False))
    assert not ddp.lacks_weights
    assert ddp.run(lambda: 3) == 3  # each process computes it
    with pytest.raises(ConfigError):
        ddp.run(lambda: (_ for _ in ()).throw(ConfigError("no")))


def test_a_model_without_weights_has_the_parameters_of_the_loaded_one(saved, spec):
    empty, loaded = (load_causal(saved, spec, empty=x) for x in (True, False))
    assert all(x.is_meta for x in (*empty.parameters(), *empty.buffers()))
    for kind in ("named_parameters", "named_buffers"):
        shapes = [
            [(name, x.shape, x.dtype) for name, x in getattr(model, kind)()]
            for model in (empty, loaded)
        ]
        assert shapes[0] == shapes[1]  # in the same order, in which they are sent
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
    whole, empty = take_weights(model)
    assert whole.keys() == before.keys()
    assert all(torch.equal(whole[name], x) for name, x in before.items())
    for name, p in model.named_parameters():
        assert p is empty[id(given[name])]
        assert p.is_meta
        assert p.requires_grad == (name != "model.norm.weight")
        assert given[name].numel() == 0  # no memory for those who still refer to it
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not any(x.is_meta for x in model.buffers())


def test_kernels_that_another_process_found_are_checked_on_its_own_device(monkeypatch):
    checked = []
    monkeypatch.setattr(kernel_checks, "device_groups", lambda device, full: ["one", "two", "six"])
    monkeypatch.setattr(kernel_checks, "check_group", lambda group, log: checked.append(group))
    kernel_checks.check_named_kernels({"two", "six"}, torch.device("cuda", 1), print)
    assert checked == ["two", "six"]
