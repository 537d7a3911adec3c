"""Run the C++ kernels as compiled for 64-bit ARM, under QEMU, on the tensors of this process.

A kernel is compiled with a cross compiler, and its library is loaded by ``driver.c`` under
``qemu-aarch64``. The driver requests the pages of this process that the kernel touches and returns
them; changed bytes are written back. So a call needs no description of its tensors, and everything
that calls kernels, tests included, runs unchanged:

    python -m pytest -p tools.aarch64.plugin tests/ops/linear/test_cpp.py

Addresses are changed by ``OTHER_ADDRESSES``, because QEMU itself uses those of this process.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import struct
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from attnzoo.runtime import cpp
from attnzoo.runtime.cpp.layout import declare_functions

COMPILER, C_COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "aarch64-linux-gnu-gcc", "qemu-aarch64"
PACKAGES = "g++-aarch64-linux-gnu qemu-user"  # of Debian and Ubuntu
ROOT = "/usr/aarch64-linux-gnu"  # where these packages have the C library
OTHER_ADDRESSES = 0x3000_0000_0000  # bits that no address of QEMU has in this combination
PAGE = 4096
ASAN_OPTIONS = "detect_leaks=0:handle_segv=0"  # the driver handles page faults itself


def missing() -> str:
    """Return which program is missing, and what installs it, or ""."""
    for program in (COMPILER, C_COMPILER, EMULATOR):
        if shutil.which(program) is None:
            return f"there is no {program}; on Debian: apt-get install {PACKAGES}"
    return ""


def driver(folder: Path, flags: str = "") -> Path:
    """Compile the driver into a folder."""
    program, source = folder / "driver", Path(__file__).with_name("driver.c")
    options = ["-O2", "-Wall", "-Wextra", "-Werror", *flags.split()]
    # Libraries use its memset, whose loops must not become calls of memset
    options += ["-rdynamic", "-fno-tree-loop-distribute-patterns"]
    subprocess.run([C_COMPILER, *options, source, "-o", program, "-ldl"], check=True)
    return program


def compiler(folder: Path, flags: str = "") -> Path:
    """Write a script that runs the cross compiler with ``flags``, and return its path.

    It leaves out flags for the CPU that runs the compiler.
    """
    script = folder / "compiler"
    script.write_text(
        "#!/bin/sh\n"
        'for x; do shift; case $x in *=native) ;; *) set -- "$@" "$x";; esac; done\n'
        f'exec {COMPILER} "$@" {flags}\n'
    )
    script.chmod(0o700)
    return script


def install(folder: Path, flags: str = "") -> None:
    """Let ``cpp.load`` return kernels that run under QEMU, from now on and in this process.

    Args:
        folder: Empty; receives the driver and a script that runs the cross compiler.
        flags: More flags for it.

    Raises:
        RuntimeError: The cross compiler or QEMU is missing.
    """
    if missing():
        raise RuntimeError(missing())
    program = driver(folder, flags)
    os.environ["CXX"] = shlex.quote(str(compiler(folder, flags)))

    def open_library(library: Path, source: cpp.Source) -> Any:
        opened: Any = EmulatedLibrary(program, library)
        declare_functions(opened, source.functions, source.path.name)
        return opened

    cpp._open = open_library


class EmulatedLibrary:
    """A shared library for 64-bit ARM; its functions are attributes, as of ``ctypes.CDLL``."""

    def __init__(self, driver: Path, library: Path) -> None:
        self.driver, self.path = driver, library
        self._process = subprocess.Popen(
            [EMULATOR, "-L", ROOT, driver, library],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=os.environ | {"ASAN_OPTIONS": ASAN_OPTIONS},
        )
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> EmulatedFunction:
        function = EmulatedFunction(self, name)
        setattr(self, name, function)
        return function

    def close(self) -> None:
        """End the emulator."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()

    def call(self, name: str, kind: str, arguments: tuple[ctypes.Structure, ...]) -> int | bytes:
        """Call a function and return its result; ``kind`` is "i" (or nothing) or "s"."""
        pointers = {slot for x in arguments for slot in pointers_in(x)}
        addresses = [ctypes.addressof(x) ^ OTHER_ADDRESSES for x in arguments]
        encoded = name.encode()
        with self._lock, open("/proc/self/mem", "rb", buffering=0) as memory:
            self._write(kind.encode() + struct.pack("<Q", len(encoded)) + encoded)
            self._write(struct.pack(f"<{1 + len(addresses)}Q", len(addresses), *addresses))
            sent: dict[int, bytes] = {}
            while self._read(1) == b"p":
                page = self._number() ^ OTHER_ADDRESSES
                content = _page(memory.fileno(), page, pointers)
                self._write(struct.pack("<Q", len(content) // PAGE) + content)
                sent[page] = content
            result = self._number()
            text = self._read(result) if kind == "s" else b""
            for _ in range(self._number()):
                page = self._number() ^ OTHER_ADDRESSES
                _write_back(page, sent[page], self._read(PAGE))
        return text if kind == "s" else result

    def _write(self, content: bytes) -> None:
        assert self._process.stdin
        try:
            self._process.stdin.write(content)
        except BrokenPipeError:
            raise self._ended() from None

    def _read(self, size: int) -> bytes:
        assert self._process.stdout
        content = bytearray()
        while len(content) < size:
            part = self._process.stdout.read(size - len(content))
            if not part:
                raise self._ended()
            content += part
        return bytes(content)

    def _number(self) -> int:
        return int.from_bytes(self._read(8), "little")

    def _ended(self) -> RuntimeError:
        return RuntimeError(f"the emulated kernel ended with exit status {self._process.wait()}")


class EmulatedFunction:
    """A function of such a library, which takes structures as ``declare_functions`` says."""

    argtypes: Any = ()
    restype: Any = None

    def __init__(self, library: EmulatedLibrary, name: str) -> None:
        self._library, self._name = library, name

    def __call__(self, *arguments: ctypes.Structure) -> Any:
        """Return the result, as a function of ``ctypes`` does."""
        if self.restype is ctypes.c_char_p:
            return self._library.call(self._name, "s", arguments)
        result = self._library.call(self._name, "i", arguments)
        if self.restype is None:
            return None
        assert isinstance(result, int)
        return self.restype(result).value  # keeps the bits that the type has


def pointers_in(structure: ctypes.Structure) -> Iterator[int]:
    """Yield the address of each pointer in a structure and in those that it points to."""
    start = ctypes.addressof(structure)
    kinds: list[tuple[str, Any]] = structure._fields_  # type: ignore[assignment]
    for name, kind in kinds:
        address, value = start + getattr(type(structure), name).offset, getattr(structure, name)
        if isinstance(value, ctypes.Structure):
            yield from pointers_in(value)
        elif issubclass(kind, (ctypes._Pointer, ctypes.c_void_p)):
            yield address
            for item in _pointed_to(structure, value):
                yield from pointers_in(item)


def _pointed_to(structure: ctypes.Structure, pointer: Any) -> Iterator[ctypes.Structure]:
    """Yield the structures behind a pointer; ctypes keeps their array with the structure."""
    if not isinstance(pointer, ctypes._Pointer) or not pointer:
        return
    address = ctypes.addressof(pointer.contents)
    for kept in (structure._objects or {}).values():
        array = kept[-1] if isinstance(kept, tuple) else kept
        if isinstance(array, ctypes.Array) and ctypes.addressof(array) == address:
            yield from array
            return
    raise NotImplementedError(f"a pointer of {type(structure).__name__} is not to an array")


def _page(memory: int, address: int, pointers: set[int]) -> bytes:
    """Return a page as the kernel sees it, or b"" if there is none at this address."""
    try:
        content = bytearray(os.pread(memory, PAGE, address))
    except OSError:
        return b""
    for pointer in pointers:
        at = pointer - address
        if 0 <= at < PAGE:
            (value,) = struct.unpack_from("<Q", content, at)
            struct.pack_into("<Q", content, at, value and value ^ OTHER_ADDRESSES)
    return bytes(content)


def _write_back(address: int, before: bytes, after: bytes) -> None:
    """Write the bytes that a kernel changed; others of the page may be in use by Python."""
    if before == after:
        return
    old, new = (torch.frombuffer(bytearray(x), dtype=torch.uint8) for x in (before, after))
    page = torch.frombuffer((ctypes.c_uint8 * PAGE).from_address(address), dtype=torch.uint8)
    changed = (old != new).nonzero().flatten()
    page[changed] = new[changed]
