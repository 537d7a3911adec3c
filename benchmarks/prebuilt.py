"""Time of the ops with the kernels of a wheel, over the time with kernels compiled for this CPU.

    python benchmarks/prebuilt.py dist/attnzoo-0.2.0-py3-none-manylinux_2_27_x86_64.whl

Both libraries are in one process and the calls alternate, so that other load on the machine affects
both. A ratio is the median over the rounds; above 1 the prebuilt kernels are slower.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import tempfile
import zipfile
from pathlib import Path

import torch
from ops import OPS, make_run, make_step

from attnzoo.evaluation.check_cpp import KERNELS
from attnzoo.evaluation.timing import BenchmarkCase, Run, machine, time_together
from attnzoo.runtime import cpp
from attnzoo.runtime.cpp import Source, prebuilt, read_code

NAMES = (
    "linear",
    "gla",
    "gated deltanet",
    "hedgehog, window 32",
    "flash, window 256",
    "longformer",
    "block_sparse",
    "reformer",
)
STEPS = ("linear", "gla", "gated deltanet")
Libraries = dict[Source, ctypes.CDLL]


def libraries_of(folder: Path) -> tuple[Libraries, Libraries, str]:
    """Return the libraries of a wheel and those compiled for this CPU, and the level of the former.

    Args:
        folder: Contains the libraries of the wheel.
    """
    prebuilt.FOLDER = folder
    sources = list(dict.fromkeys(source for kernel in KERNELS for source in kernel.sources))
    ours, native = {}, {}
    for source in sources:
        code = read_code(source.path)
        found = prebuilt.find(source.path, code)
        if found is None:
            raise SystemExit(f"the wheel has no {source.path.name} for this CPU")
        ours[source] = cpp._open(found, source)
        native[source] = cpp._load_compiled(source, code)
    return ours, native, prebuilt.origin()


def main() -> None:
    """Measure, and print a Markdown table."""
    parser = argparse.ArgumentParser(prog="benchmarks/prebuilt.py")
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        with zipfile.ZipFile(arguments.wheel) as archive:
            archive.extractall(name)
        inside = prebuilt.FOLDER.relative_to(prebuilt.PACKAGE.parent)
        ours, native, origin = libraries_of(Path(name, inside))

    def ratio(run: Run) -> str:
        def using(libraries: Libraries) -> Run:
            def call() -> object:
                cpp.load = libraries.__getitem__
                return run()

            return call

        taken = time_together(
            {"ours": using(ours), "native": using(native)}, rounds=arguments.rounds
        )
        pairs = zip(taken["ours"].rounds_ms, taken["native"].rounds_ms, strict=True)
        return f"{statistics.median(x / y for x, y in pairs):.3f}"

    found = machine()
    print(f"{found['cpu']}, one thread, {arguments.tokens} tokens, {origin} / -march=native\n")
    print("| op | forward | forward + backward | one token |\n|---|---|---|---|", flush=True)
    shape = {"B": 1, "H": 8, "Hkv": 8, "T": arguments.tokens, "D": 64, "E": 64}
    for op in NAMES:
        cells = []
        for mode in ("forward", "train"):
            case = BenchmarkCase(op=op, impl=OPS[op].impl, mode=mode, **shape)
            cells.append(ratio(make_run(case, OPS[op])[0]))
        step = BenchmarkCase(op=op, impl=OPS[op].impl, mode="decode", **shape)
        cells.append(ratio(make_step(step)[0]) if op in STEPS else "")
        print(f"| {op} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
