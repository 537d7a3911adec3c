"""Laws that times obey on an idle machine; times that break them show that the machine was busy.

A longer input never takes less time. On a CPU, the time of a pass over all tokens grows at least
about linearly once it is far above the overhead of a call. Fastest rounds are compared, which have
the least noise.
"""

from __future__ import annotations

from collections.abc import Mapping

FALL = 1.25  # a time is contradicted by a longer input's if it is more than so many times as long
LEAST_EXPONENT = 0.7  # of the length, in passes over all tokens
OVERHEAD_MS = 10.0  # below it, the overhead of a call may hide the growth
BUSY = "the machine was busy"


def contradicted(fastest_ms: Mapping[int, float], *, all_tokens: bool = False) -> list[int]:
    """Return the lengths whose time is too long, given the times of longer inputs.

    Args:
        fastest_ms: Milliseconds of the fastest round by length.
        all_tokens: Whether a call runs over all tokens on a CPU, so that its time grows at least
            about linearly; else it decodes one token, or runs on a GPU.
    """
    found = []
    lengths = sorted(fastest_ms)
    for index, short in enumerate(lengths):
        for long in lengths[index + 1 :]:
            grows = all_tokens and fastest_ms[short] > OVERHEAD_MS
            least = (long / short) ** LEAST_EXPONENT if grows else 1.0 / FALL
            if fastest_ms[long] < least * fastest_ms[short]:
                found.append(short)
                break
    return found
