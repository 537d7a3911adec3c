"""The conclusion of a causal model's evaluation, in words.

A sentence says "better", "worse" or "closes" only for differences that are clear over the rows
(:mod:`attnzoo.evaluation.margins`); every number that it compares has its standard error.
Generation comes first, because a user of the model sees what it generates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attnzoo.evaluation.margins import Difference, mean_of, paired, plus_minus
from attnzoo.training.quality import Quality

LEAST = {"loss": 0.001, "recall": 0.001, "agreement": 0.005}  # smaller differences do not matter
NO_GAP = "On this text no difference between the window alone and softmax is measured"
REMEDY = "Do not use it; keep more layers exact, train longer, or use the window."


def verdict(lines: Mapping[str, Quality]) -> str:
    """Return the conclusion, beginning with a result that is clearly worse than the window's.

    Args:
        lines: Evaluation results of ``softmax``, ``window alone`` and ``result``.
    """
    result, softmax, window = lines["result"], lines["softmax"], lines["window alone"]
    if reason := unable(softmax):
        return reason
    worse = _worse(result, window)
    generated = _generated(result, window)
    if worse:
        text = f"The result is worse than its window alone: {' and '.join(worse)}. {REMEDY}"
        return " ".join(filter(None, [text, generated, left_out(lines)]))
    closed = _closed_gaps(result, softmax, window)
    same = "" if closed.startswith(NO_GAP) else _no_difference(result, window)
    parts = [generated, closed, same, _above_all(result, softmax), left_out(lines)]
    return " ".join(filter(None, parts))


def left_out(lines: Mapping[str, Quality]) -> str:
    """Return why numbers are left out, or ""."""
    found: dict[str, list[str]] = {}
    for name, line in lines.items():
        for note in line.notes:
            found.setdefault(note, []).append(name)
    sentences = []
    for note, names in found.items():
        whose = "" if len(names) == len(lines) else f"Of {_join(names)}: "
        sentences.append(f"{whose}{note}." if whose else f"{note[0].upper()}{note[1:]}.")
    return " ".join(sentences)


def unable(softmax: Quality) -> str:
    """Return why no swap can be judged, because softmax itself does not predict the text, or ""."""
    if softmax.loss < softmax.unigram:
        return ""
    return (
        f"Recovery cannot be judged: with softmax the model has {softmax.loss:.2f} bits per byte "
        f"on this text, and the frequencies of its tokens alone give {softmax.unigram:.2f}. Give a "
        "trained model, and text in its language."
    )


def difference(metric: str, ours: Quality, theirs: Quality) -> Difference:
    """Return ours minus theirs of ``loss``, ``recall`` or ``agreement``, over the same rows."""
    rows = f"{metric}_rows"
    return paired(getattr(ours, rows), getattr(theirs, rows), least=LEAST[metric])


def _worse(result: Quality, window: Quality) -> list[str]:
    """Return the metrics in which the result is clearly worse, with both numbers."""
    found = []
    fewer = difference("agreement", result, window)
    if fewer.is_negative:
        found.append(
            f"{result.agreement:.0%} of the tokens that it generates equal the original model's, "
            f"of the window's {window.agreement:.0%} (difference {_percent(fewer)})"
        )
    for metric in ("loss", "recall"):
        more = difference(metric, result, window)
        if more.is_positive:
            mine, theirs = getattr(result, metric), getattr(window, metric)
            found.append(
                f"{metric} is {mine:.3f} bits per byte, the window's {theirs:.3f} (difference "
                f"{more})"
            )
    return found


def _percent(found: Difference) -> str:
    return plus_minus(found.mean, found.error, percent=True)


def _generated(result: Quality, window: Quality) -> str:
    """Return which fraction of the generated tokens is equal, or "" if it was not measured."""
    if result.agreement is None:
        return ""
    own = _percent(mean_of(result.agreement_rows)) if result.agreement_rows else "an unknown part"
    other = ""
    if window.agreement_rows:
        other = f" (the window alone: {_percent(mean_of(window.agreement_rows))})"
    return f"Of the tokens that the result generates, {own} equal the original model's{other}."


def _closed_gaps(result: Quality, softmax: Quality, window: Quality) -> str:
    """Return which fractions of the gap between window and softmax the result closes."""
    shares = dict(zip(("loss", "recall"), result.recovered(softmax, window), strict=True))
    known = {metric: share for metric, share in shares.items() if share is not None}
    clear = {k: x for k, x in known.items() if difference(k, result, window).is_negative}
    if clear:
        parts = [f"{_percent(share)} in {metric}" for metric, share in clear.items()]
        return (
            f"It closes the gap between the window alone and softmax by {' and '.join(parts)}."
            if result.agreement is not None
            else "The result closes the gap between the window alone and softmax by "
            f"{' and '.join(parts)}."
        )
    if known:
        return ""
    return (
        f"{NO_GAP} (loss: "
        f"{difference('loss', window, softmax)} bits per byte), so recovery cannot be judged; "
        "evaluate on longer or more rows, or on text with long-range dependencies."
    )


def _no_difference(result: Quality, window: Quality) -> str:
    """Return in which metrics no difference between result and window is measured, or ""."""
    found = []
    for metric in ("loss", "recall"):
        own = difference(metric, result, window)
        if own.count and not own.is_clear:
            found.append(f"{metric}: {own} bits per byte")
    return f"No difference from the window alone is measured in {', '.join(found)}." * bool(found)


def _above_all(result: Quality, softmax: Quality) -> str:
    """Return a warning if the result seems to predict better than softmax, or ""."""
    better = []
    for metric in ("loss", "recall"):
        own = difference(metric, result, softmax)
        if own.count and own.mean < 0 and (own.is_clear or -own.mean > LEAST[metric]):
            better.append((metric, own))
    if not better:
        return ""
    names = ", ".join(f"{metric}: {own} bits per byte" for metric, own in better)
    if any(own.is_clear for _, own in better):
        return (
            f"Warning: the result predicts better than softmax ({names}), which a student cannot "
            "learn from its teacher. Likely, the rows are not like the text that the model was "
            "trained on (other text, or rows that begin in the middle of its sequences), and the "
            "training of the swap has seen such rows; evaluate on the model's own kind of text."
        )
    return (
        f"Warning: the result seems to predict better than softmax ({names}); that is within the "
        "noise of so few rows. Evaluate on more rows."
    )


def compare(name: str, ours: Quality, other: str, theirs: Quality) -> str:
    """Return in one sentence in which metrics one of two models is better.

    Args:
        name: Name of the first model.
        ours: Its quality.
        other: Name of the other model.
        theirs: Its quality, on the same rows.
    """
    wins: dict[str, list[str]] = {name: [], other: [], "": []}
    for metric, sign in (("agreement", -1), ("loss", 1), ("recall", 1)):
        own = difference(metric, ours, theirs)
        if not own.count:
            continue
        label = "equal tokens" if metric == "agreement" else metric
        text = _percent(own) if metric == "agreement" else str(own)
        if own.is_clear:
            wins[name if sign * own.mean < 0 else other].append(f"{label} ({text})")
        else:
            wins[""].append(f"{label} ({text})")
    parts = [f"{who} is better in {_join(found)}" for who, found in wins.items() if who and found]
    if wins[""]:
        parts.append(f"no difference is measured in {_join(wins[''])}")
    return "; ".join(parts) + "." if parts else ""


def _join(parts: Sequence[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else parts[0]
