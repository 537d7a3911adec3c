"""Check the C++ kernels as compiled for 64-bit ARM, under QEMU, against float64.

``python -m tools.aarch64`` cross-compiles every kernel and runs the check of ``attnzoo doctor``
(``attnzoo/evaluation/check_cpp.py``) on it: results and gradients in float64, float32 and
bfloat16. ``--sanitize`` compiles them with AddressSanitizer and UndefinedBehaviorSanitizer, which
see the memory that a kernel allocates; ``tools/sanitize.py`` checks that of tensors too. Exits with
1 if a result is wrong, a sanitizer reports an error, or the cross compiler or QEMU is missing.
Speed under QEMU says nothing about that of a CPU.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from attnzoo.evaluation import check_cpp
from attnzoo.runtime.cpp import build_error
from tools.aarch64 import emulated
from tools.sanitize import SANITIZERS


def main() -> int:
    """Compile and check all kernels; prints a line for each."""
    parser = argparse.ArgumentParser(prog="python -m tools.aarch64", description=__doc__)
    parser.add_argument(
        "--sanitize",
        action="store_true",
        help="with AddressSanitizer and UndefinedBehaviorSanitizer",
    )
    args = parser.parse_args()
    if emulated.missing():
        raise SystemExit(emulated.missing())
    with tempfile.TemporaryDirectory() as folder:
        emulated.install(Path(folder), f"-O1 {SANITIZERS}" if args.sanitize else "")
        return _check()


def _check() -> int:
    start = time.monotonic()
    sources = dict.fromkeys(x for kernel in check_cpp.KERNELS for x in kernel.sources)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        errors = [error for error in pool.map(build_error, sources) if error]
    if errors:
        raise SystemExit("\n".join(errors))
    print(f"compiled in {time.monotonic() - start:.0f} s", flush=True)
    failed = 0
    for kernel in check_cpp.KERNELS:
        start = time.monotonic()
        wrong = list(check_cpp.wrong_results(kernel))
        failed |= bool(wrong)
        text = "; ".join(wrong) or "ok"
        print(f"{kernel}: {text} ({time.monotonic() - start:.1f} s)", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
