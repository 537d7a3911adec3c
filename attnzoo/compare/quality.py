"""Quality over length: loss by position, and recall by distance, for any attention of a model.

Recall is asked for in two ways: the second copy of a segment, and a needle, a name that is given a
number once and has it asked for later. Beyond the length that a model was trained for, both show
what its positions do.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from attnzoo.compare.build import load
from attnzoo.compare.cases import Case, Subject
from attnzoo.corpus import cut_rows, read_bytes, standard_library_files
from attnzoo.errors import SpecError

ROWS = 6  # of every kind
COPIED = 48  # tokens of a segment that comes again
SKIPPED = 4  # of its second copy, until which nobody could know that it comes again
FIRST = 64  # tokens up to the first position bucket's end, and the shortest distance


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Rows to judge on, as they go to the processes that judge.

    Attributes:
        plain: ``[N, T]``, text as it is.
        copies: By distance, rows ``[N, S]`` whose last ``COPIED`` tokens stand as far before.
        needles: By distance, rows whose last ``answer`` tokens were said as far before.
        answer: Tokens of a needle's number.
        bytes_per_token: Of the text.
        sha: Names all of it.
    """

    plain: Tensor
    copies: dict[int, Tensor]
    needles: dict[int, Tensor]
    answer: int
    bytes_per_token: float
    sha: str


def distances(length: int) -> list[int]:
    """Return the distances that recall is asked over: doubling, as far as a row is long."""
    found, distance = [], FIRST
    while distance + COPIED + FIRST <= length:
        found.append(distance)
        distance *= 2
    return found


def quality_inputs(path: Path, text: Path | None, length: int) -> Asked:
    """Tokenize text and make the rows.

    Args:
        path: Folder of the model, for its tokenizer.
        text: File; the held-out part of the standard library when ``None``.
        length: T.

    Raises:
        SpecError: There is no text, or too little of it.
    """
    if text is None:
        string = read_bytes(standard_library_files(held_out=True)).decode("utf-8", "replace")
    else:
        try:
            string = text.read_bytes().decode("utf-8", "replace")
        except OSError as error:
            raise SpecError(f"The text {str(text)!r} cannot be read: {error}") from error
    tokenizer: Any = AutoTokenizer.from_pretrained(path)

    def encode(piece: str) -> Tensor:
        ids = tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"]
        return torch.tensor(ids, dtype=torch.long)

    tokens = encode(string)
    if len(tokens) < length:
        raise SpecError(
            f"The text has {len(tokens)} tokens, but a row needs {length}; give more --text, or a "
            "smaller --quality-length"
        )
    generator = torch.Generator().manual_seed(0)
    plain = cut_rows(tokens, ROWS, length, generator)
    copies = {d: copy_rows(tokens, d, generator) for d in distances(length)}
    given, question, answer = _needle(encode)
    needles = {d: needle_rows(tokens, d, given, question, generator) for d in distances(length)}
    sha = hashlib.sha256(plain.numpy().tobytes() + string[:4096].encode()).hexdigest()[:12]
    return Asked(
        plain=plain,
        copies=copies,
        needles=needles,
        answer=answer,
        bytes_per_token=len(string.encode()) / len(tokens),
        sha=sha,
    )


def copy_rows(tokens: Tensor, distance: int, generator: torch.Generator) -> Tensor:
    """Return rows that end with ``COPIED`` tokens which stand ``distance`` tokens before, too.

    Shape ``[N, FIRST + distance + COPIED]``, or with a longer distance where a copy would overlap.
    """
    rows = cut_rows(tokens, ROWS, FIRST + distance + COPIED, generator)
    rows[:, -COPIED:] = rows[:, -COPIED - distance : -distance or None][:, :COPIED]
    return rows


def _needle(encode: Any) -> tuple[list[Tensor], list[Tensor], int]:
    """Return ways to say a number, ways to ask for it with the answer, and its tokens."""
    given, question, sizes = [], [], set()
    for row in range(ROWS):
        number = str(27_644_437 * (row + 3) % 9_000_000 + 1_000_000)
        said, asked = encode(f"\nPASSKEY_{row} = {number}\n"), encode(f"\nPASSKEY_{row} = ")
        answer = encode(number)
        given.append(said)
        question.append(torch.cat([asked, answer]))
        sizes.add(len(answer))
    return given, question, min(sizes)


def needle_rows(
    tokens: Tensor,
    distance: int,
    given: list[Tensor],
    question: list[Tensor],
    generator: torch.Generator,
) -> Tensor:
    """Return rows of text that say a number ``distance`` tokens before they ask for it."""
    length = FIRST + distance + max(len(part) for part in question)
    rows = cut_rows(tokens, ROWS, length, generator)
    for row, said, asked in zip(rows, given, question, strict=True):
        start = length - len(asked) - distance
        row[start : start + len(said)] = said
        row[length - len(asked) :] = asked
    return rows


@torch.no_grad()
def measure_quality(case: Case, subject: Subject, asked: Asked) -> dict[str, Any]:
    """Judge one attention; losses are bits per byte, recall the share of tokens guessed right.

    ``bits_per_byte`` is over the positions that the model was made for, ``..._beyond`` over others.
    """
    model = load(subject, case)
    to_bits = 1 / (math.log(2) * asked.bytes_per_token)
    losses = torch.cat([_answers(model, row[None])[0] for row in asked.plain]) * to_bits
    by_position = {}
    start, length = 0, asked.plain.shape[1]
    while start < length - 1:
        end = min(max(FIRST, 2 * start), length)
        by_position[end] = round(float(losses[:, start:end].mean()), 4)
        start = end
    copied, copied_loss, found = {}, {}, {}
    for distance, rows in asked.copies.items():
        loss, right = _answers(model, rows)
        copied[distance] = round(float(right[:, -COPIED + SKIPPED :].float().mean()), 4)
        copied_loss[distance] = round(float(loss[:, -COPIED + SKIPPED :].mean()) * to_bits, 4)
    for distance, rows in asked.needles.items():
        right = _answers(model, rows)[1][:, -asked.answer :]
        found[distance] = round(float(right.float().mean()), 4)
    trained = min(subject.trained or length, length)
    beyond = losses[:, trained:]
    return {
        "bits_per_byte": round(float(losses[:, :trained].mean()), 4),
        "bits_per_byte_beyond": round(float(beyond.mean()), 4) if beyond.numel() else None,
        "trained": trained,
        "loss_by_position": by_position,
        "copy_by_distance": copied,
        "copy_loss_by_distance": copied_loss,
        "needle_by_distance": found,
    }


def _answers(model: PreTrainedModel, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return cross-entropy in nats of every token but the first, and which are guessed right."""
    logits = model(rows, use_cache=False).logits[:, :-1].float()
    loss = F.cross_entropy(logits.transpose(1, 2), rows[:, 1:], reduction="none")
    return loss, logits.argmax(-1) == rows[:, 1:]
