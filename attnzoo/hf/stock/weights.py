"""The config and the weights of a stock class from those of another family.

The table of tensors, for what is not copied under its name:

| to | from | config | weights |
|---|---|---|---|
| `llama`, `mistral`, `ministral` | each other | same fields | same tensors |
| `qwen2` | the above | | biases of queries, keys and values are 0 |
| `granite_swa` | the above, `qwen2` | multipliers 1, scores times head_dim^-1/2 | sinks with weight 0; the bias of the output of `qwen2` is 0 |
| `qwen3_5_text` | `qwen3` | see :mod:`attnzoo.hf.stock.gated_delta_net` | the same |
| `granitemoehybrid` | `llama`, `mistral`, `ministral` | see :mod:`attnzoo.hf.stock.mamba2` | the same |
| `mellum` | `qwen3` | one expert for all tokens, the same RoPE for both kinds of layers | the MLP is that expert, whose routing weight is 1; `lm_head` has its own copy of tied weights, which llama.cpp requires |
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from attnzoo.errors import UnsupportedError
from attnzoo.hf.configs import has_field, read_field
from attnzoo.hf.stock.classes import Windows, stock_class
from attnzoo.hf.stock.recurrent import CLASSES

_SHARED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "hidden_act"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"),
    *("initializer_range", "rms_norm_eps", "use_cache", "attention_dropout", "rope_parameters"),
    *("pad_token_id", "bos_token_id", "eos_token_id", "tie_word_embeddings"),
)
_BIASES = ("attention_bias", "mlp_bias")
# A sink is one more logit of the softmax. exp(-1e4) is 0 in every float type, and float16 has 1e4.
_NO_SINK = -1e4


def other_config(source: Any, family: str, recurrent: Sequence[int] = ()) -> Any:
    """Return the config of a class of another family, without windows.

    Args:
        source: The config of the model.
        family: The family of the class.
        recurrent: Numbers of the layers that become recurrent, in a class that has such layers.

    Raises:
        UnsupportedError: The source has biases or positions that the class has not.
    """
    options = {name: getattr(source, name) for name in _SHARED if has_field(source, name)}
    options |= {"dtype": source.dtype, "head_dim": _head_dim(source)}
    if family in CLASSES:
        return AutoConfig.for_model(
            family, **options | CLASSES[family].config_fields(source, recurrent)
        )
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
    """Return the weights of a class of another family.

    Args:
        state: The weights of the source by name, with those of a tied ``lm_head``.
        family: The family of the class.
        config: Its config.
    """
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
