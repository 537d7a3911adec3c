"""The projections of attention layers: find them, say why heads cannot be removed, remove rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from attnzoo.errors import UnsupportedError
from attnzoo.hf import seam
from attnzoo.hf.layers import AttentionLayer
from attnzoo.hf.names import NAME

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
    """Return the projections of an attention layer.

    Raises:
        UnsupportedError: They are not found, or the layer has more per-head parameters.
    """
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
