"""Numbers as tables write them."""

from __future__ import annotations


def number(value: float | None, digits: int = 3) -> str:
    """Write a number, or a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def figures(value: float | None, digits: int = 3) -> str:
    """Write a number with so many significant figures, without an exponent."""
    if value is None:
        return "-"
    text = f"{value:.{digits}g}"
    return f"{value:.0f}" if "e" in text else text


def size(count: float | None) -> str:
    """Write a number of bytes with its unit."""
    if count is None:
        return "-"
    value, units = float(count), ["B", "KiB", "MiB", "GiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return (
        f"{value:.0f} {units[0]}" if value >= 10 or units[0] == "B" else f"{value:.1f} {units[0]}"
    )


def short(length: float) -> str:
    """Write a length: 512, 1k, 1.5k, 64k."""
    for unit, name in ((1024**2, "M"), (1024, "k")):
        if length >= unit:
            value = length / unit
            whole = value == round(value) or value >= 10
            return f"{value:.0f}{name}" if whole else f"{value:.1f}{name}"
    return f"{length:.0f}"
