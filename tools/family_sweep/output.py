"""Write the record, the documentation page and the summary in the README."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from tools.family_sweep.own_windows import SPECS as OWN_SPECS
from tools.family_sweep.record import (
    FOLDER,
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
from tools.family_sweep.windows import SINKS, SPECS, WINDOW

ROOT = Path(__file__).parents[2]
PART = "no auto class knows it: it is a part of other models"  # a reason of make_model
BEGIN, END = "<!-- families: written by python -m tools.family_sweep -->", "<!-- /families -->"
SIGNS = {"equal": "=", "runs": "yes", "in part": "part", "refused": "no", "not built": ""}
SIGNS["unproven"] = "?"
SIGNS |= {name: name.upper() for name in ("different", "failed")}

_HEAD = """\
# Model families

{begin}

{summary}

The sweep builds a tiny model of each model type from its config class: with large random weights,
so that attention matters, with windows shorter than the inputs, small soft caps, and one layer of
each layer type. Exact backends must equal eager attention in float32 to 1e-4, with padding on
either side, packed rows, a random 4-D mask, and decoding with a cache, as far as the family
supports them. Negative controls show that the comparison detects errors: uniform attention weights
in any single layer, and removing any window, soft cap, sink, bias, scale, mask or packing, must
change the outputs by a hundred times the tolerance.

Approximate backends must obey the rules that eager attention obeys in the same family: causality,
independence of padding, decoding equal to one forward pass, and a working `generate`.

| in the table | meaning |
|---|---|
| = | equal to eager attention |
| yes | runs, in all layers |
| part | runs in some layers; it does not support the others, which `else_` keeps exact |
| ? | equal, but the outputs are not sensitive to some layer or feature |
| no | not supported, for a reason below |

`python -m tools.family_sweep` writes the record ({cpu} s of CPU time), tools/family_sweep/records.

| families | {names} |
|---|{rules}|
"""


def page(record: dict[str, Any]) -> str:
    """Return the content of docs/families.md."""
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
    text += _windows(record) + _own_windows(record)
    text += _other_versions(record) + _refusals(record) + _unbuilt(record) + _insensitive(record)
    text += _uncalled(record)
    text += f"\n## All families\n\n| family | {' | '.join(names)} |\n|---|{'---|' * len(names)}\n"
    for family, entries in by_family(record).items():
        text += _row(family, [SIGNS[family_outcome(entries.values(), name)] for name in names])
    return text + f"\n{END}\n"


_WINDOWS = """
## Windows of exact backends

In every model type that decodes, `softmax` and `flash` with a window of {window} tokens, without
and with {sinks} first tokens, must equal the family's eager attention under dense masks to which
the sweep adds the window. Compared are one pass and steps with a cache, without padding and with
padding left, right and inside; `logits_to_keep=1`; bool and float 4-D masks, in one pass and in
steps; layers that share keys; and `generate` with and without a cache. Refused variants have a
reason in the record.

| | {names} |
|---|{rules}|
"""


def _windows(record: dict[str, Any]) -> str:
    """Return the section about windows of exact backends."""
    entries = [entry["windows"] for entry in record["types"].values() if "windows" in entry]
    if not entries:
        return ""
    rules = "---|" * (len(SPECS) - 1) + "---"
    text = _WINDOWS.format(window=WINDOW, sinks=SINKS, names=" | ".join(SPECS), rules=rules)
    for outcome in ("equal", "refused", "different"):
        found = [sum(x[name]["outcome"] == outcome for x in entries) for name in SPECS]
        text += _row(f"model types {outcome}", list(map(str, found)))
    for what in ("checked", "refused"):
        found = [sum(len(x[name].get(what, ())) for x in entries) for name in SPECS]
        text += _row(f"variants {'equal' if what == 'checked' else what}", list(map(str, found)))
    return text


_OWN_WINDOWS = """
## Backends with a window in families with windows

In the model types whose layers have a sliding window or chunks, these backends run with a window of
{window} tokens or fewer: without padding and with padding left, right and inside, with
`position_ids` and without, in one pass and in steps with a cache. Layers that a backend refuses
stay `softmax`. `flash` and `longformer` must equal eager attention under dense masks with both
windows, of which the backend's counts real tokens and the model's counts padding too; under the
others, the real tokens of a padded row must equal the same tokens alone, at their positions in the
row. Unproven are model types in which a backend serves only some of the layers with one mask.

