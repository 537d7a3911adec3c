"""Read registers, spills and instruction counts from the machine code of a compiled kernel.

This uses the disassemblers that Triton ships.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

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


class _Value(NamedTuple):
    """A value in Triton's GPU dialect: its name, the operation that computes it, and operands."""

    name: str
    operation: str
    operands: tuple[int, ...]  # indices of values


def transposed_products(ttgir: str) -> list[str]:
    """Return the transposed operands of products that are computed from another product.

    Some versions of Triton compile this pattern wrongly for Hopper. An operand is followed back
    through every operation, as far as loads and what a loop carries.

    Args:
        ttgir: A kernel in Triton's GPU dialect.
    """
    values = _values(ttgir)
    of_product: list[bool] = []  # whether a product is among the sources of a value
    transposed: list[frozenset[str]] = []  # the transposed products among them
    wrong: set[str] = set()
    for name, operation, operands in values:
        is_product = operation in _PRODUCTS
        sources = () if operation == "tt.load" else operands
        from_product = any(of_product[i] for i in sources)
        found = frozenset().union(*(transposed[i] for i in sources))
        if operation in _TRANSPOSES and from_product:
            found |= {name}
        if is_product:  # the third operand is added
            wrong.update(*(transposed[i] for i in operands[:2]))
        of_product.append(is_product or from_product)
        transposed.append(found)
    return sorted(wrong)


def _values(ttgir: str) -> list[_Value]:
    """Return all values in order; a name that two regions use means two values."""
    values: list[_Value] = []
    scopes: list[dict[str, int]] = [{}]
    for line in ttgir.splitlines():
        if line.lstrip().startswith("}") and len(scopes) > 1:
            scopes.pop()
        if match := _DEFINITION.match(line):
            name, operation, rest = match.groups()
            used = _VALUE.findall(rest.partition(" loc(")[0])
            known = [next((x[n] for x in reversed(scopes) if n in x), None) for n in used]
            values.append(_Value(name, operation, tuple(i for i in known if i is not None)))
            scopes[-1][name] = len(values) - 1
        if line.partition(" loc(")[0].rstrip().endswith("{"):
            scopes.append({})
    return values


_DEFINITION = re.compile(r"\s*(%\w+)(?::\d+)? = \"?([\w.]+)\"?(.*)")
_VALUE = re.compile(r"%\w+")
_PRODUCTS = ("tt.dot", "ttng.warp_group_dot")
_TRANSPOSES = ("tt.trans", "ttg.memdesc_trans")


def loop_instructions(cubin: bytes) -> int:
    """Return the instructions that a warp issues per iteration of the main loop; 0 without a loop.

    The main loop is the longest loop that prefetches and has no such loop inside, or the longest
    one if none prefetches. Forward jumps over 100 instructions or more are assumed to be taken:
    they skip rare cases.
    """
    code, labels = _instructions(_tool_output("nvdisasm", "-c", cubin))
    jumps = {i: labels[jump[1]] for i, x in enumerate(code) if (jump := _BRANCH.search(x))}
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
