"""What a config and a checkpoint save of a swap, and what loading them reports."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from attnzoo.errors import SpecError, SwapWarning
from attnzoo.hf.configs import read_field
from attnzoo.hf.names import ARCHITECTURE_PREFIX, NAME, TYPE_PREFIX

PEFT_WRAPPERS = re.compile(r"\.(original_module|modules_to_save\.[^.]+)$")  # in names


def saved_implementation(config: Any) -> str | dict[str, Any] | None:
    """Return the ``attn_implementation`` that a config saves; ``None`` if nothing is swapped.

    If only parts of a composite model run a swap, it is a mapping from sub-configs to
    implementations, the form that ``from_pretrained`` accepts.
    """
    own = read_field(config, NAME) is not None and config._attn_implementation == NAME
    parts: dict[str, Any] = {}
    for key in read_field(config, "sub_configs", {}):
        part = read_field(config, key)
        if part is not None:
            parts[key] = saved_implementation(part) or (own and part._attn_implementation)
    parts = {key: value for key, value in parts.items() if value}
    if not own:
        return parts or None
    return NAME if all(value == NAME for value in parts.values()) else {"": NAME, **parts}


def saved_config(config: Any, data: dict[str, Any], *, is_part: bool = False) -> dict[str, Any]:
    """Return what the config.json of a model holds, with the swap that it runs.

    Stock configs do not save ``attn_implementation``, and loaders of other packages ignore it, so
    the file has a type and class names, too, that are known only where attnzoo is imported.
    ``model_type`` of a config in memory is the stock one, which transformers and PEFT look up.
    """
    if NAME in data and config._attn_implementation not in (None, NAME):
        del data[NAME]  # set_attn_implementation has disabled the swap
        data.pop("attn_implementation", None)
    elif hasattr(data.get(NAME), "to_dict"):  # an AttentionSpec
        data[NAME] = data[NAME].to_dict(defaults=True)
    implementation = saved_implementation(config)
    if implementation is not None:
        data["attn_implementation"] = implementation
        if not is_part:
            data["model_type"] = TYPE_PREFIX + config.model_type
    if data.get("architectures"):
        prefix = "" if implementation is None else ARCHITECTURE_PREFIX
        data["architectures"] = [prefix + stock_class_name(x) for x in data["architectures"]]
    for key in read_field(config, "sub_configs", {}):
        if isinstance(data.get(key), dict):
            saved_config(read_field(config, key), data[key], is_part=True)
    if not is_part:
        add_flat_rope(config, data)
    return data


def loaded_config(data: dict[str, Any]) -> dict[str, Any]:
    """Return the data of a config.json with the stock type, and register the classes that it names.

    The names stay in the config, where engines in this process read them. Pipelines, ``transformers
    serve``, TRL and sentence-transformers look them up in the package transformers.
    """
    family = data.get("model_type")
    if not (isinstance(family, str) and family.startswith(TYPE_PREFIX)):
        return data
    data["model_type"] = family.removeprefix(TYPE_PREFIX)
    names = data.get("architectures")
    if not isinstance(names, list):
        return data
    several = [register_class(x) for x in names]
    if any(several):  # an auto class compares the names
        data["architectures"] = [stock_class_name(x) for x in names]
    return data


def register_class(name: Any) -> bool:
    """Let ``transformers.AttnzooX`` be the class ``X``, if there is one.

    Returns:
        Whether an auto class has several classes for the family of ``X``, as that of DeiT.
    """
    import transformers
    from transformers.models.auto import modeling_auto

    stock = stock_class_name(name)
    cls = getattr(transformers, stock, None) if stock != name else None
    if isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel):  # untrusted
        # of the class of the module: transformers itself makes a second module at times
        setattr(type(transformers), name, cls)
    families = (x for name, x in vars(modeling_auto).items() if name.endswith("_MAPPING_NAMES"))
    several = (x for names in families for x in names.values() if isinstance(x, tuple))
    return any(stock in names for names in several)


def is_saved_swap(config: Any) -> bool:
    """Return whether a config was read from the folder of a swap, so that extras are saved too."""
    names = read_field(config, "architectures") or ()
    return any(str(name).startswith(ARCHITECTURE_PREFIX) for name in names)


def stock_class_name(architecture: Any) -> str:
    """Return the name of transformers' class for an entry of ``architectures`` in a config."""
    return str(architecture).removeprefix(ARCHITECTURE_PREFIX)


