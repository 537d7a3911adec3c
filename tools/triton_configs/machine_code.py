"""Read registers, spills and instruction counts from the machine code of a compiled kernel.

This uses the disassemblers that Triton ships.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

import triton

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


def _tool_output(tool: str, option: str, cubin: bytes) -> str:
    """Return the output of a tool for a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        process = subprocess.run(
            [TOOLS / tool, option, file.name], capture_output=True, text=True, check=True
        )
    return process.stdout


def registers(cubin: bytes) -> tuple[int, int]:
    """Return registers per thread and bytes of stack; the stack is above 0 if registers spill."""
    match = re.search(r"REG:(\d+) STACK:(\d+)", _tool_output("cuobjdump", "-res-usage", cubin))
    assert match is not None
    return int(match[1]), int(match[2])


def loop_instructions(cubin: bytes) -> int:
    """Return the instructions that a warp issues per iteration of the main loop; 0 without a loop.

    The main loop is the longest loop that prefetches and has no such loop inside, or the longest
    one if none prefetches. Forward jumps over 100 instructions or more are assumed to be taken:
    they skip rare cases.
    """
    code, labels = _instructions(_tool_output("nvdisasm", "-c", cubin))
    jumps = {i: labels[source[1]] for i, x in enumerate(code) if (source := _BRANCH.search(x))}
    loops = [range(target, source + 1) for source, target in jumps.items() if target <= source]
    if not loops:
        return 0
    prefetching = [loop for loop in loops if any("LDGDEPBAR" in code[i] for i in loop)]
    innermost = [
        loop
        for loop in prefetching
        if not any(x != loop and x.start >= loop.start and x.stop <= loop.stop for x in prefetching)
    ]
    body = max(innermost or loops, key=len)
    count, source = 0, body.start
    while source < body.stop:
        count += 1
        target = jumps.get(source, source)
        source = target if source + 100 <= target < body.stop else source + 1
    return count


_BRANCH = re.compile(r"\bBRA\b.*`\(\.(L_\S+)\)")


def _instructions(text: str) -> tuple[list[str], dict[str, int]]:
    """Return the instructions in a disassembly, and the instruction index of each label."""
    code: list[str] = []
    labels = {}
    for line in text.splitlines():
        if match := re.match(r"\s*\.(L_\S+):", line):
            labels[match[1]] = len(code)
        elif match := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            code.append(match[1])
    return code, labels
