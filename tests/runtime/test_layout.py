"""Structures that C++ and Python both declare: compared when a library is loaded."""

import ctypes
import re
import sys
from importlib import import_module
from pathlib import Path

import pytest

import attnzoo
from attnzoo.runtime import cpp
from attnzoo.runtime.cache_folder import CACHE
from attnzoo.runtime.cpp.layout import Function, LayoutError, layout_of

ROOT = Path(attnzoo.__file__).parent
CODE = """
#include <cstdint>
#include "layout.h"

struct Point {
    double x;
    int64_t steps[2];
    FIELDS(x, steps)
};

template <class Real>
struct Task {
    int64_t threads, size;
    const Real* data;
    Point point;
    const Point* points;
    /* more */
    FIELDS(threads, size, data, point, points)
};

extern "C" int64_t sum(const Task<float>* t) { return 10 * t->threads + t->size; }
extern "C" void run(const Task<float>*, const Point*) {}
CALLED_FROM_PYTHON(sum, run)
"""
INT, FLOAT, POINTER = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p


class Point(ctypes.Structure):
    _fields_ = [("x", FLOAT), ("steps", INT * 2)]


FIELDS = [
    ("threads", INT),
    ("size", INT),
    ("data", POINTER),
    ("point", Point),
    ("points", ctypes.POINTER(Point)),
]


def structure(fields):
    return type("Task", (ctypes.Structure,), {"_fields_": fields})


Task = structure(FIELDS)


def functions(task=Task, point=Point, result=INT):
    return {"sum": Function((task,), result), "run": Function((task, point))}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("layout")


@pytest.fixture
def path(folder, monkeypatch):
    """Return a C++ file; all tests have one cache, so that its library is compiled once."""
    monkeypatch.setenv(CACHE, str(folder / "cache"))
    file = folder / "small.cpp"
    file.write_text(CODE)
    try:
        load(file)
    except cpp.BuildError as error:
        pytest.skip(str(error))
    return file


def load(path, **changes):
    return cpp.load(cpp.Source(path, functions(**changes)))


def test_a_call_takes_structures(path):
    library = load(path)
    assert library.sum(Task(threads=4, size=2)) == 42
    assert library.run(Task(), Point()) is None
    with pytest.raises(ctypes.ArgumentError):
        library.sum(Point())
    with pytest.raises(TypeError):
        library.run(Task())


def swapped():
    return [FIELDS[1], FIELDS[0], *FIELDS[2:]]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (swapped(), "has field threads at byte 0 .int64., and Python has field size at byte 0 "),
        (FIELDS[:1] + FIELDS[2:], "field size at byte 8 .int64., and Python has field data at"),
        (FIELDS[:-1], "field points at byte 48 .pointer64., and Python has 48 bytes in all"),
        ([*FIELDS, ("more", INT)], "has 56 bytes in all, and Python has field more at byte 56 "),
        ([("threads", ctypes.c_int32), ("size", ctypes.c_int32), *FIELDS[2:]], "int64.*int32"),
        ([FIELDS[0], ("size", FLOAT), *FIELDS[2:]], r"byte 8 .int64.*byte 8 .float64"),
        ([FIELDS[0], ("size", INT * 1), *FIELDS[2:]], r"byte 8 .int64.*byte 8 .int64\[1\]"),
        ([*FIELDS[:4], ("points", POINTER)], r"field x at byte 0 .*has 56 bytes in all"),
    ],
)
def test_another_structure_in_python_is_refused(path, fields, message):
    with pytest.raises(LayoutError, match=f"Task differs in C.. and Python: sum of .*{message}"):
        load(path, task=structure(fields))


