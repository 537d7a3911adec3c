"""The folder in which attnzoo stores compiled kernels and the verdicts of kernel checks.

It is ``$ATTNZOO_CACHE`` or ``~/.cache/attnzoo``. A compiled library runs with all rights of the
process, and a stored verdict decides which kernels run, so the folder is used only if no other user
can write it.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

CACHE = "ATTNZOO_CACHE"  # environment variable: path of the folder


def cache_folder() -> Path:
    """Return the folder; creates it if it does not exist.

    Raises:
        OSError: It cannot be created, or other users can write it.
    """
    folder = None
    try:
        folder = Path(os.environ.get(CACHE) or Path.home() / ".cache" / "attnzoo")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home directory
        raise unusable(folder, "made", error) from error
    check_private(folder)
    return folder


def unusable(folder: Path | None, verb: str, error: Exception) -> OSError:
    """Return the error of a cache folder that cannot be made or written."""
    where = "" if folder is None else f" {folder}"
    return OSError(
        f"attnzoo's cache folder{where} cannot be {verb} ({error}); set the environment variable "
        f"{CACHE} to a folder that you can write"
    )


def refuse_noexec(folder: Path) -> None:
    """Raise ``OSError`` if libraries in a folder cannot be loaded because of how it is mounted."""
    noexec = getattr(os, "ST_NOEXEC", 0)  # Linux
    if noexec and os.statvfs(folder).f_flag & noexec:
        raise OSError(
            f"attnzoo's cache folder {folder} is on a file system that is mounted noexec, so no "
            f"library in it can be loaded; set the environment variable {CACHE} to another folder"
        )


def check_private(path: Path) -> None:
    """Raise ``OSError`` if users other than this one and root can write a file or folder."""
    if os.name != "posix":
        return
    found = path.stat()
    if found.st_uid not in (0, os.geteuid()) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise OSError(
            f"other users can write {path} (owner {found.st_uid}, mode "
            f"{stat.S_IMODE(found.st_mode):o}), so its content is not trusted; run "
            f"chmod go-w on it if it is yours, or set {CACHE} to a folder of your own"
        )


def replace_file(path: Path, text: str) -> None:
    """Replace a text file atomically: other processes read the old content or the new one."""
    descriptor, partial = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)  # mode 600
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(partial, path)
    except OSError:
        Path(partial).unlink(missing_ok=True)
        raise
