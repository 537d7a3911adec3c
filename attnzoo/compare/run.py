"""Runs a comparison: checks all that was asked for, measures what is not measured yet."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

import attnzoo
from attnzoo.bench import machine
from attnzoo.compare.cases import (
    LEVELS,
    MODES,
    Case,
    Subject,
    default_specs,
    is_exact,
    make_cases,
)
from attnzoo.compare.measure import NOT_RUN, OK, OUT_OF_MEMORY, TIMED_OUT, measure_case
from attnzoo.compare.process import Workers
from attnzoo.compare.quality import Asked, measure_quality, quality_inputs
from attnzoo.compare.results import FORMAT, Row, append, commit, prepare
from attnzoo.demo.text import embedded_model_path, longest_context
from attnzoo.errors import SpecError, did_you_mean
from attnzoo.integrations.files import empty_model
from attnzoo.integrations.layers import attention_layers
from attnzoo.spec import AttentionSpec

EMBEDDED = "embedded"  # the name of the model that ships with the package
STOPS = {OUT_OF_MEMORY, TIMED_OUT}  # what ends a curve: longer cases are not tried
CALLS = 3  # that a slow case consists of: one to warm up, two that are timed
Tell = Callable[[int, int, str], None]  # cases done, of how many, and what comes now


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is asked for.

    Attributes:
        model: Folder of a saved model, or ``"embedded"``.
        lengths: T, rising.
        specs: The attentions; ``None`` takes every backend.
        out: Folder of results.
        levels: Of ``LEVELS``.
        mode: Of ``MODES``.
        tokens: Of a call; rows are as many as fit.
        batch: Rows, in place of that.
        dtype: Of weights and inputs; float32 on a CPU and bfloat16 on a GPU when ``None``.
        devices: Where; all there are when ``None``.
        text: File to judge quality on; the standard library with the embedded model.
        quality: Whether quality is judged.
        quality_length: Tokens of a row that is judged.
        timeout: Seconds a case may take.
        memory_gib: What a case may allocate; three quarters of what is free on a CPU, and all of
            a GPU, when ``None``.
        threads: Of torch.
        fresh: Whether earlier results are set aside.
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
    timeout: float = 60.0
    memory_gib: float | None = None
    threads: int | None = None
    fresh: bool = False


def find_subject(model: str) -> Subject:
    """Read what is needed of a model, its weights left alone.

    Raises:
        SpecError: There is none, or it has no attention layer that can be swapped.
    """
    path = embedded_model_path() if model == EMBEDDED else Path(model)
    empty = empty_model(path)
    layers = attention_layers(empty)
    if not layers:
        raise SpecError(f"{model!r} has no attention layer that goes through transformers")
    causal = all(layer.geometry.causal for layer in layers)
    sizes = [(name, tuple(x.shape)) for name, x in empty.state_dict().items()]
    config = (path / "config.json").read_bytes()
    return Subject(
        path=str(path),
        name=path.resolve().name if model != EMBEDDED else "the embedded model",
        sha=hashlib.sha256(config + repr(sizes).encode()).hexdigest()[:12],
        geometry=layers[0].geometry,
        causal=causal,
        generates=causal and empty.can_generate(),
        longest=longest_context(path),
        trained=layers[0].geometry.max_length,
        text_model=hasattr(empty.config, "vocab_size")
        and not getattr(empty.config, "is_encoder_decoder", False),
        module=type(empty).__module__,
    )


def check(plan: Plan, subject: Subject) -> tuple[list[AttentionSpec], list[str]]:
    """Refuse what cannot run; returns attentions and devices.

    Raises:
        SpecError: Something asked for is unknown or does not fit the model.
    """
    for what, value, known in (
        ("mode", plan.mode, MODES),
        *(("level", v, LEVELS) for v in plan.levels),
    ):
        if value not in known:
            raise SpecError(
                f"No {what} is called {value!r}.{did_you_mean(value, known)} "
                f"Available: {', '.join(known)}."
            )
    if plan.mode == "decode" and not subject.generates:
        lacks = "has no head that predicts tokens" if subject.causal else "is not causal"
        raise SpecError(
            f"{subject.name} {lacks}, so it cannot decode; use --mode forward or train, or give a "
            "causal language model"
        )
    if not subject.text_model and set(plan.levels) - {"op"}:
        raise SpecError(
            f"{subject.name} does not run on one row of tokens alone (it is an encoder-decoder, or "
            "takes other inputs); use --level op, which measures its attention by itself"
        )
    if plan.dtype is not None and not isinstance(getattr(torch, plan.dtype, None), torch.dtype):
        raise SpecError(f"No dtype is called {plan.dtype!r}; float32 and bfloat16 are usual")
    numbers = ("tokens", "batch", "timeout", "threads", "memory_gib", "quality_length")
    for name in numbers:
        value = getattr(plan, name)
        if value is not None and value <= 0:
            raise SpecError(f"{name} must be above 0, got {value}")
    devices = list(plan.devices or ("cpu", *(["cuda"] if torch.cuda.is_available() else [])))
    if "cuda" in devices and not torch.cuda.is_available():
        raise SpecError("There is no CUDA device here that torch can use; use --device cpu")
    specs = list(plan.specs or default_specs(None, causal=subject.causal))
    if not any(is_exact(spec.to_dict()) for spec in specs):
        specs.insert(0, AttentionSpec("flash"))  # what all others are measured against
    return specs, devices


def compare(plan: Plan, tell: Tell = lambda done, total, name: None) -> list[Row]:
    """Measure what is asked for and is not in the folder yet; returns the rows of this machine.

    Raises:
        AttnzooError: Something was given that cannot be used; nothing is measured then.
    """
    subject = find_subject(plan.model)
    specs, devices = check(plan, subject)
    asked = _judged(plan, subject)
    cases = [case for device in devices for case in _cases(plan, specs, device)]
    earlier = prepare(plan.out, fresh=plan.fresh)
    about = _about(plan, subject)
    for row in earlier:
        if row["model"]["sha"] != subject.sha:
            raise SpecError(
                f"{str(plan.out)!r} holds results of another model ({row['model']['name']}); give "
                "--out another folder, or --fresh to set them aside"
            )
    rows = [row for row in earlier if row["machine"] == about["machine"]]
    memory = {"cpu": int(0.75 * _free_memory())}  # a GPU's own is bound enough
    if plan.memory_gib:
        memory = dict.fromkeys(devices, int(plan.memory_gib * 2**30))
    workers = Workers(
        threads=about["machine"]["threads"],
        timeout=plan.timeout,
        memory_bytes={device: count for device, count in memory.items() if count},
        preload=[subject.module],
    )
    total = len(cases) + (len(specs) if asked else 0)
    rows = _scale(cases, subject, workers, plan.out, about, rows, lambda n, x: tell(n, total, x))
    if asked:
        rows = _judge(specs, subject, workers, plan, about, rows, asked, total, tell)
    return rows


def _cases(plan: Plan, specs: list[AttentionSpec], device: str) -> list[Case]:
    return make_cases(
        specs,
        plan.lengths,
        levels=[level for level in LEVELS if level in plan.levels],
        mode=plan.mode,
        tokens=plan.tokens,
        batch=plan.batch,
        dtype=plan.dtype or ("float32" if device == "cpu" else "bfloat16"),
        device=device,
    )


def _judged(plan: Plan, subject: Subject) -> Asked | None:
    """Prepare text to judge quality on, where that can be done; refuses a text that cannot be."""
    if not plan.quality or not subject.generates or not subject.text_model:
        return None
    if plan.text is None and plan.model != EMBEDDED:
        return None
    length = min(plan.quality_length, subject.longest or plan.quality_length)
    return quality_inputs(Path(subject.path), plan.text, length)


def _about(plan: Plan, subject: Subject) -> Row:
    """Return what all rows of this run have in common."""
    geometry = subject.geometry
    described = machine() | {"threads": plan.threads or torch.get_num_threads()}
    return {
        "format": FORMAT,
        "attnzoo": attnzoo.__version__,
        "commit": commit(),
        "machine": described | {"transformers": transformers.__version__},
        "model": {
            "name": subject.name,
            "sha": subject.sha,
            "H": geometry.num_heads,
            "Hkv": geometry.num_key_heads,
            "D": geometry.head_dim,
            "E": geometry.value_dim,
        },
    }


def _free_memory() -> int:
    """Return the bytes of memory that are free on this machine, 0 where it cannot be known."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable"):
                    return 1024 * int(line.split()[1])
        return 0
    except OSError:
        names = getattr(os, "sysconf_names", {})
        if "SC_PHYS_PAGES" not in names:
            return 0
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _scale(
    cases: list[Case],
    subject: Subject,
    workers: Workers,
    out: Path,
    about: Row,
    rows: list[Row],
    tell: Callable[[int, str], None],
) -> list[Row]:
    """Measure every case that has no row, and append its row."""
    known = {row["key"]: row for row in rows if row["kind"] == "cost"}
    failed: dict[tuple[str, ...], Case] = {}
    taken: dict[tuple[str, ...], dict[int, float]] = defaultdict(dict)
    found = []
    for number, case in enumerate(cases):
        tell(number, f"{case.level}, {case.T} tokens, {case.attention}")
        curve = (case.device, case.level, case.mode, json.dumps(case.spec))
        row = known.get(case.key())
        if row is None:
            reason = (
                f"at {failed[curve].T} tokens it came to an end before"
                if curve in failed
                else too_long(taken[curve], case, workers.timeout)
            )
            result = (
                {"status": NOT_RUN, "reason": reason}
                if reason
                else workers.run(measure_case, case, subject, device=case.device)
            )
            row = {**about, "kind": "cost", "key": case.key(), **asdict(case), **result}
            row = append(out, row | {"exact": is_exact(case.spec)})
        if row["status"] in STOPS:
            failed.setdefault(curve, case)
        elif row["status"] == OK:
            taken[curve][case.T] = row["median_ms"] / 1000
        found.append(row)
    keys = {row["key"] for row in found}
    return [row for row in rows if row["key"] not in keys] + found


