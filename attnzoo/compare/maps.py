"""Attention maps of one layer: exact, approximate and their difference, head by head.

Only one layer is swapped, so that both maps have the same queries and keys.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import attnzoo
from attnzoo.backends.block_sparse import BlockSparseConfig
from attnzoo.compare.encoders import EncoderReadings, encoder_plots, encoder_sections
from attnzoo.compare.selected_blocks import SelectedBlocks, selected_blocks
from attnzoo.errors import SpecError
from attnzoo.evaluation.corpus import held_out_files
from attnzoo.evaluation.data import load_tokenizer, read_documents, tokenize
from attnzoo.evaluation.models import is_embedded, max_positions, model_path, spec_label
from attnzoo.evaluation.rows import Rows
from attnzoo.hf.layers import attention_layers
from attnzoo.hf.pretrained import load_pretrained
from attnzoo.hf.saving.files import model_class, read_config
from attnzoo.hf.swap.convert import swap
from attnzoo.report import charts, page
from attnzoo.report.atomic_write import atomic_write
from attnzoo.report.charts import Axis, Plot, Series
from attnzoo.report.format import format_length, number
from attnzoo.report.output_path import OutputError, cannot_be_written
from attnzoo.report.table import Table
from attnzoo.spec import AttentionSpec

DATA = "maps.json"
MIN_WEIGHT = 1e-4  # smaller attention weights have the darkest colour
FAR_BUCKET = 6  # first distance bucket beyond 31 tokens


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
        blocks: The selected key blocks; ``None`` unless the backend is ``block_sparse``.
        one_layer: Whether only this layer is swapped, so that both have the same queries and keys.
    """

    exact: Tensor
    approximate: Tensor
    tokens: list[str]
    attention: str
    layer: int
    head: int
    blocks: SelectedBlocks | None = None
    one_layer: bool = True

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
            "mass_up_to": distance_edges(len(self.exact)),
            "mass_exact": [round(float(x), 4) for x in mass_by_distance(self.exact)],
            "mass_approximate": [round(float(x), 4) for x in mass_by_distance(self.approximate)],
            **({} if self.blocks is None else self.blocks.facts()),
        }


def difference(exact: Tensor, approximate: Tensor) -> Tensor:
    """Return the total variation distance of each row, ``[T]``: 0 is equal, 1 disjoint."""
    return (exact - approximate).abs().sum(1) / 2


def entropy(weights: Tensor) -> Tensor:
    """Return the entropy of each row in bits, ``[T]``; negative weights count as 0."""
    share = weights.clamp_min(0)
    share = share / share.sum(1, keepdim=True).clamp_min(1e-12)
    return -(share * share.clamp_min(1e-12).log2()).sum(1)


def distance_edges(length: int) -> list[int]:
    """Return the largest distance of each bucket: 0, 1, 3, 7 and so on, up to ``length - 1``."""
    return [2**i - 1 for i in range(math.ceil(math.log2(max(2, length))) + 1)]


def mass_by_distance(weights: Tensor) -> Tensor:
    """Return the fraction of absolute weight in each bucket of distance from query to key."""
    length, keys = weights.shape
    offsets = torch.arange(keys) - torch.arange(length)[:, None]
    bucket = (offsets.abs() + 1).double().log2().ceil().long()
    mass = weights.new_zeros(len(distance_edges(length)))
    mass.index_add_(0, bucket.flatten(), weights.abs().flatten())
    return mass / mass.sum()


