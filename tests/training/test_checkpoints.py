"""The folder of a run: its identity, its lock, damaged checkpoints, and a full disk."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from attnzoo.errors import AttnzooError
from attnzoo.report import atomic_write
from attnzoo.training import head_entropy, runs
from attnzoo.training.checkpoints import (
    FOLDER,
    LOCK,
    CheckpointError,
    Checkpoints,
    explain_write_errors,
)
from attnzoo.training.loop import LoopConfig, read_losses
from attnzoo.training.recover import RecoverConfig, recover
from tests.processes import PIPE, running


def config(**loop):
    loop = LoopConfig(**{"batch_size": 4, "checkpoint_every": 2, **loop})
    return RecoverConfig(
        transfer_steps=6, distil_steps=0, train="extras", row_length=32, judged_rows=2, loop=loop
    )


@pytest.fixture(scope="module")
def stopped_folder(saved, text, spec, tmp_path_factory, interrupt):
    """The folder of a run that was stopped in its fifth step; tests only copy it."""
    out = tmp_path_factory.mktemp("run") / "out"
    interrupt(5, recover, saved, spec, [text], out, config())
    return out


@pytest.fixture
def stopped(stopped_folder, saved, text, spec, tmp_path):
    """A copy of the folder of a stopped run, and the arguments of the run."""
    out = tmp_path / "out"
    shutil.copytree(stopped_folder, out)
    return out, (saved, spec, [text], out, config())


@pytest.mark.parametrize("fault", ["truncated", "changed", "missing", "progress"])
def test_a_damaged_checkpoint_is_passed_over(stopped, fault):
    """The older one is used, which is reported; from there, a run ends with the same losses."""
    out, run = stopped
    last, messages = out / FOLDER / "step-000004", []
    file = last / ("progress.json" if fault == "progress" else "optimizer.bin")
    data = bytearray(file.read_bytes())
    if fault == "missing":
        file.unlink()
    elif fault == "changed":
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    else:
        file.write_bytes(data[: len(data) // 2])
    found = Checkpoints(out, {}).latest(messages.append)
    (message,) = messages
    assert "step-000004' is damaged (" in message
    assert file.name in message
    assert message.endswith("step-000002' is used instead")
    assert (found["path"].name, found["total"]) == ("step-000002", 2)
    if fault == "truncated":  # what follows depends on the older checkpoint only
        logged = []
        recover(*run, resume=True, log=logged.append)
        assert [text for text in logged if "damaged" in text] == messages
        assert [line["total"] for line in read_losses(out)] == [1, 2, 3, 4, 5, 6]


def test_no_checkpoint_is_intact(stopped):
    out, run = stopped
    for path in (out / FOLDER).glob("step-*"):
        (path / "optimizer.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="and there is no other one; start again"):
        recover(*run, resume=True)


def test_held_out_text_is_part_of_a_run(stopped, text, tmp_path):
    """Training rows stay the same: the first file is the held-out document."""
    out, (saved, spec, _, _, options) = stopped
    documents = sorted(text.iterdir())
    rows = runs.load_rows(saved, [text], "text", options)
    for document in documents:
        other = tmp_path / f"without-{document.stem}"
        shutil.copytree(text, other)
        (other / document.name).write_text(document.read_text()[::-1])
        changed = runs.load_rows(saved, [other], "text", options)
        if changed[0].fingerprint == rows[0].fingerprint:
            break
    else:
        pytest.fail("no document is held out")
    assert changed[1].fingerprint != rows[1].fingerprint
    with pytest.raises(CheckpointError, match="another run: its held_out is"):
        recover(saved, spec, [other], out, options, resume=True)


def test_a_refusal_names_all_keys_that_differ(stopped):
    out, (saved, spec, data, _, _) = stopped
    other = config(batch_size=2, seed=3)
    with pytest.raises(
        CheckpointError,
        match=r"its config\.loop\.batch_size is 4, not 2, its config\.loop\.seed is 0, not 3",
    ):
        recover(saved, spec, data, out, other, resume=True)


def test_checkpoint_frequency_is_not_part_of_a_run(stopped):
    out, (saved, spec, data, _, _) = stopped
    recover(saved, spec, data, out, config(checkpoint_every=3, keep=1), resume=True)
    assert len(read_losses(out)) == 6


def test_a_finished_run_returns_its_results(stopped, monkeypatch):
    out, run = stopped
    made = recover(*run, resume=True)
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    monkeypatch.setattr(runs.Run, "evaluate_baselines", None)
    assert recover(*run, resume=True) == json.loads(json.dumps(made))
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == before
    with pytest.raises(CheckpointError, match=r"its config\.loop\.seed is 0, not 1"):
        recover(*run[:4], config(seed=1), resume=True)
    (out / "recovery.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"is damaged .* remove it to train the run again"):
        recover(*run, resume=True)


def test_a_second_process_is_refused_until_the_first_one_dies(stopped):
    out, run = stopped
    code = (
        "import sys; from filelock import FileLock\n"
        "lock = FileLock(sys.argv[1]); lock.acquire(timeout=60)\n"
        "print('locked', flush=True); sys.stdin.read()"
    )
    lock = out / FOLDER / LOCK
    with running([sys.executable, "-c", code, lock], stdin=PIPE, stdout=PIPE) as other:
        assert other.stdout.readline() == b"locked\n"
        with pytest.raises(CheckpointError, match="Another process runs in"):
            recover(*run, resume=True)
        assert len(read_losses(out)) == 5
        other.kill()
    recover(*run, resume=True)
    assert len(read_losses(out)) == 6
    assert not (out / FOLDER).exists()


@pytest.mark.parametrize("name", ["run.json", "lines.json", "recovery.json"])
def test_a_full_disk_is_an_error_and_leaves_nothing_half_written(
    saved, text, spec, tmp_path, monkeypatch, name
):
    out, sync = tmp_path / "out", atomic_write.os.fsync

    def full(descriptor):
        if Path(f"/proc/self/fd/{descriptor}").readlink().name == f"{name}.partial":
            raise OSError(28, "No space left on device")
        sync(descriptor)

    monkeypatch.setattr(atomic_write.os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"cannot be written .*No space left on device"):
        recover(saved, spec, [text], out, config())
    assert not list(out.rglob("*.partial"))
    assert out.exists() == (name != "run.json")
    monkeypatch.undo()
    recover(saved, spec, [text], out, config(), resume=out.exists())
    assert (out / "recovery.json").is_file()


def full_disk_of_torch():
    torch.save({"a": torch.zeros(300_000)}, "/dev/full")


def full_disk_of_safetensors():
    raise SafetensorError(
        "Error while serializing: I/O error: No space left on device (os error 28)"
    )


def full_disk_of_a_rank():
    raise CheckpointException("write", {1: (OSError(28, "No space left on device"), None)})


@pytest.mark.parametrize(
    "write", [full_disk_of_torch, full_disk_of_safetensors, full_disk_of_a_rank]
)
def test_write_errors_of_libraries_name_the_remedy(tmp_path, write):
    message = r"cannot be written \(.*no checkpoint exists. Free disk space, then continue"
    with (
        pytest.raises(CheckpointError, match=message),
        explain_write_errors(Checkpoints(tmp_path, {})),
    ):
        write()


def test_a_folder_that_becomes_read_only_is_no_full_disk(tmp_path):
    error = PermissionError(13, "Permission denied")
    checkpoints = Checkpoints(tmp_path, {})
    message = "Make it writable, then continue"
    with pytest.raises(CheckpointError, match=message), explain_write_errors(checkpoints):
        raise error


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[Rank 1] Watchdog caught collective operation timeout"),
        CheckpointException("write", {1: (RuntimeError("CUDA error"), None)}),
        ConnectionResetError(104, "Connection reset by peer"),
        SafetensorError("Error while deserializing header: HeaderTooLarge"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_other_errors_are_no_write_errors(tmp_path, error):
    with pytest.raises(type(error)) as found, explain_write_errors(Checkpoints(tmp_path, {})):
        raise error
    assert found.value is error


def test_out_of_memory_in_a_measurement_of_heads_is_not_a_full_disk(
    saved, text, spec, tmp_path, monkeypatch
):
    def exhaust(*_, original=False, **__):
        if original:
            return {}
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(head_entropy, "head_entropies", exhaust)
    with pytest.raises(torch.OutOfMemoryError):
        recover(saved, spec, [text], tmp_path / "out", config())


@pytest.mark.parametrize("kind", ["link", "file", "below a file"])
def test_an_output_that_cannot_be_made_is_refused_first(
    saved, text, spec, tmp_path, monkeypatch, kind
):
    out = tmp_path / "out"
    if kind == "link":
        out.symlink_to(tmp_path / "nowhere")
    else:
        out.write_text("")
    monkeypatch.setattr(runs, "load_rows", None)  # nothing is read before
    target = out / "more" if kind == "below a file" else out
    with pytest.raises(AttnzooError, match=r"which does not exist|cannot be written"):
        recover(saved, spec, [text], target, config())


def test_a_lock_of_a_run_that_did_not_start_leaves_no_folder(tmp_path):
    checkpoints = Checkpoints(tmp_path / "out", {"a": 1})
    assert checkpoints.begin(resume=False) is None
    (tmp_path / "out" / "run.json").unlink()
    checkpoints.release()
    assert not (tmp_path / "out").exists()
