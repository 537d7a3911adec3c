"""What ``gpu.py`` measures, and what is to be reached: shapes, peers, goals, published times.

Letters: B batch, H heads, Hkv key heads, T tokens, D key and value size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Work:
    """One thing to do, by ours and by others."""

    name: str
    B: int
    H: int
    T: int
    D: int
    Hkv: int = 0  # 0: as many as H
    decay: str = "none"  # or "scalar", "vector"
    normalize: bool = False
    feature_map: str = "identity"
    train: bool = False  # forward and backward
    decode: bool = False  # one token
    peers: tuple[str, ...] = ("fla",)

    @property
    def key_heads(self) -> int:
        """Hkv."""
        return self.Hkv or self.H

    def input_bytes(self) -> int:
        """Count what the inputs hold, in bfloat16 and, the decay, in float32."""
        tokens = self.B * self.T
        gates = {"none": 0, "scalar": 4, "vector": 4 * self.D}[self.decay]
        return tokens * (2 * self.D * (self.H + 2 * self.key_heads) + gates * self.key_heads)

    def least_bytes(self) -> int:
        """Count what must pass through memory: each input and result once; training, as swept."""
        if self.decode:
            return 2 * 4 * self.B * self.key_heads * self.D * (self.D + 1)
        out = 2 * self.B * self.T * self.D * self.H
        forward = self.input_bytes() + out
        return forward if not self.train else 2 * forward + out


SHAPES = {
    "B4 T4096 H64 D128": {"B": 4, "T": 4096, "H": 64, "D": 128},
    "B2 T16384 H16 D128": {"B": 2, "T": 16384, "H": 16, "D": 128},
    "B1 T8192 H96 D128": {"B": 1, "T": 8192, "H": 96, "D": 128},
    "B8 T1024 H8 D64": {"B": 8, "T": 1024, "H": 8, "D": 64},
}


def _cases() -> Iterable[Work]:
    for decay in ("none", "scalar", "vector"):
        for name, shape in SHAPES.items():
            for train in (False, True):
                kind = "train" if train else "forward"
                yield Work(name=f"{decay} {kind} {name}", decay=decay, train=train, **shape)
    grouped = {"B": 4, "T": 4096, "H": 32, "Hkv": 8, "D": 128, "feature_map": "elu+1"}
    yield Work(name="normalized grouped", normalize=True, train=True, **grouped)  # type: ignore[arg-type]
    for decay in ("none", "vector"):
        for heads in (8, 16, 32):
            name = f"{decay} few heads {heads}"
            yield Work(name=name, decay=decay, B=1, H=heads, T=16384, D=128, train=True)
        for tokens in (1024, 2048, 4096, 8192):
            name = f"{decay} against softmax {tokens}"
            peers = ("sdpa", "xformers") if decay == "none" else ("sdpa",)
            yield Work(name=name, decay=decay, B=4, H=16, T=tokens, D=128, train=True, peers=peers)
    yield Work(
        name="decode", B=64, H=32, T=1, D=128, decode=True, normalize=True, feature_map="elu+1"
    )


CASES = tuple(_cases())
TINY = tuple(
    work
    for work in CASES
    if work.name.endswith(("B8 T1024 H8 D64", "grouped", "heads 8", "softmax 1024", "decode"))
)


def tiny(work: Work) -> Work:
    """Shrink a case until an interpreter gets through it."""
    heads = 2 if work.Hkv else 1
    return replace(work, B=1, H=heads, Hkv=1 if work.Hkv else 0, T=min(work.T, 33), D=16)


def accuracy_cases(small: bool) -> Iterable[tuple[Work, float, float]]:
    """Yield what to compare with float64, the mean of the values, and the largest error."""
    for decay in ("none", "scalar", "vector"):
        for mean in (0.0, 1.0):
            work = Work(
                name=f"{decay} normalized", decay=decay, normalize=True, feature_map="elu+1",
                B=1, H=2, T=8192, D=128, train=True,
            )  # fmt: skip
            # few terms average less of the rounding out
            yield (tiny(work), mean, 1e-2) if small else (work, mean, 5e-3)


# milliseconds on an H100, bfloat16: pytorch/helion, examples/linear/BENCHMARKS.md, fla's columns
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
    """A number to reach: how many times faster than a peer, or a share of something."""

    what: str
    wanted: float
    work: str
    peer: str = "fla"
    field: str = (
        ""  # of the row of ours, instead of a ratio of times; over the peer's if it has one
    )
    sign: str = ">="

    def measured(
        self, times: Mapping[str, Mapping[str, float]], rows: list[dict[str, Any]]
    ) -> float | None:
        """Return what was measured, if it was."""
        if not self.field:
            found = times.get(self.work, {})
            ours, theirs = found.get("ours"), found.get(self.peer)
            return None if ours is None or theirs is None else theirs / ours
        values = {
            row["by"]: row.get(self.field)
            for row in rows
            if row.get("work") == self.work and row["kind"] == "time"
        }
        ours, theirs = values.get("ours"), values.get(self.peer)
        if self.field == "of_copy_bandwidth":
            return ours
        return None if ours is None or theirs is None else ours / theirs


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
        field="of_copy_bandwidth",
    ),
    Goal("decode, of copy bandwidth", 0.8, "decode", field="of_copy_bandwidth"),
)
