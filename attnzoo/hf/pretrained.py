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

from huggingface_hub.errors import StrictDataclassError

from attnzoo.errors import AttnzooError, SpecError, UnsupportedError, short_repr

# What transformers, peft, tokenizers and torch raise while they read files with unexpected contents
UNREADABLE = (
    *(ValueError, TypeError, LookupError, AttributeError, ArithmeticError, ImportError),
    *(RuntimeError, EOFError, StrictDataclassError),  # and a RuntimeError of torch: no memory
)


def load_pretrained(cls: Any, path: str | Path, **options: Any) -> Any:
    """Return ``cls.from_pretrained(path, **options)``, for any class that has this method."""
    with explain_load_errors(path):
        return cls.from_pretrained(path, trust_remote_code=False, **options)


def build_model(cls: Any, config: Any, **options: Any) -> Any:
    """Return a model of a config, with new weights."""
    with explain_load_errors(config.name_or_path):
        if not hasattr(cls, "from_config"):
            return cls._from_config(config, **options)
        return cls.from_config(config, trust_remote_code=False, **options)


@contextmanager
def explain_load_errors(path: str | Path) -> Iterator[None]:
    """Context in which errors about what a folder holds say what to do instead."""
    name = short_repr(str(path))
    try:
        yield
    except AttnzooError:
        raise
    except UnpicklingError as error:
        raise SpecError(
            f"The weights in {name} are a pickle that holds more than tensors, which could run "
            "code, so they are not read; save them as safetensors"
        ) from error
    except UNREADABLE as error:
        if "trust_remote_code" in str(error):
            raise UnsupportedError(
                f"{name} needs Python code of its folder, or of a repository that it names "
                "(auto_map), and attnzoo runs none. If you trust that code, load the model in "
                "Python with trust_remote_code=True, and swap it there: attnzoo.swap(model, ...)"
            ) from None
        raise SpecError(
            f"{name} cannot be loaded: {type(error).__name__}: {str(error).strip()}. A file in the "
            "folder is damaged, or needs another version of transformers"
        ) from error
