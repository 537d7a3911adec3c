"""Text files as documents, and documents as tokens and rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from attnzoo.errors import SpecError, UnsupportedError
from attnzoo.evaluation.corpus import cut_rows, held_out_files, join
from attnzoo.evaluation.rows import Rows, pack_documents
from attnzoo.hf.pretrained import load_pretrained

LINES_OF_JSON = ".jsonl"


def read_documents(text: Path | None) -> list[str]:
    """Return the documents of a file: the lines of JSON lines (``.jsonl``), else the whole text.

    Without a file, the held-out files of the standard library are one document.

    Raises:
        SpecError: The file does not exist or cannot be read, or a line has no ``"text"``.
    """
    if text is None:
        return [join(held_out_files()).decode("utf-8", errors="replace")]
    try:
        string = text.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise SpecError(
            f"The text file {str(text)!r} is not UTF-8 text (byte {error.start}: {error.reason}); "
            "convert it"
        ) from error
    except OSError as error:
        raise SpecError(
            f"The text file {str(text)!r} cannot be read ({error.strerror or error}); give "
            "--data a file in the model's language"
        ) from error
    if text.suffix.lower() != LINES_OF_JSON:
        return [string]
    found = []
    for number, line in enumerate(string.splitlines(), 1):
        try:
            row = json.loads(line) if line.strip() else {"text": ""}
        except (ValueError, RecursionError) as error:
            raise SpecError(
                f"Line {number} of {str(text)!r} is not JSON ({error}); give JSON lines, or plain "
                "text in a file with another suffix"
            ) from error
        if not isinstance(row, dict) or not isinstance(row.get("text"), str):
            raise SpecError(
                f'Line {number} of {str(text)!r} has no text; write {{"text": "..."}} in each line'
            )
        found.append(row["text"])
    documents = [x for x in found if x.strip()]
    if not documents:
        raise SpecError(f"{str(text)!r} has no text; give a file with text in the model's language")
    return documents


def load_tokenizer(path: Path) -> Any:
    """Load the tokenizer in a model's folder.

    Raises:
        SpecError: The folder has no tokenizer that transformers can load.
    """
    try:
        return load_pretrained(AutoTokenizer, path)
    except UnsupportedError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise SpecError(
            f"The tokenizer in {str(path)!r} cannot be loaded ({reason}); save the model's "
            "tokenizer in its folder"
        ) from error


def tokenize(tokenizer: Any, text: str) -> Tensor:
    """Return the token ids of a text without special tokens, ``[N]``."""
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor(ids, dtype=torch.long)


def string_tokenizer(path: Path) -> Callable[[str], Tensor]:
    """Return a function from a string to its tokens, by the tokenizer in a model's folder."""
    return partial(tokenize, load_tokenizer(path))


def first_documents(text: Path | None, characters: int) -> list[str]:
    """Return the first documents of a file, ``characters`` long in total; the last one is cut."""
    found = []
    for document in read_documents(text):
        if characters > 0:
            found.append(document[:characters])
        characters -= len(document)
    return found


def tokenized_rows(
    encode: Callable[[str], Tensor],
    text: Path | None,
    count: int,
    length: int,
    generator: torch.Generator,
) -> tuple[list[Tensor], Rows]:
    """Return the documents of a text as tokens, and rows of them to evaluate on.

    Rows are drawn from one document, or packed with whole ones.

    Raises:
        SpecError: The text cannot be read, or is shorter than a row.
    """
    strings = read_documents(text)
    documents = [encode(x) for x in strings]
    size = sum(len(x.encode()) for x in strings) / sum(map(len, documents))
    try:
        if len(documents) == 1:
            return documents, cut_rows(documents, count, length, generator, size)
        return documents, pack_documents(documents, count, length, size)
    except ValueError as error:
        raise SpecError(f"Rows of {length} tokens cannot be made: {error}") from None
