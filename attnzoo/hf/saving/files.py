"""Read saved models without their weights, and write swapped copies of them."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoProcessor, AutoTokenizer, PreTrainedModel

from attnzoo.errors import SpecError, UnsupportedError, is_deeply_nested, short_repr
from attnzoo.hf.configs import read_field
from attnzoo.hf.names import NAME
from attnzoo.hf.pretrained import explain_load_errors, load_pretrained
from attnzoo.hf.saving.checkpoints import stock_class_name
from attnzoo.hf.seam import names_kept_in_float32
from attnzoo.spec import AttentionSpec

MAX_LAYERS = 10_000  # a model is built with so many at most
LAYERS = re.compile(r"layers?$")  # the name of a field, such as n_layer or decoder_layers
# Files of sentence-transformers beside an encoder, the modules behind it, and the license
MODULES = (
    *("modules.json", "*sentence*.json", "LICENSE*"),
    *("[0-9]*_*/*.json", "[0-9]*_*/*.safetensors", "[0-9]*_*/*.bin"),
)
KERNEL_FIELDS = ("_attn_implementation_internal", "_experts_implementation_internal")


def read_config(path: Path) -> Any:
    """Read the config of a saved model."""
    if not (path / "config.json").is_file():
        raise SpecError(f"{str(path)!r} holds no saved model: there is no config.json")
    name = repr(str(path / "config.json"))
    try:
        if is_deeply_nested(json.loads((path / "config.json").read_text("utf-8"))):
            raise SpecError(f"{name} is nested too deeply to be a config")
        config = load_pretrained(AutoConfig, path)
    except UnsupportedError:
        raise
    except (ValueError, OSError, RecursionError) as error:
        cause = error.__cause__ if isinstance(error, SpecError) else None
        raise SpecError(f"{name} cannot be read: {cause or error}") from error
    _check_sizes(config, name)
    return config


def _check_sizes(config: Any, name: str) -> None:
    """Raise an error for a config that builds more layers than a model has, or that names code."""
    parts = [config, *(read_field(config, key) for key in config.sub_configs)]
    for part in filter(None, parts):
        for field, value in vars(part).items():
            if LAYERS.search(field) and isinstance(value, int) and value > MAX_LAYERS:
                raise SpecError(f"{name}: {field} must be at most {MAX_LAYERS:,}, got {value:,}")
            if field in KERNEL_FIELDS and "/" in str(value):
                raise UnsupportedError(
                    f"{name} names a kernel of the Hub, {short_repr(value)}, which is code, and "
                    "attnzoo runs none that a folder names; leave the field out"
                )
        layers = read_field(part, "num_hidden_layers")
        if isinstance(layers, int) and layers < 0:
            raise SpecError(f"{name}: num_hidden_layers must be at least 0, got {layers}")


def hash_weights(path: Path) -> bytes:
    """Return a hash of a saved model's weights; a gigabyte takes about a second."""
    digest = hashlib.sha256()
    for file in sorted((*path.glob("*.safetensors"), *path.glob("*.bin"))):
        with file.open("rb") as weights:
            digest.update(hashlib.file_digest(weights, "sha256").digest())
    return digest.digest()


def model_class(config: Any, path: Path) -> type[PreTrainedModel]:
    """Return the model class that a saved config names."""
    names = read_field(config, "architectures")
    first = names[0] if isinstance(names, list) and names else ""
    cls = getattr(transformers, stock_class_name(first), None)
    if not (isinstance(cls, type) and issubclass(cls, PreTrainedModel)):  # untrusted
        raise SpecError(
            f"{str(path)!r} does not name a model class of transformers (architectures: "
            f"{short_repr(names)})"
        )
    return cls


def empty_model(path: Path) -> PreTrainedModel:
    """Build a saved model without its weights, on the meta device."""
    config = read_config(path)
    with torch.device("meta"), explain_load_errors(path):
        return model_class(config, path)(config)


