"""The first documents of large data sets: as many as have a number of tokens, read as a stream.

Documents are tokenized while they are read, and text and tokens are kept in the cache of
``datasets``, where all processes and later runs find them. Of a data set of the Hub, no more is
downloaded than is read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnzoo.optional_packages import OptionalPackage
from attnzoo.training import data
from attnzoo.training.documents import (
    DataError,
    document_of,
    entry_of,
    explain_hub_errors,
    file_versions,
    is_hub_id,
    list_files,
    mixture_options,
    no_text,
    progress_bars,
    rows_in,
    saved_data_set,
    split_weight,
    text_features,
    unwrap_generation_errors,
)

if TYPE_CHECKING:
    import datasets
else:
    datasets = OptionalPackage("datasets", extra="train")

AT_ONCE = 256  # documents that are tokenized together
MANY_TOKENS = 10**7  # a progress bar is shown from this number on


def stream_documents(
    paths: Sequence[Path | str], column: str, tokenizer: Any, max_tokens: int
) -> datasets.Dataset:
    """Return the first documents that have so many tokens together, or all if they have fewer.

    Args:
        paths: As those of :func:`attnzoo.training.documents.read_documents`, in the same order;
            with weights, a mixture.
        column: Field of JSON files, parquet files and data sets that holds the text.
        tokenizer: Counts the tokens, without special ones.
        max_tokens: Number of tokens that the documents have at least.

    Returns:
        A data set with the columns ``text``, ``digest``, ``input_ids`` and ``bytes``.

    Raises:
        DataError: A path is missing or cannot be read, or there is no text.
    """
    weights = dict(map(split_weight, paths))
    if any(weight is not None for weight in weights.values()):
        mixture: dict[str, Any] | None = mixture_options(weights)
        ordered = list(weights)
    else:
        mixture = None
        ordered = sorted(weights, key=_is_data_set)  # files first, as in read_documents
    versions = [_version(Path(path)) for path in ordered]
    key = (versions, mixture, column, max_tokens, data.tokenizer_key(tokenizer), data.FORMAT)

    def read() -> Iterator[dict[str, Any]]:
        count = 0
        texts = _mixed(ordered, column, mixture) if mixture else _joined(ordered, column)
        while block := list(islice(texts, AT_ONCE)):
            tokens = data.tokens_of(block, tokenizer)
            for text, ids, size in zip(block, tokens["input_ids"], tokens["bytes"], strict=True):
                yield {**entry_of(text), "input_ids": ids, "bytes": size}
                count += len(ids)
                if count >= max_tokens:
                    return
        if not count:
            raise no_text(paths)

    with unwrap_generation_errors(), progress_bars(max_tokens >= MANY_TOKENS):
        return datasets.Dataset.from_generator(
            read,
            features=datasets.Features({**text_features(), **data.token_features()}),
            fingerprint=hashlib.sha256(repr(key).encode()).hexdigest()[:16],
        )


def _is_data_set(path: str) -> bool:
    names = ("state.json", "dataset_dict.json")
    return is_hub_id(Path(path)) or any((Path(path) / name).is_file() for name in names)


def _version(path: Path) -> Any:
    """Return what changes if the documents of a path change."""
    if is_hub_id(path):
        return str(path), _hub_builder(path).hash
    saved = saved_data_set(path)
    return file_versions(list_files([path])) if saved is None else (str(path), saved._fingerprint)


def _hub_builder(path: Path) -> Any:
    """Return the builder of a data set of the Hub; nothing but its list of files is downloaded."""
    name, _, config = str(path).partition(":")
    with explain_hub_errors(path):
        return datasets.load_dataset_builder(name, config or None)


def _joined(paths: Sequence[str], column: str) -> Iterator[str]:
    """Return the texts of paths, one path after the other."""
    return chain.from_iterable(_texts_of(path, column) for path in paths)


def _mixed(paths: Sequence[str], column: str, mixture: dict[str, Any]) -> Iterator[str]:
    """Yield texts of paths in a fixed random order, mixed by weights."""
    streams = [
        datasets.IterableDataset.from_generator(
            _rows_of_texts, gen_kwargs={"path": path, "column": column}
        )
        for path in paths
    ]
    for row in datasets.interleave_datasets(streams, **mixture):
        yield row["text"]


def _rows_of_texts(path: str, column: str) -> Iterator[dict[str, str]]:
    for text in _texts_of(path, column):
        yield {"text": text}


def _texts_of(path: str, column: str) -> Iterator[str]:
    """Yield the texts of a path that are not blank.

    Raises:
        DataError: The path cannot be read, or a data set of the Hub can no longer be reached.
    """
    for row in _rows_of(Path(path)):
        text = document_of(row, column, None, path)
        if text.strip():
            yield text


def _rows_of(path: Path) -> Iterator[dict[str, Any]]:
    if not is_hub_id(path):
        saved = saved_data_set(path)
        files = list_files([path]) if saved is None else []
        yield from chain(saved or (), *map(rows_in, files))
        return
    builder = _hub_builder(path)
    try:
        yield from builder.as_streaming_dataset(split="train")
    except (OSError, ValueError) as error:
        raise DataError(
            f"Reading the data set {str(path)!r} stopped: {error}. Nothing is kept of what was "
            "read; check the connection and run the command again"
        ) from error