def make_maps(
    model: str,
    spec: AttentionSpec,
    *,
    text: Path | None,
    layer: int,
    head: int,
    tokens: int,
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
    rows, words = _read(path, text, model, tokens)
    loaded: Any = load_pretrained(model_class(config, path), path, dtype=torch.float32).eval()
    layers = attention_layers(loaded)
    heads = layers[0].geometry.num_heads if layers else 0
    indices = [found.geometry.layer for found in layers]
    if layer not in indices:
        raise SpecError(f"--layer must be one of {indices[0]} to {indices[-1]}, got {layer}")
    if not 0 <= head < heads:
        raise SpecError(f"--head must be 0 to {heads - 1}, got {head}")
    exact = _weights(loaded, AttentionSpec("softmax"), rows, indices.index(layer))
    one_layer = AttentionSpec("softmax", layers={str(layer): spec.default})
    approximate = _weights(loaded, one_layer, rows, indices.index(layer))
    causal = layers[indices.index(layer)].geometry.causal
    return [
        AttentionMaps(
            exact=exact[index],
            approximate=approximate[index],
            tokens=words,
            attention=spec_label(spec),
            layer=layer,
            head=index,
            blocks=_blocks(exact[index], approximate[index], spec, causal=causal),
        )
        for index in _order(head, heads)
    ]


def _order(head: int, heads: int) -> list[int]:
    """Return the heads of a layer, the given one first."""
    return [head, *(other for other in range(heads) if other != head)]


def maps_of_readings(found: EncoderReadings, *, layer: int, head: int) -> list[AttentionMaps]:
    """Return the maps of one layer as :func:`make_maps` does, with all layers swapped.

    Raises:
        SpecError: The layer or the head does not exist.
    """
    layers, heads = found.exact.weights.shape[:2]
    for name, value, count in (("layer", layer, layers), ("head", head, heads)):
        if not 0 <= value < count:
            raise SpecError(f"--{name} must be 0 to {count - 1}, got {value}")
    entry = found.spec.for_layer(layer)
    spec = AttentionSpec(entry.backend, **entry.options)
    return [
        AttentionMaps(
            exact=found.exact.weights[layer, index],
            approximate=found.swapped.weights[layer, index],
            tokens=[f"{word} " for word in found.tokens],
            attention=found.attention,
            layer=layer,
            head=index,
            blocks=_blocks(
                found.exact.weights[layer, index],
                found.swapped.weights[layer, index],
                spec,
                causal=False,
            ),
            one_layer=False,
        )
        for index in _order(head, heads)
    ]


def _blocks(
    exact: Tensor, approximate: Tensor, spec: AttentionSpec, *, causal: bool
) -> SelectedBlocks | None:
    """Return the key blocks that a head selected, if the backend selects blocks."""
    config = spec.default.config
    if not isinstance(config, BlockSparseConfig):
        return None
    return selected_blocks(exact, approximate, config, causal=causal)


def _read(path: Path, text: Path | None, model: str, tokens: int) -> tuple[Rows, list[str]]:
    """Return the start of a text's first document as one row, and its tokens as text."""
    if tokens < 2:
        raise SpecError(f"--tokens must be 2 or more, got {tokens}")
    if text is None and not is_embedded(model):
        raise SpecError("A model needs --text: give a text file in the model's language")
    limit = max_positions(path)
    if limit is not None and tokens > limit:
        raise SpecError(f"--tokens must be at most the model's {limit} positions, got {tokens}")
    string = held_out_files()[0].decode("utf-8", "replace")
    if text is not None:
        string = read_documents(text)[0]
    tokenizer = load_tokenizer(path)
    ids = tokenize(tokenizer, string)[:tokens]
    if len(ids) < 2:
        raise SpecError(f"The text {str(text)!r} has {len(ids)} tokens; 2 or more are needed")
    return Rows.of_documents(ids[None]), [tokenizer.decode([i]) for i in ids.tolist()]


@torch.no_grad()
def _weights(model: PreTrainedModel, spec: AttentionSpec, rows: Rows, index: int) -> Tensor:
    """Run the model under a spec and return the attention weights of a layer, ``[H, T, S]``."""
    swap(model, spec)
    out = model(rows.tokens, output_attentions=True)
    attentions: tuple[Tensor, ...] = out.attentions
    return attentions[index][0].float()


# -- report --------------------------------------------------------------------------------------


def summary(maps: AttentionMaps) -> str:
    """Return how the approximation differs from softmax, as text."""
    facts = maps.facts()
    exact_far, approximate_far = (
        sum(facts[name][FAR_BUCKET:]) for name in ("mass_exact", "mass_approximate")
    )
    return (
        f"Layer {maps.layer}, head {maps.head}, {facts['tokens']} tokens: {maps.attention} moves "
        f"{facts['difference']:.0%} of the weight to other keys than softmax, and gives the same "
        f"key the largest weight for {facts['same_favourite']:.0%} of the queries. Entropy "
        f"{facts['entropy_exact']:.1f} bits (softmax) and {facts['entropy_approximate']:.1f}; "
        f"weight on keys more than 31 tokens away {exact_far:.0%} (softmax) and "
        f"{approximate_far:.0%}." + ("" if maps.blocks is None else f" {maps.blocks.summary()}")
    )


def heads_table(found: list[AttentionMaps]) -> Table:
    """Return the statistics of all heads of the layer as a table."""
    columns = ["head", "difference", "same top key", "entropy", "approximate"]
    rows = []
    for maps in sorted(found, key=lambda maps: maps.head):
        facts = maps.facts()
        rows.append(
            [
                str(maps.head),
                f"{facts['difference']:.0%}",
                f"{facts['same_favourite']:.0%}",
                number(facts["entropy_exact"], 2),
                number(facts["entropy_approximate"], 2),
                f"{sum(facts['mass_exact'][FAR_BUCKET:]):.0%}",
                f"{sum(facts['mass_approximate'][FAR_BUCKET:]):.0%}",
            ]
        )
    return Table(
        columns=[*columns, "beyond 31 tokens", "approximate"],
        rows=rows,
        title=f"Layer {found[0].layer}, all heads",
    )


def plots(maps: AttentionMaps) -> list[Plot]:
    """Return both maps, their difference, entropy by query and weight by distance."""
    gap = maps.approximate - maps.exact
    edges = [format_length(n) for n in distance_edges(len(gap))]
    labels = [f"up to {edge}" if i > 1 else edge for i, edge in enumerate(edges)]
    pairs = (("softmax", maps.exact), (maps.attention, maps.approximate))
    entropies = [
        Series(
            name=name,
            x=range(len(weights)),
            y=entropy(weights).tolist(),
            style=index,
            kind="plain",
        )
        for index, (name, weights) in enumerate(pairs)
    ]
    return [
        Plot(
            name="exact",
            title="Softmax",
            text="Rows are queries, columns are keys.",
            figure=_weights_chart(maps.exact),
        ),
        Plot(
            name="approximate",
            title=maps.attention,
            text="The effective matrix of the backend, "
            + ("for the same queries and keys." if maps.one_layer else "all layers swapped."),
            figure=_weights_chart(maps.approximate),
        ),
        Plot(
            name="difference",
            title="Difference",
            text="Blue where the approximation has less weight, red where it has more.",
            figure=_difference_chart(gap),
        ),
        Plot(
            name="entropy",
            title="Entropy",
            text="Of each query's weights: 0 bits is one key, 8 bits are 256 keys of equal weight.",
            figure=charts.line_chart(entropies, x=Axis(label="query"), y=Axis(label="bits")),
        ),
        Plot(
            name="distance",
            title="Weight by distance",
            text="Distance between query and key in tokens, over all queries.",
            figure=charts.bar_chart(
                labels,
                {name: mass_by_distance(weights).tolist() for name, weights in pairs},
                value=Axis(label="fraction of the weight", percent=True),
            ),
        ),
        *([] if maps.blocks is None else maps.blocks.plots()),
    ]


def _weights_chart(weights: Tensor) -> Any:
    """Draw attention weights with a logarithmic colour scale."""
    return charts.matrix_chart(
        weights.clamp_min(MIN_WEIGHT).log10().tolist(),
        x=Axis(label="key"),
        y=Axis(label="query"),
        limits=(math.log10(MIN_WEIGHT), 0.0),
        color_label="log10 of the weight",
    )


def _difference_chart(gap: Tensor) -> Any:
    bound = float(gap.abs().max()) or 1.0
    return charts.matrix_chart(
        gap.tolist(),
        x=Axis(label="key"),
        y=Axis(label="query"),
        limits=(-bound, bound),
        colormap="RdBu_r",
        color_label="weight difference",
    )


def write_maps(
    out: Path, found: list[AttentionMaps], encoder: EncoderReadings | None = None
) -> Path | None:
    """Write ``maps.json``, ``maps.html`` and its plots; return ``None`` without matplotlib.

    Args:
        out: Folder.
        found: Maps of the heads of one layer.
        encoder: Readings of the whole encoder, for one.
    """
    data: dict[str, Any] = {"attnzoo": attnzoo.__version__}
    data["heads"] = [maps.facts() for maps in found]
    if encoder is not None:
        data["encoder"] = encoder.data()
    try:
        out.mkdir(parents=True, exist_ok=True)
        atomic_write(out / DATA, json.dumps(data, indent=2, allow_nan=False) + "\n")
    except OSError as error:
        raise OutputError(cannot_be_written(out, error)) from error
    if not charts.can_draw():
        return None
    first, table = found[0], heads_table(found)
    drawn = plots(first)
    whole = [] if encoder is None else encoder_plots(encoder)
    charts.write_pictures(out, [*drawn, *whole])
    body = [
        *(encoder_sections(encoder, whole) if encoder is not None else []),
        page.heading(f"Attention of layer {first.layer}, head {first.head}", 1),
        page.paragraph(summary(first)),
        page.plots_html(drawn),
        page.heading(table.title),
        table.html(),
        page.heading("The text"),
        page.paragraph("".join(first.tokens), muted=True),
        page.footer(f"attnzoo {attnzoo.__version__}"),
    ]
    return page.write_page(out / "maps.html", title="attnzoo inspect", body=body)
