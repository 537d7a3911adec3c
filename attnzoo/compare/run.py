"""Run a comparison: check the request, measure what has no row yet, return all rows."""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers

import attnzoo
from attnzoo.compare.cases import (
    BASELINE,
    LEVELS,
    MODES,
    CostCase,
    ModelInfo,
    default_specs,
    is_exact,
    make_cases,
)
from attnzoo.compare.equal_windows import add_equal_windows, equal_windows
from attnzoo.compare.workers import (
    NOT_RUN,
    OK,
    OUT_OF_MEMORY,
    TIMED_OUT,
    Workers,
    check_case_kernels,
    free_memory,
    measure_cost,
    measure_quality,
)
from attnzoo.errors import SpecError, did_you_mean
from attnzoo.evaluation.embeddings import EmbeddingEvalBatch, make_embedding_batch
from attnzoo.evaluation.generation import RecallEvalBatch, make_recall_batch
from attnzoo.evaluation.models import (
    embedded_name,
    is_embedded,
    max_positions,
    model_path,
    spec_label,
)
from attnzoo.evaluation.results import FORMAT, Row, append, commit, open_results
from attnzoo.evaluation.timing import contradicted, machine
from attnzoo.hf.configs import has_field, read_field
from attnzoo.hf.layers import attention_layers
from attnzoo.hf.saving.dtype import dtype_name, saved_dtype
from attnzoo.hf.saving.files import empty_model, hash_weights
from attnzoo.report.output_path import check_folder
from attnzoo.spec import AttentionSpec

STOPS = {OUT_OF_MEMORY, TIMED_OUT}  # after these, longer cases of the attention are not run
CHECK_SECONDS = 3600.0  # time limit of the checks of all GPU kernels
PAIRED = 5  # calls of a baseline beside a case: a warm-up, one to estimate, three rounds
CALLS_PER_CASE = 3  # of a slow case: one warm-up and two timed calls
QualityBatch = RecallEvalBatch | EmbeddingEvalBatch
OnProgress = Callable[[int, int, str], None]  # cases done, cases in total, the next case


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """Options of a comparison.

    Attributes:
        model: Folder of a saved model, or an embedded one's name.
        lengths: T, increasing.
        specs: The attentions; every backend's presets when ``None``.
        out: Folder of results.
        levels: Subset of ``LEVELS``.
        mode: One of ``MODES``.
        tokens: Tokens per call; the number of rows follows from it.
        batch: Number of rows, instead of ``tokens``.
        dtype: Data type; when ``None``, time is measured in float32 on a CPU and bfloat16 on a GPU,
            and caches are counted in the dtype of the saved weights.
        devices: Devices; all available ones when ``None``.
        text: File to evaluate quality on; the standard library for the embedded model.
        quality: Whether to measure quality.
        quality_length: Tokens per row in the quality measurement.
        min_run_time: Duration of all timed calls of a case together in seconds, at least two calls.
        timeout: Time limit of a case in seconds.
        memory_gib: Memory limit of a case; when ``None``, three quarters of the free memory on a
            CPU and no limit on a GPU.
        threads: Number of torch threads.
        fresh: Whether to start over instead of resuming from earlier results.
    """

    model: str
    lengths: Sequence[int]
    out: Path
    specs: Sequence[AttentionSpec] | None = None
    levels: Sequence[str] = LEVELS
    mode: str = "forward"
    tokens: int = 4096
    batch: int | None = None
    dtype: str | None = None
    devices: Sequence[str] | None = None
    text: Path | None = None
    quality: bool = True
    quality_length: int = 2048
    min_run_time: float = 0.5
    timeout: float = 60.0
    memory_gib: float | None = None
    threads: int | None = None
    fresh: bool = False


def read_model_info(model: str) -> ModelInfo:
    """Return what a comparison needs to know about a model, without loading its weights.

    Args:
        model: Folder of a saved model, or an embedded one's name.

    Raises:
        SpecError: There is no model, or it has no attention layer that can be swapped.
    """
    path = model_path(model)
    empty = empty_model(path)
    layers = attention_layers(empty)
    if not layers:
        raise SpecError(
            f"{model!r} has no layer that calls transformers' attention interface, so its "
            "attention cannot be swapped"
        )
    causal = all(layer.geometry.causal for layer in layers)
    sizes = [(name, tuple(x.shape)) for name, x in empty.state_dict().items()]
    identity = (path / "config.json").read_bytes() + repr(sizes).encode() + hash_weights(path)
    return ModelInfo(
        path=str(path),
        name=f"the model {name!r}" if (name := embedded_name(path)) else path.resolve().name,
        sha=hashlib.sha256(identity).hexdigest()[:12],
        geometry=layers[0].geometry,
        causal=causal,
        generates=causal and empty.can_generate(),
        max_positions=max_positions(path),
        trained_positions=layers[0].geometry.max_length,
        text_model=has_field(empty.config, "vocab_size")
        and not read_field(empty.config, "is_encoder_decoder", False),
        module=type(empty).__module__,
        dtype=dtype_name(saved_dtype(path)),
    )


