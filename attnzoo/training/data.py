"""Text files as packed rows of tokens, with held-out documents for evaluation.

Other letters: N rows, T tokens per row.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any

import datasets
import torch
from datasets.exceptions import DatasetGenerationError
from torch import Tensor
from torch.utils.data import Dataset

from attnzoo.errors import AttnzooError
from attnzoo.evaluation.corpus import add_repeats
from attnzoo.evaluation.data import fingerprint

READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}  # others are plain text
HELD_OUT = 20  # one document in 20 is held out
MIN_REPEAT_LENGTH = 256  # tokens a row needs for two distant copies of a segment
IGNORE_INDEX = -100  # the label of tokens without a loss, as in transformers
Extract = Callable[[dict[str, Any], Path], str]


class DataError(AttnzooError):
    """The text cannot be read or used for training."""


@dataclass(frozen=True, kw_only=True)
class Rows(Dataset[dict[str, Tensor]]):
    """Dataset of packed rows; an item has the arguments of a causal model's ``forward``.

    Attributes:
        tokens: ``[N, T]``.
        positions: ``[N, T]``, from 0 in each document.
        bytes_per_token: Converts bits per token to bits per byte.
        labels: ``[N, T]``, the tokens to predict, else ``IGNORE_INDEX``; all when ``None``.
        ends: ``[N]``, tokens before the padding of each row; ``None`` without padding.
        shortened: Number of examples that were longer than a row.
    """

    tokens: Tensor
    positions: Tensor
    bytes_per_token: float
    labels: Tensor | None = None
    ends: Tensor | None = None
    shortened: int = 0

    def __len__(self) -> int:
        """N."""
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return ``input_ids``, ``position_ids`` and ``labels``, ``[T]`` each.

        The first token of a document has no label, because the token before it belongs to another
        document.
        """
        tokens, positions = self.tokens[index], self.positions[index]
        labels = tokens if self.labels is None else self.labels[index]
        labels = labels.masked_fill(positions == 0, IGNORE_INDEX)
        return {"input_ids": tokens, "position_ids": positions, "labels": labels}

    @property
    def fingerprint(self) -> str:
        """Hash of the rows."""
        labels = () if self.labels is None else (self.labels,)
        return fingerprint(self.tokens, self.positions, torch.tensor(self.bytes_per_token), *labels)

    @property
    def stream(self) -> Tensor:
        """The tokens of all rows without padding, ``[L]``."""
        if self.ends is None:
            return self.tokens.flatten()
        return torch.cat([row[:end] for row, end in zip(self.tokens, self.ends, strict=True)])


