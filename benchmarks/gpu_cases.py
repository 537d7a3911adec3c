"""Workloads, peers, goals and published times of ``gpu.py``.

Letters: B batch, H heads, Hkv key heads, T tokens, D key and value size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One call to time, with its peers."""

    name: str
    B: int
    H: int
    T: int
    D: int
    Hkv: int = 0  # 0 means H
    decay: str = "none"  # or "scalar", "vector"
    normalize: bool = False
    feature_map: str = "identity"
    train: bool = False  # forward and backward
    decode: bool = False  # one token
    mechanism: str = "linear"  # or one of MECHANISMS
    window: int = 0  # of "hybrid" and "window"
    sparse: tuple[tuple[str, Any], ...] = ()  # options of "block_sparse"
    peers: tuple[str, ...] = ("fla",)

    @property
    def family(self) -> str:
        """The group of workloads that one process measures."""
        if self.mechanism != "linear":
            return self.mechanism
        return "decode" if self.decode else self.decay

    @property
    def key_heads(self) -> int:
        """Hkv."""
        return self.Hkv or self.H

    def input_bytes(self) -> int:
        """Return the size of the inputs: bfloat16, and float32 for the decay."""
        tokens = self.B * self.T
        gates = {"none": 0, "scalar": 4, "vector": 4 * self.D}[self.decay]
        return tokens * (2 * self.D * (self.H + 2 * self.key_heads) + gates * self.key_heads)

    def minimum_bytes(self) -> int:
        """Return the bytes that a call must read and write, each tensor once per pass."""
        if self.decode and self.window:  # float32 sums and values, 16-bit features and keys
            sums = 2 * 4 * 2 * self.D * (self.D + 2)
            rows = self.window * self.D * (2 + 4 + 2 * 2)
            return self.B * self.key_heads * (sums + rows)
        if self.decode:
            return 2 * 4 * self.B * self.key_heads * self.D * (self.D + 1)
        out = 2 * self.B * self.T * self.D * self.H
        forward = self.input_bytes() + out
        return forward if not self.train else 2 * forward + out


# One selection per query and head, as in the preset "long", or per 64 queries and key head
SPARSE_OPTIONS = {
    "queries": (("block_size", 32), ("window", 64)),
    "query blocks": (
        ("block_size", 64),
        ("window", 64),
        ("query_block", 64),
        ("per_key_head", True),
    ),
}
SHAPES = {
    "B4 T4096 H64 D128": {"B": 4, "T": 4096, "H": 64, "D": 128},
    "B2 T16384 H16 D128": {"B": 2, "T": 16384, "H": 16, "D": 128},
    "B1 T8192 H96 D128": {"B": 1, "T": 8192, "H": 96, "D": 128},
    "B8 T1024 H8 D64": {"B": 8, "T": 1024, "H": 8, "D": 64},
}


def _cases() -> Iterable[Workload]:
    for decay in ("none", "scalar", "vector"):
        for name, shape in SHAPES.items():
            for train in (False, True):
                kind = "train" if train else "forward"
                yield Workload(name=f"{decay} {kind} {name}", decay=decay, train=train, **shape)
    grouped = {"B": 4, "T": 4096, "H": 32, "Hkv": 8, "D": 128, "feature_map": "elu+1"}
    yield Workload(name="normalized grouped", normalize=True, train=True, **grouped)  # type: ignore[arg-type]
    for decay in ("none", "vector"):
        for heads in (8, 16, 32):
            name = f"{decay} few heads {heads}"
            yield Workload(name=name, decay=decay, B=1, H=heads, T=16384, D=128, train=True)
        for tokens in (1024, 2048, 4096, 8192):
            name = f"{decay} against softmax {tokens}"
            peers = ("sdpa", "xformers") if decay == "none" else ("sdpa",)
            yield Workload(
                name=name, decay=decay, B=4, H=16, T=tokens, D=128, train=True, peers=peers
            )
    for tokens in (1024, 4096, 8192, 16384):
        for mechanism, window in (("hybrid", 64), ("window", 512)):
            name = f"{mechanism} against softmax {tokens}"
            shape = {"B": 4, "H": 16, "T": tokens, "D": 128, "window": window}
            yield Workload(name=name, mechanism=mechanism, train=True, peers=("sdpa",), **shape)  # type: ignore[arg-type]
    step = {"B": 64, "H": 32, "Hkv": 8, "T": 1, "D": 128, "decode": True}
    yield Workload(name="hybrid decode", mechanism="hybrid", window=64, peers=(), **step)  # type: ignore[arg-type]
    for mechanism, decay in (("mlstm", "scalar"), ("rwkv6", "vector")):
        name = f"{mechanism} against softmax 4096"
        shape = {"B": 4, "H": 16, "T": 4096, "D": 128, "decay": decay, "mechanism": mechanism}
        yield Workload(name=name, train=True, peers=("sdpa",), **shape)  # type: ignore[arg-type]
    for tokens in (1024, 4096, 16384):
        for decay in ("scalar", "vector"):
            name = f"delta {decay} against softmax {tokens}"
            shape = {"B": 4, "H": 16, "T": tokens, "D": 128, "decay": decay}
            peers = ("fla", "sdpa")
            yield Workload(name=name, mechanism="delta", train=True, peers=peers, **shape)  # type: ignore[arg-type]
    for tokens in (1024, 4096, 16384):
        for name, options in SPARSE_OPTIONS.items():
            shape = {"B": 1, "H": 32, "Hkv": 8, "T": tokens, "D": 128, "sparse": options}
            name = f"block_sparse {name} against softmax {tokens}"
            yield Workload(
                name=name, mechanism="block_sparse", train=True, peers=("sdpa",), **shape
            )  # type: ignore[arg-type]
    yield Workload(
        name="decode", B=64, H=32, T=1, D=128, decode=True, normalize=True, feature_map="elu+1"
    )


