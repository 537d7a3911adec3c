"""Plan of a swap: an attention for each layer, chosen by measurements on text.

Layers differ: some attend locally and lose nothing with a window; others attend to distant tokens,
and training recovers little of the loss without softmax. A plan measures how the model's
predictions change when one layer is swapped, for each layer and candidate. It then restores softmax
greedily, in the layer where that reduces the change most, as often as the limit allows.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from attnzoo.errors import ConfigError, SpecError, short_repr
from attnzoo.evaluation.equal_memory import layer_cache_bytes, saved_cache_bytes
from attnzoo.evaluation.margins import mean_of, paired
from attnzoo.evaluation.models import max_positions, require_causal
from attnzoo.evaluation.rows import Rows, contributions, predictions, require_finite
from attnzoo.hf.layers import attention_layers
from attnzoo.hf.pretrained import load_pretrained
from attnzoo.hf.saving.dtype import saved_dtype
from attnzoo.hf.swap.convert import restore, swap
from attnzoo.report.atomic_write import atomic_write
from attnzoo.spec import AttentionSpec
from attnzoo.training.candidates import (
    Candidate,
    forward_speedup,
    token_divergence,
    why_not_judged,
)
from attnzoo.training.transfer import swapped_layers, trainable_layers

EXACT = "flash"
TARGET_LENGTH = 4096  # tokens for which a swap is meant, if the user does not say
OnStep = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class LayerMeasure:
    """Measurements of one layer.

    Attributes:
        layer: Index of the layer.
        beyond: Fraction of its attention on keys beyond the window.
        entropy: Entropy of its attention weights in bits, mean over heads and tokens.
        alone: KL of the model's predictions in nats when only this layer is swapped, by candidate.
        restored: KL when all layers except this one are swapped, by candidate.
        alone_rows: ``alone`` of each row, whose mean it is.
    """

    layer: int
    beyond: float
    entropy: float
    alone: dict[str, float]
    restored: dict[str, float]
    alone_rows: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Transferred:
    """What transfer has trained: one attention in all layers.

    Attributes:
        folder: Folder of the run.
        name: The attention, as ``--candidate`` takes it.
        spec: The same as a spec.
        weights: Fingerprint of the model's own weights.
        states: The ``state_dict`` of the backend of each layer, by the layer's name.
    """

    folder: str
    name: str
    spec: AttentionSpec
    weights: str
    states: Mapping[str, Mapping[str, Tensor]]

    def check_weights(self, weights: str) -> None:
        """Raise an error if the model that is planned for has other weights."""
        if self.weights != weights:
            raise SpecError(
                f"{self.folder!r} has other weights than the model; give a run of this model with "
                "transfer only (--max-steps 0, or --train extras)"
            )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A spec with the measurements it was chosen by.

    Attributes:
        spec: The swap.
        divergence: KL of the untrained, swapped model's predictions in nats.
        window: Distance in tokens of ``LayerMeasure.beyond``.
        layers: Measurements of each layer.
        weights: Fingerprint of the model's weights.
        candidates: What each candidate saves, and the window of equal memory beside it.
        left_out: Candidates that could not be judged, or save nothing, with the reason.
        divergence_error: Standard error of ``divergence`` over the rows; ``None`` with one row.
        transfer_from: Folder of the run whose transferred layers were measured, if any.
    """

    spec: AttentionSpec
    divergence: float
    window: int
    layers: list[LayerMeasure]
    weights: str
    candidates: list[Candidate] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    divergence_error: float | None = None
    transfer_from: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON data."""
        return {
            "spec": self.spec.to_dict(),
            "divergence": self.divergence,
            "divergence_error": self.divergence_error,
            "window": self.window,
            "weights": self.weights,
            "layers": [vars(layer) for layer in self.layers],
            "candidates": [candidate.to_dict() for candidate in self.candidates],
            "left_out": self.left_out,
            "transfer_from": self.transfer_from,
        }

    def write(self, path: Path) -> None:
        """Write the plan as JSON, atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, json.dumps(self.to_dict(), indent=2, allow_nan=False))


