"""Remove heads from attention layers: smaller projections, and the record of them in a config.

The heads of a layer are those of its query projection. A pruned head's rows of the query, key and
value projections and its columns of the output projection are removed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from attnzoo.contract.backend import AttentionBackend
from attnzoo.contract.config import Geometry
from attnzoo.errors import SpecError, UnsupportedError, short_repr
from attnzoo.hf.configs import read_field
from attnzoo.hf.heads.projections import (
    HEAD_COUNTS,
    KEY_HEAD_COUNTS,
    WIDTHS,
    HeadProjections,
    head_projections,
    head_rows,
    keep_inputs,
    keep_outputs,
)
from attnzoo.hf.layers import AttentionLayer, attention_layers
from attnzoo.hf.names import NAME, PRUNED
from attnzoo.registry import build_backend

KEPT = "_attnzoo_kept_heads"  # on attention modules: numbers of the heads before any pruning


class _Cut(NamedTuple):
    """What remains of a layer: positions among its present heads and key heads."""

    layer: AttentionLayer
    projections: HeadProjections
    numbers: list[int]  # of the kept heads, before any pruning
    heads: list[int]
    key_heads: list[int]
    backend: AttentionBackend | None  # smaller, for a swapped layer


def prune(
    model: nn.Module, layers: Sequence[AttentionLayer], requested: Mapping[str, set[int]]
) -> None:
    """Remove heads by the name of a layer."""
    by_name = {layer.name: layer for layer in layers}
    cuts = [_plan(model, by_name[name], numbers) for name, numbers in requested.items() if numbers]
    for cut in cuts:
        _apply(cut)


def pruned(module: nn.Module) -> list[int]:
    """Return the numbers of the heads that an attention module has lost."""
    kept, total = vars(module)[KEPT]
    return sorted(set(range(total)) - set(kept))


@contextmanager
def current_heads(model: PreTrainedModel) -> Iterator[None]:
    """Context manager under which a config records the heads of the layers that a model has now.

    Layers may have been removed, reordered or repeated since :func:`prune_heads`.
    """
    before = read_field(model.config, PRUNED)
    modules = model.named_modules(remove_duplicate=False)
    recorded = {name: pruned(module) for name, module in modules if KEPT in vars(module)}
    if before is None:
        yield
        return
    try:
        setattr(model.config, PRUNED, recorded)
        yield
    finally:
        setattr(model.config, PRUNED, before)


def original_heads(layer: AttentionLayer) -> list[int]:
    """Return the numbers of a layer's heads before any pruning."""
    kept, _ = vars(layer.module).get(KEPT, (list(range(layer.geometry.num_heads)), 0))
    return list(kept)


def prune_when_built(model: PreTrainedModel) -> None:
    """Remove the heads that a model's config records; runs in the ``post_init`` of the model.

    Raises:
        SpecError: The record does not fit the model.
    """
    recorded: Any = read_field(model.config, PRUNED)
    if recorded is None:
        return
    plain = isinstance(recorded, Mapping) and all(
        isinstance(name, str)
        and isinstance(numbers, list)
        and all(isinstance(n, int) and not isinstance(n, bool) for n in numbers)
        for name, numbers in recorded.items()
    )
    if not plain:
        raise SpecError(
            f"config.{PRUNED} must be lists of head numbers by the name of an attention module, "
            f"got {short_repr(recorded)}"
        )
    layers = [x for x in attention_layers(model) if KEPT not in vars(x.module)]
    requested = {}
    for layer in layers:  # a model with a head has one prefix more than its base model
        names = [name for name in recorded if _same_layer(name, layer.name)]
        if len(names) == 1:
            requested[layer.name] = set(recorded[names[0]])
    prune(model, layers, requested)


def _same_layer(first: str, second: str) -> bool:
    return first == second or first.endswith(f".{second}") or second.endswith(f".{first}")


# -- what is removed -----------------------------------------------------------------------------


