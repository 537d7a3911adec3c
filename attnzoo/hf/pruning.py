"""Prune attention heads: smaller projections, recorded in the config, restored when it is loaded.

The heads of a layer are those of its query projection; :mod:`attnzoo.hf.heads` removes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from torch import nn

from attnzoo.errors import SpecError, UnsupportedError
from attnzoo.hf.heads import KEPT, prune, pruned
from attnzoo.hf.layers import AttentionLayer, attention_layers, unwrap_model
from attnzoo.hf.names import NAME, PRUNED
from attnzoo.hf.swapped import update_classes
from attnzoo.hf.unchanged import unchanged_on_error

Model = TypeVar("Model", bound=nn.Module)


def prune_heads(
    model: Model, heads: Mapping[int, Iterable[int]] | Mapping[str, Iterable[int]]
) -> Model:
    """Remove attention heads from a model in memory and return the model.

    Layers may keep different numbers of heads. ``save_pretrained`` records the heads in the config,
    and ``from_pretrained`` loads the smaller model where attnzoo is imported. A model is pruned
    before it is swapped. Create the optimizer afterwards, because the parameters are new.

    Args:
        model: A transformers model, or a wrapper around one.
        heads: Numbers of heads by layer: the number of a layer, or the name of its attention
            module. Heads are numbered as in the model before any pruning; those already pruned are
            ignored. Where several query heads share a key head, a layer loses whole groups, or the
            same number of heads from each group.

    Raises:
        SpecError: There is no such layer or head, or a layer would have no heads.
        UnsupportedError: The heads of a layer cannot be removed, or the model is swapped. After an
            error the model is unchanged.

    Example:
        >>> model = attnzoo.prune_heads(model, {0: [0, 1], 3: [2, 3]})
    """
    target = unwrap_model(model)
    if target is None:
        raise SpecError(
            f"{type(model).__name__} is not a transformers model; prune_heads takes a "
            "PreTrainedModel"
        )
    if any(NAME in module._modules for module in target.modules()):
        raise UnsupportedError(
            f"This {type(target).__name__} is swapped, and its backends have numbers of each head; "
            "prune the heads of the original model, then swap it"
        )
    layers = attention_layers(target)
    requested: dict[str, set[int]] = {}
    for key, numbers in heads.items():
        layer = _find_layer(layers, key)
        requested.setdefault(layer.name, set()).update(numbers)
    with unchanged_on_error(target):
        prune(target, layers, requested)
        kept = [layer for layer in layers if KEPT in vars(layer.module)]
        recorded = {layer.name: pruned(layer.module) for layer in kept}
        if recorded:
            setattr(target.config, PRUNED, recorded)
            update_classes(target)
    return model


def _find_layer(layers: Sequence[AttentionLayer], key: int | str) -> AttentionLayer:
    """Return the layer with a name or number."""
    found = [
        layer
        for layer in layers
        if (layer.name == key if isinstance(key, str) else layer.geometry.layer == key)
    ]
    if len(found) == 1:
        return found[0]
    names = ", ".join(layer.name for layer in found or layers)
    problem = f"several layers have the number {key}" if found else f"there is no layer {key!r}"
    raise SpecError(f"{problem}; name one of {names}")
