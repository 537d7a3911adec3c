"""Recovery of the embedded model, by seed: the share of what the window loses that comes back.

    python benchmarks/recover.py --seeds 0 --seeds 1 --out benchmarks/results/recover.jsonl

Text: json, asyncio, email, http, unittest and xml of the standard library. One JSON line a run,
with the seconds it took; the control is the window of 32 in every case. ``--only NAME`` picks.
"""

from __future__ import annotations

import json
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from attnzoo.demo.text import embedded_model_path
from attnzoo.spec import AttentionSpec
from attnzoo.training.loop import LoopConfig
from attnzoo.training.plan import CANDIDATES, make_plan
from attnzoo.training.recover import RecoverConfig, recover
from attnzoo.training.runs import TrainConfig, load_rows

FOLDERS = ("json", "asyncio", "email", "http", "unittest", "xml")
HYBRID: dict[str, Any] = {"feature_map": "hedgehog", "window": 32}
# share of layers that stay exact (None: not planned), transfer steps, distillation steps, the rest
CASES: dict[str, tuple[float | None, int, int, dict[str, Any]]] = {
    "half exact": (0.5, 40, 0, {}),
    "quarter exact": (0.25, 40, 60, {}),
    "none exact": (0.0, 0, 0, {}),
    "gated hybrid": (None, 60, 80, {**FAR, "train": "full", "weights_lr": 5e-4}),
    # the far branch alone tells what window dropout does, at equal steps
    "gated hybrid, short": (None, 20, 30, {"train": "extras"}),
    "gated hybrid, short, window dropout": (
        None,
        20,
        30,
        {"train": "extras", "window_dropout": 0.9},
    ),
}


def data() -> list[Path]:
    """Return the folders of text."""
    return [Path(sysconfig.get_path("stdlib")) / name for name in FOLDERS]


def read_candidate(text: str) -> AttentionSpec:
    """Read one of the plan's candidates."""
    name, _, options = text.partition(":")
    pairs = (part.split("=") for part in options.split(",") if part)
    return AttentionSpec(name, **{k: int(v) if v.isdigit() else v for k, v in pairs})


def spec_for(keep: float | None) -> AttentionSpec:
    """Return the swap of a case, planned where it says how much stays exact."""
    if keep is None:
        return AttentionSpec("gated_linear", **HYBRID)
    path = embedded_model_path()
    train, _ = load_rows(path, data(), "text", TrainConfig(repeat_share=1.0))
    candidates = {text: read_candidate(text) for text in CANDIDATES}
    return make_plan(path, train.tokens[:8], candidates, keep_softmax=keep).spec


def run(name: str, seed: int) -> dict[str, Any]:
    """Run one case; returns its line."""
    keep, transfer, distil, options = CASES[name]
    started = time.perf_counter()
    spec = spec_for(keep)
    planned = time.perf_counter()
    config = RecoverConfig(
        transfer_steps=transfer,
        distil_steps=distil,
        control=32,
        loop=LoopConfig(seed=seed),
        **options,
    )
    with tempfile.TemporaryDirectory() as folder:
        results = recover(embedded_model_path(), spec, data(), Path(folder) / "out", config)
    return {
        "case": name,
        "seed": seed,
        "loss_share": results["lines"]["result"]["loss_share"],
        "recall_share": results["lines"]["result"]["recall_share"],
        "plan_seconds": round(planned - started, 1),
        "recover_seconds": round(time.perf_counter() - planned, 1),
        "lines": results["lines"],
        "spec": results["spec"],
    }


def main(
    out: Annotated[Path, typer.Option(help="JSON lines are appended to it")],
    seeds: Annotated[list[int] | None, typer.Option(help="repeatable")] = None,
    only: Annotated[list[str] | None, typer.Option(help="cases; all without")] = None,
) -> None:
    """Run every case with every seed."""
    for name in only or CASES:
        for seed in seeds or [0]:
            line = run(name, seed)
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            shares = [line["loss_share"], line["recall_share"]]
            print(name, seed, shares, line["recover_seconds"], flush=True)


if __name__ == "__main__":
    typer.run(main)