def _plan(model: nn.Module, layer: AttentionLayer, numbers: set[int]) -> _Cut:
    """Return what remains of a layer.

    Raises:
        SpecError: A head does not exist, or none would be left.
        UnsupportedError: The layer or this choice of heads is unsupported.
    """
    name, geometry = layer.name, layer.geometry
    present = original_heads(layer)
    _, total = vars(layer.module).get(KEPT, (None, geometry.num_heads))
    wrong = sorted(n for n in numbers if n not in range(total))
    if wrong:
        raise SpecError(f"{name} has heads 0 to {total - 1}, got {wrong}")
    heads = [i for i, number in enumerate(present) if number not in numbers]
    if not heads:
        raise SpecError(f"{name} would have no heads; keep at least one of {present}")
    projections = head_projections(model, layer)
    groups = geometry.num_heads // geometry.num_key_heads
    counts = Counter(head // groups for head in heads)
    if len(set(counts.values())) > 1:
        by_group = [present[i : i + groups] for i in range(0, len(present), groups)]
        raise UnsupportedError(
            f"{name}: {groups} query heads share each key head, and these groups would keep "
            f"{sorted(set(counts.values()))} heads; prune whole groups ({by_group}), or the same "
            "number of heads from each"
        )
    key_heads = sorted(counts)
    backend = _smaller_backend(model, layer, heads, key_heads)
    return _Cut(layer, projections, [present[i] for i in heads], heads, key_heads, backend)


# -- the change ----------------------------------------------------------------------------------


def _apply(cut: _Cut) -> None:
    """Make the projections of a layer smaller, and update what it knows of its heads."""
    module: Any = cut.layer.module
    geometry, kept = cut.layer.geometry, cut.projections
    size, value_dim = geometry.head_dim, geometry.value_dim or geometry.head_dim
    queries, keys = head_rows(cut.heads, size), head_rows(cut.key_heads, size)
    values = head_rows(cut.key_heads, value_dim)
    if kept.fused:
        begin = geometry.num_heads * size
        middle = begin + geometry.num_key_heads * size
        shifted = [*(begin + i for i in keys), *(middle + i for i in values)]
        keep_outputs(kept.query, [*queries, *shifted])
    else:
        for projection, rows in zip(kept, (queries, keys, values), strict=False):
            keep_outputs(projection, rows)
    keep_inputs(kept.output, head_rows(cut.heads, value_dim))
    for names, old, new in (
        (HEAD_COUNTS, geometry.num_heads, len(cut.heads)),
        (KEY_HEAD_COUNTS, geometry.num_key_heads, len(cut.key_heads)),
        (WIDTHS, geometry.num_heads * size, len(cut.heads) * size),
        (("num_key_value_groups",), None, len(cut.heads) // len(cut.key_heads)),
    ):
        for name in names:
            if name in vars(module) and old in (None, vars(module)[name]):
                setattr(module, name, new)
    module.num_heads = len(cut.heads)  # before the config's, which counts the heads of all layers
    if "num_key_value_heads" not in vars(module) and "num_key_value_groups" not in vars(module):
        module.num_key_value_groups = len(cut.heads) // len(cut.key_heads)
    if not any(name in vars(module) for name in ("head_dim", "attention_head_size")):
        module.head_dim = size
    _, total = vars(module).get(KEPT, (None, geometry.num_heads))
    vars(module)[KEPT] = cut.numbers, total
    if cut.backend is not None:
        setattr(module, NAME, cut.backend)


def _smaller_backend(
    model: nn.Module, layer: AttentionLayer, heads: list[int], key_heads: list[int]
) -> AttentionBackend | None:
    """Return the backend of a swapped layer with fewer heads, ``None`` for other layers.

    Raises:
        UnsupportedError: The backend shares parameters, is wrapped, or does not support the layer.
    """
    old = layer.module._modules.get(NAME)
    if old is None:
        return None
    if not isinstance(old, AttentionBackend):
        raise UnsupportedError(
            f"{layer.name}: its backend is wrapped in a {type(old).__name__}; prune the heads "
            "before an adapter is added"
        )
    own = {id(p) for p in old.parameters()}
    others = (m for m in model.modules() if isinstance(m, AttentionBackend) and m is not old)
    geometry = replace(layer.geometry, num_heads=len(heads), num_key_heads=len(key_heads))
    backend = build_backend(old.name, old.config, geometry)
    pairs = dict([*old.named_parameters(), *old.named_buffers()])
    made = dict([*backend.named_parameters(), *backend.named_buffers()])
    if set(pairs) != set(made) or any(id(p) in own for x in others for p in x.parameters()):
        raise UnsupportedError(
            f"{layer.name}: backend {old.name!r} shares parameters with other layers; prune the "
            "heads first, then swap"
        )
    for name, new in made.items():
        values = pairs[name].detach()
        for dim, size in enumerate(new.shape):
            if values.shape[dim] != size:
                rows = _kept_rows(layer.geometry, values.shape[dim], size, heads, key_heads)
                values = values.index_select(dim, torch.tensor(rows, device=values.device))
        new.data = values
        new.requires_grad_(pairs[name].requires_grad)
    return backend.train(old.training)


def _kept_rows(
    geometry: Geometry, old: int, new: int, heads: list[int], key_heads: list[int]
) -> list[int]:
    """Return the rows of a backend's parameter that belong to the kept heads, in their order."""
    for total, kept in ((geometry.num_key_heads, key_heads), (geometry.num_heads, heads)):
        if old % total == 0 and old // total * len(kept) == new:
            return head_rows(kept, old // total)
    raise UnsupportedError(
        f"{geometry.name}: its backend has a parameter of {old} rows, which are not of "
        f"{geometry.num_heads} heads; prune the heads first, then swap"
    )
