"""Every patch of PEFT, with the reason why it is not a method of a class of ours.

See :mod:`attnzoo.hf.patches`. PEFT wraps a model in classes of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import TYPE_CHECKING, Any

from attnzoo.autoload import guarded, mark_patched
from attnzoo.hf.names import LOADED, NAME

if TYPE_CHECKING:
    from torch import nn

# The patched attributes by module, and why no method of a swapped model can do it
REASONS = {
    "peft.config": {
        "PeftConfigMixin.to_dict": "an adapter's file names the swap that it was trained for",
        "PeftConfigMixin.from_peft_type": "it would refuse or lose that name",
        "PeftConfigMixin.from_pretrained": "a config that was read is checked, a new one completed",
    },
    "peft.tuners.tuners_utils": {
        "BaseTuner.inject_adapter": "backends are trained and saved with the adapter",
        "BaseTuner.merge_adapter": "backends of an adapter that is not active would not be merged",
        "BaseTuner.merge_and_unload": "wrappers of backends would stay, or lose what was trained",
        "BaseTuner.unload": "the same",
    },
    "peft.peft_model": {
        "PeftModel.add_adapter": "prompts have no tuner, and train backends too",
        "PeftModel.load_adapter": "an adapter of the same name may be of another swap",
        "PeftModel.disable_adapter": "PEFT leaves the backends of prompts on",
        "PeftModel.save_pretrained": "the swap of now is saved, and trained backends are not lost",
        "PeftModel.get_prompt": "a prefix is told from tokens that ran before the swap",
    },
    "peft.auto": {"_BaseAutoPeftModel.from_pretrained": "it loads the base model, not swapped"},
    "peft.utils.hotswap": {
        "hotswap_adapter_from_state_dict": "it would run an adapter of another swap"
    },
}
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


def _prepare_adapter(model: nn.Module, peft_config: Any) -> None:
    """Swap the model as the adapter records it, where that is asked; check or record the swap."""
    from attnzoo.hf.adapters import config, extras

    spec = vars(peft_config).get(NAME)
    if APPLY_SWAP.get() and spec is not None and config.current_swap(model) is None:
        from attnzoo.hf.swap.convert import swap

        swap(model, spec)
    extras.prepare_adapter(model, peft_config)


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
        from attnzoo.hf.unchanged import unchanged_on_error

        _prepare_adapter(model, self.peft_config[adapter_name])
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


def patch_adapter_models(peft_model: Any) -> None:
    """Do the same for methods without a tuner (prompts), and check what an adapter loads and saves.

    The cache of a prefix gets a mark, by which a backend knows that its keys are of no tokens.
    """
    cls = peft_model.PeftModel
    if not mark_patched(cls):
        return
    add_adapter, load_adapter = cls.add_adapter, cls.load_adapter
    disable_adapter, save_pretrained = cls.disable_adapter, cls.save_pretrained
    get_prompt = cls.get_prompt

    @wraps(add_adapter)
    def add_adapter_with_extras(
        self: Any, adapter_name: str, peft_config: Any, *args: Any, **kwargs: Any
    ) -> None:
        _prepare_adapter(self.base_model, peft_config)
        add_adapter(self, adapter_name, peft_config, *args, **kwargs)

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

    @contextmanager
    @wraps(disable_adapter)
    def disable_adapter_and_extras(self: Any) -> Iterator[None]:
        from attnzoo.hf.adapters import extras

        with disable_adapter(self), extras.disabled_extras(self):
            yield

    @wraps(save_pretrained)
    def save_pretrained_with_swap(self: Any, *args: Any, **kwargs: Any) -> None:
        from attnzoo.hf.adapters import extras

        extras.prepare_save(self)
        save_pretrained(self, *args, **kwargs)

    @wraps(get_prompt)
    def get_prompt_with_mark(self: Any, *args: Any, **kwargs: Any) -> Any:
        from attnzoo.hf.cache.past_keys import mark_virtual_tokens

        prompt = get_prompt(self, *args, **kwargs)  # a cache if it is a prefix
        mark_virtual_tokens(prompt)
        return prompt

    cls.add_adapter, cls.load_adapter = add_adapter_with_extras, load_adapter_of_the_swap
    cls.disable_adapter, cls.save_pretrained = disable_adapter_and_extras, save_pretrained_with_swap
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
    """Check an adapter whose weights replace those of another one."""
    if not mark_patched(hotswap):
        return
    replace_weights = hotswap.hotswap_adapter_from_state_dict

    @wraps(replace_weights)
    def hotswap_adapter_of_the_swap(
        model: nn.Module, state_dict: Any, adapter_name: str, config: Any, *args: Any, **kwargs: Any
    ) -> None:
        from attnzoo.hf.adapters import extras

        extras.check_hotswap(model, adapter_name, vars(config), state_dict)
        replace_weights(model, state_dict, adapter_name, config, *args, **kwargs)

    hotswap.hotswap_adapter_from_state_dict = hotswap_adapter_of_the_swap


_PATCHES = {
    "peft.config": patch_adapter_configs,
    "peft.tuners.tuners_utils": patch_tuners,
    "peft.peft_model": patch_adapter_models,
    "peft.auto": patch_auto_models,
    "peft.utils.hotswap": patch_hotswap,
}
PEFT_PATCHES = {name: guarded(patch) for name, patch in _PATCHES.items()}
