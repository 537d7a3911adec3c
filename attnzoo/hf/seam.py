"""Every name of transformers and PEFT that attnzoo depends on: arguments, closures, versions.

A new release of transformers is an edit of this module and of ``constraints.txt``; see "A new
release of transformers" in CONTRIBUTING.md. The methods that attnzoo replaces are in
:mod:`attnzoo.hf.patches`, which must not import transformers.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, masking_utils
from transformers.cache_utils import Cache
from transformers.generation.continuous_batching import cache as paged_cache
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    create_causal_mask,
    sdpa_mask,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto import modeling_auto
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY as RECORDED_OUTPUTS
from transformers.utils.output_capturing import _active_collector as active_collector

from attnzoo.errors import UnsupportedError
from attnzoo.hf.configs import read_field
from attnzoo.hf.names import NAME

__all__ = [  # names of transformers that other modules take from here
    "RECORDED_OUTPUTS",
    "Cache",
    "PagedAttentionCache",
    "active_collector",
    "bidirectional_mask_function",
    "causal_mask_function",
]

INTERFACE = "ALL_ATTENTION_FUNCTIONS"  # the name of the interface in modelling files

# Versions that the tests of this release run with. With any other, `release_check` runs first.
TESTED = {"transformers": ("5.17.0", "5.24.0"), "torch": ("2.13.0", "2.14.1")}
HOW_TO_GO_ON = (
    f"Install transformers {TESTED['transformers'][-1]}, the newest that this release of attnzoo "
    f"is tested with, or a newer attnzoo"
)

# -- arguments of attention modules, each by all names that it has had ----------------------------

HIDDEN_STATES = ("hidden_states", "x", "hidden_state", "k")
CACHE = ("cache", "past_key_values", "past_key_value", "layer_past")  # "cache" since 5.24
ENCODER_STATES = ("key_value_states", "encoder_hidden_states")
ATTENTION_MASK = ("attention_mask",)
# Attributes of modules with the keys of another layer, and of those whose keys others have
SHARES_KEYS = ("is_kv_shared_layer", "store_full_length_kv")
SLICES_QUERIES = "_maybe_slice_kv_shared_inputs"  # method of models, by `logits_to_keep`
MERGED_MASK = "merged_attention_mask"  # of modules that attend to both sequences in one call
RELATIVE_SHIFT = "_rel_shift"  # of modules that add relative positions to their mask
OWN_WINDOW = "sliding_window_mask_function"  # of models, in their own modelling files
BLOCK_STATES = "block_states"  # of modules that attend to earlier layers, at each token apart


def _cache_argument() -> str:
    """Return the name under which models take and return a cache; a new name is refused."""
    names = inspect.signature(create_causal_mask).parameters
    found = next((name for name in CACHE if name in names), None)
    if found is None:
        raise UnsupportedError(
            f"create_causal_mask of transformers {transformers.__version__} takes the cache under "
            f"a name that attnzoo does not know: it takes {', '.join(names)} (known: "
            f"{', '.join(CACHE)}). {HOW_TO_GO_ON}"
        )
    return found


CACHE_ARGUMENT = _cache_argument()

# Arguments that attention layers pass on and that do not change the result.
IGNORED_ARGUMENTS = frozenset(
    {
        "cache_position",
        "deterministic",
        "layer_idx",
        "logits_to_keep",
        "max_length_k",
        "max_length_q",
        "max_seqlen",
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "shift_labels",
        "tokenizer",  # of `transformers serve`, for strings that stop generation
        "use_cache",
        *("labels", "length", "special_tokens_mask", "token_type_ids"),  # columns of a batch
    }
)
# Kinds of layers that continuous batching has pages for
PAGED_KINDS = frozenset(
    getattr(paged_cache, "ATTN_TYPE_TO_ALLOCATOR", ("full_attention", "sliding_attention"))
)
PAGES_SINCE = "5.24"  # version whose continuous batching passes what a backend needs
# Arguments of continuous batching, which its cache reads; the last two are for the model's head.
PAGE_ARGUMENTS = (
    *("read_index", "write_index", "block_table"),
    *("logits_indices", "logits_processor_args"),
)
# Arguments of transformers' delta rule and convolution that do not change their results
IGNORED_RULE_ARGUMENTS = frozenset({*IGNORED_ARGUMENTS, "seq_idx", "chunk_size"})
# Kinds of layers that keep a state in the cache, in configs
RECURRENT_KINDS = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding", "mamba"})
# Arguments of mask functions that do not change a mask: what other implementations may skip, the
# config, and the size of a window or chunk, which the mask function has too.
IGNORED_MASK_ARGUMENTS = frozenset(
    {
        *("allow_is_causal_skip", "allow_is_bidirectional_skip", "allow_torch_fix"),
        *("config", "local_size"),
    }
)
# Arguments of a cache layer's ``update``: those of the attention function, for paged caches
IGNORED_UPDATE_ARGUMENTS = frozenset({"kwargs"})

# Method of cache layers that store their keys and values in fewer bits
QUANTIZE = "_quantize"

# Methods of cache layers that hold more than keys and values
MORE_THAN_KEYS = (
    *("update_conv_state", "update_recurrent_state"),
    *("update_indexer", "update_compressor_states", "update_overlap_state"),
)

# Mask functions by name: their kind, and the closure variable that holds their parameter
_MASK_FUNCTIONS = {
    "and_masks": ("all", "mask_functions"),
    "remap_positions_for_packed_sequence": ("remapped", "mask_function"),
    "packed_sequence_mask_function": ("packed", "packed_sequence_mask"),
    "sliding_window_overlay": ("window", "sliding_window"),
    "sliding_window_bidirectional_overlay": ("bidirectional window", "sliding_window"),
}


def _keep_arguments(make: Callable[..., Any]) -> None:
    """Let the mask functions of a compiled graph say what they were made from.

    ``torch.compile`` cannot read closures, and the name of a union is no proof of its parts.
    """
    copy = FunctionType(make.__code__, make.__globals__, make.__name__)

    def make_with_arguments(*args: Any, **kwargs: Any) -> Any:
        function: Any = copy(*args, **kwargs)
        function.made_from = (*args, *kwargs.values())
        return function

    torch.compiler.substitute_in_graph(make, skip_signature_check=True)(make_with_arguments)


for _name in _MASK_FUNCTIONS:
    if hasattr(masking_utils, _name):  # else of another release; such masks are materialised
        _keep_arguments(getattr(masking_utils, _name))


def refuse_unknown_arguments(
    where: str, kwargs: Mapping[str, Any], known: Collection[str] = IGNORED_ARGUMENTS
) -> None:
    """Raise for an argument that is not ``None`` and that nothing of ours reads."""
    unknown = [name for name, value in kwargs.items() if value is not None and name not in known]
    if unknown:
        names = ", ".join(map(repr, unknown))
        raise UnsupportedError(
            f"{where} does not know the argument {names}, which transformers "
            f"{transformers.__version__} passes, and would ignore it. {HOW_TO_GO_ON}"
        )


def names_cache(function: Callable[..., Any]) -> bool:
    """Return whether a PEFT function reads the cache under the name that models give it."""
    return CACHE_ARGUMENT in inspect.unwrap(function).__code__.co_consts


def package(name: str) -> str:
    """Return the name and the version of an installed package, for a message."""
    return f"{name} {version(name)}"


def cache_argument(cache: Any) -> dict[str, Any]:
    """Return the keyword argument that passes a cache to a model."""
    return {CACHE_ARGUMENT: cache}


def output_cache(output: Any) -> Any:
    """Return the cache in a model's output."""
    return getattr(output, CACHE_ARGUMENT)


