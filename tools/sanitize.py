"""Run the check of the C++ kernels under AddressSanitizer and UndefinedBehaviorSanitizer.

``python -m tools.sanitize``: once as compiled for this CPU and once without AVX-512, at the same
time. Exits with 1 and the report of the sanitizers if
a kernel reads or writes outside of its memory, has undefined behaviour, computes wrong results, or
accepts slots, sequences or positions that are outside of the tensors.
GCC and its sanitizers are needed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

COMPILER = "g++"
SANITIZERS = "-fsanitize=address,undefined -fno-sanitize-recover=undefined"
REFUSED = "tests/ops/test_refused_values.py"  # what kernels must refuse before they read it
VARIANTS = {"this CPU": "", "without AVX-512": "-mno-avx512f"}


def runtime(name: str) -> str:
    """Return the path of a sanitizer's library, which must be loaded before all others."""
    command = [COMPILER, f"-print-file-name=lib{name}.so"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def compiler(flags: str, folder: Path) -> Path:
    """Write a compiler script that enables the sanitizers and does not load their libraries."""
    script = folder / "compiler"
    # the last -O counts; with -O3 the sanitizers make compilation take minutes
    script.write_text(
        f'#!/bin/sh\nunset LD_PRELOAD\nexec {COMPILER} "$@" -O1 {SANITIZERS} {flags}\n'
    )
    script.chmod(0o700)
    return script


def start(flags: str, folder: Path) -> subprocess.Popen[str]:
    """Start the check of kernels that are compiled with the sanitizers and ``flags``."""
    folder.mkdir(mode=0o700)
    settings = {
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own
        "ATTNZOO_CACHE": str(folder),
        "CXX": str(compiler(flags, folder)),
        "LD_PRELOAD": f"{runtime('asan')} {runtime('ubsan')}",
        "OMP_NUM_THREADS": "1",
    }
    check = '"$0" -m attnzoo.evaluation.check_cpp'
    refused = f'"$0" -m pytest -q -n 0 -p no:cacheprovider {REFUSED}'
    return subprocess.Popen(
        ["sh", "-c", f"{check} && {refused}", sys.executable],
        env=os.environ | settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def main() -> None:
    """Check all variants."""
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        processes = {
            name: start(flags, Path(folder, f"variant{number}"))
            for number, (name, flags) in enumerate(VARIANTS.items())
        }
        for name, process in processes.items():
            output, _ = process.communicate()
            passed = process.returncode == 0 and '"done"' in output and '"wrong"' not in output
            failed = failed or not passed
            print(f"{name}: {'ok' if passed else f'exit {process.returncode}'}", flush=True)
            if not passed:
                print(output, flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
