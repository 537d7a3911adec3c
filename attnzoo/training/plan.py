"""A plan: which layer gets which attention, measured on a model's own text.

Layers differ. Some look at what is near and lose nothing in a window; a few fetch from far, and
every one of them that loses softmax costs more than training brings back. So every layer is swapped
alone, to every candidate, and the change of the model's predictions is measured; then layers are
given softmax back one by one, each time the one that helps most, as many as the budget allows.
Letters: B batch, H heads, T tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from attnzoo.demo.text import refuse_encoder
from attnzoo.errors import ConfigError, SpecError
from attnzoo.integrations.convert import restore, swap
from attnzoo.integrations.layers import attention_layers
from attnzoo.report.whole import write_whole
from attnzoo.spec import AttentionSpec
from attnzoo.training.distil import divergence

EXACT = "flash"
CANDIDATES = (  # what a plan chooses from unless told
    "longformer:window=128",
    "gated_linear:feature_map=hedgehog,window=32",
    "reformer:chunk_size=16",
)
Tick = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class LayerMeasure:
    """What was measured of one layer.

    Attributes:
        layer: Its number.
        beyond: Share of its attention that goes to keys beyond the window.
        entropy: Of its attention weights, in nats, mean over heads and tokens.
        alone: By candidate: KL of the model's predictions when only this layer is swapped, in nats.
        restored: By candidate: KL when all layers but this one are swapped.
    """

    layer: int
    beyond: float
    entropy: float
    alone: dict[str, float]
    restored: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A spec, what it was chosen from, and for which weights.

    Attributes:
        spec: The swap.
        divergence: KL of the model's predictions under it, nothing trained, in nats.
        window: Tokens beyond which attention counts as far.
        layers: Every layer's measures.
        weights: Names the model's weights.
    """

    spec: AttentionSpec
    divergence: float
    window: int
    layers: list[LayerMeasure]
    weights: str

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return {
            "spec": self.spec.to_dict(),
            "divergence": self.divergence,
            "window": self.window,
            "weights": self.weights,
            "layers": [vars(layer) for layer in self.layers],
        }

    def write(self, path: Path) -> None:
        """Write it whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(self.to_dict(), indent=2))


def read_plan(path: Path) -> tuple[AttentionSpec, str | None]:
    """Read a plan, or a bare spec, from JSON; returns the spec and the weights it was made for.

    Raises:
        SpecError: There is no such file, or it is neither.
    """
    try:
        data = json.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise SpecError(
            f"{str(path)!r} is no plan ({error}); `attnzoo plan` writes one, and a spec in JSON is "
            "one too"
        ) from None
    if isinstance(data, Mapping) and "spec" in data:
        return AttentionSpec.from_dict(data["spec"]), data.get("weights")
    return AttentionSpec.from_dict(data), None


def kept_layers(keep_softmax: float, count: int) -> int:
    """Return how many of ``count`` layers stay exact: a share below 1, or a number of them.

    Raises:
        ConfigError: It is negative, or more than there are layers.
    """
    whole = float(keep_softmax).is_integer() and keep_softmax >= 1
    kept = int(keep_softmax) if whole else round(keep_softmax * count)
    if keep_softmax < 0 or kept > count or (not whole and keep_softmax > 1):
        raise ConfigError(
            f"keep_softmax is a share of the layers, such as 0.25, or their number; got "
            f"{keep_softmax} for {count} layers"
        )
    return kept


def weights_name(model: nn.Module) -> str:
    """Name a model's weights by every byte of them, those of backends aside.

    A billion bytes take about a second. Sums would depend on the number of threads.
    """
    digest = hashlib.sha256()
    for name, x in sorted(model.state_dict().items()):
        if ".attnzoo." not in name:
            digest.update(name.encode())
            digest.update(x.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy())
    return digest.hexdigest()[:16]


class Planner:
    """Measures a causal model under many swaps.

    Args:
        model: A model that is not swapped, in evaluation mode.
        rows: Tokens to measure on, ``[B, T]``.
        candidates: Specs of one backend, by the names that the plan shows.
        window: Tokens beyond which attention counts as far.
        tick: Called with what is being measured.

    Raises:
        SpecError: There is no candidate, or the model has no attention layers.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        rows: Tensor,
        candidates: Mapping[str, AttentionSpec],
        *,
        window: int = 32,
        tick: Tick = lambda text: None,
    ) -> None:
        if not candidates:
            raise SpecError("A plan needs at least one candidate, such as longformer")
        self.model, self.rows, self.window, self.tick = model.eval(), rows, window, tick
        self.candidates = {name: spec.default.to_dict() for name, spec in candidates.items()}
        self.numbers = sorted({x.geometry.layer for x in attention_layers(model)})
        if not self.numbers:
            raise SpecError(f"{type(model).__name__} has no attention layers to plan for")
        self.exact = self._logits()

    def spec_of(self, chosen: Mapping[int, str]) -> AttentionSpec:
        """Return the spec that gives layers their candidates and all others exact attention."""
        layers = {str(number): self.candidates[name] for number, name in sorted(chosen.items())}
        return AttentionSpec(EXACT, layers=layers)

    def divergence(self, chosen: Mapping[int, str]) -> float:
        """Return the KL of the predictions when these layers have these candidates, in nats."""
        swap(self.model, self.spec_of(chosen))
        try:
            return float(
                sum(
                    divergence(logits, exact, torch.ones(logits.shape[:2], device=logits.device))
                    for logits, exact in zip(self._logits(), self.exact, strict=True)
                )
                / len(self.exact)
            )
        finally:
            restore(self.model)

    def measure(self) -> list[LayerMeasure]:
        """Measure every layer with every candidate: 2 passes for each pair."""
        looks = self.attention()
        measures = []
        for number in self.numbers:
            alone, restored = {}, {}
            for name in self.candidates:
                self.tick(f"layer {number}, {name}")
                alone[name] = self.divergence({number: name})
                others = {other: name for other in self.numbers if other != number}
                restored[name] = self.divergence(others)
            beyond, entropy = looks[number]
            measures.append(
                LayerMeasure(
                    layer=number, beyond=beyond, entropy=entropy, alone=alone, restored=restored
                )
            )
        return measures

    def choose(self, measures: Sequence[LayerMeasure], kept: int) -> dict[int, str]:
        """Give every layer its best candidate, then softmax back where that helps most."""
        chosen = {x.layer: min(x.alone, key=lambda name: x.alone[name]) for x in measures}
        for _ in range(kept):
            tried = {}
            for number in chosen:
                self.tick(f"layer {number} exact")
                rest = {other: name for other, name in chosen.items() if other != number}
                tried[number] = self.divergence(rest)
            del chosen[min(tried, key=lambda number: tried[number])]
        return chosen

    @torch.no_grad()
    def attention(self) -> dict[int, tuple[float, float]]:
        """Return each layer's attention beyond the window, and its entropy, by number."""
        self.tick("attention weights")
        swap(self.model, "softmax")
        try:
            weights = self.model(self.rows[:1], use_cache=False, output_attentions=True).attentions
        finally:
            restore(self.model)
        assert weights is not None
        found = {}
        for number, weight in zip(self.numbers, weights, strict=True):
            length = weight.shape[-1]
            place = torch.arange(length, device=weight.device)
            far = place[:, None] - place >= self.window
            late = weight[..., self.window :, :]  # queries that have a far past
            beyond = (late * far[self.window :]).sum(-1).mean() if late.numel() else torch.zeros(())
            entropy = torch.special.entr(weight.float()).sum(-1).mean()
            found[number] = (float(beyond), float(entropy))
        return found

    @torch.no_grad()
    def _logits(self) -> list[Tensor]:
        return [
            self.model(self.rows[at : at + 4], use_cache=False).logits
            for at in range(0, len(self.rows), 4)
        ]


