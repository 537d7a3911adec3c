"""Compile every Triton kernel ahead of time, without a GPU, and print the resources it needs.

    python -m tools.triton_configs.compile_aot                  # every shipped config, as a table
    python -m tools.triton_configs.compile_aot --quick --json   # head size 128, as JSON lines
    python -m tools.triton_configs.compile_aot --goals --arch 90    # sums of issue cycles

The launch code of the operator runs unchanged; each launch compiles its kernel for the named
architecture instead of running it. The compiled variants are therefore those that run on a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from attnzoo.errors import UnsupportedError
from attnzoo.ops.block_sparse.gather import SparseTensors
from attnzoo.ops.block_sparse.options import (
    BlockSparseState,
    SelectionOptions,
    SparseCall,
    SparseOptions,
)
from attnzoo.ops.block_sparse.selection import count_key_blocks
from attnzoo.ops.block_sparse.triton.run import attend_step, selection_launcher
from attnzoo.ops.block_sparse.triton.run import launcher as sparse_launcher
from attnzoo.ops.delta.triton.custom_op import DeltaLauncher
from attnzoo.ops.delta.triton.step import delta_triton_step
from attnzoo.ops.hybrid.triton.custom_op import hybrid_triton, hybrid_triton_backward
from attnzoo.ops.hybrid.triton.step import launch_hybrid_step
from attnzoo.ops.linear.triton import launch as linear_launch
from attnzoo.ops.linear.triton.configs import KERNELS, SHARED_BYTES
from attnzoo.ops.linear.triton.step import launch_step
from attnzoo.runtime.triton_interpreter import interpreted
from tools.triton_configs.machine_code import (
    loop_instructions,
    registers,
    transposed_products,
)

SCHEDULERS = 4  # per processor; each issues one instruction per cycle
LENGTH = 2048  # tokens: several splits, so that the kernels for splits are launched too
INDEX_HEADS, INDEX_SIZE = 4, 32  # of an indexer, the defaults of the backend
RECENT = 64  # recent keys, which the state of block-sparse decoding stores separately
KERNEL_NAMES = {  # names in the output, and in the config table
    "split_sums_kernel": "sums",
    "split_scan_kernel": "split_scan",
    "step_kernel": "step",
    "hybrid_step_kernel": "hybrid_step",
    "hybrid_store_kernel": "hybrid_store",
    "query_gradient_kernel": "dq",
    "window_kernel": "window",
    "window_query_gradient_kernel": "window_dq",
    "window_key_gradient_kernel": "window_dkv",
    "merge_kernel": "merge",
    "merge_backward_kernel": "merge_backward",
    "inverse_kernel": "inverse",
    "errors_kernel": "errors",
    "delta_step_kernel": "delta_step",
    "sink_gradient_kernel": "sink_dkv",
    "selection_gradient_kernel": "selected_dkv",
    "window_gradient_kernel": "sparse_dkv",
    "summary_kernel": "summary",
    "pool_kernel": "pool",
    "select_kernel": "select",
    "rank_kernel": "rank",
    "attend_step_kernel": "sparse_step",
    "add_parts_kernel": "add_parts",
}
# Kernels without a matrix product; inverse has none with decays per channel
NO_PRODUCTS = {
    *("split_scan", "step", "hybrid_step", "hybrid_store", "merge", "merge_backward"),
    *("inverse", "delta_step", "summary", "pool", "add_parts"),
}


class CompileCase(NamedTuple):
    """Sizes and options of one call that is compiled."""

    d: int = 128
    e: int = 128
    groups: int = 1
    decay: str = "none"
    normalize: bool = True
    feature_map: str = "elu+1"
    dtype: torch.dtype = torch.bfloat16
    varlen: bool = False  # sequences in one row
    has_state: bool = True  # whether states are given and returned
    padded: bool = False
    window: int = 0  # of the window hybrid; 0: linear attention alone
    delta: bool = False  # the delta rule: its own kernels alone
    sparse: SparseOptions | None = None  # of block-sparse attention
    score: str = "moments"  # of block-sparse attention
    coverage: float | None = None


class CompiledKernel(NamedTuple):
    """A compiled kernel, and its launch options."""

    name: str
    kernel: Any
    options: dict[str, Any]


@dataclass(frozen=True)
class KernelResources:
    """Resources that one compiled kernel needs."""

    capability: int
    kernel: str
    case: str
    warps: int
    stages: int
    chunk: int
    tile: int
    registers: int
    stack_bytes: int  # above 0 if registers are spilled
    shared_bytes: int
    tensor_core: str  # "wgmma", "mma" or ""
    tensor_core_instructions: int  # in the machine code, each counted once
    issue_cycles_per_token: float  # per token and head, for each of the schedulers
    transposed_products: int  # that are operands of other products


DECAYS = ("none", "scalar", "vector")
SPARSE = SparseOptions(True, 32, 4, 12, 8, 1)  # the defaults of the backend
LONG = SPARSE._replace(window=64, block_size=32)
QUICK = (
    *(CompileCase(decay=decay) for decay in DECAYS),
    *(CompileCase(decay=decay, delta=True) for decay in ("scalar", "vector")),
    CompileCase(sparse=SPARSE),
)
# The calls whose issue cycles docs/kernels.md lists
GOALS = (
    *(
        CompileCase(decay=decay, normalize=False, feature_map="identity")
        for decay in ("none", "scalar", "vector")
    ),
    CompileCase(),
    CompileCase(d=256, e=128, feature_map="identity"),  # features of hedgehog
)
CASES = (
    *QUICK,
    *(
        CompileCase(decay=decay, normalize=False, feature_map="identity")
        for decay in ("none", "scalar", "vector")
    ),
    *(
        CompileCase(d=size, e=size, decay=decay)
        for size in (16, 64, 100, 256)
        for decay in ("none", "scalar", "vector")
    ),
    *(CompileCase(d=64, e=128, groups=4, decay=decay, varlen=True) for decay in ("none", "vector")),
    CompileCase(d=128, e=128, groups=4),
    *(CompileCase(decay=decay, has_state=False) for decay in DECAYS),
    CompileCase(groups=4, decay="vector", varlen=True, window=64),
    *(CompileCase(d=size, e=size, window=64) for size in (64, 128, 256)),
    CompileCase(decay="scalar", window=64),
    CompileCase(dtype=torch.float32, window=64),
    *(
        CompileCase(d=size, e=size, decay=decay, delta=True)
        for size in (64, 256)
        for decay in DECAYS
    ),
    CompileCase(delta=True),
    *(CompileCase(decay=decay, delta=True, varlen=True) for decay in DECAYS),
    *(
        CompileCase(decay=decay, delta=True, dtype=dtype)
        for decay in DECAYS
        for dtype in (torch.float16, torch.float32)
    ),
    *(CompileCase(d=size, e=size, sparse=LONG) for size in (64, 128, 256)),
    CompileCase(groups=4, padded=True, sparse=SPARSE._replace(causal=False, block_size=12)),
    CompileCase(groups=4, sparse=LONG._replace(query_block=16)),
    CompileCase(sparse=LONG._replace(query_block=64, block_size=64)),
    *(
        CompileCase(d=size, e=size, dtype=dtype, sparse=SPARSE)
        for size in (64, 256)
        for dtype in (torch.float16, torch.float32)
    ),
    CompileCase(sparse=SPARSE, score="indexer"),
    CompileCase(sparse=SPARSE, score="bounds"),
    CompileCase(sparse=SPARSE, score="mean", groups=4, coverage=0.9),
    *(CompileCase(sparse=SPARSE._replace(top_k=top_k)) for top_k in (1, 64, 256)),
    CompileCase(d=256, e=256, dtype=torch.float32, sparse=SPARSE._replace(top_k=64)),
    CompileCase(dtype=torch.float32, sparse=SPARSE._replace(top_k=256)),
    CompileCase(feature_map="exp"),
    CompileCase(feature_map="relu"),
    *(
        CompileCase(d=size, e=size, decay=decay, dtype=torch.float16)
        for size in (64, 128, 256)
        for decay in ("none", "scalar", "vector")
    ),
    *(
        CompileCase(d=size, e=size, decay=decay, dtype=torch.float32)
        for size in (64, 128, 256)
        for decay in ("none", "scalar", "vector")
    ),
)


def kernel_name(function: str, options: dict[str, Any]) -> str:
    """Return the name in the config table of a launch of a kernel with some constants."""
    if function == "out_kernel":
        return "shared" if options["STATISTICS"] else "out"
    if function == "key_gradient_kernel":
        return {"keys": "dk", "values": "dv"}[options["OF"]]
    if function == "attend_kernel":
        return "sparse_dq" if options["GRADIENT"] else "sparse_out"
    return KERNEL_NAMES[function]


class _Driver:
    """A driver that reports a GPU of the given compute capability and runs nothing."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return int(self.target.arch)

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiling(
    capability: int, only: Container[str] | None = None
) -> Iterator[list[CompiledKernel]]:
    """Compile kernels instead of running them in this context, and yield a list of them.

    ``only`` restricts compilation to some kernels.
    """
    if interpreted():
        raise UnsupportedError(
            "kernels cannot be compiled, because TRITON_INTERPRET is set and they are interpreted; "
            "unset it and start again"
        )
    kernels: list[CompiledKernel] = []
    launch = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        name = kernel_name(self.__name__, options)
        if only is None or name in only:
            kernel = launch(self, *args, grid=grid, warmup=True, **options)
            kernels.append(CompiledKernel(name, kernel, options))

    with (
        mock.patch.object(triton.runtime.driver, "_active", _Driver(capability)),
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(linear_launch, "device_properties", return_value=(capability, 132)),
    ):
        yield kernels