def check(config: CompareConfig, info: ModelInfo) -> tuple[list[AttentionSpec], list[str]]:
    """Validate the options and return the attentions and the devices.

    Raises:
        SpecError: An option is unknown or does not fit the model.
    """
    for what, value, known in (
        ("mode", config.mode, MODES),
        *(("level", v, LEVELS) for v in config.levels),
    ):
        if value not in known:
            raise SpecError(
                f"No {what} is called {value!r}.{did_you_mean(value, known)} "
                f"Available: {', '.join(known)}."
            )
    if config.mode == "decode" and not info.generates:
        reason = "has no head that predicts tokens" if info.causal else "is not causal"
        raise SpecError(
            f"{info.name} {reason}, so it cannot decode; use --mode forward or train, or give a "
            "causal language model"
        )
    if not info.text_model and set(config.levels) - {"op"}:
        raise SpecError(
            f"{info.name} does not run on token ids alone (it is an encoder-decoder or takes "
            "other inputs); use --level op, which measures its attention backend on random inputs"
        )
    if config.dtype is not None and not isinstance(getattr(torch, config.dtype, None), torch.dtype):
        raise SpecError(f"No dtype is called {config.dtype!r}; use for example float32 or bfloat16")
    for name in (
        "tokens",
        "batch",
        "min_run_time",
        "timeout",
        "threads",
        "memory_gib",
        "quality_length",
    ):
        value = getattr(config, name)
        if value is not None and value <= 0:
            raise SpecError(f"{name} must be above 0, got {value}")
    devices = list(config.devices or ("cpu", *(["cuda"] if torch.cuda.is_available() else [])))
    if "cuda" in devices and not torch.cuda.is_available():
        raise SpecError("torch finds no CUDA device; use --device cpu")
    specs = list(config.specs or default_specs(None, causal=info.causal))
    if not any(is_exact(spec.to_dict()) for spec in specs):
        specs.insert(0, AttentionSpec(BASELINE))
    return specs, devices


def compare(
    config: CompareConfig,
    on_progress: OnProgress = lambda done, total, name: None,
    log: Callable[[str], object] = lambda text: None,
) -> list[Row]:
    """Measure every case that has no row in the results folder; return the rows of this machine.

    Args:
        config: Options of the comparison.
        on_progress: Called before each case.
        log: Called with the verdicts about GPU kernels that are checked before.

    Raises:
        AttnzooError: An option is invalid; nothing is measured then.
    """
    info = read_model_info(config.model)
    specs, devices = check(config, info)
    info = replace(info, dtype=config.dtype or info.dtype)
    check_folder(config.out)
    batch = None if missing_quality(config, info) else _quality_batch(config, info)
    cases = [case for device in devices for case in _cases(config, specs, device)]
    earlier = open_results(config.out, fresh=config.fresh)
    about = _about(config, info)
    for row in earlier:
        if row["model"]["sha"] != info.sha:
            raise SpecError(
                f"{str(config.out)!r} holds results of another model ({row['model']['name']}); "
                "give --output-dir another folder, or --fresh to start over"
            )
    rows = [row for row in earlier if row["machine"] == about["machine"]]
    memory = {"cpu": int(0.75 * free_memory())}
    if config.memory_gib:
        memory = dict.fromkeys(devices, int(config.memory_gib * 2**30))
    workers = Workers(
        threads=about["machine"]["threads"],
        timeout=config.timeout,
        memory_bytes={device: count for device, count in memory.items() if count},
        preload=[info.module],
    )
    total = len(cases) + (len(specs) if batch else 0)
    if unchecked := _gpu_cases(cases, rows):
        on_progress(0, total, "checking GPU kernels, up to a minute each, once")
        patient = Workers(threads=workers.threads, timeout=CHECK_SECONDS, memory_bytes={})
        for text in patient.run(check_case_kernels, unchecked, info).get("checks", ()):
            log(text)
    if batch:
        if info.generates:
            on_progress(0, total, "windows of equal memory")
            rows = add_equal_windows(cases, info, config.out, about, rows)
            specs = _with_equal_windows(specs, rows, batch.shape[1])
        total = len(specs) + len(cases)
        rows = _measure_quality(
            specs, info, workers, config.out, about, rows, batch,
            lambda n, name: on_progress(n, total, name),
        )  # fmt: skip
    return _measure_costs(
        *(cases, info, workers, config, about, rows),
        lambda n, name: on_progress(total - len(cases) + n, total, name),
    )


