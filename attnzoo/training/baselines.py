"""Results of the models that a run is compared with, saved so that a resumed run reuses them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from attnzoo.errors import UntrainedWarning
from attnzoo.evaluation.quality import NonFiniteError
from attnzoo.report.atomic_write import atomic_write
from attnzoo.training.checkpoints import FOLDER, Checkpoints, explain_write_errors

LINES = "lines.json"  # in the folder of the checkpoints


class Baselines:
    """Results of the models that a run is compared with; a resumed run reuses the saved ones.

    Args:
        accelerator: The run's accelerator.
        checkpoints: The run's checkpoints, whose folder has the JSON file of the results.
        kind: Dataclass of one result.
        log: Called before each evaluation.

    Attributes:
        results: The results so far, by name.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        checkpoints: Checkpoints,
        kind: Any,
        log: Callable[[str], None],
    ) -> None:
        self.accelerator, self.checkpoints, self.log = accelerator, checkpoints, log
        self.path: Path = checkpoints.out / FOLDER / LINES
        read = accelerator.is_main_process and self.path.is_file()
        (saved,) = broadcast_object_list([json.loads(self.path.read_text("utf-8")) if read else {}])
        self.results: dict[str, Any] = {name: kind(**values) for name, values in saved.items()}

    def evaluate(self, name: str, evaluate: Callable[[], Any]) -> None:
        """Evaluate a baseline and save its result, unless it is saved.

        Called by all processes.

        Raises:
            NonFiniteError: The model's outputs are not finite.
            CheckpointError: The result cannot be written.
        """
        if name in self.results:
            return
        self.log(f"evaluation: {name}")
        try:
            with warnings.catch_warnings():  # a raw swap is untrained by definition
                warnings.simplefilter("ignore", UntrainedWarning)
                self.results[name] = evaluate()
        except NonFiniteError as error:
            raise NonFiniteError(f"The baseline {name!r} cannot be measured: {error}") from error
        if self.accelerator.is_main_process:
            data = {name: asdict(result) for name, result in self.results.items()}
            with explain_write_errors(self.checkpoints):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                atomic_write(self.path, json.dumps(data, allow_nan=False))
