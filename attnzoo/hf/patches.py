"""Every patch of transformers, one function per patched module.

Those of PEFT are in :mod:`attnzoo.hf.adapters.patches`.
:mod:`attnzoo.autoload` runs a patch as soon as its module is loaded, when the rest of the package
may be half loaded. Nothing here is imported from either, and modules of attnzoo are imported when a
patched function is first called. ``tests/hf/test_patches.py`` has a test for each
patch, which fails when a new version of the package changes what the patch relies on.
"""

from __future__ import annotations

from copy import copy
from functools import wraps
from typing import TYPE_CHECKING, Any

from attnzoo.autoload import guarded, mark_patched
from attnzoo.hf.configs import read_field
from attnzoo.hf.names import (
    ARCHITECTURE_PREFIX,
    MADE_FROM,
    MASK_FACTORIES,
    NAME,
    PRUNED,
    RECORDING,
    REQUESTED,
    TYPE_PREFIX,
)

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.cache_utils import Cache


def patch_config(configuration_utils: Any) -> None:
    """Save the swap that a model runs in its config.json, and allow ``output_attentions``.

    Stock configs do not save ``attn_implementation``, and loaders of other packages ignore it, so
    the file has a type of model, too, that is known only where attnzoo is imported. The spec of a
    swap that ``set_attn_implementation("sdpa")`` disabled is not saved.
    """
    cls = configuration_utils.PreTrainedConfig
    if not mark_patched(cls):
        return
    to_dict, validate = cls.to_dict, cls.validate_output_attentions
    output_attentions, to_json_file = cls.output_attentions, cls.to_json_file
    read_json: Any = vars(cls)["_dict_from_json_file"].__func__

    @wraps(to_dict)
    def to_dict_with_implementation(self: PreTrainedConfig) -> dict[str, Any]:
        from attnzoo.hf.saving.checkpoints import saved_config

        return saved_config(self, to_dict(self))

    @wraps(to_json_file)
    def to_json_file_with_type(
        self: PreTrainedConfig, json_file_path: Any, use_diff: bool = True
    ) -> None:
        from attnzoo.hf.saving.checkpoints import saved_json

        text = saved_json(self, self.to_json_string(use_diff=use_diff))
        with open(json_file_path, "w", encoding="utf-8") as file:
            file.write(text)

    @wraps(read_json)
    def read_json_with_stock_type(cls: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        data: dict[str, Any] = read_json(cls, *args, **kwargs)
        if isinstance(data.get("model_type"), str):
            data["model_type"] = data["model_type"].removeprefix(TYPE_PREFIX)
        return data

    def set_output_attentions(self: Any, value: bool) -> None:
        if self._attn_implementation == NAME:
            self._output_attentions = value  # a backend without weights refuses the call
        else:
            output_attentions.fset(self, value)

    @wraps(validate)
    def validate_output_attentions(self: Any) -> None:
        if self._attn_implementation != NAME:
            validate(self)

    cls.to_dict, cls.to_json_file = to_dict_with_implementation, to_json_file_with_type
    cls._dict_from_json_file = classmethod(read_json_with_stock_type)
    cls.output_attentions = output_attentions.setter(set_output_attentions)
    cls.validate_output_attentions = validate_output_attentions


def patch_push_to_hub(hub: Any) -> None:
    """Complete the card of a swapped model, or of an adapter, that ``push_to_hub`` uploads."""
    cls = hub.PushToHubMixin
    if not mark_patched(cls):
        return
    upload = cls._upload_modified_files

    @wraps(upload)
    def upload_with_loading(
        self: Any, working_dir: Any, repo_id: str, *args: Any, **kwargs: Any
    ) -> Any:
        from attnzoo.hf.saving.card import complete_uploaded_card

        complete_uploaded_card(self, working_dir, repo_id)
        return upload(self, working_dir, repo_id, *args, **kwargs)

    cls._upload_modified_files = upload_with_loading


def patch_lazy_module(import_utils: Any) -> None:
    """Find the stock class for the name that a saved swap has in its config.

    Pipelines, ``transformers serve``, TRL and sentence-transformers look up the classes under
    ``architectures`` in the package ``transformers``.
    """
    cls = import_utils._LazyModule
    if not mark_patched(cls):
        return
    find = cls.__getattr__

    @wraps(find)
    def find_stock_class(self: Any, name: str) -> Any:
        if self.__name__ == "transformers":
            name = name.removeprefix(ARCHITECTURE_PREFIX)
        return find(self, name)

    cls.__getattr__ = find_stock_class


def patch_auto_classes(auto_factory: Any) -> None:
    """Choose the class that a saved swap names, in families with several for one auto class."""
    if not mark_patched(auto_factory):
        return
    choose = auto_factory._get_model_class

    @wraps(choose)
    def choose_by_stock_name(config: Any, model_mapping: Any) -> Any:
        from attnzoo.hf.saving.checkpoints import stock_class_name

        names = read_field(config, "architectures")
        if names:
            config = copy(config)
            config.architectures = list(map(stock_class_name, names))
        return choose(config, model_mapping)

    auto_factory._get_model_class = choose_by_stock_name


def patch_cache(cache_utils: Any) -> None:
    """Record on the cache itself that it records past tokens, and crop all layers or none.

    ``Cache.activate_past_recording`` (assisted decoding) informs only the layers that exist when it
    is called; our layers, which are created later, read the attribute.
    """
    cls = cache_utils.Cache
    if not mark_patched(cls):
        return
    activate, crop = cls.activate_past_recording, cls.crop

    @wraps(activate)
    def activate_and_note(self: Cache) -> None:
        setattr(self, RECORDING, True)
        activate(self)

    @wraps(crop)
    def crop_all_layers_or_none(self: Cache, *args: Any, **kwargs: Any) -> None:
        from attnzoo.hf.cache.state_layer import reset_layers_on_error

        with reset_layers_on_error(self):
            crop(self, *args, **kwargs)

    cls.activate_past_recording = activate_and_note
    cls.crop = crop_all_layers_or_none


def patch_masks(masking_utils: Any) -> None:
    """Register the mask function of ``"attnzoo"``; without it, causality and padding are lost.

    Mask functions that transformers makes keep the arguments they were made from: torch.compile
    cannot read closures, and the name of a union of masks is no proof of its parts.
    """

    def make_mask(*args: Any, **kwargs: Any) -> Any:
        from attnzoo.hf import masks

        return masks.make_mask(*args, **kwargs)

    masking_utils.AttentionMaskInterface.register(NAME, make_mask)
    if mark_patched(masking_utils):
        for name in MASK_FACTORIES:
            _keep_arguments(masking_utils, name)


def _keep_arguments(masking_utils: Any, name: str) -> None:
    make = getattr(masking_utils, name, None)
    if make is None:  # another release; a mask without known parts is materialised or refused
        return

    @wraps(make)
    def make_with_arguments(*args: Any, **kwargs: Any) -> Any:
        function = make(*args, **kwargs)
        setattr(function, MADE_FROM, (*args, *kwargs.values()))
        return function

    setattr(masking_utils, name, make_with_arguments)


def patch_models(modeling_utils: Any) -> None:
    """Register the attention function, and build and initialise backends with their models."""

    def attention(*args: Any, **kwargs: Any) -> Any:
        from attnzoo.hf.attention import call

        return call.attention(*args, **kwargs)

    cls = modeling_utils.PreTrainedModel
    if not mark_patched(cls):
        return
    modeling_utils.AttentionInterface.register(NAME, attention)
    _patch_saving(cls)
    init, post_init = cls.__init__, cls.post_init
    initialize_weights = cls._initialize_weights

    @wraps(init)
    def init_with_attention_classes(
        self: PreTrainedModel, config: Any, *args: Any, **kwargs: Any
    ) -> None:
        from attnzoo.hf.saving.checkpoints import is_saved_swap

        requested = read_field(config, "_attn_implementation")  # None: init selects the default
        if requested is None and is_saved_swap(config):
            config._attn_implementation = requested = NAME
        init(self, config, *args, **kwargs)
        vars(self)[REQUESTED] = requested is not None
        if self.config._attn_implementation == NAME:
            from attnzoo.hf.seam import complete_class_tables

            complete_class_tables(type(self))  # before the subclass builds its layers

    @wraps(post_init)
    def post_init_with_backends(self: PreTrainedModel) -> None:
        from attnzoo.hf.swap.backends import attach_when_built, change_when_built

        if read_field(self.config, PRUNED) is not None:
            from attnzoo.hf.heads.pruning import prune_when_built

            prune_when_built(self)
        attach_when_built(self)  # before the original, which initialises all modules
        post_init(self)
        change_when_built(self)

    @wraps(initialize_weights)
    def initialize_weights_and_backends(
        self: PreTrainedModel, module: nn.Module, *args: Any, **kwargs: Any
    ) -> None:
        from attnzoo.contract.backend import AttentionBackend
        from attnzoo.hf.swap.extras import initialise_backend

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
            from attnzoo.hf.seam import update_copied_configs

            update_copied_configs(self)

    @wraps(save)
    def save_without_disabled_extras(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        from attnzoo.hf.heads.pruning import current_heads
        from attnzoo.hf.saving.checkpoints import without_disabled_extras
        from attnzoo.hf.saving.layer_specs import current_specs

        with current_heads(self), current_specs(self), without_disabled_extras(self):
            if getattr(self, "_hf_peft_config_loaded", False):  # saves an adapter only
                from attnzoo.hf.adapters.extras import prepare_save

                prepare_save(self)
            return save(self, *args, **kwargs)

    @wraps(from_pretrained)
    def from_pretrained_with_reason(cls: Any, *args: Any, **kwargs: Any) -> Any:
        from attnzoo.hf.saving.checkpoints import load

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
    if not mark_patched(cls):
        return
    switch = cls.switch_to_cb_friendly_attn

    @wraps(switch)
    def keep_swap(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        from attnzoo.hf.attention.continuous_batching import serves_swap

        if not serves_swap(model):
            switch(self, model, *args, **kwargs)

    cls.switch_to_cb_friendly_attn = keep_swap


def patch_trainer(trainer: Any) -> None:
    """Leave the decays and mixtures of backends out of weight decay, and complete the card."""
    cls = trainer.Trainer
    if not mark_patched(cls):
        return
    get_decay_parameter_names = cls.get_decay_parameter_names

    @wraps(get_decay_parameter_names)
    def get_decay_parameter_names_without_extras(self: Any, model: nn.Module) -> list[str]:
        from attnzoo.hf.swap.extras import without_exempt

        return without_exempt(model, get_decay_parameter_names(self, model))

    cls.get_decay_parameter_names = get_decay_parameter_names_without_extras
    _patch_card(cls)


def patch_trl(base_trainer: Any) -> None:
    """Complete the card of TRL's trainers, which write one of their own."""
    cls = base_trainer._BaseTrainer
    if "create_model_card" in vars(cls) and mark_patched(cls):
        _patch_card(cls)


def _patch_card(cls: Any) -> None:
    """Add the tag and how to load the model to the card that a trainer writes."""
    create_model_card = cls.create_model_card

    @wraps(create_model_card)
    def create_model_card_with_loading(self: Any, *args: Any, **kwargs: Any) -> None:
        from attnzoo.hf.saving.card import complete_trainer_card

        create_model_card(self, *args, **kwargs)
        complete_trainer_card(self)

    cls.create_model_card = create_model_card_with_loading


def patch_export(executorch: Any) -> None:
    """Put the states of a swap in the caches of transformers' modules for ``torch.export``."""
    for name, cache in (
        ("TorchExportableModuleWithStaticCache", "static_cache"),
        ("TorchExportableModuleWithHybridCache", "cache"),
        ("Seq2SeqLMDecoderExportableModuleWithStaticCache", "static_cache"),
    ):
        _patch_export(getattr(executorch, name), cache)
    if not mark_patched(executorch):
        return
    get_cache_dict = executorch._get_cache_dict

    @wraps(get_cache_dict)
    def get_cache_dict_without_states(cache: Any) -> Any:
        from attnzoo.hf.export import refuse_states

        refuse_states(cache)
        return get_cache_dict(cache)

    executorch._get_cache_dict = get_cache_dict_without_states


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
    "transformers.utils.import_utils": patch_lazy_module,
    "transformers.utils.hub": patch_push_to_hub,
    "transformers.configuration_utils": patch_config,
    "transformers.cache_utils": patch_cache,
    "transformers.masking_utils": patch_masks,
    "transformers.modeling_utils": patch_models,
    "transformers.models.auto.auto_factory": patch_auto_classes,
    "transformers.trainer": patch_trainer,
    "trl.trainer.base_trainer": patch_trl,
    "transformers.integrations.executorch": patch_export,
    "transformers.generation.continuous_batching.continuous_api": patch_continuous_batching,
}
PATCHES = {name: guarded(patch) for name, patch in _PATCHES.items()}
