"""Benchmark the delta rule against the torch functions of transformers and SDPA; JSON lines.

One core, float32 unless noted, 8 heads of size 64. ``python -m benchmarks.delta``.
"""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from torch import Tensor

from attnzoo.contract.states import DeltaState
from attnzoo.evaluation.timing import (
    BenchmarkCase,
    Run,
    as_row,
    machine,
    time_together,
    write_lines,
)
from attnzoo.ops.delta.api import delta_attention

sys.modules.setdefault("fla", None)  # type: ignore[arg-type]  # its functions need a GPU
DECAYS = ("none", "token", "channel")
MATMUL = 1024  # rows and columns of the square product that rates are measured against


def peers() -> tuple[Any, Any]:
    """Return transformers' chunk form and its recurrent form, in torch."""
    module = import_module("transformers.models.qwen3_next.modeling_qwen3_next")
    names = "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"
    chunk, recurrent = (inspect.unwrap(getattr(module, name)) for name in names)
    return chunk, recurrent


def make(tokens: int, decay: str) -> list[Tensor]:
    """Return random q, k, v, beta and, if there is a decay, the log decay."""
    q, k, v = (torch.randn(1, 8, tokens, 64) for _ in range(3))
    shape = {"none": None, "token": k.shape[:3], "channel": k.shape}[decay]
    inputs = [q, F.normalize(k, dim=-1), v, torch.rand(1, 8, tokens)]
    return inputs if shape is None else [*inputs, -0.1 * torch.rand(shape)]


def ours(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None = None) -> Tensor:
    """Call the chunk form of attnzoo."""
    return delta_attention(q, k, v, beta, log_decay=log_decay, scale=0.125).out


def theirs(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor) -> Tensor:
    """Call transformers' chunk form."""
    x = (t.transpose(1, 2) for t in (q, k, v, log_decay, beta))
    out: Tensor = peers()[0](*x)[0].transpose(1, 2)
    return out


def flops(tokens: int) -> float:
    """Return the FLOPs of the forward pass: three products with the state, and chunks of 16."""
    return 2.0 * 8 * tokens * (3 * 64 * 64 + 16 * (64 + 64))


def measure(tokens: int, mode: str, rounds: int) -> list[dict[str, Any]]:
    """Time all decays, transformers' chunk form, SDPA and a matrix product in alternation."""
    runs: dict[str, Run] = {}
    calls = {f"delta, {x}": (ours, make(tokens, x)) for x in DECAYS}
    calls["transformers"] = (theirs, make(tokens, "token"))
    calls["sdpa"] = (
        lambda q, k, v, *_: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        make(tokens, "none")[:3],
    )
    d_out = torch.randn(1, 8, tokens, 64)
    for name, (call, inputs) in calls.items():
        if mode == "forward":
            runs[name] = torch.no_grad()(lambda call=call, inputs=inputs: call(*inputs))
        else:
            leaves = [x.requires_grad_() for x in inputs]
            runs[name] = lambda call=call, x=leaves: torch.autograd.grad(call(*x), x, d_out)
    square = torch.randn(MATMUL, MATMUL)
    runs["matmul"] = lambda: square @ square
    taken = time_together(runs, rounds=rounds)
    rows = []
    for name in calls:
        case = BenchmarkCase(op=name, mode=mode, T=tokens)
        figures = {
            "times_transformers": taken[name].times_faster_than(taken["transformers"]),
            "times_sdpa": taken[name].times_faster_than(taken["sdpa"]),
        }
        if name.startswith("delta") and mode == "forward":
            product = flops(tokens) / (2.0 * MATMUL**3)
            figures["rate"] = taken[name].times_faster_than(taken["matmul"]) * product
        rows.append(as_row(case, taken[name], **figures))
    return rows


