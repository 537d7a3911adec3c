"""Memory of frozen linear layers in 4 bits (NF4, double quantization), as bitsandbytes keeps them.

Source: Dettmers et al., 2023, arXiv:2305.14314.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from attnzoo.hf.names import NAME

# half a byte a weight, a byte a block of 64 weights for its largest value, and four bytes for the
# scale of 256 of these
BYTES_OF_4_BITS = 0.5 + 1 / 64 + 4 / (64 * 256)


def quantizable_layers(model: nn.Module) -> list[nn.Linear]:
    """Return the linear layers of a model that are in 4 bits when it is quantized.

    The head is not, as in transformers, nor is what a backend adds.
    """
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    return [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head and f".{NAME}." not in name
    ]


def in_4_bits(model: nn.Module, itemsize: int) -> tuple[int, int]:
    """Return the bytes that 4-bit weights save, and the largest buffer of a layer that runs.

    A layer's weights are computed again in the compute type while it runs.

    Args:
        model: The model, whose frozen linear layers are quantized.
        itemsize: Bytes of a number of the compute type.
    """
    weights = [x.weight for x in quantizable_layers(model) if not x.weight.requires_grad]
    count = sum(x.numel() for x in weights)
    saved = sum(x.numel() * x.element_size() for x in weights) - round(count * BYTES_OF_4_BITS)
    return saved, max((x.numel() for x in weights), default=0) * itemsize
