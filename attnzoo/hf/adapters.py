"""The swap of a model in PEFT adapters: its spec, and the parameters of its backends (the extras).

An adapter is trained for one attention, so its config records the swap, and it loads onto a model
with the same swap only. Extras are trained and saved with the adapter: the submodules ``attnzoo``
are added to PEFT's ``modules_to_save``, which gives each adapter a copy of them.
:mod:`attnzoo.hf.patches` calls these functions from PEFT.
"""

from __future__ import annotations

import copy
import inspect
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.utils.peft_utils import find_adapter_config_file

from attnzoo.contract.backend import AttentionBackend
from attnzoo.errors import SpecError, UnsupportedError, is_deeply_nested
from attnzoo.hf import seam
from attnzoo.hf.configs import has_field, read_field
from attnzoo.hf.layers import unwrap_model
from attnzoo.hf.names import LOADED, NAME
from attnzoo.hf.saving.checkpoints import require_spec_of_layers
from attnzoo.hf.unchanged import reset_on_error
from attnzoo.spec import AttentionSpec

NOT_COMPARED = ("impl", "attention_dropout")  # options of the implementation and of training


def current_swap(model: nn.Module) -> dict[str, Any] | None:
    """Return the spec of a model, or of its sub-configs by name; ``None`` if it is not swapped."""
    target = unwrap_model(model)
    return None if target is None else _config_swap(target.config)


def _config_swap(config: Any) -> dict[str, Any] | None:
    spec: dict[str, Any] | None = read_field(config, NAME)
    if spec is not None and config._attn_implementation == NAME:
        return spec
    found = {key: _config_swap(inner) for key, inner in seam.sub_configs(config).items()}
    return {key: spec for key, spec in found.items() if spec is not None} or None


def _plain(spec: Any) -> Any:
    """Return a recorded spec, or those of sub-configs, validated and without default options."""
    if isinstance(spec, Mapping) and not {"backend", "version"} & set(spec):
        return {key: _plain(inner) for key, inner in spec.items()}
    return None if spec is None else AttentionSpec.from_dict(spec).to_dict()


def _comparable(value: Any) -> Any:
    """Return a spec without the options that do not change what a trained layer computes."""
    if not isinstance(value, Mapping):
        return value
    inner = {key: _comparable(part) for key, part in value.items() if key not in NOT_COMPARED}
    return {key: part for key, part in inner.items() if part != {}}


def record_swap(model: nn.Module, config: Any) -> None:
    """Write the current swap of a model to an adapter's config, which saves it."""
    vars(config)[NAME] = current_swap(model)


def check_swap(model: nn.Module, spec: Any) -> None:
    """Raise if an adapter's config records another swap than that of a model.

    Args:
        model: The model.
        spec: The swap that the config records, or ``None``.
    """
    if is_deeply_nested(spec):  # of a file
        raise SpecError("The attention that the adapter's config records is nested too deeply")
    recorded, current = _plain(spec), _plain(current_swap(model))
    if recorded is not None and _comparable(recorded) != _comparable(current):
        found = "not swapped" if current is None else f"swapped with {current}"
        raise SpecError(
            f"The adapter was trained under another attention; this model is {found}. Load the "
            "base model alone and, before you load the adapter, swap the model: "
            f"attnzoo.swap(model, {recorded})"
        )


def download_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of an adapter's download, among others of a caller."""
    known = inspect.signature(find_adapter_config_file).parameters
    return {key: value for key, value in options.items() if key in known}


def refuse_repeated_prompt(model: Any, prepare: Any) -> None:
    """Raise if PEFT would add the virtual tokens again in every step of a generation."""
    is_prompt = model.active_peft_config.is_prompt_learning
    if is_prompt and current_swap(model) is not None and not seam.names_cache(prepare):
        raise UnsupportedError(
            f"generate: {seam.package('peft')} does not find the cache of "
            f"{seam.package('transformers')}, which is called {seam.CACHE_ARGUMENT!r}, and would "
            "add the virtual tokens again in every step, with stock models too; install another "
            "peft or an older transformers, or pass the generated tokens through the model "
            "without a cache"
        )


def _backends(model: nn.Module) -> Iterator[tuple[str, nn.Module, Any]]:
    """Yield the name, the parent and the module of each ``attnzoo``.

    The module is a backend, or PEFT's wrapper around one.
    """
    for name, parent in list(model.named_modules()):
        module = parent._modules.get(NAME)
        if module is not None:
            yield f"{name}.{NAME}" if name else NAME, parent, module


def _wrappers(model: nn.Module) -> Iterator[tuple[nn.Module, Any]]:
    """Yield the parents and PEFT's wrappers of backends."""
    for _, parent, module in _backends(model):
        if not isinstance(module, AttentionBackend):
            yield parent, module


