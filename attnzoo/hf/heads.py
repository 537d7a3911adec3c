"""Prune attention heads: smaller projections, recorded in the config, restored when it is loaded.

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
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from attnzoo.contract.config import Geometry
from attnzoo.errors import SpecError, UnsupportedError, short_repr
from attnzoo.hf import seam
from attnzoo.hf.configs import read_field
from attnzoo.hf.layers import AttentionLayer, attention_layers
from attnzoo.hf.names import NAME, PRUNED
from attnzoo.registry import build_backend

PROJECTIONS = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q_lin", "k_lin", "v_lin"),
    ("c_attn",),  # GPT-2: queries, keys and values one after another
)
OUTPUTS = ("o_proj", "out_proj", "out_lin", "c_proj", "dense")
SIBLING_OUTPUTS = ("output.dense",)  # in the parent of BERT's attention modules
HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
KEY_HEAD_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
WIDTHS = ("all_head_size", "inner_dim", "split_size")
UNCHANGED = ("embed_dim", "hidden_size", "d_model", "num_attention_heads", "num_key_value_heads")
KEPT = "_attnzoo_kept_heads"  # on attention modules: numbers of the heads before any pruning


def prune(
    model: nn.Module, layers: Sequence[AttentionLayer], requested: Mapping[str, set[int]]
) -> None:
    """Remove heads by the name of a layer."""
    by_name = {layer.name: layer for layer in layers}
    for name, numbers in requested.items():
        if numbers:
            _prune_layer(model, by_name[name], numbers)


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
    """Remove the heads that a model's config records; runs in the ``post_init`` of the model."""
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


