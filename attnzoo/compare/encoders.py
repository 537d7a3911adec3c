"""Heads and layers of an encoder, with softmax attention and with a swap.

Both models read the same text with its special tokens: their predictions if the model classifies,
their attention maps, and their hidden states in two dimensions. Other letters: L layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnzoo.errors import SpecError
from attnzoo.evaluation.data import load_tokenizer, read_documents
from attnzoo.evaluation.models import max_positions, spec_label
from attnzoo.hf.configs import read_field
from attnzoo.hf.layers import attention_layers
from attnzoo.hf.pretrained import load_pretrained
from attnzoo.hf.saving.files import model_class, read_config
from attnzoo.hf.swap.convert import restore, swap
from attnzoo.report import charts, page
from attnzoo.report.charts import Axis, Panel, Plot
from attnzoo.report.format import number
from attnzoo.report.table import Table
from attnzoo.spec import AttentionSpec

MOSAIC_PIXELS = 48  # of one head's map, in each direction
MIN_WEIGHT = 1e-3  # smaller attention weights have the darkest colour
MOST_CHANGED = 10  # rows of the table of changed maps
CHARACTERS = 2**16  # of a text that are tokenized


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One model's reading of a text.

    Attributes:
        weights: Attention weights, ``[L, H, T, T]``.
        states: Hidden states before the first layer and after each, ``[L + 1, T, M]``.
        logits: ``[labels]`` of a classifier, else ``None``.
    """

    weights: Tensor
    states: Tensor
    logits: Tensor | None


@dataclass(frozen=True, kw_only=True)
class EncoderReadings:
    """An encoder's readings of a text, with softmax attention and with a swap.

    Attributes:
        exact: With softmax.
        swapped: With the swap in all layers.
        spec: The swap.
        tokens: The T tokens as text, special ones included.
        special: Whether each is a special token.
        labels: Names of a classifier's labels.
        multi_label: Whether a text can have several labels, each with a probability of its own.
    """

    exact: Reading
    swapped: Reading
    spec: AttentionSpec
    tokens: list[str]
    special: list[bool]
    labels: list[str]
    multi_label: bool

    @property
    def attention(self) -> str:
        """Name of the swap."""
        return spec_label(self.spec)

    def scores(self, reading: Reading) -> list[float]:
        """Return the probability of each label; of a model with one label, the predicted number."""
        if reading.logits is None:
            return []
        logits = reading.logits.double()
        if len(logits) == 1:
            return [round(x, 6) for x in logits.tolist()]
        shares = logits.sigmoid() if self.multi_label else logits.softmax(0)
        return [round(x, 6) for x in shares.tolist()]

    def differences(self) -> Tensor:
        """Return the total variation distance of each query's weights, ``[L, H, T]``."""
        return (self.exact.weights - self.swapped.weights).abs().sum(-1) / 2

    def cosines(self) -> list[float]:
        """Return the mean cosine similarity of the hidden states after each layer, L + 1 values."""
        similar = F.cosine_similarity(self.exact.states, self.swapped.states, dim=-1)
        return [round(x, 6) for x in similar.mean(1).tolist()]

    def data(self) -> dict[str, Any]:
        """Return the numbers as plain data."""
        return {
            "attention": self.attention,
            "tokens": self.tokens,
            "labels": self.labels,
            "scores": {
                "softmax": self.scores(self.exact),
                "swapped": self.scores(self.swapped),
            },
            "difference": [
                [round(x, 6) for x in row] for row in self.differences().mean(-1).tolist()
            ],
            "cosine_by_layer": self.cosines(),
        }


def is_encoder(path: Path) -> bool:
    """Return whether no attention layer of a saved model is causal."""
    config = read_config(path)
    with torch.device("meta"):
        layers = attention_layers(model_class(config, path)(config))
    return bool(layers) and not any(layer.geometry.causal for layer in layers)