def _original(module: Any) -> AttentionBackend:
    """Return the backend in PEFT's wrapper, or the backend itself."""
    backend = module if isinstance(module, AttentionBackend) else module.original_module
    assert isinstance(backend, AttentionBackend)
    return backend


def prepare_adapter(model: nn.Module, config: Any) -> None:
    """Check or record the swap in an adapter's config, before PEFT changes the model.

    A config that was loaded must record the model's swap, or none. A new config gets the model's
    swap, and ``"attnzoo"`` in ``modules_to_save`` if backends have parameters. An empty
    ``modules_to_save`` leaves them frozen.
    """
    if LOADED in vars(config):
        check_swap(model, vars(config).get(NAME))
        return
    _train_extras(model, config)
    record_swap(model, config)


def check_saved_replacement(
    model: nn.Module, name: str, path: Any, options: Mapping[str, Any]
) -> None:
    """Do the same as :func:`check_replacement` for a saved adapter."""
    if name not in getattr(model, "peft_config", {}):
        return
    file = find_adapter_config_file(path, **download_options(options))
    if file is not None:
        check_replacement(model, name, json.loads(Path(file).read_text("utf-8")))


def check_replacement(model: nn.Module, name: str, config: Mapping[str, Any]) -> None:
    """Raise if an adapter does not fit in the place of the model's adapter of a name."""
    old = getattr(model, "peft_config", {}).get(name)
    if old is None:
        return
    check_swap(model, config.get(NAME))
    had, has = (
        _listed_backends(model, x.get("modules_to_save") or ()) for x in (vars(old), config)
    )
    if had != has:
        found = [f"{len(x)} backends ({x[0]}, ...)" if x else "no backend" for x in (has, had)]
        raise SpecError(
            f"The new adapter has parameters of {found[0]}, and the adapter {name!r} that it would "
            f"replace of {found[1]}. Load it under another name, and call set_adapter"
        )


