"""Change the source in one place at a time, and see whether the tests notice.

    python -m tools.mutate --seed 7 --list
    python -m tools.mutate --seed 7 --out mutations.jsonl [-- -m exhaustive]

A mutation replaces one operator, constant, condition or argument, or deletes one call. The seed
picks `--per-room` of them in each room of the package, C++ included. Each runs, in a copy of the
last commit, the tests that import its module, those that name it first, until one fails or the
time is over. What follows ``--`` goes to pytest. A mutation that changes nothing that anybody can
see is replaced by the next of its room with `--equivalent NUMBER`.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOMS = {
    "contract": ("attnzoo/contract", "attnzoo/backends", "attnzoo/spec.py", "attnzoo/registry.py"),
    "ops": ("attnzoo/ops",),
    "hf": ("attnzoo/hf",),
    "training": ("attnzoo/training", "attnzoo/commands"),
    "evaluation": ("attnzoo/evaluation", "attnzoo/compare", "attnzoo/report"),
    "C++": ("attnzoo/ops", "attnzoo/runtime"),
}
NOT_RUN = ("triton", "neon")  # parts of paths of what this machine doesn't run
OPERATORS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "*",
    ast.And: "or", ast.Or: "and",
}  # fmt: skip
CPP_OPERATORS = {
    " < ": " <= ", " <= ": " < ", " > ": " >= ", " == ": " != ", " + ": " - ", " - ": " + ",
    " * ": " + ", " && ": " || ", " || ": " && ", " += ": " -= ",
}  # fmt: skip


class Mutation(NamedTuple):
    """Characters ``start`` to ``end`` of a file become ``text``."""

    path: str
    start: int
    end: int
    text: str

    def apply(self, source: str) -> str:
        """Return the source of the file with the mutation."""
        return source[: self.start] + self.text + source[self.end :]

    def describe(self) -> str:
        """Return the place, the line before and the line after."""
        source = Path(self.path).read_text()
        line = source.count("\n", 0, self.start)
        old = source.splitlines()[line].strip()
        new = self.apply(source).splitlines()[line].strip()
        return f"{self.path}:{line + 1}: {old}  ->  {new}"


class Finder(ast.NodeVisitor):
    """Collects the mutations of the function bodies of one Python file."""

    def __init__(self, path: str) -> None:
        self.path, self.source, self.found = path, Path(path).read_text(), list[Mutation]()
        self.lines = [0]
        for line in self.source.encode().splitlines(keepends=True):
            self.lines.append(self.lines[-1] + len(line))
        self.depth = 0

    def place(self, line: int, column: int) -> int:
        """Return the character of a line and a byte column, as ``ast`` counts them."""
        return len(self.source.encode()[: self.lines[line - 1] + column].decode())

    def span(self, node: ast.expr | ast.stmt | ast.keyword) -> tuple[int, int]:
        """Return the first character of a node and the one behind it."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self.place(node.lineno, node.col_offset)
        return start, self.place(node.end_lineno, node.end_col_offset)

    def add(self, start: int, end: int, text: str) -> None:
        """Keep a mutation of a function body."""
        if self.depth:
            self.found.append(Mutation(self.path, start, end, text))

    def between(self, left: ast.expr, right: ast.expr, operator: ast.AST) -> None:
        """Replace an operator between two operands."""
        if type(operator) not in OPERATORS:
            return
        start, end = self.span(left)[1], self.span(right)[0]
        symbol = re.search(r"(?<![\w(])(not in|is not|and|or|in|is|[-+*/%<>=!]+)(?![\w)])",
                           self.source[start:end])  # fmt: skip
        if symbol:
            new = OPERATORS[type(operator)]
            self.add(start + symbol.start(), start + symbol.end(), new)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Go through the body alone: no decorators, no defaults."""
        self.depth += 1
        for statement in node.body:
            self.visit(statement)
        self.depth -= 1

    def visit_Raise(self, node: ast.Raise) -> None:
        """Leave messages alone."""

    visit_Assert = visit_JoinedStr = visit_AnnAssign = visit_Raise  # type: ignore[assignment]

    def visit_Compare(self, node: ast.Compare) -> None:
        """Replace the first comparison."""
        self.between(node.left, node.comparators[0], node.ops[0])
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        """Replace an arithmetic operator."""
        self.between(node.left, node.right, node.op)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        """Replace "and" by "or" and the reverse."""
        if len(node.values) == 2:
            self.between(node.values[0], node.values[1], node.op)
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        """Take the other branch."""
        start, end = self.span(node.test)
        self.add(start, end, f"not ({self.source[start:end]})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        """Add 1 to a number; negate a truth value."""
        if isinstance(node.value, bool | int):
            new = not node.value if isinstance(node.value, bool) else node.value + 1
            self.add(*self.span(node), str(new))

    def visit_Expr(self, node: ast.Expr) -> None:
        """Delete a call whose result nobody takes."""
        if isinstance(node.value, ast.Call):
            self.add(*self.span(node), "None")
            self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> None:
        """Leave an argument out that has a name."""
        start, end = self.span(node)
        if after := re.match(r",\s*", self.source[end:]):
            self.add(start, end + after.end(), "")
        self.generic_visit(node)


def mutations_of(path: str) -> list[Mutation]:
    """Return all mutations of a file."""
    if path.endswith(".py"):
        finder = Finder(path)
        finder.visit(ast.parse(finder.source))
        return finder.found
    found, start = list[Mutation](), 0
    for line in Path(path).read_text().splitlines(keepends=True):
        code = line.split("//")[0]
        if not code.lstrip().startswith(("#", "static_assert", "template")):
            found += [
                Mutation(path, start + match.start(), start + match.end(), new)
                for old, new in CPP_OPERATORS.items()
                for match in re.finditer(re.escape(old), code)
            ]
        start += len(line)
    return found


def choose(room: str, seed: int) -> Iterator[Mutation]:
    """Yield the mutations of a room in the order of a seed."""
    suffixes = (".cpp", ".h") if room == "C++" else (".py",)
    files = [path for root in map(Path, ROOMS[room])
             for path in (sorted(root.rglob("*")) if root.is_dir() else [root])]  # fmt: skip
    found = [
        mutation
        for path in files
        if path.suffix in suffixes and not any(part in str(path) for part in NOT_RUN)
        for mutation in mutations_of(str(path))
    ]
    random.Random(f"{seed} {room}").shuffle(found)
    yield from found


@cache
def imports(path: Path) -> frozenset[str]:
    """Return the names of attnzoo that a file imports: modules, and what it takes from them."""
    names = set[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(name for name in names if name.startswith("attnzoo."))


def tests_of(path: str) -> list[str]:
    """Return the test files that import a module, the nearest first.

    C++ is imported by the Python files of its folder, and by the algorithms that include it.
    """
    tests = sorted(Path("tests").rglob("test_*.py"))
    modules = {str(file.with_suffix("")).replace("/", "."): file
               for file in Path("attnzoo").rglob("*.py")}  # fmt: skip
    if path.endswith(".py"):
        layer = {path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")}
    else:
        folders = {file.parent for file in Path("attnzoo/ops").rglob("*.cpp")
                   if Path(path).name in file.read_text() or str(file) == path}  # fmt: skip
        folders.add(Path(path).parent)
        layer = {name for name, file in modules.items() if file.parent in folders}
    found, seen = list[str](), set[str]()
    while layer:
        found += [str(test) for test in tests if imports(test) & layer and str(test) not in found]
        seen |= layer
        layer = {name.removesuffix(".__init__") for name, file in modules.items()
                 if imports(file) & layer} - seen  # fmt: skip
    return found


def run(mutation: Mutation, tree: Path, arguments: list[str], limit: float) -> dict[str, object]:
    """Return what the tests say of a mutation: killed, survived or stopped."""
    file = tree / mutation.path
    source = file.read_text()
    tests = tests_of(mutation.path)
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *arguments]
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    file.write_text(mutation.apply(source))
    start = time.monotonic()
    process = subprocess.Popen([*command, *tests], cwd=tree, env=environment, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               start_new_session=True)  # fmt: skip
    try:
        output = process.communicate(timeout=limit)[0]
        result = {0: "survived", 5: "survived"}.get(process.returncode, "killed")
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, result = process.communicate()[0], "stopped"
    finally:
        file.write_text(source)
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    return {
        "mutation": mutation.describe(), "result": result, "by": failed and failed[1],
        "seconds": round(time.monotonic() - start, 1),
    }  # fmt: skip


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--per-room", type=int, default=10)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds a mutation")
    parser.add_argument("--equivalent", type=int, nargs="*", default=[], metavar="NUMBER")
    parser.add_argument("--only", type=int, nargs="*", metavar="NUMBER")
    parser.add_argument("--list", action="store_true", help="print the mutations and stop")
    parser.add_argument("--out", type=Path, default=Path("mutations.jsonl"))
    parser.add_argument("arguments", nargs="*", help="of pytest, after --")
    options = parser.parse_args()
    chosen = dict[int, Mutation]()
    for index, room in enumerate(ROOMS):
        numbers = (index * 1000 + count for count in range(1000))
        pairs = zip(numbers, choose(room, options.seed), strict=False)
        kept = [pair for pair in pairs if pair[0] not in options.equivalent]
        chosen.update(kept[: options.per_room])
    if options.only:
        chosen = {number: chosen[number] for number in options.only}
    if options.list:
        for number, mutation in chosen.items():
            print(f"{number:5d} {mutation.describe()}")
        return
    with tempfile.TemporaryDirectory() as folder, options.out.open("a") as out:
        tree = Path(folder) / "attnzoo"
        subprocess.run(["git", "worktree", "add", "--detach", "--quiet", tree], check=True)
        try:
            for number, mutation in chosen.items():
                row = {"number": number, **run(mutation, tree, options.arguments, options.limit)}
                print(json.dumps(row), flush=True)
                out.write(json.dumps(row) + "\n")
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], check=True)


if __name__ == "__main__":
    main()
