"""What the training commands print while they run."""

import io
import warnings

import pytest
import transformers as hf
from rich.console import Console
from transformers import modeling_utils

from attnzoo.report import live
from attnzoo.training import progress
from attnzoo.training.loading import load_causal
from attnzoo.training.loop import LoopConfig, StepMetrics
from attnzoo.training.progress import TrainingProgress
from attnzoo.training.recover import RecoverConfig, recover


@pytest.fixture
def clock(monkeypatch):
    """The time in seconds, which does not pass by itself."""
    now = [100.0]
    monkeypatch.setattr(live.time, "monotonic", lambda: now[0])
    return now


def run_stages(console, clock, seconds):
    """Show 20 steps, each of so many seconds and 64 tokens, and a stage of one step."""
    with TrainingProgress(console, {"transfer": 20, "distil": 1}) as shown:
        shown.progress.get_time = lambda: clock[0]
        for step in range(20):
            clock[0] += seconds
            shown.on_step("transfer", step, StepMetrics(1 / (step + 1), 0.5, 64))
        shown.on_step("distil", 0, StepMetrics(0.25, None, 64))


def test_without_a_terminal_lines_are_printed_every_few_seconds(clock):
    file = io.StringIO()
    run_stages(Console(file=file, width=80), clock, seconds=2.0)
    expected = [
        "transfer: step 1 of 20, loss 1.0000, gradient norm 0.5",
        "transfer: step 6 of 20, loss 0.1667, gradient norm 0.5, 32 tokens/s, 0:00:28 left",
        "transfer: step 11 of 20, loss 0.0909, gradient norm 0.5, 32 tokens/s, 0:00:18 left",
        "transfer: step 16 of 20, loss 0.0625, gradient norm 0.5, 32 tokens/s, 0:00:08 left",
        "transfer: step 20 of 20, loss 0.0500, gradient norm 0.5, 32 tokens/s, 0:00:00 left",
    ]
    assert file.getvalue().splitlines() == expected


def test_a_short_run_prints_no_lines(clock):
    file = io.StringIO()
    run_stages(Console(file=file, width=80), clock, seconds=0.01)
    assert file.getvalue() == ""


def test_steps_longer_than_any_period_have_a_speed(clock):
    file = io.StringIO()
    run_stages(Console(file=file, width=80), clock, seconds=400.0)
    assert "0 tokens/s, 0:06:40 left" in file.getvalue().splitlines()[18]


def test_a_terminal_has_bars_and_no_lines(clock):
    file = io.StringIO()
    options = {"force_terminal": True, "color_system": None, "_environ": {"TERM": "xterm"}}
    run_stages(Console(file=file, width=120, **options), clock, seconds=2.0)
    last = file.getvalue().splitlines()[-3:]
    assert any("20/20 loss 0.0500, gradient norm 0.5, 32 tokens/s" in text for text in last)
    assert "step 6 of 20" not in file.getvalue()


def test_other_processes_print_nothing(clock, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    file = io.StringIO()
    run_stages(Console(file=file, width=80), clock, seconds=2.0)
    assert file.getvalue() == ""


def test_a_run_reports_loss_norm_and_tokens(saved, text, spec, tmp_path):
    """The norm is the one before clipping, and all micro-batches count."""
    seen = []
    loop = LoopConfig(batch_size=4, accumulate=2, clip=1e-6)
    options = {"transfer_steps": 1, "distil_steps": 1, "train": "full", "evaluate_every": 0}
    config = RecoverConfig(**options, row_length=32, judged_rows=2, loop=loop)
    on_step = lambda *step: seen.append(step)  # noqa: E731
    messages = []
    recover(saved, spec, [text], tmp_path / "out", config, on_step=on_step, log=messages.append)
    assert [(stage, step) for stage, step, _ in seen] == [("transfer", 0), ("distil", 0)]
    for _, _, metrics in seen:
        assert metrics.loss > 0
        assert metrics.grad_norm > 1e-5  # the clip is 1e-6
        assert metrics.tokens == 4 * 32
    shown = [x.removeprefix("evaluation: ") for x in messages if x.startswith("evaluation")]
    assert {"softmax", "raw swap", "window alone", "result", "near branch alone"} <= set(shown)
    assert progress.describe(seen[0][2], 2.0).endswith("256 tokens/s")


def test_parameters_that_are_new_are_not_reported_as_missing(saved, tmp_path, spec, monkeypatch):
    """Weights that a checkpoint lacks are, and so are extras that a saved swap lacks."""
    reports = []
    monkeypatch.setattr(modeling_utils.logger, "warning", lambda text, *_: reports.append(text))
    load_causal(saved, spec).save_pretrained(tmp_path / "swapped")
    assert reports == []
    for folder, missing in ((saved, ".q_proj."), (tmp_path / "swapped", ".far_log_weight")):
        model = hf.AutoModelForCausalLM.from_pretrained(folder)
        state = {k: x for k, x in model.state_dict().items() if missing not in k}
        model.save_pretrained(tmp_path / "less", state_dict=state)
        with warnings.catch_warnings():  # attnzoo's own, about a part of the extras
            warnings.simplefilter("ignore")
            load_causal(tmp_path / "less", spec if folder == saved else None)
        assert "MISSING" in reports[-1]
        assert missing in reports[-1]
        assert ("attnzoo" in reports[-1]) == (folder != saved)
    assert len(reports) == 2
