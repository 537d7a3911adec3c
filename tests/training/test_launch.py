"""Training in several processes: launch configs, FSDP2, context parallelism, DDP."""

import importlib.util
import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers as hf
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.state import GradientState
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

import attnzoo
from attnzoo.errors import ConfigError
from attnzoo.training import best_state, sharding
from attnzoo.training.finetune import FinetuneConfig, finetune
from attnzoo.training.loop import LoopConfig, read_losses
from attnzoo.training.lr_find import FACTORS
from attnzoo.training.recover import RecoverConfig, recover
from attnzoo.training.sharding import make_accelerator, set_up_deepspeed
from tests.training.engines import LAUNCH
from tests.training.short_runs import HELD_OUT_ROWS
from tests.training.two_processes import DEEP, SPEC, deep_run, in_8_bits, searched, ten_steps

RESIZED = attnzoo.AttentionSpec("gated_linear", feature_map="hedgehog", window=4)
SIZES = RecoverConfig(
    transfer_steps=0,  # its loss depends on how many rows a process has
    distil_steps=7,
    row_length=32,
    judged_rows=2,
    train="full",
    loop=LoopConfig(batch_size=4, checkpoint_every=2),
)
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
    run("draws,idle,engines,rates,sharded", saved, text, out)
    return out


@pytest.fixture(scope="module")
def launched_deep(run, saved, text, tmp_path_factory):
    """The same of a deep model, whose memory is measured."""
    out = tmp_path_factory.mktemp("deep")
    run("deep", saved, text, out)
    return out


@pytest.fixture(scope="module")
def launched_deepspeed(run, saved, text, tmp_path_factory):
    """The same with DeepSpeed."""
    out = tmp_path_factory.mktemp("deepspeed")
    run("deepspeed,deep_zero3", saved, text, out)
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


@needs_deepspeed
@pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None,
    reason="needs bitsandbytes too, which `nox --session deepspeed` installs",
)
@pytest.mark.slow
def test_deepspeed_takes_the_steps_of_an_optimizer_in_8_bits(run, wide, text, tmp_path):
    """Scales of the state are those of other blocks of weights, so that losses are close."""
    run("eight_bits", wide, text, tmp_path)
    recover(wide, SPEC, [text], tmp_path / "one", in_8_bits())
    expected = [x["loss"] for x in read_losses(tmp_path / "one")]
    for name in ("deepspeed_zero2", "deepspeed_zero3"):
        found = read_losses(tmp_path / name)
        assert [x["loss"] for x in found] == pytest.approx(expected, rel=1e-3), name
        assert read_losses(tmp_path / f"{name}-again") == found, name


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
        assert not list((launched / train).glob("weights*"))  # files of whole weights
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


@needs_deepspeed
@pytest.mark.slow
def test_no_process_of_deepspeed_holds_whole_weights(launched_deepspeed):
    """Under ZeRO-3, from the start to the end."""
    model = hf.AutoModelForCausalLM.from_pretrained(launched_deepspeed / "deep-model")
    whole = sum(4 * p.numel() for p in model.parameters())
    for rank in (0, 1):
        assert json.loads((launched_deepspeed / f"deep-{rank}.json").read_text()) < whole


@pytest.mark.slow
@pytest.mark.parametrize("train", ["lora", "full"])
def test_no_process_holds_whole_weights(launched_deep, text, tmp_path, train):
    """Under FSDP2, from the start to the end; losses and weights are those of one process."""
    folder = launched_deep / "deep-model"
    model = hf.AutoModelForCausalLM.from_pretrained(folder)
    whole = sum(4 * p.numel() for p in model.parameters())
    for rank in (0, 1):
        peak = json.loads((launched_deep / f"deep-{train}-{rank}.json").read_text())
        # its half, layers that are gathered, adapters and activations; with "full", halves of the
        # gradients, of two moments and of the teacher, too
        assert peak < (1 if train == "lora" else 2.25) * whole
    recover(folder, DEEP, [text], tmp_path / "one", deep_run(train))
    found, expected = (read_losses(x) for x in (launched_deep / f"deep-{train}", tmp_path / "one"))
    assert [x["stage"] for x in found] == ["transfer", "distil"]
    ours, one = ([x["loss"] for x in losses[1:]] for losses in (found, expected))
    assert ours == pytest.approx(one, abs=1e-5)  # nats, of 0.003 to 0.008


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


@pytest.fixture(scope="module")
def resized(run, saved, text, tmp_path_factory, interrupt):
    """Runs that are stopped on one number of processes and resumed on another."""
    out = tmp_path_factory.mktemp("resized")
    interrupt(5, recover, saved, RESIZED, [text], out / "to-two", SIZES)
    run("resize,unshared", saved, text, out)
    recover(saved, RESIZED, [text], out / "whole", SIZES)
    recover(saved, RESIZED, [text], out / "to-one", SIZES, resume=True)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["to-one", "to-two"])
