"""Checkpoints that hold more than tensors and plain data are refused, and nothing of them runs."""

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator

from attnzoo.training.checkpoints import DONE, CheckpointError, file_hashes
from attnzoo.training.loop import LoopConfig, read_losses
from attnzoo.training.recover import RecoverConfig, recover

LOOP = LoopConfig(batch_size=4, checkpoint_every=2)
CONFIG = RecoverConfig(
    transfer_steps=4, distil_steps=0, row_length=32, judged_rows=2, train="extras", loop=LOOP
)


class Malicious:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture
def stopped(saved, text, spec, tmp_path, interrupt):
    """A run that was stopped after its first checkpoint: that, and what resumes the run."""
    out = tmp_path / "out"
    run = saved, spec, [text], out, CONFIG
    interrupt(3, recover, *run)
    return out / "checkpoints" / "step-000002", lambda: recover(*run, resume=True)


def refused(checkpoint, resume, ran):
    """Resume from a checkpoint with a malicious file and the hash of that file."""
    progress = json.loads((checkpoint / DONE).read_text())
    (checkpoint / DONE).write_text(json.dumps({**progress, "files": file_hashes(checkpoint)}))
    with pytest.raises(CheckpointError, match=r"step-000002' holds posix\.mkdir.*could run code"):
        resume()
    assert not ran.exists()


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "optimizer.bin", "scheduler.bin", "random_states_0.pkl"]
)
@pytest.mark.parametrize("kind", ["torch", "pickle"])
def test_a_malicious_file_is_refused(stopped, tmp_path, name, kind, monkeypatch):
    """Whatever the environment says of the default of ``torch.load``."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    checkpoint, resume = stopped
    file, ran = checkpoint / name, tmp_path / "ran"
    assert file.is_file()
    if kind == "torch":
        held = torch.load(file, weights_only=False)
        torch.save({**held, "more": Malicious(ran)}, file)
    else:
        file.write_bytes(pickle.dumps(Malicious(ran), protocol=2))
    refused(checkpoint, resume, ran)
    assert os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] == "1"
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ


@pytest.fixture
def in_shards(monkeypatch):
    """Have torch.distributed.checkpoint load, too, as Accelerate has it under FSDP."""
    loaded = {"x": torch.zeros(3), "lr": 0.0, "betas": (0.0, 0.0)}
    load_state = Accelerator.load_state

    def load(self, path):
        load_state(self, path)
        dcp.load(loaded, storage_reader=dcp.FileSystemReader(Path(path) / "optimizer_0"))

    monkeypatch.setattr(Accelerator, "load_state", load)
    return loaded


def save_shards(checkpoint, **values):
    state = {"x": torch.arange(3.0), "lr": 0.1, "betas": (0.9, 0.95), **values}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(checkpoint / "optimizer_0"))


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_shards_load(stopped, in_shards):
    checkpoint, resume = stopped
    save_shards(checkpoint)
    resume()
    assert in_shards["x"].tolist() == [0, 1, 2]
    assert (in_shards["lr"], in_shards["betas"]) == (0.1, (0.9, 0.95))
    assert len(read_losses(checkpoint.parents[1])) == 4


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("where", ["value", "metadata", "link"])
def test_malicious_shards_are_refused(stopped, in_shards, tmp_path, where):
    checkpoint, resume = stopped
    ran = tmp_path / "ran"
    save_shards(checkpoint, **({"lr": Malicious(ran)} if where == "value" else {}))
    folder = checkpoint / "optimizer_0"
    if where != "value":
        (folder / ".metadata").write_bytes(pickle.dumps(Malicious(ran)))
    if where == "link":
        folder.rename(tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere")
    refused(checkpoint, resume, ran)
