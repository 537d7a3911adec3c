"""Loading of models and rows for training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import init_empty_weights
from transformers import AutoModelForCausalLM, PreTrainedModel

from attnzoo.errors import SpecError
from attnzoo.evaluation.data import load_tokenizer
from attnzoo.evaluation.models import max_positions, require_causal
from attnzoo.evaluation.rows import Rows
from attnzoo.hf.adapters.lora import require_peft
from attnzoo.hf.configs import read_field, set_dropout
from attnzoo.hf.names import NAME
from attnzoo.hf.pretrained import build_model, load_pretrained
from attnzoo.hf.saving.files import read_config
from attnzoo.hf.swap.backends import extras_are_new
from attnzoo.spec import AttentionSpec
from attnzoo.training.completions import example_of, pack_completions
from attnzoo.training.data import pack, with_repeats
from attnzoo.training.documents import DataError, Extract, read_documents, split_documents
from attnzoo.training.four_bits import config_of_4_bits
from attnzoo.training.streaming import stream_documents
from attnzoo.training.train_config import TrainConfig

R = TypeVar("R")


def split_rows(
    path: Path,
    data: list[Path],
    column: str,
    config: TrainConfig,
    make: Callable[..., R],
    extract: Extract | None = None,
) -> tuple[R, R]:
    """Return training rows and held-out rows, each made of documents by ``make``."""
    if config.train == "lora":
        require_peft()  # before a run measures for minutes
    vocab_size = read_field(read_config(path).get_text_config(), "vocab_size")
    if vocab_size is None:
        raise SpecError(f"{str(path)!r} holds no model of text; give a language model")
    tokenizer = load_tokenizer(path)
    if config.max_tokens is None:
        documents = read_documents(data, column, extract)
    else:
        documents = stream_documents(data, column, tokenizer, config.max_tokens)
    if extract is not None and len(documents) < 2:
        raise DataError("One example cannot be both trained on and held out; give more")
    train, held_out = (
        make(
            texts if make is pack else texts["text"],
            tokenizer,
            row_length=config.row_length,
            vocab_size=vocab_size,
        )
        for texts in split_documents(documents)
    )
    _check_positions(path, (train, held_out), config.row_length)
    return train, held_out


def _check_positions(path: Path, found: Sequence[Any], row_length: int) -> None:
    """Raise an error if a document of a row is longer than the model's positions.

    Args:
        path: Folder of the model.
        found: :class:`~attnzoo.evaluation.rows.Rows`, or texts of an encoder.
        row_length: Tokens of a row at most.

    Raises:
        DataError: A document is longer.
    """
    limit = max_positions(path)
    if limit is None or row_length <= limit:
        return
    longest = max(
        1 + int(x.positions.max()) if isinstance(x, Rows) else x.tokens.shape[1] for x in found
    )
    if longest > limit:
        raise DataError(
            f"rows of {row_length:,} tokens hold a document of {longest:,}, and the model has "
            f"{limit:,} positions; give --length {limit} or less, or add positions with "
            "attnzoo.extend_positions"
        )


def load_rows(path: Path, data: list[Path], column: str, config: TrainConfig) -> tuple[Rows, Rows]:
    """Return packed training rows and held-out rows in a model's tokens."""
    if config.train_on == "completions":
        return split_rows(path, data, column, config, pack_completions, example_of)
    train, held_out = split_rows(path, data, column, config, pack)
    share, per_row = config.repeat_share or 0.0, config.repeats_per_row
    return with_repeats(train, share, config.loop.seed, per_row=per_row), held_out


def load_causal(path: Path, spec: AttentionSpec | None, **options: Any) -> PreTrainedModel:
    """Load a causal model with swapped attention; see :func:`load_model`."""
    read_config(path)  # raises an error if the folder has no model
    require_causal(path, "training minimises a loss of text prediction")
    return load_model(path, spec, AutoModelForCausalLM, **options)


def load_model(
    path: Path,
    spec: AttentionSpec | None,
    cls: Any,
    *,
    dtype: torch.dtype = torch.float32,
    load_in_4bit: bool = False,
    device: torch.device | None = None,
    empty: bool = False,
    disable_dropout: bool = False,
) -> PreTrainedModel:
    """Load a model with its attention swapped by ``spec`` or by its own config.

    Args:
        path: Folder of a saved model.
        spec: The swap; ``None`` for a model that is already swapped.
        cls: Class whose ``from_pretrained`` loads it.
        dtype: Data type of the weights.
        load_in_4bit: Whether linear layers, but for the head and what backends add, are in 4 bits.
        device: Device of weights in 4 bits; ``None`` for the current one.
        empty: Whether to build the model on the meta device, without weights.
        disable_dropout: Whether all dropouts are 0; :func:`~attnzoo.hf.configs.set_dropout`
            restores those of the config that is saved.

    Raises:
        SpecError: The model is already swapped and a spec is given, or neither.
        UnsupportedError: ``load_in_4bit`` is set, but bitsandbytes is not installed, or the saved
            model is quantized.
    """
    config = read_config(path)
    swapped = read_field(config, NAME) is not None
    if swapped and spec is not None:
        raise SpecError(
            f"{str(path)!r} is already swapped; give the original model, whose attention is to be "
            "replaced"
        )
    if not swapped and spec is None:
        raise SpecError(f"{str(path)!r} is not swapped; give an attention to swap it with")
    if spec is not None:
        config.attnzoo = spec.to_dict()
    if disable_dropout:
        set_dropout(config)
    options = {"config": config, "attn_implementation": NAME, "dtype": dtype}
    if empty:
        with torch.device("meta"):
            model: PreTrainedModel = build_model(cls, config, attn_implementation=NAME, dtype=dtype)
        model.eval()
        return model
    if load_in_4bit:
        with init_empty_weights():
            skeleton = build_model(cls, deepcopy(config), attn_implementation=NAME)
        options["quantization_config"] = config_of_4_bits(skeleton)
        if device is not None:
            options["device_map"] = {"": device}
    with nullcontext() if swapped else extras_are_new():
        model = load_pretrained(cls, path, **options)
    return model
