"""Files beside the weights are copied to the folder of a swapped model, with exceptions."""

import json
import warnings

import pytest

from attnzoo.hf.saving.companions import copy_companions, move_files
from attnzoo.hf.saving.files import swap_files
from attnzoo.spec import AttentionSpec

MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"},
    {"idx": 3, "name": "3", "path": "../new", "type": "sentence_transformers.models.Dense"},
]
COPIED = {
    "modules.json": json.dumps(MODULES),
    "sentence_bert_config.json": '{"max_seq_length": 8}',
    "1_Pooling/config.json": "{}",
    "2_Dense/config.json": "{}",
    "2_Dense/model.safetensors": "weights of a module behind the encoder",
    "LICENSE": "",
}
LEFT_OUT = {
    "pytorch_model.bin": "",
    "model.safetensors.index.json": "{}",
    "notes/more/text.txt": "",
    "onnx/model.onnx": "",
    "onnx/config.json": "{}",
    "checkpoint-5/optimizer.pt": "",
    "checkpoint-5/trainer_state.json": "{}",
    ".git/config": "",
    "2_Dense/.cache/lock": "",
    "recovery.json": "{}",
    "README.md": "# Base",
    "adapter_config.json": "{}",
}


def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def files(folder):
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


def test_everything_but_weights_is_copied(tmp_path):
    write(tmp_path / "model", {**COPIED, **LEFT_OUT, "config.json": "original"})
    write(tmp_path / "new", {"config.json": "swapped"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copy_companions(tmp_path / "model", tmp_path / "new")
    assert files(tmp_path / "new") == {*COPIED, "config.json"}
    assert (tmp_path / "new" / "config.json").read_text() == "swapped"
    for name, text in COPIED.items():
        assert (tmp_path / "new" / name).read_text() == text


def test_code_and_links_out_of_the_folder_are_named(tmp_path):
    write(tmp_path, {"secret": "key", "outside/data.json": "{}", "new/config.json": ""})
    model = tmp_path / "model"
    write(model, {"modules.json": json.dumps(MODULES), "1_Pooling/config.json": "{}"})
    write(model, {"custom.py": "print(1)"})
    (model / "stolen.txt").symlink_to(tmp_path / "secret")
    (model / "1_Pooling" / "stolen.txt").symlink_to(tmp_path / "secret")
    (model / "folder").symlink_to(tmp_path / "outside")
    (model / "2_Dense").symlink_to(tmp_path / "outside")
    (model / "loop").symlink_to(model)
    (model / "broken.txt").symlink_to(model / "missing")
    (model / "same.json").symlink_to(model / "modules.json")  # within the folder
    with pytest.warns(UserWarning, match="not copied") as record:
        copy_companions(model, tmp_path / "new")
    assert files(tmp_path / "new") == {
        "config.json",
        "modules.json",
        "1_Pooling/config.json",
        "same.json",
    }
    assert not (tmp_path / "new" / "same.json").is_symlink()
    for name in (
        "custom.py",
        "stolen.txt",
        "1_Pooling/stolen.txt",
        "folder",
        "2_Dense",
        "loop",
        "broken.txt",
    ):
        assert name in str(record[0].message)


def test_the_links_of_a_hub_cache_are_followed(tmp_path):
    repository = tmp_path / "models--org--name"
    write(repository, {"blobs/1234": "[]"})
    snapshot = repository / "snapshots" / "abcd"
    snapshot.mkdir(parents=True)
    (snapshot / "modules.json").symlink_to(repository / "blobs" / "1234")
    (snapshot / "other.json").symlink_to(tmp_path / "elsewhere.json")
    write(tmp_path, {"elsewhere.json": "", "new/config.json": ""})
    with pytest.warns(UserWarning, match=r"other\.json"):
        copy_companions(snapshot, tmp_path / "new")
    assert files(tmp_path / "new") == {"config.json", "modules.json"}


@pytest.mark.parametrize("text", ["[" * 10**5, '[{"path": "."}, {"path": ""}, {"path": 3}]', "1"])
def test_modules_that_cannot_be_read_are_copied_as_they_are(text, tmp_path):
    write(tmp_path / "old", {"modules.json": text})
    (tmp_path / "new").mkdir()
    copy_companions(tmp_path / "old", tmp_path / "new")
    assert (tmp_path / "new" / "modules.json").read_text() == text


def test_moved_files_replace_those_of_an_earlier_attempt(tmp_path):
    write(tmp_path / "partial", {"config.json": "new", "1_Pooling/config.json": "new"})
    write(tmp_path / "out", {"1_Pooling/config.json": "old", "losses.jsonl": ""})
    move_files(tmp_path / "partial", tmp_path / "out")
    assert files(tmp_path / "out") == {"config.json", "1_Pooling/config.json", "losses.jsonl"}
    assert (tmp_path / "out" / "1_Pooling" / "config.json").read_text() == "new"
    assert not (tmp_path / "partial").exists()


def test_swap_command_copies_them(llama, tmp_path):
    llama().save_pretrained(tmp_path / "model")
    write(tmp_path / "model", COPIED)
    swap_files(tmp_path / "model", AttentionSpec("linear"), tmp_path / "new")
    assert files(tmp_path / "new") >= set(COPIED)
    assert "attnzoo" in json.loads((tmp_path / "new" / "config.json").read_text())
