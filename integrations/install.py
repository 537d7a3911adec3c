"""Makes ``attn_implementation="attnzoo"`` known to transformers, once, when that is imported."""

from __future__ import annotations

from functools import wraps
from typing import Any

from safetensors import SafetensorError
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from attnzoo.backends.base import AttentionBackend
from attnzoo.errors import SpecError
from attnzoo.integrations import compat
from attnzoo.integrations.attention import NAME, attention
from attnzoo.integrations.convert import attach_when_built, initialise_backend
from attnzoo.integrations.files import asks_for_swap
from attnzoo.integrations.masks import make_mask


def install() -> None:
    """Register attention and mask functions, and let models build and initialise their backends."""
    if getattr(PreTrainedModel, "_attnzoo_installed", False):
        return
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, make_mask)  # without it the mask, and causality, is lost
    compat.note_recording()
    compat.write_implementation(NAME)
    from_pretrained: Any = vars(PreTrainedModel)["from_pretrained"].__func__
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

    @wraps(from_pretrained)
    def from_pretrained_or_say_why(cls: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return from_pretrained(cls, *args, **kwargs)
        except (SafetensorError, RuntimeError) as error:
            path = args[0] if args else kwargs.get("pretrained_model_name_or_path")
            known = isinstance(error, SafetensorError) or "mismatch" in str(error)
            if not known or not asks_for_swap(path, kwargs.get("config")):
                raise
            raise SpecError(
                f"The weights in {str(path)!r} cannot be loaded into {cls.__name__} with the swap "
                f"that its config asks for ({error}). They may be cut short, or saved under "
                "another swap; nothing was loaded."
            ) from error

    PreTrainedModel.from_pretrained = classmethod(from_pretrained_or_say_why)  # type: ignore[method-assign, assignment]
    PreTrainedModel.post_init = post_init_with_backends  # type: ignore[method-assign]
    PreTrainedModel._initialize_weights = initialize_backends_too  # type: ignore[method-assign]
    PreTrainedModel._attnzoo_installed = True  # type: ignore[attr-defined]
