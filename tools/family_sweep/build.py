"""Build a tiny model of each family, with weights that make attention matter, and its inputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from attnzoo.hf import seam
from tools.family_sweep.configs import tiny_config
from tools.family_sweep.inputs import candidate_calls
from tools.family_sweep.models import model_class
from tools.family_sweep.probe import Probe, layers_run, redraw

MAX_PARAMETERS = 12_000_000  # a larger model needs a recipe for its config


class NotBuiltError(Exception):
    """A family cannot be built; the message is the reason."""


@dataclass
class Family:
    """A model with its calls and their outputs under eager attention.

    Attributes:
        model_type: Its model type.
        model: The whole model.
        layers: Names of all modules that call the attention interface.
        probes: Calls that execute as many of them as possible.
        reached: Names of the layers that the calls execute.
        alone: Outputs of eager attention on the sequences of a packed row alone, by probe.
        expected: Outputs of eager attention, by probe and variant.
    """

    model_type: str
    model: PreTrainedModel
    layers: list[str]
    probes: list[Probe]
    reached: set[str]
    alone: dict[int, list[Tensor]] = field(default_factory=dict)
    expected: dict[tuple[int, str], list[Tensor]] = field(default_factory=dict)


def interface_layers(model: PreTrainedModel) -> list[str]:
    """Return the names of the modules that call the attention interface."""
    return [n for n, module in model.named_modules() if seam.calls_attention_interface(module)]


def make_model(model_type: str, gain: float) -> PreTrainedModel | None:
    """Build a tiny model of a model type with eager attention and random weights.

    Returns:
        The model, or ``None`` if none of its modules calls the attention interface.

    Raises:
        NotBuiltError: It cannot be built; the message is the reason.
    """
    try:
        cls = model_class(model_type)
        if cls is None:
            raise NotBuiltError("no auto class knows it: it is a part of other models")
        with torch.device("meta"):
            outline = cls._from_config(tiny_config(model_type), attn_implementation="eager")
        if not interface_layers(outline):
            return None
        size = sum(p.numel() for p in outline.parameters())
        if size > MAX_PARAMETERS:
            raise NotBuiltError(f"its tiny config still has {size:,} parameters")
        torch.manual_seed(0)
        model = cls._from_config(tiny_config(model_type), attn_implementation="eager")
    except NotBuiltError:
        raise
    except Exception as error:  # any error of the model's own code is the reason
        raise NotBuiltError(f"{type(error).__name__}: {_first_lines(error)}") from error
    return redraw(model, gain)  # type: ignore[return-value]


def _first_lines(error: Exception) -> str:
    return " ".join(str(error).split())[:240]


def find_probes(model: PreTrainedModel) -> tuple[list[Probe], set[str], list[str]]:
    """Return calls of the model and its submodules that execute its attention layers.

    Returns:
        The calls, the layers that they execute, and the errors of other calls.
    """
    left, probes, errors = set(interface_layers(model)), [], []
    parts = [n for n, module in model.named_modules() if isinstance(module, PreTrainedModel)]
    for part in parts:
        prefix = f"{part}." if part else ""
        best: tuple[Probe, set[str]] | None = None
        if not any(name.startswith(prefix) for name in left):
            continue
        for case in candidate_calls(model.get_submodule(part), part):
            probe = Probe(model, case)
            try:
                run = layers_run(model, probe.plain)
            except Exception as error:  # many calls are tried, and most raise an error
                where = f"{part}: " if part else ""
                errors.append(f"{where}{case.kind}: {type(error).__name__}: {_first_lines(error)}")
                continue
            if run & left and (best is None or len(run & left) > len(best[1] & left)):
                best = probe, run
        if best is not None:
            probes.append(best[0])
            left -= best[1]
    return probes, set(interface_layers(model)) - left, errors


def build_family(model_type: str, gain: float = 1.5) -> Family | None:
    """Build a family and compute all variants of its calls with eager attention.

    Returns:
        The family, or ``None`` if it does not use the attention interface.

    Raises:
        NotBuiltError: It cannot be built or called; the message is the reason.
    """
    model = make_model(model_type, gain)
    if model is None:
        return None
    probes, reached, errors = find_probes(model)
    if not probes:
        raise NotBuiltError(f"it cannot be called: {'; '.join(errors[:3]) or 'no input is known'}")
    family = Family(model_type, model, interface_layers(model), probes, reached)
    for number, probe in enumerate(probes):
        for name, run in probe.variants():
            output = attempt(run)
            if output is not None and not _mixes_padding(probe, name, output):
                family.expected[number, name] = output
            if name == "packed" and (alone := attempt(probe.packed_alone)) is not None:
                family.alone[number] = alone
    return family


def _mixes_padding(probe: Probe, name: str, output: list[Tensor]) -> bool:
    """Whether padding changes other outputs even under eager attention, as in byte patches."""
    if not name.endswith(" padding"):
        return False
    other = attempt(lambda: probe.padded(name.split()[0], seed=2))
    pairs = zip(output, other or (), strict=False)
    return any(not torch.allclose(x, y, atol=1e-3, rtol=1e-3) for x, y in pairs)


def attempt(run: Any) -> list[Tensor] | None:
    """Return the outputs of a variant; ``None`` if the model does not support it."""
    try:
        output: list[Tensor] = run()
    except Exception:  # a model without this variant may raise any error
        return None
    return output if output and all(bool(x.isfinite().all()) for x in output) else None
