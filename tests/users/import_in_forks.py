"""Run each program of a JSON list in a forked child; print a JSON list of their errors.

python import_in_forks.py CHILDREN < programs.json

The parent imports torch and what transformers needs, so that a child only imports transformers.
"""

import gc
import json
import os
import sys
import tempfile
import traceback
from contextlib import suppress
from importlib import import_module

PRELOADED = (
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "accelerate",
    "datasets",
    "jinja2",
    "PIL.Image",
    "rich.table",
    "sklearn.metrics",
    "tokenizers",
)


def start(program: str, log: int) -> int:
    """Fork a child that runs a program and writes its output to a file; return its process id."""
    if child := os.fork():
        return child
    status = 1
    try:
        os.dup2(log, 1)
        os.dup2(log, 2)
        exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})
        status = 0
    except BaseException:  # the child must not return into the parent's loop
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def run_all(programs: list[str], children: int) -> list[str]:
    """Run the programs, some at a time; return the output of those that failed, else ""."""
    failed = [""] * len(programs)
    running = {}
    waiting = list(enumerate(programs))
    while waiting or running:
        while waiting and len(running) < children:
            number, program = waiting.pop(0)
            log = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the child ends
            running[start(program, log.fileno())] = number, log
        child, status = os.wait()
        number, log = running.pop(child)
        with log:
            log.seek(0)
            text = log.read().decode(errors="replace")
        if status:
            failed[number] = f"status {os.waitstatus_to_exitcode(status)}\n{text}"
    return failed


if __name__ == "__main__":
    for name in PRELOADED:
        with suppress(ModuleNotFoundError):  # it saves time only
            import_module(name)
    assert not {"attnzoo", "transformers"} & set(sys.modules)
    gc.disable()
    gc.freeze()
    json.dump(run_all(json.load(sys.stdin), int(sys.argv[1])), sys.stdout)
