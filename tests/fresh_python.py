"""Run a program in an interpreter that has imported torch and transformers, but not attnzoo.

The interpreter is a fork of a server, which imports them once: that takes five seconds.
"""

from __future__ import annotations

import gc
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SECONDS = 300.0  # time limit of a program, and of the start of the server


class FreshPython:
    """Client of a server, which starts with the first program."""

    def __init__(self) -> None:
        self.server: subprocess.Popen[str] | None = None

    def __call__(
        self,
        program: str | Path,
        *arguments: object,
        cwd: Path | None = None,
        path: tuple[Path, ...] = (),
        processes: int = 0,
        environment: Mapping[str, str] = {},
        timeout: float = SECONDS,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program: its code, or a file.

        Args:
            program: The code, or the path of a file.
            arguments: ``sys.argv[1:]`` of the program.
            cwd: Its working directory; ``None`` means this process's.
            path: Folders that it finds first when it imports modules.
            processes: Number of processes that run it as ranks of one process group, with the
                environment variables that torchrun sets; ``0`` means one process without a group.
                When one fails, the others are killed.
            environment: Environment variables that are added to those of the server.
            timeout: Time limit in seconds, the start of the server included.

        Raises:
            AssertionError: The program takes longer. All processes are killed, and the next program
                starts another server.
        """
        if self.server is None:
            command = [sys.executable, __file__]
            self.server = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder, "stdout"), Path(folder, "stderr")
            request = {
                "file": str(program) if isinstance(program, Path) else "<string>",
                "code": program.read_text("utf-8") if isinstance(program, Path) else program,
                "arguments": [str(x) for x in arguments],
                "cwd": str(cwd or Path.cwd()),
                "path": [str(x) for x in path],
                "environments": [{**environment, **rank} for rank in ranks(processes)],
                "out": str(out),
                "err": str(err),
            }
            self.server.stdin.write(json.dumps(request) + "\n")
            self.server.stdin.flush()
            if not is_readable(self.server.stdout, timeout):
                self.kill()
                printed = "".join(x.read_text("utf-8") for x in (out, err) if x.exists())
                raise AssertionError(
                    f"not finished after {timeout:g} s; it printed: {printed[-4000:]}"
                )
            returncode = int(self.server.stdout.readline())
            return subprocess.CompletedProcess(
                [sys.executable, *request["arguments"]],
                returncode,
                out.read_text("utf-8"),
                err.read_text("utf-8"),
            )

    def close(self) -> None:
        """Stop the server."""
        if self.server is not None:
            try:
                self.server.communicate(timeout=SECONDS)
            except subprocess.TimeoutExpired:
                self.kill()

    def kill(self) -> None:
        """Kill the server and the programs that it runs."""
        assert self.server is not None
        os.killpg(self.server.pid, signal.SIGKILL)
        self.server.wait(SECONDS)
        self.server = None


def is_readable(file: Any, timeout: float) -> bool:
    """Return whether a pipe has something to read, or has ended, within a time limit."""
    with selectors.DefaultSelector() as selector:
        selector.register(file, selectors.EVENT_READ)
        return bool(selector.select(timeout))


def ranks(processes: int) -> list[dict[str, str]]:
    """Return the environment variables of each rank; see :class:`FreshPython`."""
    if not processes:
        return [{}]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    size = str(processes)
    return [
        {
            **group,
            **{"RANK": str(rank), "LOCAL_RANK": str(rank)},
            **{"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "OMP_NUM_THREADS": "1"},
        }
        for rank in range(processes)
    ]


def serve() -> None:
    """Fork the processes of each request; a child runs the program and ends with this script."""
    sys.path[0] = ""  # as with ``python -c``: the folder of this file is not on the path
    import torch
    from transformers import AutoModelForCausalLM, LlamaForCausalLM  # noqa: F401

    assert "attnzoo" not in sys.modules
    gc.collect()
    gc.freeze()  # collections in the forks do not look at what was imported here
    answers = os.fdopen(os.dup(1), "w")
    while line := sys.stdin.readline():
        request = json.loads(line)
        children = set()
        for environment in request["environments"]:
            if not (child := os.fork()):
                answers.close()
                os.environ.update(environment)
                if "WORLD_SIZE" in environment:
                    torch.set_num_threads(1)
                return run(request)
            children.add(child)
        returncode = 0
        while children:
            child, status = os.wait()
            children.remove(child)
            if status and not returncode:
                returncode = os.waitstatus_to_exitcode(status)
                for other in children:  # they may wait for the one that failed
                    os.kill(other, signal.SIGKILL)
        print(returncode, file=answers, flush=True)


def run(request: dict[str, Any]) -> None:
    """Run a program as ``__main__``."""
    for descriptor, name in ((1, request["out"]), (2, request["err"])):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream in (sys.stdout, sys.stderr):  # ranks share the files: a line is one write
        stream.reconfigure(line_buffering=True, write_through=False)
    os.chdir(request["cwd"])
    sys.path[1:1] = request["path"]
    sys.argv = [request["file"], *request["arguments"]]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if request["file"] != "<string>":  # processes that it starts would run that file
        main.__file__ = request["file"]
    exec(compile(request["code"], request["file"], "exec"), main.__dict__)


if __name__ == "__main__":
    serve()
