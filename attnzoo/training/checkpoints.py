"""Checkpoints of a run: written atomically, the last few kept, resumed by the same run only."""

from __future__ import annotations

import errno
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from attnzoo.errors import AttnzooError
from attnzoo.report.atomic_write import atomic_write
from attnzoo.report.output_path import check_folder

RUN = "run.json"
FOLDER = "checkpoints"
BEST = "best"  # folder beside the checkpoints, with best states that several of them refer to
LOCK = "run.lock"
DONE = "progress.json"  # written last: a checkpoint without it is incomplete
PARTIAL = ".partial"  # suffix of a checkpoint that is being written
UNSET = "not set"  # in messages, for a key that only the other run has
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# In messages of torch.save and safetensors, whose errors have no type of their own
WRITE_FAILURE = re.compile(
    r"inline_container|PytorchStreamWriter|Parent directory .* does not exist|I/O error"
)


class CheckpointError(AttnzooError):
    """A run's folder cannot be started, resumed or written."""


class Checkpoints:
    """The checkpoints in a run's folder.

    Args:
        out: The run's folder.
        run: What defines the run, as JSON data; only an equal run resumes from the checkpoints.
        keep: Number of checkpoints that are kept.
        log: Called with a message when a damaged checkpoint is not used.
    """

    def __init__(
        self,
        out: Path,
        run: Mapping[str, Any],
        *,
        keep: int = 2,
        log: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.out, self.run, self.keep, self.log = out, json.loads(json.dumps(run)), keep, log
        self._lock = FileLock(out / FOLDER / LOCK, timeout=0)
        self._executor = ThreadPoolExecutor(max_workers=1)
        self._finishing: Future[None] | None = None  # hashes the last checkpoint
        self._best_hashes: dict[str, str] = {}  # of files in BEST, which do not change

    def begin(self, *, resume: bool) -> dict[str, Any] | None:
        """Create the folder of a new run, or find the last checkpoint; called by one process.

        The folder is locked until :meth:`release`, or until the process ends.

        Args:
            resume: Whether to resume from the last checkpoint.

        Returns:
            The progress of the last intact checkpoint, with its ``path``; ``None`` without one.

        Raises:
            CheckpointError: The folder is in use and ``resume`` is not set, or it has another run,
                or another process runs it.
        """
        check_run_folder(self.out, resume=resume)
        known = self.out / RUN
        if known.is_file():
            self.check_identity()
            if not resume:
                raise CheckpointError(
                    f"{str(self.out)!r} already contains this run; give --resume to continue it, "
                    "or a new --out"
                )
        try:
            (self.out / FOLDER).mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
            if known.is_file():
                return self.latest(self.log)
            atomic_write(known, json.dumps(self.run, indent=2, allow_nan=False))
        except Timeout:
            raise CheckpointError(
                f"Another process runs in {str(self.out)!r}; wait until it ends, or give a new "
                "--out"
            ) from None
        except OSError as error:
            self.release()
            raise CheckpointError(
                f"{str(self.out)!r} cannot be written ({error.strerror or error}); free disk "
                "space, or give --out a folder that you can create and write to"
            ) from error
        except CheckpointError:
            self.release()
            raise
        return None

    def release(self) -> None:
        """Unlock the folder, if this process has locked it, after the last checkpoint."""
        if self._finishing is not None:
            self._finishing.exception()  # of :meth:`wait`, unless another error ends the run
        if not self._lock.is_locked:
            return
        self._lock.release()
        if not (self.out / RUN).is_file():  # a run that did not start leaves nothing
            (self.out / FOLDER / LOCK).unlink(missing_ok=True)
            with suppress(OSError):  # not empty, or not there
                (self.out / FOLDER).rmdir()
                self.out.rmdir()

    def forget_run(self) -> None:
        """Remove the record of a run that was refused before its first checkpoint."""
        (self.out / RUN).unlink(missing_ok=True)

    def check_identity(self) -> None:
        """Raise an error if the folder has another run.

        Raises:
            CheckpointError: The record of the run is damaged, or differs from this run's.
        """
        known = self.out / RUN
        try:
            other = flatten(json.loads(known.read_text("utf-8")))
        except (json.JSONDecodeError, UnicodeDecodeError, AttributeError) as error:
            raise CheckpointError(
                f"{str(known)!r} is damaged ({error}); give a new --out"
            ) from None
        own = flatten(self.run)
        differ = [
            f"{name} is {other.get(name, UNSET)!r}, not {own.get(name, UNSET)!r}"
            for name in sorted({*own, *other})
            if own.get(name, UNSET) != other.get(name, UNSET)
        ]
        if differ:
            raise CheckpointError(
                f"{str(self.out)!r} contains another run: its {', its '.join(differ)}. Give a new "
                "--out, or the values of that run"
            )

    def latest(self, log: Callable[[str], None] = lambda text: None) -> dict[str, Any] | None:
        """Return the progress of the last intact checkpoint with its ``path``, or ``None``.

        Args:
            log: Called with a message for each later checkpoint that is damaged.

        Raises:
            CheckpointError: All complete checkpoints are damaged.
        """
        damaged: list[str] = []
        for path in sorted((self.out / FOLDER).glob("step-*"), key=_step, reverse=True):
            try:
                progress = json.loads((path / DONE).read_text("utf-8"))
                fault = damaged_file(path, progress.pop("files", {}))
            except (OSError, ValueError, AttributeError):
                if path.suffix == PARTIAL:
                    continue  # the run stopped while it wrote this checkpoint
                progress, fault = {}, f"{DONE} cannot be read"
            if not fault:
                for message in damaged:
                    log(f"{message}; {str(path)!r} is used instead")
                return {**progress, "path": path}
            damaged.append(f"The checkpoint {str(path)!r} is damaged ({fault})")
        if damaged:
            raise CheckpointError(
                f"{', '.join(damaged)}, and there is no other one; start again with a new --out"
            )
        return None

    def write(
        self, progress: Mapping[str, Any], save: Callable[[Path], Any], *, main: bool = True
    ) -> None:
        """Write a checkpoint to a temporary folder, then rename it; called by all processes.

        A thread of the main process hashes and renames it, so that no process waits for that; the
        next call waits for the thread.

        Args:
            progress: Progress of the run as JSON data; ``total`` counts its steps, and ``best`` is
                the prefix of the files in :data:`BEST` that the checkpoint refers to, if any.
            save: Writes the state into a folder, on all processes.
            main: Whether this process renames the folder and removes old checkpoints.

        Raises:
            CheckpointError: This checkpoint, or the last one, cannot be written.
        """
        self.wait()
        final = self.out / FOLDER / f"step-{progress['total']:06d}"
        partial = final.with_name(f"{final.name}{PARTIAL}")
        with explain_write_errors(self):
            save(partial)
        if main:
            self._finishing = self._executor.submit(self._finish, progress, partial, final)

    def wait(self) -> None:
        """Wait until the last checkpoint is complete.

        Raises:
            CheckpointError: It cannot be written.
        """
        finishing, self._finishing = self._finishing, None
        if finishing is not None:
            finishing.result()

    def _finish(self, progress: Mapping[str, Any], partial: Path, final: Path) -> None:
        """Hash and rename a checkpoint whose files are written, and remove old ones."""
        with explain_write_errors(self):
            hashes = file_hashes(partial) | self._hash_best(progress.get("best"))
            data = {**progress, "files": hashes}
            atomic_write(partial / DONE, json.dumps(data, allow_nan=False))
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
        steps = [path for path in (self.out / FOLDER).glob("step-*") if path.suffix != PARTIAL]
        complete = sorted((path for path in steps if _step(path) <= _step(final)), key=_step)
        for path in complete[: -self.keep]:
            shutil.rmtree(path)
        self._remove_unused_best()

    def _hash_best(self, prefix: str | None) -> dict[str, str]:
        """Return the hashes of the best state's files by their paths from a checkpoint.

        A file is hashed once in a process, so that later damage does not go into new checkpoints.
        """
        if prefix is None:
            return {}
        found = {}
        for path in sorted((self.out / FOLDER / BEST).glob(f"{prefix}-*.pt")):
            if path.name not in self._best_hashes:
                self._best_hashes[path.name] = _hash(path)
            found[f"../{BEST}/{path.name}"] = self._best_hashes[path.name]
        return found

    def _remove_unused_best(self) -> None:
        """Remove the files of best states that no checkpoint refers to, incomplete ones too."""
        used: set[str] = set()
        for progress in (self.out / FOLDER).glob(f"step-*/{DONE}"):
            with suppress(OSError, ValueError, AttributeError):  # a damaged checkpoint
                files = json.loads(progress.read_text("utf-8")).get("files", {})
                used |= {Path(name).name for name in files if name.startswith(f"../{BEST}/")}
        for path in (self.out / FOLDER / BEST).glob("*"):
            if path.name not in used:
                path.unlink()
                self._best_hashes.pop(path.name, None)

    def clear(self) -> None:
        """Remove all checkpoints of a finished run."""
        self.wait()
        shutil.rmtree(self.out / FOLDER, ignore_errors=True)


def check_run_folder(out: Path, *, resume: bool) -> None:
    """Raise an error if no run can start in a folder, or resume there; changes nothing.

    Raises:
        CheckpointError: The folder has files of something else, or no run to resume.
        OutputError: The folder cannot be written.
    """
    check_folder(out)
    if (out / RUN).is_file():
        return
    if out.exists() and any(path.name != FOLDER for path in out.iterdir()):
        raise CheckpointError(
            f"{str(out)!r} exists and contains no run (there is no {RUN}); give a new --out"
        )
    if resume:
        raise CheckpointError(
            f"There is no run in {str(out)!r} to resume; leave out --resume to start one"
        )


def _step(path: Path) -> int:
    return int(path.name.removesuffix(PARTIAL).removeprefix("step-"))


def flatten(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested data with dotted names, such as ``config.loop.seed``."""
    flat: dict[str, Any] = {}
    for name, value in data.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def file_hashes(folder: Path) -> dict[str, str]:
    """Return a hash of each file in a folder by its relative path; a gigabyte takes a second."""
    hashes = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != DONE:
            hashes[path.relative_to(folder).as_posix()] = _hash(path)
    return hashes


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def damaged_file(folder: Path, hashes: Mapping[str, str]) -> str:
    """Return which file of a checkpoint is missing or differs from its hash; ``""`` if none."""
    for name, digest in hashes.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if _hash(path) != digest:
            return f"{name} is changed"
    return ""


@contextmanager
def explain_write_errors(checkpoints: Checkpoints) -> Iterator[None]:
    """Convert write errors, such as a full disk, to errors that name the last checkpoint.

    Other errors pass, such as those of a GPU without memory or of a process group.

    Raises:
        CheckpointError: A write failed.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError, CheckpointException) as error:
        cause = _write_error(error)
        if cause is None:
            raise
        last = checkpoints.latest()
        state = f"the last checkpoint is {str(last['path'])!r}" if last else "no checkpoint exists"
        full = not isinstance(cause, OSError) or cause.errno in FULL
        remedy = "Free disk space" if full else "Make it writable"
        raise CheckpointError(
            f"{str(checkpoints.out)!r} cannot be written ({str(cause).splitlines()[0]}); {state}. "
            f"{remedy}, then continue with --resume"
        ) from error


def _write_error(error: BaseException) -> BaseException | None:
    """Return the write error that an exception is or has as its cause, or ``None``."""
    if isinstance(error, CheckpointException):  # of torch.distributed.checkpoint, one for each rank
        causes = (_write_error(cause) for cause, _ in error.failures.values())
        return next((cause for cause in causes if cause is not None), None)
    if isinstance(error, OSError) and not isinstance(error, (ConnectionError, TimeoutError)):
        return error
    if isinstance(error, (RuntimeError, SafetensorError)) and WRITE_FAILURE.search(str(error)):
        # torch's writer fails once more when it closes the file
        return error.__context__ if isinstance(error.__context__, OSError) else error
    return None