def _listed_backends(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Return the names of the backends with parameters that ``modules_to_save`` lists."""
    # PEFT's own rule for modules that adapters leave alone: a listed name, or below one
    patterns = [re.compile(rf"(^|.*\.){name}($|\..*)") for name in names]
    return [
        name
        for name, _, module in _backends(model)
        if any(x.match(name) for x in patterns)
        and any(True for _ in _original(module).parameters())
    ]


def check_hotswap(
    model: nn.Module, name: str, config: Mapping[str, Any], weights: Iterable[str]
) -> None:
    """Raise if PEFT cannot write the weights of an adapter over those of another one."""
    inner: Any = getattr(model, "_orig_mod", model)  # in torch.compile(model)
    check_replacement(inner, name, config)
    if any(f".{NAME}." in key for key in weights):
        raise UnsupportedError(
            "hotswap replaces no parameters of backends, which this adapter has. Load it under "
            "another name, and call set_adapter"
        )


def load_extras(
    model: nn.Module, name: str, path: Any, options: Mapping[str, Any], info: Any
) -> None:
    """Load the backends of an adapter, which transformers before 5.24 reports as unexpected."""
    keys = [key for key in info.unexpected_keys if f".{NAME}." in key]
    if not keys:
        return
    from peft.utils.save_and_load import load_peft_weights

    saved = options.get("adapter_state_dict")
    if saved is None:
        saved = load_peft_weights(path, device="cpu", **download_options(options))
    prefix = f"{seam.base_model_name(model)}."  # that a model without its head lacks
    weights = {key.removeprefix("base_model.model."): x for key, x in saved.items()}
    weights |= {key.removeprefix(prefix): x for key, x in weights.items()}
    own = model.state_dict()  # shares the memory of the parameters
    for key in keys:
        inner = key.replace(f".{NAME}.", f".{NAME}.modules_to_save.{name}.")
        target = own.get(inner, own.get(inner.removeprefix(prefix)))
        if key in weights and target is not None and target.shape == weights[key].shape:
            target.copy_(weights[key])
            info.unexpected_keys.remove(key)
            info.missing_keys -= {inner, inner.removeprefix(prefix)}
    refuse_unread_extras(model, [key for key in keys if key in info.unexpected_keys])


def refuse_unread_extras(model: nn.Module, keys: Collection[str]) -> None:
    """Raise if an adapter and a swapped model name the parameters of backends differently."""
    if keys and any(_backends(model)):
        raise SpecError(
            f"The adapter and this {type(unwrap_model(model)).__name__} do not have the same "
            f"parameters of backends ({min(keys)}, ...): the adapter was trained on a model of "
            "another class, or this transformers is too old to load them. Load it onto a model of "
            "that class (AutoModel, AutoModelForCausalLM, ...), by PeftModel.from_pretrained"
        )


def prepare_save(model: Any) -> None:
    """Record the swap that a model runs in the configs of its adapters, before they are saved."""
    refuse_lost_extras(model)
    require_spec_of_layers(model)
    for config in getattr(model, "peft_config", {}).values():
        record_swap(model, config)


def _train_extras(model: nn.Module, config: Any) -> None:
    backends = [(name, _original(module)) for name, _, module in _backends(model)]
    if not any(list(backend.parameters()) for _, backend in backends):
        return
    if not has_field(config, "modules_to_save"):
        trained = [name for name, x in backends if any(p.requires_grad for p in x.parameters())]
        if trained:
            raise UnsupportedError(
                f"{type(config).__name__} has no modules_to_save, so it cannot train the "
                f"parameters that the swap added, such as those of {trained[0]}. Use another "
                "PEFT method, such as LoraConfig; or freeze them to train the adapter alone: "
                "requires_grad_(False) of every attnzoo.AttentionBackend in model.modules()"
            )
        return
    names = config.modules_to_save
    if names is not None and not names:
        return
    listed = _listed_backends(model, names or ())
    missing = [x for x in backends if x[0] not in listed]
    for _, backend in missing:
        copy.deepcopy(backend)  # PEFT copies it later, when an error leaves half an adapter
    added = [NAME] if len(missing) == len(backends) else [name for name, _ in missing]
    if added:
        config.modules_to_save = [*(names or ()), *added]


def refuse_lost_extras(model: nn.Module) -> None:
    """Raise if backends have trained tensors that no adapter of the model saves."""
    for name, _, module in _backends(model):
        if not isinstance(module, AttentionBackend) or "modules_to_save" in name.split("."):
            continue
        if not any(p.requires_grad for p in module.parameters()):
            continue
        merges = hasattr(model, "merge_and_unload")
        add = "get_peft_model" if merges else "model.add_adapter"
        whole = (
            "model.merge_and_unload().save_pretrained(...)"
            if merges
            else "torch.save(model.state_dict(), ...)"
        )
        raise UnsupportedError(
            f"{name} has trained parameters that are not part of the adapter, so saving it would "
            f"lose them. Save the whole model, {whole}, or freeze parameters that were not "
            "trained, requires_grad_(False); next time, swap the model before "
            f"{add}, and leave modules_to_save unset, which trains and saves them"
        )


@contextmanager
def unwrapped_extras(model: nn.Module, adapters: Iterable[str]) -> Iterator[None]:
    """Put the backends of an adapter, or the original ones, in a model whose adapters are removed.

    PEFT's methods remove their wrappers differently, and some not at all. After an error the
    wrappers are back.
    """
    wrappers = list(_wrappers(model))
    chosen = [_own_backend(wrapper, adapters) for _, wrapper in wrappers]
    with reset_on_error(parent for parent, _ in wrappers):
        for (parent, wrapper), own in zip(wrappers, chosen, strict=True):
            setattr(parent, NAME, own or wrapper.original_module)
        yield


def _own_backend(wrapper: Any, adapters: Iterable[str]) -> nn.Module | None:
    """Return the backend that the adapters have in a wrapper, or ``None``."""
    own = [name for name in adapters if name in wrapper.modules_to_save]
    first = wrapper.modules_to_save[own[0]] if own else None
    if not all(_same_state(first, wrapper.modules_to_save[name]) for name in own[1:]):
        raise UnsupportedError(
            f"The adapters {', '.join(own)} have parameters of backend {wrapper.name!r} of their "
            "own, which cannot be merged with each other. Merge one of them"
        )
    return first


def _same_state(first: nn.Module | None, second: nn.Module | None) -> bool:
    """Return whether two backends have equal parameters and buffers."""
    if first is None or second is None:
        return first is second
    expected = first.state_dict()
    return all(torch.equal(x, expected[name]) for name, x in second.state_dict().items())


def refuse_inactive_extras(model: nn.Module, adapters: Iterable[str]) -> None:
    """Raise if the backends of merged adapters are not those that the model runs."""
    for _, wrapper in _wrappers(model):
        own = _own_backend(wrapper, adapters)
        if own is not None and not _same_state(own, _own_backend(wrapper, wrapper.active_adapters)):
            raise UnsupportedError(
                f"The adapter to merge ({', '.join(adapters)}) has parameters of backend "
                f"{wrapper.name!r}, which the model runs only while that adapter is active. "
                "Call set_adapter first"
            )


def enable_extras(model: nn.Module) -> None:
    """Run the adapters' backends again; transformers' ``enable_adapters`` omits saved modules."""
    for _, wrapper in _wrappers(model):
        wrapper.enable_adapters(True)


@contextmanager
def disabled_extras(model: nn.Module) -> Iterator[None]:
    """Run the original backends instead of the adapters'."""
    wrappers = [wrapper for _, wrapper in _wrappers(model) if not wrapper.disable_adapters]
    for wrapper in wrappers:
        wrapper.enable_adapters(False)
    try:
        yield
    finally:
        for wrapper in wrappers:
            wrapper.enable_adapters(True)
