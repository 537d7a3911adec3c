r"""Students: the class ``qwen3_5_text`` (Qwen 3.5) of full softmax and Gated DeltaNet layers.

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
starting values, whose output is not that of softmax:

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

Heads have the size of the teacher's for keys and values alike, which llama.cpp requires. Sizes are
measured on text that the model samples itself. Gated
DeltaNet: Yang et al., 2024, arXiv:2412.06464. Letters: H query heads, D their size, M hidden size,
N tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnzoo.errors import SpecError, UnsupportedError, short_repr
from attnzoo.hf import seam
from attnzoo.hf.configs import read_field
from attnzoo.spec import parse_layers

FAMILY = "qwen3_5_text"
PART = "linear_attn"  # the recurrent layer within a decoder layer
SIGNS = 2  # recurrent heads for each query head
SILU_ONE = 1.2784645427610738  # SiLU of it is 1
SLOWEST, FASTEST = 1 / 512, 1 / 4
VALUE_SIZE = 0.3  # root mean square of the values that SiLU gets
CONVOLUTION = 4  # taps, as in the published models
_RECURRENT = "linear_attention"  # transformers' name in layer_types


def recurrent_numbers(config: Any) -> list[int]:
    """Return the numbers of the recurrent layers of a model of a stock class."""
    kinds = read_field(config.get_text_config(), "layer_types") or []
    return [number for number, kind in enumerate(kinds) if kind == _RECURRENT]


def recurrent_layers(model: nn.Module) -> dict[int, nn.Module]:
    """Return the recurrent layers of a student by number; empty for other classes."""
    config: Any = model.config
    if config.model_type != FAMILY:
        return {}
    return {n: model.get_submodule(part_name(n, PART)) for n in recurrent_numbers(config)}


def parse_recurrent(layers: str, config: Any) -> list[int]:
    """Return the numbers in a text such as ``"1-2"``."""
    ranges = parse_layers(layers)
    count = int(config.num_hidden_layers)
    if ranges[-1].stop > count:
        raise SpecError(
            f"recurrent={short_repr(layers)} names layer {ranges[-1].stop - 1}, but there are "
            f"{count}"
        )
    numbers = list(chain(*ranges))
    if len(numbers) == count:
        raise SpecError(
            f"recurrent={short_repr(layers)} leaves no softmax layer, without which a student "
            "recalls little; keep at least one"
        )
    return numbers


def config_fields(source: Any, recurrent: Sequence[int]) -> dict[str, Any]:
    """Return the fields of a Qwen 3.5 config that those of a Qwen 3 do not give."""
    rope = dict(source.rope_parameters)
    if rope.get("rope_type", "default") != "default":
        raise UnsupportedError(
            f"This {source.model_type} has RoPE of type {rope['rope_type']!r}, which engines do "
            f"not read from a {FAMILY}; convert it to qwen3"
        )
    if recurrent and source.attention_bias:
        raise UnsupportedError(
            f"This {source.model_type} has attention_bias, which recurrent layers of {FAMILY} have "
            "not; convert it without recurrent layers"
        )
    if recurrent and source.hidden_act != "silu":
        raise UnsupportedError(
            f"This {source.model_type} has hidden_act={source.hidden_act!r}, which {FAMILY} would "
            "use in its recurrent layers too, where engines compute silu; convert it without "
            "recurrent layers"
        )
    heads, half = source.num_attention_heads, source.head_dim // 2
    third = half // 3  # positions of text are the same in all three sections
    numbers = range(source.num_hidden_layers)
    kinds = [_RECURRENT if n in recurrent else "full_attention" for n in numbers]
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
    """Return the weights of full layers, and of everything outside of attention."""
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


@torch.no_grad()
def student_weights(
    state: Mapping[str, Tensor], source: Any, inputs: Mapping[int, LayerInputs]
) -> dict[str, Tensor]:
    """Return the weights of a student from those of its source."""
    replaced = tuple(f"{part_name(number, 'self_attn')}." for number in inputs)
    kept = {name: x for name, x in state.items() if not name.startswith(replaced)}
    found = softmax_weights(kept, source)
    for prefix, (number, measured) in zip(replaced, inputs.items(), strict=True):
        own = {k.removeprefix(prefix): x for k, x in state.items() if k.startswith(prefix)}
        dtype = own["q_proj.weight"].dtype
        own = {name: x.float() for name, x in own.items()}
        for name, x in _starting_values(own, source, measured).items():
            found[f"{part_name(number, PART)}.{name}"] = x.to(dtype).contiguous()
    return found


def _starting_values(
    own: Mapping[str, Tensor], source: Any, measured: LayerInputs
) -> dict[str, Tensor]:
    """Return the starting values of a recurrent layer in float32, by name within the layer."""
    heads, dim = source.num_attention_heads, source.head_dim
    groups = heads // source.num_key_value_heads
    hidden = measured.hidden.float()

    def mirrored(part: str, repeats: int) -> Tensor:
        w = own[f"{part}_proj.weight"].unflatten(0, (-1, dim))
        w = (w * own[f"{part}_norm.weight"][:, None]).repeat_interleave(repeats, 0)
        # the class normalises queries and keys: their size only places them on SiLU
        w = _unit_heads(w, hidden)
        return torch.stack([w, -w], 1).flatten(0, 2)

    v = own["v_proj.weight"].unflatten(0, (-1, dim)).repeat_interleave(SIGNS * groups, 0)
    v = VALUE_SIZE * _unit_heads(v, hidden)
    qkv = torch.cat([mirrored("q", 1), mirrored("k", groups), v.flatten(0, 1)])
    taps = qkv.new_zeros(len(qkv), 1, CONVOLUTION)
    taps[..., -1] = 1
    rates = torch.logspace(math.log2(SLOWEST), math.log2(FASTEST), SIGNS * heads, base=2).to(qkv)
    sizes = measured.heads.float().unflatten(-1, (heads, -1)).square().mean((0, 2)).sqrt()
    out = own["o_proj.weight"].unflatten(1, (heads, dim)) * sizes[:, None] / SIGNS
    none = qkv.new_zeros(SIGNS * heads, hidden.shape[1])
    return {
        "in_proj_qkv.weight": qkv,
        "in_proj_z.weight": _constant_projection(hidden, SILU_ONE).expand(SIGNS * heads * dim, -1),
        "in_proj_a.weight": none,
        "in_proj_b.weight": none.clone(),
        "conv1d.weight": taps,
        "A_log": qkv.new_zeros(SIGNS * heads),
        "dt_bias": rates.expm1().log(),  # softplus of it is the rate
        "norm.weight": qkv.new_ones(dim),
        "out_proj.weight": out.repeat_interleave(SIGNS, 1).flatten(1),
    }


def _unit_heads(weights: Tensor, hidden: Tensor) -> Tensor:
    """Return the projections of heads [H, D, M], whose outputs get a root mean square of 1."""
    return weights / (weights @ hidden.T).square().mean((1, 2)).sqrt()[:, None, None]


def _constant_projection(hidden: Tensor, value: float) -> Tensor:
    """Return the projection whose outputs are closest to a constant, ``[1, M]`` (ridge)."""
    x = hidden.double()
    ridge = 1e-3 * len(x) * x.square().mean()
    gram = x.T @ x + ridge * torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
    weights: Tensor = torch.linalg.solve(gram, x.sum(0) * value)
    return weights[None].float()


@contextmanager
def replaced_outputs(student: nn.Module, inputs: Mapping[int, LayerInputs]) -> Iterator[None]:
    """Context in which the recurrent layers of a student return the outputs of softmax."""
    layers: dict[int, Any] = dict(recurrent_layers(student))
    try:
        for number, layer in layers.items():  # not by hooks: its own forward may need a GPU
            layer.forward = lambda *args, number=number, **kwargs: inputs[number].out
        yield
    finally:
        for layer in layers.values():
            vars(layer).pop("forward", None)


def state_bytes(config: Any, itemsize: int) -> int:
    """Return the bytes of a recurrent layer's state and of the tokens of its convolution."""
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    state = 4 * values * config.linear_key_head_dim
    return int(state + itemsize * (2 * keys + values) * config.linear_conv_kernel_dim)


