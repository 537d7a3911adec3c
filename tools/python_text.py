"""Write the text on which commands evaluate the embedded models, and four whole packages.

    python -m tools.python_text

The text is source of the Python standard library, which differs between versions of Python and
between distributions of one version. It was frozen from Python 3.11.7, on which the embedded models
were trained, and whose files benchmarks measure. Run it with that Python, complete with idlelib and
tkinter; another one gives another text.
"""

from __future__ import annotations

import os
import platform
import shutil
import sysconfig
import zipfile
from pathlib import Path

from attnzoo.evaluation.corpus import SOURCES, VERSION, is_held_out

LIBRARIES = ("asyncio", "email", "idlelib", "tkinter")  # packages of which all files are included
SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
)
TIME = (1980, 1, 1, 0, 0, 0)  # of every file in the archive, so that two runs write equal bytes


def standard_library_files(*, held_out: bool) -> list[Path]:
    """Return the source files of one split of this Python, sorted by name, without tests."""
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = set(folders) - SKIPPED_FOLDERS
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return [path for path in sorted(files) if is_held_out(name_of(path)) == held_out]


def name_of(path: Path) -> str:
    """Return the name of a file of the standard library, relative to its folder."""
    return path.relative_to(sysconfig.get_path("stdlib")).as_posix()


def frozen_files() -> list[Path]:
    """Return the files that the package contains: the held-out ones, and all of ``LIBRARIES``."""
    root = Path(sysconfig.get_path("stdlib"))
    files = set(standard_library_files(held_out=True))
    for library in LIBRARIES:
        found = set((root / library).glob("*.py"))
        if not found:
            raise SystemExit(f"this Python has no {library}; run a complete Python {VERSION}")
        files |= found
    return sorted(files)


def main() -> None:
    """Write the archive and the licence of Python."""
    if platform.python_version() != VERSION:
        raise SystemExit(f"this is Python {platform.python_version()}; run Python {VERSION}")
    SOURCES.parent.mkdir(exist_ok=True)
    with zipfile.ZipFile(SOURCES, "w") as archive:
        for path in frozen_files():
            info = zipfile.ZipInfo(name_of(path), TIME)
            archive.writestr(info, path.read_bytes(), zipfile.ZIP_DEFLATED, compresslevel=9)
    licence = Path(sysconfig.get_path("stdlib"), "LICENSE.txt")
    shutil.copyfile(licence, SOURCES.with_name("LICENSE.txt"))
    print(f"{SOURCES}: {SOURCES.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
