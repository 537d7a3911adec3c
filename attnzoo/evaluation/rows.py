"""Rows of tokens with their documents, and a causal model's predictions and losses on them.

Every loss and every measurement takes :class:`Rows`: a row may hold several documents, and each is
predicted as if it were alone, with positions from 0. Letters: N rows, T tokens per row, V
vocabulary.
"""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median_low
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from attnzoo.errors import AttnzooError, UnsupportedError

IGNORE_INDEX = -100  # the label of tokens without a loss, as in transformers
ROWS_PER_STEP = 8
TOKENS_PER_STEP = 8192  # at most, if rows are long: the logits of a step are in memory
FIRST, SECOND = 5, 4  # tokens of the two documents that show whether a model separates documents


class NonFiniteError(AttnzooError):
    """A model's outputs are NaN or infinite, so its quality cannot be measured."""


def require_finite(value: float, name: str) -> float:
    """Return a measured value, or raise an error with its name if it is NaN or infinite."""
    if not math.isfinite(value):
        raise NonFiniteError(f"the {name} is {value}: the model's outputs are not finite")
    return value


def contributions(rows: Sequence[Tensor], scale: float = 1.0) -> list[float]:
    """Return one number per row, whose mean is ``scale`` times the mean over all numbers of rows.

    A row with more numbers contributes more, so that differences between two models on the same
    rows have the mean of the differences of their numbers.
    """
    total = sum(len(x) for x in rows)
    return [scale * float(x.float().sum()) * len(rows) / max(total, 1) for x in rows]


def unigram_bits_per_byte(tokens: Tensor, bytes_per_token: float) -> float:
    """Return the loss of a model that knows only how frequent each token is.

    A model that is not below it on these tokens predicts nothing: it is not trained, or the text is
    in another language.
    """
    frequencies = tokens.long().flatten().bincount().double() / tokens.numel()
    return float(torch.special.entr(frequencies).sum()) / (math.log(2) * bytes_per_token)


def fingerprint(*tensors: Tensor) -> str:
    """Return a hash of tensors and their shapes, 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for x in tensors:
        digest.update(repr(tuple(x.shape)).encode())
        digest.update(np.ascontiguousarray(x.numpy()).data)
    return digest.hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class Rows(Dataset[dict[str, Tensor]]):
    """Dataset of packed rows; an item has the arguments of a causal model's ``forward``.

    Attributes:
        tokens: ``[N, T]``, int32 or int64.
        positions: ``[N, T]`` likewise, from 0 in each document.
        bytes_per_token: Converts bits per token to bits per byte.
        starts: ``[D]``, where documents begin in the tokens of all rows; ``None`` if it is not
            known, or if rows begin with documents.
    """

    tokens: Tensor
    positions: Tensor
    bytes_per_token: float
    starts: Tensor | None = None

    @classmethod
    def of_documents(cls, tokens: Tensor, bytes_per_token: float = 1.0) -> Self:
        """Return rows of one document each.

        Args:
            tokens: ``[N, T]``.
            bytes_per_token: As the attribute.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return cls(tokens=tokens, positions=positions, bytes_per_token=bytes_per_token)

    def __len__(self) -> int:
        """N."""
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return ``input_ids``, ``position_ids`` and ``labels``, ``[T]`` each."""
        tokens, positions = self.tokens[index].long(), self.positions[index].long()
        labels = self.select([index]).targets[0]
        return {"input_ids": tokens, "position_ids": positions, "labels": labels}

    def select(self, index: slice | Sequence[int] | Tensor) -> Self:
        """Return some of the rows."""
        tokens, positions = self.tokens[index], self.positions[index]
        return replace(self, tokens=tokens, positions=positions, starts=None)

    def split(self, count: int) -> Iterator[Self]:
        """Yield the rows, ``count`` at a time."""
        for first in range(0, len(self), count):
            yield self.select(slice(first, first + count))

    def to(self, device: torch.device | str) -> Self:
        """Return the rows on a device."""
        moved: Any = {n: x.to(device) for n, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **moved)

    @property
    def length(self) -> int:
        """T."""
        return self.tokens.shape[1]

    @property
    def targets(self) -> Tensor:
        """The tokens to predict, ``[N, T]``, else ``IGNORE_INDEX``.

        The first token of a document has none, because the token before it belongs to another
        document.
        """
        return self.tokens.long().masked_fill(self.positions == 0, IGNORE_INDEX)

    @property
    def is_packed(self) -> bool:
        """Whether a document begins inside of a row."""
        return bool((self.positions[:, 1:] == 0).any())

    def places(self) -> list[tuple[int, slice]]:
        """Return the row and the tokens of each document."""
        found = []
        for row, positions in enumerate(self.positions):
            edges = [0, *(1 + (positions[1:] == 0).nonzero()[:, 0]).tolist(), self.length]
            found += [(row, slice(a, b)) for a, b in pairwise(edges)]
        return found

    def documents(self) -> list[Tensor]:
        """Return the tokens of each document as far as it stands in one row."""
        return [self.tokens[row, own].long() for row, own in self.places()]

    @property
    def fingerprint(self) -> str:
        """Hash of the rows."""
        return fingerprint(self.tokens, self.positions, torch.tensor(self.bytes_per_token))


def pack_documents(
    documents: Sequence[Tensor], count: int, length: int, bytes_per_token: float
) -> Rows:
    """Return rows of whole documents, one after the other, spread evenly over all of them.

    Args:
        documents: Tokens of each.
        count: Largest N.
        length: T; a document that ends beyond its row continues as another one in the next row.
        bytes_per_token: As in :class:`Rows`.

    Raises:
        ValueError: The documents have fewer tokens than a row.
    """
    tokens = torch.cat(list(documents))
    total = len(tokens) // length
    if not total:
        raise ValueError(too_short(len(tokens), length))
    in_row = torch.arange(length, dtype=tokens.dtype)
    begins = torch.zeros(total * length, dtype=torch.bool)
    starts = torch.tensor([0, *map(len, documents)]).cumsum(0)
    begins[starts[starts < len(begins)]] = True
    tokens, begins = (x[: total * length].view(total, length) for x in (tokens, begins))
    positions = in_row - torch.where(begins, in_row, 0).cummax(1).values
    rows = Rows(tokens=tokens, positions=positions, bytes_per_token=bytes_per_token)
    return rows.select([i * total // min(count, total) for i in range(min(count, total))])


def beginnings(documents: Sequence[Tensor], count: int, length: int) -> Tensor:
    """Return the first tokens of documents, of equal length, ``[N, T]``; N may be 0.

    Args:
        documents: Tokens of each.
        count: Largest N; the first documents that are long enough are taken.
        length: Largest T; where half of the documents are shorter, T is their median length.
    """
    if documents:
        length = min(length, median_low(map(len, documents)))
    found = [x[:length] for x in documents if len(x) >= length][:count]
    return torch.stack(found) if found else torch.empty(0, length, dtype=torch.long)


def too_short(tokens: int, length: int) -> str:
    """Return the message of an error: a text is shorter than a row."""
    return (
        f"the text has {tokens} tokens, but one row needs {length}; give more text or shorter rows"
    )


def losses_of(rows: Rows, logits: Tensor) -> Tensor:
    """Return the cross-entropy in nats of the tokens of rows, ``[N, T]``; 0 without a target."""
    losses = F.cross_entropy(
        logits[:, :-1].float().transpose(1, 2), rows.targets[:, 1:], reduction="none"
    )
    return F.pad(losses, (1, 0))


@torch.no_grad()
def predictions(model: Any, rows: Rows, count: int | None = None) -> Iterator[tuple[Rows, Tensor]]:
    """Yield rows, ``count`` at a time, and the logits of their predictions, ``[N, T, V]``.

    A document is predicted as if it were alone. Rows of several documents run as they are with
    positions if the model separates documents by these (:func:`separates_documents`); a model that
    does not, such as one with recurrent layers, runs each document by itself.

    Args:
        model: A causal model in evaluation mode.
        rows: On any device.
        count: Rows in one forward pass; 8, or fewer if they are long, when ``None``.
    """
    count = count or max(1, min(ROWS_PER_STEP, TOKENS_PER_STEP // rows.length))
    rows = rows.to(next(model.parameters()).device)
    together = rows.is_packed and separates_documents(model, rows)
    for part in rows.split(count):
        tokens = part.tokens.long()
        if together:
            positions = {"position_ids": part.positions.long()}
            yield part, model(tokens, **positions, use_cache=False).logits
        elif not part.is_packed:
            yield part, model(tokens, use_cache=False).logits
        else:
            found = [model(x[None], use_cache=False).logits[0] for x in part.documents()]
            yield part, torch.cat(found).unflatten(0, tokens.shape)


def token_losses(model: Any, rows: Rows, count: int | None = None) -> Tensor:
    """Return the losses of :func:`losses_of` of a model's :func:`predictions`, on the CPU."""
    return torch.cat([losses_of(*pair) for pair in predictions(model, rows, count)]).cpu()


