"""Every patch of transformers and PEFT, one function per patched module.

:mod:`attnzoo.autoload` runs a patch as soon as its module is loaded, when the rest of the package
may be half loaded. Nothing here is imported from either, and modules of attnzoo are imported when a
patched function is first called. ``tests/integrations/test_patches.py`` has a test for each
patch, which fails when a new version of the package changes what the patch relies on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.cache_utils import Cache

# The name of the attention implementation, of the config's field and of each layer's submodule
NAME = "attnzoo"
RECORDING = "_attnzoo_recording"  # attribute of a cache
REQUESTED = "_attnzoo_requested"  # attribute of a model whose attn_implementation was given
PRUNED = "attnzoo_pruned_heads"  # attribute of a config: heads that a model has lost, by layer
LOADED = "_attnzoo_loaded"  # attribute of an adapter's config that was read from a file

# Patches that this version of a package has no place for, by module: the reason. Nothing is swapped
# then; an import of the package must not fail because attnzoo is installed.
FAILED_PATCHES: dict[str, str] = {}


def _mark_patched(cls: Any) -> bool:
    """Mark a class as patched and return whether it was not marked before."""
    is_new = "_attnzoo_patched" not in vars(cls)
    cls._attnzoo_patched = True
    return is_new


def patch_config(configuration_utils: Any) -> None:
    """Save the swap that a model runs in its config.json, and allow ``output_attentions``.

    Stock configs do not save ``attn_implementation``, so a saved swap would load as plain softmax
    where attnzoo is not imported. The spec of a swap that ``set_attn_implementation("sdpa")``
    disabled is not saved.
    """
    cls = configuration_utils.PreTrainedConfig
    if not _mark_patched(cls):
        return
    to_dict, validate = cls.to_dict, cls.validate_output_attentions
    output_attentions = cls.output_attentions

    @wraps(to_dict)
    def to_dict_with_implementation(self: PreTrainedConfig) -> dict[str, Any]:
        from attnzoo.integrations.saving import saved_config

        return saved_config(self, to_dict(self))

    def set_output_attentions(self: Any, value: bool) -> None:
        if self._attn_implementation == NAME:
            self._output_attentions = value  # a backend without weights refuses the call
        else:
            output_attentions.fset(self, value)

    @wraps(validate)
    def validate_output_attentions(self: Any) -> None:
        if self._attn_implementation != NAME:
            validate(self)

    cls.to_dict = to_dict_with_implementation
    cls.output_attentions = output_attentions.setter(set_output_attentions)
    cls.validate_output_attentions = validate_output_attentions


def patch_cache(cache_utils: Any) -> None:
    """Record on the cache itself that it records past tokens, and crop all layers or none.

    ``Cache.activate_past_recording`` (assisted decoding) informs only the layers that exist when it
    is called; our layers, which are created later, read the attribute.
    """
    cls = cache_utils.Cache
    if not _mark_patched(cls):
        return
    activate, crop = cls.activate_past_recording, cls.crop

    @wraps(activate)
    def activate_and_note(self: Cache) -> None:
        setattr(self, RECORDING, True)
        activate(self)

    @wraps(crop)
    def crop_all_layers_or_none(self: Cache, *args: Any, **kwargs: Any) -> None:
        from attnzoo.integrations.cache import unchanged_on_error

        with unchanged_on_error(self):
            crop(self, *args, **kwargs)

    cls.activate_past_recording = activate_and_note
    cls.crop = crop_all_layers_or_none


def patch_masks(masking_utils: Any) -> None:
    """Register the mask function of ``"attnzoo"``; without it, causality and padding are lost."""

    def make_mask(*args: Any, **kwargs: Any) -> Any:
        from attnzoo.integrations import masks

        return masks.make_mask(*args, **kwargs)

    masking_utils.AttentionMaskInterface.register(NAME, make_mask)


def patch_models(modeling_utils: Any) -> None:
    """Register the attention function, and build and initialise backends with their models."""

    def attention(*args: Any, **kwargs: Any) -> Any:
        from attnzoo.integrations import attention as ours

        return ours.attention(*args, **kwargs)

    cls = modeling_utils.PreTrainedModel
    if not _mark_patched(cls):
        return
    modeling_utils.AttentionInterface.register(NAME, attention)
    _patch_saving(cls)
    init, post_init = cls.__init__, cls.post_init
    initialize_weights = cls._initialize_weights

    @wraps(init)
    def init_with_attention_classes(
        self: PreTrainedModel, config: Any, *args: Any, **kwargs: Any
    ) -> None:
        requested = getattr(config, "_attn_implementation", None)  # None: init selects the default
        init(self, config, *args, **kwargs)
        vars(self)[REQUESTED] = requested is not None
        if self.config._attn_implementation == NAME:
            from attnzoo.integrations.seam import complete_class_tables

            complete_class_tables(type(self))  # before the subclass builds its layers

    @wraps(post_init)
    def post_init_with_backends(self: PreTrainedModel) -> None:
        from attnzoo.integrations.construction import attach_when_built

        if getattr(self.config, PRUNED, None) is not None:
            from attnzoo.integrations.heads import prune_when_built

            prune_when_built(self)
        attach_when_built(self)  # before the original, which initialises all modules
        post_init(self)

    @wraps(initialize_weights)
    def initialize_weights_and_backends(
        self: PreTrainedModel, module: nn.Module, *args: Any, **kwargs: Any
    ) -> None:
        from attnzoo.backends.base import AttentionBackend
        from attnzoo.integrations.extras import initialise_backend

        if not isinstance(module, AttentionBackend):
            initialize_weights(self, module, *args, **kwargs)
        elif not getattr(module, "_is_hf_initialized", False):
            initialise_backend(module)  # after its children, so that its values are final
            vars(module)["_is_hf_initialized"] = True

    cls.__init__ = init_with_attention_classes
    cls.post_init = post_init_with_backends
    cls._initialize_weights = initialize_weights_and_backends


def _patch_saving(cls: Any) -> None:
    """Let ``set_attn_implementation`` disable a swap, save what runs, and check what loads."""
    from_pretrained: Any = vars(cls)["from_pretrained"].__func__
    set_implementation, save = cls.set_attn_implementation, cls.save_pretrained

    @wraps(set_implementation)
    def set_in_copied_configs_too(
        self: PreTrainedModel, attn_implementation: str | dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        set_implementation(self, attn_implementation, *args, **kwargs)
        if isinstance(attn_implementation, str):
            from attnzoo.integrations.seam import update_copied_configs

            update_copied_configs(self)

    @wraps(save)
    def save_without_disabled_extras(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        from attnzoo.integrations.saving import without_disabled_extras

        with without_disabled_extras(self):
            return save(self, *args, **kwargs)

    @wraps(from_pretrained)
    def from_pretrained_with_reason(cls: Any, *args: Any, **kwargs: Any) -> Any:
        from attnzoo.integrations.saving import load

        return load(from_pretrained, cls, *args, **kwargs)

    cls.from_pretrained = classmethod(from_pretrained_with_reason)
    cls.set_attn_implementation = set_in_copied_configs_too
    cls.save_pretrained = save_without_disabled_extras


def patch_continuous_batching(continuous_api: Any) -> None:
    """Keep the swap in continuous batching (``generate_batch``, ``transformers serve``), or raise.

    transformers would refuse the implementation's name and, where flash attention is installed,
    replace the swap by it without an error.
    """
    cls = continuous_api.ContinuousBatchingManager
    if not _mark_patched(cls):
        return
    switch = cls.switch_to_cb_friendly_attn

    @wraps(switch)
    def keep_swap(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        from attnzoo.integrations.serving import serves_swap

        if not serves_swap(model):
            switch(self, model, *args, **kwargs)

    cls.switch_to_cb_friendly_attn = keep_swap


def patch_adapter_configs(config: Any) -> None:
    """Save and load the swap in an adapter's adapter_config.json, as the field ``attnzoo``."""
    cls = config.PeftConfigMixin
    if not _mark_patched(cls):
        return
    to_dict = cls.to_dict
    from_peft_type: Any = vars(cls)["from_peft_type"].__func__
    from_pretrained: Any = vars(cls)["from_pretrained"].__func__

    @wraps(to_dict)
    def to_dict_with_swap(self: Any) -> dict[str, Any]:
        data, spec = to_dict(self), vars(self).get(NAME)
        return data if spec is None else {**data, NAME: spec}

    @wraps(from_peft_type)
    def from_peft_type_with_swap(cls: Any, *args: Any, **kwargs: Any) -> Any:
        spec = kwargs.pop(NAME, None)
        made = from_peft_type(cls, *args, **kwargs)
        if spec is not None:
            vars(made)[NAME] = spec
        return made

    @wraps(from_pretrained)
    def from_pretrained_and_note(cls: Any, *args: Any, **kwargs: Any) -> Any:
        made = from_pretrained(cls, *args, **kwargs)
        vars(made)[LOADED] = True
        return made

    cls.to_dict = to_dict_with_swap
    cls.from_peft_type = classmethod(from_peft_type_with_swap)
    cls.from_pretrained = classmethod(from_pretrained_and_note)


