"""A model, its tokenizer and the text that it is judged on, as rows of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from attnzoo.corpus import Repeat, add_repeats, cut_rows, read_bytes, standard_library_files
from attnzoo.errors import SpecError
from attnzoo.integrations.layers import attention_layers

EMBEDDED = "assets/tiny-llama"


def embedded_model_path() -> Path:
    """Return the folder of the pretrained model that ships with the package."""
    return Path(str(files("attnzoo") / EMBEDDED))


@dataclass(frozen=True, kw_only=True)
class Judged:
    """Rows to judge a model on.

    Attributes:
        plain: ``[N, T]``, text as it is.
        twice: ``[N, T]``, the same rows with one segment written a second time.
        repeats: Where, row by row.
        bytes_per_token: Of the text, to turn bits per token into bits per byte.
        stream: ``[L]``, text to fill a cache with.
    """

    plain: Tensor
    twice: Tensor
    repeats: list[Repeat]
    bytes_per_token: float
    stream: Tensor


def judge_on(path: Path, text: Path | None, *, rows: int, row_length: int, stream: int) -> Judged:
    """Tokenize a text and cut it into rows; the held-out files of the embedded model without one.

    Raises:
        SpecError: There is no text, or too little of it.
    """
    if text is None:
        data = read_bytes(standard_library_files(held_out=True))
    elif not text.is_file():
        raise SpecError(
            f"There is no text file {str(text)!r}; give --text a file in the model's language"
        )
    else:
        data = text.read_bytes()
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    string = data.decode("utf-8", errors="replace")
    ids = tokenizer(string, add_special_tokens=False, verbose=False)["input_ids"]
    tokens = torch.tensor(ids, dtype=torch.long)
    generator = torch.Generator().manual_seed(0)
    plain = cut_rows(tokens, rows, row_length, generator)
    twice = plain.clone()
    repeats = [r for r in add_repeats(twice, generator) if r is not None]
    return Judged(
        plain=plain,
        twice=twice,
        repeats=repeats,
        bytes_per_token=len(string.encode()) / len(tokens),
        stream=tokens.repeat(-(-stream // len(tokens)))[:stream],
    )


def longest_context(path: Path) -> int | None:
    """Return the length beyond which a model has no positions; ``None`` if rotary or relative."""
    config: Any = AutoConfig.from_pretrained(path)
    rotary = any(getattr(config, name, None) for name in ("rope_parameters", "rope_theta"))
    limit = getattr(config, "max_position_embeddings", None)
    return None if rotary or limit is None else int(limit)


def refuse_encoder(path: Path, what: str) -> None:
    """Refuse a model that sees what comes next: its loss would mean nothing.

    Args:
        path: Folder of a saved model.
        what: What was to be done with it, for the message.
    """
    config = AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        layers = attention_layers(AutoModelForCausalLM.from_config(config))
    if not all(layer.geometry.causal for layer in layers):
        raise SpecError(
            f"{str(path)!r} holds a {config.model_type} model that is not causal; {what}, so give "
            "a decoder"
        )
