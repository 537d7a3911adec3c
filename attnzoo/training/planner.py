"""Measurements that a plan is chosen by: how predictions change with other attention in layers.

A window of 128 tokens changes nothing in rows of 128 tokens: its loss there is 0, and says nothing
about the length for which it is meant. A candidate is therefore judged only if

- at least half of the tokens of the rows have keys that it does not read, found as the first
  position at which its predictions differ from softmax's, and
- at the length that the user means, its cache is smaller than softmax's, or its forward pass is
  clearly faster (:mod:`attnzoo.evaluation.margins`).

Beside each candidate stands the window of equal memory, which needs no training.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attnzoo.errors import SpecError
from attnzoo.evaluation.equal_memory import EXACT, EqualWindow
from attnzoo.evaluation.margins import Difference, mean_of, paired, speedup
from attnzoo.evaluation.rows import Rows, contributions, predictions, require_finite
from attnzoo.hf.layers import attention_layers
from attnzoo.hf.saving.files import saved_dtype
from attnzoo.hf.swap import restore, swap
from attnzoo.spec import AttentionSpec
from attnzoo.training.distil import token_divergence
from attnzoo.training.transfer import swapped_layers, trainable_layers

SAME = 1e-6  # nats; below it, predictions are equal up to rounding
ROUNDS = 6  # of timed forward passes
OnStep = Callable[[str], None]
Chosen = Mapping[int, str]  # candidates by layer; the other layers have softmax


def weights_fingerprint(model: nn.Module, *, backends: bool = False) -> str:
    """Return a hash of a model's weights, 16 hexadecimal digits; with those of ``backends`` or not.

    A gigabyte takes about a second. The hash, unlike sums, does not depend on the thread count, nor
    on whether weights of 16 bits are held in 32.
    """
    digest = hashlib.sha256()
    for name, x in sorted(model.state_dict().items()):
        if backends or ".attnzoo." not in name:
            digest.update(name.encode())
            x = x.float() if x.is_floating_point() and x.element_size() == 2 else x
            digest.update(x.contiguous().view(-1).view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest()[:16]


def require_trained(
    model: nn.Module, states: Mapping[str, Mapping[str, Tensor]], folder: Path
) -> None:
    """Raise ``SpecError`` if saved states, by layer, are those of a fresh swap, ``model``."""
    layers, dtype = swapped_layers(model), saved_dtype(folder)
    for name, state in states.items():
        start = layers[name].state_dict()
        if any(not torch.equal(x.to(dtype), start[key].to(dtype)) for key, x in state.items()):
            return
    raise SpecError(
        f"The layers of {str(folder)!r} are as a swap starts, not trained; give a run of `attnzoo "
        "recover` with transfer"
    )


class Planner:
    """Measures how a model's predictions change with other attention in some layers, each once.

    Args:
        model: A causal model with softmax attention.
        rows: Rows to measure on; each document is measured as if it were alone.
        on_step: Called with a description of each measurement.
    """

    def __init__(self, model: Any, rows: Rows, on_step: OnStep = lambda text: None) -> None:
        self.model, self.rows, self.on_step = model.eval(), rows, on_step
        self.exact = self._logits()
        self._measured: dict[frozenset[tuple[int, str]], Tensor] = {}

    def changed(self, chosen: Chosen) -> AbstractContextManager[None]:
        """Context in which the model has the candidates of these layers, and softmax elsewhere."""
        raise NotImplementedError

    @torch.no_grad()
    def token_divergences(self, chosen: Chosen) -> Tensor:
        """Return the KL of each prediction with these layers' candidates, ``[B, T]``, on the CPU.

        Raises:
            NonFiniteError: The predictions are not finite.
        """
        key = frozenset(chosen.items())
        if key not in self._measured:
            layers = {x: [str(n) for n in chosen if chosen[n] == x] for x in chosen.values()}
            text = "; ".join(f"{x} in layer {', '.join(n)}" for x, n in layers.items())
            self.on_step(text or "softmax in all layers")
            with self.changed(chosen):
                pairs = zip(self._logits(), self.exact, strict=True)
            kl = torch.cat([token_divergence(found, exact).cpu() for found, exact in pairs])
            mean = float(kl.mean())
            require_finite(mean, f"KL of the predictions with {text or 'softmax'}")
            self._measured[key] = kl
        return self._measured[key]

    def row_divergences(self, chosen: Chosen) -> list[float]:
        """Return the contribution of each row to :meth:`divergence`, which is their mean."""
        return contributions(list(self.token_divergences(chosen)))

    def divergence(self, chosen: Chosen) -> float:
        """Return the KL of the predictions with these layers' candidates, in nats."""
        return mean_of(self.row_divergences(chosen)).mean

    def measure(self, numbers: Sequence[int], names: Iterable[str]) -> list[dict[str, Any]]:
        """Measure each layer with each candidate; return ``Plan.layers``."""
        found = []
        for n in numbers:
            rows = {name: self.row_divergences({n: name}) for name in names}
            alone = {name: mean_of(x).mean for name, x in rows.items()}
            found.append({"layer": n, "alone": alone, "alone_rows": rows})
        return found

    def restore_softmax(self, chosen: Chosen, fits: Callable[[Chosen], bool]) -> dict[int, str]:
        """Restore softmax layer by layer, where that reduces the KL most, as long as it fits."""
        best = dict(chosen)
        while True:
            rests = [{n: x for n, x in best.items() if n != other} for other in best]
            if not (rests := [rest for rest in rests if fits(rest)]):
                return best
            best = min(rests, key=self.divergence)

    @torch.no_grad()
    def _logits(self) -> list[Tensor]:
        return [logits for _, logits in predictions(self.model, self.rows, 4)]


