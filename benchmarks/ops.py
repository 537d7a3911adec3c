"""Time and peak memory of every op against SDPA and a plain matrix product, in one run.

    python benchmarks/ops.py                  # 1k to 16k tokens, one thread: half an hour
    python benchmarks/ops.py --quick          # 1k and 4k, forward only

At each length, the calls are timed in alternation, so that other load on the machine affects all of
them, and ratios are medians over the rounds. Slopes extend to 32k tokens, without SDPA.
``peers.py`` has public implementations of the same mechanisms, and ``goals.py`` the goals. To
measure another op, add it to ``OPS``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from delta_rule import delta, delta_step, write_strengths
from goals import LONGEST, SUBQUADRATIC, show
from matrix_products import MATMUL, measure_tiles
from peers import PEERS, measure_peer
from rich.console import Console
from rich.progress import Progress
from torch import Tensor
from windows import (
    features,
    flash,
    longformer,
    window_features,
    window_gla,
    window_hedgehog,
)

from attnzoo.contract.config import Geometry
from attnzoo.contract.masks import AttentionMask
from attnzoo.evaluation.timing import (
    BenchmarkCase,
    Run,
    as_row,
    machine,
    peak_bytes,
    time_together,
    write_lines,
)
from attnzoo.ops.block_sparse.api import block_sparse_attention
from attnzoo.ops.linear.api import linear_attention
from attnzoo.ops.linear.common import CHUNK_SIZE
from attnzoo.ops.linear.cpu.linear import KERNEL_CHUNK, LINEAR
from attnzoo.ops.linformer.api import linformer_attention, linformer_block_attention
from attnzoo.ops.lsh.api import lsh_attention
from attnzoo.registry import build_backend
from attnzoo.runtime import cpp

SLOPE_LENGTHS = (4096, 8192, 16384, LONGEST)
Inputs = tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class Op:
    """A call of an op with q, k, v and ``extras``; training computes gradients of all of them."""

    attend: Callable[..., Tensor]
    extras: Callable[[BenchmarkCase], Inputs] = lambda case: ()
    impl: str = "torch"
    flops: Callable[[BenchmarkCase], float] | None = None  # forward pass, matrix products only


def chunk_flops(case: BenchmarkCase, chunk_size: int | None = None) -> float:
    """Return the FLOPs of the chunk form's matrix products; masked scores are included."""
    if chunk_size is None:
        compiled = case.device == "cpu" and not cpp.unavailable_reason(LINEAR)
        chunk_size = KERNEL_CHUNK if compiled else CHUNK_SIZE
    inside, between = 2 * chunk_size * (case.D + case.E), 4 * case.D * case.E
    return float(case.B * case.H * case.T * (inside + between))


def linear(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None = None, **options: Any
) -> Tensor:
    """Call the chunk form, normalised by default."""
    options = {"normalize": True, "log_decay": log_decay} | options
    return linear_attention(q, k, v, **options).out


def sdpa(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = True) -> Tensor:
    """Call torch's own exact attention."""
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=grouped)


def per_token(case: BenchmarkCase) -> Inputs:
    """Return a scalar log decay per token."""
    return (-0.1 * torch.rand(case.B, case.Hkv, case.T),)


def per_channel(case: BenchmarkCase) -> Inputs:
    """Return a vector log decay per token, as strong as GLA's gates are."""
    return (-0.1 * torch.rand(case.B, case.Hkv, case.T, case.D),)


def per_head(case: BenchmarkCase) -> Inputs:
    """Return a constant log decay per head."""
    return (-0.1 * torch.rand(case.Hkv),)


def linformer(q: Tensor, k: Tensor, v: Tensor, *rows: Tensor) -> Tensor:
    """Run Linformer: keys and values of all tokens are projected to rows."""
    return linformer_attention(q, k, v, *rows, scale=q.shape[3] ** -0.5).out


def linformer_blocks(q: Tensor, k: Tensor, v: Tensor, *rows: Tensor) -> Tensor:
    """Run causal Linformer: attend to the rows of complete blocks, and to the current block.

    The cost is quadratic in the number of blocks.
    """
    return linformer_block_attention(q, k, v, *rows, scale=q.shape[3] ** -0.5).out


