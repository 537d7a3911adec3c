"""Text as packed rows of tokens, or texts of an encoder; ``datasets`` reads and caches it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from glob import escape
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from attnzoo.errors import AttnzooError, SpecError, short_repr
from attnzoo.evaluation.corpus import MIN_REPEAT_LENGTH, add_repeats, load_tokenizer
from attnzoo.evaluation.embeddings import Texts, special_tokens
from attnzoo.evaluation.models import max_positions
from attnzoo.evaluation.rows import Rows, pack_documents
from attnzoo.hf.configs import read_field
from attnzoo.hf.saving.files import read_config
from attnzoo.optional_packages import OptionalPackage
from attnzoo.training.arguments import check_numbers, token_count

if TYPE_CHECKING:
    import datasets
else:
    datasets = OptionalPackage("datasets", extra="train")

HELD_OUT = 20  # one document in 20 is held out
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")  # owner/name, or owner/name:config
READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}  # others are plain text
EXAMPLES = "'prompt' and 'completion', strings or lists of messages, or 'messages'"


class DataError(AttnzooError):
    """The text cannot be read or used for training."""


@dataclass(frozen=True, kw_only=True)
class RowOptions:
    """What rows are made of: the fields of ``RecoveryArguments`` that :func:`load_rows` reads."""

    dataset_text_field: str = "text"
    max_tokens: int | str | None = None
    max_length: int = 512
    repeat_share: float = 0.0
    repeats_per_row: int = 1
    seed: int = 0


def load_rows(
    path: Path | str, data: Sequence[Path | str], args: Any, length: int | None = None
) -> tuple[Rows, Rows]:
    """Return packed training rows and held-out rows in a model's tokens.

    Args:
        path: Folder of the model.
        data: As in :func:`load_documents`.
        args: :class:`RowOptions`, or arguments with these fields.
        length: Tokens of a row, in place of ``max_length``.

    Raises:
        DataError: The data cannot be read, or are shorter than a row.
    """
    check_numbers(args)
    path = Path(path)
    vocab_size = read_field(read_config(path).get_text_config(), "vocab_size")
    if vocab_size is None:
        raise SpecError(f"{str(path)!r} holds no model of text; give a language model")
    tokenizer = load_tokenizer(path)
    halves = split_documents(load_documents(data, args, tokenizer))
    train, held_out = (pack(part, tokenizer, length or args.max_length) for part in halves)
    for rows in (train, held_out):
        check_vocabulary(int(rows.tokens.max()), vocab_size)
    check_positions(path, max(1 + int(x.positions.max()) for x in (train, held_out)))
    repeats = with_repeats(train, args.repeat_share, args.seed, per_row=args.repeats_per_row)
    return repeats, held_out


def load_documents(
    data: Sequence[Path | str], args: Any, tokenizer: Any, *, examples: bool = False
) -> datasets.Dataset:
    """Return documents with the columns ``text`` and ``digest``, its SHA-256.

    Args:
        data: Text, JSON and parquet files, folders of them or of ``save_to_disk``, and data sets
            of the Hub, ``"owner/name"`` or ``"owner/name:config"``, of which the split ``train``
            is read.
        args: As in :func:`load_rows`. Reading stops after ``max_tokens``, and data sets of the Hub
            are streamed.
        tokenizer: Counts the tokens.
        examples: Whether ``text`` is an example (:data:`EXAMPLES`) as JSON.

    Raises:
        DataError: A path is missing or cannot be read, or there is no text.
    """
    names, limit = [*dict.fromkeys(map(str, data))], token_count(args.max_tokens)
    column = None if examples else args.dataset_text_field

    def read() -> Iterator[dict[str, Any]]:
        count, text = 0, None
        for text in chain.from_iterable(_texts(x, column, limit is not None) for x in names):
            yield {"text": text, "digest": hashlib.sha256(text.encode()).digest()}
            if limit is not None:
                count += len(_ids(tokenizer, text))
                if count >= limit:
                    return
        if text is None:
            raise DataError(f"There is no text in {', '.join(names)}; give other data")

    versions = [_version(Path(name)) for name in names]
    counted = None if limit is None else (limit, type(tokenizer), sorted(tokenizer.get_vocab()))
    key = hashlib.sha256(repr((versions, column, counted)).encode()).hexdigest()
    types = {"text": datasets.Value("large_string"), "digest": datasets.Value("binary")}
    try:
        return datasets.Dataset.from_generator(
            read, features=datasets.Features(types), fingerprint=key[:16]
        )
    except datasets.exceptions.DatasetGenerationError as error:
        cause = error.__cause__
        raise (cause if isinstance(cause, AttnzooError) else DataError(str(error))) from cause


def _is_hub_id(path: Path) -> bool:
    is_file = path.exists() or path.suffix.lower() in (*READERS, ".txt")
    return not is_file and HUB_ID.fullmatch(str(path)) is not None


def _version(path: Path) -> Any:
    """Return what changes if the documents of a path change."""
    if _is_hub_id(path):
        return str(path), _load(datasets.load_dataset_builder, path).hash
    found = [path] if path.is_file() else sorted(x for x in path.rglob("*") if x.is_file())
    return [(str(x), x.stat().st_size, x.stat().st_mtime_ns) for x in found]


def _load(load: Any, path: Path, **options: Any) -> Any:
    """Return a data set of the Hub, or its builder."""
    name, _, config = str(path).partition(":")
    try:
        return load(name, config or None, **options)
    except (datasets.exceptions.DatasetNotFoundError, OSError, ValueError) as error:
        raise DataError(
            f"There is no file or folder {name!r}, and no such data set of the Hub: {error}"
        ) from error


def _sources(path: Path, streaming: bool) -> Iterator[tuple[Path, Any]]:
    """Yield the data sets of a path, with their paths: one, or one for each file of a folder."""
    if _is_hub_id(path):
        yield path, _load(datasets.load_dataset, path, split="train", streaming=streaming)
    elif (path / "dataset_dict.json").is_file():
        yield path, datasets.load_from_disk(str(path / "train"))
    elif (path / "state.json").is_file():
        yield path, datasets.load_from_disk(str(path))
    elif path.is_dir():
        for file in sorted(x for x in path.rglob("*") if x.is_file()):
            parts = file.relative_to(path).parts
            if not any(part.startswith((".", "__pycache__")) for part in parts):
                yield from _sources(file, streaming)
    elif not path.is_file() or "::" in str(path):  # to datasets, a chain of URLs
        if path.exists():
            raise DataError(f"{str(path)!r} is not read: its name has '::'; rename it")
        raise DataError(f"There is no file or folder {str(path)!r}; give another")
    else:
        kind = READERS.get(path.suffix.lower(), "text")
        options = {"sample_by": "document"} if kind == "text" else {}
        read = getattr(datasets.IterableDataset, f"from_{kind}")
        yield path, read(escape(str(path)), split="train", **options)


def _texts(name: str, column: str | None, streaming: bool) -> Iterator[str]:
    """Yield the texts of a path that are not blank."""
    path = file = Path(name)
    try:
        for file, source in _sources(path, streaming):
            for row in source:
                text = _example_of(row) if column is None else row.get(column)
                if not isinstance(text, str):
                    what = EXAMPLES if column is None else f"a text in field {column!r}"
                    raise DataError(
                        f"A row of {str(file)!r} lacks {what}; its fields: {', '.join(row)} "
                        "(--dataset-text-field names that of the text)"
                    )
                if text.strip():
                    yield text
    except (datasets.exceptions.DatasetGenerationError, OSError, ValueError) as error:
        if isinstance(error, AttnzooError):
            raise
        raise DataError(f"{str(file)!r} cannot be read: {error}") from error


def _example_of(row: dict[str, Any]) -> str | None:
    """Return the example in a row as JSON; ``None`` if it has none."""
    names = ("messages",) if row.get("messages") else ("prompt", "completion")
    kinds = {type(row.get(name)) for name in names}
    if kinds != {list} and (kinds != {str} or len(names) == 1):
        return None
    return json.dumps({x: row[x] for x in names}, sort_keys=True, ensure_ascii=False)


def split_documents(
    documents: datasets.Dataset, *, cut: bool = True
) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Return training and held-out documents: one in 20 by hash, or a single one's last tenth.

    Equal documents are on the same side.

    Raises:
        DataError: There is a single one, and it is not to be ``cut``, or is too short for that.
    """
    digests = list(documents["digest"])
    if min(digests) == max(digests) and not cut:
        raise DataError("One example cannot be both trained on and held out; give more")
    if min(digests) == max(digests):
        text = documents[0]["text"]
        end = len(text) * 9 // 10
        parts = text[:end], text[end:]
        if not all(x.strip() for x in parts):
            raise DataError(
                f"A tenth of the text is held out, which is too short: {short_repr(text)}"
            )
        first, last = (datasets.Dataset.from_dict({"text": [x]}) for x in parts)
        return first, last
    least = sorted(digests)[max(1, len(digests) // HELD_OUT) - 1]
    held_out = np.array([digest <= least for digest in digests])
    return documents.select(np.flatnonzero(~held_out)), documents.select(np.flatnonzero(held_out))


def check_positions(path: Path, longest: int) -> None:
    """Raise an error if the longest document of the rows has more tokens than a model positions.

    Raises:
        DataError: It has.
    """
    limit = max_positions(path)
    if limit is not None and longest > limit:
        raise DataError(
            f"rows hold a document of {longest:,}, and the model has {limit:,} positions; give "
            f"rows of {limit} tokens or less (--max-length), or add positions with "
            "attnzoo.extend_positions"
        )


def check_vocabulary(token: int, vocab_size: int) -> None:
    """Raise an error if a text's largest token is not in the model's vocabulary."""
    if token >= vocab_size:
        raise DataError(
            f"The tokenizer returns token {token}, but the model's vocabulary has {vocab_size} "
            "tokens; save the model's own tokenizer in its folder"
        )


def _ids(tokenizer: Any, text: Any) -> Any:
    """Return the tokens of a text, or of each of several."""
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def _tokenize(block: dict[str, list[Any]], tokenizer: Any) -> dict[str, list[Any]]:
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ids = [np.array(x + end, np.int32) for x in _ids(tokenizer, block["text"])]
    return {"input_ids": ids, "bytes": [len(text.encode()) for text in block["text"]]}


def pack(documents: datasets.Dataset, tokenizer: Any, length: int) -> Rows:
    """Return documents as tokens, one after the other, in rows of one length.

    Each document ends with the tokenizer's end token, if it has one. An incomplete last row is
    dropped.

    Raises:
        DataError: The text is shorter than a row.
    """
    found = documents.map(
        _tokenize,
        batched=True,
        remove_columns=documents.column_names,
        fn_kwargs={"tokenizer": tokenizer},
    ).with_format("numpy")
    ids = [torch.from_numpy(x).int() for block in found.iter(1000) for x in block["input_ids"]]
    sizes = np.array([len(x) for x in ids])
    ends = 0 if tokenizer.eos_token_id is None else len(sizes)
    try:
        size = sum(found["bytes"]) / max(sizes.sum() - ends, 1)
        rows = pack_documents(ids, sizes.sum(), length, float(size))
    except ValueError as error:
        raise DataError(str(error)) from None
    starts = sizes.cumsum() - sizes
    return replace(rows, starts=torch.from_numpy(starts[starts < rows.tokens.numel()]))


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
    written = replace(rows, tokens=rows.tokens.clone(), starts=None)
    generator = torch.Generator().manual_seed(seed)
    repeats = add_repeats(written, generator, share=share)
    changed = [i for i, repeat in enumerate(repeats) if repeat is not None]
    for _ in range(per_row - 1):
        for i in changed:
            add_repeats(written.select(slice(i, i + 1)), generator)
    return written


def tokenize_texts(
    documents: Sequence[str], tokenizer: Any, *, row_length: int, vocab_size: int
) -> Texts:
    """Tokenize documents with special tokens, split into texts of at most ``row_length`` tokens.

    Raises:
        DataError: The tokenizer has no padding token or does not match the model.
    """
    if tokenizer.pad_token_id is None:
        raise DataError(
            "The tokenizer has no padding token, which texts of different lengths need; set one "
            "and save the tokenizer"
        )
    before, after = special_tokens(tokenizer)
    size, rows = row_length - len(before) - len(after), []
    for text in documents:
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        parts = [ids[first : first + size] for first in range(0, len(ids), size)]
        rows += [[*before, *part, *after] for part in parts]
    check_vocabulary(max(map(max, rows)), vocab_size)
    padded = tokenizer.pad({"input_ids": rows}, return_tensors="pt")
    return Texts(tokens=padded["input_ids"], attention_mask=padded["attention_mask"])


def load_texts(path: Path, data: Sequence[Path | str], args: Any) -> tuple[Texts, Texts]:
    """Return training texts and held-out texts in an encoder's tokens.

    Args:
        path: Folder of the encoder.
        data: As of :func:`load_documents`.
        args: ``dataset_text_field``, ``max_tokens`` and ``max_length``.

    Raises:
        DataError: The data cannot be read, or ``max_length`` is more than the encoder's positions.
    """
    vocab_size = read_field(read_config(path).get_text_config(), "vocab_size")
    tokenizer = load_tokenizer(path)
    options = RowOptions(dataset_text_field=args.dataset_text_field, max_tokens=args.max_tokens)
    documents = load_documents(data, options, tokenizer)
    train, held_out = (
        tokenize_texts(part["text"], tokenizer, row_length=args.max_length, vocab_size=vocab_size)
        for part in split_documents(documents)
    )
    check_positions(path, max(x.tokens.shape[1] for x in (train, held_out)))
    return train, held_out
