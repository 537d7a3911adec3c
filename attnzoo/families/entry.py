"""One model type under all backends, as it stands in the record."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Any

from attnzoo.families.build import Family, NotBuiltError, build_family
from attnzoo.families.check import DIFFERENT, EQUAL, UNPROVEN, check
from attnzoo.families.controls import unfelt
from attnzoo.families.models import family_name
from attnzoo.integrations import compat

GAINS = (1.5, 1.0, 0.6, 0.3)  # of the drawn weights, the first that gives sound outputs
_MISSING = re.compile(r"requires the (\S+) library")


def check_type(model_type: str, backends: list[str]) -> dict[str, Any]:
    """Check a model type under backends and return its entry in the record, as plain data."""
    entry: dict[str, Any] = {"family": family_name(model_type)}
    try:
        family, blind = sound_family(model_type)
    except NotBuiltError as error:
        missing = _MISSING.search(str(error))
        reason = f"it needs {missing[1]}, which is not installed" if missing else str(error)
        on = {"interface": True} if compat.family_uses_interface(entry["family"]) else {}
        return entry | on | {"outcome": "not built", "reason": reason}
    if family is None:
        return entry | {"outcome": "not on the interface"}
    results = {name: check(family, name) for name in backends}
    for result in results.values():
        if blind and result.outcome == EQUAL:
            result.outcome, result.reason = UNPROVEN, f"{', '.join(blind)} could be wrong unseen"
    return entry | {
        "outcome": "checked",
        "class": type(family.model).__name__,
        "kinds": [probe.case.kind for probe in family.probes],
        "variants": sorted({name for _, name in family.expected}),
        "layers": [len(family.reached), len(family.layers)],
        **({"unfelt": blind} if blind else {}),
        "backends": {
            name: {key: value for key, value in asdict(result).items() if value}
            for name, result in results.items()
        },
    }


def sound_family(model_type: str) -> tuple[Family | None, list[str]]:
    """Build a family with weights under which its outputs are finite, stable and tell all.

    Returns:
        The family, and what in it could be wrong without a trace, with the best of the weights.
    """
    best: tuple[Family, list[str]] | None = None
    for gain in GAINS:
        family = build_family(model_type, gain)
        if family is None:
            return None, []
        if (0, "plain") not in family.expected:
            continue
        outcomes = {check(family, name).outcome for name in ("softmax", "flash")}
        blind = unfelt(family) if EQUAL in outcomes else []
        if best is None or len(blind) < len(best[1]):
            best = family, blind
        if not blind and DIFFERENT not in outcomes:  # large weights also enlarge rounding
            best = family, blind
            break
    if best is None:
        raise NotBuiltError("its outputs are not finite with any of the drawn weights")
    return best
