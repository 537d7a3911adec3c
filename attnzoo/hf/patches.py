"""Every patch of transformers, with the reason why it is not a method of a class of ours.

Those of PEFT are in :mod:`attnzoo.hf.peft_patches`; a swapped model's own methods are in
:mod:`attnzoo.hf.swapped`. :mod:`attnzoo.autoload` runs a patch as soon as its module is loaded,
when the rest of the package may be half loaded. Nothing here is imported from either, and modules
of attnzoo are imported when a patched function is first called. ``tests/hf/test_patches.py`` counts
the patched attributes, and tests what each relies on.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

from attnzoo.autoload import guarded, mark_patched
from attnzoo.errors import SpecError
from attnzoo.hf.configs import has_field
from attnzoo.hf.names import NAME

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig

# The patched attributes by module, and why no method of a swapped model can do it
REASONS = {
    "transformers.configuration_utils": {
        "PreTrainedConfig.to_diff_dict": "a stock config holds the swap of a part of its model",
        "PreTrainedConfig._dict_from_json_file": "a file is read before its class is known",
    },
    "transformers.modeling_utils": {
        "PreTrainedModel.__new__": "LlamaForCausalLM(config) and its from_pretrained name the class"
    },
    "transformers.trainer": {
        "Trainer.get_decay_parameter_names": "it reads names and types of modules, not the model",
    },
    "transformers.integrations.executorch": {
        "TorchExportableModuleWithStaticCache.__init__": "it makes the cache and its buffers",
        "TorchExportableModuleWithHybridCache.__init__": "the same",
    },
}


def patch_config(configuration_utils: Any) -> None:
    """Save the swap that a model runs in its config.json, and read the names that it has there."""
    cls = configuration_utils.PreTrainedConfig
    if not mark_patched(cls):
        return
    to_diff_dict = cls.to_diff_dict
    read_json: Any = vars(cls)["_dict_from_json_file"].__func__

    @wraps(to_diff_dict)
    def to_diff_dict_with_swap(self: PreTrainedConfig) -> dict[str, Any]:
        from attnzoo.hf.saving.checkpoints import saved_config

        return saved_config(self, to_diff_dict(self))

    @wraps(read_json)
    def read_json_with_stock_type(cls: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        from attnzoo.hf.saving.checkpoints import loaded_config

        return loaded_config(read_json(cls, *args, **kwargs))

    cls.to_diff_dict = to_diff_dict_with_swap
    cls._dict_from_json_file = classmethod(read_json_with_stock_type)


def patch_masks(masking_utils: Any) -> None:
    """Register the mask function of ``"attnzoo"``; without it, causality and padding are lost."""

    def make_mask(*args: Any, **kwargs: Any) -> Any:
        from attnzoo.hf import masks

        return masks.make_mask(*args, **kwargs)

    masking_utils.AttentionMaskInterface.register(NAME, make_mask)


def patch_models(modeling_utils: Any) -> None:
    """Register the attention function, and build models of a config with a spec as swapped ones."""

    def attention(*args: Any, **kwargs: Any) -> Any:
        from attnzoo.hf.attention import call

        return call.attention(*args, **kwargs)

    cls = modeling_utils.PreTrainedModel
    if not mark_patched(cls):
        return
    modeling_utils.AttentionInterface.register(NAME, attention)
    new = cls.__new__

    @wraps(new)
    def new_of_config(cls: type, *args: Any, **kwargs: Any) -> Any:
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
        return new(cls)

    cls.__new__ = staticmethod(new_of_config)


def patch_trainer(trainer: Any) -> None:
    """Leave the decays and mixtures of backends out of weight decay."""
    cls = trainer.Trainer
    if not mark_patched(cls):
        return
    get_decay_parameter_names = cls.get_decay_parameter_names

    @wraps(get_decay_parameter_names)
    def get_decay_parameter_names_without_extras(self: Any, model: nn.Module) -> list[str]:
        from attnzoo.hf.extras import without_exempt

        return without_exempt(model, get_decay_parameter_names(self, model))

    cls.get_decay_parameter_names = get_decay_parameter_names_without_extras


def patch_export(executorch: Any) -> None:
    """Put the states of a swap in the caches of transformers' modules for ``torch.export``."""
    _patch_export(executorch.TorchExportableModuleWithStaticCache, "static_cache")
    _patch_export(executorch.TorchExportableModuleWithHybridCache, "cache")


def _patch_export(cls: Any, cache: str) -> None:
    if not mark_patched(cls):
        return
    init = cls.__init__

    @wraps(init)
    def init_with_states(self: Any, *args: Any, **kwargs: Any) -> None:
        from attnzoo.hf.export import prepare_export

        init(self, *args, **kwargs)
        prepare_export(self, getattr(self, cache))

    cls.__init__ = init_with_states


_PATCHES = {
    "transformers.configuration_utils": patch_config,
    "transformers.masking_utils": patch_masks,
    "transformers.modeling_utils": patch_models,
    "transformers.trainer": patch_trainer,
    "transformers.integrations.executorch": patch_export,
}
PATCHES = {name: guarded(patch) for name, patch in _PATCHES.items()}
