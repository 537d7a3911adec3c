"""Loading of models and rows for training."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import init_empty_weights
from transformers import AutoModelForCausalLM, PreTrainedModel

from attnzoo.errors import SpecError
from attnzoo.evaluation.data import load_tokenizer
from attnzoo.evaluation.models import require_causal
from attnzoo.evaluation.rows import Rows
from attnzoo.hf.adapters.lora import require_peft
from attnzoo.hf.configs import read_field, set_dropout
from attnzoo.hf.names import NAME
from attnzoo.hf.pretrained import build_model, load_pretrained
from attnzoo.hf.saving.files import read_config
from attnzoo.hf.swap.backends import extras_are_new
from attnzoo.spec import AttentionSpec
from attnzoo.training import data as data_module
from attnzoo.training.data import RowOptions, load_documents, split_documents
from attnzoo.training.four_bits import config_of_4_bits
from attnzoo.training.train_config import TrainConfig

R = TypeVar("R")


def _row_options(column: str, config: TrainConfig) -> RowOptions:
    return RowOptions(
        dataset_text_field=column,
        max_tokens=config.max_tokens,
        max_length=config.row_length,
        completion_only_loss=config.train_on == "completions",
        repeat_share=config.repeat_share,
        repeats_per_row=config.repeats_per_row,
        seed=config.loop.seed,
    )


def split_rows(
    path: Path, data: list[Path], column: str, config: TrainConfig, make: Callable[..., R]
) -> tuple[R, R]:
    """Return training rows and held-out rows, each made of documents by ``make``."""
    vocab_size = read_field(read_config(path).get_text_config(), "vocab_size")
    if vocab_size is None:
        raise SpecError(f"{str(path)!r} holds no model of text; give a language model")
    tokenizer = load_tokenizer(path)
    documents = load_documents(data, _row_options(column, config), tokenizer)
    options = {"row_length": config.row_length, "vocab_size": vocab_size}
    train, held_out = (
        make(texts["text"], tokenizer, **options) for texts in split_documents(documents)
    )
    return train, held_out


def load_rows(path: Path, data: list[Path], column: str, config: TrainConfig) -> tuple[Rows, Rows]:
    """Return packed training rows and held-out rows in a model's tokens."""
    if config.train == "lora":
        require_peft()  # before a run measures for minutes
    return data_module.load_rows(path, data, _row_options(column, config))


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