def test_another_structure_inside_a_structure_is_refused(path):
    class Other(ctypes.Structure):
        _fields_ = [("x", FLOAT), ("columns", INT * 2)]

    message = "Other differs .* field steps at byte 8 .*field columns at byte 8"
    with pytest.raises(LayoutError, match=message):
        load(path, task=structure([*FIELDS[:3], ("point", Other), *FIELDS[4:]]))
    with pytest.raises(LayoutError, match=message):  # behind a pointer
        load(path, task=structure([*FIELDS[:4], ("points", ctypes.POINTER(Other))]))
    with pytest.raises(LayoutError, match=message.replace("differs", "differs .*: run of")):
        load(path, point=Other)  # the second argument


def test_other_functions_are_refused(path):
    one = functions()
    del one["run"]
    with pytest.raises(LayoutError, match=r"CALLED_FROM_PYTHON of small\.cpp do not .* run"):
        cpp.load(cpp.Source(path, one))
    with pytest.raises(LayoutError, match=r"list of arguments differs .*: run of"):
        cpp.load(cpp.Source(path, functions() | {"run": Function((Task,))}))
    with pytest.raises(LayoutError, match=r"sum of small\.cpp returns int64.* void"):
        load(path, result=None)


@pytest.mark.parametrize("listed", [True, False])
def test_another_field_in_cpp_is_refused(path, tmp_path, listed):
    """The library of the earlier source is in the cache, and is not loaded."""
    changed = tmp_path / path.name
    changed.write_text(CODE)
    load(changed)
    code = CODE.replace("/* more */", "int32_t more, last;")
    changed.write_text(
        code.replace("point, points)", "point, points, more, last)" if listed else "point, points)")
    )
    message = "field more at byte 56 .int32" if listed else "64 bytes in all.*56 bytes in all"
    with pytest.raises(LayoutError, match=message):
        load(changed)
    task = structure([*FIELDS, ("more", ctypes.c_int32), ("last", ctypes.c_int32)])
    if listed:
        assert load(changed, task=task).sum
    else:
        with pytest.raises(LayoutError, match=r"64 bytes in all.*field more"):
            load(changed, task=task)


def test_padding_is_refused():
    with pytest.raises(LayoutError, match="Task has padding"):
        layout_of(structure([("a", INT), ("b", ctypes.c_int32)]))


# -- the structures of attnzoo ---------------------------------------------------------------------


def sources():
    """Return the C++ sources of attnzoo; imports all modules that declare some or structures."""
    for file in ROOT.rglob("*.py"):
        if re.search(r"\bStructure\b|\bSource\(", file.read_text()):
            import_module(".".join(("attnzoo", *file.relative_to(ROOT).with_suffix("").parts)))
    modules = [x for name, x in sys.modules.items() if name.startswith("attnzoo.")]
    found = {x for module in modules for x in vars(module).values() if isinstance(x, cpp.Source)}
    return sorted(found, key=lambda source: source.path)


def test_every_structure_is_compared():
    compared = {
        line.owner
        for source in sources()
        for function in source.functions.values()
        for argument in function.arguments
        for line in layout_of(argument)
    }
    ours = {x for x in subclasses(ctypes.Structure) if x.__module__.startswith("attnzoo.")}
    assert len(ours) > 12
    assert ours == compared


def subclasses(kind):
    return {y for x in kind.__subclasses__() for y in (x, *subclasses(x))}


def test_every_cpp_file_is_a_source():
    assert [source.path for source in sources()] == sorted(ROOT.rglob("*.cpp"))


def test_every_function_of_the_cpp_files_is_declared():
    """Others could be called without a check."""
    for source in sources():
        code = source.path.read_text()
        exported = re.findall(r'extern "C" \w+ (\w+)(?:##\w+)?\(', code)
        assert exported
        for name in exported:
            assert any(x.startswith(name) for x in source.functions), name


@pytest.mark.parametrize("source", sources(), ids=lambda source: source.path.stem)
def test_structures_are_the_same_in_cpp_and_python(source):
    if reason := cpp.unavailable_reason(source):
        pytest.skip(reason)
    for name, function in source.functions.items():
        called = getattr(cpp.load(source), name)
        assert called.argtypes == [ctypes.POINTER(x) for x in function.arguments]
