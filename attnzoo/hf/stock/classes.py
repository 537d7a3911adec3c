"""The table of stock classes: what each can hold, of which families, and which engines run it.

A stock class is a model class of transformers, which other engines implement too. The statements
about engines hold for the versions of ``ENGINES``; docs/serving.md has the measurements. What is
not copied under its name from another family:

| to | from | config | weights |
|---|---|---|---|
| `llama`, `mistral`, `ministral` | each other | same fields | same tensors |
| `qwen2` | the above | | biases of queries, keys and values are 0 |
| `granite_swa` | the above, `qwen2` | multipliers 1, scores times head_dim^-1/2 | sinks with weight 0; the bias of the output of `qwen2` is 0 |
| `qwen3_5_text` | `qwen3` | see :mod:`attnzoo.hf.stock.gated_delta_net` | the same |
| `mellum` | `qwen3` | one expert for all tokens, the same RoPE for both kinds of layers | the MLP is that expert, whose routing weight is 1; `lm_head` has its own copy of tied weights, which llama.cpp requires |
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from attnzoo.errors import UnsupportedError
from attnzoo.hf.configs import has_field, read_field
from attnzoo.hf.stock import gated_delta_net

ENGINES = {"vllm": "vLLM 0.32", "llama.cpp": "llama.cpp b11549"}

_SHARED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "hidden_act"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"),
    *("initializer_range", "rms_norm_eps", "use_cache", "attention_dropout", "rope_parameters"),
    *("pad_token_id", "bos_token_id", "eos_token_id", "tie_word_embeddings"),
)
_BIASES = ("attention_bias", "mlp_bias")
# A sink is one more logit of the softmax. exp(-1e4) is 0 in every float type, and float16 has 1e4.
_NO_SINK = -1e4

_REFUSES_SOME = "refuses windows of some layers; right with `--model-impl transformers`"
_NOT_WINDOWS = "ignores windows without a warning"


class Windows(Enum):
    """Which sliding windows the layers of a class can have."""

    NONE = "no windows"
    ALL = "one window, in every layer"
    SOME = "one window, in any of its layers"
    SAME = "one window, in the layers that have one already"  # other layers have other positions


@dataclass(frozen=True, kw_only=True)
class StockClass:
    """What a model class of transformers can hold.

    Attributes:
        family: The ``model_type`` of its config.
        windows: Which sliding windows its layers can have.
        takes: The other families whose weights it can hold.
        needs_windows: Whether it takes only models with a window; others are faster in a class
            without (``mellum``), and llama.cpp aborts (``granite_swa``).
        engines: What the engines of ``ENGINES`` do with its windows, by the engine's name.
    """

    family: str
    windows: Windows
    takes: frozenset[str] = frozenset()
    needs_windows: bool = False
    engines: Mapping[str, str] = field(default_factory=dict)


# Families with the tensors of Llama, without biases
_LLAMAS = frozenset({"llama", "mistral", "ministral"})

STOCK_CLASSES = {
    entry.family: entry
    for entry in (
        StockClass(family="llama", windows=Windows.NONE, takes=_LLAMAS - {"llama"}),
        StockClass(
            family="mistral",
            windows=Windows.ALL,
            takes=_LLAMAS - {"mistral"},
            engines={"vllm": "right", "llama.cpp": _NOT_WINDOWS},
        ),
        StockClass(
            family="ministral",
            windows=Windows.SOME,
            takes=_LLAMAS - {"ministral"},
            engines={"vllm": "right", "llama.cpp": "refuses the class"},
        ),
        StockClass(
            family="granite_swa",
            windows=Windows.SOME,
            takes=_LLAMAS | {"qwen2"},
            needs_windows=True,
            engines={"vllm": "right", "llama.cpp": "right"},
        ),
        StockClass(
            family="qwen2",
            windows=Windows.SOME,
            takes=_LLAMAS,
            engines={"vllm": _REFUSES_SOME, "llama.cpp": _NOT_WINDOWS},
        ),
        StockClass(
            family="qwen3",
            windows=Windows.SOME,
            engines={"vllm": _REFUSES_SOME, "llama.cpp": _NOT_WINDOWS},
        ),
        StockClass(
            family="mellum",
            windows=Windows.SAME,
            takes=frozenset({"qwen3"}),
            needs_windows=True,
            engines={"vllm": "right", "llama.cpp": "right"},
        ),
        StockClass(family=gated_delta_net.FAMILY, windows=Windows.NONE, takes=frozenset({"qwen3"})),
        StockClass(family="gemma2", windows=Windows.SOME),
        StockClass(family="gemma3_text", windows=Windows.SAME),
        StockClass(family="gemma4_text", windows=Windows.SAME),
        StockClass(family="gpt_oss", windows=Windows.SOME),
        StockClass(family="olmo3", windows=Windows.SAME),
        StockClass(family="cohere2", windows=Windows.SAME),
        StockClass(family="smollm3", windows=Windows.SOME),
        StockClass(family="mixtral", windows=Windows.ALL),
        StockClass(family="phi3", windows=Windows.ALL),
        StockClass(family="starcoder2", windows=Windows.ALL),
    )
}


def stock_class(family: str) -> StockClass:
    """Return the entry of a family; one without an entry has no windows, and takes no other."""
    return STOCK_CLASSES.get(family) or StockClass(family=family, windows=Windows.NONE)


def classes_for(family: str) -> list[StockClass]:
    """Return the classes that can hold the weights of a family, its own one first."""
    others = (x for x in STOCK_CLASSES.values() if family in x.takes)
    return [stock_class(family), *others]


def other_config(source: Any, family: str, recurrent: Sequence[int] = ()) -> Any:
    """Return the config of a class of another family, without windows."""
    options = {name: getattr(source, name) for name in _SHARED if has_field(source, name)}
    options |= {"dtype": source.dtype, "head_dim": _head_dim(source)}
    if family == gated_delta_net.FAMILY:
        fields = gated_delta_net.config_fields(source, recurrent)
        return AutoConfig.for_model(family, **options | fields)
    biases = {name: bool(read_field(source, name, False)) for name in _BIASES}
    if source.model_type == "qwen2":
        biases["attention_bias"] = True
    if family == "llama" or family == "granite_swa":
        options |= biases
    elif any(biases.values()):
        raise UnsupportedError(
            f"This {source.model_type} has {' and '.join(x for x in biases if biases[x])}, which "
            f"{family} does not; convert it to granite_swa"
        )
    if family == "granite_swa":
        multipliers = ("embedding_multiplier", "logits_scaling", "residual_multiplier")
        options |= dict.fromkeys(multipliers, 1.0)
        options["attention_multiplier"] = _head_dim(source) ** -0.5
    elif family == "qwen2" and _head_dim(source) * source.num_attention_heads != source.hidden_size:
        raise UnsupportedError(
            f"This {source.model_type} has heads of {_head_dim(source)} features, and "
            f"{source.num_attention_heads} of them are not its hidden_size of "
            f"{source.hidden_size}, which engines assume of qwen2; convert it to granite_swa or "
            "ministral"
        )
    elif family == "mellum":
        options |= _one_expert(source)
    if stock_class(family).windows is Windows.ALL:
        options["sliding_window"] = None
    if stock_class(family).windows in (Windows.SOME, Windows.SAME):
        options["layer_types"] = ["full_attention"] * source.num_hidden_layers
    return AutoConfig.for_model(family, **options)


def _head_dim(config: Any) -> int:
    size = read_field(config, "head_dim")
    return int(size or config.hidden_size // config.num_attention_heads)


def _one_expert(source: Any) -> dict[str, Any]:
    """Return the fields of a mixture of experts that has one."""
    rope = dict(source.rope_parameters)
    if rope.get("rope_type", "default") != "default":
        raise UnsupportedError(
            f"This {source.model_type} has RoPE of type {rope['rope_type']!r}, which engines apply "
            "to the full layers of mellum only; convert it to qwen3"
        )
    return {
        "num_experts": 1,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": source.intermediate_size,
        "norm_topk_prob": True,
        "mlp_layer_types": ["sparse"] * source.num_hidden_layers,
        "num_mtp_layers": 0,  # vLLM adds None to it
        "rope_parameters": {"full_attention": rope, "sliding_attention": dict(rope)},
        "tie_word_embeddings": False,
    }


def other_weights(state: dict[str, Tensor], family: str, config: Any) -> dict[str, Tensor]:
    """Return the weights of a class of another family."""
    state = dict(state)
    if family == "mellum":
        return _expert_weights(state)
    for index in range(config.num_hidden_layers):
        attention = f"model.layers.{index}.self_attn"
        has_all = read_field(config, "attention_bias", False)
        for part in "qkvo" if has_all else "qkv" if family == "qwen2" else "":
            name, weight = f"{attention}.{part}_proj.bias", state[f"{attention}.{part}_proj.weight"]
            state.setdefault(name, weight.new_zeros(weight.shape[0]))
        if family == "granite_swa":
            weight = state[f"{attention}.q_proj.weight"]
            state[f"{attention}.sinks"] = weight.new_full((config.num_attention_heads,), _NO_SINK)
    return state


def _expert_weights(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return weights whose MLPs are the only expert of a mixture, with a router of zeros."""
    found = {}
    for name, weight in state.items():
        mlp, _, part = name.rpartition(".mlp.")
        if not mlp:
            found[name] = weight.clone() if name == "lm_head.weight" else weight
        elif part == "gate_proj.weight":
            up = state[f"{mlp}.mlp.up_proj.weight"]
            found[f"{mlp}.mlp.experts.gate_up_proj"] = torch.cat([weight, up])[None]
            found[f"{mlp}.mlp.gate.weight"] = weight.new_zeros(1, weight.shape[1])
        elif part == "down_proj.weight":
            found[f"{mlp}.mlp.experts.down_proj"] = weight[None]
    return found