def patch_tuners(tuners_utils: Any) -> None:
    """Add the backends to an adapter when it is injected, and keep the right ones in a merge."""
    cls = tuners_utils.BaseTuner
    if not _mark_patched(cls):
        return
    inject_adapter, merge_adapter = cls.inject_adapter, cls.merge_adapter
    merge_and_unload, unload = cls.merge_and_unload, cls.unload

    @wraps(inject_adapter)
    def inject_adapter_with_extras(
        self: Any, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any
    ) -> None:
        from attnzoo.integrations import adapters

        adapters.prepare_adapter(model, self.peft_config[adapter_name])
        inject_adapter(self, model, adapter_name, *args, **kwargs)

    @wraps(merge_adapter)
    def merge_active_adapter(
        self: Any, adapter_names: list[str] | None = None, safe_merge: bool = False
    ) -> None:
        from attnzoo.integrations import adapters

        adapters.refuse_inactive_extras(self.model, adapter_names or self.active_adapters)
        merge_adapter(self, adapter_names, safe_merge)

    @wraps(merge_and_unload)
    def merge_and_unload_with_extras(
        self: Any,
        progressbar: bool = False,
        safe_merge: bool = False,
        adapter_names: list[str] | None = None,
    ) -> Any:
        from attnzoo.integrations import adapters

        with adapters.unwrapped_extras(self.model, adapter_names or self.active_adapters):
            return merge_and_unload(self, progressbar, safe_merge, adapter_names)

    @wraps(unload)
    def unload_with_extras(self: Any) -> Any:
        from attnzoo.integrations import adapters

        with adapters.unwrapped_extras(self.model, ()):
            return unload(self)

    cls.inject_adapter, cls.merge_adapter = inject_adapter_with_extras, merge_active_adapter
    cls.merge_and_unload, cls.unload = merge_and_unload_with_extras, unload_with_extras


