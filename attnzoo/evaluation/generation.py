"""Quality of greedy generation: continuations, copied segments and needles.

The loss of a text scores each token after the true ones. In generation a model reads its own
tokens, so that one wrong token changes those that follow.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from attnzoo.evaluation.corpus import cut_rows
from attnzoo.evaluation.recall_rows import (
    COPY_TOKENS,
    Encode,
    Needles,
    copy_rows,
    recall_distances,
)
from attnzoo.hf.seam import cache_argument

ROWS = 16  # of each kind
NEW_TOKENS = 64  # longest continuation
COPY_ANSWER = COPY_TOKENS // 2  # generated tokens of a copy; the prompt ends with the others


@dataclass(frozen=True, kw_only=True)
class GenerationBatch:
    """Rows that a model continues greedily.

    Attributes:
        prompts: ``[N, P]``, plain text.
        copies: ``[N, S]``; each row ends with a copy of a segment, of which a model generates the
            last ``COPY_ANSWER`` tokens. ``None`` if rows are too short.
        needles: ``[N, S]``; each row ends with a number that it has assigned to a name earlier.
            ``None`` if rows are too short.
        needle_answer: Number of tokens in a needle's number.
        distance: Tokens from a segment or number to its copy.
        new_tokens: Tokens to generate after a prompt.
        reference: ``[N, new_tokens]``, the original model's continuations of ``prompts``.
    """

    prompts: Tensor
    copies: Tensor | None
    needles: Tensor | None
    needle_answer: int
    distance: int
    new_tokens: int
    reference: Tensor | None = None

    def to(self, device: torch.device) -> GenerationBatch:
        """Return the batch with its tensors on a device."""
        given = {k: x.to(device) for k, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **given)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class GenerationQuality:
    """Quality of greedy generation.

    Attributes:
        agreement: Fraction of generated tokens that equal those of the original model at the same
            position.
        equal_tokens: Mean number of tokens before the first that differs from the original's.
        copies: Fraction of the generated tokens of copies that equal the segment's.
        needles: Fraction of rows whose number is generated without an error.
        agreement_rows: ``agreement`` of each continuation.
    """

    agreement: float
    equal_tokens: float
    copies: float | None
    needles: float | None
    agreement_rows: list[float]


def make_generation_batch(
    tokens: Tensor, encode: Encode, length: int, rows: Tensor | None = None
) -> GenerationBatch:
    """Cut prompts from a text, and write copies and needles at the longest distance that fits.

    Args:
        tokens: The text, ``[L]``, with at least ``length`` tokens.
        encode: Returns the tokens of a string.
        length: Tokens of a prompt and its continuation.
        rows: ``[N, length]``, rows whose beginnings are the prompts; drawn from the text when
            ``None``.
    """
    generator = torch.Generator().manual_seed(0)
    new_tokens = min(NEW_TOKENS, length // 2)
    if rows is None:
        prompts = cut_rows(tokens, ROWS, length - new_tokens, generator)
    else:
        prompts = rows[:ROWS, : length - new_tokens]
    distances = recall_distances(length)
    needles = Needles(encode, ROWS)
    fits = bool(distances)
    distance = distances[-1] if fits else 0
    return GenerationBatch(
        prompts=prompts,
        copies=copy_rows(tokens, distance, generator, ROWS) if fits else None,
        needles=needles.rows(tokens, distance, generator) if fits else None,
        needle_answer=needles.answer_tokens,
        distance=distance,
        new_tokens=new_tokens,
    )


@torch.no_grad()
def continue_greedily(model: PreTrainedModel, prompts: Tensor, new_tokens: int) -> Tensor:
    """Return the most probable continuation of each prompt, token by token.

    Args:
        model: A causal model in evaluation mode. Its generation settings have no effect.
        prompts: ``[N, P]``, without padding.
        new_tokens: Tokens to generate; none of them ends the text.

    Returns:
        Tokens, ``[N, new_tokens]``.
    """
    cache, tokens, found = DynamicCache(config=model.config), prompts, []
    for _ in range(new_tokens):
        output = model(tokens, **cache_argument(cache), use_cache=True, logits_to_keep=1)
        tokens = output.logits[:, -1:].argmax(-1)
        found.append(tokens)
    return torch.cat(found, 1)


def with_reference(batch: GenerationBatch, model: PreTrainedModel) -> GenerationBatch:
    """Return the batch with the continuations of a model, with which others are compared."""
    return replace(batch, reference=continue_greedily(model, batch.prompts, batch.new_tokens))


def measure_generation(
    model: PreTrainedModel, batch: GenerationBatch, *, is_original: bool = False
) -> GenerationQuality:
    """Return how a model generates, compared with ``batch.reference`` and with the rows.

    Args:
        model: A causal model in evaluation mode.
        batch: The rows.
        is_original: Whether the model is the one that continued the prompts as
            ``batch.reference``, so that it need not continue them again.
    """
    assert batch.reference is not None
    continued = batch.reference
    if not is_original:
        continued = continue_greedily(model, batch.prompts, batch.new_tokens)
    equal = continued.eq(batch.reference)
    copied = correct_tokens(model, batch.copies, COPY_ANSWER)
    needles = correct_tokens(model, batch.needles, batch.needle_answer)
    return GenerationQuality(
        agreement=float(equal.float().mean()),
        agreement_rows=equal.float().mean(1).tolist(),
        equal_tokens=float(equal.int().cumprod(1).sum(1).float().mean()),
        copies=None if copied is None else float(copied.float().mean()),
        needles=None if needles is None else float(needles.all(1).float().mean()),
    )


def correct_tokens(model: PreTrainedModel, rows: Tensor | None, answer: int) -> Tensor | None:
    """Return which of the last ``answer`` tokens of each row a model generates, ``[N, answer]``."""
    if rows is None:
        return None
    return continue_greedily(model, rows[:, :-answer], answer) == rows[:, -answer:]
