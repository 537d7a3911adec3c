"""Negative controls: corrupt each layer and each feature in turn; the outputs must change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

import attnzoo
from attnzoo.errors import UnsupportedError
from attnzoo.hf.attention.call import layer_backend
from attnzoo.hf.layers import attention_layers
from tools.family_sweep.build import Family
from tools.family_sweep.probe import Run

SENSITIVITY = 1e-2  # minimum output change that a corrupted attention must cause


def distance(found: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest difference relative to ``1 + |expected|``; infinite if shapes differ."""
    if [x.shape for x in found] != [x.shape for x in expected]:
        return float("inf")
    worst = 0.0
    for x, y in zip(found, expected, strict=True):
        if not x.numel():
            continue
        same = (x == y) | (x.isnan() & y.isnan())
        error = ((x - y).abs() / (1 + y.abs())).masked_fill(same, 0)
        worst = max(worst, float(error.nan_to_num(float("inf")).max()))
    return worst


@contextmanager
def changed_calls(
    model: nn.Module, change: Callable[[str, tuple[Any, ...], dict[str, Any]], Any]
) -> Iterator[None]:
    """Pass the arguments of every backend call to ``change``, which may return replacements."""
    hooks = []
    for layer in attention_layers(model):

        def hook(_: nn.Module, args: Any, kwargs: Any, name: str = layer.name) -> Any:
            return change(name, args, kwargs)

        hooks.append(layer_backend(layer.module).register_forward_pre_hook(hook, with_kwargs=True))
    try:
        yield
    finally:
        for one in hooks:
            one.remove()


def features(args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[str]:
    """Return the features that one attention call uses: masks, bias, soft cap, sinks, scale."""
    mask, q = kwargs["mask"], args[0]
    scale = kwargs["scale"]
    function = mask.function is not None  # it includes window, packing and padding
    found = {
        "window": mask.window is not None and not function,
        "packing": mask.segment_ids is not None and not function,
        "padding": mask.padding is not None and not function,
        "custom mask": function,
        "bias": kwargs["bias"] is not None,
        "soft cap": kwargs["softcap"] is not None,
        "sinks": kwargs["sinks"] is not None,
        "scale": scale is not None and abs(scale * q.shape[-1] ** 0.5 - 1) > 1e-3,
    }
    return {name for name, given in found.items() if given}


def without(feature: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call without a feature."""
    mask = kwargs["mask"]
    match feature:
        case "window":
            return {**kwargs, "mask": replace(mask, window=None)}
        case "packing":
            return {**kwargs, "mask": replace(mask, segment_ids=None)}
        case "padding":
            return {**kwargs, "mask": replace(mask, padding=None)}
        case "custom mask":
            return {**kwargs, "mask": replace(mask, function=None)}
        case "scale":
            return {**kwargs, "scale": args[0].shape[-1] ** -0.5}
    return {**kwargs, {"bias": "bias", "soft cap": "softcap", "sinks": "sinks"}[feature]: None}


def insensitive_parts(family: Family) -> list[str]:
    """Return the layers and features whose corruption hardly changes the compared outputs.

    Softmax runs in every layer. Then one layer at a time gets uniform attention weights, and one
    feature at a time is removed from all layers. Those that change the outputs by less than
    ``SENSITIVITY`` are returned.
    """
    attnzoo.swap(family.model, "softmax")
    sensitive: set[str] = set()
    seen: dict[str, set[tuple[int, str]]] = {}
    for key, expected in family.expected.items():
        run = dict(family.probes[key[0]].variants())[key[1]]
        names: set[str] = set()

        def observe(name: str, args: Any, kwargs: Any, names: set[str] = names) -> None:
            names.add(f"layer {name}")
            names.update(features(args, kwargs))

        with changed_calls(family.model, observe):
            refused = _refused(run)
        if refused:
            continue
        if key[1] == "packed":  # which stock may mix
            expected = run()
        for name in names - sensitive:
            seen.setdefault(name, set()).add(key)
            if name.startswith("layer ") and key[1] != "plain":
                continue
            if _changes_outputs(family.model, name, run, expected):
                sensitive.add(name)
    return sorted(set(seen) - sensitive)


def _refused(run: Run) -> bool:
    try:
        run()
    except UnsupportedError:
        return True
    return False


def _changes_outputs(model: nn.Module, name: str, run: Run, expected: list[Tensor]) -> bool:
    """Whether uniform weights in a layer, or removing a feature, change the outputs."""
    layer = name.removeprefix("layer ") if name.startswith("layer ") else None

    def corrupt(at: str, args: Any, kwargs: Any) -> Any:
        if layer is None:
            return args, without(name, args, kwargs) if name in features(args, kwargs) else kwargs
        return ((args[0] * 0, *args[1:]), kwargs) if at == layer else None

    with changed_calls(model, corrupt):
        return distance(run(), expected) > SENSITIVITY
