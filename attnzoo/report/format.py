"""Number formats of tables and charts."""

from __future__ import annotations

BYTE_UNITS = ("B", "KiB", "MiB", "GiB")


def number(value: float | None, digits: int = 3) -> str:
    """Format a number with a fixed number of decimals; ``None`` as a dash."""
    return "-" if value is None else f"{value:.{digits}f}"


def significant(value: float | None, digits: int = 3) -> str:
    """Format a number with a number of significant digits, without an exponent."""
    if value is None:
        return "-"
    text = f"{value:.{digits}g}"
    return f"{value:.0f}" if "e" in text else text


def format_bytes(count: float | None) -> str:
    """Format a number of bytes with its unit, such as ``1.5 KiB``; ``None`` as a dash."""
    if count is None:
        return "-"
    power = 0
    while count >= 1024 ** (power + 1) and power + 1 < len(BYTE_UNITS):
        power += 1
    value, unit = count / 1024**power, BYTE_UNITS[power]
    return f"{value:.0f} {unit}" if value >= 10 or unit == "B" else f"{value:.1f} {unit}"


def format_length(length: float) -> str:
    """Format a sequence length: 512, 1k, 1.5k, 64k."""
    for unit, name in ((1024**2, "M"), (1024, "k")):
        if length >= unit:
            value = length / unit
            whole = value == round(value) or value >= 10
            return f"{value:.0f}{name}" if whole else f"{value:.1f}{name}"
    return f"{length:.0f}"
