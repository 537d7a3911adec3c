"""Run a comparison: check the request, measure what has no row yet, return all rows."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
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
)
from attnzoo.compare.report import EQUAL, equal_windows
from attnzoo.compare.workers import (
    NOT_RUN,
    OK,
    OUT_OF_MEMORY,
    REFUSED,
    TIMED_OUT,
    Workers,
    check_case_kernels,
    free_memory,
    measure_cost,
    measure_quality,
)
from attnzoo.errors import AttnzooError, SpecError, did_you_mean
from attnzoo.evaluation.embeddings import EmbeddingEvalBatch, make_embedding_batch
from attnzoo.evaluation.equal_memory import equal_window
from attnzoo.evaluation.generation import RecallEvalBatch, make_recall_batch
from attnzoo.evaluation.models import (
    embedded_name,
    is_embedded,
    max_positions,
    model_path,
    spec_label,
)
from attnzoo.evaluation.results import FORMAT, Row, append, open_results
from attnzoo.evaluation.timing import machine
from attnzoo.hf.configs import has_field, read_field
from attnzoo.hf.layers import attention_layers
from attnzoo.hf.saving.files import dtype_name, empty_model, hash_weights, saved_dtype
from attnzoo.report.output_path import check_folder
from attnzoo.spec import AttentionSpec

STOPS = {OUT_OF_MEMORY, TIMED_OUT}  # after these, longer cases of the attention are not run
CHECK_SECONDS = 3600.0  # time limit of the checks of all GPU kernels
PAIRED = 5  # calls of a baseline beside a case: a warm-up, one to estimate, three rounds
QualityBatch = RecallEvalBatch | EmbeddingEvalBatch
OnProgress = Callable[[str], None]


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
        dtype: Data type; when ``None``, time is measured in float32 on a CPU and bfloat16 on a GPU,
            and caches are counted in the dtype of the saved weights.
        devices: Devices; all available ones when ``None``.
        text: File to evaluate quality on; the standard library for the embedded model.
        quality: Whether to measure quality.
        quality_length: Tokens per row in the quality measurement.
        min_run_time: Duration of all timed calls of a case together in seconds, at least two calls.
        timeout: Time limit of a case in seconds.
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
    dtype: str | None = None
    devices: Sequence[str] | None = None
    text: Path | None = None
    quality: bool = True
    quality_length: int = 2048
    min_run_time: float = 0.5
    timeout: float = 60.0
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
    available = ("cpu", "cuda")[: 1 + torch.cuda.is_available()]
    devices = list(available if config.devices is None else config.devices)
    for what, values, known in (
        ("mode", [config.mode], MODES),
        ("level", config.levels, LEVELS),
        ("device", devices, ("cpu", "cuda")),
    ):
        for value in values or [""]:
            if value not in known:
                raise SpecError(
                    f"No {what} is called {value!r}.{did_you_mean(value, known)} "
                    f"Available: {', '.join(known)}."
                )
    if config.mode == "decode" and not info.generates:
        reason = "has no head that predicts tokens" if info.causal else "is not causal"
        raise SpecError(
            f"{info.name} {reason}, so it cannot decode; compare it in --mode forward or "
            "train, or give a causal language model"
        )
    if not info.text_model and set(config.levels) - {"op"}:
        raise SpecError(
            f"{info.name} does not run on token ids alone (it is an encoder-decoder or takes "
            "other inputs); use --level op, which measures its attention backend on random inputs"
        )
    if config.dtype is not None and not isinstance(getattr(torch, config.dtype, None), torch.dtype):
        raise SpecError(f"No dtype is called {config.dtype!r}; use for example float32 or bfloat16")
    if "cuda" in devices and not torch.cuda.is_available():
        raise SpecError("torch finds no CUDA device; use --device cpu")
    specs = list(config.specs or default_specs(None, causal=info.causal))
    if not any(is_exact(spec.to_dict()) for spec in specs):
        specs.insert(0, AttentionSpec(BASELINE))
    return specs, devices


def compare(
    config: CompareConfig,
    on_progress: OnProgress = lambda text: None,
    log: Callable[[str], object] = lambda text: None,
) -> list[Row]:
    """Measure every case that has no row in the results folder; return the rows of this machine.

    Args:
        config: Options of the comparison.
        on_progress: Called with what is measured now.
        log: Called with why no quality is measured, and the verdicts about GPU kernels.

    Raises:
        AttnzooError: An option is invalid; nothing is measured then.
    """
    info = read_model_info(config.model)
    specs, devices = check(config, info)
    info = replace(info, dtype=config.dtype or info.dtype)
    check_folder(config.out)
    batch: QualityBatch | None = None
    if missing := missing_quality(config, info):
        log(f"Quality is not measured: {missing}.")
    else:
        make: Any = make_recall_batch if info.generates else make_embedding_batch
        longest = min(config.quality_length, info.max_positions or config.quality_length)
        batch = make(Path(info.path), config.text, longest)
    cases = _cases(config, specs, devices)
    run = Comparison(config, info, on_progress)
    if unchecked := _gpu_cases(cases, run.rows):
        on_progress("checking GPU kernels, up to a minute each, once")
        patient = Workers(threads=run.threads, timeout=CHECK_SECONDS, memory_bytes=0)
        for text in patient.run(check_case_kernels, unchecked, info).get("checks", ()):
            log(text)
    if batch:
        if info.generates:
            specs = run.add_equal_windows(specs, batch.shape[1])
        run.measure_quality(specs, batch)
    run.measure_costs(cases)
    return list(run.rows.values())


class Comparison:
    """The rows of a comparison, by key, and what measures those that are missing.

    Args:
        config: Options of the comparison.
        info: The model.
        on_progress: Called with what is measured now.

    Raises:
        AttnzooError: Earlier results are of another model, or cannot be read.
    """

    def __init__(self, config: CompareConfig, info: ModelInfo, on_progress: OnProgress) -> None:
        self.config, self.info, self.on_progress = config, info, on_progress
        self.threads = config.threads or torch.get_num_threads()
        geometry = info.geometry
        self.about: Row = {
            "format": FORMAT,
            "attnzoo": attnzoo.__version__,
            "machine": machine()
            | {"threads": self.threads, "transformers": transformers.__version__},
            "model": {
                "name": info.name,
                "sha": info.sha,
                "H": geometry.num_heads,
                "Hkv": geometry.num_key_heads,
                "D": geometry.head_dim,
                "E": geometry.value_dim,
            },
        }
        earlier = open_results(config.out, fresh=config.fresh)
        for row in earlier:
            if row["model"]["sha"] != info.sha:
                raise SpecError(
                    f"{str(config.out)!r} holds results of another model ({row['model']['name']}); "
                    "give --output-dir another folder, or --fresh to start over"
                )
        machines = self.about["machine"]
        self.rows = {row["key"]: row for row in earlier if row["machine"] == machines}

    def workers(self, timeout: float) -> Workers:
        """Return processes with a time limit in seconds, and limits of memory."""
        free, module = int(0.75 * free_memory()), self.info.module
        return Workers(threads=self.threads, timeout=timeout, memory_bytes=free, preload=[module])

    def save(self, kind: str, key: str, case: CostCase, result: Row) -> Row:
        """Append a row with a result."""
        row: Row = {**self.about, "kind": kind, "key": key, **asdict(case), **result}
        row = append(self.config.out, row | {"exact": is_exact(case.spec)})
        self.rows[key] = row
        return row

    def add_equal_windows(self, specs: list[AttentionSpec], length: int) -> list[AttentionSpec]:
        """Compute the windows of equal memory at the longest length, and add them to the specs.

        Args:
            specs: The attentions.
            length: Tokens per row in the quality measurement; wider windows see every key.
        """
        self.on_progress("windows of equal memory")
        path, longest = Path(self.info.path), max(self.config.lengths)
        for spec in specs:
            case = CostCase.of(spec, longest, dtype=self.info.dtype)
            if is_exact(case.spec) or (key := f"{EQUAL} {case.key()}") in self.rows:
                continue
            try:
                found = equal_window(path, spec, longest, getattr(torch, self.info.dtype))
                result: Row = {"status": OK, "window": found.widest or None, **found.to_dict()}
            except AttnzooError as error:
                result = {"status": REFUSED, "reason": str(error)}
            self.save(EQUAL, key, case, result)
        windows = {w for w in equal_windows(list(self.rows.values())).values() if w and w < length}
        added = [AttentionSpec(BASELINE, window=window) for window in sorted(windows)]
        known = {spec_label(spec) for spec in specs}
        return [*specs, *(spec for spec in added if spec_label(spec) not in known)]

    def measure_quality(self, specs: Sequence[AttentionSpec], batch: QualityBatch) -> None:
        """Measure the quality of every attention that has no such row."""
        workers = self.workers(4 * self.config.timeout)
        count, length = batch.shape
        for number, spec in enumerate(specs, 1):
            case = CostCase.of(spec, length, B=count)
            key = f"quality {batch.sha} {case.key()}"
            if key not in self.rows:
                self.on_progress(f"quality {number}/{len(specs)}  {case.attention}")
                self.save(
                    "quality", key, case, workers.run(measure_quality, case, self.info, batch)
                )

    def measure_costs(self, cases: Sequence[CostCase]) -> None:
        """Measure every case that has no row, beside the baseline; the rows come last, in order."""
        workers, failed = self.workers(self.config.timeout), dict[str, int]()
        baselines = {
            _place(x): x for x in cases if x.spec["backend"] == BASELINE and is_exact(x.spec)
        }
        for number, case in enumerate(cases, 1):
            text = f"{case.level}, {case.T} tokens, {case.attention}"
            self.on_progress(f"{number}/{len(cases)}  {text}")
            curve = repr((case.device, case.level, case.mode, case.spec))
            row = self.rows.pop(case.key(), None)
            if row is None and curve in failed:
                reason = f"it already failed at {failed[curve]} tokens"
                row = self.save("cost", case.key(), case, {"status": NOT_RUN, "reason": reason})
            elif row is None:
                pair = self._baseline(baselines.get(_place(case)), case)
                given = (case, self.info, self.config.min_run_time, *pair)
                result = workers.run(measure_cost, *given, device=case.device)
                row = self.save("cost", case.key(), case, result)
            self.rows[case.key()] = row
            if row["status"] in STOPS:
                failed.setdefault(curve, case.T)

    def _baseline(self, other: CostCase | None, case: CostCase) -> tuple[Any, ...]:
        """Return the baseline beside which a case is timed, and the time limit of all rounds."""
        row = None if other is None or other == case else self.rows.get(other.key())
        limit = self.config.timeout / 2
        fits = row is not None and row["status"] == OK and PAIRED * row["median_ms"] < 1000 * limit
        return (other, limit) if fits else ()


def _cases(
    config: CompareConfig, specs: Sequence[AttentionSpec], devices: Sequence[str]
) -> list[CostCase]:
    """Return the cases by increasing length, so that failed attentions are not tried longer."""
    dtypes = {"cpu": config.dtype or "float32", "cuda": config.dtype or "bfloat16"}
    one = config.mode == "decode"
    return [
        CostCase.of(
            spec,
            length,
            level=level,
            mode=config.mode,
            B=1 if one else max(1, config.tokens // length),
            dtype=dtypes[device],
            device=device,
        )
        for device in devices
        for level in LEVELS
        if level in config.levels
        for length in sorted(config.lengths)
        for spec in specs
    ]


def _place(case: CostCase) -> tuple[Any, ...]:
    """Return what cases that are compared have in common."""
    return case.device, case.level, case.mode, case.T, case.B, case.dtype


def _gpu_cases(cases: Sequence[CostCase], known: Collection[str]) -> list[CostCase]:
    """Return the shortest case without a row of each attention on a GPU, at the first level."""
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
