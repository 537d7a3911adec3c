"""What a task is: rows of tokens that are drawn, and the places where something is asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Generator, Tensor

from attnzoo.errors import SpecError, did_you_mean

ASKED_NOTHING = -100  # a label where nothing is asked, as cross-entropy takes it


class Rows(NamedTuple):
    """Rows of a task.

    Attributes:
        tokens: ``[N, T]``.
        labels: ``[N, T]``: the token that is asked for after each place, or ``ASKED_NOTHING``.
    """

    tokens: Tensor
    labels: Tensor


@dataclass(frozen=True, kw_only=True)
class Task:
    """A generated task.

    Attributes:
        name: As the command line has it.
        about: What is asked and where it is from, in one line.
        vocabulary: Number of tokens.
        draw: Makes rows: how many, of which size, with which generator, held out or not.
        train_sizes: Sizes that training goes through in turns; small ones teach the large ones.
        test_sizes: Sizes that are judged, the hardest last.
        size_is: What a size counts.
        steps: Of training.
        batch: Rows of a step of the smallest size; larger ones have as many tokens.
        chance: Accuracy of a blind guess.
    """

    name: str
    about: str
    vocabulary: int
    draw: Callable[[int, int, Generator, bool], Rows]
    train_sizes: tuple[int, ...]
    test_sizes: tuple[int, ...]
    size_is: str
    steps: int
    batch: int
    chance: float


def find_task(name: str) -> Task:
    """Return the task called ``name``.

    Raises:
        SpecError: There is none.
    """
    from attnzoo.tasks.documents import DOCUMENTS
    from attnzoo.tasks.listops import LISTOPS
    from attnzoo.tasks.recall import DUPLICATION, INDUCTION, MQAR

    tasks = {task.name: task for task in (MQAR, DUPLICATION, INDUCTION, LISTOPS, DOCUMENTS)}
    if name not in tasks:
        raise SpecError(
            f"No task is called {name!r}.{did_you_mean(name, tasks)} Available: {', '.join(tasks)}."
        )
    return tasks[name]
