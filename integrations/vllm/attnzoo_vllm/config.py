"""What vLLM reads of a swapped model before it builds it: the class, and the kind of each layer.

A saved swap has the class name of its base model with a prefix, ``AttnzooLlamaForCausalLM``;
folders of earlier versions have the plain name, under which vLLM would run softmax. All of them are
served by one class.
"""

from __future__ import annotations

import copy
from functools import wraps
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from vllm import ModelRegistry
from vllm.config import CompilationConfig, CompilationMode, model, set_current_vllm_config
from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig
from vllm.transformers_utils import config as vllm_config
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum, register_backend

from attnzoo.contract.backend import AttentionBackend
from attnzoo.hf.attention.call import layer_backend
from attnzoo.hf.names import ARCHITECTURE_PREFIX, NAME, PRUNED
from attnzoo.hf.saving.checkpoints import stock_class_name
from attnzoo_vllm.versions import refuse_untested

CLASS = "attnzoo_vllm.model:AttnzooForCausalLM"  # imported when a swapped model is served
STATE_BACKEND = "ATTNZOO_STATE"  # in vLLM's list of backends for layers with a state
BASES = frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
INSTEAD = "transformers runs the folder where attnzoo is imported (attnzoo run, autoload on)"
PAGED = ("softmax", "flash", "block_sparse")  # tested with keys and values in vLLM's pages
REPLACED = "attnzoo_replaced"  # attributes of the model's own config that vLLM reads otherwise


def register_models() -> None:
    """Register the class of swapped models under the name of every causal language model."""
    known = ModelRegistry.get_supported_archs()
    for name in (ARCHITECTURE_PREFIX + base for base in BASES):
        if name not in known:
            ModelRegistry.register_model(name, CLASS)
            MODELS_CONFIG_MAP[name] = Settings
    if STATE_BACKEND not in MambaAttentionBackendEnum.__members__:  # processes exchange the member
        path = "attnzoo_vllm.metadata.StateBackend"
        register_backend(STATE_BACKEND, path, is_mamba=True)
    # The op runs between the compiled parts of a graph, as those of vLLM's own layers with a state
    if "vllm::attnzoo_layer" not in CompilationConfig._attention_ops:
        CompilationConfig._attention_ops.append("vllm::attnzoo_layer")


def wrap_get_config() -> None:
    """Have vLLM prepare the config of a swapped model wherever it reads one."""
    read = model.get_config
    if hasattr(read, "__wrapped__"):
        return

    @wraps(read)
    def get_config(*args: Any, **kwargs: Any) -> Any:
        found = read(*args, **kwargs)
        if getattr(found, NAME, None) is not None:
            prepare(found)
        return found

    vllm_config.get_config = model.get_config = get_config


def prepare(config: Any) -> None:
    """Set class, layer types and window of a swapped model's config, as vLLM reads them.

    vLLM takes ``sliding_window`` for all layers where no layer type is sliding; here, each layer
    gets its own window.

    Raises:
        ValueError: vLLM cannot serve the model; the message says why, and what to do instead.
    """
    if hasattr(config, REPLACED):
        return
    refuse_untested()
    base = stock_class_name((getattr(config, "architectures", None) or [""])[0])
    if base not in BASES or config.get_text_config() is not config:
        raise ValueError(
            f"{base or type(config).__name__} is not a causal language model of text alone: vLLM "
            f"serves no other swapped models (encoders, encoder-decoders, images, audio). {INSTEAD}"
        )
    if getattr(config, PRUNED, None):
        raise ValueError(
            "layers of this model have lost heads (attnzoo heads), and vLLM has one number of "
            f"heads for all. {INSTEAD}"
        )
    backends = find_backends(config)
    refuse_backends(backends)
    logits_scale(config)
    types = getattr(config, "layer_types", None)
    names = {"layer_types", "sliding_window"} & vars(config).keys()
    setattr(config, REPLACED, {name: getattr(config, name) for name in sorted(names)})
    kinds = ["full_attention"] * len(backends)  # a model without states is not hybrid for vLLM
    if any(map(has_state, backends)):
        pairs = zip(types or kinds, backends, strict=True)
        kinds = ["linear_attention" if has_state(x) else kind for kind, x in pairs]
    config.layer_types, config.sliding_window = kinds, None
    config.architectures = [ARCHITECTURE_PREFIX + base]


def restore(config: Any) -> Any:
    """Return a copy of a prepared config with the model's own layer types, window and class."""
    config = copy.deepcopy(config)
    config.architectures = [*map(stock_class_name, config.architectures)]
    own = config.__dict__.pop(REPLACED)
    for name in ("layer_types", "sliding_window"):
        if name in own:
            setattr(config, name, own[name])
        else:
            delattr(config, name)
    return config


