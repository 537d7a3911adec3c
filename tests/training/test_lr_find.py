"""The search for the rates of a stage: what it chooses, and that it leaves no trace."""

import json
from itertools import pairwise
from types import SimpleNamespace

import pytest
from accelerate.utils import DistributedType

from attnzoo.errors import ConfigError
from attnzoo.training import lr_find
from attnzoo.training.checkpoints import FOLDER, CheckpointError
from attnzoo.training.loop import Loop, LoopConfig, read_losses
from attnzoo.training.lr_find import FACTORS, check_lr_find, choose_factor
from attnzoo.training.recover import RecoverConfig, recover

ROWS = [0.5 + 0.01 * (n % 5) for n in range(16)]


def moved(by, noise=0.0):
    """Losses that differ from ROWS by a mean and by noise that alternates."""
    return [x + by + noise * (-1) ** n for n, x in enumerate(ROWS)]


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ({0.1: ROWS, 0.3: ROWS, 1.0: ROWS, 3.0: ROWS}, 1.0),
        ({0.1: moved(-0.01, 0.1), 0.3: moved(0.2), 1.0: ROWS, 3.0: moved(-0.02, 0.1)}, 1.0),
        ({0.1: moved(0.1), 0.3: moved(0.1), 1.0: ROWS, 3.0: moved(-0.1, 0.01)}, 3.0),
        ({0.1: moved(-0.1, 0.05), 0.3: moved(-0.11, 0.01), 1.0: ROWS, 3.0: None}, 0.1),
        ({0.1: moved(-0.1, 0.01), 0.3: moved(-0.3, 0.01), 1.0: ROWS, 3.0: None}, 0.3),
        ({0.1: moved(0.5), 0.3: moved(0.1, 0.01), 1.0: None, 3.0: [float("inf")] * 16}, 0.3),
        ({0.1: None, 1.0: [float("nan")] * 16}, None),
    ],
    ids=["tie", "noise", "larger", "smaller of equals", "best", "given diverges", "all diverge"],
)
def test_the_given_rates_stay_unless_others_are_clearly_better(losses, expected):
    assert choose_factor(losses) == expected


@pytest.mark.parametrize(("kind", "cp_size"), [("FSDP", 1), ("DEEPSPEED", 1), ("NO", 2)])
def test_split_weights_and_rows_are_refused(kind, cp_size):
    accelerator = SimpleNamespace(distributed_type=DistributedType(kind))
    check_lr_find(accelerator, 0, cp_size)
    with pytest.raises(ConfigError, match="lr_find_steps=5 restores whole weights"):
        check_lr_find(accelerator, 5, cp_size)


def test_steps_that_are_all_warmup_are_refused():
    LoopConfig(lr_find_steps=5, warmup=0.1)
    LoopConfig(lr_find_steps=0, warmup=10)
    with pytest.raises(ConfigError, match="Each of the 5 steps of lr_find_steps is warmup"):
        LoopConfig(lr_find_steps=5, warmup=10)


def config(*, search=4, **options):
    loop = LoopConfig(batch_size=4, checkpoint_every=2, warmup=0.0, lr_find_steps=search)
    given = {"transfer_steps": 0, "distil_steps": 6, "row_length": 32, "judged_rows": 8}
    return RecoverConfig(**given, train="full", loop=loop, **options)


def losses(out):
    return [line["loss"] for line in read_losses(out)]


def test_bad_rates_are_corrected_and_the_search_leaves_no_trace(saved, text, spec, tmp_path):
    """A run with a search has the losses of one that is given what the search finds."""
    wild = {"weights_lr": 0.03, "extras_lr": 0.03, "evaluate_every": 0}
    said = []
    run = saved, spec, [text]
    found = recover(*run, tmp_path / "found", config(**wild), log=said.append)
    chosen = found["lr_find"]["distil"]
    assert chosen["factor"] == 0.1
    assert chosen["rates"] == pytest.approx([0.003, 0.003])
    assert all(a < b for a, b in pairwise(chosen["losses"][f"{f:g}"] for f in FACTORS))
    assert "distil: the rates are multiplied by 0.1 and are 0.003 and 0.003" in said
    tame = config(search=0, weights_lr=0.1 * 0.03, extras_lr=0.1 * 0.03, evaluate_every=0)
    expected = recover(*run, tmp_path / "tame", tame)
    assert losses(tmp_path / "found") == losses(tmp_path / "tame")
    assert found["lines"]["result"] == expected["lines"]["result"]
    assert expected["lr_find"] == {}


def test_a_resumed_run_has_the_rates_of_its_search(
    saved, text, spec, tmp_path, monkeypatch, interrupt
):
    run = saved, spec, [text], tmp_path / "out", config(weights_lr=0.03)
    recover(*run[:3], tmp_path / "whole", run[-1])
    interrupt(5, recover, *run)
    monkeypatch.setattr(Loop, "try_stage", None)  # nothing is searched again
    file = tmp_path / "out" / FOLDER / lr_find.FILE
    kept = file.read_text()
    file.write_text("{}")
    with pytest.raises(CheckpointError, match="The rates of stage 'distil' are missing"):
        recover(*run, resume=True)
    file.write_text(kept)
    found = recover(*run, resume=True)
    assert losses(tmp_path / "out") == losses(tmp_path / "whole")
    assert found["lr_find"] == json.loads(kept)


def test_a_stage_that_diverges_at_all_rates_is_refused(saved, text, spec, tmp_path, monkeypatch):
    monkeypatch.setattr(Loop, "try_stage", lambda *_: None)
    with pytest.raises(ConfigError, match=r"'distil' diverges in 4 steps even at 0\.1 of"):
        recover(saved, spec, [text], tmp_path / "out", config())
