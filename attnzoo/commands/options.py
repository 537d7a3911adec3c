"""Options and arguments of several commands: a model, attentions, data.

``--attention`` and the values of ``--layers`` are ``NAME`` or ``NAME:OPTION=VALUE,...``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from attnzoo.errors import ConfigError, SpecError

HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*(@[\w./-]+)?")
# Weights in formats that transformers reads only when it is asked to
OTHER_FORMATS = ("*.h5", "*.msgpack", "*.ot", "*.onnx*", "*.gguf", "*.tflite", "*.mlpackage/*")
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
UNITS = {
    **{"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "k": 2**10, "m": 2**20},
    **{"kb": 10**3, "mb": 10**6, "gb": 10**9},
}


def model_folder(name: str | Path) -> Path:
    """Return the folder of a model, downloaded if ``name`` is an id such as ``"org/model"``.

    Args:
        name: A folder, ``embedded``, ``embedded-long``, ``ORG/MODEL`` or ``ORG/MODEL@REVISION``. A
            folder comes first, one of the name ``embedded`` too.

    Raises:
        BadParameter: ``name`` is no folder, and the Hub has no such model or cannot be reached.
    """
    from attnzoo.evaluation.models import embedded_model_path, is_embedded

    name, folder = str(name), Path(name)
    if not folder.exists():
        if is_embedded(name):
            return embedded_model_path(name)
        if HUB_ID.fullmatch(name):
            return _download(name)
    # A relative path ./embedded would be read as the name; what reads the folder refuses one
    # without a model
    return folder.absolute() if is_embedded(str(folder)) else folder


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    model, _, revision = name.partition("@")
    try:
        for ignored in (OTHER_FORMATS + PICKLED, OTHER_FORMATS):
            found = snapshot_download(model, revision=revision or None, ignore_patterns=[*ignored])
            if any(Path(found).glob("*.safetensors")):
                break
    except (HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise typer.BadParameter(
            f"{name!r} is no folder, and no model of the Hugging Face Hub that can be read: "
            f"{str(error).strip().splitlines()[0]} Give the folder of a saved model, or check the "
            "id, the connection and, for a gated model, `hf auth login`"
        ) from error
    return Path(found)


def argument_of(folder: Path) -> str:
    """Return a model's folder as a command-line argument: the name of an embedded model."""
    from attnzoo.evaluation.models import embedded_name

    name = embedded_name(folder)
    return str(folder) if name is None or Path(name).exists() else name


def spec_of(attention: str, layers: list[str] | None = None, else_: str | None = None) -> Any:
    """Return the spec of the command line; like a saved spec, it cannot import code."""
    from attnzoo.spec import AttentionSpec, parse_backend, split_pair

    one_layer = "--layers takes LAYERS=NAME, such as 0-1=flash"
    whole = "--attention takes NAME:OPTION=VALUE,..., such as linear:feature_map=elu+1,window=8"
    backend = parse_backend(attention, whole)
    pairs = dict(split_pair(text, one_layer) for text in layers or ())
    return AttentionSpec.from_dict({**backend, "layers": pairs, "else": else_})


def specs_of(attention: list[str], presets: Callable[[list[str]], list[Any]]) -> list[Any] | None:
    """Return the specs of an ``--attention`` that takes several; ``None`` for ``all``.

    Args:
        attention: Values of the option: names separated by commas, or one name with options.
        presets: Returns the specs of names without options.
    """
    found: list[Any] = []
    for text in attention:
        names = split(text)
        if "," in text.partition(":")[0] and ":" in text:
            raise SpecError(
                f"--attention {text} mixes names and options; give several --attention, each names "
                "separated by commas, or one name with its options"
            )
        if ":" in text:
            found.append(spec_of(text))
        elif "all" in names:
            return None
        elif names:
            found += presets(names)
    if not found:
        raise SpecError("--attention names no backend; give all, or names such as linear,reformer")
    return found


def split(text: str) -> list[str]:
    """Return the parts of a list that is separated by commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


def parse_size(text: str, option: str) -> int:
    """Return the number in a text with a unit, such as 64KiB or 1.5MiB, or 16k for tokens.

    Args:
        text: The text.
        option: Name of the option, for the error.

    Raises:
        ConfigError: The text is not a size above 0.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    size = int(float(found[1]) * UNITS[found[2]]) if found and found[2] in UNITS else 0
    if size < 1:
        raise ConfigError(f"{option} must be a size such as 1MiB, 64KiB or 16k, got {text!r}")
    return size


Model = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL",
        parser=model_folder,
        help="folder of a saved model, its Hub id (ORG/MODEL or ORG/MODEL@REVISION), embedded or "
        "embedded-long",
    ),
]
Attentions = Annotated[
    list[str] | None, typer.Option(help="all, NAME,NAME or NAME:OPTION=VALUE,... (repeatable)")
]
Data = Annotated[
    list[Path],
    typer.Option(
        help="text, .jsonl or .parquet file, folder of them or of a saved data set, or the id of a "
        "data set of the Hub, owner/name or owner/name:config (repeatable)"
    ),
]
DatasetTextField = Annotated[
    str, typer.Option(help="field of JSON and parquet files and data sets with the text")
]
MaxTokens = Annotated[
    str | None,
    typer.Option(
        help="read only as much of --data as has so many tokens, such as 300M; data sets of the "
        "Hub are then streamed, and not downloaded whole"
    ),
]
