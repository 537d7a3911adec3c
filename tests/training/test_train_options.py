"""Options of transformers' TrainingArguments: schedule, label smoothing, fp16 with loss scaling."""

import json
import math
from functools import partial

import pytest
import torch
import transformers as hf
from accelerate.state import AcceleratorState
from transformers.trainer_pt_utils import LabelSmoother

import attnzoo
from attnzoo.errors import ConfigError
from attnzoo.hf.adapters.lora import with_adapters
from attnzoo.training import loop as training_loop
from attnzoo.training import runs
from attnzoo.training.distil import distil_loss
from attnzoo.training.eval_rows import rows_to_eval_batch
from attnzoo.training.finetune import FinetuneConfig, finetune
from attnzoo.training.loading import load_rows
from attnzoo.training.loop import DivergenceError, LoopConfig, read_losses
from attnzoo.training.optimizer import make_optimizer, make_schedule
from attnzoo.training.quality import evaluate_rows
from attnzoo.training.recover import RecoverConfig
from attnzoo.training.sharding import make_accelerator
from tests.training.conftest import tiny_llama

LOOP = {"batch_size": 4, "checkpoint_every": 3, "warmup": 0.25}
SHORT = {"steps": 8, "row_length": 32, "judged_rows": 2, "weights_lr": 3e-3, "train": "full"}


def config(*, label_smoothing_factor=0.0, **loop):
    return FinetuneConfig(
        **SHORT,
        tune_softmax=False,
        label_smoothing_factor=label_smoothing_factor,
        loop=LoopConfig(**LOOP, **loop),
    )


def losses_of(out):
    return [line["loss"] for line in read_losses(out)]


def test_schedule_by_name(saved, text, spec, tmp_path, monkeypatch):
    made = []

    def record(*arguments, **options):
        made.append(make_schedule(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(training_loop, "make_schedule", record)
    finetune(saved, spec, [text], tmp_path / "out", config(lr_scheduler_type="inverse_sqrt"))
    (schedule,) = made
    # two steps of warmup are the time scale: after eight steps, 1 / sqrt(8 / 2)
    assert schedule.get_last_lr() == pytest.approx([rate / 2 for rate in schedule.base_lrs])
    assert 3e-3 in schedule.base_lrs


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr_scheduler_type": "inverse_sqr"}, "Did you mean 'inverse_sqrt'"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "must be one of linear, cosine"),
        ({"lr_scheduler_type": "cosine_with_min_lr"}, "One of min_lr or min_lr_rate"),
        ({"lr_scheduler_kwargs": {"x": 1}}, r"cannot be made with lr_scheduler_kwargs=\{'x': 1\}"),
        ({"betas": (0.9, 1.0)}, r"betas must be two numbers, .* got \(0\.9, 1\.0\)"),
        ({"weight_decay": -0.1}, "weight_decay must be at least 0 and finite, got -0.1"),
        ({"clip": math.inf}, "clip must be above 0 and finite, got inf"),
        ({"precision": "fp8"}, "precision must be 'no', 'bf16' or 'fp16', got 'fp8'"),
    ],
)
def test_invalid_options_of_the_loop_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        LoopConfig(**options)


def test_label_smoothing_is_that_of_transformers():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 7, 11, generator=generator, dtype=torch.float64)
    labels = torch.randint(11, (2, 7), generator=generator)
    labels[0, 3:] = -100

    class Model(torch.nn.Module):
        def forward(self, input_ids, use_cache):
            return {"logits": logits}

    class Output(dict):
        __getattr__ = dict.__getitem__

    model = Model()
    model.forward = lambda **_: Output(logits=logits.float())
    batch = {"input_ids": labels.clamp(min=0), "labels": labels}
    loss = distil_loss(None, cross_entropy=1.0, label_smoothing=0.1)(model, batch)
    expected = LabelSmoother(epsilon=0.1)({"logits": logits}, labels, shift_labels=True)
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    plain = distil_loss(None, cross_entropy=1.0)(model, batch)
    assert float(plain) != pytest.approx(float(expected), rel=1e-3)