def read_plan(path: Path) -> tuple[AttentionSpec, str | None]:
    """Read a plan or a spec from JSON.

    Returns:
        The spec, and the fingerprint of the weights that it was made for, if it is a plan.

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


def weights_fingerprint(model: nn.Module, fetch: Callable[[Tensor], Tensor] = Tensor.detach) -> str:
    """Return a hash of a model's weights without those of backends, 16 hexadecimal digits.

    A gigabyte takes about a second. The hash, unlike sums, does not depend on the thread count, nor
    on whether weights of 16 bits are held in 32.

    Args:
        model: The model.
        fetch: Returns the data of a weight.
    """
    digest = hashlib.sha256()
    for name, x in sorted(model.state_dict().items()):
        if ".attnzoo." not in name:
            digest.update(name.encode())
            x = fetch(x)
            x = x.float() if x.is_floating_point() and x.element_size() == 2 else x
            digest.update(x.contiguous().view(-1).view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest()[:16]


class Planner:
    """Measures how swaps change a causal model's predictions, and chooses a plan.

    Layers of ``transferred`` are as transfer has trained them, all others as a swap starts.

    Args:
        model: A model that is not swapped.
        rows: Rows to measure on; each document is measured as if it were alone.
        candidates: Specs of one backend each, by name.
        window: Distance in tokens of ``LayerMeasure.beyond``.
        positions: Number of positions of the model; ``None`` without a limit.
        dtype: Data type of the saved weights, in which caches are counted; that of ``model`` when
            ``None``.
        on_step: Called with a description of each measurement.
        transferred: Trained layers, a further candidate; others may have no parameters then.

    Raises:
        SpecError: There are no candidates, the model has no attention layers, or ``transferred`` is
            compared with untrained layers.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        rows: Rows,
        candidates: Mapping[str, AttentionSpec],
        *,
        window: int = 32,
        positions: int | None = None,
        dtype: torch.dtype | None = None,
        on_step: OnStep = lambda text: None,
        transferred: Transferred | None = None,
    ) -> None:
        if transferred is not None:
            candidates = {transferred.name: transferred.spec, **candidates}
        if not candidates:
            raise SpecError("A plan needs at least one candidate, such as longformer")
        self.model, self.rows, self.window, self.on_step = model.eval(), rows, window, on_step
        self.candidates = {name: spec.default.to_dict() for name, spec in candidates.items()}
        self.numbers = sorted({x.geometry.layer for x in attention_layers(model)})
        if not self.numbers:
            raise SpecError(f"{type(model).__name__} has no attention layers to plan for")
        self.positions, self.dtype = positions, dtype or model.dtype
        self.cache_bytes: dict[str, int] = {}
        self.left_out: dict[str, str] = {}
        self.summaries: list[Candidate] = []
        self.exact = self._logits()
        self.states: dict[str, Mapping[str, Mapping[str, Tensor]]] = {}
        if transferred is not None:
            self.states[transferred.name] = transferred.states
            self._refuse_untrained()

    def make_spec(self, chosen: Mapping[int, str]) -> AttentionSpec:
        """Return the spec with these layers' candidates and exact attention elsewhere."""
        layers = {str(number): self.candidates[name] for number, name in sorted(chosen.items())}
        return AttentionSpec(EXACT, layers=layers)

    def cache_sizes(self, spec: AttentionSpec, length: int) -> dict[int, int]:
        """Return the bytes that each layer keeps for a sequence of a length, by layer index."""
        return layer_cache_bytes(
            type(self.model), self.model.config, spec, length, dtype=self.dtype
        )

    def divergence(self, chosen: Mapping[int, str]) -> float:
        """Return the KL of the predictions with these layers' candidates, in nats.

        Raises:
            NonFiniteError: The predictions are not finite.
        """
        return float(self.row_divergences(chosen).mean())

    def row_divergences(self, chosen: Mapping[int, str]) -> Tensor:
        """Return the KL of the predictions on each row with these layers' candidates, ``[B]``.

        Raises:
            NonFiniteError: The predictions are not finite.
        """
        names = ", ".join(f"{name} in layer {number}" for number, name in sorted(chosen.items()))
        rows = self._of_rows(self.token_divergences(self.make_spec(chosen), chosen))
        require_finite(
            float(rows.mean()), f"KL of the predictions with {names or 'exact attention'}"
        )
        return rows

    def _of_rows(self, kl: Tensor) -> Tensor:
        """Return the contribution of each row to the mean of token divergences, ``[B]``."""
        counted = self.rows.counted
        return torch.tensor(contributions([x[own] for x, own in zip(kl, counted, strict=True)]))

    @torch.no_grad()
    def token_divergences(self, spec: AttentionSpec, chosen: Mapping[int, str]) -> Tensor:
        """Return the KL of each prediction under a spec, ``[B, T]``, on the CPU.

        Args:
            spec: The swap.
            chosen: Candidates by layer, empty for other swaps.
        """
        swap(self.model, spec)
        try:
            for name, backend in swapped_layers(self.model).items():
                states = self.states.get(chosen.get(backend.geometry.layer, EXACT))
                if states is not None:
                    backend.load_state_dict(states[name])
            return torch.cat(
                [
                    token_divergence(logits, exact).cpu()
                    for logits, exact in zip(self._logits(), self.exact, strict=True)
                ]
            )
        finally:
            restore(self.model)

    def measure(self) -> list[LayerMeasure]:
        """Measure each layer with each candidate, in 2 forward passes per pair."""
        statistics = self.attention_statistics()
        measures = []
        for number in self.numbers:
            alone, restored, rows = {}, {}, {}
            for name in self.candidates:
                self.on_step(f"layer {number}, {name}")
                rows[name] = self.row_divergences({number: name}).tolist()
                alone[name] = sum(rows[name]) / len(rows[name])
                others = {other: name for other in self.numbers if other != number}
                restored[name] = self.divergence(others)
            beyond, entropy = statistics[number]
            measures.append(
                LayerMeasure(
                    layer=number,
                    beyond=beyond,
                    entropy=entropy,
                    alone=alone,
                    restored=restored,
                    alone_rows=rows,
                )
            )
        return measures

    def choose(self, measures: Sequence[LayerMeasure], exact: int) -> dict[int, str]:
        """Return the candidates of all layers except ``exact`` ones, chosen greedily.

        Each layer starts with its best candidate (:meth:`best`). Softmax is then restored in the
        layer where that reduces the KL of the whole model most, ``exact`` times.
        """
        chosen = {x.layer: self.best(x) for x in measures}
        for _ in range(exact):
            divergences = {}
            for number in chosen:
                self.on_step(f"layer {number} exact")
                rest = {other: name for other, name in chosen.items() if other != number}
                divergences[number] = self.divergence(rest)
            del chosen[min(divergences, key=lambda number: divergences[number])]
        return chosen

    def best(self, measure: LayerMeasure) -> str:
        """Return a layer's best candidate: of those as good as any, the one that saves most.

        As good is what changes predictions by no more than 2 standard errors above the least
        change, over the same rows.
        """
        least = min(measure.alone, key=lambda name: measure.alone[name])
        same = [least]
        for name, rows in measure.alone_rows.items():
            more = paired(rows, measure.alone_rows[least])
            if name != least and more.count > 1 and more.mean <= 2 * more.error:
                same.append(name)
        return min(same, key=lambda name: (self.cache_bytes.get(name, 0), measure.alone[name]))

    def judge(self, length: int) -> None:
        """Keep the candidates that save something at a length and that the rows can judge.

        The others go to ``left_out`` with the reason; ``summaries`` has what the rest save, and
        the window of equal memory beside each.

        Args:
            length: The length that the user means, in tokens.

        Raises:
            SpecError: No candidate is left.
        """
        longest = max(map(len, self.rows.documents()))
        whole = sum(self.cache_sizes(AttentionSpec(EXACT), length).values())
        for name in list(self.candidates):
            self.on_step(f"what {name} saves")
            spec, chosen = self._everywhere(name)
            kl = self.token_divergences(spec, chosen)
            size = sum(self.cache_sizes(spec, length).values())
            reason = why_not_judged(kl, self.rows) or self._why_useless(name, size, whole, length)
            if reason:
                self.left_out[name] = reason
                del self.candidates[name]
                continue
            self.cache_bytes[name] = size
            window = None if size >= whole else max(1, size * length // whole)
            rows: list[float] = []
            if window is not None and window < longest:
                layers = {
                    str(n): {"backend": EXACT, "options": {"window": window}} for n in self.numbers
                }
                equal = AttentionSpec(EXACT, layers=layers)
                rows = self._of_rows(self.token_divergences(equal, {})).tolist()
            self.summaries.append(
                Candidate(
                    name=name,
                    length=length,
                    own_window=getattr(spec.layers[str(self.numbers[0])].config, "window", None),
                    cache_bytes=size,
                    exact_bytes=whole,
                    kl_rows=self._of_rows(kl).tolist(),
                    window=window,
                    window_rows=rows,
                )
            )
        if not self.candidates:
            reasons = "; ".join(f"{name}: {why}" for name, why in self.left_out.items())
            raise SpecError(f"No candidate is left to plan with. {reasons}")

    def _everywhere(self, name: str) -> tuple[AttentionSpec, dict[int, str]]:
        chosen = dict.fromkeys(self.numbers, name)
        return self.make_spec(chosen), chosen

    def _why_useless(self, name: str, size: int, whole: int, length: int) -> str:
        """Return why a candidate saves neither memory nor time at a length, or ``""``."""
        if size < whole:
            return ""
        timed = length if self.positions is None else min(length, self.positions)
        spec, tokens = self._everywhere(name)[0], self.rows.tokens
        faster = forward_speedup(self.model, spec, EXACT, tokens, timed)
        if faster.is_positive:
            return ""
        return (
            f"at {length:,} tokens its cache is not smaller than softmax's, and a forward pass is "
            f"not measured to be faster ({100 * math.expm1(faster.mean):+.0f}% ± "
            f"{100 * faster.error:.0f}%); give the length for which it is meant (--target-length)"
        )

    @torch.no_grad()
    def attention_statistics(self) -> dict[int, tuple[float, float]]:
        """Return each layer's mean attention beyond the window, of late queries, and entropy."""
        self.on_step("attention weights")
        swap(self.model, "softmax")
        try:  # one by one: the weights of all layers are in memory
            documents = self.rows.documents()
            sums = torch.stack([self._sum_statistics(x) for x in documents]).sum(0)  # [layers, 2]
        finally:
            restore(self.model)
        late = max(1, sum(max(0, len(x) - self.window) for x in documents))
        means = (sums / torch.tensor([late, sum(map(len, documents))])).tolist()
        return {n: (x, y) for n, (x, y) in zip(self.numbers, means, strict=True)}

    def _sum_statistics(self, document: Tensor) -> Tensor:
        """Return sums over the queries of a document, ``[layers, 2]``, float64."""
        output: Any = self.model(document[None], use_cache=False, output_attentions=True)
        statistics = []
        for weight in output.attentions:
            far = torch.ones_like(weight[0, 0]).tril(-self.window)  # keys beyond the window
            entropy = torch.special.entr(weight.float()).sum(-1) / math.log(2)
            sums = [x.mean((0, 1)).sum().double() for x in ((weight * far).sum(-1), entropy)]
            statistics.append(torch.stack(sums))
        return torch.stack(statistics).cpu()

    def _refuse_untrained(self) -> None:
        """Raise an error for a candidate that transfer would train, beside a trained one."""
        for name in self.candidates.keys() - self.states.keys():
            swap(self.model, self.make_spec(dict.fromkeys(self.numbers, name)))
            untrained = trainable_layers(self.model)
            restore(self.model)
            if untrained:
                raise SpecError(
                    f"The candidate {name!r} has parameters that are not trained, so it cannot be "
                    "compared with transferred layers; leave it out, or plan without --from"
                )

    @torch.no_grad()
    def _logits(self) -> list[Tensor]:
        return [logits for _, logits in predictions(self.model, self.rows, 4)]


class Budget(Protocol):
    """A limit on a plan other than a number of layers."""

    def check(self, path: Path, candidates: Iterable[AttentionSpec]) -> None:
        """Raise an error if no choice of the candidates keeps the limit, before any measurement."""

    def choose(self, planner: Planner, measures: Sequence[LayerMeasure]) -> dict[int, str]:
        """Return the candidates of the layers that are not exact, by layer index."""


def make_plan(
    path: Path,
    rows: Rows,
    candidates: Mapping[str, AttentionSpec],
    *,
    keep_softmax: float = 0.25,
    budget: Budget | None = None,
    window: int = 32,
    target_length: int | None = None,
    transferred: Transferred | None = None,
    on_step: OnStep = lambda text: None,
) -> Plan:
    """Measure a saved model and choose an attention for each of its layers.

    Args:
        path: Folder of a saved causal model that is not swapped.
        rows: Rows to measure on; each document is measured as if it were alone.
        candidates: Specs of one backend each, by name.
        keep_softmax: Fraction or number of layers that keep softmax; not used with a budget.
        budget: A limit such as :class:`attnzoo.training.budget.CacheBudget`.
        window: Distance in tokens of ``LayerMeasure.beyond``.
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
    limit = max_positions(path)
    if target_length is None:
        target_length = max(rows.length, min(TARGET_LENGTH, limit or TARGET_LENGTH))
    specs = [*candidates.values(), *([] if transferred is None else [transferred.spec])]
    for spec in specs:  # before anything is measured
        saved_cache_bytes(path, spec, target_length)
    if budget is not None:
        budget.check(path, specs)
    model: Any = load_pretrained(AutoModelForCausalLM, path, dtype=torch.float32)
    weights = weights_fingerprint(model)
    if transferred is not None:
        transferred.check_weights(weights)
    planner = Planner(
        model,
        rows,
        candidates,
        window=window,
        positions=limit,
        dtype=saved_dtype(path),
        on_step=on_step,
        transferred=transferred,
    )
    exact = count_exact_layers(keep_softmax, len(planner.numbers))
    planner.judge(target_length)
    if budget is not None and planner.left_out:
        budget.check(path, map(AttentionSpec.from_dict, planner.candidates.values()))
    measures = planner.measure()
    chosen = budget.choose(planner, measures) if budget else planner.choose(measures, exact)
    change = mean_of(planner.row_divergences(chosen).tolist())
    return Plan(
        spec=planner.make_spec(chosen),
        divergence=change.mean,
        divergence_error=change.error if math.isfinite(change.error) else None,
        candidates=planner.summaries,
        left_out=planner.left_out,
        window=window,
        layers=measures,
        weights=weights,
        transfer_from=None if transferred is None else transferred.folder,
    )