# Mechanisms other than linear attention. The last two have no group "accuracy"; only their checks
# compare with float64: block_sparse needs the same selection, and window runs torch's varlen kernel
MECHANISMS = ("hybrid", "mlstm", "rwkv6", "delta", "block_sparse", "window")
VARLEN_SIZES = ("64", "128", "256")  # head sizes that are checked

CASES = tuple(_cases())
TINY = tuple(
    workload
    for workload in CASES
    if workload.name.endswith(("B8 T1024 H8 D64", "grouped", "heads 8", "softmax 1024", "decode"))
    or workload.mechanism in ("mlstm", "rwkv6")
    if not workload.name.startswith("block_sparse queries")
)


def shrink(workload: Workload) -> Workload:
    """Return a small version of a workload for the interpreter."""
    heads = 2 if workload.Hkv else 1
    return replace(
        workload,
        B=1,
        H=heads,
        Hkv=1 if workload.Hkv else 0,
        T=min(workload.T, 33),
        D=16,
        window=min(workload.window, 8),
    )


def accuracy_cases(decay: str, small: bool) -> Iterable[tuple[Workload, float, float]]:
    """Yield workloads to compare with float64, the mean of the values, and the tolerance.

    ``decay`` may also be one of ``MECHANISMS``.
    """
    if decay in MECHANISMS:
        for workload in CASES:
            if workload.family == decay and workload.name.endswith("softmax 4096"):
                name = f"{workload.name.partition(' against')[0]}, mean 1"
                made = replace(workload, name=name, B=1, H=2, T=2048)
                yield shrink(made) if small else made, 1.0, 1e-2
        return
    for mean in (0.0, 1.0):
        workload = Workload(
            name=f"{decay} normalized, mean {mean:.0f}", decay=decay, normalize=True,
            feature_map="elu+1", B=1, H=2, T=8192, D=128, train=True,
        )  # fmt: skip
        # With few terms, rounding errors average out less
        yield (shrink(workload), mean, 1e-2) if small else (workload, mean, 5e-3)


FAMILIES = ("none", "scalar", "vector", "decode")  # of linear-attention workloads
DECAYS = ("none", "scalar", "vector")
KINDS = ("bare", "mapped", "any", "wide")  # of calls, as in the table of configs
HYBRID_KINDS = ("plain", "learned", "state", "any", "wide")  # of calls of the window hybrid
DELTA_KINDS = ("plain", "any", "wide")  # of calls of the delta rule
SPARSE_KINDS = ("plain", "shared", "any", "wide")  # of calls of block-sparse attention
TOOLS = ("memcheck", "racecheck")  # of compute-sanitizer
# Configs (chunk, warps, stages, tile) to compare with the shipped table; one for all kernels
CONFIGS = (
    (64, 4, 2, 64),
    (64, 8, 3, 128),
    (64, 8, 3, 64),
    (64, 8, 2, 64),
    (32, 8, 2, 64),
    (32, 4, 2, 64),
)
PARALLEL = 8  # concurrent processes where nothing is timed


def workloads(family: str, tiny: bool) -> list[Workload]:
    """Return the workloads of a family."""
    cases = [shrink(w) for w in TINY] if tiny else CASES
    return [w for w in cases if w.family == family]


