"""The argument of commands that names a model: a folder, or an id on the Hugging Face Hub."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*(@[\w./-]+)?")
# Weights in formats that transformers reads only when it is asked to
OTHER_FORMATS = ("*.h5", "*.msgpack", "*.ot", "*.onnx*", "*.gguf", "*.tflite", "*.mlpackage/*")
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def model_folder(name: str) -> Path:
    """Return the folder of a model, downloaded if ``name`` is an id such as ``"org/model"``.

    Args:
        name: A folder, ``embedded``, ``embedded-long``, ``ORG/MODEL`` or ``ORG/MODEL@REVISION``. A
            folder comes first, one of the name ``embedded`` too.

    Raises:
        BadParameter: ``name`` is no folder, and the Hub has no such model or cannot be reached.
    """
    if _is_embedded(name):
        from attnzoo.evaluation.models import embedded_model_path

        return embedded_model_path(name)
    folder = Path(name)
    if folder.exists() or not HUB_ID.fullmatch(name):
        # A relative path ./embedded would be read as the name; what reads it refuses a folder
        # without a model
        return folder.absolute() if _is_embedded_name(folder.name) else folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    model, _, revision = name.partition("@")

    def download(ignored: tuple[str, ...]) -> Path:
        return Path(snapshot_download(model, revision=revision or None, ignore_patterns=[*ignored]))

    try:
        folder = download(OTHER_FORMATS + PICKLED)
        if not any(folder.glob("*.safetensors")):
            folder = download(OTHER_FORMATS)
    except (HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise typer.BadParameter(
            f"{name!r} is no folder, and no model of the Hugging Face Hub that can be read: "
            f"{str(error).strip().splitlines()[0]} Give the folder of a saved model, or check the "
            "id, the connection and, for a gated model, `hf auth login`"
        ) from error
    return folder


def model_name(name: str) -> str:
    """Return the name of an embedded model as it is, and the folder of any other model."""
    return name if _is_embedded(name) else str(model_folder(name))


def argument_of(folder: Path) -> str:
    """Return a model's folder as a command-line argument: the name of an embedded model."""
    from attnzoo.evaluation.models import embedded_name

    name = embedded_name(folder)
    return str(folder) if name is None or Path(name).exists() else name


def _is_embedded(name: str) -> bool:
    """Return whether this names a model that ships with the package, and no folder here."""
    return _is_embedded_name(name) and not Path(name).exists()


def _is_embedded_name(name: str) -> bool:
    if not name.startswith("embedded"):
        return False
    from attnzoo.evaluation.models import is_embedded

    return is_embedded(name)


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        parser=model_name,
        help="folder or Hub id of a saved model; default: embedded",
    ),
]
ModelArgument = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL",
        parser=model_folder,
        help="folder of a saved model, its Hub id (ORG/MODEL or ORG/MODEL@REVISION), embedded or "
        "embedded-long",
    ),
]