def swap_files(path: Path, spec: AttentionSpec, out: Path) -> PreTrainedModel:
    """Load a saved model with ``spec``, save it to ``out`` atomically, and return it.

    The modules of sentence-transformers beside it are copied; see :func:`copy_modules`.
    """
    require_new_folder(out)
    config = read_config(path)
    cls = model_class(config, path)
    config.attnzoo = spec.to_dict()
    try:
        model: PreTrainedModel = load_pretrained(cls, path, config=config, attn_implementation=NAME)
    except OSError as error:
        raise SpecError(
            f"The weights in {str(path)!r} cannot be read ({error}); nothing was written."
        ) from error
    save_copy(model, path, out)
    return model


def require_new_folder(out: Path) -> None:
    """Raise ``SpecError`` if a folder has content."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise SpecError(f"{str(out)!r} exists and is not empty; give a new folder")


def save_copy(model: PreTrainedModel, path: Path, out: Path) -> None:
    """Save a changed model to ``out`` atomically, with the tokenizer of its folder ``path``."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        staging = Path(folder) / "model"
        model.save_pretrained(staging)
        for auto in (AutoTokenizer, AutoProcessor):
            try:
                load_pretrained(auto, path).save_pretrained(staging)
            except (OSError, ValueError, RecursionError):
                continue  # not every model has one
        copy_modules(path, staging)
        if out.exists():
            out.rmdir()
        shutil.move(staging, out)


def copy_modules(source: Path, target: Path) -> None:
    """Copy what sentence-transformers has beside an encoder, so that the copy loads as before.

    Links out of the folder, or out of its repository in a cache of the Hub, are not followed.
    """
    root = source.resolve()
    if root.parent.name == "snapshots" and root.parent.parent.name.startswith("models--"):
        root = root.parent.parent
    for path in (path for pattern in MODULES for path in source.glob(pattern)):
        copy = target / path.relative_to(source)
        if path.is_file() and path.resolve().is_relative_to(root) and not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)


def move_files(source: Path, target: Path) -> None:
    """Move all files of a folder into another, replace files of the same name, and remove it."""
    for path in sorted(source.rglob("*")):
        if path.is_file():
            moved = target / path.relative_to(source)
            moved.parent.mkdir(parents=True, exist_ok=True)
            path.replace(moved)
    shutil.rmtree(source)


# -- data types: a model trained in float32 is saved in that of its folder again ------------------

# safetensors' names of the types that a model may be trained and saved in
DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}


def saved_dtype(path: Path) -> torch.dtype:
    """Return the data type that ``from_pretrained`` gives the weights of a saved model.

    It is that of the config, of its text model, or of the first weight where the config has none.
    """
    config = read_config(path)
    for part in (config, config.get_text_config()):
        if isinstance(dtype := read_field(part, "dtype"), torch.dtype):
            return dtype
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - not a dict
                if (found := DTYPES.get(weights.get_slice(name).get_dtype())) is not None:
                    return found
    return torch.float32


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a data type, such as ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def rounded_weights(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return a model's saved weights by name, except those that transformers keeps in float32."""
    kept = names_kept_in_float32(model, dtype)
    pattern = re.compile("|".join(map(re.escape, kept))) if kept else None
    return {
        name: x
        for name, x in model.state_dict(keep_vars=True).items()
        if x.is_floating_point() and not (pattern and pattern.search(name))
    }


@torch.no_grad()
def cast_weights(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast a model's saved weights in place, except those that transformers keeps in float32."""
    for x in rounded_weights(model, dtype).values():
        x.data = x.data.to(dtype)


@torch.no_grad()
def round_weights(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Round a float32 model's weights to what :func:`cast_weights` saves, still in float32."""
    if dtype != model.dtype:
        for x in rounded_weights(model, dtype).values():
            part = x.to_local() if isinstance(x, DTensor) else x.data
            part.copy_(part.to(dtype))