def test_label_smoothing_needs_labels():
    with pytest.raises(ConfigError, match="at least 0 and below 1, got 1"):
        config(label_smoothing_factor=1.0)
    with pytest.raises(ConfigError, match="but cross_entropy is 0"):
        RecoverConfig(label_smoothing_factor=0.1)
    assert RecoverConfig(label_smoothing_factor=0.1, cross_entropy=0.5).cross_entropy == 0.5


@pytest.fixture
def fp16_on_cpu(monkeypatch):
    """Return a function that gives runs the loss scaling that Accelerate sets up on GPUs."""

    def allow(scale):
        scalers = []

        def make(*arguments, precision, **options):
            accelerator = make_accelerator(*arguments, **options)
            monkeypatch.setitem(AcceleratorState._shared_state, "_mixed_precision", "fp16")
            accelerator.native_amp = True
            accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
            scalers.append(accelerator.scaler)
            return accelerator

        monkeypatch.setattr(runs, "make_accelerator", make)
        return scalers

    return allow


def test_fp16_leaves_out_steps_that_overflow(saved, text, spec, tmp_path, fp16_on_cpu, interrupt):
    """A resumed run has the same losses and loss scale as an uninterrupted one."""
    run = partial(finetune, saved, spec, [text])
    options = config(precision="fp16", lr_scheduler_type="linear", label_smoothing_factor=0.1)
    scalers = fp16_on_cpu(2.0**21)
    outcome = run(tmp_path / "whole", options)
    assert 2.0**13 < scalers[-1].get_scale() < 2.0**20
    whole = losses_of(tmp_path / "whole")
    assert len(whole) == 8
    assert all(map(math.isfinite, whole))

    model = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.float32)
    _, held_out = load_rows(saved, [text], "text", options)
    in_float32 = evaluate_rows(model, rows_to_eval_batch(held_out, 2)).loss
    assert outcome["lines"]["result"]["loss"] == pytest.approx(in_float32, rel=1e-6)
    interrupt(5, run, tmp_path / "parts", options)
    assert len(losses_of(tmp_path / "parts")) == 5
    run(tmp_path / "parts", options, resume=True)
    assert losses_of(tmp_path / "parts") == whole
    assert scalers[-1].get_scale() == scalers[0].get_scale()

    scalers = fp16_on_cpu(2.0**10)
    run(tmp_path / "small scale", options)
    assert scalers[-1].get_scale() == 2.0**10
    found = losses_of(tmp_path / "small scale")
    assert found[:2] == whole[:2]  # the learning rate of the first step is 0
    assert found[2] < whole[2]


def test_fp16_without_a_gpu_is_refused(saved, text, spec, tmp_path):
    if torch.accelerator.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ConfigError, match="use 'bf16', which needs no scaling"):
        finetune(saved, spec, [text], tmp_path / "out", config(precision="fp16"))
    assert not (tmp_path / "out").exists()


def test_gradients_that_no_loss_scale_makes_finite_stop_the_run(
    saved, text, spec, tmp_path, fp16_on_cpu, monkeypatch
):
    fp16_on_cpu(0.5)
    infinite = lambda *_: torch.tensor(math.inf)  # noqa: E731
    monkeypatch.setattr("accelerate.Accelerator.clip_grad_norm_", infinite)
    with pytest.raises(DivergenceError, match=r"norm is inf with a loss scale of 0\.5 in step 1"):
        finetune(saved, spec, [text], tmp_path / "out", config(precision="fp16"))


