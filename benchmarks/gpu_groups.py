"""Groups of measurements for ``gpu.py``; each runs in its own process.

python benchmarks/gpu_groups.py "time attnzoo none" rows.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from gpu_cases import CONFIGS, Workload, accuracy_cases, shrink, workloads  # noqa: E402
from gpu_peers import (  # noqa: E402
    PEERS,
    attnzoo_kernels,
    copy_gigabytes,
    inputs_of,
    prepared,
)
from gpu_rows import PeerUnavailable, Recorder, Row, read_rows  # noqa: E402
from gpu_timing import elapsed_ms, time_call  # noqa: E402

SANITIZER_SECONDS = 100


class Session:
    """State that the groups share: the recorder of rows, and the device."""

    def __init__(self, group: str, out: Path, tiny: bool) -> None:
        self.recorder, self.tiny = Recorder(out, group), tiny
        self.interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        self.device = torch.device("cpu" if self.interpreted else "cuda:0")
        copies = [row for row in read_rows(out) if row["kind"] == "copy"]
        self.gigabytes = copies[-1].get("gigabytes_per_second") if copies else None

    def time_call(self, workload: Workload, name: str) -> Row:
        """Return the times of a call."""
        return time_call(workload, name, self.device, self.gigabytes)

    def need_gpu(self) -> None:
        """Raise ``PeerUnavailable`` if kernels are interpreted."""
        if self.interpreted:
            raise PeerUnavailable("the interpreter has no GPU")


# -- stage 1 ---------------------------------------------------------------------------------------


def measure_machine(session: Session) -> None:
    """Record the machine, the versions of packages, and the GPU."""

    def run() -> Row:
        from attnzoo.evaluation.timing import machine
        from attnzoo.ops.linear.triton.verdicts import device_identity

        return {**machine(), **device_identity(session.device)}

    session.recorder.measure(run, kind="machine")


def measure_copy(session: Session) -> None:
    """Record the bandwidth of a large copy."""
    session.recorder.measure(
        lambda: {"gigabytes_per_second": copy_gigabytes(session.device)}, kind="copy"
    )


def check(session: Session, decay: str, kind: str, *assembler: str) -> None:
    """Compare the kernels with float64 and torch, and two runs bit for bit."""
    from attnzoo.ops.linear.triton import check as check_triton

    _check(session, check_triton, decay, kind, *assembler)


def check_hybrid(session: Session, decay: str, kind: str, *assembler: str) -> None:
    """Compare the kernels of the window hybrid, as :func:`check`."""
    from attnzoo.ops.hybrid.triton import check as module

    _check(session, module, decay, kind, *assembler)


def check_delta(session: Session, decay: str, kind: str, *assembler: str) -> None:
    """Compare the kernels of the delta rule, as :func:`check`."""
    from attnzoo.ops.delta.triton import check as module

    _check(session, module, decay, kind, *assembler)


def check_sparse(session: Session, decay: str, kind: str, *assembler: str) -> None:
    """Compare the kernels of block-sparse attention, as :func:`check`."""
    from attnzoo.ops.block_sparse.triton import check as module

    _check(session, module, decay, kind, *assembler)


def check_varlen(session: Session, size: str, *_: str) -> None:
    """Compare torch's varlen kernel with a dense mask and float64."""
    from attnzoo.ops.flash import check_varlen as module

    for case in module.cases():

        def run(case: Any = case) -> Row:
            session.need_gpu()
            return {"wrong": list(module.wrong_results(case, int(size), session.device))}

        session.recorder.measure(run, kind="check", workload=f"{case}, size {size}")


def _check(session: Session, module: Any, decay: str, kind: str, *assembler: str) -> None:
    cases = list(module.cases(decay, 128, kind, small=session.tiny))
    for case in cases[-1:] if session.interpreted else cases:
        workload = f"{decay} {kind} {case}{' second ptxas' if assembler else ''}"
        session.recorder.measure(
            lambda case=case: {"wrong": list(module.wrong_results(case, session.device))},
            kind="check",
            workload=workload,
        )


def sanitize(session: Session, tool: str, decay: str, op: str = "triton") -> None:
    """Run small cases under compute-sanitizer: of linear attention, or of the window hybrid."""

    def run() -> Row:
        binary = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
        if not Path(binary).exists():
            raise PeerUnavailable("compute-sanitizer is not installed")
        session.need_gpu()
        kind = "any" if op == "hybrid" else "mapped"
        module = ["-m", f"attnzoo.backends.linear.check_{op}", decay, "64", kind, "cuda:0"]
        done = subprocess.run(
            [binary, "--tool", tool, sys.executable, *module],
            capture_output=True,
            text=True,
            timeout=SANITIZER_SECONDS,
        )
        text = done.stdout + done.stderr
        found = re.search(r"(?:ERROR SUMMARY|RACECHECK SUMMARY)\D*(\d+)", text)
        if found is None:
            raise RuntimeError((text.strip().splitlines() or ["no output"])[-1])
        return {"sanitizer_errors": int(found[1])}

    session.recorder.measure(run, kind="sanitizer", workload=f"{tool} {decay} {op}")


