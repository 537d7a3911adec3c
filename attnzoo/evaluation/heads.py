"""Behaviour and importance of each attention head.

Importance by gradient is that of Michel et al., 2019 (arXiv:1905.10650): a head's output is
multiplied by a mask m = 1, and its importance is the mean over texts of |dL/dm|. L is the loss of
text prediction. A model that predicts no next token has no such loss; there it is the length of
dv/dm, where v is the embedding of a text, divided by its norm. Other letters: B texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnzoo.errors import SpecError
from attnzoo.evaluation.corpus import cut_rows, first_documents, load_tokenizer
from attnzoo.evaluation.embeddings import make_embedding_batch
from attnzoo.evaluation.models import max_positions
from attnzoo.evaluation.rows import Rows, beginnings
from attnzoo.hf.configs import read_field
from attnzoo.hf.heads import head_projections, original_heads
from attnzoo.hf.layers import AttentionLayer, attention_layers
from attnzoo.hf.swap import restore, swap

DIRECTIONS = 8  # random ones, along which the change of embeddings is measured
MEASURES = ("gradient", "entropy", "distance")
OnStep = Callable[[str], None]
ByLayer = dict[str, list[float]]  # a number per head, by the name of the layer


@dataclass(frozen=True, kw_only=True)
class HeadStudy:
    """Measurements of every head of a model.

    Attributes:
        layers: Names of the attention modules.
        numbers: Numbers of the heads of each layer, before any pruning.
        measures: By name, a number per head: ``"gradient"``, the importance; ``"entropy"`` of the
            attention weights in bits; ``"distance"``, the mean distance of query and key in tokens.
        quality: Name of the quality: ``"loss"`` or ``"cosine"``.
        curve: The quality by the fraction of pruned heads, the least important first.
    """

    layers: list[str]
    numbers: dict[str, list[int]]
    measures: dict[str, ByLayer]
    quality: str
    curve: dict[float, float]


class HeadStudyModel:
    """A model with the texts on which its heads are measured.

    Args:
        model: A model in evaluation mode whose layers all have separable heads.
        rows: Texts, one document per row, without padding.

    Raises:
        UnsupportedError: The heads of a layer cannot be distinguished.
    """

    def __init__(self, model: PreTrainedModel, rows: Rows) -> None:
        self.model, self.rows = model.eval().requires_grad_(False), rows.tokens.long()
        self.layers = attention_layers(model)
        self.outputs = {x.name: head_projections(model, x).output for x in self.layers}
        self.heads = {layer.name: layer.geometry.num_heads for layer in self.layers}
        causal = all(layer.geometry.causal for layer in self.layers)
        self.predicts = causal and model.can_generate()
        self._original = None if self.predicts else self.embeddings()

    def losses(self) -> Tensor:
        """Return the cross-entropy of each text in nats, ``[B]``."""
        logits = _wide(self.model(self.rows, use_cache=False).logits[:, :-1])
        return F.cross_entropy(logits.transpose(1, 2), self.rows[:, 1:], reduction="none").mean(1)

    def embeddings(self) -> Tensor:
        """Return the mean last hidden state of each text, of norm 1, ``[B, M]``."""
        out: Any = self.model(self.rows, output_hidden_states=True)
        return F.normalize(_wide(out.hidden_states[-1]).mean(1), dim=1)

    @torch.no_grad()
    def quality(self) -> float:
        """Return the mean loss, or the mean cosine similarity to the original embeddings."""
        if self._original is None:
            return float(self.losses().mean())
        return float((self.embeddings() * self._original).sum(1).mean())

    @contextmanager
    def masked(self, masks: Mapping[str, Tensor]) -> Iterator[None]:
        """Context in which the output of each head is multiplied by a number.

        Args:
            masks: ``[H]``, or ``[B, H]``, by the name of a layer.
        """

        def hook(mask: Tensor) -> Any:
            def multiply(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
                heads = args[0].unflatten(-1, (mask.shape[-1], -1))
                rows = mask.view(-1, 1, mask.shape[-1], 1)
                return ((heads * rows).flatten(-2), *args[1:])

            return multiply

        handles = [self.outputs[n].register_forward_pre_hook(hook(x)) for n, x in masks.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def without(self, pruned: Mapping[str, Sequence[int]]) -> AbstractContextManager[None]:
        """Context manager that multiplies heads, given by position, by 0."""
        masks = {name: torch.ones(count) for name, count in self.heads.items()}
        for name, positions in pruned.items():
            masks[name][list(positions)] = 0
        return self.masked(masks)

    def gradient_importance(self) -> ByLayer:
        """Return the importance of each head by gradient."""
        count = len(self.rows)
        masks = {n: torch.ones(count, h, requires_grad=True) for n, h in self.heads.items()}
        with self.masked(masks), torch.enable_grad():
            if self.predicts:
                values = [self.losses().sum()]
            else:
                vectors, draw = self.embeddings(), torch.Generator().manual_seed(0)
                directions = (torch.randn(vectors.shape, generator=draw) for _ in range(DIRECTIONS))
                values = [(vectors * x.to(vectors)).sum() for x in directions]
            found = [torch.autograd.grad(x, [*masks.values()], retain_graph=True) for x in values]
        return {
            name: torch.stack(slopes).square().mean(0).sqrt().mean(0).tolist()
            for name, slopes in zip(masks, zip(*found, strict=True), strict=True)
        }

    @torch.no_grad()
    def attention_statistics(self) -> dict[str, ByLayer]:
        """Return the entropy and the mean distance of each head's attention."""
        swapped = read_field(self.model.config, "attnzoo") is not None
        if not swapped:
            swap(self.model, "softmax")
        try:
            attentions = self.model(self.rows, output_attentions=True).attentions
        finally:
            if not swapped:
                restore(self.model)
        found: dict[str, ByLayer] = {"entropy": {}, "distance": {}}
        for layer, weights in zip(self.layers, attentions, strict=True):
            share = weights.float().clamp_min(0)
            share = share / share.sum(-1, keepdim=True).clamp_min(1e-12)
            places = torch.arange(share.shape[-1])
            distance = (share * (places[:, None] - places).abs()).sum(-1)
            found["entropy"][layer.name] = entropy(share).mean((0, 2)).tolist()
            found["distance"][layer.name] = distance.mean((0, 2)).tolist()
        return found

    def choose(self, fraction: float, importance: ByLayer) -> dict[str, list[int]]:
        """Return the positions of the heads to prune, by layer: the least important ones.

        Query heads that share a key head stay together, and each layer keeps its most important
        ones.

        Args:
            fraction: Of all heads, 0 to 1.
            importance: Of each head.
        """
        units = []
        for layer in self.layers:
            heads = layer.geometry.num_heads
            size, scores = heads // layer.geometry.num_key_heads, importance[layer.name]
            groups = [list(range(i, i + size)) for i in range(0, heads, size)]
            scored = sorted((sum(scores[i] for i in group) / size, group) for group in groups)
            units += [(score, layer.name, group) for score, group in scored[:-1]]
        wanted = round(fraction * sum(self.heads.values()))
        chosen: dict[str, list[int]] = {}
        for _, name, group in sorted(units):
            if sum(map(len, chosen.values())) + len(group) > wanted:
                break
            chosen.setdefault(name, []).extend(group)
        return {name: sorted(heads) for name, heads in chosen.items()}


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def entropy(weights: Tensor) -> Tensor:
    """Return the entropy of each row of weights in bits; negative weights count as 0."""
    share = weights.clamp_min(0)
    share = share / share.sum(-1, keepdim=True).clamp_min(1e-12)
    return -(share * share.clamp_min(1e-12).log2()).sum(-1)


