"""Read what a compiled kernel asks of a GPU from its machine code, with the tools beside Triton."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

import triton

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


def _told(tool: str, option: str, cubin: bytes) -> str:
    """Return what a tool prints of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        made = subprocess.run(
            [TOOLS / tool, option, file.name], capture_output=True, text=True, check=True
        )
    return made.stdout


def registers(cubin: bytes) -> tuple[int, int]:
    """Return the registers of a thread, and its bytes of stack: above zero where it spills."""
    found = re.search(r"REG:(\d+) STACK:(\d+)", _told("cuobjdump", "-res-usage", cubin))
    assert found is not None
    return int(found[1]), int(found[2])


def loop_instructions(cubin: bytes) -> int:
    """Count what a warp issues for one turn of the kernel's main loop; 0 if it has none.

    The main loop is the longest of those that prefetch, or of all if none does. What it jumps over
    in one go, a hundred instructions or more, is taken for the rare case.
    """
    code, labels = _instructions(_told("nvdisasm", "-c", cubin))
    jumps = {i: labels[at[1]] for i, x in enumerate(code) if (at := _BRANCH.search(x))}
    loops = [range(to, at + 1) for at, to in jumps.items() if to <= at]
    if not loops:
        return 0
    body = max(loops, key=lambda loop: (any("LDGDEPBAR" in code[i] for i in loop), len(loop)))
    count, at = 0, body.start
    while at < body.stop:
        count += 1
        to = jumps.get(at, at)
        at = to if at + 100 <= to < body.stop else at + 1
    return count


_BRANCH = re.compile(r"\bBRA\b.*`\(\.(L_\S+)\)")


def _instructions(text: str) -> tuple[list[str], dict[str, int]]:
    """Return the instructions that a disassembler has printed, and where its labels stand."""
    code: list[str] = []
    labels = {}
    for line in text.splitlines():
        if found := re.match(r"\s*\.(L_\S+):", line):
            labels[found[1]] = len(code)
        elif found := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            code.append(found[1])
    return code, labels