class Budget(Protocol):
    """What a choice of attentions may cost."""

    def choose(self, planner: Planner, measures: Sequence[LayerMeasure]) -> dict[int, str]:
        """Return the candidates of the layers that do not stay exact, by number."""


def make_plan(
    path: Path,
    rows: Tensor,
    candidates: Mapping[str, AttentionSpec],
    *,
    keep_softmax: float = 0.25,
    budget: Budget | None = None,
    window: int = 32,
    tick: Tick = lambda text: None,
) -> Plan:
    """Measure a saved model and choose a backend for each of its layers.

    Args:
        path: Folder of a saved causal model that is not swapped.
        rows: Tokens to measure on, ``[B, T]``.
        candidates: Specs of one backend, by name.
        keep_softmax: Share or number of layers that stay exact; not with a budget.
        budget: Chooses in its place, as :class:`attnzoo.training.budget.CacheBudget` does.
        window: Tokens beyond which attention counts as far.
        tick: Called with what is being measured.
    """
    refuse_encoder(path, "a plan measures text prediction")
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    planner = Planner(model, rows, candidates, window=window, tick=tick)
    kept = kept_layers(keep_softmax, len(planner.numbers))
    measures = planner.measure()
    chosen = budget.choose(planner, measures) if budget else planner.choose(measures, kept)
    return Plan(
        spec=planner.spec_of(chosen),
        divergence=planner.divergence(chosen),
        window=window,
        layers=measures,
        weights=weights_name(model),
    )
