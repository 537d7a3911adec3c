"""Arguments that recover and finetune refuse, and those that make another run."""

import dataclasses
import json
import math
from types import SimpleNamespace

import pytest
import torch
import transformers as hf
import trl
import typer
from accelerate import PartialState

import attnzoo
from attnzoo import cli
from attnzoo.errors import AttnzooError, ConfigError
from attnzoo.evaluation.rows import Rows
from attnzoo.training import arguments as module
from attnzoo.training import recovery
from attnzoo.training.arguments import RecoveryArguments, check_numbers, identity, resumes
from attnzoo.training.data import DataError
from attnzoo.training.evaluator import evaluate
from attnzoo.training.finetune import _identity, finetune
from attnzoo.training.planner import weights_fingerprint
from attnzoo.training.run_folder import RunError, RunFolder
from attnzoo.training.trainer import LogitDistillationTrainer, TransferTrainer
from attnzoo.training.transfer import extras
from tests.training.short_runs import arguments

CLASSES = (RecoveryArguments, trl.SFTConfig, trl.ModelConfig)
USED = {"dtype", "load_in_4bit", "use_peft"}  # of ModelConfig; others are those of adapters
OPTIONAL = {  # numbers that may be None
    *((trl.SFTConfig, "max_length"), (RecoveryArguments, "eval_steps")),
    (RecoveryArguments, "save_total_limit"),
}
ADAPTERS = {x.name for x in dataclasses.fields(trl.ModelConfig) if "lora" in x.name} | {"use_dora"}


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch, tmp_path):
    """What a check lets pass is not written into the tree."""
    monkeypatch.chdir(tmp_path)


def make(cls, **changes):
    common = {} if cls is trl.ModelConfig else {"output_dir": "out", "use_cpu": True, "bf16": False}
    return cls(**{**common, **changes})


def other_value(cls, name):
    """Return another value of a field than its default."""
    default = next(x.default for x in dataclasses.fields(cls) if x.name == name)
    if isinstance(default, bool):
        return not default
    if isinstance(default, int | float):
        return default + (0.5 if isinstance(default, float) else 1)
    known = {"include_for_metrics": ["loss"], "lora_target_modules": ["q_proj"], "data_seed": 4}
    return known.get(name, "x")


@pytest.mark.parametrize("name", module.UNUSED)
def test_arguments_of_trainer_that_recovery_does_not_use_are_refused(name):
    assert make(RecoveryArguments).output_dir == "out"
    field, _, value = name.partition("=")
    with pytest.raises(ConfigError, match=f"^{name} has no effect: "):
        make(RecoveryArguments, **{field: value or other_value(RecoveryArguments, name)})


NEEDED = [({key: 0}, name) for key, names in module.NEEDS.items() for name in names]
NEEDED += [({"train": key}, name) for key, names in module.UNTRAINED.items() for name in names]


@pytest.mark.parametrize(("given", "name"), NEEDED)
def test_arguments_without_effect_beside_others_are_refused(given, name):
    own = {"transfer_target": "attention", "lora_alpha": 5, "learning_rate": 2e-3}
    value = own.get(name) or other_value(RecoveryArguments, name)
    value = 0.25 if value == "x" else value
    make(RecoveryArguments, **{name: value})
    (other,) = given
    with pytest.raises(ConfigError, match=f"^{name} has no effect: {other} is"):
        make(RecoveryArguments, **given, **{name: value})


@pytest.mark.parametrize("name", [x.name for x in dataclasses.fields(trl.ModelConfig)])
def test_arguments_of_models_that_finetuning_does_not_use_are_refused(name):
    if name in USED:
        return
    given = trl.ModelConfig(**{name: other_value(trl.ModelConfig, name)})
    args = make(trl.SFTConfig)
    with pytest.raises(ConfigError, match=f"^{name} has no effect: "):
        finetune("/absent", None, [], args, given)
    given.use_peft = True
    text = f"{name} has no effect" if name not in ADAPTERS else "The tokenizer in '/absent'"
    with pytest.raises(AttnzooError, match=text):
        finetune("/absent", None, [], args, given)


@pytest.mark.parametrize("cls", CLASSES)
def test_numbers_are_finite_and_have_least_values(cls):
    """Of every number of every class, those of transformers and TRL too."""
    count = 0
    for x in dataclasses.fields(cls):
        if isinstance(x.default, bool) or not isinstance(x.default, int | float):
            continue
        if x.name in ("local_rank", "ddp_timeout"):
            continue
        for wrong in (-7, math.nan, None, "5"):
            args = make(cls)
            setattr(args, x.name, wrong)
            if wrong is None and (cls, x.name) in OPTIONAL:
                check_numbers(args)
                continue
            with pytest.raises(ConfigError, match=f"^{x.name} must be "):
                check_numbers(args)
            count += 1
    assert count >= 12


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("per_device_train_batch_size", 0, "at least 1"),
        ("gradient_accumulation_steps", 0, "at least 1"),
        ("eval_steps", 0, "above 0"),
        ("adam_beta1", 1.5, "from 0 to 1"),
        ("save_total_limit", 0, "at least 1"),
        ("eval_strategy", "epoch", "one of no, steps"),
        ("transfer_steps", 2.5, "a whole number"),
        ("save_total_limit", 1.5, "a whole number"),
    ],
)
def test_numbers_of_transformers_are_checked(name, value, message):
    with pytest.raises(ConfigError, match=f"^{name} must be {message}"):
        make(RecoveryArguments, **{name: value})


