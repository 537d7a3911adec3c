"""Run a comparison: check the request, measure what has no row yet, return all rows."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from attnzoo.compare.cases import BASELINE, LEVELS, MODES, CostCase, ModelInfo, is_exact
from attnzoo.compare.report import EQUAL, equal_windows
from attnzoo.compare.workers import (
    NOT_RUN,
    OK,
    OUT_OF_MEMORY,
    REFUSED,
    TIMED_OUT,
    Workers,
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
    spec_label,
)
from attnzoo.evaluation.results import Results, Row
from attnzoo.hf.configs import has_field, read_field
from attnzoo.hf.layers import attention_layers
from attnzoo.hf.saving.files import dtype_name, empty_model, hash_weights, saved_dtype
from attnzoo.report.output_path import check_folder
from attnzoo.spec import AttentionSpec

STOPS = {OUT_OF_MEMORY, TIMED_OUT}  # after these, longer cases of the attention are not run
PAIRED = 5  # calls of a baseline beside a case: a warm-up, one to estimate, three rounds
QualityBatch = RecallEvalBatch | EmbeddingEvalBatch
OnProgress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """Options of a comparison.

    Attributes:
        model: The model.
        lengths: T, increasing.
        specs: The attentions; flash is added if none is exact.
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
        fresh: Whether to start over instead of resuming from earlier results.
    """

    model: ModelInfo
    lengths: Sequence[int]
    out: Path
    specs: Sequence[AttentionSpec]
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
    fresh: bool = False


def read_model_info(path: Path) -> ModelInfo:
    """Return what a comparison needs to know about a saved model, without loading its weights.

    Raises:
        SpecError: There is no model, or it has no attention layer that can be swapped.
    """
    empty = empty_model(path)
    layers = attention_layers(empty)
    if not layers:
        raise SpecError(
            f"{str(path)!r} has no layer that calls transformers' attention interface, so its "
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


def check(config: CompareConfig) -> tuple[list[AttentionSpec], list[str]]:
    """Validate the options and return the attentions, exact ones first, and the devices.

    Raises:
        SpecError: An option is unknown or does not fit the model.
    """
    info, available = config.model, ("cpu", "cuda")[: 1 + torch.cuda.is_available()]
    devices = [*dict.fromkeys(available if config.devices is None else config.devices)]
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
    dtype = getattr(torch, config.dtype or "float32", None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise SpecError(
            f"No dtype of weights is called {config.dtype!r}; use for example float32 or bfloat16"
        )
    if "cuda" in devices and not torch.cuda.is_available():
        raise SpecError("torch finds no CUDA device; use --device cpu")
    specs = list({spec_label(spec): spec for spec in config.specs}.values())
    specs.sort(key=lambda spec: not is_exact(spec.to_dict()))
    exact = specs and is_exact(specs[0].to_dict())
    return specs if exact else [AttentionSpec(BASELINE), *specs], devices


def compare(
    config: CompareConfig,
    on_progress: OnProgress = lambda text: None,
    log: Callable[[str], object] = lambda text: None,
) -> list[Row]:
    """Measure every case that has no row in the results folder; return the rows of these cases.

    Args:
        config: Options of the comparison.
        on_progress: Called with what is measured now.
        log: Called with why no quality is measured.

    Raises:
        AttnzooError: An option is invalid; nothing is measured then.
    """
    specs, devices = check(config)
    info = replace(config.model, dtype=config.dtype or config.model.dtype)
    check_folder(config.out)
    batch: QualityBatch | None = None
    if missing := missing_quality(config):
        log(f"Quality is not measured: {missing}.")
    else:
        make: Any = make_recall_batch if info.generates else make_embedding_batch
        longest = min(config.quality_length, info.max_positions or config.quality_length)
        batch = make(Path(info.path), config.text, longest)
    cases = _cases(config, specs, devices)
    run = Comparison(config, info, on_progress)
    if batch:
        if info.generates:
            specs = run.add_equal_windows(specs, batch.shape[1])
        run.measure_quality(specs, batch)
    run.measure_costs(cases)
    return run.rows


class Comparison:
    """The rows of a comparison, in order, and what measures those that its folder lacks.

    Args:
        config: Options of the comparison.
        info: The model.
        on_progress: Called with what is measured now.

    Raises:
        AttnzooError: Earlier results cannot be read.
    """

    def __init__(self, config: CompareConfig, info: ModelInfo, on_progress: OnProgress) -> None:
        self.config, self.info, self.on_progress = config, info, on_progress
        self.rows: list[Row] = []
        geometry = info.geometry
        model = {
            "name": info.name,
            "sha": info.sha,
            "H": geometry.num_heads,
            "Hkv": geometry.num_key_heads,
            "D": geometry.head_dim,
            "E": geometry.value_dim,
        }
        self.results = Results(config.out, fresh=config.fresh, model=model)

    def workers(self, timeout: float) -> Workers:
        """Return processes with a time limit in seconds, and limits of memory."""
        free, module = int(0.75 * free_memory()), self.info.module
        return Workers(timeout=timeout, memory_bytes=free, preload=[module])

    def _what(self, kind: str, case: CostCase, **fields: Any) -> Row:
        """Return all fields that describe a measurement."""
        limits = {} if kind == EQUAL else {"timeout": self.config.timeout}
        return {"kind": kind, **asdict(case), "exact": is_exact(case.spec), **limits, **fields}

    def find(self, case: CostCase) -> Row | None:
        """Return the row of a case that is timed, if there is one."""
        return self.results.find(self._cost(case))

    def _cost(self, case: CostCase) -> Row:
        return self._what("cost", case, min_run_time=self.config.min_run_time)

    def _add(self, what: Row, measure: Callable[[], Row]) -> Row:
        """Add the row of a measurement, and return it."""
        self.rows.append(self.results.row(what, measure))
        return self.rows[-1]

    def add_equal_windows(self, specs: list[AttentionSpec], length: int) -> list[AttentionSpec]:
        """Compute the windows of equal memory at the longest length, and add them to the specs.

        Args:
            specs: The attentions.
            length: Tokens per row in the quality measurement; wider windows see every key.
        """
        self.on_progress("windows of equal memory")
        longest = max(self.config.lengths)
        for spec in specs:
            case = CostCase.of(spec, longest, dtype=self.info.dtype)
            if not is_exact(case.spec):
                self._add(self._what(EQUAL, case), partial(self._equal_window, spec, longest))
        windows = {w for w in equal_windows(self.rows).values() if w and w < length}
        added = [AttentionSpec(BASELINE, window=window) for window in sorted(windows)]
        known = {spec_label(spec) for spec in specs}
        return [*specs, *(spec for spec in added if spec_label(spec) not in known)]

    def _equal_window(self, spec: AttentionSpec, length: int) -> Row:
        dtype = getattr(torch, self.info.dtype)
        try:
            found = equal_window(Path(self.info.path), spec, length, dtype)
        except AttnzooError as error:
            return {"status": REFUSED, "reason": str(error)}
        return {"status": OK, "window": found.widest or None, **found.to_dict()}

    def measure_quality(self, specs: Sequence[AttentionSpec], batch: QualityBatch) -> None:
        """Measure the quality of every attention that has no such row."""
        workers = self.workers(4 * self.config.timeout)
        count, length = batch.shape
        for number, spec in enumerate(specs, 1):
            case = CostCase.of(spec, length, B=count)
            self.on_progress(f"quality {number}/{len(specs)}  {case.attention}")
            what = self._what("quality", case, data=batch.sha)
            self._add(what, partial(workers.run, measure_quality, case, self.info, batch))

    def measure_costs(self, cases: Sequence[CostCase]) -> None:
        """Measure every case that has no row, beside the baseline."""
        workers, failed = self.workers(self.config.timeout), dict[str, int]()
        baselines = {
            _place(x): x for x in cases if x.spec["backend"] == BASELINE and is_exact(x.spec)
        }
        for number, case in enumerate(cases, 1):
            self.on_progress(
                f"{number}/{len(cases)}  {case.level}, {case.T} tokens, {case.attention}"
            )
            curve = repr((case.device, case.level, case.mode, case.spec))
            measure: Callable[[], Row]
            if curve in failed:
                reason = f"it already failed at {failed[curve]} tokens"
                measure = partial(dict, status=NOT_RUN, reason=reason)
            else:
                pair = self._baseline(baselines.get(_place(case)), case)
                given = (case, self.info, self.config.min_run_time, *pair)
                measure = partial(workers.run, measure_cost, *given, device=case.device)
            row = self._add(self._cost(case), measure)
            if row["status"] in STOPS:
                failed.setdefault(curve, case.T)

    def _baseline(self, other: CostCase | None, case: CostCase) -> tuple[Any, ...]:
        """Return the baseline beside which a case is timed, and the time limit of all rounds."""
        row = None if other is None or other == case else self.find(other)
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


def missing_quality(config: CompareConfig) -> str:
    """Return why a comparison measures no quality, or ``""``."""
    if not config.quality:
        return "it was not requested"
    if not config.model.text_model:
        return "the model does not run on token ids alone"
    if config.text is None and not is_embedded(config.model.path):
        return "give --data a file in the model's language"
    return ""
