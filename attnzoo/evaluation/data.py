"""Text as evaluation batches: token rows, rows with a repeated segment, and a token stream."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer

from attnzoo.errors import SpecError
from attnzoo.evaluation.corpus import (
    Repeat,
    add_repeats,
    cut_rows,
    held_out_files,
    join,
)
from attnzoo.evaluation.generation import GenerationBatch
from attnzoo.evaluation.recall_rows import Encode


class Packing(NamedTuple):
    """Positions and labels of rows with several documents or examples.

    Attributes:
        positions: ``[N, T]``, from 0 in each document.
        labels: ``[N, T]``: the tokens that are evaluated, else -100.
    """

    positions: Tensor
    labels: Tensor


@dataclass(frozen=True, kw_only=True)
class EvalBatch:
    """Rows of tokens to evaluate a causal model on.

    Attributes:
        tokens: ``[N, T]``, plain text.
        repeat_tokens: ``[N, T]``, the same rows, each with one segment copied to a later position.
        repeats: The positions of the two copies, one per row.
        bytes_per_token: Converts bits per token to bits per byte.
        stream: ``[L]``, text that fills a cache.
        generation: Rows that models continue; ``None`` if generation is not measured.
        packing: Where documents begin in ``tokens``, and the tokens that are evaluated; a row is
            one document, and all its tokens are evaluated, when ``None``.
    """

    tokens: Tensor
    repeat_tokens: Tensor
    repeats: list[Repeat]
    bytes_per_token: float
    stream: Tensor
    generation: GenerationBatch | None = None
    packing: Packing | None = None

    def to(self, device: torch.device) -> EvalBatch:
        """Return the batch with its tensors on a device."""
        names = ("tokens", "repeat_tokens", "stream", "generation")
        given = {name: x for name in names if (x := getattr(self, name)) is not None}
        moved: dict[str, Any] = {name: x.to(device) for name, x in given.items()}
        if self.packing is not None:
            moved["packing"] = Packing(*(x.to(device) for x in self.packing))
        return replace(self, **moved)


def unigram_bits_per_byte(batch: EvalBatch) -> float:
    """Return the loss of a model that knows only how frequent each evaluated token is.

    A model that is not below it on these rows predicts nothing: it is not trained, or the text is
    in another language.
    """
    tokens = batch.tokens
    if batch.packing is not None:
        tokens = tokens[batch.packing.labels >= 0]
    frequencies = tokens.flatten().bincount().double() / tokens.numel()
    return float(torch.special.entr(frequencies).sum()) / (math.log(2) * batch.bytes_per_token)


def read_text(text: Path | None) -> str:
    """Return a text file's content, or without one the held-out files of the standard library.

    Raises:
        SpecError: The file does not exist or cannot be read.
    """
    if text is None:
        return join(held_out_files()).decode("utf-8", errors="replace")
    try:
        return text.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise SpecError(
            f"The text file {str(text)!r} is not UTF-8 text (byte {error.start}: {error.reason}); "
            "convert it"
        ) from error
    except OSError as error:
        raise SpecError(
            f"The text file {str(text)!r} cannot be read ({error.strerror or error}); give "
            "--text a file in the model's language"
        ) from error


def fingerprint(*tensors: Tensor) -> str:
    """Return a hash of tensors and their shapes, 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for x in tensors:
        digest.update(repr(tuple(x.shape)).encode())
        digest.update(np.ascontiguousarray(x.numpy()).data)
    return digest.hexdigest()[:16]


def load_tokenizer(path: Path) -> Any:
    """Load the tokenizer in a model's folder.

    Raises:
        SpecError: The folder has no tokenizer that transformers can load.
    """
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise SpecError(
            f"The tokenizer in {str(path)!r} cannot be loaded ({reason}); save the model's "
            "tokenizer in its folder"
        ) from error


def tokenize(tokenizer: Any, text: str) -> Tensor:
    """Return the token ids of a text without special tokens, ``[N]``."""
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor(ids, dtype=torch.long)


def string_tokenizer(path: Path) -> Encode:
    """Return a function that tokenizes a string with the tokenizer of a model's folder."""
    tokenizer = load_tokenizer(path)
    return lambda text: tokenize(tokenizer, text)


def make_eval_batch(
    path: Path, text: Path | None, *, rows: int, row_length: int, stream_length: int
) -> EvalBatch:
    """Tokenize a text with a model's tokenizer and cut it into an evaluation batch.

    Args:
        path: Folder of the model.
        text: File; the standard library's held-out files when ``None``.
        rows: N.
        row_length: T.
        stream_length: L; a shorter text is repeated.

    Raises:
        SpecError: The file does not exist or cannot be read.
    """
    string = read_text(text)
    tokens = tokenize(load_tokenizer(path), string)
    generator = torch.Generator().manual_seed(0)
    plain = cut_rows(tokens, rows, row_length, generator)
    repeated = plain.clone()
    repeats = [r for r in add_repeats(repeated, generator) if r is not None]
    return EvalBatch(
        tokens=plain,
        repeat_tokens=repeated,
        repeats=repeats,
        bytes_per_token=len(string.encode()) / len(tokens),
        stream=tokens.repeat(-(-stream_length // len(tokens)))[:stream_length],
    )
