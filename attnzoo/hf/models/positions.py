"""Extend a model's table of positions to longer inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnzoo.errors import SpecError, UnsupportedError, did_you_mean
from attnzoo.hf.attention.call import layer_backend
from attnzoo.hf.configs import read_field
from attnzoo.hf.layers import attention_layers, unwrap_model
from attnzoo.hf.unchanged import unchanged_on_error

TABLE_METHODS = ("copy", "interpolate")
TABLE_NAMES = ("position_embeddings", "position_embedding", "embed_positions", "wpe")
Model = TypeVar("Model", bound=nn.Module)


def extend_positions(model: Model, length: int, *, method: str | None = None) -> Model:
    """Extend a model's positions to ``length`` tokens in memory and return the model.

    ``save_pretrained`` saves them. Measure the quality at the new positions (``attnzoo compare``);
    most models need training there.

    - Learned position embeddings (BERT, GPT-2, OPT, RoBERTa): ``"copy"`` repeats the table, as
      Longformer does (arXiv:2004.05150, section 5), which keeps the differences between
      neighbouring positions; ``"interpolate"`` stretches it. Rows for padding are kept.
    - Sinusoidal position embeddings are computed for the new length.

    Models without such a table are refused: transformers scales rotary positions by
    ``config.rope_parameters``, and ALiBi and T5's relative bias are unlimited.

    Args:
        model: A transformers model, or a wrapper around one; swapped or not.
        length: The new maximum length in tokens, greater than the current one.
        method: One of the above; the default is ``"copy"`` for learned positions.

    Raises:
        SpecError: The length or the method is invalid for this model.
        UnsupportedError: The positions cannot be extended. After any of these errors the model is
            unchanged.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> encoder = BertModel(BertConfig(num_hidden_layers=1, max_position_embeddings=64))
        >>> attnzoo.extend_positions(encoder, 256).config.max_position_embeddings
        256
    """
    target = unwrap_model(model)
    if target is None:
        raise SpecError(f"{type(model).__name__} is not a transformers model")
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        raise SpecError(f"length must be a number of tokens, got {length!r}")
    _refuse_fixed_projections(target)
    tables = _tables(target)
    if not tables and read_field(target.config.get_text_config(), "rope_parameters"):
        raise UnsupportedError(
            f"{type(target).__name__} has rotary positions, which transformers scales: set "
            "config.rope_parameters (and config.max_position_embeddings) before the model is "
            "loaded, as docs/positions.md shows"
        )
    if not tables:
        raise UnsupportedError(
            f"{type(target).__name__} has no position embeddings that attnzoo recognises, so "
            "nothing can be extended; supported are, among others, BERT, GPT-2, RoBERTa and OPT. "
            "ALiBi and relative biases are unlimited"
        )
    with unchanged_on_error(target):
        _extend_tables(target, tables, length, method)
    return model


def _refuse_fixed_projections(model: PreTrainedModel) -> None:
    """Raise if a backend has a parameter per position."""
    for layer in attention_layers(model):
        backend = layer_backend(layer.module)
        if backend is not None and backend.name == "linformer" and not layer.geometry.causal:
            raise UnsupportedError(
                f"{layer.geometry.name}: backend 'linformer' has a weight for each position that "
                "the model had when it was swapped; extend the model before attnzoo.swap"
            )


@dataclass(frozen=True)
class _Table:
    """A position embedding, the module that holds it, and its name there."""

    owner: nn.Module
    name: str
    embedding: nn.Embedding
    offset: int  # rows before position 0, for padding
    counts_offset: bool  # whether max_position_embeddings includes those rows

    @property
    def sinusoidal(self) -> bool:
        """Whether the embedding is computed, not learned."""
        return "Sinusoidal" in type(self.embedding).__name__


def _tables(model: PreTrainedModel) -> list[_Table]:
    """Return the embeddings with a row for each position of the config."""
    config = model.config.get_text_config()
    limit = read_field(config, "max_position_embeddings")
    tables = []
    for owner in model.modules():
        for name, table in owner.named_children():
            if name not in TABLE_NAMES or not isinstance(table, nn.Embedding):
                continue
            offset = int(getattr(table, "offset", 0))
            counts_offset = offset == 0 and table.padding_idx is not None
            if counts_offset:
                assert table.padding_idx is not None
                offset = table.padding_idx + 1
            rows = table.num_embeddings - (0 if counts_offset else offset)
            if rows == limit:
                tables.append(_Table(owner, name, table, offset, counts_offset))
    return tables


def table_positions(model: PreTrainedModel) -> int | None:
    """Return the number of positions in a model's position embeddings; ``None`` without any.

    Rows for padding, as RoBERTa's config counts them, are not positions.
    """
    counts = [table.embedding.num_embeddings - table.offset for table in _tables(model)]
    return min(counts, default=None)


def _extend_tables(
    model: PreTrainedModel, tables: list[_Table], length: int, method: str | None
) -> None:
    """Extend the embeddings, and the maximum length in the config."""
    first = tables[0]
    before = first.embedding.num_embeddings - first.offset
    computed = all(table.sinusoidal for table in tables)
    kind = "sinusoidal" if computed else "learned"
    methods = ("computed",) if computed else TABLE_METHODS
    method = methods[0] if method is None else method
    if method not in methods:
        raise SpecError(
            f"No method to extend {kind} positions is called {method!r}."
            f"{did_you_mean(method, methods)} Available: {', '.join(methods)}."
        )
    if length <= before:
        raise SpecError(
            f"length must be greater than the {before} positions that the model has, got {length}"
        )
    for table in tables:
        _resize(table, length, method)
    model.config.get_text_config().max_position_embeddings = length + (
        first.offset if first.counts_offset else 0
    )


@torch.no_grad()
def _resize(table: _Table, length: int, method: str) -> None:
    """Extend a position embedding, and the buffers of position and token type ids next to it."""
    embedding = table.embedding
    weight = embedding.weight
    special, rows = weight[: table.offset], weight[table.offset :]
    if table.sinusoidal:
        longer = sinusoidal(table.offset + length, weight)
    else:
        extended = copied(rows, length) if method == "copy" else interpolated(rows, length)
        longer = torch.cat([special, extended])
    old_rows = embedding.num_embeddings
    embedding.weight = nn.Parameter(longer, requires_grad=weight.requires_grad)
    embedding.num_embeddings = len(longer)
    for name, buffer in list(table.owner.named_buffers(recurse=False)):
        if buffer.shape[-1:] != (old_rows,):
            continue
        if name == "position_ids":
            numbers = torch.arange(len(longer), device=buffer.device, dtype=buffer.dtype)
            setattr(table.owner, name, numbers.expand(*buffer.shape[:-1], -1).clone())
        elif name == "token_type_ids":
            setattr(table.owner, name, buffer.new_zeros(*buffer.shape[:-1], len(longer)))


def copied(rows: Tensor, length: int) -> Tensor:
    """Return the rows repeated up to ``length`` rows, ``[length, M]``."""
    return rows.repeat(-(-length // len(rows)), 1)[:length]


def interpolated(rows: Tensor, length: int) -> Tensor:
    """Return the rows interpolated to ``length`` rows, ends kept, ``[length, M]``."""
    stretched = F.interpolate(rows.float().T[None], size=length, mode="linear", align_corners=True)
    return stretched[0].T.to(rows.dtype)


def sinusoidal(count: int, like: Tensor) -> Tensor:
    """Return ``count`` rows of sines, then cosines, which begin with ``like [N, M]``."""
    size = like.shape[1]
    position = torch.arange(count, dtype=torch.float64)[:, None]
    angle = position * 10_000.0 ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    rows = torch.cat([angle.sin(), angle[:, : size // 2].cos()], 1).to(like)
    if not torch.allclose(rows[: len(like)], like, atol=1e-2):
        raise UnsupportedError(
            "the model's sinusoidal table is not sines followed by cosines over powers of 10000, "
            "so its continuation is unknown; build the model with a larger "
            "config.max_position_embeddings"
        )
    return rows
