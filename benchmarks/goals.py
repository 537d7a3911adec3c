"""Goals of ``ops.py``, and the table that compares measurements with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

LONGEST = 32768  # end of the slopes; too long for quadratic ops
LINEAR = ("linear", "unnormalised", "bidirectional", "retention", "mamba2", "gla")
OTHERS = ("longformer", "linformer", "performer", "performer, bidirectional")
DELTA = ("deltanet", "gated deltanet", "kda")
SUBQUADRATIC = (*LINEAR, *DELTA, *OTHERS, "reformer")


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A bound for a figure of one op at one length."""

    op: str
    mode: str
    T: int
    figure: str  # key in a row: "speedup" over SDPA, "over_peer", "slope" from 4k on, and so on
    bound: float
    at_most: bool = False

    def met(self, value: float) -> bool:
        """Return whether a value satisfies the bound."""
        return value <= self.bound if self.at_most else value >= self.bound

    def __str__(self) -> str:
        """Return the bound as the table prints it."""
        return f"{'<=' if self.at_most else '>='} {self.bound:g}"


GOALS = [
    Goal(op="linear", mode="forward", T=1024, figure="speedup", bound=3),
    Goal(op="linear", mode="forward", T=16384, figure="speedup", bound=35),
    Goal(op="linear", mode="forward", T=16384, figure="rate", bound=0.7),
    Goal(op="linear 128", mode="forward", T=16384, figure="rate", bound=0.7),
    Goal(op="linear", mode="train", T=16384, figure="speedup", bound=30),
    Goal(op="linear", mode="train", T=16384, figure="extra", bound=0.25, at_most=True),
    Goal(op="gla", mode="forward", T=1024, figure="speedup", bound=1),
    Goal(op="gla", mode="forward", T=2048, figure="speedup", bound=1),
    Goal(op="gla", mode="forward", T=4096, figure="speedup", bound=1),
    Goal(op="gla", mode="forward", T=16384, figure="speedup", bound=10),
    Goal(op="128 features, window 32", mode="forward", T=4096, figure="speedup", bound=6),
    Goal(op="128 features, window 32", mode="forward", T=16384, figure="speedup", bound=24),
    Goal(op="gla, window 32", mode="train", T=16384, figure="speedup", bound=15),
    Goal(op="longformer", mode="forward", T=16384, figure="speedup", bound=14),
    Goal(op="longformer", mode="train", T=16384, figure="speedup", bound=12),
    Goal(op="block_sparse", mode="forward", T=4096, figure="speedup", bound=2),
    Goal(op="block_sparse", mode="forward", T=16384, figure="speedup", bound=8),
    Goal(op="block_sparse", mode="train", T=4096, figure="speedup", bound=2),
    Goal(op="block_sparse", mode="train", T=16384, figure="speedup", bound=7),
    Goal(op="linear", mode="decode", T=16384, figure="after_256", bound=1.2, at_most=True),
]
GOALS += [
    Goal(op=op, mode="forward", T=length, figure="speedup", bound=bound)
    for op, bounds in (("deltanet", (6, 22)), ("gated deltanet", (6, 22)), ("kda", (4, 16)))
    for length, bound in zip((4096, 16384), bounds, strict=True)
]
GOALS += [
    Goal(op=op, mode=mode, T=length, figure="speedup", bound=1)
    for op in (*OTHERS, "reformer")
    for mode in ("forward", "train")
    for length in (4096, 8192, 16384)
]
GOALS += [
    Goal(
        op=op,
        mode=mode,
        T=LONGEST,
        figure="slope",
        bound=1.25 if op == "reformer" else 1.05 if op in DELTA else 1.1,
        at_most=True,
    )
    for op in SUBQUADRATIC
    for mode in ("forward", "train")
]
GOALS += [
    Goal(op=op, mode=mode, T=length, figure="over_peer", bound=bound)
    for op, length, bound in (
        ("longformer, with projections", 4096, 4.0),
        ("linformer, with projections", 4096, 1.0),
        ("reformer, with projections", 8192, 4.0),
        ("performer, causal", 8192, 20.0),
        ("performer, all keys", 8192, 1.5),
    )
    for mode in ("forward", "train")
]
GOALS += [
    Goal(op=f"delta rule, {length}", mode=mode, T=length, figure="over_peer", bound=bound)
    for length in (4096, 16384)
    for mode, bound in (("forward", 6), ("train", 4))
]

COLUMNS = {  # column header: the figure and its format
    "x SDPA": ("speedup", "{:.1f}"),
    "x peer": ("over_peer", "{:.1f}"),
    "alone": ("over_peer_alone", "{:.1f}"),  # without the projections that both compute
    "slope": ("slope", "{:.2f}"),
    "GFLOP/s": ("gflops", "{:.0f}"),
    "of matmul": ("rate", "{:.0%}"),
    "extra memory": ("extra", "{:.1%}"),
    "kept": ("kept_bytes", "{:,} B"),
}


def show(rows: list[dict[str, Any]], console: Console) -> None:
    """Print a table of the measurements and their goals."""
    table = Table(title=_title(rows[-1]))
    for column in ("op", "mode", "T"):
        table.add_column(column, justify="right" if column == "T" else "left")
    for column in ("ms", *COLUMNS, "goal"):
        table.add_column(column, justify="right")
    for row in rows:
        cells = [row["op"], row["mode"], str(row["T"]), f"{row['median_ms']:.3g}"]
        for figure, form in COLUMNS.values():
            cells.append(form.format(row[figure]) if row.get(figure) is not None else "")
        table.add_row(*cells, _verdicts(row))
    console.print(table)


def _title(row: dict[str, Any]) -> str:
    return f"{row['dtype']}, batch {row['B']}, {row['H']} heads, d={row['D']}, on {row['device']}"


def _verdicts(row: dict[str, Any]) -> str:
    """Return the goals of a row with the measured values, red if missed."""
    found = []
    for goal in GOALS:
        value = row.get(goal.figure)
        same = (goal.op, goal.mode, goal.T) == (row["op"], row["mode"], row["T"])
        if same and value is not None:
            colour = "green" if goal.met(value) else "red"
            found.append(f"[{colour}]{goal.figure} {value:.2f} {goal}[/]")
    return ", ".join(found)
