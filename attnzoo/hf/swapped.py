"""A swapped model is a class: the subclass of :class:`SwappedModel` and the stock class.

A model gets it when it is swapped in memory, and is built as one where its config has a spec
(:func:`new_model`). Its methods attach, initialise, save and load the backends, so that stock
models run none of this. The config keeps its class: it is plain data, and its type is compared and
looked up in many places.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import nn

from attnzoo.contract.backend import AttentionBackend
from attnzoo.hf import adapters, seam
from attnzoo.hf.attach import attach_when_built
from attnzoo.hf.attention.continuous_batching import serves_swap
from attnzoo.hf.cache.state_layer import add_states
from attnzoo.hf.configs import has_field, read_field
from attnzoo.hf.extras import initialise_backend
from attnzoo.hf.heads import current_heads, prune_when_built
from attnzoo.hf.mixins import Mixin, stock_class, subclass
from attnzoo.hf.names import NAME, PRUNED
from attnzoo.hf.saving.checkpoints import (
    report_missing_extras,
    require_spec_of_layers,
    without_disabled_extras,
)
from attnzoo.hf.unchanged import unchanged_on_error

# Configs of the swapped models that are being built, the outermost first
_BUILDING: ContextVar[tuple[Any, ...]] = ContextVar("_BUILDING", default=())
Base: Any = object  # of mixins: they stand before a class of transformers


class SwappedModel(Mixin, Base):  # type: ignore[misc]
    """Mixin of models with backends, or pruned heads, in their layers."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        outer = _BUILDING.get()
        if has_field(config, NAME) and config._attn_implementation is None:
            config._attn_implementation = NAME
        if config._attn_implementation == NAME:
            seam.complete_class_tables(type(self))  # before the stock class builds its layers
        token = _BUILDING.set((*outer, config))
        try:
            super().__init__(config, *args, **kwargs)
        finally:
            _BUILDING.reset(token)
        self.add_model_tags(NAME)
        prune_when_built(self)
        specs = (read_field(x, NAME) for x in reversed(outer))
        attach_when_built(self, next((x for x in specs if x is not None), None))

    def _initialize_weights(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        if not isinstance(module, AttentionBackend):
            super()._initialize_weights(module, *args, **kwargs)
        elif not getattr(module, "_is_hf_initialized", False):
            initialise_backend(module)  # after its children, so that its values are final
            vars(module)["_is_hf_initialized"] = True

    def _adjust_missing_and_unexpected_keys(self, loading_info: Any, *args: Any) -> None:
        super()._adjust_missing_and_unexpected_keys(loading_info, *args)
        report_missing_extras(self, loading_info)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """Save the model with the swap that it runs, without the extras of a disabled one."""
        require_spec_of_layers(self)
        with current_heads(self), without_disabled_extras(self):
            if getattr(self, "_hf_peft_config_loaded", False):  # saves an adapter only
                adapters.prepare_save(self)
            return super().save_pretrained(*args, **kwargs)

    def set_attn_implementation(
        self, attn_implementation: str | dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """Disable the swap by the name of another implementation, or enable it by ``attnzoo``."""
        super().set_attn_implementation(attn_implementation, *args, **kwargs)
        if isinstance(attn_implementation, str):
            seam.update_copied_configs(self)

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        prepare = vars(self).get("prepare_inputs_for_generation")  # set by PEFT
        if (owner := getattr(prepare, "__self__", self)) is not self:
            adapters.refuse_repeated_prompt(owner, prepare)
        made = super()._prepare_cache_for_generation(
            generation_config, model_kwargs, *args, **kwargs
        )
        if isinstance(cache := model_kwargs.get(seam.CACHE_ARGUMENT), seam.Cache):
            add_states(cache)
            if read_field(generation_config, "is_assistant", False):
                cache.activate_past_recording()
        return made

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Keep the swap, which transformers would refuse, or replace by flash attention."""
        if not serves_swap(self):
            return super().init_continuous_batching(*args, **kwargs)
        with _named(self.config, "paged|eager"):
            return super().init_continuous_batching(*args, **kwargs)

    def load_adapter(
        self, peft_model_id: Any = None, adapter_name: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Load an adapter that was trained for this swap, with its backends."""
        name = adapter_name or "default"
        options = {**kwargs, **(kwargs.get("adapter_kwargs") or {})}
        if (config := kwargs.get("peft_config")) is not None:
            adapters.check_replacement(self, name, vars(config))
        elif peft_model_id is not None:
            adapters.check_saved_replacement(self, name, peft_model_id, options)
        with unchanged_on_error(self):
            info = super().load_adapter(peft_model_id, adapter_name, *args, **kwargs)
            adapters.load_extras(self, name, peft_model_id, options, info)
        return info

    def enable_adapters(self) -> None:
        """Enable adapters and their backends."""
        super().enable_adapters()
        adapters.enable_extras(self)

    def _get_name(self) -> str:
        # also where FSDP2 has renamed the class: Trainer shifts labels by this name
        return str(super()._get_name()).removeprefix("FSDP")


@contextmanager
def _named(config: Any, implementation: str) -> Iterator[None]:
    config._attn_implementation_internal = implementation
    try:
        yield
    finally:
        config._attn_implementation_internal = NAME


def new_model(cls: type, config: Any) -> type:
    """Return the class of which a model of a config is an object: the stock one, or a swapped one.

    Parts of a swapped model are swapped models too: their layers may have backends.
    """
    return subclass(SwappedModel, cls) if _BUILDING.get() or _has_swap(config) else cls


def _has_swap(config: Any) -> bool:
    own = has_field(config, NAME) or has_field(config, PRUNED)
    named = read_field(config, "_attn_implementation") == NAME
    return own or named or any(map(_has_swap, seam.sub_configs(config).values()))


def update_classes(model: nn.Module) -> None:
    """Give the transformers models in a model the class that fits their layers."""
    for part in seam.pretrained_models(model):
        swapped = any(NAME in x._modules for x in part.modules()) or has_field(part.config, PRUNED)
        cls = subclass(SwappedModel, type(part)) if swapped else stock_class(type(part))
        if cls is not type(part):
            dict.setdefault(seam.RECORDED_OUTPUTS, str(cls), part._can_record_outputs)
            part.__class__ = cls
            if swapped:
                part.add_model_tags(NAME)
            elif part.model_tags:
                part.model_tags.remove(NAME)
