"""Choice of the recurrent layers of a student, by what a transfer leaves of their error.

A student whose layers were transferred, and not yet distilled, has layers that each imitate one
attention layer of the teacher. Any of them can therefore stand in the teacher. A plan measures how
the teacher's predictions change, and restores softmax greedily where that reduces the change most.
Source: arXiv:2512.20569. Letters: B rows, T tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from attnzoo.errors import ConfigError, SpecError
from attnzoo.evaluation.rows import Rows, predictions, require_finite
from attnzoo.hf.models.speed_up import speed_up
from attnzoo.hf.pretrained import load_pretrained
from attnzoo.hf.stock.layer_inputs import softmax_layer
from attnzoo.hf.stock.recurrent import recurrent_layers, student_weights
from attnzoo.report.atomic_write import atomic_write
from attnzoo.report.table import Table
from attnzoo.training.candidates import token_divergence
from attnzoo.training.plan import count_exact_layers
from attnzoo.training.student import require_pair

BATCH = 4  # rows in one forward pass


@dataclass(frozen=True, kw_only=True)
class StudentPlan:
    """The recurrent layers that a plan has chosen, with the measurements.

    Attributes:
        recurrent: Their numbers.
        divergence: KL of the teacher's predictions in nats with all of them recurrent.
        alone: KL when only this layer is recurrent, by layer.
        restored: KL when all layers that were transferred are recurrent except this one.
        depth: Number of layers of the model.
        transfer_from: Folder of the run whose transferred layers were measured.
    """

    recurrent: list[int]
    divergence: float
    alone: dict[int, float]
    restored: dict[int, float]
    depth: int
    transfer_from: str

    @property
    def layers(self) -> str:
        """The layers as ``attnzoo convert --recurrent`` takes them."""
        return ",".join(map(str, self.recurrent))

    def write(self, path: Path) -> None:
        """Write the plan as JSON, atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        data = {**asdict(self), "recurrent": self.layers}
        atomic_write(path, json.dumps(data, indent=2, allow_nan=False))

    def table(self) -> Table:
        """Return a table of the layers."""
        rows = []
        for number in range(self.depth):
            known = number in self.alone
            numbers = [f"{x[number]:.4f}" if known else "-" for x in (self.alone, self.restored)]
            choice = "recurrent" if number in self.recurrent else "softmax"
            rows.append([str(number), *numbers, choice])
        return Table(
            columns=("layer", "only it recurrent", "only it softmax", "choice"),
            rows=rows,
            title="KL of the predictions in nats after transfer",
            caption=f"under the plan, before distillation: {self.divergence:.4f} nats",
        )


