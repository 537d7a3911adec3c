"""The data type of a saved model's weights, which a model trained in float32 is saved in again."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from attnzoo.hf.configs import read_field
from attnzoo.hf.saving.files import read_config
from attnzoo.hf.seam import names_kept_in_float32

# safetensors' names of the types that a model may be trained and saved in
DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}


def saved_dtype(path: Path) -> torch.dtype:
    """Return the data type that ``from_pretrained`` gives the weights of a saved model.

    It is that of the config, of its text model, or of the first weight where the config has none.

    Raises:
        SpecError: ``path`` holds no saved model.
    """
    config = read_config(path)
    for part in (config, config.get_text_config()):
        if isinstance(dtype := read_field(part, "dtype"), torch.dtype):
            return dtype
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - not a dict
                if (found := DTYPES.get(weights.get_slice(name).get_dtype())) is not None:
                    return found
    return torch.float32


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a data type, such as ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def rounded_weights(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return a model's saved weights by name, except those that transformers keeps in float32."""
    kept = names_kept_in_float32(model, dtype)
    pattern = re.compile("|".join(map(re.escape, kept))) if kept else None
    return {
        name: x
        for name, x in model.state_dict(keep_vars=True).items()
        if x.is_floating_point() and not (pattern and pattern.search(name))
    }


@torch.no_grad()
def cast_weights(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast a model's saved weights in place, except those that transformers keeps in float32."""
    for x in rounded_weights(model, dtype).values():
        x.data = x.data.to(dtype)


@torch.no_grad()
def round_weights(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Round a float32 model's weights to what :func:`cast_weights` saves, still in float32."""
    if dtype != model.dtype:
        for x in rounded_weights(model, dtype).values():
            part = x.to_local() if isinstance(x, DTensor) else x.data
            part.copy_(part.to(dtype))
