"""Every patch of PEFT and of transformers' own adapters, one function per patched module.

See :mod:`attnzoo.hf.patches`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import TYPE_CHECKING, Any

from attnzoo.autoload import guarded, mark_patched
from attnzoo.hf.names import LOADED, NAME

if TYPE_CHECKING:
    from torch import nn


INIT = "init_lora_weights"
# whether a model gets the swap of the adapter that is added to it
APPLY_SWAP = ContextVar("APPLY_SWAP", default=False)
SAVED_INIT = f"{NAME}_{INIT}"  # the value of PEFT's field, in a file that has another there


def patch_adapter_configs(config: Any) -> None:
    """Save and load the swap in an adapter's adapter_config.json, as the field ``attnzoo``.

    vLLM, and PEFT where attnzoo is not imported, ignore that field and would run the adapter on
    softmax. They refuse an unknown ``init_lora_weights``, so that is ``"attnzoo"`` in the file.
    """
    cls = config.PeftConfigMixin
    if not mark_patched(cls):
        return
    to_dict = cls.to_dict
    from_peft_type: Any = vars(cls)["from_peft_type"].__func__
    from_pretrained: Any = vars(cls)["from_pretrained"].__func__

    @wraps(to_dict)
    def to_dict_with_swap(self: Any) -> dict[str, Any]:
        data: dict[str, Any] = to_dict(self)
        spec = vars(self).get(NAME)
        if spec is None:
            return data
        if INIT in data:
            data = {**data, SAVED_INIT: data[INIT], INIT: NAME}
        return {**data, NAME: spec}

    @wraps(from_peft_type)
    def from_peft_type_with_swap(cls: Any, *args: Any, **kwargs: Any) -> Any:
        spec = kwargs.pop(NAME, None)
        if SAVED_INIT in kwargs:  # else of an earlier version
            kwargs[INIT] = kwargs.pop(SAVED_INIT)
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
    if not mark_patched(cls):
        return
    inject_adapter, merge_adapter = cls.inject_adapter, cls.merge_adapter
    merge_and_unload, unload = cls.merge_and_unload, cls.unload

    @wraps(inject_adapter)
    def inject_adapter_with_extras(
        self: Any, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any
    ) -> None:
        from attnzoo.hf.adapters import extras
        from attnzoo.hf.unchanged import unchanged_on_error

        extras.prepare_adapter(model, self.peft_config[adapter_name])
        with unchanged_on_error(model):
            inject_adapter(self, model, adapter_name, *args, **kwargs)

    @wraps(merge_adapter)
    def merge_active_adapter(
        self: Any, adapter_names: list[str] | None = None, safe_merge: bool = False
    ) -> None:
        from attnzoo.hf.adapters import extras

        extras.refuse_inactive_extras(self.model, adapter_names or self.active_adapters)
        merge_adapter(self, adapter_names, safe_merge)

    @wraps(merge_and_unload)
    def merge_and_unload_with_extras(
        self: Any,
        progressbar: bool = False,
        safe_merge: bool = False,
        adapter_names: list[str] | None = None,
    ) -> Any:
        from attnzoo.hf.adapters import extras

        with extras.unwrapped_extras(self.model, adapter_names or self.active_adapters):
            return merge_and_unload(self, progressbar, safe_merge, adapter_names)

    @wraps(unload)
    def unload_with_extras(self: Any) -> Any:
        from attnzoo.hf.adapters import extras

        with extras.unwrapped_extras(self.model, ()):
            return unload(self)

    cls.inject_adapter, cls.merge_adapter = inject_adapter_with_extras, merge_active_adapter
    cls.merge_and_unload, cls.unload = merge_and_unload_with_extras, unload_with_extras


def patch_lora_conversion(conversion: Any) -> None:
    """Keep the backends of an adapter, and the swap, where PEFT converts it to LoRA."""
    if not mark_patched(conversion):
        return
    convert_to_lora = conversion.convert_to_lora

    @wraps(convert_to_lora)
    def convert_to_lora_with_extras(
        model: nn.Module, rank: float, adapter_name: str = "default", *args: Any, **kwargs: Any
    ) -> tuple[Any, dict[str, Any]]:
        from attnzoo.hf.adapters import extras

        config, state = convert_to_lora(model, rank, adapter_name, *args, **kwargs)
        extras.complete_conversion(model, adapter_name, config, state)
        return config, state

    for name in ("peft.tuners.lora.conversion", "peft.tuners.lora", "peft.tuners", "peft"):
        module = sys.modules.get(name)
        if getattr(module, "convert_to_lora", None) is convert_to_lora:
            module.convert_to_lora = convert_to_lora_with_extras  # type: ignore[union-attr]


def _refusing_lost_prompts(prepare: Any) -> Any:
    """Return PEFT's preparation of a generation step, which raises if it would repeat a prompt."""

    @wraps(prepare)
    def prepare_inputs_for_generation(self: Any, *args: Any, **kwargs: Any) -> Any:
        from attnzoo.hf.adapters.config import refuse_repeated_prompt

        refuse_repeated_prompt(self, prepare)
        return prepare(self, *args, **kwargs)

    return prepare_inputs_for_generation