# -- inputs and outputs of the attention layers of the source --------------------------------------

CALIBRATION = (8, 64)  # rows, tokens


class LayerInputs(NamedTuple):
    """What an attention layer of the source gets and computes on some tokens.

    Attributes:
        hidden: Its input, ``[N, M]``.
        heads: The outputs of its heads, which ``o_proj`` gets, ``[N, H * D]``.
        out: Its output, ``[B, T, M]``.
    """

    hidden: Tensor
    heads: Tensor
    out: Tensor


def part_name(number: int, part: str) -> str:
    """Return the name of a part of a decoder layer in a model."""
    return f"model.layers.{number}.{part}"


def softmax_layer(model: nn.Module, number: int) -> nn.Module:
    """Return an attention layer of the model that a student is converted from."""
    return model.get_submodule(part_name(number, "self_attn"))


@torch.no_grad()
def measure_layers(
    model: PreTrainedModel, numbers: Sequence[int], tokens: Tensor | None
) -> dict[int, LayerInputs]:
    """Return what some layers of a softmax model get and compute on tokens, ``[B, T]``."""
    if not numbers:
        return {}
    found: dict[int, LayerInputs] = {}
    heads: dict[int, Tensor] = {}
    handles = []
    for number in numbers:
        layer: Any = softmax_layer(model, number)

        def keep(layer: Any, args: Any, kwargs: Any, output: Any, number: int = number) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            found[number] = LayerInputs(hidden.flatten(0, 1), heads[number], output[0])

        def keep_heads(layer: Any, args: Any, number: int = number) -> None:
            heads[number] = args[0].flatten(0, 1)

        handles.append(layer.o_proj.register_forward_pre_hook(keep_heads))
        handles.append(layer.register_forward_hook(keep, with_kwargs=True))
    try:
        model(input_ids=tokens, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return found


@torch.no_grad()
def sample_tokens(model: PreTrainedModel) -> Tensor:
    """Return text that a model samples itself from random first tokens, always the same one.

    Returns:
        Token ids, of the shape :data:`CALIBRATION`.
    """
    rows, length = CALIBRATION
    generator = torch.Generator().manual_seed(0)
    size = model.config.get_text_config().vocab_size
    tokens = torch.randint(size, (rows, 1), generator=generator).to(model.device)
    cache: dict[str, Any] = {}
    for _ in range(length - 1):
        output = model(input_ids=tokens[:, -1:], use_cache=True, **cache)
        cache = seam.cache_argument(seam.output_cache(output))
        probabilities = output.logits[:, -1].float().softmax(-1).cpu()
        following = torch.multinomial(probabilities, 1, generator=generator)
        tokens = torch.cat([tokens, following.to(tokens.device)], 1)
    return tokens
