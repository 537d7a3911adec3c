"""Check backends with a window of their own in the families that have windows themselves.

There are two oracles. The exact windows of ``flash`` and ``longformer`` must equal the family's
eager attention under dense masks, to which :func:`banded_mask` adds the window. Under the other
backends a row with padding must equal its real tokens run alone, at the positions that they have in
the row; the family's own window counts padding, so that :func:`masks_of_row` makes its masks.

Letters: B batch, T tokens of a row, N real tokens of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import attnzoo
from attnzoo.errors import UnsupportedError
from attnzoo.hf.attention.call import layer_backend
from attnzoo.hf.layers import attention_layers
from attnzoo.hf.masks import make_mask
from attnzoo.hf.models.rows import has_rotary_positions
from attnzoo.hf.names import NAME
from tools.family_sweep.build import Family, NotBuiltError, attempt, make_model
from tools.family_sweep.check import (
    DIFFERENT,
    EQUAL,
    IN_PART,
    REFUSED,
    TOLERANCE,
    UNPROVEN,
    Outcome,
    restore_eager,
)
from tools.family_sweep.controls import distance
from tools.family_sweep.probe import additive, layers_run, tensors
from tools.family_sweep.windows import PADDINGS, WINDOW, WindowProbe, band, paddings

GLOBAL = 2
SPECS: dict[str, tuple[str, dict[str, Any]]] = {
    "flash": ("flash", {"window": WINDOW}),
    "longformer": ("longformer", {"window": WINDOW}),
    "longformer global": ("longformer", {"window": WINDOW, "num_global": GLOBAL}),
    "block_sparse": (
        "block_sparse",
        {"window": 3, "top_k": 1, "block_size": 2, "num_sinks": 1, "score": "bounds"},
    ),
    "reformer": (
        "reformer",
        {"window": 3, "chunk_size": 3, "num_hashes": 2, "decoding": "hashed"},
    ),
    "linear": ("linear", {"window": 3}),
    "gated_linear": ("gated_linear", {"window": 3}),
    "delta": ("delta", {"window": 3, "short_convolution": 2}),
    "performer": ("performer", {"window": 3}),
}
DENSE = ("flash", "longformer")  # backends with that oracle
POSITIONS = "position_ids"


def has_window(model: PreTrainedModel) -> bool:
    """Return whether a layer of a model attends within a window or a chunk."""
    geometries = [layer.geometry for layer in attention_layers(model)]
    return any(x.window is not None or x.chunk_size is not None for x in geometries)


def types_with_windows() -> list[str]:
    """Return the model types of which a layer attends within a window or a chunk."""
    found = []
    for name in CONFIG_MAPPING:
        try:
            model = make_model(name, gain=1.0)
        except NotBuiltError:
            continue
        if model is not None and has_window(model):
            found.append(name)
    return found


class RowProbe(WindowProbe):
    """A call with token ids, with padding of all kinds, with and without positions."""

    def arguments(self, kind: str, given: bool) -> dict[str, Any]:
        """Return the padding mask and the positions of a call."""
        mask = paddings(kind)
        counted = {POSITIONS: (mask.cumsum(1) - 1).clamp(min=0)} if given else {}
        return {self.case.masks()[self.case.steps]: mask, **counted}

    def one_pass(self, kind: str, given: bool) -> list[Tensor]:
        """Return the first output of one pass, zero at padding."""
        arguments = {**self.case.given, **self.arguments(kind, given), **self._no_cache()}
        return self.of_tokens(tensors(self.call(arguments)), paddings(kind))[:1]

    def in_parts(self, kind: str, given: bool) -> list[Tensor]:
        """Return the output of a prompt and of steps with a cache, zero at padding."""
        arguments = self.arguments(kind, given)
        positions = arguments.pop(POSITIONS, None)

        def more(begin: int, end: int) -> dict[str, Any]:
            new = {} if positions is None else {POSITIONS: positions[:, begin:end]}
            return new | {name: x[:, :end] for name, x in arguments.items()}

        return self.of_tokens([self.in_steps(more)], paddings(kind))

    def rows_alone(self, kind: str, rule: str) -> list[Tensor]:
        """Return the first output of each row's real tokens alone, zero at padding."""
        mask, name, rows = paddings(kind), self.case.steps, []
        for row, real in enumerate(mask.bool()):
            index = real.nonzero()[:, 0]
            given = {key: x[row : row + 1] for key, x in self.case.given.items()}
            given[name] = given[name][:, index]
            # without a mask, positions with gaps would separate documents
            given[self.case.masks()[name]] = torch.ones_like(index)[None]
            if rule:
                ranks = torch.arange(len(index))
                counts = {"start": index - index[0], "row": index, "real": ranks}
                given[POSITIONS] = counts[rule][None]
            with masks_of_row(index - index[0]):
                found = tensors(self.call(given, **self._no_cache()))
            output = next(x for x in found if x.ndim > 2 and x.shape[:2] == (1, len(index)))
            whole = output.new_zeros(1, len(real), *output.shape[2:])
            whole[:, index] = output
            rows.append(whole)
        return [torch.cat(rows)]


