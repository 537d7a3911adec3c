"""The demo: quality and decoding cost of one model under every backend."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.utils import logging as transformers_logging

import attnzoo
from attnzoo.errors import AttnzooError, SpecError
from attnzoo.evaluation.equal_memory import PREFILL_TOKENS, saved_cache_bytes
from attnzoo.evaluation.margins import paired, speedup
from attnzoo.evaluation.models import (
    EMBEDDED,
    is_embedded,
    load_swapped,
    max_positions,
    require_causal,
    spec_label,
)
from attnzoo.evaluation.presets import preset_specs
from attnzoo.evaluation.quality import EvalBatch, evaluate_rows, make_eval_batch
from attnzoo.evaluation.timing import machine
from attnzoo.hf.seam import cache_argument
from attnzoo.hf.swap import original_attention
from attnzoo.registry import available_backends
from attnzoo.report.output_path import atomic_write
from attnzoo.report.page import Part, line_plot, write_page
from attnzoo.report.table import Table, format_bytes, format_length, number
from attnzoo.spec import AttentionSpec

WINDOW = 32  # of the control, flash attention to the latest tokens only
CONTROL = f"flash window {WINDOW}"
RESULTS = "results.json"
LENGTHS = (256, 1024, 4096, 16384)
TIMED_TOKENS = 12  # per context length


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
    model: Path,
    text: Path | None,
    out: Path,
    specs: Sequence[AttentionSpec] | None = None,
    quick: bool = False,
    on_progress: Callable[[str], None] = lambda text: None,
) -> list[SwapResult]:
    """Measure every attention on a model and write ``results.json`` into ``out``.

    Args:
        model: Folder of a causal model.
        text: Text file to evaluate on; required with a model that is not an embedded one.
        out: Folder for the results.
        specs: What to measure; :func:`default_specs` when ``None``.
        quick: Whether to use few rows and short contexts.
        on_progress: Called with what is measured now.

    Raises:
        AttnzooError: An argument is invalid; nothing is written then.
    """
    if text is None and not is_embedded(str(model)):
        raise SpecError("A model needs --data: give a text file in the model's language")
    if not (model / "config.json").is_file():
        raise SpecError(
            f"{str(model)!r} holds no model (no config.json); give the folder of a saved model"
        )
    require_causal(model, "the demo measures text prediction and decoding")
    rows, lengths = (8, list(LENGTHS[:2])) if quick else (48, list(LENGTHS))
    limit = max_positions(model)
    if limit is not None:
        lengths = [n for n in lengths if n + 64 <= limit] or [limit // 2]
    row_length = min(512, limit or 512)
    batch = make_eval_batch(model, text, rows=rows, row_length=row_length)
    softmax = AttentionSpec("softmax")  # what the others are compared with
    specs = [softmax, *(s for s in specs or default_specs(None) if s != softmax)]
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    start, results = time.monotonic(), []
    for done, spec in enumerate(specs):
        on_progress(f"{done}/{len(specs)}  {spec_label(spec)}")
        results.append(_measure(model, spec, batch, lengths))
    data = {
        "model": EMBEDDED if is_embedded(str(model)) else str(model),
        "text": str(text) if text else "held-out files of the Python standard library",
        "rows": rows,
        "lengths": lengths,
        "seconds": round(time.monotonic() - start, 1),
        "attnzoo": attnzoo.__version__,
        "machine": machine(),
        "results": [asdict(result) for result in results],
    }
    out.mkdir(parents=True, exist_ok=True)
    atomic_write(out / RESULTS, json.dumps(data, indent=2) + "\n")
    return results


def _measure(path: Path, spec: AttentionSpec, batch: EvalBatch, lengths: list[int]) -> SwapResult:
    """Measure one attention; an unsupported one has its reason as result."""
    result = SwapResult(label=spec_label(spec), spec=spec.to_dict())
    try:
        model = load_swapped(path, spec)
        result.parameters_added = sum(row.extras for row in attnzoo.describe(model))
        quality = evaluate_rows(model, batch)
        result.bits_per_byte, result.recall_bits_per_byte = quality.loss, quality.recall
        result.loss_rows = [*quality.loss_rows]
        tokens = batch.rows.tokens.flatten()
        stream = tokens.repeat(-(-max(lengths) // len(tokens)))[: max(lengths)]
        contexts: dict[str, Callable[[], AbstractContextManager[Any]]] = {
            "swap": nullcontext,
            "original": lambda: original_attention(model),
        }
        rounds = measure_together(model, contexts, stream, lengths)
        result.rounds_ms, result.original_ms = rounds["swap"], rounds["original"]
        result.decode_ms = {n: median(ms) for n, ms in result.rounds_ms.items()}
        result.cache_bytes = {
            length: sum(saved_cache_bytes(path, spec, length).values()) for length in lengths
        }
    except AttnzooError as error:
        result.refused = str(error)
    return result


@torch.no_grad()
def measure_together(
    model: PreTrainedModel,
    contexts: Mapping[str, Callable[[], AbstractContextManager[Any]]],
    stream: Tensor,
    lengths: Sequence[int],
) -> dict[str, dict[int, list[float]]]:
    """Return the milliseconds of decoded tokens, by context and by length.

    Tokens of all contexts are timed in alternation, so that other load on the machine affects all.

    Args:
        model: A causal model in evaluation mode.
        contexts: By name, functions that return a context in which the model runs, such as that of
            :func:`~attnzoo.hf.swap.original_attention`.
        stream: Tokens that fill the caches, ``[L]``, on the model's device.
        lengths: Context lengths, increasing, at most L.
    """
    taken: dict[str, dict[int, list[float]]] = {name: {} for name in contexts}
    caches = {name: DynamicCache(config=model.config) for name in contexts}

    def run(name: str, tokens: Tensor) -> float:
        start = time.perf_counter()
        with contexts[name]():
            model(tokens[None], **cache_argument(caches[name]), use_cache=True, logits_to_keep=1)
        return 1000 * (time.perf_counter() - start)

    seen = 0
    for length in lengths:
        for name in taken:
            for chunk in stream[seen:length].split(PREFILL_TOKENS) if length > seen else ():
                run(name, chunk)
        for _ in range(TIMED_TOKENS):
            for name, times in taken.items():
                times.setdefault(length, []).append(run(name, stream[:1]))
        seen = int(next(iter(caches.values())).get_seq_length())
    return taken


def results_table(results: list[SwapResult]) -> Table:
    """Return the results as a table; unsupported attentions have no row."""
    lengths = _lengths(results)
    cached = sorted({lengths[0], lengths[-1]}) if lengths else []
    rows = [
        [
            result.label,
            number(result.bits_per_byte),
            number(result.recall_bits_per_byte),
            *(number(result.decode_ms.get(n), 1) for n in lengths),
            *(format_bytes(result.cache_bytes.get(n)) for n in cached),
            f"{result.parameters_added:,}",
        ]
        for result in results
        if not result.refused
    ]
    decode = [f"ms @{format_length(n)}" for n in lengths]
    cache = [f"cache @{format_length(n)}" for n in cached]
    return Table(
        columns=["attention", "bits/byte", "recall", *decode, *cache, "extras"],
        rows=rows,
        title="One model under each attention, swapped by config, without training",
        caption="bits per byte on held-out text and on the second copy of a segment (recall); "
        "milliseconds per decoded token, and bytes of cache, at each context length",
    )


def _lengths(results: list[SwapResult]) -> list[int]:
    return sorted({n for result in results for n in result.decode_ms})


def summary(results: list[SwapResult]) -> str:
    """Return the main findings as text, starting with the control."""
    by_label = {r.label: r for r in results if not r.refused}
    exact, control = by_label.get("softmax"), by_label.get(CONTROL)
    approximate = [
        r
        for r in by_label.values()
        if r.bits_per_byte is not None and r.spec["backend"] not in ("softmax", "flash")
    ]
    parts = []
    if exact and control and exact.bits_per_byte and control.bits_per_byte:
        loss = paired(control.loss_rows, exact.loss_rows)
        before, after, recall = exact.recall_bits_per_byte, control.recall_bits_per_byte, ""
        if before is not None and after is not None:
            recall = f" and {after - before:+.2f} on recall"
        parts.append(
            f"The control, a window of {WINDOW} tokens, costs {loss} bits per byte{recall}."
        )
        below = [r for r in approximate if paired(r.loss_rows, control.loss_rows).is_positive]
        if below:
            parts.append(
                f"{len(below)} of {len(approximate)} untrained swaps are clearly worse than it; "
                "a swap needs training to recover its quality."
            )
    flat = [r for r in approximate if len(set(r.cache_bytes.values())) == 1]
    lengths = _lengths(results)
    if flat and exact and lengths:
        last = lengths[-1]
        best = min(flat, key=lambda r: r.decode_ms[last])
        smaller = exact.cache_bytes[last] / best.cache_bytes[last]
        gain = speedup(best.original_ms.get(last, []), best.rounds_ms.get(last, []))
        decodes = (
            "decodes neither clearly faster nor clearly slower than the model's own attention "
            "(no difference measured)"
        )
        if gain.is_clear:
            factor = math.exp(gain.mean)
            decodes = (
                f"decodes {factor:.1f} ± {factor * gain.error:.1f} times as fast as the model's "
                "own attention"
            )
        parts.append(
            f"At {format_length(last)} tokens {best.label} {decodes}, and its cache is "
            f"{smaller:.0f}x smaller than softmax's."
        )
    return " ".join(parts)


def write_report(out: Path, results: list[SwapResult]) -> Path | None:
    """Write ``report.html`` and its plots as PNG; return ``None`` without matplotlib."""
    data = json.loads((out / RESULTS).read_text("utf-8"))
    shown = [r for r in results if not r.refused]
    refused = [f"{r.label} is not supported: {r.refused}" for r in results if r.refused]
    x = "context length, tokens"
    decoding = line_plot(
        {r.label: r.decode_ms for r in shown},
        name="decoding",
        title="Decoding one token: median time",
        x=x,
        y="milliseconds per token",
    )
    cache = line_plot(
        {r.label: {n: size / 2**20 for n, size in r.cache_bytes.items()} for r in shown},
        name="cache",
        title="Cache: memory kept between tokens",
        x=x,
        y="MiB",
    )
    facts = ", ".join(f"{name} {value}" for name, value in data["machine"].items())
    footer = f"{data['model']}, {data['rows']} rows; attnzoo {data['attnzoo']}; {facts}."
    parts: list[Part] = [summary(results), results_table(shown), *refused]
    parts += [decoding, cache, footer]
    return write_page(out / "report.html", "Quality and decoding cost by attention", parts)
