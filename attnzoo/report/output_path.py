"""Checks of an output path before anything is measured, and atomic writes."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from attnzoo.errors import AttnzooError


class OutputError(AttnzooError):
    """An output path exists already, or cannot be written."""


def check_folder(out: Path) -> None:
    """Raise an error if files cannot be written to a folder; leaves nothing behind.

    Args:
        out: The folder; it and its parents may be missing.

    Raises:
        OutputError: A file in its place, a link to nothing, no permission, or a full disk.
    """
    made: list[Path] = []
    try:
        for path in reversed([path for path in (out, *out.parents) if not path.exists()]):
            _check_link(path)
            path.mkdir()
            made.append(path)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise OutputError(
            f"{str(out)!r} cannot be written ({error.strerror or error}); give a folder that you "
            "can create and write to"
        ) from error
    finally:
        for path in reversed(made):
            with suppress(OSError):  # another process may use the folder by now
                path.rmdir()


def check_file(path: Path, *, overwrite: bool) -> None:
    """Raise an error if a file cannot be written; leaves nothing behind.

    Args:
        path: The file.
        overwrite: Whether an existing file may be replaced.

    Raises:
        OutputError: The file exists, or cannot be written.
    """
    if path.is_dir():
        raise OutputError(f"{str(path)!r} is a folder; give a file")
    _check_link(path)
    check_folder(path.parent)
    if path.exists() and not overwrite:
        raise OutputError(f"{str(path)!r} exists; give --overwrite to replace it, or another path")


def _check_link(path: Path) -> None:
    if path.is_symlink() and not path.exists():
        raise OutputError(
            f"{str(path)!r} is a link to {os.readlink(path)!r}, which does not exist; remove the "
            "link, or give another path"
        )


def atomic_write(path: Path, text: str) -> None:
    """Write a text file atomically: it is complete or unchanged, even when the disk is full."""
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
