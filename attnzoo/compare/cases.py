"""Config of a comparison: a model, its attentions, and cases of level, mode and length."""

from __future__ import annotations

from collections.abc import Sequence
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
        T: Tokens per row.
        level: ``"model"``, the whole model; ``"op"``, the backend on random queries, keys and
            values.
        mode: ``"forward"``; ``"train"``, forward + backward; ``"decode"``, one token after T.
        B: Rows.
        dtype: Data type of weights and inputs.
        device: ``"cpu"`` or ``"cuda"``.
    """

    attention: str
    spec: dict[str, Any] = field(hash=False)
    T: int
    level: str = "model"
    mode: str = "forward"
    B: int = 1
    dtype: str = "float32"
    device: str = "cpu"

    @classmethod
    def of(cls, spec: AttentionSpec, length: int, **fields: Any) -> CostCase:
        """Return the case of a spec at a length, with other fields than the defaults."""
        return cls(attention=spec_label(spec), spec=spec.to_dict(), T=length, **fields)

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