def require_spec_of_layers(model: Any) -> None:
    """Raise ``SpecError`` if layers were moved after the swap, so that its spec is not theirs.

    Backends move with their layers; the spec has the numbers and names of the swap.
    """
    from attnzoo.hf import seam  # imports models, which who reads a config may not need
    from attnzoo.spec import AttentionSpec

    seen = set()
    for inner in seam.pretrained_models(model):  # outer models first
        spec: Any = read_field(inner.config, NAME)
        if id(inner.config) in seen or spec is None or inner.config._attn_implementation != NAME:
            continue
        seen.add(id(inner.config))
        spec = spec if isinstance(spec, AttentionSpec) else AttentionSpec.from_dict(spec)
        places = {}
        for name, module in inner.named_modules(remove_duplicate=False):
            if (found := module._modules.get(NAME)) is not None:
                backend: Any = getattr(found, "original_module", found)  # in PEFT's wrapper
                places[PEFT_WRAPPERS.sub("", name)] = backend.geometry
        moved = [(x.name, name) for name, x in places.items() if not _same_name(x.name, name)]
        reason = f"{moved[0][0]} is now {moved[0][1]}" if moved else ""
        try:
            spec.check_layers((x.layer for x in places.values()), places)
        except SpecError as error:
            reason = str(error)
        if reason:
            raise SpecError(
                f"layers of this {type(inner).__name__} were removed, reordered or repeated after "
                f"the swap, and its spec does not describe the result ({reason}); nothing was "
                "written. Swap the model again: attnzoo.swap(model, ..., keep_extras=True)"
            )


def _same_name(first: str, second: str) -> bool:
    """Return whether two names are of one layer; a model with a head has a prefix more."""
    return f".{first}".endswith(f".{second}") or f".{second}".endswith(f".{first}")


@contextmanager
def without_disabled_extras(model: Any) -> Iterator[None]:
    """Context manager under which ``save_pretrained`` omits the extras of disabled swaps.

    Warns for a part of a swapped model whose own config has no spec, as that of T5's encoder.
    """
    if _runs_without_spec(model):
        warnings.warn(
            f"this {type(model).__name__} is a part of a swapped model and is saved as a stock "
            "model, because its config has no spec; save the whole model, or swap this part",
            SwapWarning,
            stacklevel=5,
        )
    before = model._keys_to_ignore_on_save
    model._keys_to_ignore_on_save = {*(before or ()), *_disabled_extras(model)}
    try:
        yield
    finally:
        model._keys_to_ignore_on_save = before


def _runs_without_spec(model: Any) -> bool:
    """Return whether a model runs a swap that neither its config nor those of its parts have."""
    config = model.config
    parts = [read_field(config, key) for key in read_field(config, "sub_configs", {})]
    has_spec = any(read_field(x, NAME) is not None for x in (config, *parts))
    runs = config._attn_implementation == NAME
    return runs and not has_spec and any(NAME in x._modules for x in model.modules())


def _disabled_extras(model: Any) -> Iterator[str]:
    """Yield the names of the extras whose spec the saved config omits."""
    saved = {
        layer
        for inner in model.modules()
        if read_field(config := vars(inner).get("config"), NAME) is not None
        and config._attn_implementation == NAME
        for layer in inner.modules()
    }
    for name, module in model.named_modules():
        if NAME in module._modules and module not in saved:
            prefix = f"{name}.{NAME}." if name else f"{NAME}."
            yield from (prefix + key for key in module._modules[NAME].state_dict())