def _kept_heads(layer: AttentionLayer, numbers: set[int], total: int) -> list[int]:
    """Return the positions of the heads that remain among those that a layer has now."""
    name, groups = layer.name, layer.geometry.num_heads // layer.geometry.num_key_heads
    present = original_heads(layer)
    wrong = sorted(n for n in numbers if n not in range(total))
    if wrong:
        raise SpecError(f"{name} has heads 0 to {total - 1}, got {wrong}")
    heads = [i for i, number in enumerate(present) if number not in numbers]
    if not heads:
        raise SpecError(f"{name} would have no heads; keep at least one of {present}")
    counts = {*Counter(head // groups for head in heads).values()}
    if len(counts) > 1:
        by_group = [present[i : i + groups] for i in range(0, len(present), groups)]
        raise UnsupportedError(
            f"{name}: {groups} query heads share each key head, and these groups would keep "
            f"{sorted(counts)} heads; prune whole groups ({by_group}), or the same number of "
            "heads from each"
        )
    return heads


def _prune_layer(model: nn.Module, layer: AttentionLayer, numbers: set[int]) -> None:
    """Make the projections of a layer smaller, and update what it knows of its heads."""
    module: Any = layer.module
    geometry, present = layer.geometry, original_heads(layer)
    _, total = vars(module).get(KEPT, (None, geometry.num_heads))
    projections: Any = head_projections(model, layer)
    heads = _kept_heads(layer, numbers, total)
    key_heads = sorted({x * geometry.num_key_heads // geometry.num_heads for x in heads})
    _cut_projections(projections, geometry, heads, key_heads)
    size, count, groups = geometry.head_dim, len(heads), len(heads) // len(key_heads)
    for names, old, new in (
        (HEAD_COUNTS, geometry.num_heads, count),
        (KEY_HEAD_COUNTS, geometry.num_key_heads, len(key_heads)),
        (WIDTHS, geometry.num_heads * size, count * size),
        (("num_key_value_groups",), None, groups),
    ):
        for name in names:
            if name in vars(module) and old in (None, vars(module)[name]):
                setattr(module, name, new)
    module.num_heads = count  # before the config's, which counts the heads of all layers
    if "num_key_value_heads" not in vars(module) and "num_key_value_groups" not in vars(module):
        module.num_key_value_groups = groups
    if not any(name in vars(module) for name in ("head_dim", "attention_head_size")):
        module.head_dim = size
    vars(module)[KEPT] = [present[i] for i in heads], total
    if (backend := module._modules.get(NAME)) is not None:  # of a part that is built with a swap
        smaller = replace(geometry, num_heads=count, num_key_heads=len(key_heads))
        made = build_backend(backend.name, backend.config, smaller)
        setattr(module, NAME, made.to(projections.output.weight).train(module.training))


def _cut_projections(
    projections: HeadProjections, geometry: Geometry, heads: list[int], key_heads: list[int]
) -> None:
    size, value_dim = geometry.head_dim, geometry.value_dim or geometry.head_dim
    queries, keys = head_rows(heads, size), head_rows(key_heads, size)
    values = head_rows(key_heads, value_dim)
    if projections.fused:
        begin = geometry.num_heads * size
        middle = begin + geometry.num_key_heads * size
        shifted = [*(begin + i for i in keys), *(middle + i for i in values)]
        keep_outputs(projections.query, [*queries, *shifted])
    else:
        for projection, rows in zip(projections, (queries, keys, values), strict=False):
            keep_outputs(projection, rows)
    keep_inputs(projections.output, head_rows(heads, value_dim))


# -- projections ---------------------------------------------------------------------------------


class HeadProjections(NamedTuple):
    """The projections of an attention layer; queries, keys and values may share one module."""

    query: nn.Module
    key: nn.Module
    value: nn.Module
    output: nn.Module

    @property
    def fused(self) -> bool:
        """Whether one module projects to queries, keys and values, in this order."""
        return self.query is self.value


def head_projections(model: nn.Module, layer: AttentionLayer) -> HeadProjections:
    """Return the projections of an attention layer."""
    found, reason = _projections(model, layer), ""
    if found is None:
        reason = "its query, key, value and output projections are not found"
    else:
        reason = _refusal(layer, found)
    if found is None or reason:
        raise UnsupportedError(
            f"{layer.name} ({type(layer.module).__name__}): its heads cannot be removed: {reason}. "
            "Supported are attention modules with plain q, k, v and output projections, such as "
            "those of Llama, Mistral, Qwen, GPT-2 and BERT"
        )
    return found


def _projections(model: nn.Module, layer: AttentionLayer) -> HeadProjections | None:
    module = layer.module
    inner = next((names for names in PROJECTIONS if all(hasattr(module, n) for n in names)), None)
    parent = model.get_submodule(layer.name.rpartition(".")[0])
    own = [getattr(module, name) for name in OUTPUTS if hasattr(module, name)]
    output = own or [_submodule(parent, name) for name in SIBLING_OUTPUTS]
    if inner is None or output[0] is None:
        return None
    projections = [getattr(module, name) for name in inner]
    query, key, value = projections * (3 // len(projections))
    return HeadProjections(query, key, value, output[0])


def _submodule(module: nn.Module, name: str) -> nn.Module | None:
    try:
        return module.get_submodule(name)
    except AttributeError:
        return None


def _refusal(layer: AttentionLayer, found: HeadProjections) -> str:
    """Return why the heads of a layer cannot be removed, or ``""``."""
    module, geometry = layer.module, layer.geometry
    for name in HeadProjections._fields:
        projection = getattr(found, name)
        if type(projection) not in (nn.Linear, Conv1D):
            return f"its {name} projection is a {type(projection).__name__}"
    value_dim = geometry.value_dim or geometry.head_dim
    queries, keys = geometry.num_heads * geometry.head_dim, geometry.num_key_heads
    widths = queries, keys * geometry.head_dim, keys * value_dim
    sizes = [_out_features(x) for x in found[:3]]
    if sizes != ([sum(widths)] * 3 if found.fused else list(widths)):
        return f"its projections have {sizes} outputs, not {list(widths)}"
    if _in_features(found.output) != geometry.num_heads * value_dim:
        return f"its output projection has {_in_features(found.output)} inputs"
    if geometry.sinks or geometry.position_bias:
        return "it has sinks or position biases of each head"
    reads = [n for n in UNCHANGED if seam.reads_name(module, n) and not _is_count(module, n)]
    if reads:
        return f"its forward pass reads {', '.join(reads)} of all heads"
    used = {id(p) for projection in found for p in projection.parameters()}
    per_head = {geometry.num_heads, geometry.num_key_heads, *widths} - {geometry.head_dim}
    for name, x in [*module.named_parameters(), *module.named_buffers()]:
        if id(x) not in used and f".{NAME}." not in f".{name}" and per_head & set(x.shape):
            return f"its parameter {name!r} has numbers of each head"
    return ""


def _is_count(module: nn.Module, name: str) -> bool:
    """Return whether a name is an attribute of a module that counts its heads."""
    return name in (*HEAD_COUNTS, *KEY_HEAD_COUNTS) and name in vars(module)


def _out_features(module: Any) -> int:
    return int(module.nf if isinstance(module, Conv1D) else module.out_features)


def _in_features(module: Any) -> int:
    return int(module.nx if isinstance(module, Conv1D) else module.in_features)


def head_rows(heads: Sequence[int], size: int) -> list[int]:
    """Return the rows of some heads in a projection whose heads have a size."""
    return [head * size + i for head in heads for i in range(size)]


def keep_outputs(module: Any, rows: list[int]) -> None:
    """Remove all outputs of a ``Linear`` or ``Conv1D`` but some."""
    if isinstance(module, Conv1D):
        module.weight, module.nf = _select(module.weight, 1, rows), len(rows)
    else:
        module.weight, module.out_features = _select(module.weight, 0, rows), len(rows)
    if module.bias is not None:
        module.bias = _select(module.bias, 0, rows)


def keep_inputs(module: Any, rows: list[int]) -> None:
    """Remove all inputs of a ``Linear`` or ``Conv1D`` but some."""
    if isinstance(module, Conv1D):
        module.weight, module.nx = _select(module.weight, 0, rows), len(rows)
    else:
        module.weight, module.in_features = _select(module.weight, 1, rows), len(rows)


def _select(x: Tensor, dim: int, rows: list[int]) -> nn.Parameter:
    index = torch.tensor(rows, device=x.device)
    return nn.Parameter(x.detach().index_select(dim, index), requires_grad=x.requires_grad)
