"""Errors of a student's Mamba-2 layers before training, with the starting values and with others.

    python -m benchmarks.mamba2_start

Prints the relative squared error of each layer against softmax, as a row of a table: of the layers
that ``attnzoo.convert`` gives for the embedded Llama, and of those with one choice changed. Inputs
are those of the softmax model on 8 rows of 512 tokens of the text of benchmarks/students.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

import attnzoo
from attnzoo.evaluation.models import embedded_model_path
from attnzoo.hf.stock import mamba2
from attnzoo.hf.stock.layer_inputs import LayerInputs, measure_layers
from attnzoo.hf.stock.recurrent import recurrent_layers
from attnzoo.hf.stock.starting_values import SIGNS, spread_rates
from benchmarks.students import held_out

ROWS, LENGTH = 8, 512
SMALL = 0.3  # root mean square of the values that SiLU gets in Gated DeltaNet layers
SHARED = 0.7  # of keys and queries in the states that two heads share


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    path = embedded_model_path()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    numbers = range(model.config.num_hidden_layers)
    tokens = held_out(path, LENGTH).rows.tokens[:ROWS]
    measured = measure_layers(model, numbers, tokens)
    layers = {n: starting_layer(model, n) for n in numbers}
    for name, change in VARIANTS.items():
        errors = [error(change(copy.deepcopy(x)), measured[n]) for n, x in layers.items()]
        print(f"| {name} | {' | '.join(f'{x:.2f}' for x in errors)} |", flush=True)


def starting_layer(model: Any, number: int) -> nn.Module:
    """Return a layer of the student of a model, with its starting values."""
    student = attnzoo.speed_up(attnzoo.convert(model, mamba2.FAMILY, recurrent=str(number)))
    layer = recurrent_layers(student)[number]
    vars(layer)["student_config"] = student.config
    return layer


@torch.no_grad()
def error(layer: nn.Module, measured: LayerInputs) -> float:
    """Return the relative squared error of a layer against the output of softmax."""
    exact = measured.out
    out = layer(measured.hidden.view(*exact.shape[:2], -1))
    return float((out - exact).square().sum() / exact.square().sum())


@torch.no_grad()
def scale_rows(layer: Any, start: int, stop: int, factor: float) -> None:
    """Scale outputs of the input projection, numbered in sizes of the layer's heads together."""
    size = layer.num_heads * layer.head_dim
    layer.in_proj.weight[start * size : stop * size].mul_(factor)


@torch.no_grad()
def slow(layer: Any) -> Any:
    """Return a layer with the decays of Gated DeltaNet layers, at most 1/4 a token."""
    layer.A_log.copy_(spread_rates(mamba2.SLOWEST, 1 / 4, layer.num_heads).log())
    return layer


def small_values(layer: Any) -> Any:
    """Return a layer with small values, which are in the linear part of SiLU."""
    scale_rows(layer, 1, 2, SMALL)
    return layer


@torch.no_grad()
def one_sign(layer: Any) -> Any:
    """Return a layer with small values that have the same sign in both heads of a pair."""
    size = layer.num_heads * layer.head_dim
    pair = (-1, SIGNS, layer.head_dim)
    values = layer.in_proj.weight[size : 2 * size].unflatten(0, pair)
    values[:, 1] = values[:, 0]
    out = layer.out_proj.weight.unflatten(1, pair)
    out[:, :, 1] = out[:, :, 0]
    return small_values(layer)


@torch.no_grad()
def shared_states(layer: Any) -> Any:
    """Return a layer in which both heads of a pair have one state with the keys of both signs."""
    heads = layer.num_heads // SIGNS
    config = copy.deepcopy(layer.student_config)
    config.mamba_n_groups, config.mamba_d_state = heads, SIGNS * layer.head_dim
    student = attnzoo.speed_up(AutoModelForCausalLM.from_config(config))
    found: Any = recurrent_layers(student)[layer.layer_idx]
    found.load_state_dict(layer.state_dict())
    rates = spread_rates(mamba2.SLOWEST, mamba2.FASTEST, heads)
    found.A_log.copy_(rates.repeat_interleave(SIGNS).log())
    scale_rows(found, 2, 4, SHARED)
    return found


VARIANTS: dict[str, Callable[[Any], Any]] = {
    "as for Gated DeltaNet: the same sign for the values of both heads, size 0.3": one_sign,
    "both signs, size 0.3": small_values,
    "both signs, size 1: what `convert` writes": lambda layer: layer,
    "what `convert` writes, with decays of 1/512 to 1/4": slow,
    "what `convert` writes, with states of twice the size that both heads share": shared_states,
}

if __name__ == "__main__":
    main()
