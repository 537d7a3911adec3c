r"""The class ``granitemoehybrid`` (Granite 4): full softmax layers and Mamba-2 layers.

From ``llama``, without experts and with all multipliers 1:

| tensor of ``granitemoehybrid`` | from ``llama`` |
|---|---|
| ``shared_mlp.input_linear`` | ``gate_proj`` and ``up_proj``, one below the other |
| ``shared_mlp.output_linear`` | ``down_proj`` |
| all others of full layers | the same; scores times D^-1/2 as ``attention_multiplier`` |

A recurrent layer computes, for each head,

.. math:: S_t = e^{-a\, dt_t} S_{t-1} + dt_t B_t x_t^T, \quad y_t = C_t S_t + D x_t,

with C, B and x (queries, keys and values of attention) after a short convolution and SiLU, then
:math:`\mathrm{norm}(y \cdot \mathrm{SiLU}(z))` over each group of heads. B and C belong to a group;
groups have one head each, because softmax heads have queries of their own. Its starting values:

| tensor of a recurrent layer | starting value |
|---|---|
| heads | two for each query head, one with each sign: SiLU keeps the positive features |
| C, B, x | w and -w, scaled so that their root mean square is 1 before SiLU |
| convolution | the token itself, bias 0 |
| dt | 1 |
| decay per token | 1/512 to 1/2, spread over the heads |
| D | 0 |
| gate z | as constant as a projection without bias can be: SiLU(z) is about 1 |
| output | w and -w of the head, times half of the size that it has after softmax |

The difference of the two heads is nearly linear in the values: SiLU(x) - SiLU(-x) = x. Heads and
their states have the size of the teacher's heads, and ``mamba_expand`` is 2, which llama.cpp
requires, as it does the bias of the convolution. Mamba-2: Dao and Gu, 2024, arXiv:2405.21060.
Letters: H query heads, D their size, M hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attnzoo.errors import UnsupportedError
from attnzoo.hf import seam
from attnzoo.hf.configs import read_field
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

FAMILY = "granitemoehybrid"
SLOWEST, FASTEST = 1 / 512, 1 / 2
STEP_ONE = 0.5413248546129181  # softplus of it is 1
CONVOLUTION = 4  # taps, as in the published models
CHUNK = 256  # tokens of a chunk in the kernels of engines, as in the published models


def config_fields(source: Any, recurrent: Sequence[int]) -> dict[str, Any]:
    """Return the fields of a Granite hybrid's config that those of a Llama do not give.

    Raises:
        UnsupportedError: The source has biases or heads that the class has not, or this version of
            transformers computes recurrent layers otherwise than engines.
    """
    heads, dim = source.num_attention_heads, _head_dim(source)
    if read_field(source, "mlp_bias", False):
        raise UnsupportedError(
            f"This {source.model_type} has mlp_bias, which {FAMILY} has not; convert it to "
            "granite_swa"
        )
    if heads * dim != source.hidden_size:
        raise UnsupportedError(
            f"This {source.model_type} has heads of {dim} features, and {heads} of them are not "
            f"its hidden_size of {source.hidden_size}, which engines assume of {FAMILY}; keep it "
            "as it is, or give windows in granite_swa"
        )
    refuse_recurrent(source, FAMILY, recurrent)
    if recurrent and not seam.granite_normalizes_groups():
        raise UnsupportedError(
            f"This version of transformers normalises all heads of a recurrent layer of {FAMILY} "
            "together, and engines each group of heads; upgrade transformers to 5.24"
        )
    multipliers = ("embedding_multiplier", "logits_scaling", "residual_multiplier")
    return dict.fromkeys(multipliers, 1.0) | {
        "attention_bias": bool(read_field(source, "attention_bias", False)),
        "attention_multiplier": dim**-0.5,
        "layer_types": layer_kinds(source, recurrent),
        "mamba_chunk_size": CHUNK,
        "mamba_conv_bias": True,
        "mamba_d_conv": CONVOLUTION,
        "mamba_d_head": dim,
        "mamba_d_state": dim,
        "mamba_expand": SIGNS,
        "mamba_n_groups": SIGNS * heads,
        "mamba_n_heads": SIGNS * heads,
        "mamba_proj_bias": False,
        "num_experts_per_tok": 0,
        "num_local_experts": 0,
        "position_embedding_type": "rope",
        "shared_intermediate_size": source.intermediate_size,
    }


def _head_dim(source: Any) -> int:
    size = read_field(source, "head_dim")
    return int(size or source.hidden_size // source.num_attention_heads)


def softmax_weights(state: Mapping[str, Tensor], source: Any) -> dict[str, Tensor]:
    """Return the weights of a Granite hybrid of full layers from those of a Llama.

    Args:
        state: The weights of the source by name, maybe without those of some attention layers.
        source: Its config.
    """
    found: dict[str, Tensor] = {}
    for name, weight in state.items():
        layer, _, part = name.rpartition(".mlp.")
        if part == "gate_proj.weight":
            up = state[f"{layer}.mlp.up_proj.weight"]
            found[f"{layer}.shared_mlp.input_linear.weight"] = torch.cat([weight, up])
        elif part == "down_proj.weight":
            found[f"{layer}.shared_mlp.output_linear.weight"] = weight
        elif part != "up_proj.weight":
            found[name] = weight
    return found


def starting_values(
    own: Mapping[str, Tensor], source: Any, measured: LayerInputs
) -> dict[str, Tensor]:
    """Return the starting values of a recurrent layer in float32, by name within the layer.

    Args:
        own: The weights of the softmax layer in float32, by name within it.
        source: The config of its model.
        measured: Its inputs and outputs.
    """
    heads, dim = source.num_attention_heads, _head_dim(source)
    hidden = measured.hidden.float()

    def mirrored(part: str) -> Tensor:
        w = own[f"{part}_proj.weight"].unflatten(0, (-1, dim))
        w = w.repeat_interleave(heads // len(w), 0)
        return with_signs(unit_heads(w, hidden)).flatten(0, 1)

    convolved = torch.cat([mirrored(part) for part in "vkq"])  # x, B, C
    gate = constant_projection(hidden, SILU_ONE).expand(SIGNS * heads * dim, -1)
    steps = convolved.new_zeros(SIGNS * heads, hidden.shape[1])
    out = own["o_proj.weight"].unflatten(1, (heads, dim))
    out = out * head_sizes(measured, heads) / SIGNS
    return {
        "in_proj.weight": torch.cat([gate, convolved, steps]),
        "conv1d.weight": last_tap(len(convolved), CONVOLUTION).to(convolved),
        "conv1d.bias": convolved.new_zeros(len(convolved)),
        "dt_bias": convolved.new_full((SIGNS * heads,), STEP_ONE),
        "A_log": spread_rates(SLOWEST, FASTEST, SIGNS * heads).to(convolved).log(),
        "D": convolved.new_zeros(SIGNS * heads),
        "norm.weight": convolved.new_ones(SIGNS * heads * dim),
        "out_proj.weight": torch.stack([out, -out], 2).flatten(1),
    }


def state_bytes(config: Any, itemsize: int) -> int:
    """Return the bytes of a recurrent layer's state and of the tokens of its convolution."""
    values = config.mamba_n_heads * config.mamba_d_head
    keys = config.mamba_n_groups * config.mamba_d_state
    state = 4 * values * config.mamba_d_state
    return int(state + itemsize * (values + 2 * keys) * config.mamba_d_conv)
