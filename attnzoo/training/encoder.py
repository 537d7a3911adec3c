"""Recovery of encoders: texts as they are, and how near their embeddings come to softmax's.

An encoder predicts nothing, so nothing can be lost in bits. What it is for is the vector of a text,
here the mean of its tokens' last hidden states, and a swap is judged by the cosine between the
vectors that it gives and those of the model as it was.
Letters: N texts, T tokens of the longest, M hidden size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel

from attnzoo.errors import SpecError
from attnzoo.integrations.convert import own_attention
from attnzoo.integrations.files import model_class, read_config
from attnzoo.integrations.layers import attention_layers
from attnzoo.training.data import DataError, refuse_unknown
from attnzoo.training.distil import read_hidden
from attnzoo.training.runs import Run, load_model, split_rows
from attnzoo.training.transfer import swapped_layers


def is_encoder(path: Path) -> bool:
    """Whether a saved model's attention sees what comes next, so that it is no language model.

    Raises:
        SpecError: There is no model, it has no attention layers, or it is an encoder-decoder.
    """
    config = read_config(path)
    # loaded as a language model, some that were saved without a head become causal
    language: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    with torch.device("meta"):
        model = (language or model_class(config, path))(config)
    causal = {layer.geometry.causal for layer in attention_layers(model)}
    if len(causal) != 1:
        raise SpecError(
            f"{str(path)!r} holds a {config.model_type} model with "
            + ("both kinds of attention layers" if causal else "no attention layers")
            + "; give a decoder or an encoder"
        )
    return not causal.pop()


@dataclass(frozen=True, kw_only=True)
class Texts(Dataset[dict[str, Tensor]]):
    """Texts, each in a row of its own, padded to the longest.

    Attributes:
        tokens: ``[N, T]``.
        real: ``[N, T]``, 0 at padding.
    """

    tokens: Tensor
    real: Tensor

    def __len__(self) -> int:
        """N."""
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return ``input_ids`` and ``attention_mask``, ``[T]`` both."""
        return {"input_ids": self.tokens[index], "attention_mask": self.real[index]}

    @property
    def fingerprint(self) -> str:
        """Name these texts by what is in them."""
        return hashlib.sha256(self.tokens.numpy().tobytes()).hexdigest()[:16]


def cut(documents: Sequence[str], tokenizer: Any, *, row_length: int, vocab_size: int) -> Texts:
    """Tokenize documents as the encoder takes them; long ones in pieces of ``row_length``.

    Raises:
        DataError: The tokenizer has no padding, or its tokens are not the model's.
    """
    if tokenizer.pad_token_id is None:
        raise DataError("The tokenizer has no padding token, which texts of many lengths need")
    rows: list[list[int]] = []
    if tokenizer.is_fast:
        cutting = {"truncation": True, "max_length": row_length, "return_overflowing_tokens": True}
        rows.extend(tokenizer(list(documents), **cutting)["input_ids"])
    else:
        size = row_length - tokenizer.num_special_tokens_to_add()
        for text in documents:
            ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            for at in range(0, len(ids), size):
                rows.append(tokenizer.prepare_for_model(ids[at : at + size])["input_ids"])
    refuse_unknown(max(map(max, rows)), vocab_size)
    made = tokenizer.pad({"input_ids": rows}, return_tensors="pt")
    return Texts(tokens=made["input_ids"], real=made["attention_mask"])


@dataclass(frozen=True, kw_only=True)
class Closeness:
    """How near the embeddings of held-out texts are to those of the model as it was."""

    cosine: float  # mean over the texts
    least: float  # of any text


@torch.no_grad()
def embeddings(model: PreTrainedModel, texts: Texts) -> Tensor:
    """Return the mean of the last hidden states of each text's tokens, ``[N, M]``, on the CPU."""
    training, means = model.training, []
    device = next(model.parameters()).device
    model.eval()
    for tokens, real in zip(texts.tokens.split(16), texts.real.split(16), strict=True):
        longest = int(real.sum(1).max())
        if real[:, 0].all():  # padded on the right: most rows are shorter than the longest
            tokens, real = tokens[:, :longest], real[:, :longest]
        batch = {"input_ids": tokens.to(device), "attention_mask": real.to(device)}
        hidden, weight = read_hidden(model, batch).float(), batch["attention_mask"].unsqueeze(-1)
        means.append(((hidden * weight).sum(1) / weight.sum(1)).cpu())
    model.train(training)
    return torch.cat(means)


def verdict(lines: Mapping[str, Closeness]) -> str:
    """Say in words what came out, the bad news first.

    Args:
        lines: ``window alone``, ``raw swap`` and ``result``.
    """
    result, window, raw = (lines[name].cosine for name in ("result", "window alone", "raw swap"))
    if result < window:
        return (
            f"The result is worse than its window alone: embeddings have a cosine of {result:.3f} "
            f"to softmax's, the window's {window:.3f}. Do not use it; train longer, keep layers "
            "exact, or use the window."
        )
    return (
        f"Embeddings of held-out text have a mean cosine of {result:.3f} to softmax's; the raw "
        f"swap's {raw:.3f}, the window's {window:.3f}."
    )


def as_data(lines: Mapping[str, Closeness]) -> dict[str, Any]:
    """Return the lines as plain data."""
    return {name: asdict(line) for name, line in lines.items()}


class EncoderRun(Run):
    """A run of an encoder."""

    line = Closeness
    encoder = True
    task = "FEATURE_EXTRACTION"
    verdict: Any = staticmethod(verdict)
    as_data: Any = staticmethod(as_data)

    def load_rows(self, data: list[Path], column: str) -> tuple[Texts, Texts]:
        """Return texts to train on, and texts held out."""
        config = self.config
        if config.gradient_checkpointing:
            raise SpecError(
                "gradient_checkpointing needs the passes of training, and encoders are recovered "
                "without their dropout, in those of evaluation; take accumulate to save memory"
            )
        if config.loop.cp_size > 1:
            raise SpecError(
                "cp_size has processes share long rows, and an encoder's texts are rows of their "
                "own, each as long as it is; leave it out"
            )
        return split_rows(self.path, data, column, config, cut)

    def fresh(self) -> PreTrainedModel:
        """Return the model as it was loaded, of the class that it was saved as."""
        return load_model(self.path, self.spec, model_class(read_config(self.path), self.path))

    def judge_on(self, held_out: Texts) -> None:
        """Take texts to judge on, and what the model makes of them before anything is trained."""
        count = self.config.judged_rows
        self.texts = Texts(tokens=held_out.tokens[:count], real=held_out.real[:count])
        with own_attention(self.model):
            self.originals = embeddings(self.model, self.texts)

    def quality(self, model: PreTrainedModel) -> Closeness:
        """Judge a model as it is."""
        found = torch.cosine_similarity(embeddings(model, self.texts), self.originals)
        return Closeness(cosine=float(found.mean()), least=float(found.min()))

    def schedule(self, model: Any, steps: int) -> Any:
        """Return what is called before each step: dropout rests, what backends train by does not.

        A teacher with dropout would be another one in each step.
        """
        windows, backends = super().schedule(model, steps), swapped_layers(model).values()

        def before(step: int) -> None:
            model.eval()
            for backend in backends:
                backend.train()
            windows(step)

        return before
