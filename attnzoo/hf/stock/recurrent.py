"""Students of stock classes: recurrent layers in place of softmax attention, to be trained.

:data:`CLASSES` is the table of the classes that have such layers. A module for each says how full
layers move, which are exact, and which starting values recurrent layers get, whose output is not
that of softmax. Sizes are measured on text that the model samples itself
(:mod:`attnzoo.hf.stock.layer_inputs`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from attnzoo.errors import SpecError, short_repr
from attnzoo.hf.configs import read_field
from attnzoo.hf.stock import gated_delta_net, mamba2
from attnzoo.hf.stock.layer_inputs import LayerInputs, part_name
from attnzoo.hf.stock.starting_values import RECURRENT
from attnzoo.spec import parse_layers


@dataclass(frozen=True, kw_only=True)
class RecurrentClass:
    """How a stock class with recurrent layers holds a softmax model of another family.

    Attributes:
        part: Name of the recurrent layer within a decoder layer.
        config_fields: Returns the fields of the config that are not those of the source, from its
            config and the numbers of the recurrent layers; refuses what the class has not.
        softmax_weights: Returns the weights of full layers and of everything outside of attention,
            from those of the source and its config.
        starting_values: Returns the weights of a recurrent layer in float32, from those of the
            softmax layer, its config, and measurements.
        state_bytes: Returns the memory of a recurrent layer, from the student's config and the
            bytes of a number of its data type.
        masks_documents: Whether full layers separate the documents of a packed row by the
            positions.
    """

    part: str
    config_fields: Callable[[Any, Sequence[int]], dict[str, Any]]
    softmax_weights: Callable[[Mapping[str, Tensor], Any], dict[str, Tensor]]
    starting_values: Callable[[Mapping[str, Tensor], Any, LayerInputs], dict[str, Tensor]]
    state_bytes: Callable[[Any, int], int]
    masks_documents: bool = True


CLASSES = {
    gated_delta_net.FAMILY: RecurrentClass(
        part="linear_attn",
        config_fields=gated_delta_net.config_fields,
        softmax_weights=gated_delta_net.softmax_weights,
        starting_values=gated_delta_net.starting_values,
        state_bytes=gated_delta_net.state_bytes,
    ),
    mamba2.FAMILY: RecurrentClass(
        part="mamba",
        config_fields=mamba2.config_fields,
        softmax_weights=mamba2.softmax_weights,
        starting_values=mamba2.starting_values,
        state_bytes=mamba2.state_bytes,
        masks_documents=False,
    ),
}


def recurrent_numbers(config: Any) -> list[int]:
    """Return the numbers of the recurrent layers of a model of a stock class."""
    kinds = read_field(config.get_text_config(), "layer_types") or []
    return [number for number, kind in enumerate(kinds) if kind == RECURRENT]


def recurrent_layers(model: nn.Module) -> dict[int, nn.Module]:
    """Return the recurrent layers of a student by number; empty for other classes."""
    config: Any = model.config
    entry = CLASSES.get(config.model_type)
    if entry is None:
        return {}
    return {n: model.get_submodule(part_name(n, entry.part)) for n in recurrent_numbers(config)}


def parse_recurrent(layers: str, config: Any) -> list[int]:
    """Return the numbers in a text such as ``"1-2"``.

    Raises:
        SpecError: A layer does not exist, or no layer would keep softmax.
    """
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


@torch.no_grad()
def student_weights(
    state: Mapping[str, Tensor], source: Any, family: str, inputs: Mapping[int, LayerInputs]
) -> dict[str, Tensor]:
    """Return the weights of a student from those of its source.

    Args:
        state: The weights of the source by name.
        source: Its config.
        family: The family of the student.
        inputs: Measurements of the layers that become recurrent, by number.

    Raises:
        UnsupportedError: The class cannot store a weight.
    """
    entry = CLASSES[family]
    replaced = tuple(f"{part_name(number, 'self_attn')}." for number in inputs)
    kept = {name: x for name, x in state.items() if not name.startswith(replaced)}
    found = entry.softmax_weights(kept, source)
    for prefix, (number, measured) in zip(replaced, inputs.items(), strict=True):
        own = {k.removeprefix(prefix): x for k, x in state.items() if k.startswith(prefix)}
        dtype = own["q_proj.weight"].dtype
        own = {name: x.float() for name, x in own.items()}
        for name, x in entry.starting_values(own, source, measured).items():
            found[f"{part_name(number, entry.part)}.{name}"] = x.to(dtype).contiguous()
    return found


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
