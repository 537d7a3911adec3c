"""Attention maps of one layer, exact and approximate, and the measures of all heads of a model.

Only one layer is swapped, so that both maps have the same queries and keys.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import attnzoo
from attnzoo.errors import SpecError
from attnzoo.evaluation.corpus import held_out_files
from attnzoo.evaluation.data import load_tokenizer, read_documents
from attnzoo.evaluation.heads import MEASURES, HeadStudy, entropy
from attnzoo.evaluation.models import is_embedded, max_positions, model_path, spec_label
from attnzoo.hf.layers import attention_layers
from attnzoo.hf.pretrained import load_pretrained
from attnzoo.hf.saving.files import model_class, read_config
from attnzoo.hf.swap.convert import swap
from attnzoo.report import charts, page
from attnzoo.report.atomic_write import atomic_write
from attnzoo.report.charts import Axis, Plot, Series
from attnzoo.report.format import number
from attnzoo.report.output_path import OutputError, cannot_be_written
from attnzoo.report.table import Table
from attnzoo.spec import AttentionSpec

MAPS, HEADS = "maps.json", "heads.json"
MIN_WEIGHT = 1e-4  # smaller attention weights have the darkest colour
CHARACTERS = 2**16  # of a text that are tokenized
MEASURE_TEXTS = {
    "gradient": "Change of the result when a head's output is scaled (Michel et al., 2019).",
    "entropy": "Of its attention in bits, mean over queries: 8 are 256 keys of equal weight.",
    "distance": "Between query and key in tokens, weighted by the attention.",
}


# -- maps of one layer ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class AttentionMaps:
    """Two attention matrices of the same queries and keys.

    Attributes:
        exact: ``[T, S]``, softmax attention.
        approximate: ``[T, S]``, the backend's effective matrix.
        tokens: The T tokens as text.
        attention: Name of the backend.
        layer: Index of the layer.
        head: Index of the head.
    """

    exact: Tensor
    approximate: Tensor
    tokens: list[str]
    attention: str
    layer: int
    head: int

    def facts(self) -> dict[str, Any]:
        """Return the statistics of the maps as plain data."""
        same = self.exact.argmax(1) == self.approximate.argmax(1)
        return {
            "layer": self.layer,
            "head": self.head,
            "attention": self.attention,
            "tokens": len(self.exact),
            "difference": round(float(difference(self.exact, self.approximate).mean()), 4),
            "same_favourite": round(float(same.float().mean()), 4),
            "entropy_exact": round(float(entropy(self.exact).mean()), 4),
            "entropy_approximate": round(float(entropy(self.approximate).mean()), 4),
        }


def difference(exact: Tensor, approximate: Tensor) -> Tensor:
    """Return the total variation distance of each row, ``[T]``: 0 is equal, 1 disjoint."""
    return (exact - approximate).abs().sum(1) / 2


def make_maps(
    model: str, spec: AttentionSpec, *, text: Path | None, layer: int, head: int, tokens: int
) -> list[AttentionMaps]:
    """Return the maps of a head, followed by those of the other heads of its layer.

    Args:
        model: Folder of a saved model, or an embedded one's name.
        spec: The attention to compare with softmax.
        text: File; a held-out file of the standard library for the embedded model.
        layer: Index of the layer.
        head: Index of the head.
        tokens: Number of tokens, from the start of the text; fewer if its first document ends.

    Raises:
        SpecError: The model, the text, the layer or the head does not exist.
    """
    path = model_path(model)
    config = read_config(path)
    string = _first_text(path, text, model, tokens)
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
    words = [tokenizer.decode([i]) for i in ids]
    return [
        AttentionMaps(
            exact=exact[i],
            approximate=approximate[i],
            tokens=words,
            attention=spec_label(spec),
            layer=layer,
            head=i,
        )
        for i in (head, *(other for other in range(heads) if other != head))
    ]


def _first_text(path: Path, text: Path | None, model: str, tokens: int) -> str:
    """Return the start of a text's first document."""
    if tokens < 2:
        raise SpecError(f"--max-length must be 2 or more, got {tokens}")
    if text is None and not is_embedded(model):
        raise SpecError("A model needs --data: give a text file in the model's language")
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


def summary(maps: AttentionMaps) -> str:
    """Return how the approximation differs from softmax, as text."""
    facts = maps.facts()
    return (
        f"Layer {maps.layer}, head {maps.head}, {facts['tokens']} tokens: {maps.attention} moves "
        f"{facts['difference']:.0%} of the weight to other keys than softmax, and gives the same "
        f"key the largest weight for {facts['same_favourite']:.0%} of the queries. Entropy "
        f"{facts['entropy_exact']:.1f} bits (softmax) and {facts['entropy_approximate']:.1f}."
    )