def launch_case(case: CompileCase) -> None:
    """Launch the forward pass, the backward pass and a decoding step of a case."""
    heads, t = 1, LENGTH
    q = torch.empty(1, t, heads * case.groups, case.d, dtype=case.dtype).transpose(1, 2)
    k = torch.empty(1, t, heads, case.d, dtype=case.dtype).transpose(1, 2)
    v = torch.empty(1, t, heads, case.e, dtype=case.dtype).transpose(1, 2)
    shape = {"none": None, "scalar": (1, heads, t), "vector": (1, heads, t, case.d)}[case.decay]
    tensors = linear_launch.LinearTensors(
        q,
        k,
        v,
        None if shape is None else torch.empty(shape),
        torch.empty(1, heads, case.d, case.e),
        torch.empty(1, heads, case.d),
        torch.zeros(1, dtype=torch.long) if case.varlen else None,
        torch.full((1,), t) if case.varlen else None,
    )
    if case.sparse is not None:
        launch_sparse(case, case.sparse, tensors)
        return
    if case.window or case.delta:
        (launch_delta if case.delta else launch_hybrid)(case, tensors)
        return
    options = linear_launch.LinearOptions(case.feature_map, 1.0, 1.0, case.normalize, 1e-6)
    kv_pool, z_pool = tensors.kv, tensors.z
    assert kv_pool is not None
    assert z_pool is not None
    if not case.has_state:
        tensors = tensors._replace(kv=None, z=None)
        options = options._replace(return_state=False)
    out, kv, z = linear_launch.KernelLauncher(tensors, options).forward()
    launcher = linear_launch.KernelLauncher(tensors, options, needs_decay_grad=shape is not None)
    launcher.backward(torch.empty_like(out), kv, z, (kv, z))
    first_q, first_k, first_v = (x[:, :, :1] for x in tensors[:3])
    gates = None if tensors.log_decay is None else tensors.log_decay[:, :, :1]
    slots = torch.zeros(1, dtype=torch.long) if case.varlen else None
    launch_step(
        *(first_q, first_k, first_v, gates, kv_pool, z_pool, slots),
        *(case.feature_map, 1.0, 1.0, case.normalize, 1e-6),
    )