class Settings(VerifyAndUpdateConfig):
    """Called by vLLM when the settings of an engine for a swapped model are complete."""

    @staticmethod
    def verify_and_update_config(engine: Any) -> None:
        """Raise ``ValueError`` for settings that swapped models are not tested with."""
        parallel = engine.parallel_config
        for given, what, instead in (
            (parallel.tensor_parallel_size > 1, "tensor parallelism", "--tensor-parallel-size 1"),
            (parallel.pipeline_parallel_size > 1, "pipeline parallelism", "one stage"),
            (engine.speculative_config, "speculative decoding", "no --speculative-config"),
            (engine.lora_config, "LoRA", "merge the adapter, and no --enable-lora"),
            (engine.kv_transfer_config, "transfer of caches", "no --kv-transfer-config"),
            (engine.model_config.use_mla, "multi-head latent attention", "a model without it"),
        ):
            if given:
                raise ValueError(
                    f"attnzoo-vllm does not serve swapped models with {what}; use {instead}, and "
                    "--data-parallel-size for several devices"
                )


def build_without_memory(config: Any) -> Any:
    """Return the swapped model of a config with weights that have no memory."""
    config = copy.deepcopy(config)
    config._attn_implementation = NAME
    # An earlier engine in this process has changed the class, which then reads these
    off = CompilationConfig(mode=CompilationMode.NONE)
    engine = SimpleNamespace(compilation_config=off, model_config=SimpleNamespace(hf_config=config))
    with torch.device("meta"), set_current_vllm_config(engine):
        return AutoModelForCausalLM.from_config(config)


def find_backends(config: Any) -> list[AttentionBackend]:
    """Return the backends of all layers, from a model without memory."""
    modules = build_without_memory(config).modules()
    return [x for x in map(layer_backend, modules) if x is not None]


class _Output(NamedTuple):
    """What a model below its head returns; all but the hidden states is None."""

    last_hidden_state: Tensor

    def __getattr__(self, name: str) -> None:
        return None


def logits_scale(config: Any) -> float:
    """Return the factor of the logits, from a call of the model's own class.

    vLLM runs the modules below the language model head, and of what the class computes around them
    it knows ``logit_scale`` and ``final_logit_softcapping``. Here, the class is called with known
    numbers in the place of hidden states and with a head that returns them.

    Raises:
        ValueError: The class computes anything else than a factor of the logits.
    """
    model = build_without_memory(config)
    own = model.config.get_text_config()
    # exact in every dtype, below the cap of all models
    hidden = torch.tensor([-4.0, -0.5, 1.0, 2.0, 8.0]).repeat(-(-own.vocab_size // 5))
    hidden = hidden[: own.vocab_size].view(1, 1, -1).double()
    passed: dict[str, Any] = {}

    def base(*args: Any, **kwargs: Any) -> _Output:
        passed.update(kwargs, input_ids=args[0] if args else kwargs.get("input_ids"))
        return _Output(hidden)

    asked = torch.zeros(1, 1, dtype=torch.int64)
    try:
        model.base_model.forward = model.get_decoder().forward = base
        model.get_output_embeddings().forward = lambda x: x
        logits = model(input_ids=asked, use_cache=False, return_dict=True).logits.double()
        cap = getattr(own, "final_logit_softcapping", None)
        expected = hidden if cap is None else cap * torch.tanh(hidden / cap)
        factors = logits / expected
        is_factor = bool(((factors - factors[0, 0, 0]).abs() <= 1e-3 * factors.abs()).all())
    except (AttributeError, IndexError, RuntimeError, TypeError):  # more than a model and a head
        is_factor = False
    if not is_factor or passed["input_ids"] is not asked:
        raise ValueError(
            f"{type(model).__name__} computes its logits otherwise than by one head on its last "
            f"hidden states, a factor and a cap, and vLLM would leave that out. {INSTEAD}"
        )
    return float(factors[0, 0, 0])


def has_state(backend: AttentionBackend) -> bool:
    """Return whether a backend keeps a state of fixed size, and not keys and values."""
    can = backend.capabilities
    return can.recurrent and can.zero_state and can.sequences


def has_keys(backend: AttentionBackend) -> bool:
    """Return whether a backend computes new tokens from the keys and values of all tokens."""
    return backend.name in PAGED and backend.continues_from_keys


def refuse_backends(backends: list[AttentionBackend]) -> None:
    """Raise ``ValueError`` if vLLM has no place for what a layer keeps."""
    for backend in backends:
        name, where = backend.name, backend.geometry.name
        if name in PAGED and backend.capabilities.exact_steps:
            raise ValueError(
                f"{where}: with decoding='exact', {name!r} computes generated tokens otherwise "
                "than those of a prompt, and vLLM computes tokens of either kind again as the "
                "other (prefix caching, preemption). Set decoding='sparse', or take another backend"
            )
        if getattr(backend.config, "num_sinks", 0) and backend.geometry.window is not None:
            raise ValueError(
                f"{where}: the layer has a sliding window of the model, outside of which {name!r} "
                "would see first tokens (num_sinks). Leave num_sinks out"
            )
        if has_state(backend) or has_keys(backend):
            continue
        if name in PAGED:
            raise ValueError(
                f"{where}: vLLM keeps keys and values, from which {name!r} continues without an "
                "indexer and with query_block=1 only. Swap it with other options, or give the "
                f"layer a backend with a state. {INSTEAD}"
            )
        raise ValueError(
            f"{where}: vLLM does not serve backend {name!r}, which keeps keys or summaries of "
            "all tokens in a form of its own. Give the layer 'flash', 'block_sparse' or a backend "
            f"with a state (linear, gated_linear, performer, delta). {INSTEAD}"
        )