def patch_lora_conversion(conversion: Any) -> None:
    """Keep the backends of an adapter, and the swap, where PEFT converts it to LoRA."""
    if not _mark_patched(conversion):
        return
    convert_to_lora = conversion.convert_to_lora

    @wraps(convert_to_lora)
    def convert_to_lora_with_extras(
        model: nn.Module, rank: float, adapter_name: str = "default", *args: Any, **kwargs: Any
    ) -> tuple[Any, dict[str, Any]]:
        from attnzoo.integrations import adapters

        config, state = convert_to_lora(model, rank, adapter_name, *args, **kwargs)
        adapters.complete_conversion(model, adapter_name, config, state)
        return config, state

    for name in ("peft.tuners.lora.conversion", "peft.tuners.lora", "peft.tuners", "peft"):
        module = sys.modules.get(name)
        if getattr(module, "convert_to_lora", None) is convert_to_lora:
            module.convert_to_lora = convert_to_lora_with_extras  # type: ignore[union-attr]


def _refusing_lost_prompts(prepare: Any) -> Any:
    """Return PEFT's preparation of a generation step, which raises if it would repeat a prompt."""

    @wraps(prepare)
    def prepare_inputs_for_generation(self: Any, *args: Any, **kwargs: Any) -> Any:
        from attnzoo.integrations import adapters

        adapters.refuse_repeated_prompt(self, prepare)
        return prepare(self, *args, **kwargs)

    return prepare_inputs_for_generation