def measure_step(rounds: int) -> list[dict[str, Any]]:
    """Time one decoded token: our op and transformers' recurrent form."""
    q, k, v, beta, log_decay = make(1, "token")
    state = torch.randn(1, 8, 64, 64)
    by_token = [x.transpose(1, 2) for x in (q, k, v, log_decay, beta)]
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    recurrent = peers()[1]
    runs: dict[str, Run] = {
        "delta, token": lambda: delta_attention(
            *(q, k, v, beta),
            log_decay=log_decay,
            state=DeltaState(state),
            normalize_qk=True,
            return_state=True,
        ),
        "transformers": lambda: recurrent(*by_token, initial_state=state, **options),
    }
    runs = {name: torch.no_grad()(run) for name, run in runs.items()}
    taken = time_together(runs, rounds=max(rounds, 9))
    return [
        as_row(
            BenchmarkCase(op=name, mode="decode", T=1),
            timing,
            times_transformers=timing.times_faster_than(taken["transformers"]),
        )
        for name, timing in taken.items()
    ]


def measure_slope(rounds: int) -> list[dict[str, Any]]:
    """Fit the slope of log time over log length, 4k to 64k tokens."""
    lengths = (4096, 8192, 16384, 32768, 65536)
    runs: dict[str, Run] = {}
    for tokens in lengths:
        inputs = make(tokens, "token")
        runs[str(tokens)] = torch.no_grad()(lambda inputs=inputs: ours(*inputs))
    taken = time_together(runs, rounds=rounds)
    times = torch.tensor([timing.min_ms for timing in taken.values()]).log()
    logs = torch.tensor(lengths).log()
    logs -= logs.mean()
    slope = float(logs @ times / logs.square().sum())
    case = BenchmarkCase(op="delta, token", T=lengths[-1])
    return [as_row(case, taken[str(lengths[-1])], slope=slope)]


def measure_rounding(tokens: int = 8192) -> list[dict[str, Any]]:
    """Compare gradients of 16-bit inputs with float64; ``v`` has mean 1."""
    rows = []
    for decay in DECAYS:
        for dtype in (torch.bfloat16, torch.float16):
            inputs = make(tokens, decay)
            inputs[2] = inputs[2] + 1
            d_out, found = torch.randn(1, 8, tokens, 64).to(dtype), []
            for kind in (torch.float64, dtype):
                leaves = [x.detach().to(dtype).to(kind).requires_grad_() for x in inputs]
                found.append(torch.autograd.grad(ours(*leaves), leaves, d_out.to(kind)))
            errors = [
                float((b.double() - a).norm() / a.norm()) for a, b in zip(*found, strict=True)
            ]
            name = str(dtype).removeprefix("torch.")
            rows.append({"op": f"delta, {decay}", "dtype": name, "T": tokens, "error": max(errors)})
    return rows


def main(
    out: Annotated[Path, typer.Option(help="Output file, JSON lines.")] = Path(
        "benchmarks/results/delta.jsonl"
    ),
    lengths: Annotated[str, typer.Option(help="Tokens, separated by commas.")] = "4096,16384",
    train_lengths: Annotated[str, typer.Option(help="The same for forward + backward.")] = "4096",
    threads: Annotated[int, typer.Option(help="Threads of torch.")] = 1,
    rounds: Annotated[int, typer.Option(help="Number of measurements of each call.")] = 5,
) -> None:
    """Measure, print and write JSON lines."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    rows = measure_step(rounds) + measure_rounding() + measure_slope(rounds)
    for mode, given in (("forward", lengths), ("train", train_lengths)):
        for tokens in given.split(","):
            rows += measure(int(tokens), mode, rounds)
    shown = ("op", "mode", "dtype", "T", "min_ms", "median_ms", "times_transformers", "times_sdpa")
    for row in rows:
        figures = {key: row[key] for key in (*shown, "rate", "slope", "error") if key in row}
        typer.echo(
            "  ".join(
                f"{k} {v:.4g}" if isinstance(v, float) else f"{v}" for k, v in figures.items()
            )
        )
    described = machine()
    write_lines(out, ({**row, "machine": described} for row in rows))
    typer.echo(f"{len(rows)} lines in {out}")


if __name__ == "__main__":
    typer.run(main)
