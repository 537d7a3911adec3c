r"""Differences between two models or two calls, their standard errors, and which ones are stated.

Every sentence that calls one thing better, worse, faster or slower than another takes a
:class:`Difference` of paired measurements: both on the same rows, or both in the same round of a
benchmark. With differences :math:`d_i` of n pairs,

.. math:: \bar d = \frac{1}{n} \sum_i d_i, \qquad
          s = \sqrt{\frac{1}{n (n - 1)} \sum_i (d_i - \bar d)^2}

are the mean and its standard error. A difference is *clear* if :math:`|\bar d| > t s`, where t is
the quantile of Student's distribution with n - 1 degrees of freedom that equal things exceed with
probability :data:`FALSE_CLAIM`. A margin of 2 standard errors would be exceeded by one of 20 pairs
of equal models; a verdict compares several numbers, and a user reads many verdicts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

# Probability that one comparison of equal things is stated as a difference. A verdict has up to
# five comparisons; 100 verdicts on equal models then make no claim with a probability of 99%.
FALSE_CLAIM = 2e-5


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A mean over pairs of measurements, with its standard error.

    Attributes:
        mean: Mean of the differences.
        error: Its standard error; infinite with fewer than two pairs.
        count: Number of pairs, or of degrees of freedom plus 1.
        least: Smallest difference that matters; smaller ones are not stated, whatever their error.
    """

    mean: float
    error: float
    count: int
    least: float = 0.0

    @property
    def margin(self) -> float:
        """Largest mean, positive or negative, that is not stated as a difference."""
        if math.isinf(self.error):
            return math.inf
        return max(self.error * t_quantile(self.count - 1), self.least)

    @property
    def is_clear(self) -> bool:
        """Whether the mean differs from 0 by more than the margin."""
        return abs(self.mean) > self.margin

    @property
    def is_negative(self) -> bool:
        """Whether the mean is clearly below 0."""
        return self.is_clear and self.mean < 0

    @property
    def is_positive(self) -> bool:
        """Whether the mean is clearly above 0."""
        return self.is_clear and self.mean > 0

    def __str__(self) -> str:
        """Return the mean and its standard error, such as ``"0.012 ± 0.004"``."""
        return plus_minus(self.mean, self.error)


def plus_minus(value: float, error: float | None, digits: int = 3, *, percent: bool = False) -> str:
    """Return a value with its standard error as text; the value alone if the error is unknown."""
    if percent:
        known = error is not None and math.isfinite(error)
        return f"{value:.0%}" + (f" ± {100 * error:.1f}%" if known else "")  # type: ignore[operator]
    text = f"{value:.{digits}f}"
    return text if error is None or not math.isfinite(error) else f"{text} ± {error:.{digits}f}"


def mean_of(values: Sequence[float], *, least: float = 0.0) -> Difference:
    """Return the mean of independent values with its standard error."""
    count = len(values)
    if count == 0:
        return Difference(mean=math.nan, error=math.inf, count=0)
    mean = math.fsum(values) / count
    if count < 2:
        return Difference(mean=mean, error=math.inf, count=count)
    squares = math.fsum((x - mean) ** 2 for x in values)
    error = math.sqrt(squares / (count * (count - 1)))
    return Difference(mean=mean, error=error, count=count, least=least)


def paired(ours: Sequence[float], theirs: Sequence[float], *, least: float = 0.0) -> Difference:
    """Return ours minus theirs, a mean over pairs.

    Args:
        ours: One value per row or round.
        theirs: The values of the other model or call on the same rows or in the same rounds; no
            pair is there where one of both has no values, because it was not measured.
        least: Smallest difference that matters.
    """
    if not ours or not theirs:
        return mean_of(())
    return mean_of([x - y for x, y in zip(ours, theirs, strict=True)], least=least)


def closed_gap(
    ours: Sequence[float], best: Sequence[float], worst: Sequence[float], *, least: float = 0.0
) -> Difference | None:
    """Return the fraction of the gap between worst and best that ours closes.

    The standard error is that of a ratio of means over the same rows, to first order.

    Args:
        ours: One value per row.
        best: The same of the model with the best value.
        worst: The same of the baseline.
        least: Smallest gap that matters.

    Returns:
        The fraction; ``None`` if the gap between worst and best is not clearly above 0, or a value
        was not measured.
    """
    gap = paired(worst, best, least=least)
    if not gap.is_positive or not ours:
        return None
    share = paired(worst, ours).mean / gap.mean
    residuals = [(w - x) - share * (w - b) for x, b, w in zip(ours, best, worst, strict=True)]
    return Difference(mean=share, error=mean_of(residuals).error / gap.mean, count=gap.count)


def speedup(theirs: Sequence[float], ours: Sequence[float]) -> Difference:
    """Return the logarithm of their time divided by ours, a mean over interleaved rounds."""
    return paired([math.log(x) for x in theirs], [math.log(x) for x in ours])


def combined(*parts: Difference) -> Difference:
    """Return the sum of independent differences, with the smallest count of them."""
    error = math.sqrt(math.fsum(x.error**2 for x in parts))
    total = math.fsum(x.mean for x in parts)
    return Difference(mean=total, error=error, count=min(x.count for x in parts))


@cache
def t_quantile(freedom: int, probability: float = FALSE_CLAIM) -> float:
    """Return the value whose absolute value Student's t exceeds with a probability.

    Args:
        freedom: Degrees of freedom, at least 1.
        probability: Of both tails together.
    """
    low, high = 0.0, 1.0
    while _two_tails(high, freedom) > probability:
        low, high = high, 2 * high
    for _ in range(80):
        middle = (low + high) / 2
        if _two_tails(middle, freedom) > probability:
            low = middle
        else:
            high = middle
    return high


def _two_tails(t: float, freedom: int) -> float:
    """Return the probability that ``|T| > t``: Abramowitz & Stegun, 26.7.3 and 26.7.4."""
    angle = math.atan2(t, math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for k in range(2 if not odd else 3, freedom + 1, 2):
        total += term
        term *= cosine**2 * (k - 1) / k
    if odd:
        return 1 - 2 / math.pi * (angle + sine * total)
    return 1 - sine * total
