"""Documents as packed rows of tokens.

Rows are files that are mapped into memory, in the cache of ``datasets``: all processes and later
runs share them, and a process holds the rows only that it reads. Other letters: N rows, T tokens
per row.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from filelock import FileLock

from attnzoo.evaluation.corpus import MIN_REPEAT_LENGTH, add_repeats
from attnzoo.evaluation.rows import Rows
from attnzoo.optional_packages import OptionalPackage
from attnzoo.training.documents import DataError, progress_bars

if TYPE_CHECKING:
    import datasets
else:
    datasets = OptionalPackage("datasets", extra="train")


FORMAT = 2  # of the files of rows
DOCUMENTS_AT_ONCE = 1000
ROWS_AT_ONCE = 4096
# Documents from which on a tokenizer in Python runs in several processes (fast ones have threads),
# and shows its progress
MANY_DOCUMENTS = 4000
COLUMNS = ("input_ids", "bytes")  # of tokenized documents


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


def tokenizer_key(tokenizer: Any) -> str:
    """Return a text that is equal for tokenizers which return equal tokens."""
    fast = getattr(tokenizer, "is_fast", False)
    own = tokenizer.backend_tokenizer.to_str() if fast else sorted(tokenizer.get_vocab().items())
    return repr((type(tokenizer).__qualname__, own))


def token_features() -> datasets.Features:
    """Return the types of :data:`COLUMNS`."""
    types = (datasets.List(datasets.Value("int32")), datasets.Value("int64"))
    return datasets.Features(zip(COLUMNS, types, strict=True))


def tokens_of(texts: list[str], tokenizer: Any) -> dict[str, Any]:
    """Return the columns :data:`COLUMNS` of documents."""
    return {
        "input_ids": tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"],
        "bytes": [len(text.encode()) for text in texts],
    }


def tokenize(documents: datasets.Dataset, tokenizer: Any) -> datasets.Dataset:
    """Return the tokens of each document, ``input_ids``, and its ``bytes`` of text."""
    if set(COLUMNS) <= set(documents.column_names):  # tokenized when they were read
        return documents.select_columns(list(COLUMNS))
    fast = getattr(tokenizer, "is_fast", False)
    key = repr((documents._fingerprint, tokenizer_key(tokenizer), FORMAT))

    many = len(documents) >= MANY_DOCUMENTS
    with progress_bars(many):
        return documents.map(
            partial(tokens_of, tokenizer=tokenizer),
            input_columns="text",
            batched=True,
            batch_size=DOCUMENTS_AT_ONCE,
            remove_columns=documents.column_names,
            features=token_features(),
            num_proc=os.cpu_count() if many and not fast else None,
            new_fingerprint=hashlib.sha256(key.encode()).hexdigest()[:16],
            desc="tokenizing",
        )


def pack(
    documents: datasets.Dataset | Sequence[str],
    tokenizer: Any,
    *,
    row_length: int,
    vocab_size: int,
) -> Rows:
    """Tokenize documents and concatenate them into rows of one length, in the cache.

    Each document ends with the tokenizer's end token, if it has one. An incomplete last row is
    dropped.

    Raises:
        DataError: The text is shorter than a row, or the tokenizer does not match the model.
    """
    if not isinstance(documents, datasets.Dataset):
        documents = datasets.Dataset.from_dict({"text": list(documents)})
    tokenized = tokenize(documents, tokenizer)
    write = partial(_write_rows, tokenized, tokenizer.eos_token_id, row_length)
    key = (tokenized._fingerprint, tokenizer.eos_token_id, row_length)
    rows, found = _stored(key, write)
    check_vocabulary(found["largest"], vocab_size)
    return rows


def _stored(key: tuple[Any, ...], write: Callable[[Path], dict[str, Any]]) -> tuple[Rows, Any]:
    """Return rows of the cache and what is known of them; ``write`` makes them once.

    Args:
        key: Names the rows.
        write: Writes ``tokens.npy``, ``positions.npy`` and, if rows do not begin with documents,
            ``starts.npy`` to a folder, and returns ``bytes_per_token`` and what else is known.
    """
    name = hashlib.sha256(repr((FORMAT, *key)).encode()).hexdigest()[:32]
    cache = Path(datasets.config.HF_DATASETS_CACHE) / "attnzoo"
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / name
    with FileLock(cache / f"{name}.lock"):
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=cache, ignore_cleanup_errors=True) as temporary:
                found = write(Path(temporary))
                Path(temporary, "rows.json").write_text(json.dumps(found), "utf-8")
                os.rename(temporary, folder)
    found = json.loads((folder / "rows.json").read_text("utf-8"))
    tokens, positions = (
        torch.from_numpy(np.load(folder / f"{x}.npy", mmap_mode="c"))
        for x in ("tokens", "positions")
    )
    starts = folder / "starts.npy"
    rows = Rows(
        tokens=tokens,
        positions=positions,
        bytes_per_token=found["bytes_per_token"],
        starts=torch.from_numpy(np.load(starts)) if starts.exists() else None,
    )
    return rows, found


def _write_rows(
    documents: datasets.Dataset, end: int | None, row_length: int, folder: Path
) -> dict[str, Any]:
    """Write the rows of tokenized documents to a folder."""
    ends = 0 if end is None else 1
    blocks = documents.with_format("arrow")
    sizes = [_count(x["input_ids"].combine_chunks()) for x in _batches(blocks)]
    count = sum(sizes) + ends * len(documents)
    shape = (count // row_length, row_length)
    if not shape[0]:
        raise DataError(
            f"The text has {count} tokens, but a row needs {row_length}; give more text or shorter "
            "rows"
        )
    tokens, positions = (
        np.lib.format.open_memmap(folder / f"{x}.npy", "w+", np.int32, shape)
        for x in ("tokens", "positions")
    )
    at = text_bytes = largest = 0
    starts = []
    for block in _batches(blocks):
        ids, in_document = _concatenate(block["input_ids"].combine_chunks(), end)
        stop = min(at + len(ids), tokens.size)
        starts.append(at + np.flatnonzero(in_document[: stop - at] == 0))
        tokens.reshape(-1)[at:stop] = ids[: stop - at]
        positions.reshape(-1)[at:stop] = in_document[: stop - at]
        at, largest = stop, max(largest, int(ids.max(initial=0)))
        text_bytes += int(block["bytes"].to_numpy().sum())
    np.save(folder / "starts.npy", np.concatenate(starts))
    in_row = np.arange(row_length, dtype=np.int32)
    for first in range(0, len(positions), ROWS_AT_ONCE):
        rows = positions[first : first + ROWS_AT_ONCE]
        # positions of a document that continues in the next row restart at 0 there
        rows[:] = in_row - np.maximum.accumulate(np.where(rows == 0, in_row, 0), 1)
    return {"bytes_per_token": text_bytes / sum(sizes), "largest": largest}


def _batches(documents: datasets.Dataset) -> Any:
    return documents.iter(DOCUMENTS_AT_ONCE)


def _count(documents: Any) -> int:
    """Return the tokens of documents, which may be a part of a larger array."""
    offsets = documents.offsets
    return int(offsets[-1].as_py() - offsets[0].as_py())


def _concatenate(documents: Any, end: int | None) -> tuple[Any, Any]:
    """Return the tokens of documents in one row, and their positions in their document."""
    offsets = documents.offsets.to_numpy()
    ids = documents.values.to_numpy()[offsets[0] : offsets[-1]]
    lengths = np.diff(offsets)
    if end is not None:
        ids = np.insert(ids, offsets[1:] - offsets[0], end)
        lengths = lengths + 1
    starts = np.cumsum(lengths) - lengths
    return ids, np.arange(len(ids)) - np.repeat(starts, lengths)


def with_repeats(rows: Rows, share: float, seed: int = 0, *, per_row: int = 1) -> Rows:
    """Return rows of which a fraction has segments copied to later positions, to train recall.

    Both copies are in one document. Rows whose documents have fewer than 256 tokens are not
    changed.

    Args:
        rows: Rows of tokens.
        share: Fraction of the rows that get copies.
        seed: Draws rows and positions.
        per_row: Copied segments in such a row; a later one may overwrite a part of an earlier one.
    """
    if share <= 0 or rows.length < MIN_REPEAT_LENGTH:
        return rows

    def write(folder: Path) -> dict[str, Any]:
        tokens, positions = (
            torch.from_numpy(
                np.lib.format.open_memmap(folder / f"{name}.npy", "w+", x.dtype, x.shape)
            )
            for name, x in (("tokens", rows.tokens.numpy()), ("positions", rows.positions.numpy()))
        )
        tokens.copy_(rows.tokens)
        positions.copy_(rows.positions)
        written = replace(rows, tokens=tokens, positions=positions)
        generator = torch.Generator().manual_seed(seed)
        repeats = add_repeats(written, generator, share=share)
        changed = [i for i, repeat in enumerate(repeats) if repeat is not None]
        for _ in range(per_row - 1):
            for i in changed:
                add_repeats(written.select(slice(i, i + 1)), generator)
        return {"bytes_per_token": rows.bytes_per_token}

    return _stored((rows.fingerprint, share, seed, per_row, "within documents"), write)[0]