def launch_delta(case: CompileCase, x: linear_launch.LinearTensors) -> None:
    """Launch the kernels that only the delta rule has."""
    beta = torch.empty(x.k.shape[:3])
    launcher = DeltaLauncher(x.k, x.v, beta, x.log_decay, x.kv, x.starts, x.lengths)
    _, u = launcher.errors()
    launcher.transposed_errors(u)
    gates = None if x.log_decay is None else x.log_decay[:, :, :1]
    rows = [y[:, :, :1] for y in (*x[:3], beta)]
    delta_triton_step._init_fn(*rows, gates, x.kv, None, 1.0)


def launch_sparse(
    case: CompileCase, options: SparseOptions, x: linear_launch.LinearTensors
) -> None:
    """Launch block-sparse attention, forward and backward; all query heads share a selection."""
    lengths = torch.full((1,), LENGTH) if case.padded else None
    selection = SelectionOptions(case.score, case.coverage, True)
    call = SparseCall(*x[:3], lengths, lengths, None, None, 1.0, options, selection)
    if case.score == "indexer":
        blocks = count_key_blocks(LENGTH, options)
        index_q = torch.empty(1, INDEX_HEADS, LENGTH, INDEX_SIZE + 1)
        call = call._replace(index_q=index_q, summary=torch.empty(1, 1, blocks, INDEX_SIZE))
    batch, selected = len(x.k), selection_launcher(call).select()
    tensors = SparseTensors(*x[:3], selected, lengths, lengths, 1.0, options)
    launcher = sparse_launcher(tensors)
    out, lse = launcher.forward()
    launcher.backward(torch.empty_like(out), torch.empty_like(lse), lse)
    if options.causal:
        first = call._replace(q=x.q[:, :, :1], index_q=None)
        query = first.q
        if call.index_q is not None:
            first = first._replace(index_q=call.index_q[:, :, :1])
            query = call.index_q[:, :, :1]
        leader = query[:, :, 0] if options.query_block > 1 else query[:, :, 0, :0]
        summary = call.summary
        if summary is None:
            summary = selection_launcher(call).summarize()
        recent = x.k[:, :, :RECENT], x.v[:, :, :RECENT]
        length = torch.ones(batch, dtype=torch.long)
        state = BlockSparseState(x.k, x.v, *recent, length, summary, leader, x.k[:, :, :0])
        attend_step((first.q, first.index_q, *state[:-1]), options, first.selection, first.scale)


