"""Runs the demo: every attention on one model, with progress; returns and writes results."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

import attnzoo
from attnzoo.bench import machine
from attnzoo.demo.measure import Result, measure_decoding, measure_quality
from attnzoo.demo.text import (
    Judged,
    embedded_model_path,
    judge_on,
    longest_context,
    refuse_encoder,
)
from attnzoo.errors import AttnzooError, SpecError
from attnzoo.registry import available_backends, get_backend
from attnzoo.report.whole import write_whole
from attnzoo.spec import AttentionSpec

WINDOW = 32  # of the control: a model that sees this many tokens and nothing else
LENGTHS = (256, 1024, 4096, 16384)
VARIANTS: dict[str, tuple[dict[str, Any], ...]] = {
    "flash": ({}, {"window": WINDOW}),
    "linear": ({}, {"feature_map": "hedgehog"}, {"feature_map": "hedgehog", "window": WINDOW}),
    "gated_linear": ({"gate": "alibi"}, {"gate": "gla"}, {"gate": "gla", "window": WINDOW}),
    "longformer": ({"window": 128},),
    "linformer": ({"block": 64},),
    "reformer": ({"chunk_size": 16},),  # 8 rounds, window 32: of 512 keys, 164 are met at most
}


def default_specs(names: Sequence[str] | None) -> list[AttentionSpec]:
    """Return what the demo compares: every backend as it comes, and variants worth seeing."""
    for name in names or ():
        get_backend(name)  # refuses an unknown one with its own message
    chosen = list(names) if names else available_backends()
    if "softmax" in chosen:
        chosen.remove("softmax")
    return [
        AttentionSpec(name, **options)
        for name in ("softmax", *chosen)
        for options in VARIANTS.get(name, ({},))
    ]


def label(spec: AttentionSpec) -> str:
    """Name a spec in a table: the backend and what was set."""
    options = spec.default.options
    values = " ".join(f"{k} {v}" if isinstance(v, int) else str(v) for k, v in options.items())
    return f"{spec.default.backend} {values}".strip()


def load(path: Path, spec: AttentionSpec) -> Any:
    """Load a causal model with its attention swapped by config, in float32."""
    config = AutoConfig.from_pretrained(path)
    config.attnzoo = spec.to_dict()
    return AutoModelForCausalLM.from_pretrained(
        path, config=config, attn_implementation="attnzoo", dtype=torch.float32
    ).eval()


def run_demo(
    *,
    model: Path | None,
    text: Path | None,
    out: Path,
    names: Sequence[str] | None,
    quick: bool,
    console: Console,
) -> list[Result]:
    """Measure every attention and write ``results.json`` into ``out``.

    Raises:
        AttnzooError: Something the user gave cannot be used; nothing is written then.
    """
    if model is not None and text is None:
        raise SpecError(
            "With --model, give --text too: a file in the language that the model knows"
        )
    path = model or embedded_model_path()
    if not (path / "config.json").is_file():
        raise SpecError(
            f"{str(path)!r} holds no model (no config.json); give --model a folder that does"
        )
    refuse_encoder(path, "the demo measures text prediction and decoding")
    rows, lengths = (8, list(LENGTHS[:2])) if quick else (48, list(LENGTHS))
    limit = longest_context(path)
    if limit is not None:
        lengths = [n for n in lengths if n + 64 <= limit] or [limit // 2]
    row_length = min(512, limit or 512)
    judged = judge_on(path, text, rows=rows, row_length=row_length, stream=max(lengths))
    specs = default_specs(names)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    start, results = time.monotonic(), []
    with Progress(
        TextColumn("{task.description:<28}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    ) as progress:
        overall = progress.add_task("all", total=len(specs))
        for spec in specs:
            results.append(_measure(path, spec, judged, lengths, progress))
            progress.advance(overall)
    write_results(out, results, path=model, text=text, lengths=lengths, rows=rows, start=start)
    return results


def _measure(
    path: Path, spec: AttentionSpec, judged: Judged, lengths: list[int], progress: Progress
) -> Result:
    result = Result(label=label(spec), spec=spec.to_dict())
    steps = -(-len(judged.plain) // 8) + sum(-(-n // 1024) for n in lengths) + len(lengths)
    task = progress.add_task(result.label, total=steps)
    try:
        model = load(path, spec)
        result.parameters_added = sum(row.extras for row in attnzoo.describe(model))
        with torch.no_grad():
            measure_quality(model, judged, result, lambda: progress.advance(task))
            measure_decoding(model, judged.stream, lengths, result, lambda: progress.advance(task))
    except AttnzooError as error:
        result.refused = str(error)
    progress.update(task, visible=False)
    return result


def write_results(
    out: Path,
    results: list[Result],
    *,
    path: Path | None,
    text: Path | None,
    lengths: list[int],
    rows: int,
    start: float,
) -> None:
    """Write the results and what they were measured with, whole or not at all."""
    out.mkdir(parents=True, exist_ok=True)
    data = {
        "model": str(path) if path else "embedded",
        "text": str(text) if text else "held-out files of the Python standard library",
        "rows": rows,
        "lengths": lengths,
        "window_of_control": WINDOW,
        "seconds": round(time.monotonic() - start, 1),
        "attnzoo": attnzoo.__version__,
        "machine": machine(),
        "results": [asdict(result) for result in results],
    }
    write_whole(out / "results.json", json.dumps(data, indent=2) + "\n")