def maps_table(found: Sequence[AttentionMaps]) -> Table:
    """Return the statistics of all heads of the layer as a table."""
    rows = []
    for maps in sorted(found, key=lambda maps: maps.head):
        facts = maps.facts()
        shares = (f"{facts[name]:.0%}" for name in ("difference", "same_favourite"))
        bits = (number(facts[f"entropy_{name}"], 2) for name in ("exact", "approximate"))
        rows.append([str(maps.head), *shares, *bits])
    columns = ["head", "difference", "same top key", "entropy", "approximate"]
    return Table(columns=columns, rows=rows, title=f"Layer {found[0].layer}, all heads")


def map_plots(maps: AttentionMaps) -> list[Plot]:
    """Return both maps, their difference, and the entropy by query."""
    gap = maps.approximate - maps.exact
    bound = float(gap.abs().max()) or 1.0
    pairs = (("softmax", maps.exact), (maps.attention, maps.approximate))
    entropies = [
        Series(name=name, x=range(len(x)), y=entropy(x).tolist(), style=i, kind="plain")
        for i, (name, x) in enumerate(pairs)
    ]
    x, y = Axis(label="key"), Axis(label="query")
    matrices = [
        charts.matrix_chart(
            weights.clamp_min(MIN_WEIGHT).log10().tolist(),
            x=x,
            y=y,
            limits=(math.log10(MIN_WEIGHT), 0.0),
            color_label="log10 of the weight",
        )
        for _, weights in pairs
    ]
    change = charts.matrix_chart(
        gap.tolist(),
        x=x,
        y=y,
        limits=(-bound, bound),
        colormap="RdBu_r",
        color_label="weight difference",
    )
    bits = charts.line_chart(entropies, x=Axis(label="query"), y=Axis(label="bits"))
    return [
        Plot(
            name="exact",
            title="Softmax",
            text="Rows are queries, columns are keys.",
            figure=matrices[0],
        ),
        Plot(
            name="approximate",
            title=maps.attention,
            text="The effective matrix of the backend, for the same queries and keys.",
            figure=matrices[1],
        ),
        Plot(
            name="difference",
            title="Difference",
            text="Blue where the approximation has less weight, red where it has more.",
            figure=change,
        ),
        Plot(
            name="entropy",
            title="Entropy",
            text="Of each query's weights: 0 bits is one key, 8 bits are 256 keys of equal weight.",
            figure=bits,
        ),
    ]


def write_maps(out: Path, found: Sequence[AttentionMaps]) -> Path | None:
    """Write ``maps.json``, ``maps.html`` and its plots; return ``None`` without matplotlib."""
    _write_numbers(out / MAPS, {"heads": [maps.facts() for maps in found]})
    if not charts.can_draw():
        return None
    first, table = found[0], maps_table(found)
    drawn = map_plots(first)
    body = [
        page.heading(f"Attention of layer {first.layer}, head {first.head}", 1),
        page.paragraph(summary(first)),
        page.plots_html(drawn),
        page.heading(table.title),
        table.html(),
        page.heading("The text"),
        page.paragraph("".join(first.tokens), muted=True),
    ]
    return _write_page(out / "maps.html", "attnzoo inspect", body, drawn)


def _write_numbers(path: Path, found: dict[str, Any]) -> None:
    data = {"attnzoo": attnzoo.__version__, **found}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, json.dumps(data, indent=2, allow_nan=False) + "\n")
    except OSError as error:
        raise OutputError(cannot_be_written(path.parent, error)) from error


def _write_page(path: Path, title: str, body: Sequence[str], drawn: Sequence[Plot]) -> Path:
    charts.write_pictures(path.parent, drawn)
    footer = page.footer(f"attnzoo {attnzoo.__version__}")
    return page.write_page(path, title=title, body=[*body, footer])


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
    x, y = (
        Axis(label=label, ticks={i: str(i) for i in range(0, size, -(-size // 16))})
        for label, size in (("head", width), ("layer", len(rows)))
    )
    figure = charts.matrix_chart(rows, x=x, y=y, color_label=measure)
    text = MEASURE_TEXTS[measure]
    return Plot(name=measure, title=measure.capitalize(), text=text, figure=figure)


def heads_data(found: HeadStudy) -> dict[str, Any]:
    """Return the measures of heads as plain data."""
    return {"attnzoo": attnzoo.__version__, **asdict(found)}


def write_heads(out: Path, found: HeadStudy) -> Path | None:
    """Write ``heads.json``, ``heads.html`` and its plots; return ``None`` without matplotlib."""
    _write_numbers(out / HEADS, heads_data(found))
    if not charts.can_draw():
        return None
    drawn = [_heat_map(found, measure) for measure in MEASURES]
    body = [page.heading("Attention heads", 1), page.plots_html(drawn)]
    for table in (pruning_table(found), heads_table(found)):
        body += [page.heading(table.title), table.html()]
    layers = ", ".join(f"{i}: {name}" for i, name in enumerate(found.layers))
    body += [page.heading("Layers"), page.paragraph(layers, muted=True)]
    return _write_page(out / "heads.html", "attnzoo heads", body, drawn)
