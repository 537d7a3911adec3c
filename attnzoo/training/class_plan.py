"""A plan that a stock class holds: windows of one size in some layers, within a cache limit."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from attnzoo.errors import ConfigError, UnsupportedError
from attnzoo.hf.stock.classes import Windows, classes_for, stock_class
from attnzoo.spec import AttentionSpec
from attnzoo.training.budget import CacheBudget
from attnzoo.training.plan import LayerMeasure, Planner

SIZES = (16, 32, 64, 128, 256, 512, 1024)  # windows in tokens


def window_candidates(family: str, to: str) -> list[str]:
    """Return the candidates of a plan for a stock class, as the command line takes them.

    Args:
        family: ``model_type`` of the model.
        to: The class.

    Raises:
        UnsupportedError: The class does not hold the model with windows in some layers.
    """
    if family in {to, *stock_class(to).takes} and stock_class(to).windows is Windows.SOME:
        return [f"flash:window={size}" for size in SIZES]
    others = [x.family for x in classes_for(family) if x.windows is Windows.SOME]
    advice = f"give one of {', '.join(others)}" if others else "plan without --to"
    raise UnsupportedError(
        f"No plan can be made for a {family} in the class {to}, which does not hold it with "
        f"windows of one size in any of its layers; {advice}"
    )


@dataclass(frozen=True, kw_only=True)
class OneWindow:
    """A limit on the cache under which all layers have the same candidate, or softmax.

    Attributes:
        budget: The limit.
    """

    budget: CacheBudget

    def check(self, path: Path, candidates: Iterable[AttentionSpec]) -> None:
        """Raise an error if windows of the smallest size in all layers exceed the limit."""
        self.budget.check(path, candidates)

    def choose(self, planner: Planner, measures: Sequence[LayerMeasure]) -> dict[int, str]:
        """Return the candidates of the layers that are not exact, of the best size.

        For each size, the budget chooses the layers; the size whose predictions have the least KL
        is taken.

        Raises:
            ConfigError: Windows of the smallest size in all layers exceed the limit.
        """
        found: list[tuple[float, dict[int, str]]] = []
        errors = []
        for name, candidate in planner.candidates.items():
            only = copy.copy(planner)
            only.candidates = {name: candidate}
            own = [replace(x, alone={name: x.alone[name]}) for x in measures]
            try:
                chosen = self.budget.choose(only, own)
            except ConfigError as error:
                errors.append(error)
                continue
            found.append((planner.divergence(chosen), chosen))
        if not found:
            raise errors[0]
        return min(found, key=lambda x: x[0])[1]
