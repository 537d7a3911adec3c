"""Values of a call that gradient checkpointing must find again when it repeats the call.

Gradient checkpointing runs a region of a model twice: in the forward pass, and again in the
backward pass, for which ``torch.utils.checkpoint`` restores the state of torch's generator. A layer
that draws something by a count of its calls must use the draw of the first run in the second one,
although calls of other forward passes may lie in between. So each call draws a number from the
generator, by which a repeated call finds the value of the first one.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from attnzoo.errors import UnsupportedError

KEPT = 256  # latest calls of a layer whose values are kept

_values: WeakKeyDictionary[nn.Module, dict[int, Tensor]] = WeakKeyDictionary()


def value_of_call(layer: nn.Module, name: str, draw: Callable[[], Tensor]) -> Tensor:
    """Return ``draw()``, or, in a repeated call, what it returned in the first one.

    Args:
        layer: The layer that is called.
        name: Its name, for errors.
        draw: Returns the value of a new call.

    Raises:
        UnsupportedError: The call is in a backward pass, and no first run of it is known.
    """
    values = _values.setdefault(layer, {})
    key = int(torch.randint(2**62, (), device="cpu"))
    if torch._C._current_graph_task_id() == -1:
        values[key] = draw()
        if len(values) > KEPT:
            del values[next(iter(values))]
    elif key not in values:
        raise UnsupportedError(
            f"{name}: the layer is called in a backward pass, and which of its {KEPT} latest calls "
            "is repeated, with which draw, is unknown. Use torch.utils.checkpoint with "
            "preserve_rng_state=True, which is the default, or set redraw=None."
        )
    return values[key]