@contextmanager
def masks_of_row(index: Tensor) -> Iterator[None]:
    """Make masks of the tokens at ``index`` of a row, ``[N]``, which have gaps between them."""
    length = int(index[-1]) + 1

    def visible(arguments: dict[str, Any]) -> Tensor:
        whole = {"q_length": length, "kv_length": length, "attention_mask": None}
        whole["allow_is_bidirectional_skip"] = False
        return (eager_mask(**{**arguments, **whole}) == 0)[:, :, index][..., index]

    def of_swap(**arguments: Any) -> Any:
        made = make_mask(**arguments)
        if len(index) == length or (made.window is None and made.function is None):
            return made
        seen = visible(arguments)
        return replace(made, window=None, function=lambda: seen, function_name="a row with gaps")

    AttentionMaskInterface.register("eager", lambda **given: additive(visible(given)))
    AttentionMaskInterface.register(NAME, of_swap)
    try:
        yield
    finally:
        AttentionMaskInterface.register("eager", eager_mask)
        AttentionMaskInterface.register(NAME, make_mask)


@contextmanager
def eager_with_window(num_global: int, *, sliding: bool, full: bool) -> Iterator[None]:
    """Add the window, and global tokens, to the masks of the layers that the backend runs."""

    def banded_mask(**arguments: Any) -> Tensor:
        mask = eager_mask(**{**arguments, "allow_is_bidirectional_skip": False})
        if not (full if arguments.get("local_size") is None else sliding):
            return mask
        real = arguments.get("attention_mask")
        real = torch.ones(1, mask.shape[3]).bool() if real is None else real.bool()
        causal = not bool((mask == 0).triu(1).any())
        is_global = (real.cumsum(1) <= num_global)[:, None, :, None]
        return additive((mask == 0) & (band(real, num_global, causal) | is_global))

    AttentionMaskInterface.register("eager", banded_mask)
    try:
        yield
    finally:
        AttentionMaskInterface.register("eager", eager_mask)


def row_probe(family: Family) -> RowProbe | None:
    """Return a call of the whole model with token ids and a padding mask, or ``None``."""
    for probe in family.probes:
        case = probe.case
        if case.steps and not case.part and set(case.masks().values()) <= probe.takes.keys():
            return RowProbe(family.model, case)
    return None


class Reference:
    """What a family does under its own eager attention.

    Attributes:
        rules: By kind of padding, and whether positions are given: how positions of the tokens of
            a row are counted, so that the row alone gives the same; ``""`` if it takes none.
        in_steps: The kinds of which steps with a cache equal one pass.
    """

    def __init__(self, family: Family, probe: RowProbe) -> None:
        restore_eager(family.model)
        family.model.set_attn_implementation("eager")
        self.family, self.probe = family, probe
        self.rules: dict[tuple[str, bool], str] = {}
        self.in_steps: set[tuple[str, bool]] = set()
        takes_positions = POSITIONS in probe.takes
        for key in ((kind, given) for kind in PADDINGS for given in (False, takes_positions)):
            expected = attempt(partial(probe.one_pass, *key))
            if expected is None or key in self.rules:
                continue
            rules = ["real"] if key[1] else ["start", "row", "real"] if takes_positions else [""]
            for rule in rules:
                alone = attempt(partial(probe.rows_alone, key[0], rule))
                if alone is not None and distance(alone, expected) <= TOLERANCE:
                    self.rules[key] = rule
                    break
            steps = attempt(partial(probe.in_parts, *key))
            if steps is not None and distance(steps, expected) <= TOLERANCE:
                self.in_steps.add(key)

    def with_window(
        self, num_global: int, masks: set[bool]
    ) -> dict[tuple[str, bool], list[Tensor]]:
        """Return the outputs of one pass with the window in these masks: full or sliding ones."""
        restore_eager(self.family.model)
        self.family.model.set_attn_implementation("eager")
        with eager_with_window(num_global, sliding=False in masks, full=True in masks):
            found = {key: attempt(partial(self.probe.one_pass, *key)) for key in self.rules}
        return {key: x for key, x in found.items() if x is not None}