def report_missing_extras(model: Any, info: Any) -> None:
    """Warn if a checkpoint lacks extras that it should have; a new swap has none."""
    from attnzoo.hf.extras import layer_names, warn

    mark = f".{NAME}."
    if any(mark in str(key) for key, *_ in info.mismatched_keys):
        warn(
            "the checkpoint has parameters of backends in other shapes; it may have been saved "
            "under another swap"
        )
    backends = [
        (name, module._modules[NAME])
        for name, module in model.named_modules()
        if NAME in module._modules
    ]
    absent = {key for key in info.missing_keys if mark in key}
    if not absent:
        return
    extras = {
        f"{name}{mark}{key}": (name, id(x))
        for name, backend in backends
        for key, x in backend.state_dict(keep_vars=True).items()
    }
    loaded = {tensor for key, (_, tensor) in extras.items() if key not in absent}  # or shared
    layers = {name for key, (name, tensor) in extras.items() if tensor not in loaded}
    if loaded and layers:
        warn(
            f"the checkpoint lacks weights of the backends of {layer_names(layers)}, which are "
            "initialised as in a new swap; it may have been saved under another swap"
        )
    elif not loaded and not is_saved_swap(model.config):
        info.missing_keys -= absent


# -- flat RoPE fields ------------------------------------------------------------------------------
#
# transformers 5 saves the nested ``rope_parameters`` alone. Engines that know the fields of
# transformers 4, ``rope_theta`` and ``rope_scaling``, then use their default of 10,000 without an
# error.

ROPE = "rope_parameters"
# fields beside ``rope_scaling`` in configs of transformers 4
_BESIDE = ("rope_theta", "partial_rotary_factor")


def add_flat_rope(config: Any, data: dict[str, Any]) -> None:
    """Add the flat fields to the data of a config and of its parts, where they have a form."""
    data.update(flat_rope(config))
    for key in read_field(config, "sub_configs", {}):
        part, inner = read_field(config, key), data.get(key)
        if part is not None and isinstance(inner, dict):
            add_flat_rope(part, inner)


def flat_rope(config: Any) -> dict[str, Any]:
    """Return the RoPE of a config as flat fields; empty if layers differ, or there is none."""
    parameters = read_field(config, ROPE)
    kinds = rope_kinds(config)
    if kinds:
        parameters, *others = kinds.values()
        if any(x != parameters for x in others):
            return {}
    if not parameters or parameters.get("rope_theta") is None:
        return {}
    flat = {name: parameters[name] for name in _BESIDE if name in parameters}
    is_scaled = parameters.keys() - {*_BESIDE, "rope_type"} or parameters["rope_type"] != "default"
    if is_scaled and kinds:  # transformers reads rope_scaling in place of the parameters of kinds
        return {}
    if is_scaled:  # and in place of rope_parameters, so all of them
        flat["rope_scaling"] = dict(parameters)
    return flat


def rope_kinds(config: Any) -> dict[str, Any]:
    """Return RoPE parameters by the kind of layer; empty where all layers have the same field."""
    parameters = read_field(config, ROPE) or {}
    is_nested = parameters and all(x is None or isinstance(x, Mapping) for x in parameters.values())
    return dict(parameters) if is_nested else {}


def rope_table(config: Any) -> str:
    """Return the RoPE of each kind of layer in Markdown, or ``""`` if flat fields can hold it."""
    kinds = rope_kinds(config)
    if not kinds or flat_rope(config):
        return ""
    lines = [
        "The kinds of layers have other rotary positions (`rope_parameters` in config.json), which "
        "an engine that reads one `rope_theta` gets wrong:\n",
        "| kind of layer | RoPE |",
        "|---|---|",
    ]
    for kind, parameters in kinds.items():
        text = ", ".join(f"`{k}` {x}" for k, x in (parameters or {}).items())
        lines.append(f"| {kind} | {text or 'none'} |")
    return "\n".join(lines)