def _with_equal_windows(
    specs: list[AttentionSpec], rows: Sequence[Row], length: int
) -> list[AttentionSpec]:
    """Return the attentions and the windows of equal memory, of which only quality is measured.

    Args:
        specs: The attentions.
        rows: Rows with the windows.
        length: Tokens per row in the quality measurement; wider windows see every key.
    """
    known = {spec_label(spec) for spec in specs}
    windows = {w for w in equal_windows(rows).values() if w and w < length}
    added = [AttentionSpec(BASELINE, window=window) for window in sorted(windows)]
    return [*specs, *(spec for spec in added if spec_label(spec) not in known)]


def _cases(config: CompareConfig, specs: list[AttentionSpec], device: str) -> list[CostCase]:
    return make_cases(
        specs,
        config.lengths,
        levels=[level for level in LEVELS if level in config.levels],
        mode=config.mode,
        tokens=config.tokens,
        batch=config.batch,
        dtype=config.dtype or ("float32" if device == "cpu" else "bfloat16"),
        device=device,
    )


def _gpu_cases(cases: list[CostCase], rows: list[Row]) -> list[CostCase]:
    """Return the shortest case without a row of each attention on a GPU, at the first level."""
    known = {row["key"] for row in rows}
    found = [case for case in cases if case.device == "cuda" and case.key() not in known]
    found.sort(key=lambda case: (LEVELS.index(case.level), case.T))
    return list({case.attention: case for case in reversed(found)}.values())


def missing_quality(config: CompareConfig, info: ModelInfo) -> str:
    """Return why a comparison measures no quality, or ``""``."""
    if not config.quality:
        return "it was not requested"
    if not info.text_model:
        return "the model does not run on token ids alone"
    if config.text is None and not is_embedded(config.model):
        return "give --data a file in the model's language"
    return ""


def _quality_batch(config: CompareConfig, info: ModelInfo) -> QualityBatch:
    """Return rows to measure quality on: of embeddings, for a model that predicts no next token."""
    make: Any = make_recall_batch if info.generates else make_embedding_batch
    length = min(config.quality_length, info.max_positions or config.quality_length)
    batch: QualityBatch = make(Path(info.path), config.text, length)
    return batch


def _about(config: CompareConfig, info: ModelInfo) -> Row:
    """Return the fields that all rows of this run share."""
    geometry = info.geometry
    described = machine() | {"threads": config.threads or torch.get_num_threads()}
    return {
        "format": FORMAT,
        "attnzoo": attnzoo.__version__,
        "commit": commit(),
        "machine": described | {"transformers": transformers.__version__},
        "model": {
            "name": info.name,
            "sha": info.sha,
            "H": geometry.num_heads,
            "Hkv": geometry.num_key_heads,
            "D": geometry.head_dim,
            "E": geometry.value_dim,
        },
    }


def _measure_costs(
    cases: list[CostCase],
    info: ModelInfo,
    workers: Workers,
    config: CompareConfig,
    about: Row,
    rows: list[Row],
    on_progress: Callable[[int, str], None],
) -> list[Row]:
    """Measure and append every case that has no row; return all rows."""
    known = {row["key"]: row for row in rows if row["kind"] == "cost"}
    failed: dict[tuple[str, ...], CostCase] = {}
    curves: dict[tuple[str, ...], dict[int, Row]] = defaultdict(dict)
    found: dict[str, Row] = {}
    baselines = {_place(case): case for case in cases if is_baseline(case)}

    def run(case: CostCase, **marks: Any) -> Row:
        other = baselines.get(_place(case))
        row = None if other is None or other == case else found.get(other.key())
        limit = workers.timeout / 2
        fits = row is not None and row["status"] == OK and PAIRED * row["median_ms"] < 1000 * limit
        pair = (other, limit) if fits else ()
        arguments = (case, info, config.min_run_time, *pair)
        result = workers.run(measure_cost, *arguments, device=case.device)
        return save(case, {**result, **marks})

    def save(case: CostCase, result: Row) -> Row:
        row: Row = {**about, "kind": "cost", "key": case.key(), **asdict(case), **result}
        return append(config.out, row | {"exact": is_exact(case.spec)})

    for number, case in enumerate(cases):
        on_progress(number, f"{case.level}, {case.T} tokens, {case.attention}")
        curve = (case.device, case.level, case.mode, json.dumps(case.spec))
        row = known.get(case.key())
        if row is None:
            times = {n: x["median_ms"] / 1000 for n, x in curves[curve].items()}
            reason = (
                f"it already failed at {failed[curve].T} tokens"
                if curve in failed
                else predicted_timeout(times, case, workers.timeout)
            )
            row = save(case, {"status": NOT_RUN, "reason": reason}) if reason else run(case)
        found[case.key()] = row
        if row["status"] in STOPS:
            failed.setdefault(curve, case)
        elif row["status"] == OK:
            curves[curve][case.T] = row
            for again in measure_again(curves[curve], case):
                on_progress(number, f"again: {case.level}, {again.T} tokens, {case.attention}")
                new = run(again, again=True)
                if new["status"] == OK:
                    found[again.key()] = curves[curve][again.T] = new
            for length in busy_lengths(curves[curve], case):
                marked = curves[curve][length]
                if not marked.get("busy"):
                    marked = append(config.out, {**marked, "busy": True})
                    found[marked["key"]] = curves[curve][length] = marked
    return [row for row in rows if row["key"] not in found] + list(found.values())


