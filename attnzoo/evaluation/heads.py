"""Behaviour and importance of each attention head.

Importance by gradient is that of Michel et al., 2019 (arXiv:1905.10650): a head's output is
multiplied by a mask m = 1, and its importance is the mean over texts of |dL/dm|. L is the loss of
text prediction. A model that predicts no next token has no such loss; there it is the length of
dv/dm, where v is the embedding of a text, divided by its norm.

Where the output projection has a bias, a head is not set to zero but to its mean output over the
texts: the bias takes it over, at no cost. Other letters: B texts.
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
from attnzoo.evaluation.corpus import cut_rows
from attnzoo.evaluation.data import first_documents, load_tokenizer, tokenize
from attnzoo.evaluation.embeddings import CHARACTERS, make_embedding_batch
from attnzoo.evaluation.models import max_positions
from attnzoo.evaluation.rows import Rows, beginnings
from attnzoo.hf.configs import read_field
from attnzoo.hf.heads.projections import head_projections
from attnzoo.hf.heads.pruning import original_heads
from attnzoo.hf.layers import AttentionLayer, attention_layers
from attnzoo.hf.swap.convert import restore, swap

DIRECTIONS = 8  # random ones, along which the change of embeddings is measured
MEASURES = ("gradient", "entropy", "distance", "beyond", "first")
OnStep = Callable[[str], None]
ByLayer = dict[str, list[float]]  # a number per head, by the name of the layer


@dataclass(frozen=True, kw_only=True)
class HeadStudy:
    """Measurements of every head of a model.

    Attributes:
        layers: Names of the attention modules.
        numbers: Numbers of the heads of each layer, before any pruning.
        measures: By name, a number per head: ``"gradient"``, the importance; ``"entropy"`` of the
            attention weights in bits; ``"distance"``, the mean distance of query and key in tokens;
            ``"beyond"``, the fraction of weight on keys that are ``window`` tokens away or more;
            ``"first"``, the fraction on the first token.
        window: Distance in tokens.
        quality: Name of the quality: ``"loss"`` or ``"cosine"``.
        curve: The quality by the fraction of pruned heads, the least important first.
    """

    layers: list[str]
    numbers: dict[str, list[int]]
    measures: dict[str, ByLayer]
    window: int
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
        assert not rows.is_packed
        self.model, self.rows = model.eval().requires_grad_(False), rows.tokens.long()
        self.layers = attention_layers(model)
        self.outputs = {x.name: head_projections(model, x).output for x in self.layers}
        causal = all(layer.geometry.causal for layer in self.layers)
        self.predicts = causal and model.can_generate()
        self.means = {n: torch.zeros(h, 1) for n, h in self.heads().items()}  # [H, E]
        with torch.no_grad(), self._recorded_means():
            vectors = self._embeddings() if not self.predicts else self.losses()
        self._original = None if self.predicts else vectors

    def losses(self) -> Tensor:
        """Return the cross-entropy of each text in nats, ``[B]``."""
        logits = _wide(self.model(self.rows, use_cache=False).logits[:, :-1])
        return F.cross_entropy(logits.transpose(1, 2), self.rows[:, 1:], reduction="none").mean(1)

    def _embeddings(self) -> Tensor:
        """Return the mean last hidden state of each text, of norm 1, ``[B, M]``."""
        out: Any = self.model(self.rows, output_hidden_states=True)
        return F.normalize(_wide(out.hidden_states[-1]).mean(1), dim=1)

    @torch.no_grad()
    def quality(self) -> float:
        """Return the mean loss, or the mean cosine similarity to the original embeddings."""
        if self._original is None:
            return float(self.losses().mean())
        return float((self._embeddings() * self._original).sum(1).mean())

    def heads(self) -> dict[str, int]:
        """Return the number of heads by layer."""
        return {layer.name: layer.geometry.num_heads for layer in self.layers}

    @contextmanager
    def _hooked(self, hooks: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
        """Context in which functions run before the output projections of layers, by name."""
        handles = [self.outputs[n].register_forward_pre_hook(x) for n, x in hooks.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _recorded_means(self) -> AbstractContextManager[None]:
        """Context that records the mean output of heads before projections that have a bias."""

        def hook(name: str, count: int) -> Any:
            def record(_: nn.Module, args: tuple[Any, ...]) -> None:
                self.means[name] = args[0].flatten(0, -2).mean(0).view(count, -1)

            return record

        biased = {n for n, x in self.outputs.items() if getattr(x, "bias", None) is not None}
        return self._hooked({n: hook(n, count) for n, count in self.heads().items() if n in biased})

    def masked(self, masks: Mapping[str, Tensor]) -> AbstractContextManager[None]:
        """Context in which the output of each head, minus its mean, is multiplied by a number.

        Args:
            masks: ``[H]``, or ``[B, H]``, by the name of a layer.
        """

        def hook(mask: Tensor, mean: Tensor) -> Any:
            def multiply(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
                heads = args[0].unflatten(-1, (mask.shape[-1], -1))
                rows = mask.view(-1, 1, mask.shape[-1], 1)
                return ((heads * rows + (1 - rows) * mean).flatten(-2), *args[1:])

            return multiply

        return self._hooked({n: hook(mask, self.means[n]) for n, mask in masks.items()})

    def without(self, pruned: Mapping[str, Sequence[int]]) -> Any:
        """Context manager that multiplies heads, given by position, by 0."""
        masks = {}
        for name, count in self.heads().items():
            masks[name] = torch.ones(count)
            masks[name][list(pruned.get(name, ()))] = 0
        return self.masked(masks)

    def gradient_importance(self) -> ByLayer:
        """Return the importance of each head by gradient."""
        names = [layer.name for layer in self.layers]
        masks = {
            n: torch.ones(len(self.rows), h, requires_grad=True) for n, h in self.heads().items()
        }
        inputs = [masks[name] for name in names]
        with self.masked(masks), torch.enable_grad():
            if self.predicts:
                found = torch.autograd.grad(self.losses().sum(), inputs)
                return {n: x.abs().mean(0).tolist() for n, x in zip(names, found, strict=True)}
            vectors = self._embeddings()
            generator = torch.Generator().manual_seed(0)
            squares = [torch.zeros_like(x) for x in inputs]
            for _ in range(DIRECTIONS):
                direction = torch.randn(vectors.shape, generator=generator).to(vectors)
                along = (vectors * direction).sum()
                found = torch.autograd.grad(along, inputs, retain_graph=True)
                squares = [total + x.square() for total, x in zip(squares, found, strict=True)]
        return {
            name: (total / DIRECTIONS).sqrt().mean(0).tolist()
            for name, total in zip(names, squares, strict=True)
        }

    @torch.no_grad()
    def attention_statistics(self, window: int) -> dict[str, ByLayer]:
        """Return entropy, distance, weight beyond a window and on the first token of each head."""
        swapped = read_field(self.model.config, "attnzoo") is not None
        if not swapped:
            swap(self.model, "softmax")
        try:
            attentions = self.model(self.rows, output_attentions=True).attentions
        finally:
            if not swapped:
                restore(self.model)
        found: dict[str, ByLayer] = {name: {} for name in MEASURES[1:]}
        for layer, weights in zip(self.layers, attentions, strict=True):
            share = weights.float().clamp_min(0)
            share = share / share.sum(-1, keepdim=True).clamp_min(1e-12)
            places = torch.arange(share.shape[-1])
            far = (places[:, None] - places).abs()
            values = {
                "entropy": entropy(share),
                "distance": (share * far).sum(-1),
                "beyond": (share * (far >= window)).sum(-1),
                "first": share[..., 0],
            }
            for name, value in values.items():
                found[name][layer.name] = value.mean((0, 2)).tolist()
        return found

    @torch.no_grad()
    def add_means(self, model: PreTrainedModel, pruned: Mapping[str, Sequence[int]]) -> None:
        """Add the mean outputs of heads, given by position, to the biases of another copy."""
        for layer in attention_layers(model):
            output: Any = head_projections(model, layer).output
            positions = list(pruned.get(layer.name, ()))
            if positions and output.bias is not None:
                mean = torch.zeros_like(self.means[layer.name])
                mean[positions] = self.means[layer.name][positions]
                whole = output(mean.flatten().to(output.bias.dtype))  # with the bias
                output.bias.copy_(whole)

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
        wanted = round(fraction * sum(self.heads().values()))
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
    study: HeadStudyModel,
    *,
    window: int,
    fractions: Sequence[float],
    on_step: OnStep = lambda text: None,
) -> HeadStudy:
    """Measure every head, and the quality when more and more are pruned.

    Args:
        study: The model and its texts.
        window: Distance in tokens of ``HeadStudy.beyond``.
        fractions: Of heads to prune.
        on_step: Called with the name of each step.
    """
    on_step("attention weights")
    statistics = study.attention_statistics(window)
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
        window=window,
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
    if length < 2 or (limit is not None and length > limit):
        raise SpecError(f"--max-length must be 2 to {limit or 'any'} tokens, got {length}")
    if not all(layer.geometry.causal for layer in layers):
        texts = make_embedding_batch(path, text, length, rows).texts
        return Rows.of_documents(texts[max(texts)].tokens)
    tokenizer = load_tokenizer(path)
    documents = [tokenize(tokenizer, x) for x in first_documents(text, CHARACTERS)]
    if len(documents) > 1:
        return Rows.of_documents(beginnings(documents, rows, length))
    if len(documents[0]) < length:
        raise SpecError(f"The text has {len(documents[0])} tokens, but a row needs {length}")
    return cut_rows(documents, rows, length, torch.Generator().manual_seed(0))
