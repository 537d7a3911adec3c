"""Choice of the recurrent layers of a student, by what a transfer leaves of their error.

A student whose layers were transferred, and not yet distilled, has layers that each imitate one
attention layer of the teacher. Any of them can therefore stand in the teacher. A plan measures how
the teacher's predictions change, and restores softmax greedily where that reduces the change most.
Source: arXiv:2512.20569.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from attnzoo.errors import ConfigError, SpecError
from attnzoo.evaluation.rows import Rows
from attnzoo.hf.models.speed_up import speed_up
from attnzoo.hf.pretrained import load_pretrained
from attnzoo.hf.stock.gated_delta_net import recurrent_layers, student_weights
from attnzoo.hf.stock.layer_inputs import softmax_layer
from attnzoo.training.plan import Plan, count_exact_layers
from attnzoo.training.planner import Chosen, OnStep, Planner
from attnzoo.training.student import require_pair

RECURRENT = "recurrent"  # the candidate


class StudentPlanner(Planner):
    """Planner of a teacher whose layers a transferred student replaces.

    Args:
        teacher: The teacher; its outputs change only inside of a measurement.
        student: A student of it after transfer.
        rows: As of :class:`Planner`.
        on_step: As of :class:`Planner`.
    """

    def __init__(
        self, teacher: Any, student: nn.Module, rows: Rows, on_step: OnStep = lambda text: None
    ) -> None:
        super().__init__(teacher, rows, on_step)
        self.layers = recurrent_layers(student)

    @contextmanager
    def changed(self, chosen: Chosen) -> Iterator[None]:
        """Context in which attention layers of the teacher return what the student's return."""
        with ExitStack() as stack:
            for number in chosen:

                def replace(
                    own: Any, args: Any, kwargs: Any, output: Any, number: int = number
                ) -> Any:
                    hidden = args[0] if args else kwargs["hidden_states"]
                    return (self.layers[number](hidden), *output[1:])

                layer = softmax_layer(self.model, number)
                stack.callback(layer.register_forward_hook(replace, with_kwargs=True).remove)
            yield


def plan_student(
    path: Path,
    run: Path,
    rows: Rows,
    *,
    keep_softmax: float = 0.25,
    on_step: OnStep = lambda text: None,
) -> Plan:
    """Measure the layers of a transferred student and choose those that stay recurrent.

    Args:
        path: Folder of the teacher.
        run: Folder of the student: a run of ``recover STUDENT --teacher DIR`` with transfer only.
            Its full layers keep softmax.
        rows: Rows to measure on; each document is measured as if it were alone.
        keep_softmax: Fraction or number of layers that keep softmax, of all layers.
        on_step: Called with a description of each measurement.

    Raises:
        SpecError: The models do not match, or the student was distilled.
        ConfigError: The student has fewer recurrent layers, or none would be recurrent.
    """
    require_pair(run, path)
    teacher: Any = load_pretrained(AutoModelForCausalLM, path, dtype=torch.float32)
    student: Any = load_pretrained(AutoModelForCausalLM, run, dtype=torch.float32).eval()
    _require_transfer_only(teacher, student, run)
    planner = StudentPlanner(teacher, speed_up(student), rows, on_step)
    known, depth = sorted(planner.layers), int(teacher.config.num_hidden_layers)
    count = depth - count_exact_layers(keep_softmax, depth)
    if not 1 <= count <= len(known):
        raise ConfigError(
            f"keep_softmax={keep_softmax} leaves {count} of {depth} layers recurrent, but the "
            f"student has transferred {len(known)}; keep at least {depth - len(known)} and at "
            f"most {depth - 1} layers"
        )
    layers = planner.measure(known, [RECURRENT])
    everywhere = dict.fromkeys(known, RECURRENT)
    chosen = planner.restore_softmax(everywhere, lambda rest: len(rest) >= count)
    numbers = ",".join(map(str, chosen))
    return Plan.made(planner, chosen, recurrent=numbers, layers=layers, transfer_from=str(run))


def _require_transfer_only(teacher: Any, student: Any, run: Path) -> None:
    """Raise ``SpecError`` if other weights than those of the recurrent layers were trained."""
    exact = student_weights(teacher.state_dict(), teacher.config, {})
    for name, weight in student.state_dict().items():
        if name in exact and not torch.equal(weight, exact[name]):
            raise SpecError(
                f"{str(run)!r} has other weights than the teacher in {name}, so its recurrent "
                "layers no longer imitate the teacher's; give a run with transfer only: attnzoo "
                "recover STUDENT --teacher DIR --max-steps 0"
            )