def own_window_outcome(reference: Reference, name: str) -> Outcome:
    """Compare a backend with its oracle, in all variants; layers that it refuses stay softmax."""
    model, probe = reference.family.model, reference.probe
    backend, options = SPECS[name]
    restore_eager(model)
    outcome, expected = Outcome(EQUAL), dict[tuple[str, bool], list[Tensor]]()
    try:
        attnzoo.swap(model, backend, **options)
    except UnsupportedError as error:
        attnzoo.swap(model, backend, else_="softmax", **options)
        outcome = Outcome(IN_PART, str(error))
    try:
        masks = _masks(model, backend, layers_run(model, partial(probe.one_pass, "none", False)))
    except UnsupportedError as error:
        return Outcome(REFUSED, str(error))
    if not masks[True]:
        return replace(outcome, outcome=REFUSED)
    if backend in DENSE and masks[True] & masks[False]:
        return replace(outcome, outcome=UNPROVEN)
    if backend in DENSE:
        expected = reference.with_window(options.get("num_global", 0), masks[True])
        attnzoo.swap(model, backend, else_="softmax", **options)
    else:
        _change_initial_values(model)
    wrong = []
    for key, rule in reference.rules.items():
        if rule == "row" and backend != "flash" and has_rotary_positions(model):
            continue  # absolute positions (Dory): a swap counts them from the first real token
        variant = f"{key[0]} padding{', positions' if key[1] else ''}"
        try:
            right = expected[key] if expected else probe.rows_alone(key[0], rule)
            runs = {variant: probe.one_pass}
            if key in reference.in_steps:
                runs[f"steps, {variant}"] = probe.in_parts
            for label, run in runs.items():
                error_size = distance(run(*key), right)
                if error_size > 10 * TOLERANCE:  # positions move to the first real token
                    wrong.append(f"{label}: off by {error_size:.1e}")
                outcome.checked.append(label)
        except UnsupportedError as error:
            outcome.refused[variant] = str(error)
        except Exception as error:  # a defect
            wrong.append(f"{variant}: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
    if wrong:
        return replace(outcome, outcome=DIFFERENT, reason="; ".join(wrong))
    if not outcome.checked:
        return replace(outcome, outcome=REFUSED, reason=next(iter(outcome.refused.values()), ""))
    return outcome


def _masks(model: PreTrainedModel, backend: str, called: set[str]) -> dict[bool, set[bool]]:
    """Return whether masks are full ones, of the layers with the backend and of the others."""
    found: dict[bool, set[bool]] = {True: set(), False: set()}
    for layer in attention_layers(model):
        size = layer.geometry.window or layer.geometry.chunk_size
        if layer.name in called:
            found[layer_backend(layer.module).name == backend].add(size is None)
    return found


def own_window_outcomes(family: Family) -> dict[str, Outcome]:
    """Return the outcome of each spec; empty without a window or a call with token ids."""
    probe = row_probe(family)
    if probe is None or not has_window(family.model):
        return {}
    reference = Reference(family, probe)
    return {name: own_window_outcome(reference, name) for name in SPECS} if reference.rules else {}


def _change_initial_values(model: torch.nn.Module) -> None:
    """Change what backends added, so that no weight is 0."""
    generator = torch.Generator().manual_seed(7)
    for name, x in model.named_parameters():
        if f".{NAME}." in name:
            x.data += 0.3 * torch.randn(x.shape, generator=generator)