def is_baseline(case: CostCase) -> bool:
    """Return whether a case is that of the exact attention beside which others are timed."""
    return bool(case.spec["backend"] == BASELINE and is_exact(case.spec))


def _place(case: CostCase) -> tuple[Any, ...]:
    """Return what cases that are compared have in common."""
    return case.device, case.level, case.mode, case.T, case.B, case.dtype


def busy_lengths(rows: Mapping[int, Row], case: CostCase) -> list[int]:
    """Return the lengths whose times those of longer inputs contradict.

    Args:
        rows: Measured rows of one attention by length.
        case: A case of the same attention, level, mode and device.
    """
    fastest = {n: row["min_ms"] / row["B"] for n, row in rows.items()}
    return contradicted(fastest, all_tokens=case.device == "cpu" and case.mode != "decode")


def measure_again(rows: Mapping[int, Row], case: CostCase) -> list[CostCase]:
    """Return the cases to measure again: contradicted ones, and the last one, once each."""
    wrong = busy_lengths(rows, case)
    lengths = [n for n in (*wrong, case.T) if not rows[n].get("again")] if wrong else []
    return [replace(case, T=n, B=rows[n]["B"]) for n in lengths]


def predicted_timeout(seconds: dict[int, float], case: CostCase, limit: float) -> str:
    """Return why a case would exceed the time limit, extrapolated from shorter ones; "" if not.

    Args:
        seconds: Seconds per call by length, of the same attention.
        case: The next case.
        limit: Time limit of the case in seconds.
    """
    if len(seconds) < 2:
        return ""
    before, last = sorted(seconds)[-2:]
    exponent = math.log(seconds[last] / seconds[before]) / math.log(last / before)
    exponent = min(max(exponent, 1.0), 2.0)  # values outside are measurement noise
    expected = CALLS_PER_CASE * seconds[last] * (case.T / last) ** exponent
    if expected <= limit:
        return ""
    return f"it would take {expected:.0f} s, extrapolated from {before} and {last} tokens"


def _measure_quality(
    specs: list[AttentionSpec],
    info: ModelInfo,
    workers: Workers,
    out: Path,
    about: Row,
    rows: list[Row],
    batch: QualityBatch,
    on_progress: Callable[[int, str], None],
) -> list[Row]:
    """Measure and append the quality of every attention that has no such row; return all rows."""
    known = {row["key"] for row in rows}
    patient = Workers(
        threads=workers.threads, timeout=4 * workers.timeout, memory_bytes=workers.memory_bytes
    )
    count, length = batch.shape
    for number, spec in enumerate(specs):
        (case,) = make_cases(
            [spec],
            [length],
            levels=["model"],
            mode="forward",
            tokens=0,
            batch=count,
            dtype="float32",
            device="cpu",
        )
        on_progress(number, f"quality, {case.attention}")
        key = f"quality {batch.sha} {case.key()}"
        if key in known:
            continue
        result = patient.run(measure_quality, case, info, batch)
        row: dict[str, Any] = {**about, "kind": "quality", "key": key, **asdict(case), **result}
        rows = [*rows, append(out, row | {"exact": is_exact(case.spec)})]
    return rows


def group_costs(rows: list[Row]) -> dict[tuple[str, str, str], list[Row]]:
    """Return the rows of costs by device, level and mode."""
    groups: dict[tuple[str, str, str], list[Row]] = defaultdict(list)
    for row in rows:
        if row["kind"] == "cost":
            groups[row["device"], row["level"], row["mode"]].append(row)
    return dict(groups)