def mask_parts(function: Callable[..., Any]) -> tuple[str, Any]:
    """Return the kind of a mask function, and its parameter; other functions have the kind ``""``.

    The kinds are ``"causal"``, ``"all"`` (a sequence of functions), ``"remapped"`` (a function of
    positions within packed sequences), ``"packed"`` (the index of each token's sequence),
    ``"window"`` and ``"bidirectional window"`` (a size in tokens), and ``"none"``, which hides
    nothing.
    """
    if function is causal_mask_function:
        return "causal", None
    if function is bidirectional_mask_function:
        return "none", None
    made_from = getattr(function, "made_from", None)  # see _keep_arguments
    if made_from is not None:
        kind, _ = _MASK_FUNCTIONS[function.__qualname__.split(".<locals>")[0]]
        return kind, made_from if kind == "all" else made_from[0]
    if torch.compiler.is_compiling():  # closures cannot be read
        return "", getattr(function, "__name__", "a function")
    name = getattr(function, "__qualname__", "a function").split(".<locals>")[0]
    kind, variable = _MASK_FUNCTIONS.get(name, ("", ""))
    cells = _closure(function) if kind else {}
    return (kind, cells[variable]) if variable in cells else ("", name)


def forward_code(module: nn.Module) -> Any:
    """Return the code object of a module's forward, or ``None``."""
    return getattr(inspect.unwrap(type(module).forward), "__code__", None)


def calls_attention_interface(module: nn.Module) -> bool:
    """Return whether a module's forward calls the attention interface to attend to tokens."""
    code = forward_code(module)
    return code is not None and INTERFACE in code.co_names and not attends_to_layers(module)