def too_long(taken: dict[int, float], case: Case, limit: float) -> str:
    """Say why a case would not end in time, if its calls go on growing as the last two did.

    Args:
        taken: Seconds a call, by length, of the same attention.
        case: What comes next.
        limit: Seconds that a case may take.
    """
    if len(taken) < 2:
        return ""
    before, last = sorted(taken)[-2:]
    power = math.log(taken[last] / taken[before]) / math.log(last / before)
    power = min(max(power, 1.0), 2.0)  # what is beyond was a disturbance
    expected = CALLS * taken[last] * (case.T / last) ** power
    if expected <= limit:
        return ""
    return f"it would take {expected:.0f} s, as it grew from {before} to {last} tokens"


def _judge(
    specs: list[AttentionSpec],
    subject: Subject,
    workers: Workers,
    plan: Plan,
    about: Row,
    rows: list[Row],
    asked: Asked,
    total: int,
    tell: Tell,
) -> list[Row]:
    """Judge the quality of every attention that has no such row."""
    known = {row["key"] for row in rows}
    slow = Workers(
        threads=workers.threads, timeout=4 * workers.timeout, memory_bytes=workers.memory_bytes
    )
    for number, spec in enumerate(specs):
        case = make_cases(
            [spec],
            [asked.plain.shape[1]],
            levels=["model"],
            mode="forward",
            tokens=0,
            batch=len(asked.plain),
            dtype="float32",
            device="cpu",
        )[0]
        tell(total - len(specs) + number, total, f"quality, {case.attention}")
        key = f"quality {asked.sha} {case.key()}"
        if key in known:
            continue
        result = slow.run(measure_quality, case, subject, asked)
        row: dict[str, Any] = {**about, "kind": "quality", "key": key, **asdict(case), **result}
        rows = [*rows, append(plan.out, row | {"exact": is_exact(case.spec)})]
    return rows


def curves_of(rows: list[Row]) -> dict[tuple[str, str, str], list[Row]]:
    """Group the rows of costs by device, level and mode."""
    groups: dict[tuple[str, str, str], list[Row]] = defaultdict(list)
    for row in rows:
        if row["kind"] == "cost":
            groups[row["device"], row["level"], row["mode"]].append(row)
    return dict(groups)