def separates_documents(model: Any, rows: Rows) -> bool:
    """Return whether a model predicts the documents of a row as if each were alone.

    In a short row of two documents, other tokens in the first must change no bit of the
    predictions of the second. Of the rows, the documents of two must have the logits that they have
    alone: some models read the place in the row (chunked attention), or the longest document of a
    batch (rotary positions of type "longrope" or "dynamic").

    Args:
        model: A causal model in evaluation mode.
        rows: Rows whose tokens are used, on the model's device.
    """
    forward = getattr(model, "get_base_model", lambda: model)().forward
    if "position_ids" not in inspect.signature(forward).parameters:
        return False
    try:
        return _ignores_other_documents(model, rows) and _equals_documents_alone(model, rows)
    except UnsupportedError:  # the model refuses rows of several documents
        return False


def _ignores_other_documents(model: Any, rows: Rows) -> bool:
    tokens = rows.tokens.flatten().long()
    one = tokens[: FIRST + SECOND]
    other = one.clone()
    other[:FIRST] = tokens[-FIRST:]
    if torch.equal(one, other):
        other[:FIRST] = (other[:FIRST] + 1) % (int(tokens.max()) + 1)
    positions = torch.cat([torch.arange(FIRST), torch.arange(len(one) - FIRST)]).to(one.device)
    first, second = (
        model(x[None], position_ids=positions[None], use_cache=False).logits[0, FIRST:]
        for x in (one, other)
    )
    return torch.equal(first, second)


def _equals_documents_alone(model: Any, rows: Rows) -> bool:
    """Compare the row with the longest document, and that with most documents."""
    restarts = (rows.positions[:, 1:] == 0).sum(1)
    chosen = {int(rows.positions.amax(1).argmax()), int(restarts.argmax())}
    part = rows.select(sorted(chosen))
    positions = part.positions.long()
    together = model(part.tokens.long(), position_ids=positions, use_cache=False).logits
    error = torch.finfo(together.dtype).eps ** 0.5 * together.abs().max()
    for row, own in part.places():
        alone = model(part.tokens[row, own].long()[None], use_cache=False).logits[0]
        if not (together[row, own] - alone).abs().max() <= error:  # NaN too
            return False
    return True