def patch_adapter_models(peft_model: Any) -> None:
    """Do the same for methods without a tuner (prompts), and check what an adapter saves."""
    cls = peft_model.PeftModel
    if not mark_patched(cls):
        return
    init, add_adapter = cls.__init__, cls.add_adapter
    disable_adapter, save_pretrained = cls.disable_adapter, cls.save_pretrained
    _patch_loading(cls)
    _patch_prompts(peft_model)

    @wraps(init)
    def init_with_extras(
        self: Any, model: nn.Module, peft_config: Any, *args: Any, **kwargs: Any
    ) -> None:
        from attnzoo.hf.adapters import extras

        if APPLY_SWAP.get():
            extras.apply_swap(model, peft_config)
        extras.prepare_adapter(model, peft_config)
        init(self, model, peft_config, *args, **kwargs)

    @wraps(add_adapter)
    def add_adapter_with_extras(
        self: Any, adapter_name: str, peft_config: Any, *args: Any, **kwargs: Any
    ) -> None:
        from attnzoo.hf.adapters import extras

        extras.prepare_adapter(self.base_model, peft_config)
        add_adapter(self, adapter_name, peft_config, *args, **kwargs)

    @wraps(disable_adapter)
    @contextmanager
    def disable_adapter_and_extras(self: Any) -> Iterator[None]:
        from attnzoo.hf.adapters import extras

        with disable_adapter(self), extras.disabled_extras(self):
            yield

    @wraps(save_pretrained)
    def save_pretrained_with_swap(self: Any, *args: Any, **kwargs: Any) -> None:
        from attnzoo.hf.adapters import extras
        from attnzoo.hf.saving.card import complete_adapter_card

        extras.prepare_save(self)
        save_pretrained(self, *args, **kwargs)
        folder = args[0] if args else kwargs["save_directory"]
        complete_adapter_card(self, folder)

    cls.__init__, cls.add_adapter = init_with_extras, add_adapter_with_extras
    cls.disable_adapter, cls.save_pretrained = disable_adapter_and_extras, save_pretrained_with_swap


