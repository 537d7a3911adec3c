"""Recovery in several processes: DDP, FSDP2, DeepSpeed, context parallelism."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
import transformers as hf

from attnzoo.training.recover import recover
from tests.training.short_runs import arguments, losses
from tests.training.two_processes import MIXED, SPEC, STAGES

ROOT = Path(__file__).resolve().parents[2]
needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="needs deepspeed, which `nox --session deepspeed` installs",
)


@pytest.fixture(scope="session")
def run(fresh_python):
    """Return a function that runs checks of ``two_processes.py`` in two processes."""
    script = Path(__file__).with_name("two_processes.py")

    def start(checks, *paths):
        done = fresh_python(script, checks, *paths, path=(ROOT,), processes=2)
        assert done.returncode == 0, done.stderr[-3000:]

    return start


def read(folder):
    return json.loads((folder / "recovery.json").read_text())


def require_equal_runs(folder, one):
    """Raise an error if a run is not that of one process, with the same micro-batches."""
    found, expected = losses(read(folder)), losses(one)
    assert [x[:2] for x in found] == [x[:2] for x in expected]
    stages = ["softmax"] * 4 + ["transfer"] * 2 + ["distil"] * 4
    assert [x[0] for x in found] == stages
    assert [x[2] for x in found] == pytest.approx([x[2] for x in expected], rel=1e-5)
    for name, line in one["lines"].items():
        assert read(folder)["lines"][name]["loss"] == pytest.approx(line["loss"], rel=1e-4), name


def one_process(saved, text, out, spec=SPEC, **changes):
    """Return the results of one process that has the micro-batches of two."""
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    return recover(saved, spec, [text], arguments(out, **{**STAGES, **options, **changes}))


@pytest.mark.exhaustive
def test_adapters_train_on_shards(run, saved, text, tmp_path):
    """Under FSDP2; each step checks that every weight is a part."""
    run("lora", saved, text, tmp_path)
    require_equal_runs(tmp_path / "lora", one_process(saved, text, tmp_path / "one", train="lora"))
    model = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "lora")
    one = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "one").state_dict()
    assert model.config.attnzoo == SPEC.to_dict(defaults=True)
    assert model.state_dict().keys() == one.keys()


@pytest.fixture(scope="module")
def launched(run, saved, text, tmp_path_factory):
    """The folder with the results of several checks, which share one start of two processes."""
    out = tmp_path_factory.mktemp("launched")
    run("engines,again,idle,ignored,draws", saved, text, out)
    return out


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_two_processes_take_the_steps_of_one(launched, saved, text, tmp_path, name):
    """Each step checks what the model is wrapped in."""
    require_equal_runs(launched / name, one_process(saved, text, tmp_path / "one"))


@pytest.mark.exhaustive
def test_a_sharded_run_is_resumed(launched):
    """After a stop in each stage; between stages the model is built again."""
    whole, again = (read(launched / f"sharded-{name}") for name in ("whole", "again"))
    start = losses(again)[0][1] - 1
    assert losses(again)[-2:] == losses(whole)[-2:]
    assert start >= 0
    first, second = (
        hf.AutoModelForCausalLM.from_pretrained(launched / f"sharded-{name}").state_dict()
        for name in ("whole", "again")
    )
    assert all(torch.equal(x, second[name]) for name, x in first.items())


@pytest.mark.exhaustive
def test_ddp_with_extras_that_get_no_gradient(launched):
    assert len(losses(read(launched / "idle"))) == 11


@pytest.mark.exhaustive
def test_shards_on_plain_cpu_processes_are_refused(launched):
    for rank in (0, 1):
        assert "Accelerate does not shard" in (launched / f"ignored-{rank}.txt").read_text()


@pytest.mark.exhaustive
def test_random_features_and_hashes_are_equal_in_all_processes(launched):
    """The global random states of the processes differ."""
    first, second = (json.loads((launched / f"draws-{n}.json").read_text()) for n in (0, 1))
    assert first == second


@pytest.mark.exhaustive
def test_context_parallelism_takes_the_same_steps(run, saved, text, tmp_path):
    """In every stage, including the teacher and the softmax baseline."""
    run("shared", saved, text, tmp_path)
    one = recover(
        saved,
        MIXED,
        [text],
        arguments(tmp_path / "one", **STAGES | {"train": "lora", "hidden_states": 0.5}),
    )
    found = losses(read(tmp_path / "shared"))
    assert [x[2] for x in found] == pytest.approx([x[2] for x in losses(one)], rel=1e-5)


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.parametrize("train", ["full", "lora"])
def test_deepspeed_takes_the_steps_of_one_process(run, saved, text, tmp_path, train):
    run("deepspeed", saved, text, tmp_path)
    one = one_process(saved, text, tmp_path / "one", train=train)
    for name in ("deepspeed_zero2", "deepspeed_zero3"):
        require_equal_runs(tmp_path / f"{name}-{train}", one)
