"""Attention maps of one layer, exact and approximate, and the measures of all heads of a model.

Only one layer is swapped, so that both maps have the same queries and keys.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import attnzoo
from attnzoo.errors import SpecError
from attnzoo.evaluation.corpus import held_out_files, load_tokenizer, read_documents
from attnzoo.evaluation.heads import MEASURES, HeadStudy, entropy
from attnzoo.evaluation.models import max_positions, spec_label
from attnzoo.hf.layers import attention_layers
from attnzoo.hf.pretrained import load_pretrained
from attnzoo.hf.saving.files import model_class, read_config
from attnzoo.hf.swap import swap
from attnzoo.report.output_path import atomic_write
from attnzoo.report.page import Part, Plot, line_plot, matrix_plot, write_page
from attnzoo.report.table import Table, number
from attnzoo.spec import AttentionSpec

MAPS, HEADS = "maps.json", "heads.json"
MIN_WEIGHT = 1e-4  # smaller attention weights have the darkest colour
CHARACTERS = 2**16  # of a text that are tokenized
MEASURE_TITLES = {
    "gradient": "Change of the result when a head's output is scaled",
    "entropy": "Entropy in bits, mean over queries",
    "distance": "Tokens between query and key, mean weighted by the attention",
}


# -- maps of one layer ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class AttentionMaps:
    """The attention matrices of a layer's heads, twice, from the same queries and keys.

    Attributes:
        exact: ``[H, T, S]``, softmax attention.
        approximate: ``[H, T, S]``, the backend's effective matrices.
        tokens: The T tokens as text.
        attention: Name of the backend.
        layer: Index of the layer.
    """

    exact: Tensor
    approximate: Tensor
    tokens: list[str]
    attention: str
    layer: int

    def facts(self, head: int) -> dict[str, Any]:
        """Return the statistics of a head as plain data."""
        exact, approximate = self.exact[head], self.approximate[head]
        same = exact.argmax(1) == approximate.argmax(1)
        return {
            "layer": self.layer,
            "head": head,
            "attention": self.attention,
            "tokens": len(self.tokens),
            "difference": round(float(difference(exact, approximate).mean()), 4),
            "same_favourite": round(float(same.float().mean()), 4),
            "entropy_exact": round(float(entropy(exact).mean()), 4),
            "entropy_approximate": round(float(entropy(approximate).mean()), 4),
        }


def difference(exact: Tensor, approximate: Tensor) -> Tensor:
    """Return the total variation distance of each row, ``[T]``: 0 is equal, 1 disjoint."""
    return (exact - approximate).abs().sum(1) / 2


def make_maps(
    path: Path, spec: AttentionSpec, *, text: Path | None, layer: int, head: int, tokens: int
) -> AttentionMaps:
    """Return the maps of a layer.

    Args:
        path: Folder of a saved model.
        spec: The attention to compare with softmax.
        text: File; a held-out file of the standard library for the embedded model.
        layer: Index of the layer.
        head: Index of a head that the layer must have.
        tokens: Number of tokens, from the start of the text; fewer if its first document ends.

    Raises:
        SpecError: The model, the text, the layer or the head does not exist.
    """
    config = read_config(path)
    string = _first_text(path, text, tokens)
    loaded: Any = load_pretrained(model_class(config, path), path, dtype=torch.float32).eval()
    layers = attention_layers(loaded)
    heads = layers[0].geometry.num_heads if layers else 0
    indices = [found.geometry.layer for found in layers]
    if layer not in indices:
        raise SpecError(f"--layer must be one of {indices[0]} to {indices[-1]}, got {layer}")
    if not 0 <= head < heads:
        raise SpecError(f"--head must be 0 to {heads - 1}, got {head}")
    index = indices.index(layer)
    tokenizer = load_tokenizer(path)
    special = not layers[index].geometry.causal  # an encoder reads its special tokens
    cut = {"truncation": True, "max_length": tokens}
    ids = tokenizer(string, add_special_tokens=special, **cut)["input_ids"]
    if len(ids) < 2:
        raise SpecError(f"The text {str(text)!r} has {len(ids)} tokens; 2 or more are needed")
    one_layer = AttentionSpec("softmax", layers={str(layer): spec.default})
    exact, approximate = (
        _weights(loaded, given, torch.tensor([ids]), index)
        for given in (AttentionSpec("softmax"), one_layer)
    )
    return AttentionMaps(
        exact=exact,
        approximate=approximate,
        tokens=[tokenizer.decode([i]) for i in ids],
        attention=spec_label(spec),
        layer=layer,
    )


def _first_text(path: Path, text: Path | None, tokens: int) -> str:
    """Return the start of a text's first document."""
    limit = max_positions(path)
    if limit is not None and tokens > limit:
        raise SpecError(f"--max-length must be at most the model's {limit} positions, got {tokens}")
    if text is None:
        return held_out_files()[0].decode("utf-8", "replace")[:CHARACTERS]
    return read_documents(text)[0][:CHARACTERS]