def patch_adapter_models(peft_model: Any) -> None:
    """Do the same for methods without a tuner (prompts), and check what an adapter saves."""
    cls = peft_model.PeftModel
    if not _mark_patched(cls):
        return
    init, add_adapter = cls.__init__, cls.add_adapter
    disable_adapter, save_pretrained = cls.disable_adapter, cls.save_pretrained
    get_prompt = cls.get_prompt

    @wraps(init)
    def init_with_extras(
        self: Any, model: nn.Module, peft_config: Any, *args: Any, **kwargs: Any
    ) -> None:
        from attnzoo.integrations import adapters

        adapters.prepare_adapter(model, peft_config)
        init(self, model, peft_config, *args, **kwargs)

    @wraps(add_adapter)
    def add_adapter_with_extras(
        self: Any, adapter_name: str, peft_config: Any, *args: Any, **kwargs: Any
    ) -> None:
        from attnzoo.integrations import adapters

        adapters.prepare_adapter(self.base_model, peft_config)
        add_adapter(self, adapter_name, peft_config, *args, **kwargs)

    @wraps(disable_adapter)
    @contextmanager
    def disable_adapter_and_extras(self: Any) -> Iterator[None]:
        from attnzoo.integrations import adapters

        with disable_adapter(self), adapters.disabled_extras(self):
            yield

    @wraps(save_pretrained)
    def save_pretrained_with_swap(self: Any, *args: Any, **kwargs: Any) -> None:
        from attnzoo.integrations import adapters

        adapters.refuse_lost_extras(self)
        for config in self.peft_config.values():
            adapters.record_swap(self, config)
        save_pretrained(self, *args, **kwargs)

    @wraps(get_prompt)
    def get_prompt_with_mark(self: Any, *args: Any, **kwargs: Any) -> Any:
        from attnzoo.integrations.past_keys import mark_virtual_tokens

        prompt = get_prompt(self, *args, **kwargs)  # a cache if it is a prefix
        mark_virtual_tokens(prompt)
        return prompt

    for wrapper in (peft_model.PeftModelForCausalLM, peft_model.PeftModelForSeq2SeqLM):
        wrapper.prepare_inputs_for_generation = _refusing_lost_prompts(
            wrapper.prepare_inputs_for_generation
        )
    cls.get_prompt = get_prompt_with_mark
    cls.__init__, cls.add_adapter = init_with_extras, add_adapter_with_extras
    cls.disable_adapter, cls.save_pretrained = disable_adapter_and_extras, save_pretrained_with_swap


def _guarded(patch: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a patch that records a missing name instead of raising."""

    @wraps(patch)
    def apply(module: Any) -> None:
        try:
            patch(module)
        except (AttributeError, KeyError) as error:
            name = module.__name__
            FAILED_PATCHES[name] = f"{patch.__name__} does not fit {name} ({error})"

    return apply


_ALL = {
    "transformers.configuration_utils": patch_config,
    "transformers.cache_utils": patch_cache,
    "transformers.masking_utils": patch_masks,
    "transformers.modeling_utils": patch_models,
    "transformers.generation.continuous_batching.continuous_api": patch_continuous_batching,
    "peft.config": patch_adapter_configs,
    "peft.tuners.tuners_utils": patch_tuners,
    "peft.tuners.lora.conversion": patch_lora_conversion,
    "peft.peft_model": patch_adapter_models,
}
PATCHES = {name: _guarded(patch) for name, patch in _ALL.items()}
