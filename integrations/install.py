"""Makes ``attn_implementation="attnzoo"`` known to transformers, once, when that is imported."""

from __future__ import annotations

from functools import wraps
from typing import Any

from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from attnzoo.backends.base import AttentionBackend
from attnzoo.integrations import compat
from attnzoo.integrations.attention import NAME, attention
from attnzoo.integrations.convert import attach_when_built, initialise_backend
from attnzoo.integrations.masks import make_mask


def install() -> None:
    """Register attention and mask functions, and let models build and initialise their backends."""
    if getattr(PreTrainedModel, "_attnzoo_installed", False):
        return
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, make_mask)  # without it the mask, and causality, is lost
    compat.note_recording()
    compat.write_implementation(NAME)
    post_init = PreTrainedModel.post_init
    initialize_weights = PreTrainedModel._initialize_weights

    @wraps(post_init)
    def post_init_with_backends(self: PreTrainedModel) -> None:
        attach_when_built(self)  # before the original, which initialises what was added
        post_init(self)  # type: ignore[no-untyped-call]

    @wraps(initialize_weights)
    def initialize_backends_too(
        self: PreTrainedModel, module: nn.Module, *args: Any, **kwargs: Any
    ) -> None:
        if not isinstance(module, AttentionBackend):
            initialize_weights(self, module, *args, **kwargs)
        elif not getattr(module, "_is_hf_initialized", False):
            initialise_backend(module)  # after its children, so it has the last word
            vars(module)["_is_hf_initialized"] = True

    PreTrainedModel.post_init = post_init_with_backends  # type: ignore[method-assign]
    PreTrainedModel._initialize_weights = initialize_backends_too  # type: ignore[method-assign]
    PreTrainedModel._attnzoo_installed = True  # type: ignore[attr-defined]
