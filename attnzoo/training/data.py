"""Text on disk as rows of tokens: packed to length, with documents held out to be judged on.

Letters: N rows, T tokens of a row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import torch
from datasets.exceptions import DatasetGenerationError
from torch import Tensor
from torch.utils.data import Dataset

from attnzoo.corpus import add_repeats
from attnzoo.errors import AttnzooError

READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}  # all else is plain text
HELD_OUT = 20  # one document in so many is kept to judge on
REPEATS_FROM = 256  # tokens of a row that has room for a segment twice, far enough apart
IGNORED = -100  # a label that no loss counts, as transformers has it


class DataError(AttnzooError):
    """The text that was given cannot be used."""


@dataclass(frozen=True, kw_only=True)
class Rows(Dataset[dict[str, Tensor]]):
    """Rows of packed tokens; a row gives what a model's forward takes.

    Attributes:
        tokens: ``[N, T]``.
        positions: ``[N, T]``, counted anew from 0 where another document begins.
        bytes_per_token: Of the text, to turn bits per token into bits per byte.
    """

    tokens: Tensor
    positions: Tensor
    bytes_per_token: float

    def __len__(self) -> int:
        """N."""
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return ``input_ids``, ``position_ids`` and ``labels``, ``[T]`` each.

        The first token of a document is not predicted: what stands before it is another one.
        """
        tokens, positions = self.tokens[index], self.positions[index]
        labels = tokens.masked_fill(positions == 0, IGNORED)
        return {"input_ids": tokens, "position_ids": positions, "labels": labels}

    @property
    def fingerprint(self) -> str:
        """Name these rows by what is in them."""
        return hashlib.sha256(self.tokens.numpy().tobytes()).hexdigest()[:16]


def read_documents(paths: Sequence[Path], column: str = "text") -> list[str]:
    """Read text files, JSON lines and parquet, and folders of them; sorted by name.

    Args:
        paths: Files and folders. A text file is one document, a line of JSON or a row of parquet
            another.
        column: Which field of JSON and parquet is the text.

    Raises:
        DataError: Something is missing, cannot be read, or there is no text.
    """
    documents: list[str] = []
    for path in files_in(paths):
        reader = READERS.get(path.suffix.lower(), "text")
        options = {"sample_by": "document"} if reader == "text" else {}
        try:
            rows = datasets.load_dataset(
                reader, data_files=[str(path)], split="train", streaming=True, **options
            )
            documents.extend(_text_of(row, column, path) for row in rows)
        except UnicodeDecodeError as error:
            raise DataError(
                f"{str(path)!r} is not UTF-8 text (byte {error.start}: {error.reason}); convert "
                "it, or leave it out"
            ) from None
        except (DatasetGenerationError, OSError, ValueError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"{str(path)!r} cannot be read as {reader}: {error}") from error
    documents = [text for text in documents if text.strip()]
    if not documents:
        raise DataError(
            f"There is no text in {', '.join(map(str, paths))}; give files or folders of .txt, "
            ".jsonl or .parquet"
        )
    return documents


def files_in(paths: Iterable[Path]) -> list[Path]:
    """List the files, those of folders at any depth included, but for hidden ones and caches.

    Raises:
        DataError: A path does not exist, or a folder holds no file.
    """
    found: list[Path] = []
    for path in paths:
        if not path.exists():
            raise DataError(f"There is no file or folder {str(path)!r}")
        inside = (
            [path] if path.is_file() else sorted(p for p in path.rglob("*") if _is_data(p, path))
        )
        if not inside:
            raise DataError(f"The folder {str(path)!r} holds no file")
        found.extend(inside)
    return found


def _is_data(path: Path, folder: Path) -> bool:
    parts = path.relative_to(folder).parts
    return path.is_file() and not any(p.startswith(".") or p == "__pycache__" for p in parts)


def _text_of(row: dict[str, Any], column: str, path: Path) -> str:
    if not isinstance(row.get(column), str):
        fields = ", ".join(name for name, value in row.items() if isinstance(value, str)) or "none"
        raise DataError(
            f"{str(path)!r} has no text under {column!r} (fields of text: {fields}); name the "
            "field with --column"
        )
    return str(row[column])


def split_documents(documents: Sequence[str]) -> tuple[list[str], list[str]]:
    """Hold out every twentieth document, by what is in it; of a single one, its last tenth."""
    if len(documents) == 1:
        cut = len(documents[0]) * 9 // 10
        return [documents[0][:cut]], [documents[0][cut:]]
    ranked = sorted(documents, key=lambda text: hashlib.sha256(text.encode()).digest())
    held_out = set(ranked[: max(1, len(ranked) // HELD_OUT)])
    return (
        [text for text in documents if text not in held_out],
        [text for text in documents if text in held_out],
    )


def refuse_unknown(token: int, vocab_size: int) -> None:
    """Refuse the largest token of a text where the model has no row for it.

    Raises:
        DataError: The tokenizer's tokens are not the model's.
    """
    if token >= vocab_size:
        raise DataError(
            f"The tokenizer gives token {token}, but the model knows {vocab_size} only; the "
            "tokenizer belongs to another model"
        )


def pack(documents: Sequence[str], tokenizer: Any, *, row_length: int, vocab_size: int) -> Rows:
    """Tokenize documents and put them into rows of one length, one after the other.

    Each ends with the tokenizer's end token, if it has one. What does not fill a last row is left
    out.

    Raises:
        DataError: There is less text than a row, or the tokenizer's tokens are not the model's.
    """
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    tokens: list[int] = []
    positions: list[Tensor] = []
    for text in documents:
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] + end
        tokens.extend(ids)
        positions.append(torch.arange(len(ids)))
    count = len(tokens) // row_length
    if not count:
        raise DataError(
            f"The text has {len(tokens)} tokens, but a row takes {row_length}; give more text, or "
            "shorter rows"
        )
    refuse_unknown(max(tokens), vocab_size)
    within = torch.cat(positions)[: count * row_length].view(count, row_length)
    # a document that goes on in the next row begins anew there: its start is out of sight
    place = torch.arange(row_length)
    begins = torch.where(within == 0, place, 0).cummax(1).values
    size = sum(len(text.encode()) for text in documents) / (len(tokens) - len(end) * len(documents))
    return Rows(
        tokens=torch.tensor(tokens[: count * row_length]).view(count, row_length),
        positions=place - begins,
        bytes_per_token=size,
    )


def with_repeats(rows: Rows, share: float, seed: int = 0) -> Rows:
    """Write a segment a second time into a share of the rows, so that recall can be learned.

    Such a row is one document afterwards. Rows below 256 tokens are too short and stay as they are.
    """
    if share <= 0 or rows.tokens.shape[1] < REPEATS_FROM:
        return rows
    tokens, positions = rows.tokens.clone(), rows.positions.clone()
    repeats = add_repeats(tokens, torch.Generator().manual_seed(seed), share=share)
    for place, repeat in zip(positions, repeats, strict=True):
        if repeat is not None:
            place.copy_(torch.arange(len(place)))
    return Rows(tokens=tokens, positions=positions, bytes_per_token=rows.bytes_per_token)