| | {names} |
|---|{rules}|
"""


def _own_windows(record: dict[str, Any]) -> str:
    """Return the section about backends with a window in families with windows."""
    entries = [entry["own_windows"] for entry in record["types"].values() if "own_windows" in entry]
    if not entries:
        return ""
    rules = "---|" * (len(OWN_SPECS) - 1) + "---"
    text = _OWN_WINDOWS.format(window=WINDOW, names=" | ".join(OWN_SPECS), rules=rules)
    for outcome in ("equal", "in part", "unproven", "refused", "different"):
        found = [sum(x[name]["outcome"] == outcome for x in entries) for name in OWN_SPECS]
        text += _row(f"model types {outcome}", list(map(str, found)))
    found = [sum(len(x[name].get("checked", ())) for x in entries) for name in OWN_SPECS]
    return text + _row("variants equal", list(map(str, found)))


def _row(head: str, cells: list[str]) -> str:
    return f"| {head} | {' | '.join(cells)} |\n"


def _other_versions(record: dict[str, Any]) -> str:
    lines = [summary(read(version)) for version in versions()[1:]]
    return "".join(f"\n{line}\n" for line in lines)


def _refusals(record: dict[str, Any]) -> str:
    """Return a table of the reasons of each backend, the most frequent first."""
    text = "\n## Why a backend does not support a model type\n\n"
    text += "| backend | model types | reason |\n|---|---|---|\n"
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
    """Return a reason with its numbers replaced, so that it is the same for all families."""
    return re.sub(r"\b\d[\d.]*\b", "N", " ".join(reason.split())).replace("|", "/")


def _unbuilt(record: dict[str, Any]) -> str:
    """Return a table of the families without a checked model type, with the reasons."""
    text = "\n## Not built\n\n| family | reason |\n|---|---|\n"
    for family, entries in by_family(record).items():
        if any(entry["outcome"] == "checked" for entry in entries.values()):
            continue
        reasons = {e["reason"] for e in entries.values() if e["outcome"] == "not built"}
        shown = "; ".join(sorted(reasons - {PART} or reasons))
        text += f"| {family} | {shown.replace('|', '/')[:200]} |\n"
    return text


def _insensitive(record: dict[str, Any]) -> str:
    """Return a table of the layers and features that hardly change the outputs."""
    rows = [
        f"| {name} | {', '.join(entry['unfelt'])} |\n"
        for name, entry in record["types"].items()
        if entry.get("unfelt")
    ]
    if not rows:
        return ""
    head = (
        "\n## Not sensitive\n\nCorrupting these changes the outputs by less than a hundred times "
        "the tolerance.\n\n"
    )
    return head + "| model type | layer or feature |\n|---|---|\n" + "".join(rows)


def _uncalled(record: dict[str, Any]) -> str:
    """Return a table of the model types whose inputs reach only some attention layers."""
    rows = [
        f"| {name} | {entry['layers'][0]} of {entry['layers'][1]} |\n"
        for name, entry in record["types"].items()
        if entry.get("layers") and entry["layers"][0] < entry["layers"][1]
    ]
    if not rows:
        return ""
    head = (
        "\n## Partly executed\n\nThe inputs reach only some layers of these model types (for "
        "example, no images for a vision tower); the results hold for those layers.\n\n"
    )
    return head + "| model type | attention layers executed |\n|---|---|\n" + "".join(rows)


def update_readme(text: str, record: dict[str, Any]) -> str:
    """Return the README with an updated summary."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{summary(record)}\n{END}{rest.split(END)[1]}"


def write_record(record: dict[str, Any]) -> Path:
    """Write a record as JSON with one line per model type."""
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{record['transformers']}.json"
    types = record["types"]
    lines = [f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in types.items()]
    head = json.dumps({**record, "types": {}}, indent=1).removesuffix("{}\n}")
    path.write_text(head + "{\n" + ",\n".join(lines) + "\n }\n}\n", "utf-8")
    return path


def write_pages() -> list[Path]:
    """Write docs/families.md and the summary in the README from the newest record."""
    record, readme, docs = read(), ROOT / "README.md", ROOT / "docs" / "families.md"
    docs.parent.mkdir(exist_ok=True)
    docs.write_text(page(record), "utf-8")
    readme.write_text(update_readme(readme.read_text("utf-8"), record), "utf-8")
    return [docs, readme]
