"""Checks one model family under one backend, against its own eager attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor
from transformers import GenerationMixin

import attnzoo
from attnzoo.errors import UnsupportedError
from attnzoo.families.build import Family
from attnzoo.families.controls import distance
from attnzoo.families.inputs import padding, words
from attnzoo.families.probe import Probe, tensors
from attnzoo.integrations.attention import layer_backend
from attnzoo.integrations.layers import attention_layers
from attnzoo.registry import get_backend

TOLERANCE = 1e-4  # float32

OPTIONS: dict[str, dict[str, Any]] = {  # so small that they matter in short sequences
    "linformer": {"block": 4, "num_rows": 2, "max_length": 512},
    "longformer": {"window": 3},
    "reformer": {"chunk_size": 4},
}

EQUAL, RUNS, IN_PART, REFUSED = "equal", "runs", "in part", "refused"
UNPROVEN = "unproven"  # equal, but a wrong attention might be too
DIFFERENT, FAILED = "different", "failed"  # neither may ever stand in the record


@dataclass
class Outcome:
    """What became of one family under one backend."""

    outcome: str
    reason: str = ""
    checked: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)  # variants and rules, with the reason


def exact_outcome(family: Family, backend: str) -> Outcome:
    """Compare an exact backend with eager attention in every variant that the family has."""
    outcome = Outcome(EQUAL)
    try:
        attnzoo.swap(family.model, backend)
    except UnsupportedError as error:
        return Outcome(REFUSED, str(error))
    for (number, name), expected in family.expected.items():
        run = dict(family.probes[number].variants())[name]
        try:
            apart = distance(run(), expected)
        except UnsupportedError as error:
            if name == "plain":
                return Outcome(REFUSED, str(error), outcome.checked)
            outcome.refused[name] = str(error)
            continue
        if apart > TOLERANCE:
            return Outcome(DIFFERENT, f"{name}: {apart:.1e} from eager", outcome.checked)
        outcome.checked.append(name)
    return outcome


# -- approximate backends -------------------------------------------------------------------------


def approximate_outcome(family: Family, backend: str) -> Outcome:
    """Hold an approximate backend to the rules that eager attention itself keeps in this family.

    Layers that it refuses stay exact, as ``else_`` keeps them; the outcome says how many.
    """
    restore_eager(family.model)
    by_design = {"decoding"} if get_backend(backend).exact_steps else set()  # differs, as stated
    own = [{name for name, holds in rules(probe) if attempt_rule(holds)} for probe in family.probes]
    outcome = Outcome(RUNS)
    try:
        attnzoo.swap(family.model, backend, **OPTIONS.get(backend, {}))
    except UnsupportedError as error:
        attnzoo.swap(family.model, backend, else_="softmax", **OPTIONS.get(backend, {}))
        layers = attention_layers(family.model)
        count = sum(layer_backend(layer.module).name == backend for layer in layers)
        if not count:
            return Outcome(REFUSED, str(error))
        outcome = Outcome(IN_PART, f"{count} of {len(layers)} layers run it. {error}")
    for probe, kept in zip(family.probes, own, strict=True):
        try:
            output = probe.plain()
        except UnsupportedError as error:
            return Outcome(REFUSED, str(error), outcome.checked)
        if not all(bool(x.isfinite().all()) for x in output):
            return Outcome(DIFFERENT, "its outputs are not finite", outcome.checked)
        outcome.checked.append("plain")
        for name, holds in rules(probe):
            if name not in kept - by_design:
                continue
            try:
                if not holds():
                    return Outcome(DIFFERENT, f"{name} does not hold", outcome.checked)
                outcome.checked.append(name)
            except UnsupportedError as error:
                outcome.refused[name] = str(error)
    return outcome


def restore_eager(model: Any) -> None:
    """Give a model its eager attention back, if it was swapped."""
    if getattr(model.config, "attnzoo", None) is not None:
        attnzoo.restore(model)


def attempt_rule(rule: Callable[[], bool]) -> bool:
    """Whether a rule holds in eager attention; what cannot be called so does not have it."""
    try:
        return rule()
    except Exception:  # whatever the model's own code raises
        return False


def rules(probe: Probe) -> Iterator[tuple[str, Callable[[], bool]]]:
    """Yield what holds of any attention, with its name."""
    variants = dict(probe.variants())
    case = probe.case
    if case.steps:
        yield "causality", lambda: _causal(probe)
    for side in ("left padding", "right padding"):
        if side in variants:
            where = side.split()[0]
            yield side, partial(_ignores_padding, probe, where)
    if "decoding" in variants:
        yield "decoding", lambda: _near(probe.decoded(), [probe.plain()[0]])
        if isinstance(probe.module, GenerationMixin):
            yield "generate", lambda: _generates(probe)


def _near(found: list[Tensor], expected: list[Tensor]) -> bool:
    return distance(found, expected) <= 10 * TOLERANCE


def _ignores_padding(probe: Probe, side: str) -> bool:
    return _near(probe.padded(side), probe.padded(side, seed=2))


def _causal(probe: Probe) -> bool:
    name = probe.case.steps
    later = probe.case.given[name].clone()
    later[:, 7:] = words(9)[:, 7:]
    changed = tensors(probe.call({**probe.case.given, name: later}, **probe._no_cache()))[0]
    return _near([changed[:, :7]], [probe.plain()[0][:, :7]])


def _generates(probe: Probe) -> bool:
    """Whether stock ``generate`` runs with left padding."""
    case = probe.case
    given = dict(case.given)
    real = padding("left")
    if case.steps == "input_ids":
        given["attention_mask"] = real
    else:
        given.pop(case.steps)
    model: Any = probe.module
    made = model.generate(**given, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    return bool(made.shape[1] >= 4)


def check(family: Family, backend: str) -> Outcome:
    """Check a family under a backend; what raises anything but a refusal has failed."""
    exact = get_backend(backend).exact
    try:
        if exact:
            return exact_outcome(family, backend)
        outcome = approximate_outcome(family, backend)
    except Exception as error:  # the record must say so, and go on
        return Outcome(FAILED, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    return outcome
