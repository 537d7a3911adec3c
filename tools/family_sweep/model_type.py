"""Check one model type under all backends and return its entry in the record."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Any

from attnzoo.hf import seam
from tools.family_sweep.build import Family, NotBuiltError, build_family
from tools.family_sweep.check import DIFFERENT, EQUAL, UNPROVEN, Outcome, check
from tools.family_sweep.controls import insensitive_parts
from tools.family_sweep.models import family_name
from tools.family_sweep.own_windows import own_window_outcomes
from tools.family_sweep.windows import SPECS, decoder_probe, window_outcome

GAINS = (
    1.5,
    1.0,
    0.6,
    0.3,
)  # of the random weights; the first one with finite, stable outputs is used
_MISSING = re.compile(r"requires the (\S+) library")


def check_type(
    model_type: str, backends: list[str], windowed: bool, own_windows: bool = False
) -> dict[str, Any]:
    """Check a model type and return its entry in the record as plain data.

    Args:
        model_type: The model type.
        backends: Names of the backends.
        windowed: Whether to check windows of exact backends too.
        own_windows: Whether to check backends with a window in families with windows.
    """
    entry: dict[str, Any] = {"family": family_name(model_type)}
    try:
        family, insensitive = build_sensitive_family(model_type)
    except NotBuiltError as error:
        missing = _MISSING.search(str(error))
        reason = f"it needs {missing[1]}, which is not installed" if missing else str(error)
        on = {"interface": True} if seam.family_uses_interface(entry["family"]) else {}
        return entry | on | {"outcome": "not built", "reason": reason}
    if family is None:
        return entry | {"outcome": "not on the interface"}
    results = {name: check(family, name) for name in backends}
    windows = {}
    if windowed and decoder_probe(family) is not None:
        windows = {name: window_outcome(family, name) for name in SPECS}
    own = own_window_outcomes(family) if own_windows else {}
    for result in results.values():
        if insensitive and result.outcome == EQUAL:
            result.outcome = UNPROVEN
            result.reason = f"errors in {', '.join(insensitive)} would not change the outputs"
    return entry | {
        "outcome": "checked",
        "class": type(family.model).__name__,
        "kinds": [probe.case.kind for probe in family.probes],
        "variants": sorted({name for _, name in family.expected}),
        "layers": [len(family.reached), len(family.layers)],
        **({"unfelt": insensitive} if insensitive else {}),
        **({"backends": _plain(results)} if results else {}),
        **({"windows": _plain(windows)} if windows else {}),
        **({"own_windows": _plain(own)} if own else {}),
    }


def _plain(results: dict[str, Outcome]) -> dict[str, dict[str, Any]]:
    """Return outcomes as plain data, without empty fields."""
    return {
        name: {key: value for key, value in asdict(result).items() if value}
        for name, result in results.items()
    }


def build_sensitive_family(model_type: str) -> tuple[Family | None, list[str]]:
    """Build a family with weights whose outputs are finite, stable and sensitive to each layer.

    Returns:
        The family, and the layers and features that hardly change its outputs.

    Raises:
        NotBuiltError: It cannot be built, or its outputs are not finite with any weights.
    """
    best: tuple[Family, list[str]] | None = None
    for gain in GAINS:
        family = build_family(model_type, gain)
        if family is None:
            return None, []
        if (0, "plain") not in family.expected:
            continue
        outcomes = {check(family, name).outcome for name in ("softmax", "flash")}
        found = insensitive_parts(family) if EQUAL in outcomes else []
        if best is None or len(found) < len(best[1]):
            best = family, found
        if not found and DIFFERENT not in outcomes:  # large weights amplify rounding errors
            best = family, found
            break
    if best is None:
        raise NotBuiltError("its outputs are not finite with any of the random weights")
    return best
