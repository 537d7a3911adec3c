"""Read the records of the sweep over model families and summarise them; does not need torch.

``records/`` has one record per version of transformers.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from attnzoo.errors import SpecError

FOLDER = Path(__file__).parent / "records"
# A family has the worst outcome of its checked model types, except that it is refused only if all
# of them are.
WORST_FIRST = ("failed", "different", "equal", "runs", "in part", "unproven", "refused")


def versions() -> list[str]:
    """Return the versions of transformers with a record, the newest first."""
    found = [path.stem for path in FOLDER.glob("*.json")]
    return sorted(found, key=lambda text: [int(part) for part in text.split(".")], reverse=True)


def read(version: str = "") -> dict[str, Any]:
    """Return the record of a version of transformers; the newest without a version.

    Raises:
        SpecError: There is no record of that version.
    """
    known = versions()
    if version not in ("", *known):
        raise SpecError(
            f"No sweep of transformers {version} is recorded; there are {', '.join(known)}"
        )
    record: dict[str, Any] = json.loads((FOLDER / f"{version or known[0]}.json").read_text("utf-8"))
    return record


def short_reason(reason: str) -> str:
    """Return the reason in a refusal message, without where it occurred and what to do."""
    kept = re.split(r"cannot serve it: |cannot run this call: ", reason)[-1]
    return kept.split(". Keep such layers")[0].rstrip(".")


def by_family(record: dict[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the entries of model types by family, for families on the attention interface."""
    families: dict[str, dict[str, dict[str, Any]]] = {}
    for name, entry in record["types"].items():
        families.setdefault(entry["family"], {})[name] = entry
    return {
        family: entries
        for family, entries in sorted(families.items())
        if any(entry["outcome"] == "checked" for entry in entries.values())
        or any(entry.get("interface") for entry in entries.values())
    }


def family_outcome(entries: Iterable[dict[str, Any]], backend: str) -> str:
    """Return the outcome of a family under a backend; ``"not built"`` if nothing was checked."""
    found = {
        entry["backends"][backend]["outcome"] for entry in entries if entry["outcome"] == "checked"
    }
    return next((outcome for outcome in WORST_FIRST if outcome in found), "not built")


def backends(record: dict[str, Any]) -> list[str]:
    """Return the backends of a record."""
    checked = (entry for entry in record["types"].values() if entry["outcome"] == "checked")
    return list(next(checked)["backends"])


def counts(record: dict[str, Any]) -> dict[str, Counter[str]]:
    """Return the number of families with each outcome, by backend."""
    families = by_family(record)
    return {
        backend: Counter(family_outcome(entries.values(), backend) for entries in families.values())
        for backend in backends(record)
    }


def generating(record: dict[str, Any], backend: str) -> int:
    """Return the number of families that generate under a backend in some or all layers."""
    return sum(
        any(
            "generate" in entry["backends"][backend].get("checked", ())
            for entry in entries.values()
            if entry["outcome"] == "checked"
        )
        for entries in by_family(record).values()
    )


def summary(record: dict[str, Any]) -> str:
    """Return the results of the sweep in one sentence."""
    families, found = by_family(record), counts(record)
    off = len({entry["family"] for entry in record["types"].values()}) - len(families)
    wrong = sum(count["different"] + count["failed"] for count in found.values())
    exact = ", ".join(
        f"{found[name]['equal']} equal under `{name}`" for name in ("softmax", "flash")
    )
    causal = " and ".join(
        f"{generating(record, name)} under `{name}`" for name in ("linear", "gated_linear")
    )
    return (
        f"Of the {len(families)} model families of transformers {record['transformers']} on the "
        f"attention interface ({off} are not), {found['softmax']['not built']} were not built; "
        f"{exact}; {causal} generate, some of them with refused layers kept exact; "
        f"{wrong} silently different."
    )
