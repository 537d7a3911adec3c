"""Quality of models without a causal language-modeling head: similarity of their embeddings.

The embedding of a text is the mean of its tokens' last hidden states. A swap is evaluated by the
cosine similarity between its embeddings and those of the original model. Other letters: N texts, T
tokens of the longest text.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedModel

from attnzoo.errors import SpecError
from attnzoo.evaluation.corpus import cut_rows, first_documents, load_tokenizer
from attnzoo.evaluation.rows import fingerprint, require_finite
from attnzoo.hf.swap import original_attention

ROWS = 8  # of each length
SHORTEST = 64  # tokens


@dataclass(frozen=True, kw_only=True)
class Texts(Dataset[dict[str, Tensor]]):
    """Dataset of texts, one per row, padded to the longest.

    Attributes:
        tokens: ``[N, T]``.
        attention_mask: ``[N, T]``, 0 at padding and 1 elsewhere.
    """

    tokens: Tensor
    attention_mask: Tensor

    def __len__(self) -> int:
        """N."""
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return ``input_ids`` and ``attention_mask``, ``[T]`` each."""
        return {"input_ids": self.tokens[index], "attention_mask": self.attention_mask[index]}

    @property
    def fingerprint(self) -> str:
        """Hash of the texts."""
        return fingerprint(self.tokens, self.attention_mask)


@torch.no_grad()
def embeddings(model: PreTrainedModel, texts: Texts) -> Tensor:
    """Return the mean last hidden state of each text without padding, ``[N, M]``, on the CPU."""
    training, means = model.training, []
    device = next(model.parameters()).device
    model.eval()
    batches = zip(texts.tokens.split(16), texts.attention_mask.split(16), strict=True)
    for tokens, mask in batches:
        if mask[:, 0].all():  # right padding: trim the batch to its longest text
            longest = int(mask.sum(1).max())
            tokens, mask = tokens[:, :longest], mask[:, :longest]
        mask = mask.to(device)
        states: Any = model(tokens.to(device), attention_mask=mask, output_hidden_states=True)
        hidden, weight = states.hidden_states[-1].float(), mask.unsqueeze(-1)
        means.append(((hidden * weight).sum(1) / weight.sum(1)).cpu())
    model.train(training)
    return torch.cat(means)


def similarity(found: Tensor, original: Tensor) -> dict[str, Any]:
    """Return the cosine similarity between embeddings, ``[N, M]`` each: mean, least, of each text.

    Raises:
        NonFiniteError: An embedding is not finite.
    """
    cosines = torch.cosine_similarity(found, original)
    mean = require_finite(float(cosines.mean()), "cosine similarity of the embeddings")
    return {"cosine": mean, "least": float(cosines.min()), "rows": cosines.tolist()}


def special_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the tokens that a tokenizer writes before a text, and those after it."""
    text, whole = (tokenizer("a", add_special_tokens=x)["input_ids"] for x in (False, True))
    start = next(i for i in range(len(whole)) if whole[i : i + len(text)] == text)
    return whole[:start], whole[start + len(text) :]


@dataclass(frozen=True, kw_only=True)
class EmbeddingEvalBatch:
    """Texts of several lengths, to compare embeddings over length.

    Attributes:
        texts: By length, N texts of so many tokens with the tokenizer's special tokens.
        sha: Hash of the texts, a key for results.
    """

    texts: dict[int, Texts]
    sha: str

    @property
    def shape(self) -> tuple[int, int]:
        """N and the longest T."""
        return ROWS, max(self.texts)


def make_embedding_batch(
    path: Path, text: Path | None, length: int, rows: int = ROWS
) -> EmbeddingEvalBatch:
    """Tokenize a text with a model's tokenizer and cut texts of each length.

    Args:
        path: Folder of the model.
        text: File; the held-out part of the standard library when ``None``.
        length: The longest T, or the median length of several documents if that is less; shorter
            ones are halves of it, down to 64.
        rows: N.

    Raises:
        SpecError: The file cannot be read, or it is shorter than one text.
    """
    tokenizer = load_tokenizer(path)
    documents = first_documents(tokenizer, text)
    before, after = map(torch.tensor, special_tokens(tokenizer))
    special = len(before) + len(after)
    middle = median_low(map(len, documents))
    if len(documents) == 1 and middle < length - special:
        raise SpecError(
            f"The text has {middle} tokens, but a row needs {length}; give a longer --data, or a "
            "smaller --max-length"
        )
    length = min(length, middle + special)
    generator, texts, size = torch.Generator().manual_seed(0), {}, length
    while size == length or size >= SHORTEST:
        inner = cut_rows(documents, rows, size - special, generator).tokens
        whole = torch.cat([before.expand(rows, -1), inner, after.expand(rows, -1)], 1).long()
        texts[size] = Texts(tokens=whole, attention_mask=torch.ones_like(whole))
        size //= 2
    texts = dict(sorted(texts.items()))
    digest = hashlib.sha256("".join(x.fingerprint for x in texts.values()).encode())
    return EmbeddingEvalBatch(texts=texts, sha=digest.hexdigest()[:12])


def measure_embeddings(model: PreTrainedModel, batch: EmbeddingEvalBatch) -> dict[str, Any]:
    """Return the similarity of a swapped model's embeddings to the original model's, by length.

    ``cosine`` and ``least`` are those of the longest texts.

    Args:
        model: A swapped model.
        batch: Texts.

    Raises:
        NonFiniteError: An embedding is not finite.
    """
    found = {}
    for length, texts in batch.texts.items():
        with original_attention(model):
            original = embeddings(model, texts)
        found[length] = similarity(embeddings(model, texts), original)
    longest = found[max(found)]
    return {
        "cosine": round(longest["cosine"], 4),
        "least": round(longest["least"], 4),
        "cosine_rows": [round(x, 6) for x in longest["rows"]],
        "cosine_by_length": {length: round(x["cosine"], 4) for length, x in found.items()},
    }
