"""Linear layers in 4 bits of bitsandbytes: NF4 with double quantization, computed in bfloat16.

Source: Dettmers et al., 2023, arXiv:2305.14314 (QLoRA).
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PreTrainedModel

from attnzoo.errors import UnsupportedError
from attnzoo.hf.configs import read_field
from attnzoo.hf.names import NAME

COMPUTE_DTYPE = torch.bfloat16


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


def require_bitsandbytes(
    need: str = "weights in 4 bits (nf4) need", instead: str = "'bfloat16' needs no other package"
) -> None:
    """Raise an error if bitsandbytes is not installed.

    Args:
        need: What needs it, with the verb.
        instead: What does without it.

    Raises:
        UnsupportedError: It is not.
    """
    if find_spec("bitsandbytes") is None:
        raise UnsupportedError(
            f"{need} bitsandbytes, which is not installed (pip install bitsandbytes); {instead}"
        )


def require_quantizable(model: nn.Module) -> None:
    """Raise an error if bitsandbytes would quantize no layer of a model.

    Raises:
        UnsupportedError: The model has no linear layers but the head.
    """
    if not quantizable_layers(model):
        raise UnsupportedError(
            f"{type(model).__name__} has no linear layers (torch.nn.Linear) that bitsandbytes "
            "could keep in 4 bits (nf4); use 'bfloat16'"
        )


def config_of_4_bits(model: PreTrainedModel) -> BitsAndBytesConfig:
    """Return transformers' settings to load a model with frozen linear layers in 4 bits.

    Args:
        model: A model of the same architecture, which may be empty.

    Raises:
        UnsupportedError: bitsandbytes is not installed, the model has no such layers, or it is
            saved with quantized weights.
    """
    require_bitsandbytes()
    if read_field(model.config, "quantization_config") is not None:
        raise UnsupportedError(
            "The saved model is quantized already; leave load_in_4bit out, or give the model "
            "that it was made from"
        )
    require_quantizable(model)
    chosen = set(quantizable_layers(model))
    others = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and m not in chosen]
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=COMPUTE_DTYPE,
        llm_int8_skip_modules=others,  # of 4 bits too
    )


def layers_in_4_bits(
    model: nn.Module, fetch: Callable[[Tensor], Tensor] = Tensor.detach
) -> dict[int, nn.Module]:
    """Return copies in 4 bits of a model's linear layers but the head, by the id of the layer.

    The layers are quantized one after the other, on their device. They are the memo of a
    ``deepcopy`` of the model, which then has them in the place of its own.

    Args:
        model: The model.
        fetch: Returns the data of a weight.

    Raises:
        UnsupportedError: bitsandbytes is not installed, or the model has no such layers.
    """
    require_bitsandbytes()
    require_quantizable(model)
    return {id(layer): _in_4_bits(layer, fetch) for layer in quantizable_layers(model)}


def _in_4_bits(layer: nn.Linear, fetch: Callable[[Tensor], Tensor]) -> nn.Module:
    """Return a copy of a linear layer in 4 bits."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    size, bias = (layer.in_features, layer.out_features), layer.bias
    copy: Any = Linear4bit(
        *size, bias is not None, COMPUTE_DTYPE, quant_type="nf4", device=torch.device("meta")
    )
    weight = fetch(layer.weight).to(COMPUTE_DTYPE)
    # compress_statistics is double quantization; moving the parameter quantizes it
    copy.weight = Params4bit(
        weight, requires_grad=False, compress_statistics=True, quant_type="nf4", module=copy
    ).to(weight.device)
    if bias is not None:
        copy.bias = nn.Parameter(fetch(bias).to(COMPUTE_DTYPE, copy=True), False)
    copied: nn.Module = copy
    return copied
