"""Verdicts of checks, kept in attnzoo's cache folder.

A verdict is valid for one identity: the versions of everything that it depends on. Of several
processes that need the same verdict, one runs the check and the others wait for it.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from attnzoo.runtime.cache_folder import (
    CACHE,
    cache_folder,
    check_private,
    replace_file,
    unusable,
)

log = logging.getLogger(__name__)
PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"


class Verdict(NamedTuple):
    """The result of a check."""

    outcome: str  # PASSED, FAILED, or NOT_RUN: the device could not be used
    reason: str = ""  # unless it passed
    seconds: float = 0.0


Identity = Mapping[str, str]  # device, and versions of everything that the kernels are made from


def verdict_file(name: str, identity: Identity) -> Path:
    """Return the file of a verdict; raises ``OSError`` if the cache folder cannot be used."""
    key = hashlib.sha256(json.dumps(dict(identity), sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / f"{name}-{key}.json"


def read_stored(name: str, identity: Identity) -> dict[str, Any] | None:
    """Return the object that is stored for an identity; ``None`` without one, or a damaged one."""
    try:
        path = verdict_file(name, identity)
        check_private(path)
        found = json.loads(path.read_text("utf-8"))
        return found if found["identity"] == dict(identity) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def stored_verdict(name: str, identity: Identity) -> Verdict | None:
    """Return the stored verdict of a check, or ``None``."""
    row = read_stored(name, identity)
    try:
        if row is not None and row["outcome"] in (PASSED, FAILED):
            return Verdict(row["outcome"], str(row["reason"]), float(row["seconds"]))
    except (ValueError, KeyError, TypeError):  # a damaged one
        pass
    return None


def decide(
    name: str,
    identity: Identity,
    check: Callable[[], Verdict],
    *,
    fresh: bool = False,
    wait_seconds: float = 600.0,
) -> Verdict:
    """Return the stored verdict, or run the check and store its verdict.

    The verdict of a check that could not run is not stored. If the cache folder cannot be used, no
    verdict is stored, and a log message says why.

    Args:
        name: Name of the check, the first part of the file's name.
        identity: Identity for which the verdict is valid.
        check: Runs the check.
        fresh: Run it even if there is a stored verdict.
        wait_seconds: How long to wait for another process that runs the same check.
    """
    from filelock import FileLock, Timeout

    folder = None
    try:
        path = verdict_file(name, identity)
        folder = path.parent
        lock = FileLock(path.with_suffix(".lock"), timeout=wait_seconds)
        lock.acquire()
    except Timeout:
        return Verdict(
            NOT_RUN,
            f"another process has been checking for {wait_seconds:.0f} s; set {CACHE} to another "
            "folder if none is",
        )
    except OSError as error:
        _warn_of_lost_verdict(name, error if folder is None else unusable(folder, "written", error))
        return check()
    with lock:
        found = None if fresh else stored_verdict(name, identity)
        if found is None:
            found = check()
            if found.outcome != NOT_RUN:
                row = {**found._asdict(), "identity": dict(identity)}
                try:
                    replace_file(path, json.dumps(row, indent=1) + "\n")
                except OSError as error:
                    _warn_of_lost_verdict(name, unusable(folder, "written", error))
        return found


def _warn_of_lost_verdict(name: str, error: OSError) -> None:
    log.warning("the verdict of the check %s holds for this process only: %s", name, error)
