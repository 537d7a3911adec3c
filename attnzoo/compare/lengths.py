"""Sequence lengths on the command line."""

from __future__ import annotations

import re

from attnzoo.errors import SpecError
from attnzoo.report.format import format_length

_NUMBER = re.compile(r"\s*(\d{1,9})\s*([kKmM]?)\s*")
_UNITS = {"": 1, "k": 1024, "m": 1024**2}
MAX_LENGTH = 2**26


def parse_lengths(text: str) -> list[int]:
    """Return the lengths of ``"1k..64k"`` (doubling) or ``"512,1k,3000"``, in increasing order.

    Raises:
        SpecError: The text is not a list of lengths.
    """
    found: set[int] = set()
    for part in text.split(","):
        first, dots, last = part.partition("..")
        low = _length(first, text)
        high = _length(last, text) if dots else low
        if high < low:
            raise SpecError(
                f"The range of lengths {part.strip()!r} is decreasing; write the shorter one first"
            )
        while low <= high:
            found.add(low)
            low *= 2
    return sorted(found)


def _length(part: str, whole: str) -> int:
    match = _NUMBER.fullmatch(part)
    value = int(match[1]) * _UNITS[match[2].lower()] if match else 0
    if not 1 <= value <= MAX_LENGTH:
        raise SpecError(
            f"Lengths {whole!r} are not understood at {part.strip()!r}; write numbers of tokens "
            f"from 1 to {format_length(MAX_LENGTH)}, such as 1k..64k (doubling) or 512,2k,3000"
        )
    return value
