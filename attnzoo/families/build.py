"""Builds a model family tiny, with weights that make attention matter, and finds its inputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from attnzoo.families.configs import tiny_config
from attnzoo.families.inputs import cases
from attnzoo.families.models import model_class
from attnzoo.families.probe import Probe, layers_run, redraw
from attnzoo.integrations import compat

LARGEST = 12_000_000  # parameters; what a generic tiny config did not shrink has no recipe yet


class NotBuiltError(Exception):
    """A family cannot be built here; the message is the reason."""


@dataclass
class Family:
    """A model on its eager attention, how it is called, and what came out.

    Attributes:
        model: The whole model.
        layers: Names of all modules that call the attention interface.
        probes: The calls that go through as many of them as possible.
        expected: Outputs of eager attention, by probe and variant.
    """

    model_type: str
    model: PreTrainedModel
    layers: list[str]
    probes: list[Probe]
    reached: set[str]
    expected: dict[tuple[int, str], list[Tensor]] = field(default_factory=dict)


def interface_layers(model: PreTrainedModel) -> list[str]:
    """Return the names of the modules that call the attention interface."""
    return [n for n, module in model.named_modules() if compat.calls_attention_interface(module)]


def make_model(model_type: str, gain: float) -> PreTrainedModel | None:
    """Build the model that stands for a model type on eager attention, weights drawn anew.

    Returns:
        The model, or ``None`` if nothing in it calls the attention interface.

    Raises:
        NotBuiltError: The reason why it cannot be built.
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
        if size > LARGEST:
            raise NotBuiltError(f"its tiny config still has {size:,} parameters")
        torch.manual_seed(0)
        model = cls._from_config(tiny_config(model_type), attn_implementation="eager")
    except NotBuiltError:
        raise
    except Exception as error:  # whatever a model's own code raises is the reason
        raise NotBuiltError(f"{type(error).__name__}: {_first_lines(error)}") from error
    return redraw(model, gain)  # type: ignore[return-value]


def _first_lines(error: Exception) -> str:
    return " ".join(str(error).split())[:240]


def find_probes(model: PreTrainedModel) -> tuple[list[Probe], set[str], list[str]]:
    """Find calls, of the whole or of its parts, that go through every attention layer.

    Returns:
        The calls, the layers that they go through, and what went wrong with others.
    """
    left, probes, errors = set(interface_layers(model)), [], []
    parts = [n for n, module in model.named_modules() if isinstance(module, PreTrainedModel)]
    for part in parts:
        prefix = f"{part}." if part else ""
        best: tuple[Probe, set[str]] | None = None
        if not any(name.startswith(prefix) for name in left):
            continue
        for case in cases(model.get_submodule(part), part):
            probe = Probe(model, case)
            try:
                seen = layers_run(model, probe.plain)
            except Exception as error:  # many calls are tried, and most do not fit
                where = f"{part}: " if part else ""
                errors.append(f"{where}{case.kind}: {type(error).__name__}: {_first_lines(error)}")
                continue
            if seen & left and (best is None or len(seen & left) > len(best[1] & left)):
                best = probe, seen
        if best is not None:
            probes.append(best[0])
            left -= best[1]
    return probes, set(interface_layers(model)) - left, errors


def build_family(model_type: str, gain: float = 1.5) -> Family | None:
    """Build a family and run all that it has on eager attention.

    Returns:
        The family, or ``None`` if it does not use the attention interface.

    Raises:
        NotBuiltError: It cannot be built or called, with the reason.
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
    return family


def _mixes_padding(probe: Probe, name: str, output: list[Tensor]) -> bool:
    """Whether the model itself lets padding reach real tokens, as patches of bytes do."""
    if not name.endswith(" padding"):
        return False
    other = attempt(lambda: probe.padded(name.split()[0], seed=2))
    pairs = zip(output, other or (), strict=False)
    return any(not torch.allclose(x, y, atol=1e-3, rtol=1e-3) for x, y in pairs)


def attempt(run: Any) -> list[Tensor] | None:
    """Run a variant on eager attention; ``None`` where the family does not have it."""
    try:
        output: list[Tensor] = run()
    except Exception:  # a family without this variant raises whatever it likes
        return None
    return output if output and all(bool(x.isfinite().all()) for x in output) else None