def warm(session: Session, peer: str, family: str) -> None:
    """Compile and autotune a peer, so that later groups find its kernels in the cache."""
    for workload in workloads(family, session.tiny):
        if peer not in workload.peers:
            continue

        def run(workload: Workload = workload) -> Row:
            inputs = inputs_of(workload, session.device)
            start = time.monotonic()
            prepared(PEERS[peer](workload, inputs), inputs, train=workload.train)()
            return {"seconds": time.monotonic() - start}

        session.recorder.measure(run, kind="warm", workload=workload.name, implementation=peer)


# -- stages 2 and 3 --------------------------------------------------------------------------------


def time_peer(session: Session, peer: str, family: str) -> None:
    """Time one implementation on the workloads of a family.

    ``softmax`` stands for all softmax implementations, and ``configs`` for attnzoo with each of
    several configs, where ``family`` is the decay.
    """
    if peer == "configs":
        configs(session, family, timed=True)
        return
    for workload in workloads(family, session.tiny):
        names = [name for name in workload.peers if name != "fla"] if peer == "softmax" else [peer]
        for name in names:
            if name in ("attnzoo", *workload.peers):
                run = partial(session.time_call, workload, name)
                session.recorder.measure(
                    run, kind="time", workload=workload.name, implementation=name
                )


def configs(session: Session, decay: str, *, timed: bool) -> None:
    """Run, and optionally time, a training step with each of ``CONFIGS``."""
    from attnzoo.ops.linear.triton import configs as table
    from attnzoo.ops.linear.triton.launch import device_properties

    capability, _ = device_properties(session.device)
    workload = Workload(name="configs", B=4, T=4096, H=64, D=128, decay=decay, train=True)
    workload = shrink(workload) if session.tiny else workload
    for config in CONFIGS[:1] if session.tiny else CONFIGS:
        name = f"{decay}, config {','.join(map(str, config))}"
        path = session.recorder.path.resolve().parent / f"gpu-{name.replace(', config ', '-')}.json"
        shapes = [
            table.Shape(kernel, decay, kind, size)
            for kernel in table.KERNELS
            for kind in table.KINDS
            for size in table.SIZES
        ]
        rows = {table.key(shape, capability): config for shape in shapes}
        path.write_text(json.dumps({"configs": rows}))

        def run() -> Row:
            if timed:
                return session.time_call(workload, "attnzoo")
            inputs = inputs_of(workload, session.device)
            prepared(attnzoo_kernels(workload, inputs), inputs, train=True)()
            return {}

        with mock.patch.dict(os.environ, {table.TABLE: str(path)}):
            kind = "configs" if timed else "warm"
            session.recorder.measure(run, kind=kind, workload=name, implementation="attnzoo")


def accuracy(session: Session, decay: str) -> None:
    """Record relative errors against float64."""
    for workload, mean, tolerance in accuracy_cases(decay, session.tiny):

        def run(
            workload: Workload = workload, mean: float = mean, tolerance: float = tolerance
        ) -> Row:
            inputs = inputs_of(workload, session.device, mean=mean)
            ours = prepared(attnzoo_kernels(workload, inputs), inputs, train=True)()
            doubles = [x if x is None else x.detach().double().requires_grad_() for x in inputs]
            reference = attnzoo_kernels(workload, doubles, impl="reference")
            exact = prepared(reference, doubles, train=True)()
            names = ("out", "dq", "dk", "dv", "dg")
            errors = {
                name: ((a.double() - b).norm() / b.norm()).item()
                for name, a, b in zip(names, ours, exact, strict=False)
            }
            wrong = [f"{name} {error:.1e}" for name, error in errors.items() if error > tolerance]
            return {"tolerance": tolerance, "errors": errors, "wrong": wrong}

        session.recorder.measure(run, kind="accuracy", workload=workload.name)


# -- stages 4 and 5 --------------------------------------------------------------------------------