@torch.no_grad()
def read_encoder(
    path: Path, spec: AttentionSpec | None, *, text: Path | None, tokens: int
) -> EncoderReadings:
    """Return the readings of the first tokens of a text's first document, with and without a swap.

    Args:
        path: Folder of a saved model that is not causal; it may be swapped.
        spec: The swap; that of the saved model when ``None``, or ``linear`` if it has none.
        text: File; held-out files of the standard library when ``None``.
        tokens: T at most, with special tokens.

    Raises:
        SpecError: ``tokens`` is below 4, or above the model's positions.
    """
    limit = max_positions(path)
    if tokens < 4 or (limit is not None and tokens > limit):
        raise SpecError(f"--tokens must be 4 to {limit or 'any'} for this model, got {tokens}")
    config = read_config(path)
    model: Any = load_pretrained(model_class(config, path), path, dtype=torch.float32).eval()
    saved = read_field(config, "attnzoo")
    if spec is None and saved is not None:
        spec = AttentionSpec.from_dict(saved)
    else:
        spec = spec or AttentionSpec("linear")
        swap(model, spec)
    tokenizer = load_tokenizer(path)
    found = tokenizer(
        read_documents(text)[0][:CHARACTERS],
        truncation=True,
        max_length=tokens,
        return_special_tokens_mask=True,
    )
    ids = torch.tensor([found["input_ids"]])
    swapped = _read(model, ids)
    restore(model)
    swap(model, "softmax")  # returns its weights
    exact = _read(model, ids)
    labels = [] if exact.logits is None else [str(x) for x in _labels(config, len(exact.logits))]
    return EncoderReadings(
        exact=exact,
        swapped=swapped,
        spec=spec,
        tokens=tokenizer.convert_ids_to_tokens(found["input_ids"]),
        special=[bool(x) for x in found["special_tokens_mask"]],
        labels=labels,
        multi_label=read_field(config, "problem_type") == "multi_label_classification",
    )


def _read(model: Any, ids: Tensor) -> Reading:
    out = model(ids, output_attentions=True, output_hidden_states=True)
    count = len(attention_layers(model))
    logits: Any = getattr(out, "logits", None)
    classifies = logits is not None and logits.ndim == 2
    return Reading(
        weights=torch.stack([x[0].float() for x in out.attentions[:count]]),
        states=torch.stack([x[0].float() for x in out.hidden_states]),
        logits=logits[0].float() if classifies else None,
    )


def _labels(config: Any, count: int) -> list[Any]:
    names = read_field(config, "id2label") or {}
    return [names.get(i, names.get(str(i), i)) for i in range(count)]


