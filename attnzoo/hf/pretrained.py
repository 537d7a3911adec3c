"""Load what a folder holds, without running code of the folder.

A config.json or tokenizer_config.json may name classes in Python files beside it, or in another
repository (``auto_map``). Unless the argument ``trust_remote_code`` is False, transformers asks on
standard input whether to run them. Every model, config, tokenizer and processor is loaded here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from attnzoo.errors import SpecError, UnsupportedError, short_repr


def load_pretrained(cls: Any, path: str | Path, **options: Any) -> Any:
    """Return ``cls.from_pretrained(path, **options)``, for any class that has this method.

    Raises:
        UnsupportedError: It needs code of the folder, or code that the folder names.
        SpecError: Weights in pickle's format hold more than tensors.
    """
    with _refuse_code(path):
        return cls.from_pretrained(path, trust_remote_code=False, **options)


def build_model(cls: Any, config: Any, **options: Any) -> Any:
    """Return a model of a config, with new weights.

    Args:
        cls: A model class, or an auto class, which selects one.
        config: The config; it may have been read from a folder.
        options: Arguments of the auto class's ``from_config``.

    Raises:
        UnsupportedError: The config names a class in a folder's code.
    """
    if not hasattr(cls, "from_config"):
        return cls._from_config(config, **options)
    with _refuse_code(config.name_or_path):
        return cls.from_config(config, trust_remote_code=False, **options)


@contextmanager
def _refuse_code(path: str | Path) -> Iterator[None]:
    """Context in which errors about a folder's code say what to do instead."""
    try:
        yield
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise UnsupportedError(
            f"{short_repr(str(path))} needs Python code of its folder, or of a repository that it "
            "names (auto_map), and attnzoo runs none. If you trust that code, load the model in "
            "Python with trust_remote_code=True, and swap it there: attnzoo.swap(model, ...)"
        ) from None
    except UnpicklingError as error:
        raise SpecError(
            f"The weights in {short_repr(str(path))} are a pickle that holds more than tensors, "
            "which could run code, so they are not read; save them as safetensors"
        ) from error
