"""What a candidate of a plan saves, at which length, and whether rows can judge it.

A window of 128 tokens changes nothing in rows of 128 tokens: its loss there is 0, and says nothing
about the length for which it is meant. A candidate is therefore judged only if

- at least half of the tokens of the rows have keys that it does not read, found as the first
  position at which its predictions differ from softmax's, and
- at the length that the user means, its cache is smaller than softmax's, or its forward pass is
  clearly faster (:mod:`attnzoo.evaluation.margins`).

Beside each candidate stands the window of equal memory, which needs no training.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from attnzoo.evaluation.margins import Difference, mean_of, paired, speedup
from attnzoo.evaluation.presets import preset_options
from attnzoo.evaluation.rows import Rows
from attnzoo.hf.swap.convert import restore, swap
from attnzoo.spec import AttentionSpec

SAME = 1e-6  # nats; below it, predictions are equal up to rounding
ROUNDS = 6  # of timed forward passes
Spec = Any
CANDIDATE_BACKENDS = ("longformer", "gated_linear", "delta", "reformer")


def preset_candidates(names: Iterable[str] = CANDIDATE_BACKENDS) -> list[str]:
    """Return the candidates of backends by their presets, such as ``"longformer:window=128"``.

    Raises:
        UnknownBackendError: A name is unknown.
    """
    return [
        f"{name}:{options}".rstrip(":")
        for name in names
        for options in map(options_text, preset_options(name, "recovery"))
    ]


def options_text(options: Mapping[str, Any]) -> str:
    """Return options as the command line takes them; the inverse of ``spec_of``."""
    return ",".join(
        f"{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in options.items()
    )


def with_window(name: str, spec: AttentionSpec, window: int) -> tuple[str, AttentionSpec]:
    """Return the name and the spec of a candidate with another window, if it has one.

    Args:
        name: Its name.
        spec: Its spec, of one backend.
        window: Tokens.
    """
    entry = spec.default
    if getattr(entry.config, "window", None) is None:
        return name, spec
    options = {**entry.options, "window": window}
    changed = AttentionSpec.from_dict({"backend": entry.backend, "options": options})
    return f"{entry.backend}:{options_text(options)}", changed


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A candidate in all layers, untrained, beside the window of equal memory.

    Attributes:
        name: Its name on the command line.
        length: The length that the user means, in tokens.
        cache_bytes: Its cache at that length, all layers.
        exact_bytes: Softmax's.
        kl_rows: KL of the predictions in nats on each row.
        window: Tokens of the window with as large a cache; ``None`` if the cache is not smaller
            than softmax's.
        window_rows: KL of that window on each row; empty if the rows are no longer than it.
        own_window: Its own window in tokens; ``None`` without one.
    """

    name: str
    length: int
    cache_bytes: int
    exact_bytes: int
    kl_rows: list[float]
    window: int | None
    window_rows: list[float]
    own_window: int | None = None

    @property
    def kl(self) -> Difference:
        """Mean KL over the rows."""
        return mean_of(self.kl_rows)

    def winner(self) -> str:
        """Return which of candidate and window changes predictions less, in words."""
        if self.window is None:
            return "its cache is as large as softmax's"
        if not self.window_rows:
            return f"the rows are not longer than the window ({self.window})"
        more = paired(self.kl_rows, self.window_rows)
        if not more.is_clear:
            return "no difference measured"
        return "the window" if more.mean > 0 else "the candidate"

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes and the winner as JSON data."""
        return {**vars(self), "winner": self.winner()}


def token_divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """Return KL(teacher || student) of each prediction in nats, ``[B, T]``, of logits."""
    student, teacher = (x.float().log_softmax(-1) for x in (student, teacher))
    return F.kl_div(student, teacher, reduction="none", log_target=True).sum(-1)


def first_difference(kl: Tensor, rows: Rows) -> int | None:
    """Return the first position of a document whose predictions differ from softmax's, if any.

    Args:
        kl: KL of each prediction, ``[B, T]``.
        rows: The rows.
    """
    different = rows.positions[(kl > SAME) & rows.counted]
    return int(different.min()) if len(different) else None


def why_not_judged(kl: Tensor, rows: Rows) -> str:
    """Return why rows cannot judge a candidate, and which rows can, or ``""``.

    Args:
        kl: KL of each prediction with the candidate in all layers, ``[B, T]``.
        rows: The rows.
    """
    first, longest = first_difference(kl, rows), max(map(len, rows.documents()))
    what = f"rows of {longest:,} tokens"
    advice = "rows of {:,} tokens or more (--max-length)"
    if rows.is_packed:
        what = f"documents of at most {longest:,} tokens"
        advice = "documents of {:,} tokens or more, in rows as long (--max-length)"
    if first is None:
        return (
            f"it reads every key of {what}, and its loss there is 0 whatever the model; measure it "
            f"on {advice.format(2 * longest + 1)}"
        )
    far = rows.positions[rows.counted] >= first
    if 2 * int(far.sum()) < len(far):
        return (
            f"only {int(far.sum()):,} of {len(far):,} tokens of {what} have keys that it does not "
            f"read; measure it on {advice.format(2 * first)}"
        )
    return ""


def _row(tokens: Tensor, length: int) -> Tensor:
    tokens = tokens.flatten()
    return tokens.repeat(-(-length // len(tokens)))[:length][None]


@torch.no_grad()
def forward_speedup(
    model: PreTrainedModel, spec: Spec, exact: Spec, tokens: Tensor, length: int
) -> Difference:
    """Return the logarithm of softmax's time divided by a candidate's, over interleaved rounds.

    Args:
        model: A model that is not swapped; it is restored.
        spec: The candidate in all layers.
        exact: Softmax in all layers.
        tokens: Tokens of the input, repeated as needed.
        length: Tokens of one sequence.
    """
    row = _row(tokens, length)
    seconds: Mapping[str, list[float]] = {"exact": [], "candidate": []}
    for _ in range(ROUNDS):
        for name, one in (("exact", exact), ("candidate", spec)):
            swap(model, one)
            try:
                model(row, use_cache=False, logits_to_keep=1)  # allocates buffers
                start = time.perf_counter()
                model(row, use_cache=False, logits_to_keep=1)
                seconds[name].append(time.perf_counter() - start)
            finally:
                restore(model)
    return speedup(seconds["exact"], seconds["candidate"])
