"""Describe which attention each layer of a model runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from attnzoo.contract.backend import AttentionBackend
from attnzoo.errors import SpecError
from attnzoo.hf.layers import attention_layers, unwrap_model
from attnzoo.hf.names import NAME
from attnzoo.hf.saving.files import empty_model


@dataclass(frozen=True, kw_only=True)
class LayerDescription:
    """The backend, options and implementation of one attention layer."""

    layer: int
    name: str
    backend: str
    options: dict[str, Any]
    extras: int  # parameters and buffers that the backend added, in elements
    impl: str  # of the last call; empty before the first
    reason: str


COLUMNS = ("layer", "module", "backend", "options", "extras", "impl", "why")


@dataclass(frozen=True)
class Description:
    """The attention layers of a model; prints as a table."""

    model: str
    layers: tuple[LayerDescription, ...]

    def __iter__(self) -> Iterator[LayerDescription]:
        """Iterate over the layers."""
        return iter(self.layers)

    def __len__(self) -> int:
        """Return the number of attention layers."""
        return len(self.layers)

    def rows(self) -> list[list[str]]:
        """Return a row of text for each layer, with the columns of :data:`COLUMNS`."""
        return [
            [
                *(str(row.layer), row.name, row.backend),
                ", ".join(f"{name}={value}" for name, value in row.options.items()),
                *(f"{row.extras:,}", row.impl or "not run yet", row.reason),
            ]
            for row in self.layers
        ]

    def __str__(self) -> str:
        """Return the table as plain text."""
        rows = [COLUMNS, *self.rows()]
        widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([self.model, *lines])


def describe(model: nn.Module | str | Path) -> Description:
    """Return each attention layer's backend, options, extras, last implementation and its reason.

    Args:
        model: A transformers model, or the folder of a saved one, whose weights are not loaded.

    Raises:
        SpecError: ``model`` is neither.

    Example:
        >>> for layer in attnzoo.describe(attnzoo.swap(model, "linear", layers={"0-1": "flash"})):
        ...     print(layer.name, layer.backend)
        model.layers.0.self_attn flash
        model.layers.1.self_attn flash
        model.layers.2.self_attn linear
        model.layers.3.self_attn linear
    """
    if isinstance(model, str | Path):
        model = empty_model(Path(model))
    target = unwrap_model(model) if isinstance(model, nn.Module) else None
    if target is None:
        raise SpecError(
            f"{type(model).__name__} is not a transformers model; describe takes a "
            "PreTrainedModel, or the folder of a saved one"
        )
    rows = []
    for layer in attention_layers(target):
        backend = getattr(layer.module, NAME, None)
        implementation = getattr(layer.module, "config", target.config)._attn_implementation
        found: dict[str, Any] = {"backend": "none", "options": {}, "extras": 0}
        found |= {"impl": str(implementation), "reason": "not swapped"}
        if isinstance(backend, AttentionBackend) and implementation == NAME:
            tensors = [*backend.parameters(), *backend.buffers()]
            found["backend"], found["options"] = backend.name, backend.config.changed_options()
            found["extras"] = sum(x.numel() for x in tensors)
            ran = backend.ran
            found |= {"impl": ran.impl if ran else "", "reason": ran.reason if ran else ""}
        elif isinstance(backend, AttentionBackend):
            found["reason"] = (
                f"{backend.name} is disabled; set_attn_implementation('attnzoo') enables it"
            )
        rows.append(LayerDescription(layer=layer.geometry.layer, name=layer.name, **found))
    return Description(type(target).__name__, tuple(rows))
