"""Prompts with completions, and conversations, as packed rows whose loss covers completions only.

Data have the form that TRL takes: a line with ``prompt`` and ``completion``, each a string or a
list of messages, or a line with ``messages``, of which those of the assistant are completions.
"""

from __future__ import annotations

import json
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from jinja2 import TemplateError

from attnzoo.errors import short_repr
from attnzoo.evaluation.rows import IGNORE_INDEX, Rows
from attnzoo.hf.pretrained import UNREADABLE
from attnzoo.training.data import check_vocabulary
from attnzoo.training.documents import DataError

SCHEMA = (
    "the fields 'prompt' and 'completion', strings or lists of messages, or 'messages', a list of "
    '{"role": ..., "content": ...}'
)


class Tokens(NamedTuple):
    """One tokenized example: its tokens, and the label of each."""

    ids: list[int]
    labels: list[int]


def example_of(row: dict[str, Any], source: str) -> str:
    """Return the example in a row of a file or data set, as JSON.

    Raises:
        DataError: The row is no example.
    """
    names = ("messages",) if row.get("messages") else ("prompt", "completion")
    kinds = {type(row.get(name)) for name in names}
    if kinds not in ({str}, {list}) or (names == ("messages",) and kinds == {str}):
        fields = ", ".join(row) or "none"
        raise DataError(
            f"{source!r} has no completions: with train_on='completions' a row needs {SCHEMA} "
            f"(its fields: {fields})"
        )
    return json.dumps({name: row[name] for name in names}, sort_keys=True, ensure_ascii=False)


def pack_completions(
    examples: Sequence[str], tokenizer: Any, *, row_length: int, vocab_size: int
) -> Rows:
    """Tokenize examples and pack them into rows of one length, without cutting any in two.

    A longer example keeps its first ``row_length`` tokens. Padding ends a row as a document of its
    own, without labels.

    Args:
        examples: As :func:`example_of` returns them.
        tokenizer: Tokenizer, with a chat template if examples have messages.
        row_length: Tokens per row.
        vocab_size: The model's.

    Raises:
        DataError: No completion is left, or the tokenizer does not match the model.
    """
    whole = [tokenize_example(json.loads(text), tokenizer) for text in examples]
    cut = [Tokens(ids[:row_length], labels[:row_length]) for ids, labels in whole]
    kept = [x for x in cut if has_labels(x)]
    if not kept and any(map(has_labels, whole)):
        raise DataError(
            f"No completion begins within {row_length} tokens of its example; make rows longer "
            "(--length)"
        )
    if not kept:
        raise DataError(
            "No example has a completion to train on: messages of the assistant are missing, or "
            "the completions, as the chat template renders them, are empty"
        )
    check_vocabulary(max(max(x.ids) for x in kept), vocab_size)
    packed = best_fit([len(x.ids) for x in kept], row_length)
    shape = (len(packed), row_length)
    tokens = torch.full(shape, tokenizer.pad_token_id or tokenizer.eos_token_id or 0)
    labels, positions = torch.full(shape, IGNORE_INDEX), torch.zeros(shape, dtype=torch.long)
    ends = []
    for row, members in enumerate(packed):
        end = 0
        for x in (kept[i] for i in members):
            start, end = end, end + len(x.ids)
            tokens[row, start:end] = torch.tensor(x.ids)
            labels[row, start:end] = torch.tensor(x.labels)
            positions[row, start:end] = torch.arange(end - start)
        positions[row, end:] = torch.arange(row_length - end)
        ends.append(end)
    trained = labels[labels != IGNORE_INDEX]
    return Rows(
        tokens=tokens,
        positions=positions,
        labels=labels,
        ends=torch.tensor(ends),
        bytes_per_token=len(tokenizer.decode(trained, skip_special_tokens=True).encode())
        / len(trained),
        shortened=sum(len(ids) > row_length for ids, _ in whole),
    )


def has_labels(x: Tokens) -> bool:
    """Return whether the loss covers a token; the first token has none before it."""
    return any(label != IGNORE_INDEX for label in x.labels[1:])


def tokenize_example(example: dict[str, Any], tokenizer: Any) -> Tokens:
    """Return the tokens of an example, with labels for those of its completions."""
    text, spans = render(example, tokenizer)
    ids = _ids(tokenizer, text)
    labels = [IGNORE_INDEX] * len(ids)
    for before, after in spans:
        # a token that merges the end of the prompt with the completion is predicted too
        first = _common(_ids(tokenizer, before), ids)
        last = len(ids) if after == text else _common(_ids(tokenizer, after), ids)
        labels[first:last] = ids[first:last]
    return Tokens(ids, labels)


def render(example: dict[str, Any], tokenizer: Any) -> tuple[str, list[tuple[str, str]]]:
    """Return the text of an example and, per completion, the text before it and to its end.

    Raises:
        DataError: The tokenizer has no chat template, or the template changes earlier messages.
    """
    if "messages" not in example and isinstance(example["prompt"], str):
        end = tokenizer.eos_token or ""
        text = example["prompt"] + example["completion"]
        text += "" if text.endswith(end) else end
        return text, [(example["prompt"], text)]
    if getattr(tokenizer, "chat_template", None) is None:
        raise DataError(
            "The data have messages, but the model's tokenizer has no chat template; set "
            "tokenizer.chat_template and save the tokenizer, or give prompts and completions as "
            "strings"
        )
    if "messages" in example:
        messages = example["messages"]
        turns = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
        ends = [(i, i + 1) for i in turns]
    else:
        messages = example["prompt"] + example["completion"]
        ends = [(len(example["prompt"]), len(messages))]

    def template(count: int, prompt: bool) -> str:
        options = {"tokenize": False, "add_generation_prompt": prompt}
        try:
            return str(tokenizer.apply_chat_template(messages[:count], **options))
        except (TemplateError, *UNREADABLE) as error:
            raise DataError(
                f"The tokenizer's chat template cannot write the messages "
                f"{short_repr(messages[:count])}: {type(error).__name__}: {error}"
            ) from error

    text = template(len(messages), False)
    spans = [(template(first, True), template(last, False)) for first, last in ends]
    for before, after in spans:
        if not (text.startswith(after) and after.startswith(before)):
            raise DataError(
                "The tokenizer's chat template renders the beginning of a conversation differently "
                "when more messages follow, so the tokens of a completion are not defined; use a "
                "template that only appends, or give prompts and completions as strings"
            )
    return text, spans


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the common beginning of two sequences."""
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def best_fit(lengths: Iterable[int], size: int) -> list[list[int]]:
    """Pack items into bins of one size, longest first, each into the fullest bin that has room.

    Returns:
        The indices of the items in each bin.
    """
    bins: list[list[int]] = []
    space: list[tuple[int, int]] = []  # free tokens and index of each bin, sorted
    for item, length in _longest_first(lengths):
        place = bisect_left(space, (length, 0))
        if place < len(space):
            free, chosen = space.pop(place)
        else:
            free, chosen = size, len(bins)
            bins.append([])
        bins[chosen].append(item)
        insort(space, (free - length, chosen))
    return bins


def _longest_first(lengths: Iterable[int]) -> Iterator[tuple[int, int]]:
    yield from sorted(enumerate(lengths), key=lambda pair: (-pair[1], pair[0]))
