"""Text as documents, tokens and rows: files, and source of the Python standard library.

The embedded model is trained on one split of this source and evaluated on files of the other. Half
of the training rows, and all recall rows, contain one segment twice. A model cannot predict the
second copy without attending beyond its window, so the loss on the copy shows whether an
approximation keeps long-range recall.

The held-out files are in the package, as Python 3.11.7 has them: those of the Python that runs
would give other numbers (``tools/python_text.py``).
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from attnzoo.errors import SpecError, UnsupportedError
from attnzoo.evaluation.rows import Rows, pack_documents, too_short
from attnzoo.hf.pretrained import load_pretrained

VERSION = "3.11.7"  # of Python
SOURCES = Path(__file__).parents[1] / "assets" / f"python-{VERSION}" / "sources.zip"
HELD_OUT_PERCENT = 5
MIN_REPEAT_LENGTH = 256  # tokens a document needs for two distant copies of a segment


def is_held_out(name: str) -> bool:
    """Whether a file is in the held-out split; depends on its name only, so all machines agree."""
    return (
        int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 100 < HELD_OUT_PERCENT
    )


@cache
def source_files() -> dict[str, bytes]:
    """Return the files in the package by their names, such as ``"email/parser.py"``, in order.

    They are the held-out files and those of four packages (``tools/python_text.py``).
    """
    with zipfile.ZipFile(SOURCES) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def held_out_files() -> list[bytes]:
    """Return the contents of the held-out files, sorted by name."""
    return [content for name, content in source_files().items() if is_held_out(name)]


def join(files: Iterable[bytes]) -> bytes:
    """Concatenate the contents of files, separated by a newline."""
    return b"\n".join(files)


MIN_DISTANCE = 96  # tokens between the two copies of a repeat
BYTE_OFFSET = 3  # ByT5's tokens 0, 1, 2 are pad, end and unknown; byte b is token b + 3


def byte_tokens(data: bytes) -> Tensor:
    """Return the tokens of ``data`` under ByT5's tokenizer, ``[N]``, without the end token."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long() + BYTE_OFFSET


@dataclass(frozen=True, kw_only=True)
class Repeat:
    """A segment that occurs twice in a row: ``length`` tokens at ``first`` and at ``second``."""

    first: int
    second: int
    length: int


def place_repeat(row_length: int, generator: torch.Generator) -> Repeat:
    """Draw a repeat with at least :data:`MIN_DISTANCE` tokens between the two copies."""

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    longest = min(160, (row_length - MIN_DISTANCE) // 3)
    length = draw(min(48, longest), longest)
    first = draw(0, row_length - 2 * length - MIN_DISTANCE)
    second = draw(first + length + MIN_DISTANCE, row_length - length)
    return Repeat(first=first, second=second, length=length)


def cut_rows(
    documents: Sequence[Tensor],
    count: int,
    row_length: int,
    generator: torch.Generator,
    bytes_per_token: float = 1.0,
) -> Rows:
    """Return rows of one document each, cut at random positions of the documents that are longer.

    Args:
        documents: Tokens of each; one for a text.
        count: N.
        row_length: T.
        generator: Draws the positions.
        bytes_per_token: As in :class:`Rows`.

    Raises:
        ValueError: No document is as long as a row.
    """
    long = [x for x in documents if len(x) >= row_length]
    if not long:
        raise ValueError(too_short(max(map(len, documents), default=0), row_length))
    sizes = torch.tensor([len(x) - row_length + 1 for x in long])
    ends = sizes.cumsum(0)
    found = []
    for place in torch.randint(0, int(ends[-1]), (count,), generator=generator):
        chosen = int(torch.searchsorted(ends, place, right=True))
        start = int(place - ends[chosen] + sizes[chosen])
        found.append(long[chosen][start : start + row_length])
    return Rows.of_documents(torch.stack(found), bytes_per_token)


def add_repeats(
    rows: Rows, generator: torch.Generator, *, share: float = 1.0, least: int = MIN_REPEAT_LENGTH
) -> list[Repeat | None]:
    """Write one repeat into a fraction of the rows, in place, within the longest document of each.

    Args:
        rows: Rows whose tokens are modified.
        generator: Draws the positions.
        share: Fraction of the rows that get a repeat.
        least: Tokens that a document needs for a repeat; rows without one stay as they are.

    Returns:
        The repeat of each row; ``None`` for a row without one.
    """
    longest: dict[int, slice] = {}
    for i, own in rows.places():
        if i not in longest or own.stop - own.start > longest[i].stop - longest[i].start:
            longest[i] = own
    repeats: list[Repeat | None] = [None] * len(rows)
    for i, own in longest.items():
        if share < 1.0 and float(torch.rand((), generator=generator)) >= share:
            continue
        document = rows.tokens[i, own]
        if len(document) >= least:
            repeat = place_repeat(len(document), generator)
            document[repeat.second : repeat.second + repeat.length] = document[
                repeat.first : repeat.first + repeat.length
            ].clone()
            repeats[i] = replace(
                repeat, first=repeat.first + own.start, second=repeat.second + own.start
            )
    return repeats


CHARACTERS = 2**20  # of a text that are tokenized; rows are drawn from them
LINES_OF_JSON = ".jsonl"


def read_documents(text: Path | None) -> list[str]:
    """Return the documents of a file: the lines of JSON lines (``.jsonl``), else the whole text.

    Without a file, the held-out files of the standard library are one document.

    Raises:
        SpecError: The file cannot be read, has no text, or a line has no ``"text"``.
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
    is_json, found = text.suffix.lower() == LINES_OF_JSON, []
    for number, line in enumerate(string.splitlines(), 1) if is_json else ():
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
    documents = [x for x in (found if is_json else [string]) if x.strip()]
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


def first_documents(tokenizer: Any, text: Path | None) -> list[Tensor]:
    """Return the tokens of a file's first ``CHARACTERS`` characters, by document."""
    found, characters = [], CHARACTERS
    for document in read_documents(text):
        if characters > 0:
            found.append(tokenize(tokenizer, document[:characters]))
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