def may_compute_last_tokens(model: nn.Module, module: nn.Module) -> bool:
    """Return whether a model may pass only the last tokens to a module, as Gemma 4 does.

    True also for the layer whose keys such a module uses: both need backends that fit.
    """
    shares_keys = any(getattr(module, name, False) is True for name in SHARES_KEYS)
    return shares_keys and any(hasattr(type(part), SLICES_QUERIES) for part in model.modules())


def attends_to_both_sequences(module: nn.Module) -> bool:
    """Return whether the keys of a module are those of the decoder and of the encoder."""
    code = forward_code(module)
    return code is not None and MERGED_MASK in code.co_varnames


def own_mask(model: nn.Module, module: nn.Module, *, has_window: bool) -> str:
    """Return what a model puts into the mask of an attention module by code of its own, or ``""``.

    ``has_window`` says whether the layer has a sliding window.
    """
    if attends_to_both_sequences(module):
        return "the layer attends to the decoder's and the encoder's tokens under one mask"
    if reads_name(module, RELATIVE_SHIFT):
        return "the layer adds scores of relative positions to its mask"
    owners = [x for x in pretrained_models(model) if reads_name(x, OWN_WINDOW)]
    windowed = [x for x in owners if has_window or reads_name(x, "sliding_windows")]
    if any(part is module for x in windowed for part in x.modules()):
        return "the model makes the mask of the layer's window by a function of its own"
    return ""


def attends_to_layers(module: nn.Module) -> bool:
    """Return whether a module attends to outputs of earlier layers, as Inkling 2's residuals."""
    code = forward_code(module)
    return code is not None and BLOCK_STATES in code.co_varnames