def test_numbers_of_all_commands_have_a_least_value():
    """Or one that their command checks, since it depends on others."""
    known = {"plan": {"keep_softmax"}, "tasks": {"seeds", "max_steps"}}
    known |= {"heads": {"prune", "max_length"}, "inspect": {"layer", "head", "max_length"}}
    least = {
        (name, x.name): x.min
        for name, command in typer.main.get_command(cli.app).commands.items()
        for x in command.params
        if x.type_descriptor.annotation in (int, float) and x.name not in known.get(name, ())
    }
    assert ("evaluate", "control") in least
    assert not [x for x in least if least[x] is None]


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, False), ("", False), ("False", False), ("True", True), (True, True), (False, False)],
)
def test_whether_a_run_is_resumed(value, expected):
    assert resumes(make(trl.SFTConfig, resume_from_checkpoint=value)) is expected
    with pytest.raises(ConfigError, match=r"is True or False: .*got '/no/such/dir'"):
        make(RecoveryArguments, resume_from_checkpoint="/no/such/dir")
    with pytest.raises(ConfigError, match="is True or False"):
        finetune("/absent", None, [], make(trl.SFTConfig, resume_from_checkpoint="checkpoint-3"))


@pytest.mark.parametrize("cls", CLASSES[:2])
def test_arguments_that_change_a_result_make_another_run(cls, monkeypatch):
    first = identity(make(cls))
    for name, value in {
        **{"optim": "sgd", "neftune_noise_alpha": 5.0, "per_device_train_batch_size": 3},
        **{"weight_decay": 0.01, "full_determinism": True, "max_steps": 7, "max_length": 24},
        **{"adam_epsilon": 1e-7, "tf32": False, "seed": 5},
    }.items():
        found = identity(make(cls, **{name: value}))
        assert {x for x in found if found[x] != first.get(x)} == {name}
    for name, value in {
        **{"output_dir": "other", "run_name": "b", "log_level": "error", "save_steps": 3},
        **{"logging_steps": 7, "resume_from_checkpoint": "True", "dataloader_num_workers": 1},
        **{"gradient_checkpointing": True, "disable_tqdm": True},
    }.items():
        assert identity(make(cls, **{name: value})) == first
    args = make(cls)
    monkeypatch.setattr(hf.TrainingArguments, "world_size", 4)
    assert identity(args) == first | {"processes": 4}
    if cls is RecoveryArguments:
        args.cp_size = 2
        assert identity(args) == first | {"processes": 2, "cp_size": 2}


def test_rows_are_on_the_device_of_the_model(monkeypatch, model):
    """When documents of packed rows are tried; the rows themselves are on the CPU."""
    found, tokens = [], torch.ones(5, 9, dtype=torch.long)
    rows = Rows(
        tokens=tokens, positions=torch.arange(9).remainder(4).expand(5, -1), bytes_per_token=2.0
    )
    monkeypatch.setattr(recovery, "separates_documents", lambda model, rows: found.append(rows))
    run = SimpleNamespace(rows=rows, model=model, args=SimpleNamespace(device="meta"), log=print)
    recovery.Recovery.warn_of_mixed_documents(run)
    assert [(x.tokens.device.type, x.positions.device.type, len(x)) for x in found] == [
        ("meta", "meta", 2)
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"report_to": "nosuch"}, "report_to names 'nosuch', which is not installed"),
        (
            {"optim_args": "nonsense"},
            "optim='adamw_torch.*', optim_args='nonsense', .*: not enough",
        ),
        ({"lr_scheduler_kwargs": {"min_rate": 1}}, r"lr_scheduler_kwargs=.*min_rate.*argument"),
        (
            {"torch_compile": True, "torch_compile_backend": "inductr"},
            r"torch_compile_backend .*inductr.* Did you mean 'inductor'",
        ),
    ],
)
def test_names_of_libraries_are_checked_before_data_are_read(options, message):
    with pytest.raises(ConfigError, match=message):
        make(RecoveryArguments, **options)
    with pytest.raises(ConfigError, match=message):
        finetune("/absent", None, [], make(trl.SFTConfig, **options))


def test_an_optimizer_and_layers_that_do_not_exist():
    with pytest.raises(ConfigError, match="nosuch"):
        make(RecoveryArguments, optim="nosuch")
    with pytest.raises(ConfigError, match="lora_target_modules is empty"):
        make(RecoveryArguments, lora_target_modules=[])


