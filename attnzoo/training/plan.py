"""Plan of a swap: an attention for each layer, chosen by measurements on text.

Layers differ: some attend locally and lose nothing with a window; others attend to distant tokens,
and training recovers little of the loss without softmax. A plan measures how the model's
predictions change when one layer is swapped, for each layer and candidate. It then restores softmax
greedily, in the layer where that reduces the change most, as often as the limit allows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from transformers import AutoModelForCausalLM

from attnzoo.errors import ConfigError, SpecError, UnsupportedError, short_repr
from attnzoo.evaluation.equal_memory import EXACT, equal_window, saved_cache_bytes
from attnzoo.evaluation.margins import mean_of, paired
from attnzoo.evaluation.memory import MAX_LENGTH
from attnzoo.evaluation.models import max_positions, require_causal
from attnzoo.evaluation.presets import preset_options
from attnzoo.evaluation.rows import Rows
from attnzoo.hf.names import NAME
from attnzoo.hf.pretrained import load_pretrained
from attnzoo.hf.stock.classes import Windows, classes_for, stock_class
from attnzoo.hf.swap import restore, swap
from attnzoo.report.output_path import atomic_write
from attnzoo.spec import AttentionSpec, format_backend
from attnzoo.training.loading import load_causal, require_original
from attnzoo.training.planner import (
    Chosen,
    OnStep,
    Planner,
    SwapPlanner,
    Transferred,
    candidate_spec,
    judge,
    require_trained,
    swap_spec,
    weights_fingerprint,
)
from attnzoo.training.transfer import swapped_layers, trainable_layers

TARGET_LENGTH = 4096  # tokens for which a swap is meant, if the user does not say
CANDIDATE_BACKENDS = ("longformer", "gated_linear", "delta", "reformer")
WINDOWS = (16, 32, 64, 128, 256, 512, 1024)  # tokens, of a plan for a stock class


def preset_candidates(names: Iterable[str] = CANDIDATE_BACKENDS) -> list[str]:
    """Return the candidates of backends by their presets, such as ``"longformer:window=128"``.

    Args:
        names: Names of backends; one with options is returned as it is.

    Raises:
        UnknownBackendError: A name is unknown.
    """
    found: list[str] = []
    for name in names:
        presets = () if ":" in name else preset_options(name, "recovery")
        found += [format_backend(name, options) for options in presets] or [name]
    return found


def window_candidates(family: str, to: str) -> list[str]:
    """Return the candidates of a plan for a stock class.

    Args:
        family: ``model_type`` of the model.
        to: The class.

    Raises:
        UnsupportedError: The class does not hold the model with windows in some layers.
    """
    if family in {to, *stock_class(to).takes} and stock_class(to).windows is Windows.SOME:
        return [f"{EXACT}:window={size}" for size in WINDOWS]
    others = [x.family for x in classes_for(family) if x.windows is Windows.SOME]
    advice = f"give one of {', '.join(others)}" if others else "plan without --to"
    raise UnsupportedError(
        f"No plan can be made for a {family} in the class {to}, which does not hold it with "
        f"windows of one size in any of its layers; {advice}"
    )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A choice with the measurements that it was made by.

    Attributes:
        spec: The swap; ``None`` for a student.
        recurrent: The recurrent layers of a student, as ``attnzoo convert --recurrent`` takes them.
        chosen: The candidate of each layer that does not keep softmax.
        divergence: KL of the predictions in nats under the plan, before training.
        divergence_error: Its standard error over the rows; ``None`` with one row.
        layers: For each ``layer``, the KL by candidate when only it is swapped, ``alone``, with
            its contributions of each row, ``alone_rows``.
        weights: Fingerprint of the model's weights.
        candidates: What each candidate saves, and the window of equal memory beside it.
        left_out: Candidates that could not be judged, or save nothing, with the reason.
        transfer_from: Folder of the run whose transferred layers were measured, if any.
    """

    spec: AttentionSpec | None = None
    recurrent: str | None = None
    chosen: dict[int, str]
    divergence: float
    divergence_error: float | None
    layers: list[dict[str, Any]]
    weights: str | None = None
    candidates: list[dict[str, Any]] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    transfer_from: str | None = None

    @classmethod
    def made(cls, planner: Planner, chosen: Chosen, **more: Any) -> Self:
        """Return the plan of some layers' candidates, with the KL that it leaves."""
        kl = mean_of(planner.row_divergences(chosen))
        error = kl.error if math.isfinite(kl.error) else None
        return cls(chosen=dict(chosen), divergence=kl.mean, divergence_error=error, **more)

    def write(self, path: Path) -> None:
        """Write the plan as JSON, atomically."""
        data = {name: value for name, value in vars(self).items() if value is not None}
        if self.spec is not None:
            data["spec"] = self.spec.to_dict()
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, json.dumps(data, indent=2, allow_nan=False))


