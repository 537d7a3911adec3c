"""Runs of encoders, and their recovery: embeddings are to stay those of the original model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel

from attnzoo.errors import SpecError
from attnzoo.evaluation.embeddings import EmbeddingSimilarity, Texts, embeddings, similarity
from attnzoo.evaluation.margins import mean_of, paired
from attnzoo.hf.layers import attention_layers
from attnzoo.hf.pretrained import explain_load_errors
from attnzoo.hf.saving.files import model_class, read_config
from attnzoo.hf.swap.convert import original_attention
from attnzoo.training.data import check_vocabulary
from attnzoo.training.documents import DataError
from attnzoo.training.loading import load_model, split_rows
from attnzoo.training.runs import Run

LEAST_COSINE = 0.001  # smaller differences do not matter


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
    rows: list[list[int]] = []
    if tokenizer.is_fast:
        options = {"truncation": True, "max_length": row_length, "return_overflowing_tokens": True}
        rows.extend(tokenizer(list(documents), **options)["input_ids"])
    else:
        size = row_length - tokenizer.num_special_tokens_to_add()
        for text in documents:
            ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            for first in range(0, len(ids), size):
                rows.append(tokenizer.prepare_for_model(ids[first : first + size])["input_ids"])
    check_vocabulary(max(map(max, rows)), vocab_size)
    padded = tokenizer.pad({"input_ids": rows}, return_tensors="pt")
    return Texts(tokens=padded["input_ids"], attention_mask=padded["attention_mask"])


def verdict(lines: Mapping[str, EmbeddingSimilarity]) -> str:
    """Return the conclusion in one sentence, beginning with a result worse than the window's.

    Args:
        lines: Evaluation results of ``window alone``, ``raw swap`` and ``result``.
    """
    result, window, raw = (lines[name] for name in ("result", "window alone", "raw swap"))
    better = paired(result.rows, window.rows, least=LEAST_COSINE)
    if better.is_negative:
        return (
            "The result is worse than its window alone: the cosine similarity of its embeddings to "
            f"softmax's is {result.cosine:.3f}, the window's {window.cosine:.3f} (difference "
            f"{better}). Do not use it; train longer, keep layers exact, or use the window."
        )
    same = f"No difference from the window alone is measured: {better}."
    return (
        f"Embeddings of held-out text have a mean cosine of {mean_of(result.rows)} to softmax's; "
        f"the raw swap {mean_of(raw.rows)}, the window alone {mean_of(window.rows)}."
        + (f" {same}" if not better.is_clear else "")
    )


def as_dicts(lines: Mapping[str, Any]) -> dict[str, Any]:
    """Return evaluation results as plain data."""
    return {name: asdict(line) for name, line in lines.items()}


class EncoderRun(Run):
    """One run of an encoder, in which each row is one text; subclasses set the quality."""

    is_encoder = True
    task = "FEATURE_EXTRACTION"
    as_dicts: Any = staticmethod(as_dicts)

    def load_rows(self, data: list[Path], column: str) -> tuple[Texts, Texts]:
        """Return training texts and held-out texts.

        Raises:
            SpecError: An option splits rows, or does not suit the subclass.
        """
        if self.config.loop.cp_size > 1:
            raise SpecError(
                "cp_size splits long rows over processes, but each row of an encoder is one text "
                "of its own length; leave it out"
            )
        return split_rows(self.path, data, column, self.config, tokenize_texts)

    def rows_of_length(self, length: int | None) -> None:
        """Refuse rows of another length; each row is one text.

        Raises:
            SpecError: A length is given.
        """
        if length is not None:
            raise SpecError(
                "distil_length is the length of packed rows, but each row of an encoder is one "
                "text; leave it out"
            )

    def find_equal_window(self) -> None:
        """Return ``None``: an encoder keeps no cache."""

    def set_eval_data(self, held_out: Texts) -> None:
        """Set the held-out texts."""
        n = self.config.judged_rows
        self.texts = Texts(tokens=held_out.tokens[:n], attention_mask=held_out.attention_mask[:n])


class EmbeddingRun(EncoderRun):
    """One run of an encoder whose embeddings are to stay those of the original model."""

    quality_class = EmbeddingSimilarity
    verdict: Any = staticmethod(verdict)

    def load_rows(self, data: list[Path], column: str) -> tuple[Texts, Texts]:
        """Return training texts and held-out texts."""
        config = self.config
        if config.train_on == "completions":
            raise SpecError(
                "train_on='completions' selects predicted tokens, and an encoder predicts none; "
                "leave it out"
            )
        return super().load_rows(data, column)

    def load(self, **options: Any) -> PreTrainedModel:
        """Return the swapped model with its saved weights, in the class it was saved in."""
        cls = model_class(read_config(self.path), self.path)
        options["disable_dropout"] = self.config.disable_dropout
        return load_model(self.path, self.spec, cls, **options)

    def set_eval_data(self, held_out: Texts) -> None:
        """Set the held-out texts and compute the original model's embeddings of them."""
        super().set_eval_data(held_out)

        with self.shards.running(self.model), original_attention(self.model):
            self.originals = embeddings(self.model, self.texts)

    def quality(self, model: PreTrainedModel, *, is_original: bool = False) -> EmbeddingSimilarity:
        """Return the similarity of a model's embeddings to the original model's."""
        return similarity(embeddings(model, self.texts), self.originals)