class Transferred(NamedTuple):
    """What transfer has trained: one attention in all layers."""

    folder: str  # of the run
    name: str  # the attention, as --candidate takes it
    weights: str  # fingerprint of the model's own weights
    states: Mapping[str, Mapping[str, Tensor]]  # state_dict of each backend, by the layer's name


class SwapPlanner(Planner):
    """Planner of a swap: layers are as a swap starts, or as transfer has trained them.

    Args:
        model: A model that is not swapped.
        rows: As of :class:`Planner`.
        transferred: Trained layers, a candidate.
        on_step: As of :class:`Planner`.

    Raises:
        SpecError: The model has no attention layers, or other weights than the trained layers'.
    """

    def __init__(
        self,
        model: Any,
        rows: Rows,
        transferred: Transferred | None = None,
        on_step: OnStep = lambda text: None,
    ) -> None:
        self.transferred, self.weights = transferred, weights_fingerprint(model)
        if transferred is not None and transferred.weights != self.weights:
            raise SpecError(
                f"{transferred.folder!r} has other weights than the model; give a run of this "
                "model with transfer only (--max-steps 0, or --train extras)"
            )
        self.numbers = sorted({x.geometry.layer for x in attention_layers(model)})
        if not self.numbers:
            raise SpecError(f"{type(model).__name__} has no attention layers to plan for")
        super().__init__(model, rows, on_step)

    @contextmanager
    def changed(self, chosen: Chosen) -> Iterator[None]:
        """Context in which the model is swapped."""
        swap(self.model, swap_spec(chosen))
        try:
            trained = self.transferred
            for name, backend in swapped_layers(self.model).items():
                if trained is not None and chosen.get(backend.geometry.layer) == trained.name:
                    backend.load_state_dict(trained.states[name])
            yield
        finally:
            restore(self.model)

    def refuse_untrained(self, names: Iterable[str]) -> None:
        """Raise an error for a candidate that transfer would train, beside a trained one."""
        if self.transferred is None:
            return
        for name in names:
            with self.changed(dict.fromkeys(self.numbers, name)):
                if name != self.transferred.name and trainable_layers(self.model):
                    raise SpecError(
                        f"The candidate {name!r} has parameters that are not trained, so it cannot "
                        "be compared with transferred layers; leave it out, or plan without --from"
                    )

    @torch.no_grad()
    def speedup(self, name: str, length: int) -> Difference:
        """Return the logarithm of softmax's time of a forward pass divided by a candidate's."""
        tokens = self.rows.tokens.flatten().long()
        row = tokens.repeat(-(-length // len(tokens)))[:length][None]
        seconds: dict[str, list[float]] = {EXACT: [], name: []}
        for _ in range(ROUNDS):
            for one, chosen in ((EXACT, {}), (name, dict.fromkeys(self.numbers, name))):
                with self.changed(chosen):
                    self.model(row, use_cache=False, logits_to_keep=1)  # allocates buffers
                    start = time.perf_counter()
                    self.model(row, use_cache=False, logits_to_keep=1)
                    seconds[one].append(time.perf_counter() - start)
        return speedup(seconds[EXACT], seconds[name])


def candidate_spec(name: str) -> AttentionSpec:
    """Return the spec of a candidate in all layers; like a saved one, it cannot import code."""
    return AttentionSpec.from_dict({"backend": name})


def swap_spec(chosen: Chosen) -> AttentionSpec:
    """Return the spec with these layers' candidates and exact attention elsewhere."""
    return AttentionSpec.from_dict(
        {"backend": EXACT, "layers": {str(n): name for n, name in sorted(chosen.items())}}
    )


def why_not_judged(kl: Tensor, rows: Rows) -> str:
    """Return why rows cannot judge a candidate, and which rows can, or ``""``.

    Args:
        kl: KL of each prediction with the candidate in all layers, ``[B, T]``.
        rows: The rows.
    """
    positions = rows.positions.flatten()
    different, longest = positions[kl.flatten() > SAME], max(map(len, rows.documents()))
    what = f"rows of {longest:,} tokens"
    advice = "rows of {:,} tokens or more (--max-length)"
    if rows.is_packed:
        what = f"documents of at most {longest:,} tokens"
        advice = "documents of {:,} tokens or more, in rows as long (--max-length)"
    if not len(different):
        return (
            f"it reads every key of {what}, and its loss there is 0 whatever the model; measure it "
            f"on {advice.format(2 * longest + 1)}"
        )
    first = int(different.min())
    if 2 * (far := int((positions >= first).sum())) < len(positions):
        return (
            f"only {far:,} of {len(positions):,} tokens of {what} have keys that it does not "
            f"read; measure it on {advice.format(2 * first)}"
        )
    return ""


def why_useless(planner: SwapPlanner, name: str, equal: EqualWindow, limit: int | None) -> str:
    """Return why a candidate saves neither memory nor time at a length, or ``""``.

    Args:
        planner: The planner.
        name: The candidate.
        equal: Its window of equal memory at that length.
        limit: Positions of the model; ``None`` without a limit.
    """
    if equal.widest:
        return ""
    faster = planner.speedup(name, min(equal.length, limit or equal.length))
    if faster.is_positive:
        return ""
    return (
        f"at {equal.length:,} tokens its cache is not smaller than softmax's, and a forward pass "
        f"is not measured to be faster ({100 * math.expm1(faster.mean):+.0f}% ± "
        f"{100 * faster.error:.0f}%); give the length for which it is meant (--target-length)"
    )


def beside_window(planner: SwapPlanner, name: str, equal: EqualWindow) -> dict[str, Any]:
    """Return what a candidate in all layers saves, and the window of equal memory beside it."""
    kl = planner.row_divergences(dict.fromkeys(planner.numbers, name))
    windows = {n: f"{EXACT}:window={size}" for n, size in equal.windows.items() if size is not None}
    window_kl: list[float] = []
    if windows and equal.widest < max(map(len, planner.rows.documents())):
        window_kl = planner.row_divergences(windows)
    more = paired(kl, window_kl)
    if not windows:
        winner = "its cache is as large as softmax's"
    elif not window_kl:
        winner = f"the rows are not longer than the window ({equal})"
    elif not more.is_clear:
        winner = "no difference measured"
    else:
        winner = "the window" if more.mean > 0 else "the candidate"
    return {
        "name": name,
        "length": equal.length,
        "cache_bytes": equal.swap_bytes,
        "exact_bytes": equal.exact_bytes,
        "kl_rows": kl,
        "window": str(equal),
        "window_rows": window_kl,
        "winner": winner,
    }


def judge(
    planner: SwapPlanner, equal: Mapping[str, EqualWindow], limit: int | None
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Return what candidates save, and those that save nothing, or that the rows cannot judge.

    Args:
        planner: The planner.
        equal: The window of equal memory of each candidate.
        limit: As of :func:`why_useless`.

    Returns:
        :func:`beside_window` of the candidates by name, and the reasons to leave out the others.

    Raises:
        SpecError: No candidate is left.
    """
    found, left_out = {}, {}
    for name in equal:
        kl = planner.token_divergences(dict.fromkeys(planner.numbers, name))
        reason = why_not_judged(kl, planner.rows) or why_useless(planner, name, equal[name], limit)
        if reason:
            left_out[name] = reason
        else:
            found[name] = beside_window(planner, name, equal[name])
    if not found:
        reasons = "; ".join(f"{name}: {why}" for name, why in left_out.items())
        raise SpecError(f"No candidate is left to plan with. {reasons}")
    return found, left_out
