"""Training in several processes: launch configs, FSDP2, context parallelism, DDP."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
import transformers as hf
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.state import GradientState
from accelerate.utils import DistributedType

import attnzoo
from attnzoo.errors import ConfigError
from attnzoo.training.finetune import FinetuneConfig, finetune
from attnzoo.training.loop import LoopConfig, read_losses
from attnzoo.training.recover import RecoverConfig, recover
from attnzoo.training.sharding import make_accelerator, set_up_deepspeed
from tests.training.engines import LAUNCH
from tests.training.two_processes import SPEC, ten_steps

ROOT = Path(__file__).resolve().parents[2]
HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
needs_deepspeed = pytest.mark.skipif(
    not HAS_DEEPSPEED, reason="needs deepspeed, which `nox --session deepspeed` installs"
)
TYPES = {
    "ddp": DistributedType.MULTI_GPU,
    "fsdp2": DistributedType.FSDP,
    "deepspeed_zero2": DistributedType.DEEPSPEED,
    "deepspeed_zero3": DistributedType.DEEPSPEED,
}


def test_every_launch_config_is_tested():
    assert {path.stem for path in LAUNCH.iterdir()} == set(TYPES)


@pytest.mark.parametrize("name", TYPES)
def test_accelerate_accepts_the_config(name):
    """Accelerate's loader refuses unknown fields."""
    config = load_config_from_file(str(LAUNCH / f"{name}.yaml"))
    assert config.distributed_type == TYPES[name]
    arguments = launch_command_parser().parse_args(
        ["--config_file", str(LAUNCH / f"{name}.yaml"), "-m", "attnzoo"]
    )
    arguments, read, _ = _validate_launch_command(arguments)
    assert read.num_processes == 2
    assert arguments.mixed_precision == "bf16"
    if name == "fsdp2":
        assert int(arguments.fsdp_version) == 2
    if name.startswith("deepspeed"):
        assert arguments.zero_stage == int(name[-1])


@pytest.fixture(scope="session")
def run(fresh_python):
    """Return a function that runs checks of ``two_processes.py`` in two processes."""
    script = Path(__file__).with_name("two_processes.py")

    def start(checks, *paths):
        environment = {"ACCELERATE_USE_CPU": "true"}
        options = {"path": (ROOT,), "processes": 2, "environment": environment}
        done = fresh_python(script, checks, *paths, **options)
        assert done.returncode == 0, done.stderr[-3000:]

    return start


@pytest.fixture(scope="module")
def launched(run, saved, text, tmp_path_factory):
    """The folder with the results of several checks, which share one start of two processes."""
    out = tmp_path_factory.mktemp("launched")
    run("draws,idle,engines,sharded", saved, text, out)
    return out


@pytest.fixture(scope="module")
def launched_deepspeed(run, saved, text, tmp_path_factory):
    """The same with DeepSpeed."""
    out = tmp_path_factory.mktemp("deepspeed")
    run("deepspeed", saved, text, out)
    return out


@pytest.fixture(scope="module")
def one_process(saved, text, tmp_path_factory):
    """Losses of one process, by the number of micro-batches that two processes split."""
    out = tmp_path_factory.mktemp("one")
    found = {}
    for parts in (1, 4):  # each process of two has a part of a micro-batch
        recover(saved, SPEC, [text], out / str(parts), ten_steps(2 * parts))
        found[parts] = [x["loss"] for x in read_losses(out / str(parts))]
    return found


def require_equal_steps(folder, name, one_process):
    """Raise an error if the steps of a launch config are not those of one process."""
    for parts, expected in one_process.items():
        found = read_losses(folder / f"{name}-{parts}")
        assert [x["stage"] for x in found] == ["softmax"] * 4 + ["transfer"] * 2 + ["distil"] * 4
        assert [x["loss"] for x in found] == pytest.approx(expected, rel=1e-5)


def test_micro_batches_take_the_steps_of_a_batch(one_process):
    """Except in transfer, whose loss is a ratio of sums over the rows of a micro-batch."""
    few, many = (one_process[parts] for parts in (1, 4))
    assert few[:4] == pytest.approx(many[:4], rel=1e-5)
    assert few[6:] == pytest.approx(many[6:], rel=1e-5)
    assert few[0] - few[3] > 0.1  # it learns


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_two_processes_take_the_steps_of_one(launched, one_process, name):
    """Each step asserts what the model is wrapped in, and that its weights are sharded."""
    require_equal_steps(launched, name, one_process)


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepspeed_zero2", "deepspeed_zero3"])
def test_deepspeed_takes_the_steps_of_one_process(launched_deepspeed, one_process, name):
    """Its engine steps once for all micro-batches, and a resumed run has the same losses."""
    require_equal_steps(launched_deepspeed, name, one_process)
    whole, again = (
        read_losses(launched_deepspeed / f"{name}-{kind}") for kind in ("whole", "again")
    )
    assert again == whole
    model = hf.AutoModelForCausalLM.from_pretrained(launched_deepspeed / f"{name}-again")
    assert model.config.attnzoo == SPEC.to_dict(defaults=True)


def test_a_launch_config_that_accumulates_too_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    GradientState._reset_state()
    with pytest.raises(ConfigError, match="gradient_accumulation_steps=4 of the launch config"):
        make_accelerator(0, tracker=None, logs=tmp_path)
    GradientState._reset_state()