def test_types_of_trained_weights(saved, tmp_path):
    given = None, [], make(trl.SFTConfig)
    with pytest.raises(ConfigError, match=r"dtype must be one of auto, float32, .*, got 'int8'"):
        finetune("/absent", *given, trl.ModelConfig(dtype="int8"))
    hf.AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float16).save_pretrained(tmp_path)
    for path, dtype in ((saved, "float16"), (tmp_path, "auto")):
        with pytest.raises(ConfigError, match=r"float16 .* loss scaling.* bfloat16.* --fp16"):
            finetune(path, *given, trl.ModelConfig(dtype=dtype))


def test_a_run_of_other_backend_weights_is_another(model):
    """Of a model that was swapped before; those of a fresh swap are drawn."""
    attnzoo.swap(model, "gated_linear", feature_map="hedgehog")
    own, swapped = weights_fingerprint(model), weights_fingerprint(model, backends=True)
    with torch.no_grad():
        next(iter(extras(model).values())).add_(1)
    assert weights_fingerprint(model) == own
    assert weights_fingerprint(model, backends=True) != swapped
    assert _identity(model, backends=True) != _identity(model, backends=False)


def test_numbers_of_evaluations_are_checked(saved, text, tmp_path):
    model = hf.AutoModelForCausalLM.from_pretrained(saved)
    attnzoo.swap(model, "linear").save_pretrained(tmp_path)
    for length in (-5, 0, 1):
        with pytest.raises(ConfigError, match=f"max_length must be at least 8.* got {length}"):
            evaluate(tmp_path, [text], row_length=length)


@pytest.mark.parametrize("kind", [TransferTrainer, LogitDistillationTrainer])
def test_a_stage_by_itself_has_the_rate_of_a_run(model, tmp_path, kind):
    attnzoo.swap(model, "gated_linear", feature_map="hedgehog", window=4)
    ids = torch.arange(3, 27)
    args = arguments(tmp_path, max_steps=1, save_strategy="no", train="full", weight_decay=0.3)
    for given, expected in (
        (None, {2e-2} if kind is TransferTrainer else {1e-4, 5e-3}),
        (3e-3, {3e-3}),
    ):
        args.learning_rate = given
        trainer = kind(model, args, train_dataset=[{"input_ids": ids, "labels": ids}] * 4)
        rates = {x["lr"] for x in trainer.create_optimizer().param_groups}
        assert rates == expected | ({5e-3} if kind is LogitDistillationTrainer else set())
        trainer.train()


def test_a_run_without_a_checkpoint_gives_way_to_another(tmp_path):
    """Such as one whose options were refused after its folder was made."""
    for steps in (3, 5):
        folder = RunFolder(tmp_path, {"config": {"max_steps": steps}})
        with folder.open(resume=steps == 5, state=PartialState()) as finished:
            assert finished is None
        assert json.loads((folder.checkpoints / "run.json").read_text()) == folder.run
    (folder.checkpoints / "transfer" / "checkpoint-2").mkdir(parents=True)
    with (
        pytest.raises(RunError, match="holds a run"),
        folder.open(resume=False, state=PartialState()),
    ):
        pass


@pytest.mark.parametrize("name", ["config.json", "adapter_config.json"])
def test_a_folder_of_a_model_that_is_not_of_the_run_is_refused(tmp_path, name):
    run = {"config": {"max_steps": 3}}
    (tmp_path / name).write_text("{}")

    def start():
        with RunFolder(tmp_path, run).open(resume=True, state=PartialState()) as finished:
            return finished

    with pytest.raises(RunError, match="holds a model"):
        start()
    (tmp_path / "checkpoints" / "run.json").write_text(json.dumps({"config": {"max_steps": 4}}))
    with pytest.raises(RunError, match="holds a model"):  # of another command's run
        start()
    (tmp_path / "checkpoints" / "run.json").write_text(json.dumps(run))
    assert start() is None  # it ended while its model was moved
    assert RunFolder(tmp_path, {}).check(resume=False) is None


def test_a_folder_is_refused_before_data_are_read(saved, spec, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(RunError, match="holds a model"):
        recovery.Recovery(saved, spec, ["/absent"], arguments(tmp_path), print)
    with pytest.raises(RunError, match="holds a model"):
        finetune(saved, spec, ["/absent"], make(trl.SFTConfig, output_dir=str(tmp_path)))


def test_names_of_layers_are_checked_before_anything_is_measured(saved, text, spec, tmp_path):
    args = arguments(tmp_path / "out", lora_target_modules=["q_proj", "k_prj"])
    with pytest.raises(ConfigError, match=r"names 'k_prj', .* Did you mean 'k_proj'"):
        recovery.Recovery(saved, spec, [text], args, print)


def test_a_text_without_a_tenth_to_hold_out_is_refused(saved, spec, tmp_path):
    (tmp_path / "one.txt").write_text("x")
    with pytest.raises(DataError, match="which is too short: 'x'"):
        finetune(saved, spec, [tmp_path / "one.txt"], make(trl.SFTConfig))
