"""Memory of one of several GPUs under DeepSpeed, which `nox --session deepspeed` installs."""

import importlib.util
import json
from dataclasses import asdict
from pathlib import Path

import pytest

from attnzoo.errors import ConfigError
from attnzoo.evaluation.memory import compute
from attnzoo.evaluation.memory_case import MemoryCase, ZeroSizes
from attnzoo.training import distil_memory  # noqa: F401 - registers the loss "distil"
from tests.evaluation.small_llama import FFN, LAYERS, M, V, save_config
from tests.evaluation.two_gpus import NAMES, read_case
from tests.training.engines import LAUNCH

pytestmark = [
    pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable.:FutureWarning"),
    pytest.mark.filterwarnings("ignore:You have passed exclude_modules:UserWarning"),
]
needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="needs deepspeed, which `nox --session deepspeed` installs",
)
ROOT = Path(__file__).resolve().parents[2]
MATRICES = LAYERS * (4 * M * M + 3 * M * FFN) + 2 * V * M
NORMS = (2 * LAYERS + 1) * M
WHOLE = MATRICES + NORMS
# Several buckets, small weights that stay, and others that are released and gathered again
SMALL = {
    "reduce_bucket": 100_000,
    "prefetch_bucket": 50_000,
    "persistence_threshold": 1000,
    "max_live": 200_000,
    "max_reuse_distance": 200_000,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_config(tmp_path_factory.mktemp("config"))


def use_of(folder, sharding, gpus=4, sizes=SMALL, **changes):
    options = {"path": folder, "length": 32, "batch": 8, "gpus": gpus, **changes}
    return compute(MemoryCase(**options, sharding=sharding, zero_sizes=ZeroSizes(**sizes)))[0]


CASES = (
    {"length": 32},  # weights, gradients and states are most of the memory
    {"length": 512},  # activations are
    {"length": 512, "precision": "bf16"},
    {"length": 32, "batch": 4, "accumulate": 2},
    {"length": 256, "train": "lora", "lora_rank": 4},
    {"length": 512, "zero_sizes": {**SMALL, "reduce_bucket": 30_000}},  # below the largest weights
    {"length": 256, "zero_sizes": {"reduce_bucket": 2_000_000}},  # one bucket, all weights gathered
    {"length": 256, "loss": "distil", "teacher": "copy"},
    {"length": 32, "optimizer": "adamw_8bit"},
)


@needs_deepspeed
@pytest.mark.slow
def test_deepspeed_uses_what_is_computed(folder, tmp_path, fresh_python):
    """Of two processes: between steps, and in a step, all within 10% and most within 1%."""
    cases = CASES if importlib.util.find_spec("bitsandbytes") else CASES[:-1]
    same = {"path": folder, "batch": 2, "gpus": 2, "zero_sizes": SMALL}
    plain = [{**same, "sharding": x, **case} for x in ("zero2", "zero3") for case in cases]
    (given := tmp_path / "cases.json").write_text(json.dumps(plain))
    out = tmp_path / "out.json"
    done = fresh_python(
        Path(__file__).with_name("two_gpus.py"),
        *(given, out),
        path=(ROOT,),
        processes=2,
        environment={"ACCELERATE_USE_CPU": "true"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    errors = []
    for options, measured in zip(plain, json.loads(out.read_text()), strict=True):
        use = compute(read_case(options))[0]
        held = use.gradients if options["sharding"] == "zero3" else 0  # and its bucket
        between = use.parameters + use.optimizer + use.teacher + held
        assert between == pytest.approx(measured["between"], rel=0.02), options
        if options.get("optimizer") == "adamw_8bit":  # on a CPU it copies tensors to float32
            continue
        total = measured["between"] + measured["step"]
        assert use.training - between == pytest.approx(measured["step"], rel=0.1), options
        errors.append(abs(use.training / total - 1))
    assert sorted(errors)[int(0.8 * len(errors))] < 0.01, errors


@needs_deepspeed
def test_sizes_are_the_defaults_of_deepspeed():
    """The launch configs set none."""
    config = importlib.import_module("deepspeed.runtime.zero.config").DeepSpeedZeroConfig()
    names = {field.alias or name: name for name, field in type(config).model_fields.items()}
    for name, size in asdict(ZeroSizes()).items():
        assert getattr(config, names[NAMES[name]]) == size, name
    for stage in (2, 3):
        text = (LAUNCH / f"deepspeed_zero{stage}.yaml").read_text("utf-8")
        assert "bucket" not in text
        assert "deepspeed_config_file" not in text


def test_a_process_has_its_part_of_weights_in_float32_and_of_states(folder):
    """Rajbhandari et al., 2020, arXiv:1910.02054, section 5: (2 + (2 + 12) / N) bytes a weight.

    ZeRO-2 has the bucket during the backward pass, ZeRO-3 always.
    """
    sizes = {**SMALL, "reduce_bucket": 500_000_000}
    two, three = (use_of(folder, x, precision="bf16", sizes=sizes) for x in ("zero2", "zero3"))
    quarter, bucket = WHOLE / 4, 2 * 500_000_000
    assert two.parameters == pytest.approx(2 * WHOLE + 4 * quarter, abs=200)
    assert three.parameters == pytest.approx((2 + 4) * quarter + 2 * NORMS, abs=200)
    assert two.gradients == pytest.approx(4 * quarter, abs=100)
    assert three.gradients == pytest.approx(2 * quarter + bucket, abs=100)
    assert two.whole == pytest.approx(4 * WHOLE, abs=300)  # it evaluates whole weights in float32
    assert three.whole == 0
    for use in (two, three):
        assert use.optimizer == pytest.approx(8 * quarter, abs=100)
        assert bucket < use.backward < bucket + 16 * WHOLE


def test_weights_are_released_until_they_run_again(folder):
    few, kept = (
        use_of(folder, "zero3", batch=4, sizes={**SMALL, **changes}).backward
        for changes in (
            {"prefetch_bucket": 0, "max_reuse_distance": 0},
            {"prefetch_bucket": 0, "max_reuse_distance": 2 * WHOLE},
        )
    )
    assert few + 2 * WHOLE < kept < few + 4 * WHOLE


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": "adafactor"}, "'adafactor' updates whole tensors, but sharding='zero2'"),
        ({"activation_offloading": True}, "does not go with DeepSpeed"),
        ({"sizes": {"reduce_bucket": 0}}, "reduce_bucket must be at least 1, got 0"),
        ({"load_in_4bit": True, "train": "lora"}, "is computed for one GPU"),
    ],
)
def test_contradictions_are_refused(folder, changes, message):
    with pytest.raises(ConfigError, match=message):
        use_of(folder, "zero2", **changes)
