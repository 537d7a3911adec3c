"""Tasks of lm-evaluation-harness on models in memory."""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from attnzoo.errors import ConfigError, did_you_mean
from attnzoo.evaluation.corpus import load_tokenizer


class Harness:
    """Runs tasks of lm-evaluation-harness on models that have the same tokenizer.

    Args:
        path: Folder of the tokenizer.
        names: Names of tasks, groups and tags, or patterns.
        limit: Documents per task, or a fraction of them if below 1; all when ``None``.
        batch_size: Rows per batch, or ``"auto"``.
        num_fewshot: Solved examples in a prompt; those of the task when ``None``.
        max_length: Tokens that the model takes; its number of positions when ``None``.
        include_path: Folder of further tasks.
        metadata: Arguments of generated tasks, such as ``max_seq_lengths`` of ``ruler``.

    Raises:
        ConfigError: An argument is invalid, or a task is unknown.
    """

    def __init__(
        self,
        path: Path,
        names: Sequence[str],
        *,
        limit: float | None = None,
        batch_size: str = "1",
        num_fewshot: int | None = None,
        max_length: int | None = None,
        include_path: Path | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        if importlib.util.find_spec("lm_eval") is None:
            raise ConfigError(
                "tasks are run by lm-evaluation-harness, which is not installed; "
                'pip install "attnzoo[eval]"'
            )
        if not names:
            raise ConfigError("tasks names no task; give some, such as hellaswag")
        if limit is not None and limit <= 0:
            raise ConfigError(f"limit must be above 0, got {limit}")
        if not re.fullmatch("auto|[1-9][0-9]*", batch_size):
            raise ConfigError(f"batch_size must be above 0, or 'auto', got {batch_size!r}")
        if include_path is not None and not include_path.is_dir():
            raise ConfigError(f"include_path: there is no folder {str(include_path)!r}")
        from lm_eval.tasks import TaskManager

        self.names, self.tokenizer = names, load_tokenizer(path)
        self.options = {"num_fewshot": num_fewshot, "limit": limit}
        self.size = {"max_length": max_length, "batch_size": batch_size}
        given = {"tokenizer": str(path), **(metadata or {})}
        for defaults in (False, True):  # the index of lm_eval's own tasks takes seconds
            self.manager: Any = TaskManager(
                include_path=include_path, include_defaults=defaults, metadata=given
            )
            unknown = [name for name in names if not self.manager.match_tasks([name])]
            if not unknown:
                return
        raise ConfigError(
            f"lm_eval has no task {unknown[0]!r}."
            f"{did_you_mean(unknown[0], self.manager.all_tasks)} `lm_eval ls tasks` lists them"
        )

    def run(self, model: Any) -> dict[str, dict[str, Any]]:
        """Return the metrics of every task and group by lm_eval's names, such as ``acc,none``.

        Args:
            model: A causal model on its device.

        Raises:
            ConfigError: The data or packages of a task cannot be loaded.
        """
        from lm_eval import evaluator
        from lm_eval.models.huggingface import HFLM

        harness = HFLM(pretrained=model, tokenizer=self.tokenizer, **self.size)
        logging.getLogger("lm_eval").setLevel(logging.ERROR)  # else it repeats itself every time
        try:
            # git, asked for the revision of the folder, prints an error where there is none
            with patch.object(evaluator, "get_git_commit_hash", lambda: None, create=True):
                found: Any = evaluator.simple_evaluate(
                    harness,
                    tasks=self.manager.match_tasks(self.names),
                    task_manager=self.manager,
                    log_samples=False,
                    **self.options,
                )
        except (ImportError, OSError) as error:  # of a task's packages or data
            raise ConfigError(
                f"The tasks {', '.join(self.names)} cannot be loaded: {error} Install what they "
                "need, check the connection, or give other tasks"
            ) from error
        results: dict[str, dict[str, Any]] = found["results"]
        return results