class StudentPlanner:
    """Measures how recurrent layers of a transferred student change the teacher's predictions.

    Args:
        teacher: The teacher in evaluation mode; its outputs change only inside of a measurement.
        student: A student of it after transfer.
        rows: Rows to measure on; each document is measured as if it were alone.
        on_step: Called with a description of each measurement.
    """

    def __init__(
        self,
        teacher: nn.Module,
        student: nn.Module,
        rows: Rows,
        on_step: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.teacher, self.rows, self.on_step = teacher, rows, on_step
        self.layers = recurrent_layers(student)
        self.exact = self._logits()
        self._measured: dict[frozenset[int], float] = {}

    @torch.no_grad()
    def divergence(self, numbers: Sequence[int]) -> float:
        """Return the KL of the predictions with some layers recurrent, in nats; measured once.

        Raises:
            NonFiniteError: The predictions are not finite.
        """
        key = frozenset(numbers)
        if key not in self._measured:
            self._measured[key] = self._measure(numbers)
        return self._measured[key]

    def _measure(self, numbers: Sequence[int]) -> float:
        self.on_step(f"layers {', '.join(map(str, numbers))} recurrent")
        with self._recurrent(numbers):
            found = self._logits()
        pairs = zip(found, self.exact, strict=True)
        kl = torch.cat([token_divergence(*pair) for pair in pairs])
        value = float(kl[self.rows.counted.to(kl.device)].mean())
        require_finite(value, f"KL of the predictions with layers {numbers} recurrent")
        return value

    @contextmanager
    def _recurrent(self, numbers: Sequence[int]) -> Iterator[None]:
        """Context in which attention layers of the teacher return what the student's return."""

        def hook(layer: nn.Module) -> Any:
            def replace(own: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
                hidden = args[0] if args else kwargs["hidden_states"]
                return (layer(hidden), *output[1:])

            return replace

        handles = [
            softmax_layer(self.teacher, n).register_forward_hook(
                hook(self.layers[n]), with_kwargs=True
            )
            for n in numbers
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def choose(self, count: int) -> list[int]:
        """Return the numbers of ``count`` layers that stay recurrent, chosen greedily."""
        chosen = sorted(self.layers)
        while len(chosen) > count:
            left = {n: self.divergence([x for x in chosen if x != n]) for n in chosen}
            chosen.remove(min(left, key=lambda n: left[n]))
        return chosen

    @torch.no_grad()
    def _logits(self) -> list[Tensor]:
        return [logits for _, logits in predictions(self.teacher, self.rows, BATCH)]


def plan_student(
    path: Path,
    run: Path,
    rows: Rows,
    *,
    to: str,
    keep_softmax: float = 0.25,
    on_step: Callable[[str], None] = lambda text: None,
) -> StudentPlan:
    """Measure the layers of a transferred student and choose those that stay recurrent.

    Args:
        path: Folder of the teacher.
        run: Folder of the student: a run of ``recover STUDENT --teacher DIR`` with transfer only.
            Its full layers keep softmax.
        rows: Rows to measure on; each document is measured as if it were alone.
        to: The family of the student.
        keep_softmax: Fraction or number of layers that keep softmax, of all layers.
        on_step: Called with a description of each measurement.

    Raises:
        SpecError: The models do not match, or the student was distilled.
        ConfigError: The student has fewer recurrent layers, or none would be recurrent.
    """
    require_pair(run, path)
    teacher: Any = load_pretrained(AutoModelForCausalLM, path, dtype=torch.float32).eval()
    student: Any = load_pretrained(AutoModelForCausalLM, run, dtype=torch.float32).eval()
    if (family := student.config.model_type) != to:
        raise SpecError(
            f"{str(run)!r} holds a student of the class {family}, got --to {to}; give --to {family}"
        )
    _require_transfer_only(teacher, student, run)
    planner = StudentPlanner(teacher, speed_up(student), rows, on_step)
    known = sorted(planner.layers)
    depth = int(teacher.config.num_hidden_layers)
    count = depth - count_exact_layers(keep_softmax, depth)
    if not 1 <= count <= len(known):
        raise ConfigError(
            f"keep_softmax={keep_softmax} leaves {count} of {depth} layers recurrent, but the "
            f"student has transferred {len(known)}; keep at least {depth - len(known)} and at "
            f"most {depth - 1} layers"
        )
    alone = {n: planner.divergence([n]) for n in known}
    restored = {n: planner.divergence([x for x in known if x != n]) for n in known}
    chosen = planner.choose(count)
    return StudentPlan(
        recurrent=chosen,
        divergence=planner.divergence(chosen),
        alone=alone,
        restored=restored,
        depth=depth,
        transfer_from=str(run),
    )


def read_recurrent(path: Path) -> str | None:
    """Return the layers of a file that a :class:`StudentPlan` wrote; ``None`` of another file."""
    try:
        data = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None  # read_plan says what is wrong with it
    layers = data.get("recurrent") if isinstance(data, dict) else None
    return layers if isinstance(layers, str) else None


def _require_transfer_only(teacher: Any, student: Any, run: Path) -> None:
    """Raise ``SpecError`` if other weights than those of the recurrent layers were trained."""
    exact = student_weights(teacher.state_dict(), teacher.config, student.config.model_type, {})
    for name, weight in student.state_dict().items():
        if name in exact and not torch.equal(weight, exact[name]):
            raise SpecError(
                f"{str(run)!r} has other weights than the teacher in {name}, so its recurrent "
                "layers no longer imitate the teacher's; give a run with transfer only: attnzoo "
                "recover STUDENT --teacher DIR --distil-steps 0"
            )
