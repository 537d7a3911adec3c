"""Memory of one of several GPUs, and of weights in 4 bits."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from attnzoo.errors import ConfigError
from attnzoo.evaluation.memory import compute, measure
from attnzoo.evaluation.memory_case import MemoryCase
from attnzoo.training import distil_memory  # noqa: F401 - registers the loss "distil"
from tests.evaluation.small_llama import FFN, LAYERS, M, V, save_config

pytestmark = [
    pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable.:FutureWarning"),
    pytest.mark.filterwarnings("ignore:You have passed exclude_modules:UserWarning"),
]
ROOT = Path(__file__).resolve().parents[2]
LAYER = 4 * M * M + 3 * M * FFN + 2 * M  # weights of a layer of 4 heads, and its norms
WHOLE = LAYERS * LAYER + 2 * V * M + M  # and embeddings, head and the last norm


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_config(tmp_path_factory.mktemp("config"))


def case(folder, **changes):
    return MemoryCase(**{"path": folder, "length": 32, "batch": 8, **changes})


def use_of(folder, **changes):
    return compute(case(folder, **changes))[0]


CASES = (
    {"sharding": "fsdp2"},
    {"sharding": "fsdp2", "length": 512},
    {"sharding": "fsdp2", "length": 512, "activation_offloading": True},
    {"sharding": "fsdp2", "precision": "bf16"},
    {"sharding": "fsdp2", "train": "lora", "lora_rank": 4},
    {"sharding": "ddp"},
    {"sharding": "fsdp2", "loss": "distil", "teacher": "copy"},
    {"batch": 8, "accumulate": 4},
    {"batch": 8, "accumulate": 4, "precision": "bf16"},
    {"batch": 8, "accumulate": 4, "precision": "bf16", "loss": "distil", "teacher": "copy"},
)


@pytest.mark.slow  # FSDP2 needs two processes
def test_two_processes_use_what_is_computed(folder, tmp_path, fresh_python):
    plain = [{"path": folder, "length": 32, "batch": 2, "gpus": 2, **changes} for changes in CASES]
    cases, out = tmp_path / "cases.json", tmp_path / "out.json"
    cases.write_text(json.dumps(plain))
    done = fresh_python(
        Path(__file__).with_name("two_gpus.py"),
        *(cases, out),
        path=(ROOT,),
        processes=2,
        environment={"ACCELERATE_USE_CPU": "true"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for options, measured in zip(plain, json.loads(out.read_text()), strict=True):
        use = compute(MemoryCase(**options))[0]
        for name, real in measured.items():
            is_ddp = options.get("sharding") == "ddp"
            copies = 2 if is_ddp and name == "gradients" else 1  # DDP's buckets
            found = getattr(use, name)
            assert found == pytest.approx(copies * real, rel=0.002), (options, name)


def test_a_process_has_its_own_rows_and_a_part_of_the_weights(folder):
    one, use = use_of(folder, batch=2), use_of(folder, gpus=4)
    assert use.parameters == pytest.approx(WHOLE, abs=200)  # a quarter of 4 bytes, and buffers
    assert (use.gradients, use.optimizer) == (WHOLE, 2 * WHOLE)
    assert use.activations == pytest.approx(one.activations + 4 * (V * M + M), rel=0.01)  # the head
    assert use.whole == 0
    assert use.inference == use.parameters + use.prompt
    assert 0 < use.prompt - one.prompt <= 4 * max(LAYER, V * M)  # one of them is whole at a time


def test_weights_are_kept_in_float32_and_gathered_in_bfloat16(folder):
    wide, narrow = (use_of(folder, gpus=4, precision=x) for x in ("no", "bf16"))
    assert narrow.parameters == pytest.approx(wide.parameters, rel=0.01)
    assert narrow.optimizer == wide.optimizer
    assert narrow.backward < 0.7 * wide.backward


def test_micro_batches_keep_whole_gradients(folder):
    """New ones are added to them, and FSDP2 frees a unit's when it reduces them."""
    one, many = use_of(folder, gpus=2, batch=2), use_of(folder, gpus=2, batch=4, accumulate=2)
    assert one.backward < many.backward < one.backward + 4 * WHOLE
    alone = case(folder, batch=2, accumulate=2)
    assert compute(alone)[0].backward == pytest.approx(measure(alone).backward, rel=0.01)


def test_ddp_keeps_the_gradients_twice(folder):
    one, many = use_of(folder, batch=2), use_of(folder, gpus=4, sharding="ddp")
    assert many.gradients == 2 * one.gradients
    assert (many.backward, many.parameters) == (one.backward + one.gradients, one.parameters)


def test_adapters_are_sharded_too(folder):
    many = use_of(folder, gpus=4, train="lora", lora_rank=4)
    weights = LAYERS * (4 * (2 * M * 4) + 3 * 4 * (M + FFN))
    assert many.gradients == weights
    assert many.parameters == pytest.approx(WHOLE + weights, rel=0.01)


def test_frozen_linear_layers_in_4_bits(folder):
    chosen = case(folder, train="lora", lora_rank=4)
    whole, small = compute(chosen)[0], compute(replace(chosen, load_in_4bit=True))[0]
    count = LAYERS * (4 * M * M + 3 * M * FFN)  # the head, norms and embeddings stay as they are
    # NF4: 4 bits, 8 bits for 64 weights, 32 bits for 256 of these (arXiv:2305.14314, 0.127 bits)
    assert whole.parameters - small.parameters == pytest.approx(count * (4 - 4.127 / 8), rel=1e-3)
    assert small.backward == whole.backward + 4 * M * FFN  # one layer at a time, in float32
    assert small.optimizer == whole.optimizer


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpus": 3}, "not divisible by gpus=3 times accumulate=1"),
        ({"gpus": 0}, "gpus must be at least 1"),
        ({"teacher": "copy"}, "is for a loss with a teacher"),
        ({"load_in_4bit": True}, "train='full' trains them"),
        ({"load_in_4bit": True, "train": "lora", "gpus": 2}, "is computed for one GPU"),
        ({"optimizer": "adamw_8bit", "gpus": 2}, "updates whole tensors, but sharding='fsdp2'"),
        ({"sharding": "fsdp"}, "sharding must be one of fsdp2, ddp, zero2, zero3, got 'fsdp'"),
        ({"precision": "fp16"}, "precision must be one of no, bf16"),
    ],
)
def test_contradictions_are_refused(folder, changes, message):
    with pytest.raises(ConfigError, match=message):
        case(folder, **changes)


@pytest.mark.parametrize("changes", [{"gpus": 2}, {"optimizer": "adamw_8bit"}])
def test_several_gpus_and_moments_in_8_bits_are_not_measured(folder, changes):
    with pytest.raises(ConfigError, match="One process on the CPU is measured"):
        measure(case(folder, **changes))
