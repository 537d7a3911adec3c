"""The modules of sentence-transformers beside an encoder are copied with it."""

import json

from attnzoo.hf.saving.files import copy_modules, move_files, swap_files
from attnzoo.spec import AttentionSpec

COPIED = {
    "modules.json": "[]",
    "config_sentence_transformers.json": "{}",
    "sentence_bert_config.json": '{"max_seq_length": 8}',
    "1_Pooling/config.json": "{}",
    "12_Dense/config.json": "{}",
    "12_Dense/model.safetensors": "weights of a module behind the encoder",
    "LICENSE": "",
}
LEFT_OUT = {
    "pytorch_model.bin": "",
    "model.safetensors.index.json": "{}",
    "custom.py": "print(1)",
    "1_Pooling/custom.py": "print(1)",
    "onnx/config.json": "{}",
    "checkpoint-5/trainer_state.json": "{}",
    "recovery.json": "{}",
    "README.md": "# Base",
}


def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def files(folder):
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


def test_the_swap_command_copies_them(llama, tmp_path):
    llama().save_pretrained(tmp_path / "model")
    write(tmp_path / "model", {**COPIED, **LEFT_OUT})
    swap_files(tmp_path / "model", AttentionSpec("linear"), tmp_path / "new")
    found = files(tmp_path / "new")
    assert found >= set(COPIED)
    assert not found & set(LEFT_OUT)
    assert "attnzoo" in json.loads((tmp_path / "new" / "config.json").read_text())
    assert (tmp_path / "new/12_Dense/model.safetensors").read_text().startswith("weights")


def test_links_are_followed_within_a_folder_and_a_hub_cache(tmp_path):
    repository = tmp_path / "models--org--name"
    write(tmp_path, {"secret.json": "key", "new/modules.json": "kept"})
    write(repository, {"blobs/1234": "[]"})
    snapshot = repository / "snapshots" / "abcd"
    (snapshot / "1_Pooling").mkdir(parents=True)
    (snapshot / "modules.json").symlink_to(repository / "blobs" / "1234")
    (snapshot / "1_Pooling" / "config.json").symlink_to(repository / "blobs" / "1234")
    (snapshot / "1_Pooling" / "stolen.json").symlink_to(tmp_path / "secret.json")
    (snapshot / "2_Dense").symlink_to(tmp_path)
    copy_modules(snapshot, tmp_path / "new")
    assert files(tmp_path / "new") == {"modules.json", "1_Pooling/config.json"}
    assert (tmp_path / "new/modules.json").read_text() == "kept"
    (repository / "models").mkdir()
    (repository / "models" / "modules.json").symlink_to(repository / "blobs" / "1234")
    copy_modules(repository / "models", tmp_path / "newer")  # not of a cache
    assert not files(tmp_path / "newer")


def test_moved_files_replace_those_of_an_earlier_attempt(tmp_path):
    write(tmp_path / "partial", {"config.json": "new", "1_Pooling/config.json": "new"})
    write(tmp_path / "out", {"1_Pooling/config.json": "old", "losses.jsonl": ""})
    move_files(tmp_path / "partial", tmp_path / "out")
    assert files(tmp_path / "out") == {"config.json", "1_Pooling/config.json", "losses.jsonl"}
    assert (tmp_path / "out" / "1_Pooling" / "config.json").read_text() == "new"
    assert not (tmp_path / "partial").exists()
