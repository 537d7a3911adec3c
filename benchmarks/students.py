"""Students of a stock class with Gated DeltaNet layers, beside sliding windows in the same layers.

    python -m benchmarks.pretrain_tiny --qk-norm --minutes 7 --lr 1e-3 --out tiny-qwen3
    python -m benchmarks.students --teacher tiny-qwen3 --layers 1-2 --seeds 0 --out students.jsonl

Text: that of benchmarks/recover.py. Each run converts the teacher, trains the student by the recipe
``student`` and is one JSON line; before them, one line has the teacher with windows of several
sizes in the same layers, which need no training. The gap is that between a window of 32 tokens in
all layers and softmax.
"""

from __future__ import annotations

import json
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM

import attnzoo
from attnzoo.hf.stock.convert import convert_files
from attnzoo.training.eval_rows import rows_to_eval_batch
from attnzoo.training.loading import load_rows
from attnzoo.training.quality import as_dicts, quality
from attnzoo.training.recipes import recipe_config
from attnzoo.training.recover import recover
from benchmarks.recover import FOLDERS

WINDOWS = (32, 64, 128)
SHOWN = ("loss", "recall", "loss_share", "recall_share", "agreement")


def shown(lines: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of some models that are printed, rounded."""
    return {
        name: {key: None if line[key] is None else round(line[key], 4) for key in SHOWN}
        for name, line in lines.items()
    }


def windows(teacher: Path, layers: str, data: list[Path]) -> dict[str, Any]:
    """Return the quality of the teacher with windows in some layers, on the runs' held-out rows."""
    batch = rows_to_eval_batch(load_rows(teacher, data, "text", recipe_config("student"))[1], 32)
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32).eval()
    baselines: dict[str, dict[str, Any]] = {"softmax": {}, "window alone": {"window": 32}}
    lines = {
        name: quality(attnzoo.swap(model, "flash", **options), batch)
        for name, options in baselines.items()
    }
    for size in WINDOWS:
        swapped = attnzoo.swap(model, "flash", layers={layers: f"flash:window={size}"})
        lines[f"window {size} in {layers}"] = quality(swapped, batch)
    return as_dicts(lines)


def main(
    teacher: Annotated[Path, typer.Option(help="folder of a Qwen 3")],
    layers: Annotated[str, typer.Option(help="layers that become recurrent")] = "1-2",
    seeds: Annotated[list[int] | None, typer.Option(help="seeds (repeatable)")] = None,
    times: Annotated[int, typer.Option(help="factor of the steps")] = 1,
    precision: Annotated[str, typer.Option(help="bf16, or no (float32)")] = "bf16",
    out: Annotated[Path | None, typer.Option(help="file to append JSON lines to")] = None,
) -> None:
    """Convert, recover and evaluate students; print and append the results."""
    torch.set_num_threads(1)
    data = [Path(sysconfig.get_path("stdlib")) / name for name in FOLDERS]

    def write(line: dict[str, Any]) -> None:
        print(json.dumps(line), flush=True)
        if out is not None:
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    write({"layers": layers, "lines": shown(windows(teacher, layers, data))})
    for seed in seeds or [0]:
        start = time.monotonic()
        steps = recipe_config("student")
        config = recipe_config(
            "student",
            seed=seed,
            precision=precision,
            transfer_steps=times * steps.transfer_steps,
            distil_steps=times * steps.distil_steps,
            entropy_every=0,
        )
        with tempfile.TemporaryDirectory() as folder:
            student, result = Path(folder, "student"), Path(folder, "result")
            convert_files(teacher, "qwen3_5_text", student, recurrent=layers)
            found = recover(
                *(student, None, data, result, config),
                teacher=teacher,
                log=lambda text: print(text, flush=True),
            )
        line = {"layers": layers, "seed": seed, "times": times, "precision": precision}
        seconds = round(time.monotonic() - start)
        more = {"equal_window": found["equal_window"], "verdict": found["verdict"]}
        write({**line, "seconds": seconds, "lines": shown(found["lines"]), **more})


if __name__ == "__main__":
    typer.run(main)
