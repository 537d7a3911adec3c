"""Makes a model take longer inputs than it was made for, by its positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnzoo.errors import SpecError, UnsupportedError, did_you_mean
from attnzoo.integrations.attention import layer_backend
from attnzoo.integrations.layers import attention_layers, has_position_bias, whole_model

TABLE_METHODS = ("copy", "interpolate")
ROTARY_METHODS = ("linear", "dynamic", "yarn")  # as transformers calls them
_TABLES = ("position_embeddings", "position_embedding", "embed_positions", "wpe")
_ALIBI = {"bloom": None, "mpt": "max_seq_len"}  # model types, and what bounds their bias


@dataclass(frozen=True, kw_only=True)
class Extension:
    """What was done to a model's positions.

    Attributes:
        kind: ``"learned"``, ``"sinusoidal"``, ``"rotary"``, ``"relative"`` or ``"alibi"``.
        before: Tokens that the model was made for; ``None`` where its positions have no end.
        after: Tokens that it takes now, and is meant to.
        method: How; ``"none"`` where nothing had to be done.
    """

    kind: str
    before: int | None
    after: int
    method: str


def extend_positions(model: nn.Module, length: int, *, method: str | None = None) -> Extension:
    """Make a model take ``length`` tokens, in memory; ``save_pretrained`` keeps it.

    Quality at the new positions has to be measured (``attnzoo compare``), and mostly to be trained.

    - Learned tables (BERT, GPT-2, OPT, RoBERTa, whose first rows stand for padding): ``"copy"``
      puts the learned rows one after another again, as Longformer did (arXiv:2004.05150, section
      5), so that near tokens still see known differences; ``"interpolate"`` stretches the table.
    - Rotary positions: transformers' own scaling, written to ``config.rope_parameters``:
      ``"yarn"`` (arXiv:2309.00071), ``"dynamic"`` (NTK-aware), ``"linear"`` (arXiv:2306.15595).
    - Sinusoidal tables are computed for the new length.
    - ALiBi and T5's relative bias have no end: nothing is changed but a bound in the config.

    Args:
        model: A transformers model, or a wrapper around one; swapped or not.
        length: Tokens that it is to take, more than now.
        method: One of the above; ``"copy"`` for tables and ``"yarn"`` for rotary positions when
            ``None``.

    Raises:
        SpecError: The length or the method makes no sense for this model.
        UnsupportedError: Its positions are of a kind that cannot be extended. In each case the
            model is left as it was.
    """
    target = whole_model(model)
    if target is None:
        raise SpecError(f"{type(model).__name__} is not a transformers model")
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        raise SpecError(f"length must be a number of tokens, got {length!r}")
    _refuse_fixed_projections(target)
    tables = _tables(target)
    if tables:
        return _extend_tables(target, tables, length, method)
    if getattr(target.config.get_text_config(), "rope_parameters", None):
        return _extend_rotary(target, length, method)
    return _unbounded(target, length, method)


def _refuse_fixed_projections(model: PreTrainedModel) -> None:
    """Refuse a model in which a backend has a parameter for every position."""
    for layer in attention_layers(model):
        backend = layer_backend(layer.module)
        if backend is not None and backend.name == "linformer" and not layer.geometry.causal:
            raise UnsupportedError(
                f"{layer.geometry.name}: backend 'linformer' projects along the positions that the "
                "model had when it was swapped; extend the model first, and swap it then"
            )


def _check_method(method: str | None, known: tuple[str, ...], kind: str) -> str:
    if method is None:
        return known[0]
    if method not in known:
        raise SpecError(
            f"No way to extend {kind} positions is called {method!r}."
            f"{did_you_mean(method, known)} Available: {', '.join(known)}."
        )
    return method


def _check_length(length: int, now: int) -> None:
    if length <= now:
        raise SpecError(
            f"length must be above the {now} positions that the model has, got {length}"
        )


# -- tables --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Table:
    """A table of positions: the module that holds it, its name there, and its special rows."""

    owner: nn.Module
    name: str
    table: nn.Embedding
    offset: int  # rows before that of position 0
    counted: bool  # whether the config counts them

    @property
    def sinusoidal(self) -> bool:
        """Whether it is computed and not learned."""
        return "Sinusoidal" in type(self.table).__name__


def _tables(model: PreTrainedModel) -> list[_Table]:
    """Find the tables whose rows are as many as the config has positions."""
    config = model.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    found = []
    for owner in model.modules():
        for name, table in owner.named_children():
            if name not in _TABLES or not isinstance(table, nn.Embedding):
                continue
            offset = int(getattr(table, "offset", 0))
            counted = offset == 0 and table.padding_idx is not None
            if counted:
                assert table.padding_idx is not None
                offset = table.padding_idx + 1
            rows = table.num_embeddings - (0 if counted else offset)
            if rows == limit:
                found.append(_Table(owner, name, table, offset, counted))
    return found


def _extend_tables(
    model: PreTrainedModel, tables: list[_Table], length: int, method: str | None
) -> Extension:
    first = tables[0]
    before = first.table.num_embeddings - first.offset
    computed = all(table.sinusoidal for table in tables)
    known = ("computed",) if computed else TABLE_METHODS
    method = _check_method(method, known, "sinusoidal" if computed else "learned")
    _check_length(length, before)
    for table in tables:
        _replace(table, length, method)
    model.config.get_text_config().max_position_embeddings = length + (
        first.offset if first.counted else 0
    )
    kind = "sinusoidal" if computed else "learned"
    return Extension(kind=kind, before=before, after=length, method=method)


@torch.no_grad()
def _replace(found: _Table, length: int, method: str) -> None:
    """Put a longer table in the place of one, and give position numbers beside it more room."""
    old = found.table
    weight = old.weight
    special, rows = weight[: found.offset], weight[found.offset :]
    if found.sinusoidal:
        longer = sinusoidal(found.offset + length, weight)
    else:
        grown = copied(rows, length) if method == "copy" else interpolated(rows, length)
        longer = torch.cat([special, grown])
    now = old.num_embeddings
    old.weight = nn.Parameter(longer, requires_grad=weight.requires_grad)
    old.num_embeddings = len(longer)
    for name, buffer in list(found.owner.named_buffers(recurse=False)):
        if buffer.shape[-1:] != (now,):
            continue
        if name == "position_ids":
            numbers = torch.arange(len(longer), device=buffer.device, dtype=buffer.dtype)
            setattr(found.owner, name, numbers.expand(*buffer.shape[:-1], -1).clone())
        elif name == "token_type_ids":
            setattr(found.owner, name, buffer.new_zeros(*buffer.shape[:-1], len(longer)))


def copied(rows: Tensor, length: int) -> Tensor:
    """Return the rows one after another until there are ``length``, ``[length, M]``."""
    return rows.repeat(-(-length // len(rows)), 1)[:length]


def interpolated(rows: Tensor, length: int) -> Tensor:
    """Return the rows stretched to ``length``, ends kept, ``[length, M]``."""
    stretched = F.interpolate(rows.float().T[None], size=length, mode="linear", align_corners=True)
    return stretched[0].T.to(rows.dtype)


def sinusoidal(count: int, like: Tensor) -> Tensor:
    """Return ``count`` rows of which ``like [N, M]`` are the first: sines, then cosines.

    Raises:
        UnsupportedError: ``like`` is arranged in another way.
    """
    size = like.shape[1]
    place = torch.arange(count, dtype=torch.float64)[:, None]
    angle = place * 10_000.0 ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    made = torch.cat([angle.sin(), angle[:, : size // 2].cos()], 1).to(like)
    if not torch.allclose(made[: len(like)], like, atol=1e-2):
        raise UnsupportedError(
            "the model's sinusoidal table is not sines followed by cosines over powers of 10000, "
            "so how it goes on is not known; build the model with a larger "
            "config.max_position_embeddings"
        )
    return made


# -- rotary positions ----------------------------------------------------------------------------


def _extend_rotary(model: PreTrainedModel, length: int, method: str | None) -> Extension:
    """Write transformers' own scaling to the config, and compute the frequencies anew."""
    method = _check_method(method, ("yarn", *ROTARY_METHODS[:2]), "rotary")
    config = model.config.get_text_config()
    parameters: dict[str, Any] = dict(config.rope_parameters)
    if "rope_type" not in parameters:
        raise UnsupportedError(
            f"{type(model).__name__} has other rotary positions in each kind of layer "
            f"({', '.join(parameters)}), and which of them to scale is not known; set "
            "config.rope_parameters before the model is loaded"
        )
    if parameters["rope_type"] != "default":
        raise UnsupportedError(
            f"The model's rotary positions are scaled already (rope_type "
            f"{parameters['rope_type']!r}); scaling them twice is not known to work. Load the "
            "model with its first config, and extend that"
        )
    before = config.max_position_embeddings
    _check_length(length, before)
    embeddings = [
        (owner, name, module)
        for owner in model.modules()
        for name, module in owner.named_children()
        if hasattr(module, "inv_freq") and hasattr(module, "rope_type")
    ]
    if not embeddings:
        raise UnsupportedError(
            f"{type(model).__name__} computes its rotary positions in a way of its own; set "
            "config.rope_parameters before the model is loaded"
        )
    parameters |= {"rope_type": method, "factor": length / before}
    if method == "yarn":
        parameters["original_max_position_embeddings"] = before
    config.rope_parameters = parameters
    if method != "dynamic":  # which takes the config's length for that of training
        config.max_position_embeddings = length
    for owner, name, module in embeddings:
        made: nn.Module = type(module)(config)
        setattr(owner, name, made.to(next(module.buffers()).device))
    return Extension(kind="rotary", before=before, after=length, method=method)


# -- positions without end -----------------------------------------------------------------------


def _unbounded(model: PreTrainedModel, length: int, method: str | None) -> Extension:
    """Say that nothing needs to be done, or refuse what is not known."""
    config = model.config.get_text_config()
    kind = config.model_type
    alibi = kind in _ALIBI or bool(getattr(config, "alibi", False))
    relative = hasattr(config, "relative_attention_num_buckets") or any(
        has_position_bias(layer.module, cross_attention=False) for layer in attention_layers(model)
    )
    if not alibi and not relative:
        raise UnsupportedError(
            f"{type(model).__name__} has no table of positions, no rotary ones and no bias that is "
            "known here, so nothing can be extended; BERT, GPT-2, RoBERTa, OPT, Llama and T5 are "
            "among those that can"
        )
    name = "ALiBi's" if alibi else "relative"
    if method not in (None, "none"):
        raise SpecError(
            f"The model's {name} positions have no end, so there is nothing to do by "
            f"{method!r}; leave method out"
        )
    bound = _ALIBI.get(kind)
    before = getattr(config, bound, None) if bound else None
    if bound and before is not None and before < length:
        setattr(config, bound, length)
    return Extension(
        kind="alibi" if alibi else "relative", before=before, after=length, method="none"
    )