@torch.no_grad()
def _weights(model: PreTrainedModel, spec: AttentionSpec, ids: Tensor, index: int) -> Tensor:
    """Run the model under a spec and return the attention weights of a layer, ``[H, T, S]``."""
    swap(model, spec)
    out = model(ids, output_attentions=True)
    attentions: tuple[Tensor, ...] = out.attentions
    return attentions[index][0].float()


def maps_table(maps: AttentionMaps) -> Table:
    """Return the statistics of all heads of the layer as a table."""
    rows = []
    for facts in map(maps.facts, range(len(maps.exact))):
        shares = (f"{facts[name]:.0%}" for name in ("difference", "same_favourite"))
        bits = (number(facts[f"entropy_{name}"], 2) for name in ("exact", "approximate"))
        rows.append([str(facts["head"]), *shares, *bits])
    columns = ["head", "difference", "same top key", "entropy", "approximate"]
    return Table(columns=columns, rows=rows, title=f"Layer {maps.layer}, all heads")


def map_plots(maps: AttentionMaps, head: int) -> list[Plot]:
    """Return both maps of a head, their difference, and the entropy by query."""
    pairs = {"exact": maps.exact[head], maps.attention: maps.approximate[head]}
    gap = maps.approximate[head] - maps.exact[head]
    bound = float(gap.abs().max()) or 1.0
    matrix = partial(matrix_plot, x="key", y="query")
    drawn = [
        matrix(
            weights.clamp_min(MIN_WEIGHT).log10().tolist(),
            name=name,
            title=title,
            color="log10 of the weight",
            limits=(math.log10(MIN_WEIGHT), 0.0),
        )
        for name, (title, weights) in zip(("exact", "approximate"), pairs.items(), strict=True)
    ]
    return [
        *drawn,
        matrix(
            gap.tolist(),
            name="difference",
            title=f"Difference: weight under {maps.attention} minus softmax",
            color="difference",
            limits=(-bound, bound),
            colormap="RdBu_r",
        ),
        line_plot(
            {name: dict(enumerate(entropy(x).tolist())) for name, x in pairs.items()},
            name="entropy",
            title="Entropy of each query's weights",
            x="query",
            y="bits",
            scale="linear",
            log=False,
        ),
    ]


def write_maps(out: Path, maps: AttentionMaps, head: int) -> Path | None:
    """Write ``maps.json``, ``maps.html`` and its plots; return ``None`` without matplotlib."""
    _write_numbers(out / MAPS, {"heads": list(map(maps.facts, range(len(maps.exact))))})
    parts: list[Part] = [*map_plots(maps, head), maps_table(maps), "".join(maps.tokens)]
    title = f"Attention of layer {maps.layer}, head {head}"
    return write_page(out / "maps.html", title, parts)


def _write_numbers(path: Path, found: dict[str, Any]) -> None:
    data = {"attnzoo": attnzoo.__version__, **found}
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, json.dumps(data, indent=2, allow_nan=False) + "\n")


# -- heads of all layers -------------------------------------------------------------------------


def pruning_table(found: HeadStudy) -> Table:
    """Return the quality by the fraction of pruned heads."""
    name = "loss" if found.quality == "loss" else "cosine similarity"
    rows = [[f"{fraction:.0%}", number(x, 4)] for fraction, x in found.curve.items()]
    return Table(columns=["heads pruned", name], rows=rows, title="Pruned without training")


def heads_table(found: HeadStudy, count: int = 10) -> Table:
    """Return the heads that matter least and most, with all measures."""
    measures = found.measures
    heads = sorted(
        (measures["gradient"][name][i], name, i)
        for name in found.layers
        for i in range(len(found.numbers[name]))
    )
    shown = heads if len(heads) <= 2 * count else [*heads[:count], *heads[-count:]]
    rows = [
        [
            f"{name}, {found.numbers[name][i]}",
            number(importance, 4),
            number(measures["entropy"][name][i], 2),
            number(measures["distance"][name][i], 1),
        ]
        for importance, name, i in shown
    ]
    title = "All heads" if len(shown) == len(heads) else f"The {count} least and most important"
    columns = ["layer, head", "gradient", "entropy", "distance"]
    return Table(columns=columns, rows=rows, title=f"{title}, by gradient")


def _heat_map(found: HeadStudy, measure: str) -> Plot:
    """Draw a number per layer and head; heads that a layer lacks are empty."""
    width = max(max(found.numbers[name]) for name in found.layers) + 1
    rows = []
    for name in found.layers:
        placed = dict(zip(found.numbers[name], found.measures[measure][name], strict=True))
        rows.append([placed.get(i, float("nan")) for i in range(width)])
    title = MEASURE_TITLES[measure]
    return matrix_plot(rows, name=measure, title=title, x="head", y="layer", color=measure)


def write_heads(out: Path, found: HeadStudy) -> Path | None:
    """Write ``heads.json``, ``heads.html`` and its plots; return ``None`` without matplotlib."""
    _write_numbers(out / HEADS, asdict(found))
    layers = ", ".join(f"{i}: {name}" for i, name in enumerate(found.layers))
    parts: list[Part] = [_heat_map(found, measure) for measure in MEASURES]
    parts += [pruning_table(found), heads_table(found), f"Layers: {layers}"]
    return write_page(out / "heads.html", "Attention heads", parts)