def attend_to_layers(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Return what the model's own attention to earlier layers does, ``[B, T, H, E]``."""
    out = F.scaled_dot_product_attention(query, key, value, scale=scale)
    return out.transpose(1, 2).contiguous()


def family_uses_interface(family: str) -> bool:
    """Return whether the modelling code in a model folder of transformers uses the interface."""
    folder = Path(transformers.__file__).parent / "models" / family
    return any(INTERFACE in path.read_text("utf-8") for path in folder.glob("modeling_*.py"))


def reads_name(module: nn.Module, name: str) -> bool:
    """Return whether a module's forward uses ``name`` as an argument or attribute."""
    code = forward_code(module)
    if code is None:
        return False
    nested = (item for const in code.co_consts if isinstance(const, tuple) for item in const)
    return name in code.co_names or name in code.co_consts or name in nested


def _closure(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the closure variables of a function by name; mask functions keep parameters there."""
    names = function.__code__.co_freevars
    cells = function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}


def materialise_mask(**arguments: Any) -> Tensor:
    """Build the dense mask of a mask function, ``[B, 1, T, S]`` bool."""
    mask = sdpa_mask(**arguments, allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    assert mask is not None
    return mask


def all_configs(model: PreTrainedModel) -> list[Any]:
    """Return the configs and sub-configs of a model and its submodules, each once, in order."""
    configs: dict[int, Any] = {}
    for module in model.modules():
        config = vars(module).get("config")
        if isinstance(config, PreTrainedConfig):
            configs.update((id(inner), inner) for inner in _with_sub_configs(config))
    return list(configs.values())


def pretrained_models(model: nn.Module) -> list[PreTrainedModel]:
    """Return all transformers models in ``model``, outermost first."""
    return [module for module in model.modules() if isinstance(module, PreTrainedModel)]


def sub_configs(config: Any) -> dict[str, Any]:
    """Return the sub-configs of a config by field name."""
    found = {key: read_field(config, key) for key in read_field(config, "sub_configs", {})}
    return {key: inner for key, inner in found.items() if inner is not None}


def submodels(model: nn.Module, config: Any) -> list[PreTrainedModel]:
    """Return the outermost models in ``model`` that were built from a sub-config, or a copy."""
    outermost: list[PreTrainedModel] = []
    for inner in pretrained_models(model):
        same = inner.config is config or type(inner.config) is type(config)
        if same and not any(inner in set(outer.modules()) for outer in outermost):
            outermost.append(inner)
    return outermost


def is_of_another_package(implementation: str) -> bool:
    """Return whether another package has registered an attention implementation, as engines do.

    The kernels of the hub, ``"owner/name"``, are of transformers.
    """
    function = ALL_ATTENTION_FUNCTIONS.get(implementation)
    module = getattr(function, "__module__", None) or "transformers"
    return "/" not in implementation and module.partition(".")[0] not in ("transformers", NAME)


def is_part_of_pair(model: PreTrainedModel) -> bool:
    """Return whether a model is an encoder or decoder that has the config of both, or a copy."""
    pairs = (
        modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    )
    is_pair = any(model.config.model_type in families for families in pairs)
    return is_pair and not hasattr(transformers, type(model).__name__)


def set_implementation(model: PreTrainedModel, name: str, layers: Iterable[nn.Module]) -> None:
    """Set the attention implementation of ``layers`` and of the models that create their masks.

    ``set_attn_implementation`` does not reach modules with a copied config (the encoder and decoder
    of T5) in older transformers, nor composite models where only the submodels use the interface.
    """
    if can_set_implementation(model):
        model.set_attn_implementation(name)
    used = {id(config) for config in map(_config_of, model.modules()) if config is not None}
    for config in _with_sub_configs(model.config):
        if id(config) not in used:  # a copy of it is
            config._attn_implementation_internal = name
    for config in _attention_configs(model, layers):
        config._attn_implementation_internal = name


def update_copied_configs(model: PreTrainedModel) -> None:
    """Disable or enable a swap in the configs that swapped modules copied from their model's.

    ``set_attn_implementation`` does not reach them; see :func:`set_implementation`.
    """
    layers = [module for module in model.modules() if NAME in module._modules]
    own = {id(config) for config in _with_sub_configs(model.config)}
    name = model.config._attn_implementation
    for config in _attention_configs(model, layers):
        if id(config) not in own and (config._attn_implementation == NAME) != (name == NAME):
            config._attn_implementation_internal = name


def _config_of(module: nn.Module) -> Any:
    return vars(module).get("config")


def _attention_configs(model: nn.Module, layers: Iterable[nn.Module]) -> list[Any]:
    """Return the configs of attention layers and of the models that create their masks."""
    found = set(layers)
    return [
        _config_of(module)
        for module in model.modules()
        if module in found
        or (isinstance(module, PreTrainedModel) and not found.isdisjoint(module.modules()))
    ]


def complete_class_tables(cls: type) -> None:
    """Let models that select attention classes by implementation be built under ``"attnzoo"``.

    Falcon, GPT-J and SAM's vision encoder look a class up by ``config._attn_implementation``. These
    classes do not use the attention interface, so such layers keep their stock attention.
    """
    for table in _class_tables(cls).values():
        table.setdefault(NAME, table.get("sdpa", table["eager"]))


def class_table_text(model: nn.Module) -> str:
    """Return the tables from which a model selects attention classes, for a message, or ``""``."""
    tables = _class_tables(type(model))
    return f" (its classes come from {', '.join(tables)})" if tables else ""


def _class_tables(cls: type) -> dict[str, dict[str, type]]:
    """Return the tables of attention classes by implementation in a model's modelling files."""
    return {
        name: table
        for base in cls.__mro__
        for name, table in vars(sys.modules.get(base.__module__, object)).items()
        if name.endswith("ATTENTION_CLASSES") and isinstance(table, dict) and "eager" in table
    }


def has_recurrent_layers(model: PreTrainedModel) -> bool:
    """Return whether a model has layers that keep a state."""
    kinds = read_field(model.config, "layer_types") or ()
    return bool(getattr(model, "_is_stateful", False)) or not RECURRENT_KINDS.isdisjoint(kinds)


def _with_sub_configs(config: Any) -> Iterator[Any]:
    yield config
    for inner in sub_configs(config).values():
        yield from _with_sub_configs(inner)


def can_set_implementation(model: PreTrainedModel) -> bool:
    """Return whether a model's own modelling code uses the attention interface."""
    return bool(model._can_set_attn_implementation())


def names_kept_in_float32(model: nn.Module, dtype: torch.dtype) -> list[str]:
    """Return parts of the names of weights that ``from_pretrained`` loads in float32."""
    names = [*(getattr(model, "_keep_in_fp32_modules_strict", None) or ())]
    if dtype == torch.float16:
        names += getattr(model, "_keep_in_fp32_modules", None) or ()
    return names if dtype in (torch.float16, torch.bfloat16) else []


def base_model_name(model: Any) -> str:
    """Return the attribute of a model with a head that holds the model without it."""
    name: str = model.base_model_prefix
    return name


def document_masks(model: Any, position_ids: Tensor) -> dict[str, Any]:
    """Return the masks of a model whose ``forward`` reads no documents from positions, by kind."""
    embeddings: Any = model.get_input_embeddings().weight
    shape = (*position_ids.shape, embeddings.shape[1])
    given: dict[str, Any] = {CACHE_ARGUMENT: None, "attention_mask": None}
    mask = create_causal_mask(
        config=model.config,
        inputs_embeds=embeddings.detach().new_empty(()).expand(shape),
        position_ids=position_ids,
        **given,
    )
    return {"full_attention": mask, "linear_attention": None}
