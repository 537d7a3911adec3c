"""Recover the embedded model with several seeds: how much of the gap to softmax is closed.

    python benchmarks/recover.py --seeds 0 --seeds 1 --out benchmarks/results/recover.jsonl

Text: json, asyncio, email, http, unittest and xml of the standard library. One JSON line per
run, with the seconds that it took. The gap is the one between a 32-token window and softmax in
every case. ``--only NAME`` selects cases.
"""

from __future__ import annotations

import json
import sysconfig
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from attnzoo.evaluation.models import embedded_model_path
from attnzoo.spec import AttentionSpec
from attnzoo.training.arguments import RecoveryArguments
from attnzoo.training.data import RowOptions, load_rows
from attnzoo.training.plan import make_plan, preset_candidates
from attnzoo.training.recover import recover

FOLDERS = ("json", "asyncio", "email", "http", "unittest", "xml")
HEDGEHOG: dict[str, Any] = {"feature_map": "hedgehog", "window": 32}
EXPONENTIALS: dict[str, Any] = {
    "feature_map": "hedgehog_exp",
    "gate": "gated_retention",
    "window": 32,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One recipe."""

    keep: float | None = None  # share of layers that stay exact; None: not planned
    transfer: int  # steps
    distil: int  # steps
    backend: str = "gated_linear"  # if ``keep`` is None
    swap: Mapping[str, Any] = field(default_factory=dict)  # its options
    options: Mapping[str, Any] = field(default_factory=dict)  # of RecoveryArguments
    bf16: bool = False


CASES = {
    "half exact": Case(keep=0.5, transfer=40, distil=0),
    "quarter exact": Case(keep=0.25, transfer=40, distil=60),
    "quarter exact, bf16": Case(keep=0.25, transfer=40, distil=60, bf16=True),
    "none exact": Case(keep=0.0, transfer=0, distil=0),
    "gated hybrid": Case(
        transfer=60,
        distil=70,
        swap=EXPONENTIALS,
        options={
            "transfer_target": "attention",
            "train": "full",
            "learning_rate": 5e-4,
            "repeat_share": 0.5,
        },
        bf16=True,
    ),
    "gated hybrid, hedgehog": Case(transfer=60, distil=150, swap=HEDGEHOG),
    "delta hybrid": Case(
        transfer=60,
        distil=70,
        backend="delta",
        swap={"feature_map": "hedgehog_exp", "window": 32},
        options={"train": "full", "learning_rate": 5e-4, "repeat_share": 0.5},
        bf16=True,
    ),
    # only the added parameters are trained
    "gated hybrid, short": Case(transfer=20, distil=30, swap=HEDGEHOG, options={"train": "extras"}),
}


def data() -> list[Path]:
    """Return the folders of text."""
    return [Path(sysconfig.get_path("stdlib")) / name for name in FOLDERS]


def spec_for(case: Case) -> AttentionSpec:
    """Return the swap of a case; plan it if ``keep`` is set."""
    if case.keep is None:
        return AttentionSpec(case.backend, **case.swap)
    path = embedded_model_path()
    train, _ = load_rows(path, data(), RowOptions(repeat_share=1.0))
    return make_plan(path, train.select(slice(8)), preset_candidates(), keep_softmax=case.keep).spec


def run(name: str, seed: int) -> dict[str, Any]:
    """Run one case and return its JSON line."""
    case = CASES[name]
    started = time.perf_counter()
    spec = spec_for(case)
    planned, worked = time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        args = RecoveryArguments(
            f"{folder}/out",
            transfer_steps=case.transfer,
            max_steps=case.distil,
            seed=seed,
            bf16=case.bf16,
            use_cpu=True,
            **case.options,
        )
        results = recover(embedded_model_path(), spec, data(), args)
    return {
        "case": name,
        "seed": seed,
        "loss_share": results["lines"]["result"]["loss_share"],
        "recall_share": results["lines"]["result"]["recall_share"],
        "plan_seconds": round(planned - started, 1),
        "recover_seconds": round(time.perf_counter() - planned, 1),
        "processor_seconds": round(
            time.process_time() - worked, 1
        ),  # of all threads, without the plan
        "threads": torch.get_num_threads(),
        "lines": results["lines"],
        "spec": results["spec"],
    }


def main(
    out: Annotated[Path, typer.Option(help="JSON lines are appended to it")],
    seeds: Annotated[list[int] | None, typer.Option(help="repeatable")] = None,
    only: Annotated[list[str] | None, typer.Option(help="case (repeatable); default: all")] = None,
) -> None:
    """Run every case with every seed."""
    for name in only or CASES:
        for seed in seeds or [0]:
            line = run(name, seed)
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            shares = [line["loss_share"], line["recall_share"]]
            print(name, seed, shares, line["processor_seconds"], flush=True)


if __name__ == "__main__":
    typer.run(main)
