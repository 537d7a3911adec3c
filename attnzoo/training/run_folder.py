"""The folder of a run: which run it holds, and whether that is finished."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list
from filelock import FileLock, Timeout

from attnzoo.errors import AttnzooError
from attnzoo.hf.saving.files import move_files
from attnzoo.report.output_path import atomic_write, check_folder

RESULTS = "recovery.json"
RUN = "run.json"  # in the folder of the checkpoints


class RunError(AttnzooError):
    """A run's folder cannot be started or resumed."""


class RunFolder:
    """The folder of a run: checkpoints while it trains, then the model and its results.

    Args:
        out: The folder.
        run: What defines the run, as JSON data; only an equal run goes on from the checkpoints. A
            part of it is enough for :meth:`check`.
        results: Name of the file of the results, which is written last.
    """

    def __init__(self, out: Path, run: Mapping[str, Any], results: str = RESULTS) -> None:
        self.out, self.run, self.results = out, json.loads(json.dumps(run)), results
        self.checkpoints, self.partial = out / "checkpoints", out / "model.partial"

    @contextmanager
    def open(self, *, resume: bool, state: Any) -> Iterator[dict[str, Any] | None]:
        """Context with what :meth:`check` returns, in which the folder is locked.

        Args:
            resume: As of :meth:`check`.
            state: Accelerate's state of the process; all processes call this.

        Raises:
            RunError: As of :meth:`check`, or another process runs in the folder.
        """
        lock: AbstractContextManager[Any] = nullcontext()
        finished: list[Any] = [None]
        if state.is_main_process:
            check_folder(self.out)
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.checkpoints / "run.lock", timeout=0)
        try:
            with lock:
                if state.is_main_process:
                    finished = [self.check(resume=resume)]
                    if finished[0] is None:
                        atomic_write(self.checkpoints / RUN, json.dumps(self.run, indent=2))
                yield broadcast_object_list(finished)[0]
        except Timeout:
            raise RunError(
                f"Another process runs in {str(self.out)!r}; wait for it, or give another "
                "--output-dir"
            ) from None

    def check(self, *, resume: bool) -> dict[str, Any] | None:
        """Return the results of a finished run, ``None`` of another.

        Args:
            resume: Whether the folder may hold this run already.

        Raises:
            RunError: The folder holds another run or model, or a run that is not to be resumed.
        """
        path, results = self.checkpoints / RUN, self.out / self.results
        if not results.is_file() and not any(self.checkpoints.glob("*/checkpoint-*")):
            models = self.out / "config.json", self.out / "adapter_config.json"
            if any(x.exists() for x in models) and (
                not path.is_file() or self._differences(_read(path))
            ):
                raise RunError(f"{str(self.out)!r} holds a model; give another --output-dir")
            return None
        if not resume:
            raise RunError(
                f"{str(self.out)!r} holds a run; go on with --resume-from-checkpoint True, or give "
                "another --output-dir"
            )
        known = _read(results if results.is_file() else path)
        if differ := self._differences(known):
            raise RunError(
                f"{str(self.out)!r} holds another run: its {', its '.join(differ)}. Give another "
                "--output-dir, or the values of that run"
            )
        return known if results.is_file() else None

    def _differences(self, known: Mapping[str, Any]) -> list[str]:
        """Return where a run differs in what this one defines."""
        return sorted(_differences(self.run, {name: known.get(name) for name in self.run}))

    def finish(self, results: Mapping[str, Any]) -> None:
        """Move the model from ``partial`` into the folder, and then write the results."""
        move_files(self.partial, self.out)
        atomic_write(self.out / self.results, json.dumps(results, indent=2))
        for path in self.checkpoints.glob("*/"):
            shutil.rmtree(path)


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise RunError(f"{str(path)!r} is damaged ({error}); give another --output-dir") from None
    return found


def _differences(new: Any, old: Any, name: str = "") -> Iterator[str]:
    """Yield where two values of JSON differ, in words."""
    if isinstance(new, dict) and isinstance(old, dict):
        for key in sorted({*new, *old}):
            yield from _differences(new.get(key), old.get(key), f"{name}.{key}" if name else key)
    elif new != old:
        yield f"{name} is {json.dumps(old)}, not {json.dumps(new)}"