def rows_of(tokens: int | None, count: int) -> Callable[[BenchmarkCase], Inputs]:
    """Return a function that draws projections of ``tokens``, or of all, to ``count`` rows.

    The rows have the scale of keys. Larger rows would spread the scores until softmax weights
    underflow, and products of such weights take ten times as long.
    """

    def draw(case: BenchmarkCase) -> Inputs:
        shape = 1, tokens or case.T, count
        return tuple(torch.randn(shape) * shape[1] ** -0.5 for _ in range(2))

    return draw


@cache
def performer_layer(heads: int, key_heads: int, size: int, causal: bool) -> Any:
    """Return a Performer layer with 128 random features."""
    place = Geometry(num_heads=heads, num_key_heads=key_heads, head_dim=size, causal=causal)
    return build_backend("performer", {"num_features": 128}, place)


def performer(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    """Map to random features and run linear attention."""
    out: Tensor = performer_layer(q.shape[1], k.shape[1], q.shape[3], causal).to(q)(q, k, v).out
    return out


def reformer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Run LSH attention with four hash rounds and chunks of 64 keys."""
    mask = AttentionMask(causal=True)
    return lsh_attention(q, k, v, mask=mask, num_hashes=4, chunk_size=64).out


def block_sparse(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend to 13 blocks of 64 keys and a window: at most 963 keys."""
    options: dict[str, Any] = {"window": 64, "block_size": 64, "top_k": 13}
    return block_sparse_attention(q, k, v, mask=AttentionMask(causal=True), **options).out


# The delta rule without a decay, with one per token, and with one per channel
DELTA: dict[str, Callable[[BenchmarkCase], Inputs]] = {
    "deltanet": write_strengths,
    "gated deltanet": lambda case: write_strengths(case) + per_token(case),
    "kda": lambda case: write_strengths(case) + per_channel(case),
}

# "linear 64" and "linear 128" run in torch: larger chunks need more FLOPs, at a higher rate.
# retention decays by a constant per head, mamba2 by a scalar and gla by a vector per token.
OPS: dict[str, Op] = {
    "sdpa": Op(attend=sdpa),
    "linear": Op(attend=linear, flops=chunk_flops),
    "linear, elu+1": Op(attend=partial(linear, feature_map="elu+1"), flops=chunk_flops),
    "linear 64": Op(
        attend=lambda q, k, v: linear(q, k, v, chunk_size=64),
        flops=lambda case: chunk_flops(case, 64),
    ),
    "linear 128": Op(
        attend=lambda q, k, v: linear(q, k, v, chunk_size=128),
        flops=lambda case: chunk_flops(case, 128),
    ),
    "unnormalised": Op(attend=lambda q, k, v: linear(q, k, v, normalize=False), flops=chunk_flops),
    "bidirectional": Op(attend=lambda q, k, v: linear(q, k, v, causal=False)),
    "retention": Op(attend=linear, extras=per_head),
    "mamba2": Op(attend=linear, extras=per_token),
    "gla": Op(attend=linear, extras=per_channel),
    **{name: Op(attend=delta, extras=extras) for name, extras in DELTA.items()},
    **{
        f"{name}, torch": Op(attend=partial(delta, impl="torch"), extras=extras)
        for name, extras in DELTA.items()
    },
    "hedgehog, window 32": Op(attend=window_hedgehog),
    "128 features, window 32": Op(attend=window_features, extras=features),
    "gla, window 32": Op(attend=window_gla, extras=per_channel),
    "longformer": Op(attend=longformer),
    "flash": Op(attend=flash),
    "flash, window 256": Op(attend=partial(flash, window=(255, 0))),
    "linformer": Op(attend=linformer, extras=rows_of(None, 256)),
    "linformer, blocks": Op(attend=linformer_blocks, extras=rows_of(256, 32)),
    "performer": Op(attend=performer),
    "performer, bidirectional": Op(attend=partial(performer, causal=False)),
    "reformer": Op(attend=reformer),
    "block_sparse": Op(attend=block_sparse),
}


def make_inputs(case: BenchmarkCase, op: Op) -> list[Tensor]:
    """Return positive queries and keys, as feature maps produce, values, and the op's extras."""
    dtype, device = getattr(torch, case.dtype), case.device
    q = torch.rand(case.B, case.H, case.T, case.D)
    k = torch.rand(case.B, case.Hkv, case.T, case.D)
    v = torch.randn(case.B, case.Hkv, case.T, case.E)
    needs = case.mode == "train"
    inputs = (q, k, v, *op.extras(case))
    return [x.to(device, dtype).requires_grad_(needs) for x in inputs]


def make_run(case: BenchmarkCase, op: Op) -> tuple[Run, int]:
    """Return the call to measure, and the bytes of its inputs, results and gradients."""
    inputs = make_inputs(case, op)
    d_out = torch.randn(case.B, case.H, case.T, case.E).to(inputs[0])
    if case.mode == "train":

        def train() -> Any:
            out = op.attend(*inputs)
            return out, torch.autograd.grad(out, inputs, d_out)

        return train, 2 * (sum(x.nbytes for x in inputs) + d_out.nbytes)
    run: Run = torch.no_grad()(lambda: op.attend(*inputs))
    return run, sum(x.nbytes for x in inputs) + d_out.nbytes


def make_step(case: BenchmarkCase) -> tuple[Run, int]:
    """Return the call that decodes one token after T, and the bytes of its cache or state."""
    prompt = make_inputs(case, OPS[case.op])
    now = make_inputs(replace(case, T=1), OPS[case.op])
    if case.op == "sdpa":
        q, (_, k, v) = now[0], prompt
        return torch.no_grad()(lambda: sdpa(q, k, v, is_causal=False)), k.nbytes + v.nbytes
    options: dict[str, Any] = {"normalize": True, "return_state": True}
    if case.op in DELTA:
        return delta_step(prompt, now)
    log_decay = (*now, None)[3]
    state = linear_attention(*prompt[:3], log_decay=(*prompt, None)[3], **options).state
    assert state is not None

    def step() -> Any:
        return linear_attention(*now[:3], log_decay=log_decay, state=state, **options)

    return torch.no_grad()(step), sum(x.nbytes for x in state)


def measure_decode(length: int, base: BenchmarkCase, rounds: int) -> list[dict[str, Any]]:
    """Time one token after 256 and ``length`` tokens, and record the size of the state."""
    cases = [
        replace(base, op=op, impl=OPS[op].impl, mode="decode", T=tokens)
        for op in ("sdpa", "linear", "gla", "gated deltanet")
        for tokens in (256, length)
    ]
    made = {f"{case.op} {case.T}": make_step(case) for case in cases}
    taken = time_together({name: run for name, (run, _) in made.items()}, rounds=max(rounds, 9))
    rows = []
    for case in cases:
        name = f"{case.op} {case.T}"
        figures = {
            "speedup": taken[name].times_faster_than(taken[f"sdpa {case.T}"]),
            "after_256": 1 / taken[name].times_faster_than(taken[f"{case.op} 256"]),
            "kept_bytes": made[name][1],
        }
        rows.append(as_row(case, taken[name], **figures))
    return rows


def measure(base: BenchmarkCase, names: list[str], rounds: int) -> list[dict[str, Any]]:
    """Measure the named ops, SDPA and the matrix product in alternation."""
    cases = {name: replace(base, op=name, impl=OPS[name].impl) for name in names}
    made = {name: make_run(case, OPS[name]) for name, case in cases.items()}
    square = torch.randn(MATMUL, MATMUL, device=base.device).to(getattr(torch, base.dtype))
    runs: dict[str, Run] = {name: run for name, (run, _) in made.items()}
    taken = time_together({"matmul": lambda: square @ square, **runs}, rounds=rounds)
    rows = []
    for name, case in cases.items():
        run, own = made[name]
        peak = peak_bytes(run, case.device)
        results = own // 2 if case.mode == "train" else _out_bytes(case)
        figures: dict[str, Any] = {"peak_bytes": peak, "extra": max(0, peak - results) / own}
        figures["speedup"] = taken[name].times_faster_than(taken["sdpa"])
        flops = OPS[name].flops
        if flops is not None and case.mode == "forward":
            figures["gflops"] = flops(case) / taken[name].min_ms / 1e6
            product = 2 * MATMUL**3 / flops(case)
            figures["rate"] = taken[name].times_faster_than(taken["matmul"]) / product
        rows.append(as_row(case, taken[name], **figures))
    return rows


def _out_bytes(case: BenchmarkCase) -> int:
    return case.B * case.H * case.T * case.E * int(getattr(torch, case.dtype).itemsize)


def measure_slopes(base: BenchmarkCase, name: str, rounds: int) -> list[dict[str, Any]]:
    """Fit the slope of log time over log length, from the fastest rounds."""
    cases = {str(length): replace(base, op=name, T=length) for length in SLOPE_LENGTHS}
    runs = {length: make_run(case, OPS[name])[0] for length, case in cases.items()}
    taken = time_together(runs, rounds=rounds)
    times = torch.tensor([timing.min_ms for timing in taken.values()]).log()
    lengths = torch.tensor(SLOPE_LENGTHS).log()
    lengths -= lengths.mean()
    slope = float(lengths @ times / lengths.square().sum())  # 1 is linear, 2 quadratic
    last = str(LONGEST)
    return [as_row(cases[last], taken[last], slope=slope)]


def main(
    out: Annotated[Path, typer.Option(help="Output file, JSON lines.")] = Path(
        "benchmarks/results/ops.jsonl"
    ),
    lengths: Annotated[str, typer.Option(help="Tokens, separated by commas.")] = (
        "1024,2048,4096,8192,16384"
    ),
    heads: Annotated[int, typer.Option(help="Query heads.")] = 8,
    key_heads: Annotated[
        int | None, typer.Option(help="Key heads; default: as many as query heads.")
    ] = None,
    size: Annotated[int, typer.Option(help="Size of keys and values.")] = 64,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    threads: Annotated[int, typer.Option(help="Threads of torch.")] = 1,
    rounds: Annotated[int, typer.Option(help="Rounds per call; at most 3 from 16k tokens on.")] = 5,
    quick: Annotated[bool, typer.Option(help="1k and 4k, forward only, no decoding.")] = False,
    only: Annotated[str, typer.Option(help="Ops whose name contains this; no decoding.")] = "",
) -> None:
    """Measure every op at every length, print a table, write JSON lines."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    tokens = [1024, 4096] if quick else [int(length) for length in lengths.split(",")]
    modes = ("forward",) if quick else ("forward", "train")
    names = ["sdpa", *(name for name in OPS if name != "sdpa" and only in name)]
    base = BenchmarkCase(
        op="", H=heads, Hkv=key_heads or heads, D=size, E=size, dtype=dtype, device=device
    )
    rows = measure_tiles(base) if device == "cpu" and dtype == "float32" else []
    with Progress(transient=True) as progress:
        slopes = [] if quick else [name for name in SUBQUADRATIC if only in name]
        compared = device == "cpu" and dtype == "float32" and not quick
        peers = [name for name in PEERS if only in name] if compared else []
        steps = len(modes) * (len(tokens) + len(slopes) + len(peers))
        task = progress.add_task("measuring", total=steps)
        for name in peers:  # first: in a large heap, they would cause no page faults
            for mode in modes:
                progress.update(task, description=f"{mode}, {name}, and its peer")
                rows += measure_peer(name, replace(base, mode=mode), rounds)
                progress.advance(task)
        for mode in modes:
            for length in tokens:
                progress.update(task, description=f"{mode}, {length} tokens")
                count = rounds if length < 16384 else min(rounds, 3)
                rows += measure(replace(base, mode=mode, T=length), names, count)
                progress.advance(task)
            for name in slopes:
                progress.update(task, description=f"{mode}, slope of {name}")
                rows += measure_slopes(replace(base, mode=mode), name, rounds)
                progress.advance(task)
    if not (quick or only):
        rows += measure_decode(max(tokens), base, rounds)
    console = Console()
    console.width = max(console.width, 180)  # if the output is not a terminal
    show(rows, console)
    described = machine()
    write_lines(out, ({**row, "machine": described} for row in rows))
    typer.echo(f"{len(rows)} lines in {out}")


if __name__ == "__main__":
    typer.run(main)