def profile(session: Session, decay: str) -> None:
    """Record the time of each kernel of a training step."""

    def run() -> Row:
        session.need_gpu()
        workload = Workload(name="", B=4, T=4096, H=64, D=128, decay=decay, train=True)
        workload = shrink(workload) if session.tiny else workload
        inputs = inputs_of(workload, session.device)
        step = prepared(attnzoo_kernels(workload, inputs), inputs, train=True)
        step()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
            for _ in range(3):
                step()
            torch.cuda.synchronize()
        events = sorted(found.key_averages(), key=lambda e: -e.self_device_time_total)
        return {"kernels_us": {e.key[:60]: e.self_device_time_total / 3 for e in events[:12]}}

    session.recorder.measure(run, kind="profile", workload=decay)


def time_again(session: Session) -> None:
    """Time the first workload of each family and its peers once more."""
    for family in ("none", "scalar", "vector"):
        workload = workloads(family, session.tiny)[0]
        for name in ("attnzoo", *workload.peers):
            run = partial(session.time_call, workload, name)
            session.recorder.measure(run, kind="again", workload=workload.name, implementation=name)


def llama(session: Session) -> None:
    """Record the time of one decoded token of a swapped Llama, eager and under torch.compile."""

    def run(backend: str, options: dict[str, Any], compiled: bool) -> Row:
        session.need_gpu()
        try:
            from transformers import LlamaConfig, LlamaForCausalLM
        except ImportError as error:
            raise PeerUnavailable(f"transformers cannot be imported: {error}") from error
        import attnzoo

        sizes = {"num_hidden_layers": 8, "hidden_size": 2048, "intermediate_size": 5504}
        config = LlamaConfig(num_attention_heads=16, num_key_value_heads=4, **sizes)
        with session.device:
            model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
        attnzoo.swap(model, backend, **options)
        tokens = torch.randint(1000, (1, 4096), device=session.device)
        attnzoo.check_kernels(lambda: model.generate(tokens[:, :128], max_new_tokens=2))
        call = {"do_sample": False, "pad_token_id": 0}
        if compiled:
            call["cache_implementation"] = "static"
        row: Row = {}
        for field, count in (("prefill_ms", 1), ("with_64_tokens_ms", 64)):
            run = partial(model.generate, tokens, max_new_tokens=count, **call)
            run()
            row[field] = median(elapsed_ms(run) for _ in range(3))
        row["token_ms"] = (row["with_64_tokens_ms"] - row["prefill_ms"]) / 63
        return row

    cases = {
        "softmax": ("flash", {}),
        "linear": ("linear", {}),
        "gla": ("gated_linear", {"gate": "gla"}),
        "hybrid": ("gated_linear", {"gate": "gla", "window": 64}),
    }
    for name, (backend, options) in cases.items():
        for compiled in (False, True):
            session.recorder.measure(
                partial(run, backend, options, compiled),
                kind="llama",
                workload=name,
                implementation="torch.compile" if compiled else "eager",
            )


def run_tool(session: Session, name: str, *command: str) -> None:
    """Run a Python command of the project, and record the end of its output."""

    def run() -> Row:
        session.need_gpu()
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
        lines = (done.stdout + done.stderr).strip().splitlines()
        if done.returncode:
            raise RuntimeError(lines[-1] if lines else f"exit code {done.returncode}")
        return {"output": lines[-30:]}

    session.recorder.measure(run, kind="tool", workload=name)


def run_group(group: str, out: Path, *, tiny: bool) -> None:
    """Run the measurements of a group that the file does not have yet."""
    session = Session(group, out, tiny)
    torch.manual_seed(0)
    first, *rest = group.split()
    folder = out.resolve().parent
    if first == "compare":
        options = ["--device", "cuda", "--level", "op", "--no-quality"]
        options += ["--output-dir", str(folder / "gpu-compare")]  # compare resumes from this folder
        run_tool(session, group, "-m", "attnzoo", "compare", *options)
        return
    if first == "tune":
        table = str(folder / "gpu-table.json")
        run_tool(session, group, "-m", "tools.triton_configs.tune", table)
        return
    functions: dict[str, Callable[..., None]] = {
        "machine": measure_machine,
        "copy": measure_copy,
        "check": check,
        "hybrid": check_hybrid,
        "delta": check_delta,
        "block_sparse": check_sparse,
        "varlen": check_varlen,
        "sanitizer": sanitize,
        "warm": warm,
        "compile": lambda session, _, decay: configs(session, decay, timed=False),
        "time": time_peer,
        "accuracy": accuracy,
        "profile": profile,
        "again": time_again,
        "llama": llama,
    }
    functions[first](session, *rest)


def main() -> int:
    """Run one group."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("group")
    parser.add_argument("out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--interpret", action="store_true")
    args = parser.parse_args()
    if not args.interpret and not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU; --interpret --tiny runs without one")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    run_group(args.group, args.out, tiny=args.tiny)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
