"""What the attention layers of a model get and compute on text that the model samples itself.

Starting values of recurrent layers are set by it. Letters: H query heads, D their size, M hidden
size, N tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnzoo.hf import seam

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
    """Return what some layers of a softmax model get and compute.

    Args:
        model: The model in evaluation mode.
        numbers: The layers.
        tokens: Token ids, ``[B, T]``; they are needed only if there are layers.
    """
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
