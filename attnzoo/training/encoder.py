"""Encoders in training: whether a model is one, and its texts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from attnzoo.errors import SpecError
from attnzoo.evaluation.data import load_tokenizer
from attnzoo.evaluation.embeddings import Texts, special_tokens
from attnzoo.hf.configs import read_field
from attnzoo.hf.layers import attention_layers
from attnzoo.hf.pretrained import explain_load_errors
from attnzoo.hf.saving.files import model_class, read_config
from attnzoo.training.data import (
    DataError,
    RowOptions,
    check_positions,
    check_vocabulary,
    load_documents,
    split_documents,
)


def is_encoder(path: Path) -> bool:
    """Return whether a saved model is an encoder, whose attention is not causal.

    Raises:
        SpecError: The folder has no model, or the model is an encoder-decoder or has no attention
            layers.
    """
    config = read_config(path)
    # some models that were saved without a head are causal in their language model class
    causal_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    with torch.device("meta"), explain_load_errors(path):
        model = (causal_class or model_class(config, path))(config)
    causal = {layer.geometry.causal for layer in attention_layers(model)}
    if len(causal) != 1:
        raise SpecError(
            f"{str(path)!r} holds a {config.model_type} model with "
            + ("causal and bidirectional attention layers" if causal else "no attention layers")
            + "; give a decoder or an encoder"
        )
    return not causal.pop()


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
        data: As of :func:`~attnzoo.training.data.load_documents`.
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
