"""The documentation page and the README's line that are made from the recorded sweep."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

from attnzoo.families.record import (
    backends,
    by_family,
    counts,
    family_outcome,
    generating,
    read,
    short_reason,
    summary,
    versions,
)

ROOT = Path(__file__).parents[2]
BEGIN, END = "<!-- families: written by python -m attnzoo.families -->", "<!-- /families -->"
SIGNS = {"equal": "=", "runs": "yes", "in part": "part", "refused": "no", "not built": ""}
SIGNS["unproven"] = "?"
SIGNS |= {name: name.upper() for name in ("different", "failed")}

_HEAD = """\
# Model families

{begin}

{summary}

Each model type is built tiny from its config class, with weights drawn large enough that
attention matters, windows shorter than the inputs, soft caps that bite, and as many layers as it
has kinds of them. Eager attention says what is right: in float32, to 1e-4, with padding on either
side, packed rows, a 4-D mask with holes, and decoding from a cache, where the family has them. That
a wrong attention would have been seen is checked too: with every layer in turn weighing all keys
alike, and with every window, soft cap, sink, bias, scale, mask and packing left out in turn, the
outputs must move by a hundred times the tolerance.

An approximate backend is held to what eager attention itself keeps in that family: causality,
padding that does not matter, decoding equal to one pass, and stock `generate`.

| in the table | means |
|---|---|
| = | equal to eager attention |
| yes | runs, in all layers |
| part | runs in some layers; it refuses the others, which `else_` keeps exact |
| ? | equal, but a wrong attention in some layer would not have been seen |
| no | refused, with a reason (below) |

The record is made by `python -m attnzoo.families` ({cpu} s of processors); `attnzoo families
--model-type NAME` shows the entry of a model type, with every reason.

| families | {names} |
|---|{rules}|
"""


def page(record: dict[str, Any]) -> str:
    """Return docs/families.md."""
    names, found = backends(record), counts(record)
    text = _HEAD.format(
        begin=BEGIN,
        summary=summary(record),
        cpu=record["cpu_seconds"],
        names=" | ".join(names),
        rules="---|" * (len(names) - 1) + "---",
    )
    outcomes = ("equal", "runs", "in part", "unproven", "refused", "different", "failed")
    for outcome in (*outcomes, "not built"):
        text += _row(outcome, [str(found[name][outcome]) for name in names])
    text += _row("generate", [str(generating(record, name)) for name in names])
    text += _other_versions(record) + _refusals(record) + _unbuilt(record) + _unfelt(record)
    text += _uncalled(record)
    text += f"\n## All families\n\n| family | {' | '.join(names)} |\n|---|{'---|' * len(names)}\n"
    for family, entries in by_family(record).items():
        text += _row(family, [SIGNS[family_outcome(entries.values(), name)] for name in names])
    return text + f"\n{END}\n"


def _row(head: str, cells: list[str]) -> str:
    return f"| {head} | {' | '.join(cells)} |\n"


def _other_versions(record: dict[str, Any]) -> str:
    lines = [summary(read(version)) for version in versions()[1:]]
    return "".join(f"\n{line}\n" for line in lines)


def _refusals(record: dict[str, Any]) -> str:
    """List why backends refuse, the most frequent reasons first."""
    text = "\n## Why a backend refuses\n\n| backend | model types | reason |\n|---|---|---|\n"
    for backend in backends(record):
        reasons: Counter[str] = Counter()
        for entry in record["types"].values():
            result = entry.get("backends", {}).get(backend, {})
            if result.get("outcome") in ("refused", "in part"):
                reasons.update({_general(part) for part in _parts(result["reason"])})
        for reason, count in sorted(reasons.items(), key=lambda item: (-item[1], item[0]))[:8]:
            text += f"| {backend} | {count} | {reason} |\n"
    return text


def _parts(reason: str) -> list[str]:
    return short_reason(reason).split("; ")


def _general(reason: str) -> str:
    """Leave the numbers out of a reason, so that it is the same in all families."""
    return re.sub(r"\b\d[\d.]*\b", "N", " ".join(reason.split())).replace("|", "/")


def _unbuilt(record: dict[str, Any]) -> str:
    """List the families of which no model type was built, with the reason."""
    text = "\n## Not built\n\n| family | reason |\n|---|---|\n"
    for family, entries in by_family(record).items():
        if any(entry["outcome"] == "checked" for entry in entries.values()):
            continue
        reasons = {e["reason"] for e in entries.values() if e["outcome"] == "not built"}
        shown = "; ".join(sorted(reasons - {PART} or reasons))
        text += f"| {family} | {shown.replace('|', '/')[:200]} |\n"
    return text


PART = "no auto class knows it: it is a part of other models"


def _unfelt(record: dict[str, Any]) -> str:
    """List what could be wrong without a trace in the sweep."""
    rows = [
        f"| {name} | {', '.join(entry['unfelt'])} |\n"
        for name, entry in record["types"].items()
        if entry.get("unfelt")
    ]
    if not rows:
        return ""
    head = "\n## Not felt\n\nWhat moves the outputs by less than a hundred times the tolerance.\n\n"
    return head + "| model type | layer or feature |\n|---|---|\n" + "".join(rows)


def _uncalled(record: dict[str, Any]) -> str:
    """List the types of which the sweep's inputs reach some layers only."""
    rows = [
        f"| {name} | {entry['layers'][0]} of {entry['layers'][1]} |\n"
        for name, entry in record["types"].items()
        if entry.get("layers") and entry["layers"][0] < entry["layers"][1]
    ]
    if not rows:
        return ""
    head = (
        "\n## Called in part\n\nThe inputs drawn reach these layers only (towers that wait for "
        "images or sounds, and the like); what stands above is true of them.\n\n"
    )
    return head + "| model type | attention layers called |\n|---|---|\n" + "".join(rows)


def update_readme(text: str, record: dict[str, Any]) -> str:
    """Return the README with its summary line made anew."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{summary(record)}\n{END}{rest.split(END)[1]}"


def write_pages() -> list[Path]:
    """Write the page and the README's line from the newest record; in a checkout only."""
    record, readme, docs = read(), ROOT / "README.md", ROOT / "docs" / "families.md"
    docs.parent.mkdir(exist_ok=True)
    docs.write_text(page(record), "utf-8")
    readme.write_text(update_readme(readme.read_text("utf-8"), record), "utf-8")
    return [docs, readme]