def study_heads(
    study: HeadStudyModel, fractions: Sequence[float], on_step: OnStep = lambda text: None
) -> HeadStudy:
    """Measure every head, and the quality when more and more are pruned.

    Args:
        study: The model and its texts.
        fractions: Of heads to prune.
        on_step: Called with the name of each step.
    """
    on_step("attention weights")
    statistics = study.attention_statistics()
    on_step("gradients")
    gradient = study.gradient_importance()
    curve = {}
    for fraction in fractions:
        on_step(f"{fraction:.0%} pruned")
        with study.without(study.choose(fraction, gradient)):
            curve[fraction] = study.quality()
    return HeadStudy(
        layers=[layer.name for layer in study.layers],
        numbers={layer.name: original_heads(layer) for layer in study.layers},
        measures={"gradient": gradient, **statistics},
        quality="loss" if study.predicts else "cosine",
        curve=curve,
    )


def head_rows_of_text(
    path: Path, text: Path | None, layers: Sequence[AttentionLayer], *, rows: int, length: int
) -> Rows:
    """Return texts to measure heads on, one document per row: with special tokens for an encoder.

    Args:
        path: Folder of the model.
        text: File; held-out files of the standard library when ``None``.
        layers: Attention layers of the model.
        rows: B; fewer if the text has fewer documents.
        length: T; the median length of several documents if that is less.

    Raises:
        SpecError: The text is too short, or a row is longer than the model's positions.
    """
    limit = max_positions(path)
    if limit is not None and length > limit:
        raise SpecError(f"--max-length must be at most the model's {limit} positions, got {length}")
    if not all(layer.geometry.causal for layer in layers):
        texts = make_embedding_batch(path, text, length, rows).texts
        return Rows.of_documents(texts[max(texts)].tokens)
    tokenizer = load_tokenizer(path)
    documents = first_documents(tokenizer, text)
    if len(documents) > 1:
        return Rows.of_documents(beginnings(documents, rows, length))
    if len(documents[0]) < length:
        raise SpecError(f"The text has {len(documents[0])} tokens, but a row needs {length}")
    return cut_rows(documents, rows, length, torch.Generator().manual_seed(0))
