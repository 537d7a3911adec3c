"""Checkpoints of a run: whole or not at all, a few of them, and only for the run they are of."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attnzoo.errors import AttnzooError
from attnzoo.report.whole import write_whole

RUN = "run.json"
FOLDER = "checkpoints"
DONE = "progress.json"  # written last: a checkpoint without it is torn


class CheckpointError(AttnzooError):
    """A folder holds no run that can be gone on with."""


class Checkpoints:
    """The checkpoints in a run's folder.

    Args:
        out: The run's folder.
        run: What the run is made from, as plain data; another run may not go on from these.
        keep: How many checkpoints stay.
    """

    def __init__(self, out: Path, run: Mapping[str, Any], *, keep: int = 2) -> None:
        self.out, self.run, self.keep = out, json.loads(json.dumps(run)), keep

    def begin(self, *, resume: bool) -> dict[str, Any] | None:
        """Start a new run, or find where an earlier one stopped; called by one process.

        Args:
            resume: Whether to go on from the last checkpoint.

        Returns:
            The progress of the last whole checkpoint, with its ``path``; ``None`` at the start.

        Raises:
            CheckpointError: The folder is in use and ``resume`` is not set, or it is another run's.
        """
        known = self.out / RUN
        if known.is_file():
            self._check(known)
            if not resume:
                raise CheckpointError(
                    f"{str(self.out)!r} holds this run already; give --resume to go on with it, or "
                    "a new --out"
                )
            return self.latest()
        if self.out.exists() and (not self.out.is_dir() or any(self.out.iterdir())):
            raise CheckpointError(
                f"{str(self.out)!r} exists and holds no run ({RUN} is not there); give a new --out"
            )
        if resume:
            raise CheckpointError(
                f"There is no run in {str(self.out)!r} to go on with; leave --resume out to start"
            )
        self.out.mkdir(parents=True, exist_ok=True)
        write_whole(known, json.dumps(self.run, indent=2))
        return None

    def _check(self, known: Path) -> None:
        try:
            other = json.loads(known.read_text("utf-8"))
        except json.JSONDecodeError as error:
            raise CheckpointError(
                f"{str(known)!r} is damaged ({error}); give a new --out"
            ) from None
        differ = [name for name in {*self.run, *other} if self.run.get(name) != other.get(name)]
        if differ:
            name = min(differ)
            raise CheckpointError(
                f"{str(self.out)!r} holds another run: {name} was {other.get(name)!r}, and is "
                f"{self.run.get(name)!r} now; give a new --out, or the same {name}"
            )

    def latest(self) -> dict[str, Any] | None:
        """Return the progress of the last whole checkpoint, with its ``path``, if there is one."""
        found = []
        for path in (self.out / FOLDER).glob("*"):
            try:
                progress = json.loads((path / DONE).read_text("utf-8"))
            except (OSError, json.JSONDecodeError):
                continue  # torn: the run was stopped while it was written
            found.append({**progress, "path": path})
        return max(found, key=lambda progress: progress["total"], default=None)

    def write(
        self, progress: Mapping[str, Any], save: Callable[[Path], Any], *, main: bool = True
    ) -> None:
        """Write a checkpoint beside the others, then give it its name; ``save`` runs everywhere.

        Args:
            progress: Where the run is, as plain data; ``total`` counts its steps.
            save: Writes everything into a folder.
            main: Whether this process gives names and clears up.
        """
        final = self.out / FOLDER / f"step-{progress['total']:06d}"
        made = final.with_name(f"{final.name}.partial")
        with explained(self):
            save(made)
            if not main:
                return
            write_whole(made / DONE, json.dumps(progress))
            shutil.rmtree(final, ignore_errors=True)
            made.rename(final)
        whole = sorted(p for p in (self.out / FOLDER).glob("step-*") if p.suffix != ".partial")
        for path in whole[: -self.keep]:
            shutil.rmtree(path)

    def clear(self) -> None:
        """Remove all checkpoints: the run is done."""
        shutil.rmtree(self.out / FOLDER, ignore_errors=True)


@contextmanager
def explained(checkpoints: Checkpoints) -> Iterator[None]:
    """Say what remains of a run whose files cannot be written, as when a disk fills up.

    Raises:
        CheckpointError: In place of what the writer raised.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch raises the latter
        last = checkpoints.latest()
        kept = f"the last checkpoint, {str(last['path'])!r}, is whole" if last else "none was kept"
        raise CheckpointError(
            f"{str(checkpoints.out)!r} cannot be written ({str(error).splitlines()[0]}); {kept}. "
            "Make room on the disk, then go on with --resume"
        ) from error
