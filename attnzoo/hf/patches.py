"""Every patch of transformers and PEFT, with the reason why it is not a method of a class of ours.

A swapped model's own methods are in :mod:`attnzoo.hf.swapped`; PEFT wraps a model in classes of its
own. :mod:`attnzoo.autoload` applies a patch as soon as its module is loaded, when the rest of the
package may be half loaded. Nothing here is imported from either, and modules of attnzoo are
imported when a patched function is first called. ``tests/hf/test_patches.py`` counts the patched
attributes, and tests what each relies on.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, NamedTuple

from attnzoo.autoload import FAILED_PATCHES
from attnzoo.errors import SpecError
from attnzoo.hf.configs import has_field
from attnzoo.hf.names import LOADED, NAME

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig


class Patch(NamedTuple):
    """What replaces an attribute; ``function`` gets the original one as its first argument."""

    function: Callable[..., Any]
    reason: str  # why no method of a swapped model can do it


TABLE: dict[str, dict[str, Patch]] = {}  # by module, and by attribute in it


def _patch(module: str, attribute: str, reason: str) -> Callable[[Any], Any]:
    """Return a decorator that enters a function into :data:`TABLE`."""

    def add(function: Any) -> Any:
        TABLE.setdefault(module, {})[attribute] = Patch(function, reason)
        return function

    return add


def apply_patches(name: str, module: Any) -> None:
    """Apply the patches of a module, once; a missing name is recorded instead of raised."""
    try:
        if name in REGISTRATIONS:
            REGISTRATIONS[name](module)
        for path, patch in TABLE.get(name, {}).items():
            *owners, attribute = path.split(".")
            _replace(getattr(module, owners[0]) if owners else module, attribute, patch.function)
    except (AttributeError, KeyError) as error:
        found = module.__name__
        FAILED_PATCHES[found] = f"attnzoo.hf.patches does not fit {found} ({error})"


def _replace(owner: Any, name: str, function: Callable[..., Any]) -> None:
    raw: Any = inspect.getattr_static(owner, name)
    original = getattr(raw, "__func__", raw)
    if getattr(original, "_attnzoo_patch", None) is function:
        return

    @wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    vars(patched)["_attnzoo_patch"] = function
    kind: Any = staticmethod if name == "__new__" else type(raw)
    setattr(owner, name, kind(patched) if kind in (classmethod, staticmethod) else patched)


# -- transformers ---------------------------------------------------------------------------------


def _register_mask(masking_utils: Any) -> None:
    """Register the mask function of ``"attnzoo"``; without it, causality and padding are lost."""

    def make_mask(*args: Any, **kwargs: Any) -> Any:
        from attnzoo.hf import masks

        return masks.make_mask(*args, **kwargs)

    if NAME not in masking_utils.AttentionMaskInterface._global_mapping:
        masking_utils.AttentionMaskInterface.register(NAME, make_mask)


def _register_attention(modeling_utils: Any) -> None:
    def attention(*args: Any, **kwargs: Any) -> Any:
        from attnzoo.hf.attention import call

        return call.attention(*args, **kwargs)

    if NAME not in modeling_utils.AttentionInterface._global_mapping:
        modeling_utils.AttentionInterface.register(NAME, attention)


REGISTRATIONS: dict[str, Callable[[Any], None]] = {
    "transformers.masking_utils": _register_mask,
    "transformers.modeling_utils": _register_attention,
}
CONFIG = "transformers.configuration_utils"
MODELS = "transformers.modeling_utils"


@_patch(CONFIG, "PreTrainedConfig.to_diff_dict", "stock configs hold the swaps of parts")
def _to_diff_dict(original: Any, self: PreTrainedConfig) -> dict[str, Any]:
    from attnzoo.hf.saving.checkpoints import saved_config

    return saved_config(self, original(self))


@_patch(CONFIG, "PreTrainedConfig._dict_from_json_file", "its class is not known yet")
def _read_json(original: Any, cls: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    from attnzoo.hf.saving.checkpoints import loaded_config

    return loaded_config(original(cls, *args, **kwargs))


@_patch(MODELS, "PreTrainedModel.__new__", "LlamaForCausalLM(config) names the class")
def _new_of_config(original: Any, cls: type, *args: Any, **kwargs: Any) -> Any:
    config = args[0] if args else kwargs.get("config")
    if NAME in kwargs:
        raise SpecError(
            f"from_pretrained takes no argument {NAME!r}. Swap the loaded model, "
            f"attnzoo.swap(model, {kwargs[NAME]!r}); or set config.attnzoo, and pass "
            "config=config"
        )
    if has_field(config, "_attn_implementation"):
        from attnzoo.hf.swapped import new_model

        cls = new_model(cls, config)
    return original(cls)


@_patch("transformers.trainer", "Trainer.get_decay_parameter_names", "it reads modules, no model")
def _get_decay_parameter_names(original: Any, self: Any, model: nn.Module) -> list[str]:
    """Leave the decays and mixtures of backends out of weight decay."""
    from attnzoo.hf.extras import without_exempt

    return without_exempt(model, original(self, model))


def _init_with_states(cache: str, original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    from attnzoo.hf.export import prepare_export

    original(self, *args, **kwargs)
    prepare_export(self, getattr(self, cache))


for _kind, _cache in (("Static", "static_cache"), ("Hybrid", "cache")):
    _patch(
        "transformers.integrations.executorch",
        f"TorchExportableModuleWith{_kind}Cache.__init__",
        "it makes the cache and its buffers",
    )(partial(_init_with_states, _cache))


# -- configs of PEFT's adapters --------------------------------------------------------------------
#
# The swap is the field ``attnzoo`` of adapter_config.json. vLLM, and PEFT where attnzoo is not
# imported, ignore that field and would run the adapter on softmax. They refuse an unknown
# ``init_lora_weights``, so that is ``"attnzoo"`` in the file.

INIT = "init_lora_weights"
SAVED_INIT = f"{NAME}_{INIT}"  # the value of PEFT's field, in a file that has another there


@_patch("peft.config", "PeftConfigMixin.to_dict", "a file names the swap of its adapter")
def _to_dict(original: Any, self: Any) -> dict[str, Any]:
    data: dict[str, Any] = original(self)
    spec = vars(self).get(NAME)
    if spec is None:
        return data
    if INIT in data:
        data = {**data, SAVED_INIT: data[INIT], INIT: NAME}
    return {**data, NAME: spec}


@_patch("peft.config", "PeftConfigMixin.from_peft_type", "it would refuse or lose that name")
def _from_peft_type(original: Any, cls: Any, *args: Any, **kwargs: Any) -> Any:
    spec = kwargs.pop(NAME, None)
    if SAVED_INIT in kwargs:  # else of an earlier version
        kwargs[INIT] = kwargs.pop(SAVED_INIT)
    made = original(cls, *args, **kwargs)
    if spec is not None:
        vars(made)[NAME] = spec
    return made


@_patch("peft.config", "PeftConfigMixin.from_pretrained", "a config that was read is checked")
def _config_from_pretrained(original: Any, cls: Any, *args: Any, **kwargs: Any) -> Any:
    made = original(cls, *args, **kwargs)
    vars(made)[LOADED] = True
    return made


# -- tuners ----------------------------------------------------------------------------------------

TUNERS = "peft.tuners.tuners_utils"
# whether a model gets the swap of the adapter that is added to it
APPLY_SWAP = ContextVar("APPLY_SWAP", default=False)


def _prepare_adapter(model: nn.Module, peft_config: Any) -> None:
    """Swap the model as the adapter records it, where that is asked; check or record the swap."""
    from attnzoo.hf import adapters

    spec = vars(peft_config).get(NAME)
    if APPLY_SWAP.get() and spec is not None and adapters.current_swap(model) is None:
        from attnzoo.hf.swap import swap

        swap(model, spec)
    adapters.prepare_adapter(model, peft_config)


@_patch(TUNERS, "BaseTuner.inject_adapter", "backends train and are saved with it")
def _inject_adapter(
    original: Any, self: Any, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any
) -> None:
    from attnzoo.hf.unchanged import unchanged_on_error

    _prepare_adapter(model, self.peft_config[adapter_name])
    with unchanged_on_error(model):
        original(self, model, adapter_name, *args, **kwargs)


@_patch(TUNERS, "BaseTuner.merge_adapter", "it omits backends of inactive adapters")
def _merge_adapter(
    original: Any, self: Any, adapter_names: list[str] | None = None, safe_merge: bool = False
) -> None:
    from attnzoo.hf import adapters

    adapters.refuse_inactive_extras(self.model, adapter_names or self.active_adapters)
    original(self, adapter_names, safe_merge)


@_patch(TUNERS, "BaseTuner.merge_and_unload", "it loses backends, or keeps their wrappers")
def _merge_and_unload(
    original: Any,
    self: Any,
    progressbar: bool = False,
    safe_merge: bool = False,
    adapter_names: list[str] | None = None,
) -> Any:
    from attnzoo.hf import adapters

    with adapters.unwrapped_extras(self.model, adapter_names or self.active_adapters):
        return original(self, progressbar, safe_merge, adapter_names)


@_patch(TUNERS, "BaseTuner.unload", "wrappers of backends would stay")
def _unload(original: Any, self: Any) -> Any:
    from attnzoo.hf import adapters

    with adapters.unwrapped_extras(self.model, ()):
        return original(self)


# -- models of PEFT --------------------------------------------------------------------------------

MODEL = "peft.peft_model"


@_patch(MODEL, "PeftModel.add_adapter", "prompts have no tuner, and train backends too")
def _add_adapter(
    original: Any, self: Any, adapter_name: str, peft_config: Any, *args: Any, **kwargs: Any
) -> None:
    _prepare_adapter(self.base_model, peft_config)
    original(self, adapter_name, peft_config, *args, **kwargs)


@_patch(MODEL, "PeftModel.load_adapter", "an adapter that it replaces may be of another swap")
def _load_adapter(
    original: Any, self: Any, model_id: Any, adapter_name: str, *args: Any, **kwargs: Any
) -> Any:
    from attnzoo.hf import adapters
    from attnzoo.hf.unchanged import unchanged_on_error

    adapters.check_saved_replacement(self, adapter_name, model_id, kwargs)
    with unchanged_on_error(self):
        try:
            return original(self, model_id, adapter_name, *args, **kwargs)
        except KeyError as error:  # PEFT looks a weight of modules_to_save up
            adapters.refuse_unread_extras(self, [x for x in error.args if f".{NAME}." in str(x)])
            raise


@_patch(MODEL, "PeftModel.disable_adapter", "PEFT leaves the backends of prompts on")
@contextmanager
def _disable_adapter(original: Any, self: Any) -> Iterator[None]:
    from attnzoo.hf import adapters

    with original(self), adapters.disabled_extras(self):
        yield


@_patch(MODEL, "PeftModel.save_pretrained", "the swap of now is saved; no backend is lost")
def _save_pretrained(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    from attnzoo.hf import adapters

    adapters.prepare_save(self)
    original(self, *args, **kwargs)


@_patch("peft.auto", "_BaseAutoPeftModel.from_pretrained", "its base model has no swap")
def _auto_from_pretrained(original: Any, cls: Any, *args: Any, **kwargs: Any) -> Any:
    token = APPLY_SWAP.set(True)
    try:
        return original(cls, *args, **kwargs)
    finally:
        APPLY_SWAP.reset(token)


@_patch(
    "peft.utils.hotswap",
    "hotswap_adapter_from_state_dict",
    "it would run an adapter of another swap",
)
def _hotswap(
    original: Any,
    model: nn.Module,
    state_dict: Any,
    adapter_name: str,
    config: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    from attnzoo.hf import adapters

    adapters.check_hotswap(model, adapter_name, vars(config), state_dict)
    original(model, state_dict, adapter_name, config, *args, **kwargs)


PATCHES = {name: partial(apply_patches, name) for name in (*REGISTRATIONS, *TABLE)}
