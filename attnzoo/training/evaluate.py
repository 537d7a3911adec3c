"""An honest account of a recovered model: against softmax, the raw swap and the window alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnzoo.corpus import add_repeats
from attnzoo.demo.measure import Result, measure_quality
from attnzoo.demo.text import Judged
from attnzoo.integrations.convert import own_attention
from attnzoo.training.data import REPEATS_FROM, Rows
from attnzoo.training.transfer import swapped_layers

NEAR, FAR = -1e4, 1e4  # logarithmic weights of far keys that leave one branch alone
CONTROL = 32  # tokens that the control sees where a swap has no window of its own


@dataclass(frozen=True, kw_only=True)
class Quality:
    """How well a model predicts held-out text, in bits per byte."""

    loss: float  # on the text as it is
    recall: float | None  # on the second copy of a segment; None where rows are too short for one

    def share(self, softmax: Quality, window: Quality) -> tuple[float | None, float | None]:
        """Return how much of the distance from the window to softmax is covered, 1 being all.

        ``None`` where the window loses less than 0.01 bits, so that there is no distance.
        """

        def of(own: float | None, best: float | None, worst: float | None) -> float | None:
            if own is None or best is None or worst is None or worst - best < 0.01:
                return None
            return (worst - own) / (worst - best)

        return (
            of(self.loss, softmax.loss, window.loss),
            of(self.recall, softmax.recall, window.recall),
        )


def judged_rows(rows: Rows, count: int, seed: int = 0) -> Judged:
    """Take held-out rows to judge on, as they are and with a segment repeated."""
    plain = rows.tokens[:count]
    twice, repeats = plain.clone(), []
    if plain.shape[1] >= REPEATS_FROM:
        repeats = add_repeats(twice, torch.Generator().manual_seed(seed))
    return Judged(
        plain=plain,
        twice=twice,
        repeats=[repeat for repeat in repeats if repeat is not None],
        bytes_per_token=rows.bytes_per_token,
        stream=plain.flatten(),
    )


def quality(model: PreTrainedModel, judged: Judged) -> Quality:
    """Judge a model as it is; it is in evaluation mode meanwhile."""
    training, result = model.training, Result(label="", spec={})
    model.eval()
    device = next(model.parameters()).device
    moved = Judged(
        **{
            **vars(judged),
            **{name: getattr(judged, name).to(device) for name in ("plain", "twice", "stream")},
        }
    )
    measure_quality(model, moved, result, lambda: None)
    model.train(training)
    assert result.bits_per_byte is not None
    return Quality(loss=result.bits_per_byte, recall=result.recall_bits_per_byte)


def window_of(model: nn.Module) -> int:
    """Return the widest window that a swapped layer attends to exactly; 32 where none has one."""
    windows = [getattr(b.config, "window", None) for b in swapped_layers(model).values()]
    return max((w for w in windows if isinstance(w, int)), default=CONTROL)


def softmax_quality(model: PreTrainedModel, judged: Judged) -> Quality:
    """Judge a swapped model with its own attention."""
    with own_attention(model):
        return quality(model, judged)


def branch_qualities(
    model: PreTrainedModel, judge: Callable[[PreTrainedModel], Any]
) -> dict[str, Any]:
    """Judge each branch of a window hybrid alone; empty for a model without one."""
    found = {}
    for name, weight in (("near branch alone", NEAR), ("far branch alone", FAR)):
        weights = [p for n, p in model.named_parameters() if n.endswith("attnzoo.far_log_weight")]
        if weights:
            with _filled(weights, weight):
                found[name] = judge(model)
    return found


@contextmanager
def _filled(tensors: list[Any], value: float) -> Iterator[None]:
    before: list[Tensor] = [x.detach().clone() for x in tensors]
    with torch.no_grad():
        try:
            for x in tensors:
                x.fill_(value)
            yield
        finally:
            for x, old in zip(tensors, before, strict=True):
                x.copy_(old)


def verdict(lines: dict[str, Quality]) -> str:
    """Say in words what came out, the bad news first.

    Args:
        lines: ``softmax``, ``window alone``, ``raw swap`` and ``result``.
    """
    result, softmax, window = lines["result"], lines["softmax"], lines["window alone"]
    worse = [
        f"{what} is {mine:.3f} bits per byte, the window's {theirs:.3f}"
        for what, mine, theirs in (
            ("loss", result.loss, window.loss),
            ("recall", result.recall, window.recall),
        )
        if mine is not None and theirs is not None and mine > theirs
    ]
    if worse:
        return (
            "The result is worse than its window alone: "
            + " and ".join(worse)
            + ". Do not use it; keep more layers exact, train longer, or use the window."
        )
    shares = result.share(softmax, window)
    told = [
        f"{share:.0%} in {what}"
        for share, what in zip(shares, ("loss", "recall"), strict=True)
        if share is not None
    ]
    if not told:
        return (
            "On this text the window alone is as good as softmax, so nothing can be told of what "
            "was recovered; judge on longer rows, or on text that needs its far past."
        )
    return (
        "Of the distance from the window alone to softmax, the result covers "
        + " and ".join(told)
        + "."
    )


def as_data(lines: dict[str, Quality]) -> dict[str, Any]:
    """Return the lines as plain data, with the share of each where there is one."""
    softmax, window = lines["softmax"], lines["window alone"]
    return {
        name: {
            **asdict(line),
            **dict(zip(("loss_share", "recall_share"), line.share(softmax, window), strict=True)),
        }
        for name, line in lines.items()
    }