def principal_axes(states: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean ``[M]`` and the two principal axes ``[M, 2]`` of points ``[T, M]``.

    The result depends on the points only: the random start is fixed, and the largest entry of each
    axis is positive.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        axes = torch.pca_lowrank(states, q=min(6, *states.shape), center=True)[2][:, :2]
    largest = axes.gather(0, axes.abs().argmax(0, keepdim=True))
    return states.mean(0), axes * largest.sign()


# -- report --------------------------------------------------------------------------------------


def prediction_table(found: EncoderReadings) -> Table | None:
    """Return the predictions of both models, the most probable label first, if it classifies."""
    if found.exact.logits is None:
        return None
    exact, swapped = found.scores(found.exact), found.scores(found.swapped)
    order = sorted(range(len(exact)), key=lambda i: -exact[i])[:MOST_CHANGED]
    return Table(
        columns=["label", "softmax", found.attention],
        rows=[[found.labels[i], number(exact[i], 4), number(swapped[i], 4)] for i in order],
        title="Prediction",
    )


def changed_table(found: EncoderReadings) -> Table:
    """Return the heads and tokens whose attention the swap changes most."""
    gap = found.differences()
    _, heads, length = gap.shape
    rows = []
    for index in gap.flatten().argsort(descending=True, stable=True)[:MOST_CHANGED].tolist():
        layer, head, query = index // (heads * length), index // length % heads, index % length
        tops = []
        for reading in (found.exact, found.swapped):
            weights = reading.weights[layer, head, query]
            tops.append(f"{found.tokens[int(weights.argmax())]} ({float(weights.max()):.0%})")
        moved = f"{float(gap[layer, head, query]):.0%}"
        rows.append([f"{layer}, {head}", f"{query}: {found.tokens[query]}", moved, *tops])
    return Table(
        columns=["layer, head", "query", "moved weight", "top key, softmax", found.attention],
        rows=rows,
        title="Where the maps differ most",
        numeric=False,
    )


def encoder_plots(found: EncoderReadings) -> list[Plot]:
    """Return the difference by layer and head, all maps side by side, and the hidden states."""
    gap = found.differences().mean(-1)
    layers, heads = gap.shape
    differences = charts.matrix_chart(
        gap.tolist(),
        x=Axis(label="head", ticks={i: str(i) for i in range(0, heads, -(-heads // 16))}),
        y=Axis(label="layer", ticks={i: str(i) for i in range(0, layers, -(-layers // 16))}),
        colormap="Reds",
        color_label="moved weight",
    )
    return [
        Plot(
            name="encoder-difference",
            title="Difference by layer and head",
            text="Fraction of the weight that the swap moves to other keys, mean over queries.",
            figure=differences,
        ),
        _mosaic("encoder-exact", "All heads, softmax", found.exact),
        _mosaic("encoder-swapped", f"All heads, {found.attention}", found.swapped),
        Plot(
            name="encoder-states",
            title="Hidden states",
            text=(
                "The first two principal axes of softmax's hidden states (dots) of each layer; a "
                f"line leads to the state of the same token with {found.attention} (crosses). "
                "Colours are positions; special tokens are named. In brackets: the mean cosine "
                "similarity of both."
            ),
            figure=charts.scatter_grid(_panels(found)),
        ),
    ]


def _mosaic(name: str, title: str, reading: Reading) -> Plot:
    """Draw the maps of all layers (rows) and heads (columns) in one picture."""
    layers, heads, length, _ = reading.weights.shape
    pixels = min(MOSAIC_PIXELS, length)
    small = F.adaptive_max_pool2d(reading.weights, pixels)
    framed = F.pad(small.clamp_min(MIN_WEIGHT).log10(), (0, 2, 0, 2), value=float("nan"))
    side = pixels + 2
    rows = framed.transpose(1, 2).reshape(layers * side, heads * side)
    middle = pixels / 2
    return Plot(
        name=name,
        title=title,
        text=(
            "One map per layer (rows) and head (columns): queries downwards, keys to the right, "
            "the largest weight where a pixel stands for several. Colours are logarithmic."
        ),
        figure=charts.matrix_chart(
            rows.tolist(),
            x=Axis(label="head", ticks={middle + i * side: str(i) for i in range(heads)}),
            y=Axis(label="layer", ticks={middle + i * side: str(i) for i in range(layers)}),
            color_label="log10 of the weight",
        ),
    )


def _panels(found: EncoderReadings) -> list[Panel]:
    """Return the states of each layer on the principal axes of softmax's."""
    panels = []
    names = {i: found.tokens[i] for i, special in enumerate(found.special) if special}
    for layer, cosine in enumerate(found.cosines()):
        exact, swapped = found.exact.states[layer], found.swapped.states[layer]
        mean, axes = principal_axes(exact)
        panels.append(
            Panel(
                title=f"{f'layer {layer - 1}' if layer else 'embeddings'} ({cosine:.2f})",
                before=((exact - mean) @ axes).tolist(),
                after=((swapped - mean) @ axes).tolist(),
                names=names,
            )
        )
    return panels


def encoder_sections(encoder: EncoderReadings, drawn: list[Plot]) -> list[str]:
    """Return the part of the page about all layers of an encoder."""
    tables = [prediction_table(encoder), changed_table(encoder)]
    sections = [page.heading(f"An encoder with softmax and with {encoder.attention}", 1)]
    for table in tables:
        sections += [page.heading(table.title), table.html()] if table is not None else []
    return [*sections, page.plots_html(drawn)]
