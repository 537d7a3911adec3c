"""Attention maps of one layer: exact, approximate, and how they differ, head by head.

The layer alone is swapped, so that both maps are of the same queries and keys.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

import attnzoo
from attnzoo.compare.run import EMBEDDED
from attnzoo.corpus import read_bytes, standard_library_files
from attnzoo.demo.run import label
from attnzoo.demo.text import embedded_model_path, longest_context
from attnzoo.errors import SpecError
from attnzoo.integrations.convert import swap
from attnzoo.integrations.files import model_class, read_config
from attnzoo.integrations.layers import attention_layers
from attnzoo.report import page
from attnzoo.report.picture import write_pictures
from attnzoo.report.text import number, short
from attnzoo.spec import AttentionSpec


@dataclass(frozen=True, kw_only=True)
class Maps:
    """Two attention maps of the same queries and keys, and what can be told from them.

    Attributes:
        exact: ``[T, S]``, softmax attention.
        approximate: ``[T, S]``, the backend's effective matrix.
        tokens: T, as text.
        attention: What the backend is called.
        layer: Number of the layer.
        head: Number of the head.
    """

    exact: Tensor
    approximate: Tensor
    tokens: list[str]
    attention: str
    layer: int
    head: int

    def facts(self) -> dict[str, Any]:
        """Return what a table shows, as plain data."""
        edges = distance_edges(len(self.exact))
        return {
            "layer": self.layer,
            "head": self.head,
            "attention": self.attention,
            "tokens": len(self.exact),
            "difference": round(float(difference(self.exact, self.approximate).mean()), 4),
            "same_favourite": round(
                float((self.exact.argmax(1) == self.approximate.argmax(1)).float().mean()), 4
            ),
            "entropy_exact": round(float(entropy(self.exact).mean()), 4),
            "entropy_approximate": round(float(entropy(self.approximate).mean()), 4),
            "mass_up_to": edges,
            "mass_exact": [round(float(x), 4) for x in mass_by_distance(self.exact)],
            "mass_approximate": [round(float(x), 4) for x in mass_by_distance(self.approximate)],
        }


def difference(exact: Tensor, approximate: Tensor) -> Tensor:
    """Return half the sum of absolute differences of each row, ``[T]``: 0 is equal, 1 disjoint."""
    return (exact - approximate).abs().sum(1) / 2


def entropy(weights: Tensor) -> Tensor:
    """Return the entropy of every row in bits, ``[T]``; what is negative counts as nothing."""
    share = weights.clamp_min(0)
    share = share / share.sum(1, keepdim=True).clamp_min(1e-12)
    return -(share * share.clamp_min(1e-12).log2()).sum(1)


def distance_edges(length: int) -> list[int]:
    """Return the largest distance of each bucket: 0, 1, 3, 7 and so on, up to ``length - 1``."""
    return [2**i - 1 for i in range(math.ceil(math.log2(max(2, length))) + 1)]


def mass_by_distance(weights: Tensor) -> Tensor:
    """Return the share of all weight by distance between query and key, a bucket each."""
    length, keys = weights.shape
    places = torch.arange(keys) - torch.arange(length)[:, None]
    bucket = (places.abs() + 1).double().log2().ceil().long()
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
) -> list[Maps]:
    """Return the maps of a head, and of all heads of the layer after it.

    Args:
        model: Folder of a saved model, or ``"embedded"``.
        spec: The attention to look at.
        text: File; a held-out one of the standard library for the embedded model.
        layer: Number of the layer.
        head: Number of the head.
        tokens: How many of the text are looked at.

    Raises:
        SpecError: The model, the text, the layer or the head is not there.
    """
    path = embedded_model_path() if model == EMBEDDED else Path(model)
    config = read_config(path)
    ids, words = _read(path, text, model, tokens)
    loaded: Any = model_class(config, path).from_pretrained(path, dtype=torch.float32).eval()
    layers = attention_layers(loaded)
    heads = layers[0].geometry.num_heads if layers else 0
    numbers = [found.geometry.layer for found in layers]
    if layer not in numbers:
        raise SpecError(f"--layer must be one of {numbers[0]} to {numbers[-1]}, got {layer}")
    if not 0 <= head < heads:
        raise SpecError(f"--head must be 0 to {heads - 1}, got {head}")
    exact = _weights(loaded, AttentionSpec("softmax"), ids, numbers.index(layer))
    near = AttentionSpec("softmax", layers={str(layer): spec.default})
    approximate = _weights(loaded, near, ids, numbers.index(layer))
    order = [head, *(other for other in range(heads) if other != head)]
    return [
        Maps(
            exact=exact[which],
            approximate=approximate[which],
            tokens=words,
            attention=label(spec),
            layer=layer,
            head=which,
        )
        for which in order
    ]


def _read(path: Path, text: Path | None, model: str, tokens: int) -> tuple[Tensor, list[str]]:
    """Tokenize the beginning of a text; returns ``[1, T]`` and the tokens as text."""
    if tokens < 2:
        raise SpecError(f"--tokens must be 2 or more, got {tokens}")
    if text is None and model != EMBEDDED:
        raise SpecError("Give --text too: a file in the language that the model knows")
    limit = longest_context(path)
    if limit is not None and tokens > limit:
        raise SpecError(f"--tokens must be at most the model's {limit} positions, got {tokens}")
    try:
        data = text.read_bytes() if text else read_bytes(standard_library_files(held_out=True)[:1])
    except OSError as error:
        raise SpecError(f"The text {str(text)!r} cannot be read: {error}") from error
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    given = tokenizer(data.decode("utf-8", "replace"), add_special_tokens=False, verbose=False)
    ids = given["input_ids"][:tokens]
    if len(ids) < 2:
        raise SpecError(f"The text {str(text)!r} has {len(ids)} tokens; 2 or more are needed")
    return torch.tensor([ids]), [tokenizer.decode([i]) for i in ids]


@torch.no_grad()
def _weights(model: PreTrainedModel, spec: AttentionSpec, ids: Tensor, index: int) -> Tensor:
    """Run the model under a spec, and return the weights of one layer, ``[H, T, S]``."""
    swap(model, spec)
    out = model(ids, output_attentions=True)
    attentions: tuple[Tensor, ...] = out.attentions
    return attentions[index][0].float()


# -- what is written -----------------------------------------------------------------------------


def summary(maps: Maps) -> str:
    """Say in words how the approximation differs."""
    facts = maps.facts()
    far = sum(facts["mass_exact"][6:]), sum(facts["mass_approximate"][6:])
    return (
        f"Layer {maps.layer}, head {maps.head}, {facts['tokens']} tokens: {maps.attention} puts "
        f"{facts['difference']:.0%} of the weight elsewhere than softmax does, and agrees on the "
        f"key of most weight for {facts['same_favourite']:.0%} of the queries. Entropy "
        f"{facts['entropy_exact']:.1f} bits against {facts['entropy_approximate']:.1f}; weight on "
        f"keys more than 31 tokens away {far[0]:.0%} against {far[1]:.0%}."
    )


def heads_table(found: list[Maps]) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows of a table over all heads."""
    head = ["head", "differs by", "same favourite", "entropy", "approximate", "far", "approximate"]
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
                f"{sum(facts['mass_exact'][6:]):.0%}",
                f"{sum(facts['mass_approximate'][6:]):.0%}",
            ]
        )
    return head, rows


