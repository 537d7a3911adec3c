"""Tells, layer by layer, which attention a model runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from attnzoo.backends.base import AttentionBackend
from attnzoo.errors import SpecError
from attnzoo.integrations.attention import NAME
from attnzoo.integrations.layers import attention_layers, whole_model


@dataclass(frozen=True, kw_only=True)
class LayerDescription:
    """What one attention layer runs."""

    layer: int
    name: str
    backend: str
    options: dict[str, Any]
    extras: int  # parameters and buffers that the backend added, in elements
    impl: str  # that the last call ran; empty before the first
    reason: str


@dataclass(frozen=True)
class Description:
    """The attention layers of a model; prints as a table."""

    model: str
    layers: tuple[LayerDescription, ...]

    def __iter__(self) -> Iterator[LayerDescription]:
        """Go over the layers."""
        return iter(self.layers)

    def __len__(self) -> int:
        """Return the number of attention layers."""
        return len(self.layers)

    def table(self) -> Any:
        """Return the description as a rich table."""
        from rich.table import Table

        table = Table(title=self.model, title_justify="left")
        for head in ("layer", "module", "backend", "options", "extras", "impl", "why"):
            table.add_column(head, justify="right" if head in ("layer", "extras") else "left")
        for row in self.layers:
            options = ", ".join(f"{name}={value}" for name, value in row.options.items())
            impl = row.impl or "not run yet"
            extras = f"{row.extras:,}"
            table.add_row(str(row.layer), row.name, row.backend, options, extras, impl, row.reason)
        return table

    def __str__(self) -> str:
        """Return the table as plain text."""
        from rich.console import Console

        console = Console(width=160, color_system=None, force_terminal=False)
        with console.capture() as capture:
            console.print(self.table())
        return capture.get().rstrip()


def describe(model: nn.Module) -> Description:
    """Tell for each attention layer its backend, options, extras, and which impl ran last and why.

    Raises:
        SpecError: ``model`` is not a transformers model.
    """
    target = whole_model(model)
    if target is None:
        raise SpecError(
            f"{type(model).__name__} is not a transformers model; describe takes a PreTrainedModel"
        )
    rows = []
    for layer in attention_layers(target):
        backend = getattr(layer.module, NAME, None)
        if isinstance(backend, AttentionBackend):
            tensors = [*backend.parameters(), *backend.buffers()]
            ran = backend.ran
            row = LayerDescription(
                layer=layer.geometry.layer,
                name=layer.name,
                backend=backend.name,
                options=backend.config.changed_options(),
                extras=sum(x.numel() for x in tensors),
                impl=ran.impl if ran else "",
                reason=ran.reason if ran else "",
            )
        else:
            config = getattr(layer.module, "config", target.config)
            row = LayerDescription(
                layer=layer.geometry.layer,
                name=layer.name,
                backend="none",
                options={},
                extras=0,
                impl=str(config._attn_implementation),
                reason="not swapped",
            )
        rows.append(row)
    return Description(type(target).__name__, tuple(rows))
