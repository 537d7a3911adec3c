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
        run: What defines the run, as JSON data; only an equal run goes on from the checkpoints.
        results: Name of the file of the results, which is written last.
    """

    def __init__(self, out: Path, run: Mapping[str, Any], results: str = RESULTS) -> None:
        self.out, self.run, self.results = out, json.loads(json.dumps(run)), results
        self.checkpoints, self.partial = out / "checkpoints", out / "model.partial"

    @contextmanager
    def open(self, *, resume: bool, state: Any) -> Iterator[dict[str, Any] | None]:
        """Context with the results of a finished run, ``None`` of another; called by all processes.

        The folder is locked inside of it.

        Args:
            resume: Whether the folder may hold this run already.
            state: Accelerate's state of the process.

        Raises:
            RunError: The folder holds another run, or one that is not to be resumed, or another
                process runs in it.
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
                    finished = [self._begin(resume=resume)]
                yield broadcast_object_list(finished)[0]
        except Timeout:
            raise RunError(
                f"Another process runs in {str(self.out)!r}; wait for it, or give another "
                "--output-dir"
            ) from None

    def _begin(self, *, resume: bool) -> dict[str, Any] | None:
        path, results = self.checkpoints / RUN, self.out / self.results
        if not results.is_file() and not any(self.checkpoints.glob("*/checkpoint-*")):
            models = self.out / "config.json", self.out / "adapter_config.json"
            if any(x.exists() for x in models) and not (path.is_file() and _read(path) == self.run):
                raise RunError(f"{str(self.out)!r} holds a model; give another --output-dir")
            atomic_write(path, json.dumps(self.run, indent=2))
            return None
        if not resume:
            raise RunError(
                f"{str(self.out)!r} holds a run; go on with --resume-from-checkpoint True, or give "
                "another --output-dir"
            )
        known = _read(results if results.is_file() else path)
        differ = sorted(_differences(self.run, {k: known.get(k) for k in self.run}))
        if differ:
            raise RunError(
                f"{str(self.out)!r} holds another run: its {', its '.join(differ)}. Give another "
                "--output-dir, or the values of that run"
            )
        return known if results.is_file() else None

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