def launch_hybrid(case: CompileCase, x: linear_launch.LinearTensors) -> None:
    """Launch the window hybrid, forward, backward and one decoded token; features are q and k."""
    logit, log_decay = torch.empty(x.q.shape[:3]), x.log_decay
    pool_kv, pool_z = x.kv, x.z
    assert pool_kv is not None
    assert pool_z is not None
    if log_decay is not None:
        log_decay = log_decay[:, :, case.window :]
    no_first, options = (None, None, None), (case.window, 1.0, True, True, 1e-30)
    before: tuple[torch.Tensor | None, ...] = pool_kv, pool_z
    last = torch.empty_like(pool_kv), torch.empty_like(pool_z)
    places: tuple[torch.Tensor | None, ...] = (None, None, None)
    if x.starts is not None and x.lengths is not None:  # sequences have no state
        ids = torch.zeros(x.q.shape[0], x.q.shape[2], dtype=torch.int32)
        before, places = (None, None), (ids, x.starts, x.lengths - case.window)
    out, _, _, *saved = hybrid_triton._init_fn(
        *x[:3], *x[:2], logit, log_decay, *before, *places, None, *no_first, *options, True
    )
    hybrid_triton_backward._init_fn(
        torch.empty_like(out), *last, *last, *saved, *x[:3], *x[:2], log_decay, *before, *places,
        *no_first, *options, True, log_decay is not None,
    )  # fmt: skip
    q, k, v = (y[:, :, :1] for y in x[:3])
    gates = None if x.log_decay is None else x.log_decay[:, :, :1]
    size = pool_z.shape[2]
    rows = (case.window, size), (case.window, case.e), (case.window, size)
    window_k, window_v, window_features = (
        pool_z.new_empty(*pool_z.shape[:2], *sizes) for sizes in rows
    )
    kv = pool_kv.new_empty(*pool_z.shape, case.e + 1)
    slots = None if x.starts is None else torch.zeros(1, dtype=torch.long)
    launch_hybrid_step(
        q, k, v, q, k, gates, logit[:, :, :1, None], slots,
        window_k.to(case.dtype), window_v, window_features, kv, pool_z,
        torch.zeros(1, dtype=torch.long), 1.0, True, True, 1e-30,
    )  # fmt: skip


