"""Call every backend of an installed wheel where there is neither a compiler nor a cache.

``python try_wheel.py`` starts a process for each backend, with an empty ``PATH`` and a cache folder
that does not exist, and takes the CPU time of its first causal call, of 512 tokens, on one thread.
The backend is built before, which imports parts of torch that take seconds. Exits with 1 if a
kernel is not prebuilt, a file is written, attnzoo prints to standard error, or the time is over
``SECONDS``. ``attnzoo doctor`` then checks results, for each level of CPUs whose instructions this
one has.

It needs nothing but the wheel, so that its environment can be bare.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SECONDS = 0.3  # of a first call, beyond torch; of CPU, because other programs use the machine too
OPTIONS = {"flash": {"window": 64}, "longformer": {"window": 64}, "linformer": {"block": 256}}
IN_TORCH = {"linformer", "softmax"}  # they have no kernel in C++


def first_call(name: str) -> None:
    """Time the first call of a backend; prints a line of JSON."""
    import torch

    torch.set_num_threads(1)
    x = torch.randn(1, 4, 512, 32)
    torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    torch.softmax(x @ x.mT, -1)
    from attnzoo.contract import AttentionMask, Geometry
    from attnzoo.registry import build_backend

    geometry = Geometry(num_heads=4, num_key_heads=4, head_dim=32, hidden_size=128, causal=True)
    backend = build_backend(name, OPTIONS.get(name, {}), geometry)
    hidden, mask = torch.randn(1, 512, 128), AttentionMask(causal=True)
    start = time.process_time()
    with torch.no_grad():
        backend(x, x, x, mask=mask, hidden_states=hidden)
    seconds = time.process_time() - start
    assert backend.ran is not None
    impl, why = backend.ran
    print(json.dumps({"seconds": seconds, "impl": impl, "why": why}))


def run(folder: Path, *command: str, **settings: str) -> str:
    """Run a program of this environment where there is no compiler; return what it prints."""
    env = {"PATH": "", "HOME": str(folder), "ATTNZOO_CACHE": str(folder / "cache"), **settings}
    done = subprocess.run(
        [sys.executable, "-I", *command], env=env, capture_output=True, text=True, check=False
    )
    if done.returncode or "attnzoo" in done.stderr:  # a compilation, or a warning about one
        raise SystemExit(f"{command}: exit {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def main() -> None:
    """Try the wheel."""
    import attnzoo
    from attnzoo.runtime.cpp import prebuilt

    print(f"attnzoo {attnzoo.__version__} in {Path(attnzoo.__file__).parent}")
    failed = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for backend in attnzoo.available_backends():
            call = json.loads(run(folder, __file__, backend))
            seconds, impl, why = call["seconds"], call["impl"], call["why"]
            print(f"{backend:14} {seconds:.3f} s  {impl:6} {why}", flush=True)
            if backend not in IN_TORCH and "prebuilt for" not in why:
                failed.append(f"{backend} ran {impl}: {why}")
            if seconds > SECONDS:
                failed.append(f"the first call of {backend} took {seconds:.2f} s")
        for level in prebuilt.usable_levels():
            check = ("-m", "attnzoo.evaluation.check_cpp")
            output = run(folder, *check, **{prebuilt.CPU: level.name})
            events = [json.loads(line) for line in output.splitlines()]
            wrong = [x["text"] for x in events if x["event"] == "wrong"]
            print(f"{level.title}: {'; '.join(wrong) or 'results and gradients agree with torch'}")
            if wrong or events[-1]["event"] != "done":
                failed.append(f"the kernels for {level.title} are wrong")
        doctor = json.loads(run(folder, "-m", "attnzoo", "doctor", "--json"))
        rows = [row for row in doctor if row["check"].startswith("C++ kernels")]
        failed += [f"doctor: {row}" for row in rows if "prebuilt for" not in row["detail"]]
        left = sorted(str(path) for path in folder.rglob("*"))
        if left:
            failed.append(f"files were written: {', '.join(left)}")
    if failed:
        raise SystemExit("\n".join(failed))


if __name__ == "__main__":
    first_call(sys.argv[1]) if sys.argv[1:] else main()
