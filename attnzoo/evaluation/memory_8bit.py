"""Memory of the state of an 8-bit AdamW, as bitsandbytes keeps it.

Source: Dettmers et al., 2021, arXiv:2110.02861.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

BLOCK = 256  # weights that share a scale
LEAST = 4096  # weights of a tensor whose state is in 8 bits; that of a smaller one is in 32 bits
MAPS = 2 * 256 * 4  # bytes of the tables of levels, one for each moment, of all tensors


def embedding_weights(model: nn.Module) -> list[Tensor]:
    """Return the weights of embeddings, whose state is in 32 bits, as transformers has it."""
    return [x.weight for x in model.modules() if isinstance(x, nn.Embedding)]


def state_bytes(model: nn.Module, trained: Iterable[Tensor]) -> int:
    """Return the bytes of the state: two moments of each trained weight.

    A moment in 8 bits takes a byte a weight, and a scale in float32 for each block of weights.

    Args:
        model: The model.
        trained: Its trained parameters.
    """
    wide = {id(weight) for weight in embedding_weights(model)}
    total = 0
    quantized = False
    for parameter in trained:
        count = parameter.numel()
        if count < LEAST or id(parameter) in wide:
            total += 2 * 4 * count
        else:
            total += _quantized(count)
            quantized = True
    return total + MAPS * quantized


def flat_state_bytes(count: int) -> int:
    """Return the bytes of the state of one tensor with so many weights."""
    return 2 * 4 * count if count < LEAST else _quantized(count) + MAPS


def _quantized(count: int) -> int:
    """Return the bytes of two moments in 8 bits, with their scales."""
    return 2 * (count + 4 * -(-count // BLOCK))
