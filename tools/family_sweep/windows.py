"""Check exact backends with a window of their own in the families that decode.

The oracle is the family's eager attention under dense masks, which transformers makes and to which
:func:`banded_mask` adds the window: it shares no code with attnzoo. A window counts real tokens, a
window of the model counts positions.

Letters: B batch, T queries, S keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionMaskInterface, GenerationMixin
from transformers.masking_utils import eager_mask

import attnzoo
from attnzoo.errors import UnsupportedError
from attnzoo.hf import seam
from attnzoo.hf.layers import attention_layers
from tools.family_sweep.build import Family, attempt
from tools.family_sweep.check import DIFFERENT, EQUAL, REFUSED, TOLERANCE, Outcome, restore_eager
from tools.family_sweep.controls import distance
from tools.family_sweep.inputs import LENGTH, ROWS, padding, words
from tools.family_sweep.probe import Probe, Run, additive, dense_mask, tensors

WINDOW, SINKS = 4, 2
SPECS: dict[str, tuple[str, dict[str, Any]]] = {
    "flash window": ("flash", {"window": WINDOW}),
    "flash window sinks": ("flash", {"window": WINDOW, "num_sinks": SINKS}),
    "softmax window": ("softmax", {"window": WINDOW}),
    "softmax window sinks": ("softmax", {"window": WINDOW, "num_sinks": SINKS}),
}
PADDINGS = ("none", "left", "right", "inside")


def paddings(kind: str) -> Tensor:
    """Return a padding mask ``[B, S]``; inside: holes, as between the turns of a chat."""
    if kind == "none":
        return torch.ones(ROWS, LENGTH, dtype=torch.long)
    if kind != "inside":
        return padding(kind)
    mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
    mask[1, 3:6], mask[2, 2], mask[2, 5:9] = 0, 0, 0
    return mask


def band(real: Tensor, sinks: int, causal: bool = True) -> Tensor:
    """Return which keys a window contains, ``[B, 1, T, S]``, for as many queries as keys."""
    rank = real.long().cumsum(-1)  # of a token among the real ones, from 1
    distance = rank[:, :, None] - rank[:, None, :]
    near = distance < WINDOW if causal else distance.abs() <= WINDOW
    return (near | (rank <= sinks)[:, None, :])[:, None]


def banded_mask(sinks: int, **arguments: Any) -> Tensor:
    """Return transformers' additive mask, in which keys outside of the window are hidden.

    First tokens are visible outside of a sliding window of the model too.
    """
    mask = eager_mask(**{**arguments, "allow_is_bidirectional_skip": False})
    real = arguments.get("attention_mask")
    if real is None:
        real = torch.ones(1, arguments["kv_length"], dtype=torch.bool)
    real, rows = real.bool(), slice(-arguments["q_length"], None)
    causal = not bool((mask == 0).triu(1).any())
    visible = (mask == 0) & band(real, sinks, causal)[:, :, rows]
    size = arguments.get("local_size")
    if sinks and size is not None:
        keys = torch.arange(real.shape[1])
        earlier = (keys[:, None] >= keys)[rows] & real[:, None, None, :]
        sliding = earlier & (keys[:, None] - keys < size)[rows]
        if torch.equal(mask == 0, sliding.expand(mask.shape)):
            visible |= earlier & (real.cumsum(1) <= sinks)[:, None, None, :]
    return torch.zeros_like(mask).masked_fill(~visible, torch.finfo(mask.dtype).min)


@contextmanager
def eager_with_window(sinks: int) -> Iterator[list[int]]:
    """Add the window to all masks of eager attention; yields a list that grows with each mask."""
    made: list[int] = []

    def mask(**arguments: Any) -> Tensor:
        made.append(1)
        return banded_mask(sinks, **arguments)

    AttentionMaskInterface.register("eager", mask)
    try:
        yield made
    finally:
        AttentionMaskInterface.register("eager", eager_mask)


class WindowProbe(Probe):
    """A call of a decoder, with padding of all kinds, in one pass and in steps."""

    def whole(self, kind: str) -> list[Tensor]:
        """Return the outputs of one pass without a cache, zero at padding."""
        mask = paddings(kind)
        given = {**self.case.given, **self._mask(mask)}
        return self.of_tokens(tensors(self.call(given, **self._no_cache())), mask)

    def _mask(self, mask: Tensor) -> dict[str, Tensor]:
        return {} if bool(mask.all()) else {self.case.masks()[self.case.steps]: mask}

    def steps(self, kind: str, dense: Tensor | None = None) -> list[Tensor]:
        """Return the outputs of a prompt and of steps with a cache, zero at padding."""
        mask = paddings(kind)

        def masks(begin: int, end: int) -> dict[str, Tensor]:
            if dense is not None:
                return {"attention_mask": dense[:, :, begin:end, :end]}
            return {name: x[:, :end] for name, x in self._mask(mask).items()}

        return self.of_tokens([self.in_steps(masks)], mask)

    def first(self, kind: str) -> list[Tensor]:
        """Return the output of one pass that steps return too."""
        return self.whole(kind)[:1]

    def last(self) -> list[Tensor]:
        """Return the logits of the last token alone, which some models compute apart."""
        return [self.call(self.case.given, **self._no_cache(), logits_to_keep=1).logits]

    def under(self, dense: Tensor) -> list[Tensor]:
        """Return the outputs of one pass under a 4-D mask."""
        given = {**self.case.given, "attention_mask": dense}
        return self.of_tokens(tensors(self.call(given, **self._no_cache())), paddings("none"))


def decoder_probe(family: Family) -> WindowProbe | None:
    """Return the call of a family that decodes, or ``None``."""
    for number, probe in enumerate(family.probes):
        if (number, "decoding") in family.expected and not probe.case.part:
            return WindowProbe(family.model, probe.case)
    return None


def window_outcome(family: Family, name: str) -> Outcome:
    """Compare a window with the oracle, with and without a cache, in all variants."""
    probe = decoder_probe(family)
    if probe is None:
        return Outcome(REFUSED, "the family does not decode")
    backend, options = SPECS[name]
    sinks = options.get("num_sinks", 0)
    expected, stepwise = oracle(family, probe, sinks), sound_steps(family, probe)
    try:
        attnzoo.swap(family.model, backend, **options)
    except UnsupportedError as error:
        return Outcome(REFUSED, str(error))
    outcome, wrong = Outcome(EQUAL), list[str]()
    for variant, (run, wanted) in comparisons(family, probe, expected, stepwise).items():
        try:
            right = wanted()
        except UnsupportedError as error:
            outcome.refused[variant] = str(error)
            continue
        except Exception:  # the model's own code may not support the variant
            continue
        try:
            error_size = distance(run(), right)
        except UnsupportedError as error:
            outcome.refused[variant] = str(error)
            continue
        except Exception as error:  # a defect
            wrong.append(f"{variant}: {type(error).__name__}: {error}")
            continue
        if error_size > TOLERANCE:
            wrong.append(f"{variant}: off by {error_size:.1e}")
        else:
            outcome.checked.append(variant)
    if wrong:
        return replace(outcome, outcome=DIFFERENT, reason="; ".join(wrong))
    if not outcome.checked:
        return replace(outcome, outcome=REFUSED, reason=next(iter(outcome.refused.values()), ""))
    return outcome


def oracle(family: Family, probe: WindowProbe, sinks: int) -> dict[str, list[Tensor]]:
    """Return the outputs of eager attention with the window, by variant.

    There are none where a sparse indexer selects keys: it would select among those of the window.
    """
    restore_eager(family.model)
    family.model.set_attn_implementation("eager")
    layers = map(family.model.get_submodule, family.layers)
    if any(seam.reads_name(layer, "indices") for layer in layers):
        return {}
    found: dict[str, list[Tensor] | None] = {}
    with eager_with_window(sinks) as made:
        for kind in PADDINGS:
            made.clear()
            output = attempt(partial(probe.whole, kind))
            found[kind] = output if made else None
    causal = all(layer.geometry.causal for layer in attention_layers(family.model))
    if causal and "attention_mask" in probe.takes and probe.case.kind == "text":
        both = dense_mask() & band(torch.ones(1, LENGTH), sinks)
        found["4-D"] = attempt(lambda: probe.under(additive(both)))
    return {variant: output for variant, output in found.items() if output is not None}


def sound_steps(family: Family, probe: WindowProbe) -> set[str]:
    """Return the variants in which steps of the stock model equal one pass of it."""
    restore_eager(family.model)
    family.model.set_attn_implementation("eager")
    runs: dict[str, tuple[Run, Run]] = {
        kind: (partial(probe.steps, kind), partial(probe.first, kind)) for kind in PADDINGS
    }
    dense = additive(dense_mask())
    runs["4-D"] = partial(probe.steps, "none", dense), lambda: probe.under(dense)[:1]
    found = set()
    for kind, (steps, whole) in runs.items():
        ours, right = attempt(steps), attempt(whole)
        if ours is not None and right is not None and distance(ours, right) <= TOLERANCE:
            found.add(kind)
    return found


def comparisons(
    family: Family, probe: WindowProbe, expected: dict[str, list[Tensor]], stepwise: set[str]
) -> dict[str, tuple[Run, Run]]:
    """Return by variant: functions for the outputs of the swap, and for what they must equal."""
    found: dict[str, tuple[Run, Run]] = {}
    for kind in PADDINGS:
        if kind in expected:
            found[f"{kind} padding"] = (
                partial(probe.whole, kind),
                partial(expected.__getitem__, kind),
            )
        if kind in stepwise:
            whole = partial(probe.first, kind)
            found[f"steps, {kind} padding"] = partial(probe.steps, kind), whole
    if "logits_to_keep" in probe.takes:
        found["logits_to_keep=1"] = probe.last, lambda: [probe.first("none")[0][:, -1:]]
    if "4-D" in expected:
        visible = dense_mask()
        for name, mask in (("bool", visible), ("float", additive(visible))):
            found[f"{name} 4-D mask"] = (
                partial(probe.under, mask),
                partial(expected.__getitem__, "4-D"),
            )
            if "4-D" in stepwise:
                steps = partial(probe.steps, "none", mask)
                found[f"steps, {name} 4-D mask"] = steps, lambda: expected["4-D"][:1]
    if isinstance(family.model, GenerationMixin) and "left" in stepwise:
        cached, whole = (partial(_generate, family.model, use) for use in (True, False))
        found["generate"] = cached, whole
    return found


def _generate(model: Any, use_cache: bool) -> list[Tensor]:
    """Return greedy tokens after a prompt with left padding, as floats."""
    options = {"max_new_tokens": 8, "do_sample": False, "use_cache": use_cache}
    with torch.no_grad():
        return [model.generate(words(), attention_mask=padding("left"), **options).float()]
