"""Values of a call that gradient checkpointing must find again when it repeats the call.

Gradient checkpointing runs a region of a model twice: in the forward pass, and again in the
backward pass. A layer that draws something by a count of its calls must use the draw of the first
run in the second one, although calls of other forward passes may lie in between.

A region is identified by the object that both runs share: the frame of torch's checkpointing
without reentrant autograd, or the context of the autograd function that runs the region, which is
torch's, DeepSpeed's or any other. Values are kept as long as that object, which the graph owns.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from attnzoo.errors import UnsupportedError


@dataclass
class _Calls:
    """The values of a layer's calls in one region, in order."""

    values: list[Tensor] = field(default_factory=list)
    task: int = -1  # the backward pass that repeats the region
    repeated: int = 0  # calls of it so far

    def next_value(self) -> Tensor:
        """Return the value of the next call that is repeated."""
        task = torch._C._current_graph_task_id()
        if task != self.task:  # with retain_graph, a region is repeated in several backward passes
            self.task, self.repeated = task, 0
        value = self.values[self.repeated % len(self.values)]
        self.repeated += 1
        return value


_regions: WeakKeyDictionary[Any, WeakKeyDictionary[nn.Module, _Calls]] = WeakKeyDictionary()


def value_of_call(layer: nn.Module, name: str, draw: Callable[[], Tensor]) -> Tensor:
    """Return ``draw()``, or, in a repeated call, what it returned in the first one.

    Args:
        layer: The layer that is called.
        name: Its name, for errors.
        draw: Returns the value of a new call.

    Raises:
        UnsupportedError: The call is in a backward pass, and no first run of it is known.
    """
    containing, repeated = _find_regions()
    if repeated is not None and layer in _regions.get(repeated, ()):
        value = _regions[repeated][layer].next_value()
    elif repeated is None and torch._C._current_graph_task_id() == -1:
        value = draw()
    else:
        raise UnsupportedError(
            f"{name}: the layer is called in a backward pass, and which of its earlier calls is "
            "repeated, with which draw, is unknown. Use torch.utils.checkpoint (or an autograd "
            "function that runs the region in its forward and backward), or set redraw=None."
        )
    for region in containing:
        _regions.setdefault(region, WeakKeyDictionary()).setdefault(layer, _Calls()).values.append(
            value
        )
    return value


def _find_regions() -> tuple[list[Any], Any]:
    """Return the regions whose first run contains this call, and the innermost repeated one."""
    containing: list[Any] = _frames_of_hooks()
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name in ("forward", "backward") and code.co_argcount:
            context = frame.f_locals.get(code.co_varnames[0])
            if isinstance(context, FunctionCtx):
                if code.co_name == "backward":
                    return containing, context
                containing.append(context)
        elif code.co_name == "unpack_hook" and "frame" in code.co_freevars:
            return containing, frame.f_locals["frame"]
        frame = frame.f_back  # type: ignore[assignment]
    return containing, None


def _frames_of_hooks() -> list[Any]:
    """Return the frames of checkpointing without reentrant autograd that record this call."""
    autograd, hooks = torch._C._autograd, []
    while (top := autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(top)
        autograd._pop_saved_tensors_default_hooks()
    for pack, unpack in reversed(hooks):
        autograd._push_saved_tensors_default_hooks(pack, unpack)
    names = [(pack, pack.__code__.co_freevars) for pack, _ in hooks if hasattr(pack, "__code__")]
    return [
        pack.__closure__[free.index("frame")].cell_contents
        for pack, free in names
        if pack.__qualname__.startswith("_checkpoint_hook.") and "frame" in free
    ]
