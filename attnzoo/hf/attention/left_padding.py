"""Positions of rows with padding on the left, for models that count from the start of the row.

The result of softmax depends on differences of rotary positions only. That of feature maps and of
convolutions depends on the positions themselves, so that the output of a row would depend on how
much padding precedes it. ``generate`` passes positions; classification heads, embedders and the
log-probabilities of trainers pass only a mask.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from attnzoo.hf import seam
from attnzoo.hf.attention.call import ForwardArguments, layer_backend
from attnzoo.hf.names import NAME

_HANDLE = "_attnzoo_positions"  # attribute of hooked models


class PositionHook(ForwardArguments):
    """A forward pre-hook that counts positions from the first real token of each row.

    Positions that the caller gives stay as they are, and so do those of learned embeddings, which
    differ between families.

    Args:
        forward: The method of the model's class.
        config: Of a swapped layer; says whether the swap runs.
        first: Position of the first token.
    """

    def __init__(self, forward: Any, config: Any, first: int) -> None:
        super().__init__(forward)
        self.config, self.first = config, first

    def __call__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return the arguments with positions; ``None`` leaves them as they are."""
        mask = self.get(seam.ATTENTION_MASK, args, kwargs)
        tokens = self.get(("input_ids", "inputs_embeds"), args, kwargs)
        is_given = self.get(("position_ids",), args, kwargs) is not None
        if is_given or tokens is None or not isinstance(mask, Tensor) or mask.ndim != 2:
            return None
        if self.config._attn_implementation != NAME:
            return None
        cache = self.cache(args, kwargs)
        past = 0 if cache is None else cache.get_seq_length()
        padding = (mask.to(tokens.device).cumsum(1) == 0).sum(1, keepdim=True)
        rows = torch.arange(tokens.shape[1], device=tokens.device) + past - padding
        given = dict(zip(self.names, args, strict=False)) | kwargs
        return (), given | {"position_ids": rows.clamp(min=0) + self.first}


def add_position_hooks(model: nn.Module) -> None:
    """Register the hook on the models that count positions for layers that depend on them."""
    remove_position_hooks(model)
    backends = ((module, layer_backend(module)) for module in model.modules())
    layers = [x for x, backend in backends if backend and not backend.capabilities.exact]
    for owner in seam.pretrained_models(model):
        inner = set(owner.modules())
        layer: Any = next((x for x in layers if x in inner), None)
        if layer is not None and seam.counts_positions(owner):
            first = seam.FIRST_POSITION.get(owner.config.model_type, 0)
            hook = PositionHook(type(owner).forward, layer.config, first)
            vars(owner)[_HANDLE] = owner.register_forward_pre_hook(hook, with_kwargs=True)


def remove_position_hooks(model: nn.Module) -> None:
    """Remove the hooks of :func:`add_position_hooks`."""
    for owner in seam.pretrained_models(model):
        handle = vars(owner).pop(_HANDLE, None)
        if handle is not None:
            handle.remove()
