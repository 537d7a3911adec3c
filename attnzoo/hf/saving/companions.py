"""The other files in a model's folder: copied with a swapped model, so that it loads as before.

A folder of sentence-transformers also holds modules.json, the configs of pooling and normalisation,
and the weights of modules behind the encoder. Files are data here: none is imported or run.
"""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

WEIGHTS = frozenset(
    {
        *(".bin", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".onnx_data", ".ot", ".pb"),
        *(".pkl", ".pt", ".pth", ".safetensors", ".tflite", ".xml"),
    }
)
WEIGHTS_INDEX = (".bin.index.json", ".safetensors.index.json")
# results of attnzoo's own commands, and a PEFT adapter, which is merged or belongs to other weights
NOT_COPIED = frozenset(
    {
        *("recovery.json", "finetuning.json", "losses.jsonl", "report.html"),
        *("adapter_config.json", "README.md"),  # a card says what the original model scores
    }
)
CODE = frozenset({".py", ".pyc", ".so", ".pyd", ".dll", ".dylib", ".sh"})


def copy_companions(source: Path, target: Path) -> None:
    """Copy the files of a model's folder that saving the model has not written.

    Folders are not copied, except those that modules.json names: modules behind the transformer,
    with their weights. Nor are other weights, hidden files, code, and links out of the folder; a
    warning names code and links.

    Args:
        source: Folder of the original model.
        target: Folder with the saved model, whose files are kept.
    """
    root = _storage(source)
    modules = _module_folders(source)
    paths = [x for x in source.iterdir() if not _is_weights(x)]
    for folder in [x for x in paths if x.name in modules and not x.is_symlink()]:
        paths += folder.rglob("*")
    left_out = []
    for path in paths:
        name = path.relative_to(source)
        is_folder = path.is_dir() and not path.is_symlink()
        is_hidden = any(part.startswith(".") for part in name.parts)
        if is_folder or is_hidden or path.name in NOT_COPIED:
            continue
        is_inside = path.is_file() and path.resolve().is_relative_to(root)
        if path.suffix in CODE or not is_inside:
            left_out.append(str(name))
            continue
        copy = target / name
        if not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
    if left_out:
        warnings.warn(
            f"{', '.join(sorted(left_out))} of {str(source)!r} are not copied: code, or a link out "
            "of the folder. Copy what you trust and need",
            stacklevel=3,
        )


def move_files(source: Path, target: Path) -> None:
    """Move all files of a folder into another, replace files of the same name, and remove it."""
    for path in sorted(source.rglob("*")):
        if path.is_file():
            moved = target / path.relative_to(source)
            moved.parent.mkdir(parents=True, exist_ok=True)
            path.replace(moved)
    shutil.rmtree(source)


def _storage(source: Path) -> Path:
    """Return the folder that must contain the files; a hub cache links to its ``blobs``."""
    folder = source.resolve()
    repository = folder.parent.parent
    is_hub_cache = folder.parent.name == "snapshots" and repository.name.startswith("models--")
    return repository if is_hub_cache else folder


def _module_folders(source: Path) -> set[str]:
    """Return the folders that modules.json of sentence-transformers names."""
    file = source / "modules.json"
    if not file.is_file():
        return set()
    try:
        modules = json.loads(file.read_text("utf-8"))
    except (ValueError, RecursionError):  # copied as it is
        return set()
    entries = modules if isinstance(modules, list) else []
    paths = (entry.get("path") for entry in entries if isinstance(entry, dict))
    return {part for path in paths if isinstance(path, str) for part in Path(path).parts[:1]}


def _is_weights(path: Path) -> bool:
    return path.suffix in WEIGHTS or path.name.endswith(WEIGHTS_INDEX)
