"""Compare a plan with all choices of as many exact layers, on the embedded model.

    python benchmarks/plan.py --out benchmarks/results/plan.jsonl

One JSON line for 1, 2 and 3 exact layers: the plan's KL, and that of the best and the worst choice.
"""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import AutoModelForCausalLM

from attnzoo.evaluation.models import embedded_model_path
from attnzoo.evaluation.quality import make_eval_batch
from attnzoo.training.planner import SwapPlanner


def main(
    out: Annotated[Path, typer.Option(help="JSON lines are written to it")],
    rows: int = 8,
) -> None:
    """Measure every choice; the other layers have a window of 32."""
    path = embedded_model_path()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    batch = make_eval_batch(path, None, rows=rows, row_length=512)
    assert batch.repeated is not None
    planner = SwapPlanner(model, batch.repeated)
    window = "flash:window=32"
    lines = []
    for kept in range(1, len(planner.numbers)):
        every = {
            tuple(n for n in planner.numbers if n not in swapped): planner.divergence(
                dict.fromkeys(swapped, window)
            )
            for swapped in combinations(planner.numbers, len(planner.numbers) - kept)
        }
        swapped = len(planner.numbers) - kept
        everywhere = dict.fromkeys(planner.numbers, window)
        chosen = planner.restore_softmax(everywhere, lambda rest, n=swapped: len(rest) >= n)
        line = {
            "kept": kept,
            "chosen": [n for n in planner.numbers if n not in chosen],
            "plan": planner.divergence(chosen),
            "best": min(every.values()),
            "worst": max(every.values()),
            "choices": len(every),
        }
        print(line, flush=True)
        lines.append(line)
    out.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")


if __name__ == "__main__":
    typer.run(main)
