"""Documents of files, folders and data sets, on disk and mapped into memory.

A data set of documents has the columns ``text`` and ``digest``, the SHA-256 of the text.
``datasets`` keeps it in its cache, where all processes and later runs find it.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from attnzoo.errors import AttnzooError
from attnzoo.optional_packages import OptionalPackage

if TYPE_CHECKING:
    import datasets
else:
    datasets = OptionalPackage("datasets", extra="train")

READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}  # others are plain text
HELD_OUT = 20  # one document in 20 is held out
WEIGHT = re.compile(r"(?P<path>.+):(?P<weight>\d+(\.\d+)?|\.\d+)")  # path:0.7
MIXTURE_SEED = 0  # a mixture is the same in every run
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")  # owner/name, or owner/name:config
COLUMNS = ("text", "digest")  # of documents
MANY_BYTES = 2**26  # text from this size on is read with a progress bar
Extract = Callable[[dict[str, Any], str], str]


class DataError(AttnzooError):
    """The text cannot be read or used for training."""


def text_features() -> datasets.Features:
    """Return the types of :data:`COLUMNS`."""
    types = (datasets.Value("large_string"), datasets.Value("binary"))
    return datasets.Features(zip(COLUMNS, types, strict=True))


def read_documents(
    paths: Sequence[Path | str], column: str = "text", extract: Extract | None = None
) -> datasets.Dataset:
    """Return the documents of files, folders of them and data sets.

    Args:
        paths: Text, JSON lines and parquet files, folders of them, folders of
            ``Dataset.save_to_disk``, and data sets of the Hub, ``"owner/name"`` or
            ``"owner/name:config"``, of which the split ``train`` is read. A document is a text
            file, a line of JSON or a row of a data set. With weights, such as ``"a.jsonl:0.7"``,
            they are mixed (:func:`_mixture`).
        column: Field of JSON files, parquet files and data sets that holds the text.
        extract: Returns the document of a row, given the name of its source too; the column when
            ``None``.

    Returns:
        A data set with the columns ``text`` and ``digest``.

    Raises:
        DataError: A path is missing or cannot be read, or there is no text.
    """
    weights = dict(map(split_weight, paths))
    if any(weight is not None for weight in weights.values()):
        return _mixture(weights, column, extract)
    files: list[Path] = []
    parts: list[datasets.Dataset] = []
    for path in map(Path, paths):
        source = _data_set(path)
        if source is None:
            files += list_files([path])
        else:
            parts.append(_documents_of(source, column, extract, str(path)))
    if files:
        parts.insert(0, _documents_in(files, column, extract))
    documents = datasets.concatenate_datasets(parts) if parts else None
    if not documents:
        raise no_text(paths)
    return documents


def split_weight(path: Path | str) -> tuple[str, float | None]:
    """Return a path and its weight; an existing path that looks like one has no weight."""
    text = str(path)
    found = None if Path(text).exists() else WEIGHT.fullmatch(text)
    return (text, None) if found is None else (found["path"], float(found["weight"]))


def _mixture(
    weights: Mapping[str, float | None], column: str, extract: Extract | None
) -> datasets.Dataset:
    """Return documents of several sources in a fixed random order, mixed by their weights.

    Each next document comes from a source with a probability proportional to the source's weight,
    until a source has no more, as ``datasets.interleave_datasets`` does.

    Args:
        weights: By path.
        column: As in :func:`read_documents`.
        extract: The same.

    Raises:
        DataError: A path has no weight, or a weight is 0.
    """
    return datasets.interleave_datasets(
        [read_documents([path], column, extract) for path in weights], **mixture_options(weights)
    )


def mixture_options(weights: Mapping[str, float | None]) -> dict[str, Any]:
    """Return the arguments of ``datasets.interleave_datasets`` for sources with these weights.

    Raises:
        DataError: A path has no weight, or a weight is 0.
    """
    missing = [path for path, weight in weights.items() if not weight]
    if missing or len(weights) < 2:
        raise DataError(
            "A mixture needs two sources or more, each with a weight above 0, got "
            f"{', '.join(f'{path!r} with {weight}' for path, weight in weights.items())}; write "
            "--data PATH:WEIGHT for each, such as a.jsonl:0.7"
        )
    values = [weight for weight in weights.values() if weight]
    return {
        "probabilities": [value / sum(values) for value in values],
        "seed": MIXTURE_SEED,
        "stopping_strategy": "first_exhausted",
    }


def _data_set(path: Path) -> datasets.Dataset | None:
    """Return a data set of the Hub or of a folder of ``save_to_disk``; ``None`` for other paths."""
    if not is_hub_id(path):
        return saved_data_set(path)
    with explain_hub_errors(path):
        name, _, config = str(path).partition(":")
        return datasets.load_dataset(name, config or None, split="train")


def saved_data_set(path: Path) -> datasets.Dataset | None:
    """Return the data set of a folder of ``save_to_disk``; ``None`` for other paths."""
    if (path / "state.json").is_file():
        return datasets.load_from_disk(str(path))
    if (path / "dataset_dict.json").is_file():
        return datasets.load_from_disk(str(path / "train"))
    return None


def is_hub_id(path: Path) -> bool:
    """Return whether a path is the id of a data set of the Hub: no file, and ``owner/name``."""
    if path.exists() or path.suffix.lower() in (*READERS, ".txt"):
        return False
    return HUB_ID.fullmatch(str(path)) is not None


@contextmanager
def explain_hub_errors(path: Path) -> Iterator[None]:
    """Context in which errors of loading a data set of the Hub become a :class:`DataError`."""
    try:
        yield
    except (datasets.exceptions.DatasetNotFoundError, OSError, ValueError) as error:
        raise DataError(
            f"There is no file or folder {str(path)!r}, and no data set of the Hub by this name "
            f"could be loaded ({str(error).strip()}); give --data an existing one"
        ) from error


def document_of(row: dict[str, Any], column: str, extract: Extract | None, source: str) -> str:
    """Return the text of a row of a file or data set.

    Raises:
        DataError: The row has no such text.
    """
    if extract is not None:
        return extract(row, source)
    if not isinstance(row.get(column), str):
        fields = ", ".join(name for name, value in row.items() if isinstance(value, str)) or "none"
        raise DataError(
            f"{source!r} has no text field {column!r} (its text fields: {fields}); name the field "
            "with --column"
        )
    return str(row[column])


def entry_of(text: str) -> dict[str, Any]:
    """Return the columns of a document."""
    return {"text": text, "digest": hashlib.sha256(text.encode()).digest()}


def _documents_of(
    source: datasets.Dataset, column: str, extract: Extract | None, name: str
) -> datasets.Dataset:
    """Return the documents of a data set."""

    def entries(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        count = len(next(iter(rows.values())))
        single = ({key: values[i] for key, values in rows.items()} for i in range(count))
        texts = [document_of(row, column, extract, name) for row in single]
        kept = [entry_of(text) for text in texts if text.strip()]
        return {key: [entry[key] for entry in kept] for key in COLUMNS}

    columns = source.column_names
    with progress_bars((source.size_in_bytes or 0) >= MANY_BYTES):
        return source.map(
            entries, batched=True, remove_columns=columns, features=text_features(), desc="reading"
        )


def _documents_in(files: Sequence[Path], column: str, extract: Extract | None) -> datasets.Dataset:
    """Return the documents of files; read again if a file has another size or time."""
    versions = file_versions(files)
    key = hashlib.sha256(repr((versions, column, _name(extract))).encode()).hexdigest()
    large = sum(size for _, size, _ in versions) >= MANY_BYTES
    with unwrap_generation_errors(), progress_bars(large):
        return datasets.Dataset.from_generator(
            _read_files,
            features=text_features(),
            # a tuple: datasets reads the items of a list apart, and one of them may be empty
            gen_kwargs={"files": tuple(files), "column": column, "extract": extract},
            fingerprint=key[:16],
        )


def file_versions(files: Sequence[Path]) -> list[tuple[str, int, int]]:
    """Return the path, the size and the time of the last change of each file."""
    found = [path.stat() for path in files]
    return [(str(x), s.st_size, s.st_mtime_ns) for x, s in zip(files, found, strict=True)]


@contextmanager
def unwrap_generation_errors() -> Iterator[None]:
    """Context in which errors of a generator of documents come out of ``datasets`` as they are."""
    try:
        yield
    except datasets.exceptions.DatasetGenerationError as error:
        cause = error.__cause__
        raise (cause if isinstance(cause, DataError) else DataError(str(error))) from cause


def _name(extract: Extract | None) -> str:
    return "" if extract is None else f"{extract.__module__}.{extract.__qualname__}"


def _read_files(
    files: Sequence[Path], column: str, extract: Extract | None
) -> Iterator[dict[str, Any]]:
    """Yield the documents of files."""
    found = False
    for path in files:
        for row in rows_in(path):
            text = document_of(row, column, extract, str(path))
            if text.strip():
                found = True
                yield entry_of(text)
    if not found:
        raise no_text(files)


def no_text(paths: Sequence[Path | str]) -> DataError:
    """Return the error of sources without text."""
    return DataError(
        f"There is no text in {', '.join(map(str, paths))}; give files or folders of .txt, .jsonl "
        "or .parquet, or a data set of the Hub"
    )


def rows_in(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file.

    Raises:
        DataError: The file cannot be read.
    """
    reader = READERS.get(path.suffix.lower(), "text")
    options = {"sample_by": "document"} if reader == "text" else {}
    if "::" in str(path):  # a chain of URLs to datasets
        raise DataError(f"{str(path)!r} has '::' in its name; rename it")
    try:
        with _no_download_counts():
            files = [escape(str(path))]  # names are patterns to datasets
            yield from datasets.load_dataset(
                reader, data_files=files, split="train", streaming=True, **options
            )
    except UnicodeDecodeError as error:
        raise DataError(
            f"{str(path)!r} is not UTF-8 text (byte {error.start}: {error.reason}); convert the "
            "file, or leave it out"
        ) from None
    except (datasets.exceptions.DatasetGenerationError, OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{str(path)!r} cannot be read as {reader}: {error}") from error


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


@contextmanager
def progress_bars(enabled: bool) -> Iterator[None]:
    """Context in which ``datasets`` shows progress bars, or none."""
    if enabled or datasets.are_progress_bars_disabled():
        yield
        return
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.enable_progress_bars()


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


def split_documents(documents: datasets.Dataset) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Return training and held-out documents: one in 20 by hash, or a single one's last tenth.

    Equal documents are on the same side.
    """
    digests = list(documents["digest"])
    if min(digests) == max(digests):
        text = documents[0]["text"]
        cut = len(text) * 9 // 10
        halves = [{"text": [half]} for half in (text[:cut], text[cut:])]
        return datasets.Dataset.from_dict(halves[0]), datasets.Dataset.from_dict(halves[1])
    last = sorted(digests)[max(1, len(digests) // HELD_OUT) - 1]
    held_out = np.array([digest <= last for digest in digests])
    return documents.select(np.flatnonzero(~held_out)), documents.select(np.flatnonzero(held_out))