def test_a_run_is_resumed_on_another_number_of_processes(resized, name):
    """It has the losses and the result of a run on one process."""
    found, expected = (read_losses(resized / x) for x in (name, "whole"))
    assert [x["stage"] for x in found] == ["distil"] * 7
    assert [x["loss"] for x in found] == pytest.approx([x["loss"] for x in expected], rel=1e-4)
    ours, whole = (json.loads((resized / x / "recovery.json").read_text()) for x in (name, "whole"))
    found, expected = (x["lines"]["result"]["loss"] for x in (ours, whole))
    assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_nodes_without_a_shared_folder_are_refused(resized):
    """All processes raise the error, and nothing is left."""
    for rank in (0, 1):
        message = (resized / f"unshared-{rank}.txt").read_text()
        assert "is not on a file system that all nodes share: process 1 on" in message
        assert not (resized / f"node-{rank}" / "out").exists()


@pytest.mark.parametrize("visible", [True, False])
def test_the_probe_of_a_shared_folder(tmp_path, monkeypatch, visible):
    """The second of two processes sees it, or not."""
    monkeypatch.setattr(sharding, "SECONDS_UNTIL_SEEN", 0.0)
    monkeypatch.setattr(sharding, "broadcast_object_list", lambda x: x)
    other = (1, "second", visible)
    monkeypatch.setattr(sharding, "gather_object", lambda x: [*x, other])
    accelerator = SimpleNamespace(
        num_processes=2, process_index=0, is_main_process=True, wait_for_everyone=lambda: None
    )
    if visible:
        sharding.require_shared_folder(accelerator, tmp_path)
    else:
        with pytest.raises(ConfigError, match="process 1 on second does not see what process 0"):
            sharding.require_shared_folder(accelerator, tmp_path)
    assert list(tmp_path.iterdir()) == []
    accelerator.num_processes = 1
    sharding.require_shared_folder(accelerator, tmp_path / "none")  # writes nothing


def test_sharded_checkpoints_are_resumed_on_as_many_processes(tmp_path):
    for rank in (0, 1):
        (tmp_path / f"random_states_{rank}.pkl").touch()
    for kind, count, refused in (
        (DistributedType.FSDP, 4, True),
        (DistributedType.DEEPSPEED, 1, True),
        (DistributedType.FSDP, 2, False),
        (DistributedType.MULTI_GPU, 4, False),
    ):
        accelerator = SimpleNamespace(distributed_type=kind, num_processes=count)
        with (
            pytest.raises(ConfigError, match="shards of 2 processes") if refused else nullcontext()
        ):
            sharding.check_world_size(accelerator, tmp_path)


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=[needs_deepspeed] if x[0:9] == "deepspeed" else []) for x in TYPES],
)
def test_options_for_two_nodes_start_as_many_processes(name, monkeypatch):
    """Accelerate's own launcher makes the arguments of torchrun from a config and its options."""
    monkeypatch.setattr("accelerate.utils.launch.is_port_in_use", lambda port: False)
    given = ["--config_file", str(LAUNCH / f"{name}.yaml"), "--machine_rank", "1"]
    given += ["--num_machines", "2", "--num_processes", "16", "--main_process_ip", "10.0.0.1"]
    given += ["--main_process_port", "29500"]
    if name.startswith("deepspeed"):
        given += ["--deepspeed_multinode_launcher", "standard"]
    arguments = launch_command_parser().parse_args([*given, "-m", "attnzoo", "recover"])
    arguments, defaults, _ = _validate_launch_command(arguments)
    if name.startswith("deepspeed"):
        # as launch_command sets it
        arguments.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        command, _ = prepare_deepspeed_cmd_env(arguments)
        assert command is None  # not the `deepspeed` launcher, which needs ssh and a hostfile
    else:
        prepare_multi_gpu_env(arguments)
    assert (arguments.nnodes, arguments.nproc_per_node, arguments.node_rank) == ("2", "8", 1)
    assert arguments.rdzv_endpoint == "10.0.0.1:29500"
    assert arguments.rdzv_backend == "static"


@pytest.mark.slow
def test_a_resumed_run_on_two_processes_has_the_same_losses(launched):
    """Under DDP, whose checkpoints have trained parameters only."""
    assert read_losses(launched / "ddp-again") == read_losses(launched / "ddp")


@pytest.mark.slow
def test_two_processes_find_the_rates_of_one(launched, saved, text, tmp_path, monkeypatch):
    """Each process chooses for itself, from the same losses."""
    monkeypatch.setattr(best_state, "ROWS", HELD_OUT_ROWS)  # as in the two processes
    first, second = (json.loads((launched / f"rates-{n}.json").read_text()) for n in (0, 1))
    assert first == second
    assert len(first) == len(FACTORS) + 1
    expected = recover(saved, SPEC, [text], tmp_path / "out", searched())["lr_find"]["distil"]
    found = json.loads((launched / "rates" / "recovery.json").read_text())["lr_find"]["distil"]
    assert found["factor"] == expected["factor"] < 1
    assert found["rates"] == expected["rates"]
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-4)
    ours, one = (read_losses(x) for x in (launched / "rates", tmp_path / "out"))
    assert [x["loss"] for x in ours] == pytest.approx([x["loss"] for x in one], rel=1e-4)


@pytest.mark.slow
def test_ddp_with_extras_that_get_no_gradient(launched):
    assert len(read_losses(launched / "idle")) == 7


@pytest.mark.slow
def test_random_features_and_hashes_are_equal_in_all_processes(launched):
    """The global random states of the processes differ."""
    first, second = (json.loads((launched / f"draws-{n}.json").read_text()) for n in (0, 1))
    assert first == second
