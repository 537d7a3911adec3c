"""All tasks by name."""

from __future__ import annotations

from attnzoo.errors import SpecError, did_you_mean
from attnzoo.tasks.base import Task
from attnzoo.tasks.documents import DOCUMENTS
from attnzoo.tasks.listops import LISTOPS
from attnzoo.tasks.recall import DUPLICATION, INDUCTION, MQAR, MQAR_64

TASKS = {task.name: task for task in (MQAR, MQAR_64, DUPLICATION, INDUCTION, LISTOPS, DOCUMENTS)}


def find_task(name: str) -> Task:
    """Return the task called ``name``.

    Raises:
        SpecError: No task has that name.
    """
    if name not in TASKS:
        raise SpecError(
            f"No task is called {name!r}.{did_you_mean(name, TASKS)} Available: {', '.join(TASKS)}."
        )
    return TASKS[name]