def plots(maps: Maps) -> list[page.Plot]:
    """Return the maps, their difference, entropy by query and mass by distance."""
    told = (
        ("exact", "Softmax", "Row: query; column: key. The colour is a logarithm.", maps.exact),
        (
            "approximate",
            maps.attention,
            "The effective matrix of the backend, on the same queries and keys.",
            maps.approximate,
        ),
    )
    made = [
        page.Plot(name=name, title=title, text=text, figure=_heat(weights, maps.tokens))
        for name, title, text, weights in told
    ]
    gap = maps.approximate - maps.exact
    made.append(
        page.Plot(
            name="difference",
            title="Difference",
            text="Blue where the approximation puts less weight, red where more.",
            figure=_heat(gap, maps.tokens, signed=True),
        )
    )
    lines, bars = page.clear_figure(), page.clear_figure()
    edges = [f"to {short(edge)}" if edge > 1 else str(edge) for edge in distance_edges(len(gap))]
    for name, weights in (("softmax", maps.exact), (maps.attention, maps.approximate)):
        lines.add_scatter(y=entropy(weights).tolist(), name=name, mode="lines")
        bars.add_bar(x=edges, y=mass_by_distance(weights).tolist(), name=name)
    lines.update_xaxes(title="query")
    lines.update_yaxes(title="bits")
    bars.update_xaxes(title="tokens between query and key")
    bars.update_yaxes(title="share of weight", tickformat=".0%")
    made.append(
        page.Plot(
            name="entropy",
            title="Entropy",
            text="Of every query's weights: 0 bits is one key, 8 bits are 256 alike.",
            figure=lines,
        )
    )
    made.append(
        page.Plot(
            name="distance", title="Weight by distance", text="Over all queries.", figure=bars
        )
    )
    return made


def _heat(weights: Tensor, tokens: list[str], *, signed: bool = False) -> Any:
    """Draw a matrix with its tokens on hover."""
    import plotly.graph_objects as go

    floor = 1e-4
    shown = weights if signed else weights.clamp_min(floor).log10()
    bound = float(weights.abs().max())
    figure = page.clear_figure()
    figure.add_trace(
        go.Heatmap(
            z=[[round(x, 4) for x in row] for row in shown.tolist()],
            colorscale="RdBu_r" if signed else "Viridis",
            zmin=-bound if signed else math.log10(floor),
            zmax=bound if signed else 0.0,
            hovertemplate="query %{y}, key %{x}: %{z}<extra></extra>",
            colorbar={"title": "" if signed else "log10"},
        )
    )
    figure.update_yaxes(autorange="reversed", title="query", showgrid=False)
    figure.update_xaxes(title="key", showgrid=False)
    return figure


def write_maps(out: Path, found: list[Maps]) -> Path | None:
    """Write ``maps.json``, ``maps.html`` and its plots as PNG; ``None`` without plotly."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        data = {"attnzoo": attnzoo.__version__, "heads": [maps.facts() for maps in found]}
        (out / "maps.json").write_text(json.dumps(data, indent=2) + "\n")
    except OSError as error:
        raise SpecError(f"{str(out)!r} cannot be written: {error}") from error
    if not page.can_plot():
        return None
    first = found[0]
    drawn = plots(first)
    write_pictures(out, drawn)
    body = [
        page.heading(f"Attention of layer {first.layer}, head {first.head}", 1),
        page.paragraph(summary(first)),
        page.plots_html(drawn),
        page.heading("All heads of the layer"),
        page.table(*heads_table(found)),
        page.heading("The text"),
        page.paragraph("".join(first.tokens), soft=True),
        page.footer(f"attnzoo {attnzoo.__version__}"),
    ]
    return page.write_page(out / "maps.html", title="attnzoo inspect", body=body)
