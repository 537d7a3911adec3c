"""Compare the functions and structures that C++ and Python both declare.

A field that only one side has would shift all fields behind it. A library describes what it
exports as text (``layout.h``), and this module describes the ``ctypes`` classes in the same words.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import cache
from itertools import zip_longest
from typing import Any, NamedTuple

DESCRIBE = "attnzoo_layout"  # the function of a library that returns the text
KINDS = {  # by the letter of a type in ctypes
    **dict.fromkeys("bhilq", "int"),
    **dict.fromkeys("?BHILQ", "uint"),
    **dict.fromkeys("fd", "float"),
}


class LayoutError(AssertionError):
    """C++ and Python declare a function or a structure differently: a mistake in attnzoo."""


class Function(NamedTuple):
    """The type of a C++ function: its arguments are pointers to structures."""

    arguments: tuple[type[ctypes.Structure], ...] = ()
    result: type | None = None  # a type of ctypes


def declare_functions(library: ctypes.CDLL, functions: Mapping[str, Function], source: str) -> None:
    """Set the types of a library's functions, so that a call takes the structures themselves.

    Args:
        library: Defines the functions, and ``DESCRIBE``.
        functions: All functions that Python calls, by name.
        source: Name of the C++ file, for errors.

    Raises:
        LayoutError: The library declares them, or a structure, differently.
    """
    describe = getattr(library, DESCRIBE)
    describe.restype = ctypes.c_char_p
    found = {}
    for block in describe().decode().split("function ")[1:]:
        first, *lines = block.splitlines()
        name, result = first.split()
        found[name] = result, lines
    if found.keys() != functions.keys():
        names = " and ".join(sorted(found.keys() ^ functions.keys()))
        raise LayoutError(f"Python and CALLED_FROM_PYTHON of {source} do not both declare {names}")
    for name, function in functions.items():
        result, lines = found[name]
        expected = "void" if function.result is None else _type_name(function.result)
        if result != expected:
            raise LayoutError(f"{name} of {source} returns {result}; Python declares {expected}")
        _compare(lines, function, f"{name} of {source}")
        called = getattr(library, name)
        called.argtypes = [ctypes.POINTER(x) for x in function.arguments]
        called.restype = function.result


def _compare(lines: list[str], function: Function, name: str) -> None:
    """Raise ``LayoutError`` at the first line of a function that differs in C++ and Python."""
    expected = [line for x in function.arguments for line in layout_of(x)]
    if lines == [line.text for line in expected]:
        return
    rows = zip_longest(lines, expected)
    ours, theirs = next((x, y) for x, y in rows if y is None or x != y.text)
    where = f"structure {_full_name(theirs.owner)}" if theirs else "list of arguments"
    raise LayoutError(
        f"the {where} differs in C++ and Python: {name} has {_say(ours)}, and Python has "
        f"{_say(theirs and theirs.text)}. Declare the same fields in the C++ struct, in its "
        "FIELDS and in _fields_"
    )


class Line(NamedTuple):
    """A line of a layout, and the structure that it belongs to."""

    text: str
    owner: type[ctypes.Structure]


@cache
def layout_of(structure: type[ctypes.Structure]) -> tuple[Line, ...]:
    """Return a line for each field of a structure, as ``layout.h`` does.

    Raises:
        LayoutError: The structure has padding, in which a field of C++ would be overlooked.
    """
    lines = []
    size = ctypes.sizeof(structure)
    kinds: list[tuple[str, Any]] = structure._fields_  # type: ignore[assignment]
    if sum(ctypes.sizeof(kind) for _, kind in kinds) != size:
        raise LayoutError(f"the structure {_full_name(structure)} has padding; reorder its fields")
    for name, kind in kinds:
        offset = getattr(structure, name).offset
        lines.append(Line(f"{name} {offset} {_type_name(kind)}", structure))
        target = getattr(kind, "_type_", kind)  # of a pointer or an array
        if isinstance(target, type) and issubclass(target, ctypes.Structure):
            lines += layout_of(target)
    return (*lines, Line(f"sizeof {size}", structure))


def _type_name(kind: Any) -> str:
    """Return the name of a type of ctypes; it contains the size in bits."""
    if issubclass(kind, ctypes.Array):
        return f"{_type_name(kind._type_)}[{kind._length_}]"
    if issubclass(kind, ctypes.Structure):
        name = "struct"
    elif issubclass(kind, (ctypes._Pointer, ctypes.c_void_p, ctypes.c_char_p)):
        name = "pointer"
    else:
        name = KINDS[kind._type_]
    return f"{name}{8 * ctypes.sizeof(kind)}"


def _full_name(structure: type) -> str:
    return f"{structure.__module__}.{structure.__qualname__}"


def _say(line: str | None) -> str:
    """Return a line of a layout in words."""
    if line is None:
        return "nothing more"
    name, number, *kind = line.split()
    return f"field {name} at byte {number} ({kind[0]})" if kind else f"{number} bytes in all"
