"""The parameters that backends add to a model (the extras), in PEFT adapters.

They are trained and saved with the adapter: the submodules ``attnzoo`` are added to PEFT's
``modules_to_save``, which gives each adapter a copy of them. :mod:`attnzoo.hf.peft_patches`
calls these functions from PEFT.
"""

from __future__ import annotations

import copy
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
from attnzoo.errors import SpecError, UnsupportedError
from attnzoo.hf import seam
from attnzoo.hf.adapters.config import check_swap, download_options, record_swap
from attnzoo.hf.configs import has_field
from attnzoo.hf.layers import unwrap_model
from attnzoo.hf.names import LOADED, NAME
from attnzoo.hf.saving.layer_specs import require_spec_of_layers
from attnzoo.hf.unchanged import reset_on_error


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

    Raises:
        SpecError: The adapter was trained for another swap.
        UnsupportedError: PEFT cannot train the parameters of the backends.
    """
    if LOADED in vars(config):
        check_swap(model, vars(config).get(NAME))
        return
    _train_extras(model, config)
    record_swap(model, config)


def check_saved_replacement(
    model: nn.Module, name: str, path: Any, options: Mapping[str, Any]
) -> None:
    """Do the same as :func:`check_replacement` for a saved adapter.

    Args:
        model: The model.
        name: Name of the adapter.
        path: Folder or id of the saved adapter.
        options: The options of the download, among others.
    """
    if name not in getattr(model, "peft_config", {}):
        return
    file = find_adapter_config_file(path, **download_options(options))
    if file is not None:
        check_replacement(model, name, json.loads(Path(file).read_text("utf-8")))


def check_replacement(model: nn.Module, name: str, config: Mapping[str, Any]) -> None:
    """Raise if an adapter does not fit in the place of the model's adapter of a name.

    Args:
        model: The model. If it has no adapter of this name, nothing is replaced.
        name: Name of the adapter.
        config: The fields of the new adapter's config.

    Raises:
        SpecError: It was trained for another swap, or it has no parameters of backends where the
            old adapter has some, or the other way round: the old ones would stay.
    """
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
    """Raise if PEFT cannot write the weights of an adapter over those of another one.

    Args:
        model: The model, or the result of ``torch.compile``.
        name: Name of the adapter.
        config: The fields of the new adapter's config.
        weights: Names of its weights.

    Raises:
        SpecError: It was trained for another swap, or one of both has no parameters of backends.
        UnsupportedError: Both have some.
    """
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
    """Load the backends of an adapter that older versions of transformers leave out.

    They load no modules of ``modules_to_save``, and report their weights as unexpected.

    Args:
        model: The model, which has the adapter.
        name: Name of the adapter.
        path: Folder or id of the saved adapter, or ``None``.
        options: The options of the download, and the weights if there is no ``path``.
        info: What transformers reports, which is changed.

    Raises:
        SpecError: Weights of backends are those of no module of the model.
    """
    if not any(f".{NAME}." in key for key in info.unexpected_keys):
        return
    if path is None:
        weights = options["adapter_state_dict"]
    else:
        from peft.utils.save_and_load import load_peft_weights

        weights = load_peft_weights(path, device="cpu", **download_options(options))
    saved = {key.removeprefix("base_model.model."): x for key, x in weights.items()}
    for module_name, _, module in _backends(model):
        if isinstance(module, AttentionBackend) or name not in module.modules_to_save:
            continue
        backend = module.modules_to_save[name]
        prefix, own = _saved_extras(model, module_name, saved)
        if not own.keys() <= backend.state_dict().keys():
            continue
        backend.load_state_dict(own, strict=False)
        for found in (prefix, f"{module_name}."):
            info.unexpected_keys -= {found + key for key in own}
        info.missing_keys -= {f"{module_name}.modules_to_save.{name}.{key}" for key in own}
    refuse_unread_extras(model, [key for key in info.unexpected_keys if f".{NAME}." in key])


def _saved_extras(
    model: nn.Module, module_name: str, saved: Mapping[str, torch.Tensor]
) -> tuple[str, dict[str, torch.Tensor]]:
    """Return what precedes the names of a backend's weights in an adapter, and the weights.

    The adapter of a model with a head names modules with a prefix that those of its base model
    lack.
    """
    base = f"{seam.base_model_name(model)}."
    for name in (module_name, base + module_name, module_name.removeprefix(base)):
        prefix = f"{name}."
        own = {key.removeprefix(prefix): x for key, x in saved.items() if key.startswith(prefix)}
        if own:
            break
    return prefix, own


def refuse_unread_extras(model: nn.Module, keys: Collection[str]) -> None:
    """Raise if an adapter and a swapped model name the parameters of backends differently.

    Args:
        model: The model.
        keys: Names of parameters that one of them has.

    Raises:
        SpecError: There are such parameters.
    """
    if keys and any(_backends(model)):
        raise SpecError(
            f"The adapter and this {type(unwrap_model(model)).__name__} do not have the same "
            f"parameters of backends ({min(keys)}, ...): the adapter was trained on a model of "
            "another class. Load it onto a model of that class (AutoModel, AutoModelForCausalLM, "
            "...), or by the model's own load_adapter, which knows the prefix of base models"
        )


def prepare_save(model: Any) -> None:
    """Record the swap that a model runs now in the configs of its adapters, before they are saved.

    Raises:
        UnsupportedError: The adapters lack parameters of backends that are trained.
    """
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
    """Raise if backends have trained tensors that no adapter of the model saves.

    Raises:
        UnsupportedError: The adapters do not contain the tensors.
    """
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

    Args:
        model: A model with adapters.
        adapters: The adapters to merge; empty to remove all.

    Raises:
        UnsupportedError: Several of the adapters have backends of their own.
    """
    wrappers = list(_wrappers(model))
    chosen = [_own_backend(wrapper, adapters) for _, wrapper in wrappers]
    with reset_on_error(parent for parent, _ in wrappers):
        for (parent, wrapper), own in zip(wrappers, chosen, strict=True):
            setattr(parent, NAME, own or wrapper.original_module)
        yield


def _own_backend(wrapper: Any, adapters: Iterable[str]) -> nn.Module | None:
    """Return the backend that the adapters have in a wrapper, or ``None``.

    Raises:
        UnsupportedError: Several adapters have backends with different parameters.
    """
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
    """Raise if the backends of merged adapters are not those that the model runs.

    Raises:
        UnsupportedError: The adapter is not active.
    """
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