def read_plan(path: Path) -> tuple[AttentionSpec | str, str | None]:
    """Read a plan or a spec from JSON.

    Returns:
        The spec, or the recurrent layers of a student as text; and the fingerprint of the weights
        that it was made for, if the plan has one.

    Raises:
        SpecError: The file does not exist, or is neither a plan nor a spec.
    """
    try:
        data = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SpecError(
            f"{str(path)!r} is not a plan ({error}); give a file that `attnzoo plan` wrote, or a "
            "spec in JSON"
        ) from None
    if isinstance(data, Mapping) and isinstance(data.get("recurrent"), str):
        return data["recurrent"], None
    if isinstance(data, Mapping) and "spec" in data:
        weights = data.get("weights")
        if not isinstance(weights, str | None):
            raise SpecError(
                f"{str(path)!r} is not a plan: weights must be a text, got {short_repr(weights)}"
            )
        return AttentionSpec.from_dict(data["spec"]), weights
    return AttentionSpec.from_dict(data), None


def count_exact_layers(keep_softmax: float, count: int) -> int:
    """Return the number of layers that keep softmax, given a fraction below 1 or a number.

    Raises:
        ConfigError: ``keep_softmax`` is negative or more than the number of layers.
    """
    is_number = float(keep_softmax).is_integer() and keep_softmax >= 1
    largest = count if is_number else 1
    if not 0 <= keep_softmax <= largest:  # NaN too
        raise ConfigError(
            f"keep_softmax must be a fraction of the layers, such as 0.25, or their number, got "
            f"{keep_softmax} for {count} layers"
        )
    return int(keep_softmax) if is_number else round(keep_softmax * count)


class CacheLimit:
    """A limit on the cache of one sequence.

    Args:
        path: Folder of the model.
        size: The limit in bytes.
        length: Context length in tokens.
        names: The candidates.

    Raises:
        ConfigError: The smallest candidates exceed the limit.
    """

    def __init__(self, path: Path, size: int, length: int, names: Iterable[str]) -> None:
        self.size, self.length = size, length
        specs = {name: candidate_spec(name) for name in (EXACT, *names)}
        self.sizes = {name: saved_cache_bytes(path, x, length) for name, x in specs.items()}
        self.check(specs)

    def total(self, chosen: Chosen) -> int:
        """Return the cache bytes of all layers."""
        return sum(self.sizes[chosen.get(n, EXACT)][n] for n in self.sizes[EXACT])

    def least(self, names: Iterable[str]) -> int:
        """Return the cache bytes of the smallest choice."""
        known = [self.sizes[name] for name in (EXACT, *names)]
        return sum(min(sizes[n] for sizes in known) for n in self.sizes[EXACT])

    def check(self, names: Iterable[str]) -> None:
        """Raise an error if the smallest candidates exceed the limit."""
        if (least := self.least(names)) > self.size:
            raise ConfigError(
                f"The smallest candidates use {least:,} bytes after {self.length:,} tokens, more "
                f"than the limit of {self.size:,}; add a candidate with a smaller cache, such as "
                "longformer:window=32, or raise --cache-bytes"
            )

    def shrink(self, chosen: Chosen, kl: Mapping[int, Mapping[str, float]]) -> dict[int, str]:
        """Change layers to smaller candidates, at the least KL per saved byte, until all fit.

        Args:
            chosen: The candidate of each layer.
            kl: KL of each layer alone, by candidate.
        """
        sizes, chosen = self.sizes, dict(chosen)
        while self.total(chosen) > self.size:
            _, n, name = min(
                ((kl[n][new] - kl[n][old]) / (sizes[old][n] - sizes[new][n]), n, new)
                for n, old in chosen.items()
                for new in kl[n]
                if sizes[new][n] < sizes[old][n]
            )
            chosen[n] = name
        return {n: name for n, name in chosen.items() if name != EXACT}


def best_candidate(layer: Mapping[str, Any], sizes: Mapping[str, int]) -> str:
    """Return a layer's best candidate: of those as good as any, the one that saves most.

    As good is what changes predictions by no more than 2 standard errors above the least change,
    over the same rows.

    Args:
        layer: An entry of ``Plan.layers``.
        sizes: Bytes of the cache of each candidate.
    """
    alone, rows = layer["alone"], layer["alone_rows"]
    least = min(sizes, key=lambda name: alone[name])
    same = [least]
    for name in sizes:
        more = paired(rows[name], rows[least])
        if more.count > 1 and more.mean <= 2 * more.error:
            same.append(name)
    return min(same, key=lambda name: (sizes[name], alone[name]))


def choose(
    planner: Planner,
    layers: Sequence[Mapping[str, Any]],
    sizes: Mapping[str, int],
    limit: CacheLimit | int,
) -> dict[int, str]:
    """Return the candidates of the layers that do not keep softmax, chosen greedily.

    Each layer starts with its best candidate. Under a limit that these exceed, layers change to
    smaller ones. Softmax is then restored in the layer where that reduces the KL of the whole model
    most, as often as the limit allows.

    Args:
        planner: The planner.
        layers: ``Plan.layers``.
        sizes: Bytes of the cache of each candidate.
        limit: On the cache, or the number of layers that keep softmax.
    """
    chosen = {x["layer"]: best_candidate(x, sizes) for x in layers}
    if isinstance(limit, int):
        swapped = len(layers) - limit
        return planner.restore_softmax(chosen, lambda rest: len(rest) >= swapped)
    kl = {x["layer"]: {EXACT: 0.0, **{name: x["alone"][name] for name in sizes}} for x in layers}
    chosen = limit.shrink(chosen, kl)
    return planner.restore_softmax(chosen, lambda rest: limit.total(rest) <= limit.size)


