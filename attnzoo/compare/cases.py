"""Config of a comparison: a model, its attentions, and cases of level, mode and length."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from attnzoo.contract.config import Geometry
from attnzoo.evaluation.models import spec_label
from attnzoo.evaluation.presets import preset_specs
from attnzoo.registry import available_backends, get_backend
from attnzoo.spec import AttentionSpec

LEVELS = ("model", "op")  # in the order in which they are measured
MODES = ("forward", "train", "decode")
BASELINE = "flash"  # the exact attention that others are compared with


@dataclass(frozen=True, kw_only=True)
class CostCase:
    """One measurement as plain data that another process can receive.

    Attributes:
        attention: Name of the attention in tables.
        spec: Its spec as plain data.
        level: ``"model"``, the whole model; ``"op"``, the backend on random queries, keys and
            values.
        mode: ``"forward"``; ``"train"``, forward + backward; ``"decode"``, one token after T.
        T: Tokens per row.
        B: Rows.
        dtype: Data type of weights and inputs.
        device: ``"cpu"`` or ``"cuda"``.
    """

    attention: str
    spec: dict[str, Any] = field(hash=False)
    level: str
    mode: str
    T: int
    B: int
    dtype: str
    device: str

    def key(self) -> str:
        """Return a key that identifies the case among those of one model and machine."""
        return repr(sorted(asdict(self).items(), key=lambda item: item[0]))


def default_specs(names: Sequence[str] | None, *, causal: bool = True) -> list[AttentionSpec]:
    """Return the presets of the given backends, or of every backend, exact ones first.

    Args:
        names: Backends; all when ``None``.
        causal: Whether the model is causal; encoders have presets of their own.

    Raises:
        UnknownBackendError: A name is unknown.
    """
    chosen = dict.fromkeys(names or ("softmax", BASELINE, *available_backends()))
    return preset_specs(chosen, *(("long",) if causal else ("bidirectional", "long")))


def is_exact(spec: dict[str, Any]) -> bool:
    """Whether every layer computes softmax attention over all keys."""
    entries = [spec, *spec.get("layers", {}).values()]
    return all(
        get_backend(entry["backend"]).capabilities.exact
        and not entry.get("options", {}).get("window")
        for entry in entries
    )


def make_cases(
    specs: Iterable[AttentionSpec],
    lengths: Sequence[int],
    *,
    levels: Sequence[str],
    mode: str,
    tokens: int,
    dtype: str,
    device: str,
) -> list[CostCase]:
    """Return the cases by increasing length, so that failed attentions are not tried longer.

    Args:
        specs: The attentions.
        lengths: T.
        levels: Subset of ``LEVELS``.
        mode: One of ``MODES``.
        tokens: Tokens per call; B is as many rows as fit, at least one. Decoding uses one row.
        dtype: Data type of weights and inputs.
        device: Device.
    """
    rows = {n: 1 if mode == "decode" else max(1, tokens // n) for n in lengths}
    named = [(spec_label(spec), spec.to_dict()) for spec in specs]
    return [
        CostCase(
            attention=name,
            spec=spec,
            level=level,
            mode=mode,
            T=length,
            B=rows[length],
            dtype=dtype,
            device=device,
        )
        for level in levels
        for length in sorted(lengths)
        for name, spec in named
    ]


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """The compared model as plain data.

    Attributes:
        path: Folder of the saved model.
        name: Name in reports.
        sha: Hash of its config and its parameter shapes.
        geometry: Geometry of its first attention layer.
        causal: Whether all layers are causal.
        generates: Whether it is causal and predicts the next token.
        max_positions: Number of positions, if limited.
        trained_positions: Number of positions that it was trained on, if its config has it.
        text_model: Whether it runs on token ids alone, so that the model can run.
        module: Module that defines its class.
        dtype: Data type in which caches and memory are counted.
    """

    path: str
    name: str
    sha: str
    geometry: Geometry
    causal: bool
    generates: bool
    max_positions: int | None
    trained_positions: int | None
    text_model: bool
    module: str
    dtype: str