def groups_of(stage: int, *, tiny: bool, second: bool) -> dict[str, int]:
    """Return the groups of a stage, and the number of processes that may run in parallel.

    Args:
        stage: 1 to 5.
        tiny: Fewer groups, to test the script.
        second: Whether there is a second assembler to check.
    """
    every = (KINDS, HYBRID_KINDS, DELTA_KINDS, SPARSE_KINDS)
    kinds, hybrid_kinds, delta_kinds, sparse_kinds = (x[:1] if tiny else x for x in every)
    if stage == 1:
        checks = [f"check {decay} {kind}" for decay in DECAYS for kind in kinds]
        checks += [f"hybrid {decay} {kind}" for decay in DECAYS for kind in hybrid_kinds]
        checks += [f"delta {decay} {kind}" for decay in DECAYS for kind in delta_kinds]
        checks += [f"block_sparse none {kind}" for kind in sparse_kinds]
        checks += [f"varlen {size}" for size in VARLEN_SIZES[: 1 if tiny else None]]
        names = checks + ([f"{name} second ptxas" for name in checks] if second else [])
        names += [f"sanitizer {tool} {decay}" for tool in TOOLS for decay in DECAYS]
        names += [f"sanitizer {tool} vector hybrid" for tool in TOOLS]
        names += [f"warm fla {family}" for family in (*FAMILIES, "delta")]
        names += [f"compile configs {decay}" for decay in DECAYS]
        return {"machine": 1, "copy": 1} | dict.fromkeys(names, PARALLEL)
    if stage == 2:
        names = [f"time attnzoo {family}" for family in (*FAMILIES, *MECHANISMS)]
        return dict.fromkeys([*names, *(f"time configs {decay}" for decay in DECAYS)], 1)
    if stage == 3:
        names = [f"time fla {family}" for family in (*FAMILIES, "delta")]
        names += [f"time softmax {family}" for family in ("none", "vector", *MECHANISMS)]
        checked = (*DECAYS, *MECHANISMS[:-2])
        return dict.fromkeys([*names, *(f"accuracy {family}" for family in checked)], 1)
    if stage == 4:
        return {"profile none": 1, "profile vector": 1}
    return dict.fromkeys(["again", "llama", "compare", "tune"], 1)


# Milliseconds of fla on an H100, bfloat16, from pytorch/helion examples/linear/BENCHMARKS.md
_FLA = {
    "none": ((0.956, 5.92), (0.620, 3.34), (0.731, 4.36), (0.168, 0.78)),
    "scalar": ((1.017, 6.72), (0.546, 3.67), (0.804, 5.70), (0.247, 1.31)),
    "vector": ((3.20, 15.07), (1.84, 8.09), (2.42, 11.13), (0.374, 1.37)),
}
PUBLISHED: Mapping[str, Mapping[str, float]] = {
    f"{decay} {kind} {shape}": {"fla, published": times[i]}
    for decay, column in _FLA.items()
    for shape, times in zip(SHAPES, column, strict=True)
    for i, kind in enumerate(("forward", "train"))
}


@dataclass(frozen=True)
class Goal:
    """A target: a speed-up over a peer, or a bound on a metric or its ratio to the peer's."""

    name: str
    target: float
    workload: str
    peer: str = "fla"
    metric: str = ""  # compare this field of the rows instead of times
    comparison: str = ">="

    def measured(self, rows: list[dict[str, Any]]) -> float | None:
        """Return the measured value, or ``None`` if it was not measured.

        Times are those of CUDA graphs where both were captured, else of eager calls.
        """
        found = {row["implementation"]: row for row in rows if row["workload"] == self.workload}
        ours, peer = found.get("attnzoo", {}), found.get(self.peer, {})
        if self.metric == "copy_bandwidth_fraction":
            return ours.get(self.metric)
        if self.metric:
            return _ratio(ours, peer, self.metric)
        graph = _ratio(peer, ours, "graph_ms")
        return _ratio(peer, ours, "eager_ms") if graph is None else graph


def _ratio(a: Mapping[str, Any], b: Mapping[str, Any], field: str) -> float | None:
    x, y = a.get(field), b.get(field)
    return x / y if x is not None and y else None


GOALS = (
    *(Goal(f"linear, forward, {s}", 1.8, f"none forward {s}") for s in SHAPES),
    *(Goal(f"linear, forward and backward, {s}", 1.8, f"none train {s}") for s in SHAPES),
    Goal("linear, normalised, 32 heads on 8", 3.0, "normalized grouped"),
    *(Goal(f"scalar decay, {s}", 1.8, f"scalar train {s}") for s in SHAPES),
    *(Goal(f"GLA, {s}", 2.0, f"vector train {s}") for s in SHAPES),
    *(Goal(f"linear, {n} heads at 16k", 3.0, f"none few heads {n}") for n in (8, 16, 32)),
    *(Goal(f"GLA, {n} heads at 16k", 3.0, f"vector few heads {n}") for n in (8, 16, 32)),
    Goal("linear against softmax, T 2048", 1.0, "none against softmax 2048", "sdpa"),
    Goal("GLA against softmax, T 4096", 1.0, "vector against softmax 4096", "sdpa"),
    Goal("hybrid, window 64, against softmax, T 8192", 1.0, "hybrid against softmax 8192", "sdpa"),
    Goal(
        "GLA, peak memory over fla's",
        0.5,
        "vector train B4 T4096 H64 D128",
        "fla",
        "peak_bytes",
        "<=",
    ),
    Goal(
        "linear, forward, of copy bandwidth",
        0.6,
        "none forward B4 T4096 H64 D128",
        metric="copy_bandwidth_fraction",
    ),
    Goal("decode, of copy bandwidth", 0.8, "decode", metric="copy_bandwidth_fraction"),
)
