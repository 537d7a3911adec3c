r"""The class ``qwen3_5_text`` (Qwen 3.5): full softmax layers and Gated DeltaNet layers.

From ``qwen3``:

| tensor of ``qwen3_5_text`` | from ``qwen3`` |
|---|---|
| norm weights | w - 1, because the class multiplies by 1 + its weight |
| ``q_proj`` | the rows of each head, then as many zeros: the output gate is sigmoid(0) = 1/2 |
| ``o_proj`` | twice the weight, for that gate |
| all others of full layers | the same |

A recurrent layer computes, for each head,

.. math:: S_t = e^{g_t} S_{t-1} (I - \beta_t k_t k_t^T) + \beta_t v_t k_t^T, \quad o_t = S_t q_t,

with queries, keys and values after a short convolution and SiLU, the first two normalised. Its
starting values:

| tensor of a recurrent layer | starting value |
|---|---|
| heads | two for each query head, one with each sign: SiLU keeps the positive features |
| queries, keys | w and -w, a head's weights times those of its norm |
| values | w, scaled into the linear part of SiLU; heads are normalised afterwards |
| convolution | the token itself |
| decay per token | 1/512 to 1/4, spread over the heads |
| write strength | 1/2 |
| gate z | as constant as a projection without bias can be: SiLU(z) is about 1 |
| output | that of softmax for both heads, times half of the size that heads have after softmax |

Heads have the size of the teacher's for keys and values alike, which llama.cpp requires. Gated
DeltaNet: Yang et al., 2024, arXiv:2412.06464. Letters: H query heads, D their size, M hidden size,
N tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attnzoo.errors import UnsupportedError
from attnzoo.hf.stock.layer_inputs import LayerInputs
from attnzoo.hf.stock.starting_values import (
    SIGNS,
    SILU_ONE,
    constant_projection,
    head_sizes,
    last_tap,
    layer_kinds,
    refuse_recurrent,
    spread_rates,
    unit_heads,
    with_signs,
)

FAMILY = "qwen3_5_text"
SLOWEST, FASTEST = 1 / 512, 1 / 4
VALUE_SIZE = 0.3  # root mean square of the values that SiLU gets
CONVOLUTION = 4  # taps, as in the published models


def config_fields(source: Any, recurrent: Sequence[int]) -> dict[str, Any]:
    """Return the fields of a Qwen 3.5 config that those of a Qwen 3 do not give.

    Raises:
        UnsupportedError: The source has positions or biases that the class has not.
    """
    rope = dict(source.rope_parameters)
    if rope.get("rope_type", "default") != "default":
        raise UnsupportedError(
            f"This {source.model_type} has RoPE of type {rope['rope_type']!r}, which engines do "
            f"not read from a {FAMILY}; convert it to qwen3"
        )
    refuse_recurrent(source, FAMILY, recurrent)
    heads, half = source.num_attention_heads, source.head_dim // 2
    third = half // 3  # positions of text are the same in all three sections
    kinds = layer_kinds(source, recurrent)
    fields = {"full_attention_interval": period} if (period := _period(kinds)) else {}
    return fields | {
        "attention_bias": source.attention_bias,
        "layer_types": kinds,
        "linear_conv_kernel_dim": CONVOLUTION,
        "linear_key_head_dim": source.head_dim,
        "linear_value_head_dim": source.head_dim,
        "linear_num_key_heads": SIGNS * heads,
        "linear_num_value_heads": SIGNS * heads,
        "rope_parameters": rope
        | {
            "partial_rotary_factor": 1.0,
            "mrope_interleaved": True,
            "mrope_section": [half - 2 * third, third, third],
        },
    }


def _period(kinds: Sequence[str]) -> int | None:
    """Return n if every n-th layer is the full one, which is what llama.cpp reads; else None."""
    full = [number for number, kind in enumerate(kinds, 1) if kind == "full_attention"]
    is_period = full == list(range(full[0], len(kinds) + 1, full[0]))
    return full[0] if is_period else None


def softmax_weights(state: Mapping[str, Tensor], source: Any) -> dict[str, Tensor]:
    """Return the weights of a Qwen 3.5 of full layers from those of a Qwen 3.

    Args:
        state: The weights of the source by name, maybe without those of some attention layers.
        source: Its config.

    Raises:
        UnsupportedError: A norm weight has too few bits to be stored as w - 1.
    """
    found: dict[str, Tensor] = {}
    for name, weight in state.items():
        part = name.partition(".self_attn.")[2]
        if name.endswith("norm.weight"):
            weight = _minus_one(name, weight)
        elif part.startswith("q_proj."):
            heads = weight.unflatten(0, (source.num_attention_heads, -1))
            weight = torch.cat([heads, torch.zeros_like(heads)], 1).flatten(0, 1)
        elif part == "o_proj.weight":
            weight = weight * 2
        found[name] = weight
    return found


def _minus_one(name: str, weight: Tensor) -> Tensor:
    """Return w - 1 in the dtype of a norm weight; exact in float32 from 1/2."""
    stored = (weight.double() - 1).to(weight.dtype)
    if weight.dtype != torch.float32 and not torch.equal(1 + stored.float(), weight.float()):
        raise UnsupportedError(
            f"{FAMILY} stores norm weights as w - 1, for which {weight.dtype} has too few bits in "
            f"{name}; load and save the model in float32 first: "
            "from_pretrained(..., dtype=torch.float32)"
        )
    return stored


def starting_values(
    own: Mapping[str, Tensor], source: Any, measured: LayerInputs
) -> dict[str, Tensor]:
    """Return the starting values of a recurrent layer in float32, by name within the layer.

    Args:
        own: The weights of the softmax layer in float32, by name within it.
        source: The config of its model.
        measured: Its inputs and outputs.
    """
    heads, dim = source.num_attention_heads, source.head_dim
    groups = heads // source.num_key_value_heads
    hidden = measured.hidden.float()

    def mirrored(part: str, repeats: int) -> Tensor:
        w = own[f"{part}_proj.weight"].unflatten(0, (-1, dim))
        w = (w * own[f"{part}_norm.weight"][:, None]).repeat_interleave(repeats, 0)
        # the class normalises queries and keys: their size only places them on SiLU
        return with_signs(unit_heads(w, hidden)).flatten(0, 1)

    v = own["v_proj.weight"].unflatten(0, (-1, dim)).repeat_interleave(SIGNS * groups, 0)
    v = VALUE_SIZE * unit_heads(v, hidden)
    qkv = torch.cat([mirrored("q", 1), mirrored("k", groups), v.flatten(0, 1)])
    rates = spread_rates(SLOWEST, FASTEST, SIGNS * heads).to(qkv)
    out = own["o_proj.weight"].unflatten(1, (heads, dim))
    out = out * head_sizes(measured, heads) / SIGNS
    none = qkv.new_zeros(SIGNS * heads, hidden.shape[1])
    return {
        "in_proj_qkv.weight": qkv,
        "in_proj_z.weight": constant_projection(hidden, SILU_ONE).expand(SIGNS * heads * dim, -1),
        "in_proj_a.weight": none,
        "in_proj_b.weight": none.clone(),
        "conv1d.weight": last_tap(len(qkv), CONVOLUTION).to(qkv),
        "A_log": qkv.new_zeros(SIGNS * heads),
        "dt_bias": rates.expm1().log(),  # softplus of it is the rate
        "norm.weight": qkv.new_ones(dim),
        "out_proj.weight": out.repeat_interleave(SIGNS, 1).flatten(1),
    }


def state_bytes(config: Any, itemsize: int) -> int:
    """Return the bytes of a recurrent layer's state and of the tokens of its convolution."""
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    state = 4 * values * config.linear_key_head_dim
    return int(state + itemsize * (2 * keys + values) * config.linear_conv_kernel_dim)
