"""The conclusion of an evaluation, in words.

A sentence says "better", "worse" or "closes" only for differences that are clear over the rows
(:mod:`attnzoo.evaluation.margins`); every number that it compares has its standard error.
Generation comes first, because a user of the model sees what it generates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attnzoo.evaluation.equal_memory import EqualWindow
from attnzoo.evaluation.margins import Difference, mean_of, paired, plus_minus
from attnzoo.evaluation.quality import Quality

LEAST = {"loss": 0.001, "recall": 0.001, "agreement": 0.005}  # smaller differences do not matter
LEAST_COSINE = 0.001
REMEDY = "Do not use it; keep more layers exact, train longer, or use the window."


def verdict(lines: Mapping[str, Quality]) -> str:
    """Return the conclusion, beginning with a result that is clearly worse than the window's.

    Args:
        lines: Evaluation results of ``softmax``, ``window alone`` and ``result``.
    """
    result, softmax, window = lines["result"], lines["softmax"], lines["window alone"]
    if softmax.loss >= softmax.unigram:
        return (
            f"Recovery cannot be judged: with softmax the model has {softmax.loss:.2f} bits per "
            f"byte on this text, and the frequencies of its tokens alone give "
            f"{softmax.unigram:.2f}. Give a trained model, and text in its language."
        )
    winners = _winners("result", result, "window", window)
    parts = []
    if winners["window"]:
        worse = _join(winners["window"])
        parts.append(f"The result is worse than its window alone in {worse}. {REMEDY}")
    if result.agreement_rows and window.agreement_rows:
        own, other = (_percent(mean_of(x.agreement_rows)) for x in (result, window))
        parts.append(
            f"Of the tokens that the result generates, {own} equal softmax's (the window alone: "
            f"{other})."
        )
    if not winners["window"]:
        parts.append(_closed_gaps(result, softmax, window))
        if winners[""]:
            same = _join(winners[""])
            parts.append(f"No difference from the window alone is certain in {same}.")
        parts.append(_above_all(result, softmax))
    return " ".join(filter(None, parts))


def difference(metric: str, ours: Quality, theirs: Quality) -> Difference:
    """Return ours minus theirs of ``loss``, ``recall`` or ``agreement``, over the same rows."""
    rows = f"{metric}_rows"
    return paired(getattr(ours, rows), getattr(theirs, rows), least=LEAST[metric])


def _percent(found: Difference) -> str:
    return plus_minus(found.mean, found.error, percent=True)


def _bound(found: Difference, *, percent: bool = False) -> str:
    """Return the least difference that as many rows would show, if they do not show this one."""
    if found.is_clear or found.count < 2:
        return ""
    least = plus_minus(found.margin, None, percent=percent)
    return f"; {found.count} rows show {least} or more"


def _winners(name: str, ours: Quality, other: str, theirs: Quality) -> dict[str, list[str]]:
    """Return the metrics in which each of two models is clearly better, and those of neither."""
    wins: dict[str, list[str]] = {name: [], other: [], "": []}
    for metric, sign in (("agreement", -1), ("loss", 1), ("recall", 1)):
        own = difference(metric, ours, theirs)
        if own.count:
            equal = metric == "agreement"
            text = _percent(own) if equal else f"{own} bits per byte"
            text = f"{'equal tokens' if equal else metric} ({text}{_bound(own, percent=equal)})"
            better = name if sign * own.mean < 0 else other
            wins[better if own.is_clear else ""].append(text)
    return wins


def _closed_gaps(result: Quality, softmax: Quality, window: Quality) -> str:
    """Return which fractions of the gap between window and softmax the result closes."""
    shares = {metric: result.closed(metric, softmax, window) for metric in ("loss", "recall")}
    known = {metric: share for metric, share in shares.items() if share is not None}
    if not known:
        return (
            "On this text no difference between the window alone and softmax is measured (loss: "
            f"{difference('loss', window, softmax)} bits per byte), so recovery cannot be judged; "
            "evaluate on longer or more rows, or on text with long-range dependencies."
        )
    clear = {x: y for x, y in known.items() if difference(x, result, window).is_negative}
    closed = " and ".join(f"{_percent(share)} in {metric}" for metric, share in clear.items())
    text = f"The result closes the gap between the window alone and softmax by {closed}."
    return text * bool(clear)


def _above_all(result: Quality, softmax: Quality) -> str:
    """Return a warning if the result predicts better than softmax, or ""."""
    found = {metric: difference(metric, result, softmax) for metric in ("loss", "recall")}
    better = [f"{metric}: {own} bits per byte" for metric, own in found.items() if own.is_negative]
    return (
        f"Warning: the result predicts better than softmax ({', '.join(better)}), which a student "
        "cannot learn from its teacher. Likely, the rows are not like the text that the model was "
        "trained on (other text, or rows that begin in the middle of its sequences), and the "
        "training of the swap has seen such rows; evaluate on the model's own kind of text."
    ) * bool(better)


def equal_sentence(lines: Mapping[str, Quality], equal: EqualWindow | None, length: int) -> str:
    """Return who wins at equal memory on rows of a length, or why that is not known, or ""."""
    if equal is None:
        return ""
    if not equal.widest:
        return (
            f"The swap's cache is as large as softmax's at {equal.length:,} tokens, so softmax is "
            "its baseline at equal memory."
        )
    name = f"the window of equal memory ({equal} tokens)"
    if equal.widest >= length:
        return (
            f"Against {name} nothing can be said: it sees every key of rows of {length:,} tokens; "
            f"evaluate on rows of more than {equal.widest:,} (--max-length or --target-length)."
        )
    wins = _winners("the swap", lines["result"], "the window", lines["equal window"])
    parts = [f"{who} is better in {_join(found)}" for who, found in wins.items() if who and found]
    if wins[""]:
        parts.append(f"no difference is certain in {_join(wins[''])}")
    found = "; ".join(parts)
    return f"Against {name} on rows of {length:,} tokens: {found}." if found else ""


def _join(parts: Sequence[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else parts[0]


def encoder_verdict(lines: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the conclusion in one sentence, beginning with a result worse than the window's.

    Args:
        lines: Similarities of ``window alone``, ``raw swap`` and ``result`` to softmax.
    """
    result, window, raw = (lines[name]["rows"] for name in ("result", "window alone", "raw swap"))
    better = paired(result, window, least=LEAST_COSINE)
    if better.is_negative:
        return (
            "The result is worse than its window alone: the cosine similarity of its embeddings to "
            f"softmax's is {mean_of(result).mean:.3f}, the window's {mean_of(window).mean:.3f} "
            f"(difference {better}). Do not use it; train longer, keep layers exact, or use the "
            "window."
        )
    same = f" No difference from the window alone is certain: {better}{_bound(better)}."
    same = "" if better.is_clear else same
    return (
        f"Embeddings of held-out text have a mean cosine of {mean_of(result)} to softmax's; "
        f"the raw swap {mean_of(raw)}, the window alone {mean_of(window)}.{same}"
    )
