"""Check that a converted model is loaded with the tokenizer of its source."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from attnzoo.errors import UnsupportedError
from attnzoo.hf.pretrained import load_pretrained

# Words, numbers, contractions, indentation and other scripts, which tokenizers split differently
SAMPLE = "It's 12,345.67 dollars\n\n\tif x == 10:  # naïve 你好 мир\n        return  [a_b, 'c']\r\n"


def require_same_tokens(source: Path, config: Any) -> None:
    """Raise if ``AutoTokenizer`` reads the source's files otherwise beside another config.

    It chooses the class of a tokenizer by the family in config.json: for some families whatever the
    tokenizer's own files name, as for Qwen 2 in transformers 5.24.

    Args:
        source: Folder of the model that was converted.
        config: The config of the converted model.

    Raises:
        UnsupportedError: The tokens of a sample text differ.
    """
    try:
        tokenizer = load_pretrained(AutoTokenizer, source)
    except (OSError, ValueError, KeyError):
        return  # not every model has one
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        try:
            loaded = load_pretrained(AutoTokenizer, folder)
            same = len(loaded) == len(tokenizer) and _tokens(loaded) == _tokens(tokenizer)
            found = type(loaded).__name__
        except (OSError, ValueError, KeyError, TypeError):
            same, found = False, "no tokenizer"
    if not same:
        raise UnsupportedError(
            f"Beside a {config.model_type} model, transformers loads {found} instead of this "
            f"model's {type(tokenizer).__name__}, so its tokens would be others, and nothing was "
            "written. Convert it to another class; attnzoo.convert converts the model alone"
        )


def _tokens(tokenizer: Any) -> list[int]:
    return list(tokenizer(SAMPLE)["input_ids"])