def read_documents(
    paths: Sequence[Path], column: str = "text", extract: Extract | None = None
) -> list[str]:
    """Return the documents in text, JSON lines and parquet files, and folders of them.

    Args:
        paths: Files and folders. A document is a text file, a line of JSON or a row of parquet.
        column: Field of JSON and parquet files that holds the text.
        extract: Returns the document of a row, given the file too; the column when ``None``.

    Raises:
        DataError: A path is missing or cannot be read, or there is no text.
    """
    documents: list[str] = []
    for path in list_files(paths):
        reader = READERS.get(path.suffix.lower(), "text")
        options = {"sample_by": "document"} if reader == "text" else {}
        if "::" in str(path):  # a chain of URLs to datasets
            raise DataError(f"{str(path)!r} has '::' in its name; rename it")
        try:
            with _no_download_counts():
                files = [escape(str(path))]  # names are patterns to datasets
                rows = datasets.load_dataset(
                    reader, data_files=files, split="train", streaming=True, **options
                )
            documents.extend(
                _text_of(row, column, path) if extract is None else extract(row, path)
                for row in rows
            )
        except UnicodeDecodeError as error:
            raise DataError(
                f"{str(path)!r} is not UTF-8 text (byte {error.start}: {error.reason}); convert "
                "the file, or leave it out"
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


@contextmanager
def _no_download_counts() -> Iterator[None]:
    """Context in which ``load_dataset`` sends no request to the hub for each local file.

    A request takes up to 3 seconds where the hub cannot be reached.
    """
    old = datasets.config.HF_UPDATE_DOWNLOAD_COUNTS
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    try:
        yield
    finally:
        datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = old


def list_files(paths: Iterable[Path]) -> list[Path]:
    """Return files, and recursively those in folders, without hidden files and caches.

    Raises:
        DataError: A path does not exist, or a folder contains no file.
    """
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise DataError(
                f"There is no file or folder {str(path)!r}; give --data an existing one"
            )
        if path.is_file():
            files.append(path)
            continue
        inside = sorted(p for p in _files_below(path) if _is_data(p, path))
        if not inside:
            raise DataError(f"The folder {str(path)!r} contains no file; give --data another")
        files.extend(inside)
    return files


def _files_below(folder: Path) -> Iterator[Path]:
    """Yield the files in a folder and its subfolders, links to folders included, each once."""
    seen = set()
    for root, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(root)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders.sort()
        yield from (Path(root) / name for name in names)


def _is_data(path: Path, folder: Path) -> bool:
    parts = path.relative_to(folder).parts
    return path.is_file() and not any(p.startswith(".") or p == "__pycache__" for p in parts)


def _text_of(row: dict[str, Any], column: str, path: Path) -> str:
    if not isinstance(row.get(column), str):
        fields = ", ".join(name for name, value in row.items() if isinstance(value, str)) or "none"
        raise DataError(
            f"{str(path)!r} has no text field {column!r} (its text fields: {fields}); name the "
            "field with --column"
        )
    return str(row[column])


def split_documents(documents: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return training and held-out documents: one in 20 by hash, or a single one's last tenth.

    Equal documents are on the same side.
    """
    if len(set(documents)) == 1:
        cut = len(documents[0]) * 9 // 10
        return [documents[0][:cut]], [documents[0][cut:]]
    ranked = sorted(documents, key=lambda text: hashlib.sha256(text.encode()).digest())
    held_out = set(ranked[: max(1, len(ranked) // HELD_OUT)])
    return (
        [text for text in documents if text not in held_out],
        [text for text in documents if text in held_out],
    )


def check_vocabulary(token: int, vocab_size: int) -> None:
    """Raise an error if a text's largest token is not in the model's vocabulary.

    Raises:
        DataError: The tokenizer does not match the model.
    """
    if token >= vocab_size:
        raise DataError(
            f"The tokenizer returns token {token}, but the model's vocabulary has {vocab_size} "
            "tokens; save the model's own tokenizer in its folder"
        )


def pack(documents: Sequence[str], tokenizer: Any, *, row_length: int, vocab_size: int) -> Rows:
    """Tokenize documents and concatenate them into rows of one length.

    Each document ends with the tokenizer's end token, if it has one. An incomplete last row is
    dropped.

    Raises:
        DataError: The text is shorter than a row, or the tokenizer does not match the model.
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
            f"The text has {len(tokens)} tokens, but a row needs {row_length}; give more text or "
            "shorter rows"
        )
    check_vocabulary(max(tokens), vocab_size)
    in_document = torch.cat(positions)[: count * row_length].view(count, row_length)
    # positions of a document that continues in the next row restart at 0 there
    in_row = torch.arange(row_length)
    starts = torch.where(in_document == 0, in_row, 0).cummax(1).values
    bytes_per_token = sum(len(text.encode()) for text in documents) / (
        len(tokens) - len(end) * len(documents)
    )
    return Rows(
        tokens=torch.tensor(tokens[: count * row_length]).view(count, row_length),
        positions=in_row - starts,
        bytes_per_token=bytes_per_token,
    )


def with_repeats(rows: Rows, share: float, seed: int = 0, *, per_row: int = 1) -> Rows:
    """Return rows of which a fraction has segments copied to later positions, to train recall.

    The positions of such a row are those of one document. Rows of fewer than 256 tokens are too
    short and are not changed.

    Args:
        rows: Rows of tokens.
        share: Fraction of the rows that get copies.
        seed: Draws rows and positions.
        per_row: Copied segments in such a row; a later one may overwrite a part of an earlier one.
    """
    if share <= 0 or rows.tokens.shape[1] < MIN_REPEAT_LENGTH:
        return rows
    tokens, positions = rows.tokens.clone(), rows.positions.clone()
    generator = torch.Generator().manual_seed(seed)
    repeats = add_repeats(tokens, generator, share=share)
    changed = torch.tensor([repeat is not None for repeat in repeats])
    positions[changed] = torch.arange(tokens.shape[1], dtype=positions.dtype)
    for _ in range(per_row - 1):
        copies = tokens[changed]
        add_repeats(copies, generator)
        tokens[changed] = copies
    return Rows(tokens=tokens, positions=positions, bytes_per_token=rows.bytes_per_token)
