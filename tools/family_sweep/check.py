"""Check one model family under one backend against its own eager attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor
from transformers import GenerationMixin

import attnzoo
from attnzoo.errors import UnsupportedError
from attnzoo.evaluation.presets import preset_options
from attnzoo.hf.attention.call import layer_backend
from attnzoo.hf.layers import attention_layers
from attnzoo.registry import get_backend
from tools.family_sweep.build import Family
from tools.family_sweep.controls import distance
from tools.family_sweep.inputs import padding, words
from tools.family_sweep.probe import Probe, by_token, tensors

TOLERANCE = 1e-4  # float32

EQUAL, RUNS, IN_PART, REFUSED = "equal", "runs", "in part", "refused"
UNPROVEN = "unproven"  # equal, but the outputs are not sensitive to errors
DIFFERENT, FAILED = "different", "failed"  # defects; a test keeps them out of the record


@dataclass
class Outcome:
    """Result of one family under one backend."""

    outcome: str
    reason: str = ""
    checked: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)  # reason by variant or rule


def exact_outcome(family: Family, backend: str) -> Outcome:
    """Compare an exact backend with eager attention in all variants of the family."""
    outcome = Outcome(EQUAL)
    try:
        attnzoo.swap(family.model, backend)
    except UnsupportedError as error:
        return Outcome(REFUSED, str(error))
    for (number, name), expected in family.expected.items():
        run = dict(family.probes[number].variants())[name]
        try:
            found = run()
            error_size = distance(found, expected)
            if name == "packed" and error_size > TOLERANCE and number in family.alone:
                # where stock mixes packed sequences, a swap may separate them
                error_size = distance(by_token(found), family.alone[number])
        except UnsupportedError as error:
            if name == "plain":
                return Outcome(REFUSED, str(error), outcome.checked)
            outcome.refused[name] = str(error)
            continue
        if error_size > TOLERANCE:
            return Outcome(DIFFERENT, f"{name}: {error_size:.1e} from eager", outcome.checked)
        outcome.checked.append(name)
    return outcome


# -- approximate backends -------------------------------------------------------------------------


def approximate_outcome(family: Family, backend: str) -> Outcome:
    """Check that an approximate backend obeys the rules that eager attention obeys in a family.

    Layers that it does not support stay exact, as with ``else_``; the outcome has their number.
    """
    restore_eager(family.model)
    # exact single steps after an approximate prompt differ from one forward pass by design
    by_design = {"decoding"} if get_backend(backend).capabilities.exact_steps else set()
    eager_rules = [
        {name for name, holds in rules(probe) if holds_under_eager(holds)}
        for probe in family.probes
    ]
    outcome = Outcome(RUNS)
    (options,) = preset_options(backend, "tiny")
    try:
        attnzoo.swap(family.model, backend, **options)
    except UnsupportedError as error:
        attnzoo.swap(family.model, backend, else_="softmax", **options)
        layers = attention_layers(family.model)
        count = sum(layer_backend(layer.module).name == backend for layer in layers)
        if not count:
            return Outcome(REFUSED, str(error))
        outcome = Outcome(IN_PART, f"{count} of {len(layers)} layers run it. {error}")
    for probe, kept in zip(family.probes, eager_rules, strict=True):
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
    """Restore the eager attention of a swapped model."""
    if getattr(model.config, "attnzoo", None) is not None:
        attnzoo.restore(model)


def holds_under_eager(rule: Callable[[], bool]) -> bool:
    """Whether a rule holds for eager attention; ``False`` if its calls raise an error."""
    try:
        return rule()
    except Exception:  # the model's own code may raise any error
        return False


def rules(probe: Probe) -> Iterator[tuple[str, Callable[[], bool]]]:
    """Yield the rules that every attention must obey, by name."""
    variants = dict(probe.variants())
    case = probe.case
    if case.steps:
        yield "causality", lambda: _causal(probe)
    for side in ("left padding", "right padding"):
        if side in variants:
            where = side.split()[0]
            yield side, partial(_ignores_padding, probe, where)
    one_input = len(case.words) == 1 and case.words == tuple(case.given)
    if one_input and "left padding" in variants:
        yield "left padding alone", lambda: _near(probe.padded("left"), probe.alone())
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
    """Whether ``generate`` runs with left padding."""
    case = probe.case
    given = dict(case.given)
    mask = padding("left")
    if case.steps == "input_ids":
        given["attention_mask"] = mask
    else:
        given.pop(case.steps)
    model: Any = probe.module
    made = model.generate(**given, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    return bool(made.shape[1] >= 4)


def check(family: Family, backend: str) -> Outcome:
    """Check a family under a backend; any error except a refusal is the outcome ``FAILED``."""
    exact = get_backend(backend).capabilities.exact
    try:
        if exact:
            return exact_outcome(family, backend)
        outcome = approximate_outcome(family, backend)
    except Exception as error:  # it is recorded as failed, and the sweep continues
        return Outcome(FAILED, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    return outcome
