"""Calibration: gates that start from the attention weights of the model with softmax.

One pass over some training rows measures softmax's attention in each swapped layer, and each gate
follows in closed form; :mod:`attnzoo.training.gate_calibration` has the formulas. The initial
values of the gates are otherwise the same for every layer, head and token, and transfer has to find
in training what the attention weights show. Gates of ``delta`` are calibrated.
Source: the idea of gates that start from the teacher's attention statistics is that of
arXiv:2606.16429.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from attnzoo.backends.delta import DeltaBackend
from attnzoo.contract.backend import AttentionBackend
from attnzoo.contract.inputs import AttentionInputs, zero_padding
from attnzoo.registry import get_backend
from attnzoo.training.gate_calibration import GateCalibration
from attnzoo.training.transfer import Transfer, swapped_layers

ROWS_AT_ONCE = 4


def can_calibrate(backend: str) -> bool:
    """Return whether the gates of a backend can be calibrated."""
    return issubclass(get_backend(backend), DeltaBackend)


def calibrated_layers(model: nn.Module) -> dict[str, DeltaBackend]:
    """Return the layers whose gates can be calibrated, by name."""
    layers = swapped_layers(model)
    return {name: x for name, x in layers.items() if isinstance(x, DeltaBackend)}


def new_calibration(backend: DeltaBackend) -> GateCalibration:
    """Return statistics of softmax's attention in a layer, to be filled for :func:`set_gates`."""
    config, geometry = backend.config, backend.geometry
    groups = geometry.num_heads // geometry.num_key_heads
    return GateCalibration(config.window or 1, groups, geometry.hidden_size or 1, config.num_sinks)


@torch.no_grad()
def set_gates(backend: DeltaBackend, calibration: GateCalibration) -> None:
    """Start write strengths, decays and mixing weights from softmax's attention."""
    weight, bias = calibration.write_gate()
    backend.write_weight.copy_(weight)
    backend.write_bias.copy_(bias)
    if backend.gate is not None:
        backend.gate.set_rates(calibration.decay_rates())
    if backend.far_log_weight is not None and backend.mix_weight is not None:
        assert backend.mix_lse is not None
        weight, of_lse, bias = calibration.mixing_gate()
        backend.mix_weight.copy_(weight)
        backend.mix_lse.copy_(of_lse)
        backend.far_log_weight.copy_(bias)


@torch.no_grad()
def calibrate(model: nn.Module, tokens: Tensor, positions: Tensor) -> list[dict[str, Any]]:
    """Start the gates of a swapped model from softmax's attention on some rows.

    Args:
        model: A swapped model; layers of other backends than ``delta`` keep their parameters.
        tokens: ``[B, T]``.
        positions: ``[B, T]``, from 0 in each sequence.

    Returns:
        For each calibrated layer its name (``layer``), the share of the attention on keys beyond
        the window (``beyond``), the mean distance in tokens of those keys (``age``), and the
        initial decay of a token (``decay``), means over heads. Layers without such keys, because
        rows are too short, are left out and keep their parameters.
    """
    layers = calibrated_layers(model)
    if not layers:
        return []
    found = {name: new_calibration(backend) for name, backend in layers.items()}
    handles = [
        backend.register_forward_pre_hook(_recorder(found[name]), with_kwargs=True)
        for name, backend in layers.items()
    ]
    training, device = model.training, next(model.parameters()).device
    model.eval()
    try:
        with Transfer(model, list(layers)):  # every layer gets the inputs of the softmax model
            for first in range(0, len(tokens), ROWS_AT_ONCE):
                own = slice(first, first + ROWS_AT_ONCE)
                ids, at = tokens[own], positions[own]
                model(input_ids=ids.to(device), position_ids=at.to(device), use_cache=False)
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
    rows = []
    for name, backend in layers.items():
        if not found[name].is_empty:
            set_gates(backend, found[name])
            rows.append(_summary(name, found[name], backend))
    return rows


def _recorder(calibration: GateCalibration) -> Any:
    """Return a pre-hook that adds the inputs of a backend to its statistics."""

    def hook(backend: AttentionBackend, args: Any, kwargs: dict[str, Any]) -> None:
        q, k, v = args
        scale = kwargs.get("scale")
        scale = backend.geometry.scale if scale is None else scale
        assert scale is not None
        inputs = AttentionInputs(
            q=q,
            k=k,
            v=v,
            mask=kwargs["mask"],
            scale=scale,
            hidden_states=kwargs["hidden_states"],
        )
        calibration.add(zero_padding(inputs))

    return hook


def _summary(name: str, found: GateCalibration, backend: DeltaBackend) -> dict[str, Any]:
    """Return the means over heads of a layer's statistics, as plain data."""
    return {
        "layer": name,
        "beyond": float(found.mean_far_share().mean()),
        "age": float(found.mean_age().mean()),
        "decay": 0.0 if backend.gate is None else float(found.decay_rates().mean()),
    }
