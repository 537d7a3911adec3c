"""Whether a wrong attention would have been seen: each layer and each feature spoiled in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

import attnzoo
from attnzoo.errors import UnsupportedError
from attnzoo.families.build import Family
from attnzoo.families.probe import Run
from attnzoo.integrations.attention import layer_backend
from attnzoo.integrations.layers import attention_layers

FELT = 1e-2  # what a wrong attention must change, or nothing was compared


def distance(found: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest difference over ``1 + |expected|``; infinite where shapes differ."""
    if [x.shape for x in found] != [x.shape for x in expected]:
        return float("inf")
    worst = 0.0
    for x, y in zip(found, expected, strict=True):
        if not x.numel():
            continue
        same = (x == y) | (x.isnan() & y.isnan())
        apart = ((x - y).abs() / (1 + y.abs())).masked_fill(same, 0)
        worst = max(worst, float(apart.nan_to_num(float("inf")).max()))
    return worst


@contextmanager
def changed_calls(
    model: nn.Module, change: Callable[[str, tuple[Any, ...], dict[str, Any]], Any]
) -> Iterator[None]:
    """Let ``change`` have a look at, or replace, what every backend is called with."""
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
    """Name what limits or bends the attention of one call."""
    mask, q = kwargs["mask"], args[0]
    scale, whole = kwargs["scale"], mask.function is not None  # which has all the others in it
    found = {
        "window": mask.window is not None and not whole,
        "packing": mask.segment_ids is not None and not whole,
        "padding": mask.padding is not None and not whole,
        "mask of its own": whole,
        "bias": kwargs["bias"] is not None,
        "soft cap": kwargs["softcap"] is not None,
        "sinks": kwargs["sinks"] is not None,
        "scale": scale is not None and abs(scale * q.shape[-1] ** 0.5 - 1) > 1e-3,
    }
    return {name for name, given in found.items() if given}


def without(feature: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return a call's arguments as a backend would have them that ignores a feature."""
    mask = kwargs["mask"]
    match feature:
        case "window":
            return {**kwargs, "mask": replace(mask, window=None)}
        case "packing":
            return {**kwargs, "mask": replace(mask, segment_ids=None)}
        case "padding":
            return {**kwargs, "mask": replace(mask, padding=None)}
        case "mask of its own":
            return {**kwargs, "mask": replace(mask, function=None)}
        case "scale":
            return {**kwargs, "scale": args[0].shape[-1] ** -0.5}
    return {**kwargs, {"bias": "bias", "soft cap": "softcap", "sinks": "sinks"}[feature]: None}


def unfelt(family: Family) -> list[str]:
    """Say which layers and features could be wrong without a trace in what is compared.

    Softmax runs in every layer; then one layer at a time weighs all keys alike, and one feature at
    a time is left out everywhere. What moves the outputs by less than ``FELT`` is named.
    """
    attnzoo.swap(family.model, "softmax")
    felt: set[str] = set()
    seen: dict[str, set[tuple[int, str]]] = {}
    for key, expected in family.expected.items():
        run = dict(family.probes[key[0]].variants())[key[1]]
        names: set[str] = set()

        def look(name: str, args: Any, kwargs: Any, names: set[str] = names) -> None:
            names.add(f"layer {name}")
            names.update(features(args, kwargs))

        with changed_calls(family.model, look):
            refused = _refused(run)
        if refused:
            continue
        for name in names - felt:
            seen.setdefault(name, set()).add(key)
            if name.startswith("layer ") and key[1] != "plain":
                continue
            if _moves(family.model, name, run, expected):
                felt.add(name)
    return sorted(set(seen) - felt)


def _refused(run: Run) -> bool:
    try:
        run()
    except UnsupportedError:
        return True
    return False


def _moves(model: nn.Module, name: str, run: Run, expected: list[Tensor]) -> bool:
    """Whether leaving out a feature, or weighing all keys alike in a layer, moves the outputs."""
    layer = name.removeprefix("layer ") if name.startswith("layer ") else None

    def spoil(at: str, args: Any, kwargs: Any) -> Any:
        if layer is None:
            return args, without(name, args, kwargs) if name in features(args, kwargs) else kwargs
        return ((args[0] * 0, *args[1:]), kwargs) if at == layer else None

    with changed_calls(model, spoil):
        return distance(run(), expected) > FELT
