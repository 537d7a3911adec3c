"""Measure every backend on one model, and write the results."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers.utils import logging as transformers_logging

import attnzoo
from attnzoo.errors import AttnzooError, SpecError
from attnzoo.evaluation.decoding import PREFILL_TOKENS, measure_together
from attnzoo.evaluation.equal_memory import saved_cache_bytes
from attnzoo.evaluation.models import (
    EMBEDDED,
    embedded_model_path,
    is_embedded,
    load_swapped,
    max_positions,
    require_causal,
    spec_label,
)
from attnzoo.evaluation.presets import preset_specs
from attnzoo.evaluation.quality import EvalBatch, evaluate_rows, make_eval_batch
from attnzoo.evaluation.timing import machine
from attnzoo.hf.swap.convert import original_attention
from attnzoo.registry import available_backends
from attnzoo.report.atomic_write import atomic_write
from attnzoo.spec import AttentionSpec

WINDOW = 32  # of the control, flash attention to the latest tokens only
RESULTS = "results.json"
LENGTHS = (256, 1024, 4096, 16384)


@dataclass(kw_only=True)
class SwapResult:
    """Quality and cost of the model under one attention.

    Attributes:
        label: Name in tables.
        spec: The spec as plain data.
        bits_per_byte: On held-out text.
        recall_bits_per_byte: On the second copy of a repeated segment.
        parameters_added: Number of parameters that the backend adds.
        decode_ms: Milliseconds per token, by context length.
        cache_bytes: Bytes of the cache in the dtype of the saved weights, by context length.
        refused: Why the backend does not support the model; empty if it does.
        loss_rows: The contribution of each row to ``bits_per_byte``, which is their mean.
        rounds_ms: Milliseconds of each timed token, by context length.
        original_ms: Those of the original attention, timed in alternation.
    """

    label: str
    spec: dict[str, Any]
    bits_per_byte: float | None = None
    recall_bits_per_byte: float | None = None
    parameters_added: int = 0
    decode_ms: dict[int, float] = field(default_factory=dict)
    cache_bytes: dict[int, int] = field(default_factory=dict)
    refused: str = ""
    loss_rows: list[float] = field(default_factory=list)
    rounds_ms: dict[int, list[float]] = field(default_factory=dict)
    original_ms: dict[int, list[float]] = field(default_factory=dict)


def default_specs(names: Sequence[str] | None) -> list[AttentionSpec]:
    """Return softmax and the presets of the given backends, or of every backend.

    Raises:
        UnknownBackendError: A name is unknown.
    """
    return preset_specs(dict.fromkeys(("softmax", *(names or available_backends()))), "short")


def run_demo(
    *,
    model: Path | None,
    text: Path | None,
    out: Path,
    specs: Sequence[AttentionSpec] | None,
    quick: bool,
    console: Console,
) -> list[SwapResult]:
    """Measure every attention on a model and write ``results.json`` into ``out``.

    Args:
        model: Folder of a causal model; the embedded one when ``None``.
        text: Text file to evaluate on; required with a model that is not an embedded one.
        out: Folder for the results.
        specs: What to measure; :func:`default_specs` when ``None``.
        quick: Whether to use few rows and short contexts.
        console: Shows the progress.

    Raises:
        AttnzooError: An argument is invalid; nothing is written then.
    """
    if model is not None and text is None and not is_embedded(str(model)):
        raise SpecError("A model needs --data: give a text file in the model's language")
    path = model or embedded_model_path()
    if not (path / "config.json").is_file():
        raise SpecError(
            f"{str(path)!r} holds no model (no config.json); give the folder of a saved model"
        )
    require_causal(path, "the demo measures text prediction and decoding")
    rows, lengths = (8, list(LENGTHS[:2])) if quick else (48, list(LENGTHS))
    limit = max_positions(path)
    if limit is not None:
        lengths = [n for n in lengths if n + 64 <= limit] or [limit // 2]
    row_length = min(512, limit or 512)
    batch = make_eval_batch(path, text, rows=rows, row_length=row_length)
    softmax = AttentionSpec("softmax")  # what the others are compared with
    specs = [softmax, *(s for s in specs or default_specs(None) if s != softmax)]
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
            results.append(_measure(path, spec, batch, lengths, progress))
            progress.advance(overall)
    write_results(out, results, path=model, text=text, lengths=lengths, rows=rows, start=start)
    return results


def _measure(
    path: Path, spec: AttentionSpec, batch: EvalBatch, lengths: list[int], progress: Progress
) -> SwapResult:
    """Measure one attention; an unsupported one has its reason as result."""
    result = SwapResult(label=spec_label(spec), spec=spec.to_dict())
    steps = 1 + len(lengths) + 2 * sum(-(-n // PREFILL_TOKENS) for n in lengths)
    task = progress.add_task(result.label, total=steps)
    try:
        model = load_swapped(path, spec)
        result.parameters_added = sum(row.extras for row in attnzoo.describe(model))
        quality = evaluate_rows(model, batch)
        progress.advance(task)
        result.bits_per_byte, result.recall_bits_per_byte = quality.loss, quality.recall
        result.loss_rows = [*quality.loss_rows]
        tokens = batch.rows.tokens.flatten()
        stream = tokens.repeat(-(-max(lengths) // len(tokens)))[: max(lengths)]
        contexts: dict[str, Callable[[], AbstractContextManager[Any]]] = {
            "swap": nullcontext,
            "original": lambda: original_attention(model),
        }
        costs = measure_together(model, contexts, stream, lengths, lambda: progress.advance(task))
        cost = costs["swap"]
        result.decode_ms = cost.decode_ms
        result.cache_bytes = {
            length: sum(saved_cache_bytes(path, spec, length).values()) for length in lengths
        }
        result.rounds_ms, result.original_ms = cost.rounds_ms, costs["original"].rounds_ms
    except AttnzooError as error:
        result.refused = str(error)
    progress.update(task, visible=False)
    return result


def write_results(
    out: Path,
    results: list[SwapResult],
    *,
    path: Path | None,
    text: Path | None,
    lengths: list[int],
    rows: int,
    start: float,
) -> None:
    """Write ``results.json`` atomically: the results, the arguments and the machine."""
    out.mkdir(parents=True, exist_ok=True)
    data = {
        "model": str(path) if path else EMBEDDED,
        "text": str(text) if text else "held-out files of the Python standard library",
        "rows": rows,
        "lengths": lengths,
        "window_of_control": WINDOW,
        "seconds": round(time.monotonic() - start, 1),
        "attnzoo": attnzoo.__version__,
        "machine": machine(),
        "results": [asdict(result) for result in results],
    }
    atomic_write(out / RESULTS, json.dumps(data, indent=2) + "\n")