def test_a_deepspeed_config_that_contradicts_the_loop_is_refused():
    config = {"gradient_accumulation_steps": "auto", "gradient_clipping": "auto"}
    set_up_deepspeed(config, clip=0.5)
    assert config["gradient_clipping"] == 0.5  # DeepSpeed clips, not the loop
    with pytest.raises(ConfigError, match=r"gradient_clipping=0\.5 of the DeepSpeed config is not"):
        set_up_deepspeed(config, clip=1.0)
    with pytest.raises(ConfigError, match="gradient_accumulation_steps=2 of the launch config"):
        set_up_deepspeed({"gradient_accumulation_steps": 2}, clip=1.0)


@pytest.mark.slow
def test_sharded_weights_take_the_same_steps(saved, text, spec, tmp_path, launched):
    """In both stages with Accelerate's FSDP2; the saved model has full weights.

    A run that is stopped and resumed has the same losses, bit for bit. With context
    parallelism too, the steps are those of one process.
    """
    for train in ("full", "lora"):
        options = {"transfer_steps": 3, "distil_steps": 4, "row_length": 32, "judged_rows": 2}
        loop = LoopConfig(batch_size=4)
        one = tmp_path / f"one-{train}"
        results = recover(
            saved, spec, [text], one, RecoverConfig(**options, train=train, loop=loop)
        )
        found, expected = read_losses(launched / train), read_losses(one)
        assert [x["loss"] for x in found] == pytest.approx([x["loss"] for x in expected], rel=0.05)
        assert found == read_losses(launched / f"{train}-again")
        if train == "full":
            both = [x["loss"] for x in read_losses(launched / "shared")]
            assert both == pytest.approx([x["loss"] for x in expected], rel=1e-4)
        written = json.loads((launched / train / "recovery.json").read_text())
        for name in ("softmax", "raw swap", "window alone"):
            assert written["lines"][name]["loss"] == pytest.approx(results["lines"][name]["loss"])
        line = written["lines"]["result"]["loss"]
        assert line == pytest.approx(results["lines"]["result"]["loss"], rel=2e-3)
        model = hf.AutoModelForCausalLM.from_pretrained(launched / train)
        assert model.config.attnzoo == spec.to_dict(defaults=True)
        ours, whole = model.state_dict(), hf.AutoModelForCausalLM.from_pretrained(one).state_dict()
        raw = hf.AutoModelForCausalLM.from_pretrained(saved)
        attnzoo.swap(raw, spec)
        start = raw.state_dict()
        assert ours.keys() == whole.keys()
        for part in (".attnzoo.", ".mlp."):  # Adam's first steps amplify small gradients
            a, b = (
                torch.cat([(x[n] - start[n]).flatten() for n in start if part in n])
                for x in (ours, whole)
            )
            assert float(torch.cosine_similarity(a, b, 0)) > 0.98


@pytest.mark.slow
@pytest.mark.exhaustive
def test_context_parallelism_takes_the_same_steps(run, saved, text, tmp_path):
    """In every stage, including the teacher and the softmax baseline."""
    run("shared", saved, text, tmp_path)
    spec = attnzoo.AttentionSpec(
        "gated_linear", feature_map="hedgehog", window=4, layers={1: "flash"}
    )
    loop = LoopConfig(batch_size=4, accumulate=2)
    options = {"row_length": 32, "judged_rows": 2, "loop": loop}
    steps = {"transfer_steps": 3, "distil_steps": 4}
    one = tmp_path / "one"
    losses = {"cross_entropy": 0.5, "hidden_states": 0.5}
    lora = RecoverConfig(**options, **steps, **losses, train="lora")
    recover(saved, spec, [text], one / "lora", lora)
    tuned = FinetuneConfig(**options, steps=3, train="full")
    finetune(saved, spec, [text], one / "finetune", tuned)
    for name, count in (("lora", 11), ("finetune", 6)):
        found, expected = read_losses(tmp_path / name), read_losses(one / name)
        assert len(found) == count
        assert [x["loss"] for x in found] == pytest.approx([x["loss"] for x in expected], rel=1e-4)
        model = hf.AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert model.config.attnzoo == spec.to_dict(defaults=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cp_size": 2}, "divide into groups of cp_size=2"),
        ({"cp_size": 5}, "32 tokens is not divisible"),
    ],
)
def test_invalid_cp_size_is_refused(saved, text, spec, tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        recover(
            saved,
            spec,
            [text],
            tmp_path / "out",
            RecoverConfig(row_length=32, loop=LoopConfig(**changes)),
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_resumed_run_on_two_processes_has_the_same_losses(launched):
    """Under DDP, whose checkpoints have trained parameters only."""
    assert read_losses(launched / "ddp-again") == read_losses(launched / "ddp")


@pytest.mark.slow
def test_ddp_with_extras_that_get_no_gradient(launched):
    assert len(read_losses(launched / "idle")) == 7


@pytest.mark.slow
def test_random_features_and_hashes_are_equal_in_all_processes(launched):
    """The global random states of the processes differ."""
    first, second = (json.loads((launched / f"draws-{n}.json").read_text()) for n in (0, 1))
    assert first == second