@pytest.mark.parametrize("train", ["full", "lora"])
def test_weights_in_attention_layers_have_their_own_rate(saved, text, spec, tmp_path, train):
    options = FinetuneConfig(
        **{**SHORT, "train": train, "attention_lr": 7e-3}, loop=LoopConfig(**LOOP)
    )
    run = runs.Run(
        *("finetune", saved, spec, [text], tmp_path / "out", options),
        **{"column": "text", "resume": False, "weights": None},
        **{"log": lambda text: None, "on_step": lambda *_: None},
    )
    for model in (run.model, run.load_softmax_model()):  # the baseline has the same rates
        prepared, groups = run.prepare(model)
        rates = {id(p): group["lr"] for group in groups for p in group["params"]}
        assert len(rates) == sum(len(group["params"]) for group in groups)
        for name, parameter in prepared.named_parameters():
            if train == "lora" and "lora_" not in name and ".attnzoo." not in name:
                assert id(parameter) not in rates
            elif ".attnzoo." in name:
                assert rates[id(parameter)] == 5e-3
            else:
                assert rates[id(parameter)] == (7e-3 if ".self_attn." in name else 3e-3)
        assert {7e-3, 3e-3} <= set(rates.values())
    run.close()
    with pytest.raises(ConfigError, match="but train='extras' trains none of them"):
        FinetuneConfig(train="extras", attention_lr=1e-3)
    with pytest.raises(ConfigError, match="attention_lr must be above 0"):
        FinetuneConfig(attention_lr=0)


def test_options_of_the_command(saved, text, tmp_path, attnzoo_command):
    out = tmp_path / "out"
    attnzoo_command(
        *("finetune", saved, "--data", text, "--out", out, "--attention", "longformer"),
        *("--set", "window=4", "--length", 32, "--batch", 4, "--steps", 2, "--no-compare"),
        *("--lr-scheduler-type", "cosine_with_min_lr", "--label-smoothing", 0.2),
        *("--attention-lr", 2e-3, "--max-tokens", "1.5k", "--lr-find-steps", 1),
        *("--lr-scheduler-kwargs", '{"min_lr_rate": 0.1}'),
        *("--warmup", 0.5, "--betas", 0.8, 0.9, "--weight-decay", 0.1, "--clip", 0.7, "--keep", 1),
    )
    written = json.loads((out / "finetuning.json").read_text())["config"]
    assert written["label_smoothing_factor"] == 0.2
    assert written["attention_lr"] == 2e-3
    assert written["max_tokens"] == 1500
    assert written["loop"]["lr_find_steps"] == 1
    assert written["loop"]["lr_scheduler_type"] == "cosine_with_min_lr"
    assert written["loop"]["lr_scheduler_kwargs"] == {"min_lr_rate": 0.1}
    given = {"warmup": 0.5, "betas": [0.8, 0.9], "weight_decay": 0.1, "clip": 0.7, "keep": 1}
    assert written["loop"].items() >= given.items()


def test_adapters_of_named_layers(model):
    attnzoo.swap(model, "linear")
    adapted = with_adapters(model, 4, "CAUSAL_LM", alpha=12, target_modules=["q_proj"])
    names = {n for n, p in adapted.named_parameters() if "lora_" in n}
    assert {n.split(".")[-4] for n in names} == {"q_proj"}
    layer = next(m for n, m in adapted.named_modules() if n.endswith("q_proj"))
    assert (layer.r["default"], layer.scaling["default"]) == (4, 3)
    with pytest.raises(ConfigError, match=r"names 'q_prj'.*Did you mean 'q_proj'\?.*down_proj"):
        with_adapters(tiny_llama(), 4, "CAUSAL_LM", target_modules=["q_proj", "q_prj"])


@pytest.mark.parametrize("optim", ["adamw_torch", "muon"])
def test_betas_and_weight_decay_reach_the_optimizer(
    saved, text, spec, tmp_path, monkeypatch, optim
):
    made = []

    def record(*arguments, **options):
        made.append(make_optimizer(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(training_loop, "make_optimizer", record)
    chosen = config(optim=optim, betas=(0.8, 0.9), weight_decay=0.25, clip=0.7)
    finetune(saved, spec, [text], tmp_path / "out", chosen)
    (optimizer,) = made
    groups = [group for group in optimizer.param_groups if "betas" in group]
    assert groups
    assert {group["betas"] for group in groups} == {(0.8, 0.9)}
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.25, 0.0}
