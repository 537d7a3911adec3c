"""What is measured: attentions, and cases of level, mode and length."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from attnzoo.backends.config import Geometry
from attnzoo.demo.run import label
from attnzoo.registry import available_backends, get_backend
from attnzoo.spec import AttentionSpec

LEVELS = ("op", "layer", "model")
MODES = ("forward", "train", "decode")
EXACT = "flash"  # runs where nothing else is named
Options = dict[str, Any]

# What --attention all shows of each backend; an installed plugin runs with its own defaults.
VARIANTS: dict[str, tuple[Options, ...]] = {
    "flash": ({}, {"window": 32}),  # the second is the control: a model that sees 32 tokens
    "linear": ({}, {"feature_map": "hedgehog", "window": 32}),
    "gated_linear": ({"gate": "gla"}, {"gate": "gla", "window": 32}),
    "performer": ({"num_features": 128},),
    "longformer": ({"window": 512},),
    # quadratic by its rows, the fewer the later; a block as long as the trained rows is exact
    "linformer": ({"block": 256, "num_rows": 8},),
    "reformer": ({"num_hashes": 4},),
}
OF_ENCODERS: dict[str, tuple[Options, ...]] = {
    "longformer": ({"window": 256},),  # on either side
    "linformer": ({"num_rows": 256},),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One measurement, as plain data, so that it can be sent to another process.

    Attributes:
        attention: How tables call the attention.
        spec: Its plain data.
        level: ``"op"``, the backend alone on queries, keys and values; ``"layer"``, the attention
            module with its projections; ``"model"``, the whole.
        mode: ``"forward"``; ``"train"``, forward and backward; ``"decode"``, one token after T.
        T: Tokens of a row.
        B: Rows.
        dtype: Of weights and inputs.
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
        """Name the case among others of the same model and machine."""
        return repr(sorted(asdict(self).items(), key=lambda item: item[0]))


def default_specs(names: Sequence[str] | None, *, causal: bool = True) -> list[AttentionSpec]:
    """Return what is compared: every backend, or those named, with what is worth seeing of each.

    Raises:
        UnknownBackendError: A name is unknown.
    """
    for name in names or ():
        get_backend(name)
    variants = VARIANTS if causal else VARIANTS | OF_ENCODERS
    chosen = list(dict.fromkeys(names or ("softmax", EXACT, *available_backends())))
    return [
        AttentionSpec(name, **options) for name in chosen for options in variants.get(name, ({},))
    ]


def is_exact(spec: dict[str, Any]) -> bool:
    """Whether every layer computes softmax attention over all keys."""
    entries = [spec, *spec.get("layers", {}).values()]
    return all(
        get_backend(entry["backend"]).exact and not entry.get("options", {}).get("window")
        for entry in entries
    )


def make_cases(
    specs: Iterable[AttentionSpec],
    lengths: Sequence[int],
    *,
    levels: Sequence[str],
    mode: str,
    tokens: int,
    batch: int | None,
    dtype: str,
    device: str,
) -> list[Case]:
    """Return the cases, short ones first, so that what fails is not tried longer.

    Args:
        specs: The attentions.
        lengths: T.
        levels: Of ``LEVELS``.
        mode: Of ``MODES``.
        tokens: Of a call; rows are as many as fit, one at least. Decoding takes one row.
        batch: Rows, in place of what ``tokens`` says.
        dtype: Of weights and inputs.
        device: Where.
    """
    rows = {n: batch or (1 if mode == "decode" else max(1, tokens // n)) for n in lengths}
    named = [(label(spec), spec.to_dict()) for spec in specs]
    return [
        Case(
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
class Subject:
    """The model that is compared, as plain data.

    Attributes:
        path: Folder of the saved model.
        name: How reports call it.
        sha: Names its config and the sizes of its weights.
        geometry: Of its first attention layer.
        causal: Whether every layer is.
        generates: Whether it predicts the next token, too.
        longest: The length beyond which it has no positions, if there is one.
        trained: Positions that it was made for, if its config says.
        text_model: Whether it takes token numbers, so that layers and the whole can run.
        module: Where its class is defined.
    """

    path: str
    name: str
    sha: str
    geometry: Geometry
    causal: bool
    generates: bool
    longest: int | None
    trained: int | None
    text_model: bool
    module: str