def choose_one(
    planner: Planner,
    layers: Sequence[Mapping[str, Any]],
    sizes: Mapping[str, int],
    limit: CacheLimit | int,
) -> dict[int, str]:
    """Return the same with one candidate for all: that whose choice changes predictions least."""
    fits = [x for x in sizes if isinstance(limit, int) or limit.least([x]) <= limit.size]
    choices = [choose(planner, layers, {name: sizes[name]}, limit) for name in fits]
    return min(choices, key=planner.divergence)


def read_transferred(folder: Path) -> Transferred:
    """Return the layers of a saved swap that has one attention in all layers.

    Args:
        folder: A run of ``attnzoo recover`` with transfer only.

    Raises:
        SpecError: The layers have different attentions, nothing to train, or are not trained.
    """
    model: Any = load_causal(folder, None)
    layers = swapped_layers(model)
    spec = AttentionSpec.from_dict(getattr(model.config, NAME))
    if spec.layers or spec.else_ is not None or set(trainable_layers(model)) != set(layers):
        raise SpecError(
            f"{str(folder)!r} does not have one attention with parameters in all layers; transfer "
            "all layers first: attnzoo recover DIR --attention NAME --max-steps 0"
        )
    name = format_backend(spec.default.backend, spec.default.options)
    states = {layer: backend.state_dict() for layer, backend in layers.items()}
    restore(model)
    require_trained(swap(model, spec), states, folder)
    return Transferred(str(folder), name, weights_fingerprint(model), states)


def make_plan(
    path: Path,
    rows: Rows,
    candidates: Sequence[str],
    *,
    keep_softmax: float = 0.25,
    cache_bytes: int | None = None,
    cache_length: int = 16384,
    one_for_all: bool = False,
    target_length: int | None = None,
    transferred: Transferred | None = None,
    on_step: OnStep = lambda text: None,
) -> Plan:
    """Measure the layers of a causal model with softmax attention and choose a swap.

    Args:
        path: Folder of a saved causal model that is not swapped.
        rows: Rows to measure on; each document is measured as if it were alone.
        candidates: Backends with options, such as ``"longformer:window=128"``.
        keep_softmax: Fraction or number of layers that keep softmax; not used with ``cache_bytes``.
        cache_bytes: Limit on the cache of one sequence, in the data type of the saved weights.
        cache_length: Tokens of that sequence.
        one_for_all: Whether all swapped layers have the same candidate, as in stock classes.
        target_length: Tokens for which the swap is meant; candidates that save neither memory nor
            time there are left out. When ``None``, the length of the rows, or
            :data:`TARGET_LENGTH` tokens if that is more and the model has as many positions.
        transferred: Layers that transfer has trained, as a further candidate: layers are then
            ranked by what transfer leaves, as in arXiv:2512.20569.
        on_step: Called with a description of each measurement.

    Raises:
        AttnzooError: An argument is invalid.
        SpecError: The rows can judge no candidate, or ``transferred`` is of another model.
    """
    require_causal(path, "a plan measures text prediction")
    require_original(path)
    positions = max_positions(path)
    if target_length is not None and target_length > (longest := positions or MAX_LENGTH):
        raise ConfigError(
            f"target_length must be at most {longest:,}, "
            + ("the model's positions" if positions else "as lengths of `attnzoo memory`")
            + f"; got {target_length:,}"
        )
    if target_length is None:
        target_length = max(rows.length, min(TARGET_LENGTH, positions or TARGET_LENGTH))
    names = [*([] if transferred is None else [transferred.name]), *candidates]
    if not names:
        raise SpecError("A plan needs at least one candidate, such as longformer")
    equal = {x: equal_window(path, candidate_spec(x), target_length) for x in names}
    limit = None if cache_bytes is None else CacheLimit(path, cache_bytes, cache_length, names)
    model: Any = load_pretrained(AutoModelForCausalLM, path, dtype=torch.float32)
    planner = SwapPlanner(model, rows, transferred, on_step)
    planner.refuse_untrained(names)
    kept = count_exact_layers(keep_softmax, len(planner.numbers))
    found, left_out = judge(planner, equal, positions)
    if limit is not None:
        limit.check(found)
    layers = planner.measure(planner.numbers, list(found))
    select = choose_one if one_for_all else choose
    sizes = {name: x["cache_bytes"] for name, x in found.items()}
    chosen = select(planner, layers, sizes, kept if limit is None else limit)
    return Plan.made(
        planner,
        chosen,
        spec=swap_spec(chosen),
        layers=layers,
        weights=planner.weights,
        candidates=list(found.values()),
        left_out=left_out,
        transfer_from=None if transferred is None else transferred.folder,
    )