def kernel_resources(case: str, compiled: CompiledKernel, count: bool = True) -> KernelResources:
    """Return the resources of a compiled kernel, from its machine code.

    ``count``: whether to disassemble it and count its instructions.
    """
    name, kernel, options = compiled
    register_count, stack_bytes = registers(kernel.asm["cubin"])
    counts = {
        "wgmma": kernel.asm["ptx"].count("wgmma.mma_async"),
        "mma": kernel.asm["ptx"].count("mma.sync"),
    }
    kind = next((kind for kind, count in counts.items() if count), "")
    warps, issue_cycles_per_token = kernel.metadata.num_warps, 0.0
    if count and "C" in options:
        tokens = options["C"] * (options["G"] if name in ("out", "shared", "dq") else 1)
        issued = loop_instructions(kernel.asm["cubin"]) * warps / SCHEDULERS
        issue_cycles_per_token = issued * options.get("TILES", 1) / tokens
    return KernelResources(
        kernel.metadata.target.arch,
        name,
        case,
        warps,
        kernel.metadata.num_stages,
        options.get("C", 0),
        options.get("BU", 0),
        register_count,
        stack_bytes,
        kernel.metadata.shared,
        kind,
        counts.get(kind, 0),
        round(issue_cycles_per_token, 1),
        len(transposed_products(kernel.asm["ttgir"])),
    )


def compile_cases(
    cases: tuple[CompileCase, ...], capability: int, counted: Container[str] | None = None
) -> Iterator[KernelResources]:
    """Compile all kernels of some cases for an architecture; yields each variant once.

    ``counted`` restricts the counting of instructions, which disassembles kernels, to some.
    """
    seen = set()
    for case in cases:
        with compiling(capability) as found:
            launch_case(case)
        default = CompileCase()._asdict()
        changed = {k: v for k, v in case._asdict().items() if v != default[k]}
        label = " ".join(f"{k}={str(v).removeprefix('torch.')}" for k, v in changed.items())
        for compiled in found:
            if compiled.kernel.hash not in seen:
                seen.add(compiled.kernel.hash)
                count = counted is None or compiled.name in counted
                yield kernel_resources(label or "plain", compiled, count)


def limit_violations(row: KernelResources) -> list[str]:
    """Return the limits that a kernel exceeds, and the errors in its matrix products."""
    violations = []
    if row.shared_bytes > SHARED_BYTES[row.capability]:
        violations.append(
            f"{row.shared_bytes} bytes of shared memory ({SHARED_BYTES[row.capability]})"
        )
    if row.kernel not in NO_PRODUCTS and not row.tensor_core:
        violations.append("no tensor-core instruction")
    if row.transposed_products:
        violations.append(f"{row.transposed_products} products are transposed for other products")
    return violations


def main() -> int:
    """Print the resources of each kernel; return 1 if one violates a limit or is not compiled."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="head size 128 in bfloat16 only")
    parser.add_argument(
        "--goals", action="store_true", help="cases of docs/kernels.md only, with their sums"
    )
    parser.add_argument("--json", action="store_true", help="JSON lines instead of a table")
    parser.add_argument("--count", nargs="*", help="kernels whose instructions are counted")
    parser.add_argument("--arch", type=int, nargs="*", default=[80, 90], choices=[80, 90])
    args = parser.parse_args()
    failed = 0
    totals: defaultdict[str, float] = defaultdict(float)
    missing = set(KERNELS)
    cases = GOALS if args.goals else QUICK if args.quick else CASES
    for capability in args.arch:
        for row in compile_cases(cases, capability, args.count):
            missing.discard(row.kernel)
            if row.kernel in ("out", "shared", "dq", "dk", "dv"):
                totals[f"sm_{capability} {row.case}"] += row.issue_cycles_per_token
            violations = limit_violations(row)
            failed += bool(violations)
            if args.json:
                print(json.dumps({**asdict(row), "violations": violations}), flush=True)
            else:
                print(
                    f"sm_{row.capability} {row.kernel:10} {row.case:45} chunk {row.chunk:2} "
                    f"tile {row.tile:3} warps {row.warps} stages {row.stages} registers "
                    f"{row.registers:3} stack {row.stack_bytes:4} shared {row.shared_bytes:6} "
                    f"{row.tensor_core:5} {row.tensor_core_instructions:4} issue cycles per token "
                    f"{row.issue_cycles_per_token:6.1f} {'; '.join(violations)}",
                    flush=True,
                )
    if args.goals and not args.json:
        for case, total in totals.items():
            print(f"{case}: {total:.0f} issue cycles per token, forward and backward")
    if missing and not args.goals:
        print(f"not compiled by any case: {', '.join(sorted(missing))}", file=sys.stderr)
        return 1
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