def _patch_loading(cls: Any) -> None:
    """Check what an adapter loads, and leave the model as it was if it cannot be loaded."""
    load_adapter = cls.load_adapter
    from_pretrained: Any = vars(cls)["from_pretrained"].__func__

    @wraps(load_adapter)
    def load_adapter_of_the_swap(
        self: Any, model_id: Any, adapter_name: str, *args: Any, **kwargs: Any
    ) -> Any:
        from attnzoo.hf.adapters import extras
        from attnzoo.hf.unchanged import unchanged_on_error

        extras.check_saved_replacement(self, adapter_name, model_id, kwargs)
        with unchanged_on_error(self):
            try:
                return load_adapter(self, model_id, adapter_name, *args, **kwargs)
            except KeyError as error:  # PEFT looks a weight of modules_to_save up
                extras.refuse_unread_extras(self, [x for x in error.args if f".{NAME}." in str(x)])
                raise

    @wraps(from_pretrained)
    def from_pretrained_or_unchanged(cls: Any, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        from attnzoo.hf.unchanged import unchanged_on_error

        with unchanged_on_error(model):
            return from_pretrained(cls, model, *args, **kwargs)

    cls.load_adapter = load_adapter_of_the_swap
    cls.from_pretrained = classmethod(from_pretrained_or_unchanged)


def _patch_prompts(peft_model: Any) -> None:
    """Mark the virtual tokens of a prefix, and refuse a generation that would repeat a prompt."""
    cls = peft_model.PeftModel
    get_prompt = cls.get_prompt

    @wraps(get_prompt)
    def get_prompt_with_mark(self: Any, *args: Any, **kwargs: Any) -> Any:
        from attnzoo.hf.cache.past_keys import mark_virtual_tokens

        prompt = get_prompt(self, *args, **kwargs)  # a cache if it is a prefix
        mark_virtual_tokens(prompt)
        return prompt

    for wrapper in (peft_model.PeftModelForCausalLM, peft_model.PeftModelForSeq2SeqLM):
        prepare = wrapper.prepare_inputs_for_generation
        wrapper.prepare_inputs_for_generation = _refusing_lost_prompts(prepare)
    cls.get_prompt = get_prompt_with_mark


def patch_auto_models(auto: Any) -> None:
    """Swap the base model that ``AutoPeftModel`` loads as the adapter's config records it."""
    cls = auto._BaseAutoPeftModel
    if not mark_patched(cls):
        return
    from_pretrained: Any = vars(cls)["from_pretrained"].__func__

    @wraps(from_pretrained)
    def from_pretrained_with_swap(cls: Any, *args: Any, **kwargs: Any) -> Any:
        token = APPLY_SWAP.set(True)
        try:
            return from_pretrained(cls, *args, **kwargs)
        finally:
            APPLY_SWAP.reset(token)

    cls.from_pretrained = classmethod(from_pretrained_with_swap)


def patch_hotswap(hotswap: Any) -> None:
    """Check an adapter whose weights replace those of another one, and replace its backends too."""
    if not mark_patched(hotswap):
        return
    replace_weights = hotswap.hotswap_adapter_from_state_dict

    @wraps(replace_weights)
    def hotswap_adapter_of_the_swap(
        model: nn.Module, state_dict: Any, adapter_name: str, config: Any, *args: Any, **kwargs: Any
    ) -> None:
        from attnzoo.hf.adapters import extras

        inner = getattr(model, "_orig_mod", model)  # in torch.compile(model)
        extras.check_replacement(inner, adapter_name, vars(config))
        tuner, backends = extras.split_extras(inner, adapter_name, state_dict)
        replace_weights(model, tuner, adapter_name, config, *args, **kwargs)
        for backend, own in backends:
            backend.load_state_dict(own)

    hotswap.hotswap_adapter_from_state_dict = hotswap_adapter_of_the_swap


def patch_adapter_mixin(integration: Any) -> None:
    """Check and enable adapters that transformers itself adds, as those of ``PeftModel``."""
    cls = integration.PeftAdapterMixin
    if not mark_patched(cls):
        return
    load_adapter, enable_adapters = cls.load_adapter, cls.enable_adapters

    @wraps(load_adapter)
    def load_adapter_of_the_swap(
        self: Any, peft_model_id: Any = None, adapter_name: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        from attnzoo.hf.adapters import extras
        from attnzoo.hf.unchanged import unchanged_on_error

        name = adapter_name or "default"
        options = {**kwargs, **(kwargs.get("adapter_kwargs") or {})}
        if (config := kwargs.get("peft_config")) is not None:
            extras.check_replacement(self, name, vars(config))
        elif peft_model_id is not None:
            extras.check_saved_replacement(self, name, peft_model_id, options)
        with unchanged_on_error(self):
            info = load_adapter(self, peft_model_id, adapter_name, *args, **kwargs)
            extras.load_extras(self, name, peft_model_id, options, info)
        return info

    @wraps(enable_adapters)
    def enable_adapters_and_extras(self: Any) -> None:
        from attnzoo.hf.adapters import extras

        enable_adapters(self)
        extras.enable_extras(self)

    cls.load_adapter, cls.enable_adapters = load_adapter_of_the_swap, enable_adapters_and_extras


_PATCHES = {
    "transformers.integrations.peft": patch_adapter_mixin,
    "peft.config": patch_adapter_configs,
    "peft.tuners.tuners_utils": patch_tuners,
    "peft.tuners.lora.conversion": patch_lora_conversion,
    "peft.peft_model": patch_adapter_models,
    "peft.auto": patch_auto_models,
    "peft.utils.hotswap": patch_hotswap,
}
PEFT_PATCHES = {name: guarded(patch) for name, patch in _PATCHES.items()}
