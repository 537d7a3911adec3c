"""Tasks of lm-evaluation-harness on models in memory."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any
from unittest.mock import patch

from attnzoo.errors import ConfigError, did_you_mean
from attnzoo.evaluation.data import load_tokenizer

NOT_METRICS = ("alias", "name", "sample_len", " ")


def task_folder() -> Path:
    """Return the folder of attnzoo's tasks, for lm_eval's ``include_path``."""
    return Path(str(files("attnzoo.evaluation.harness_tasks")))


@dataclass(frozen=True, kw_only=True)
class HarnessTasks:
    """Tasks of lm-evaluation-harness, with its options.

    Attributes:
        names: Names of tasks, groups and tags, or patterns of them.
        limit: Documents per task, or a fraction of them if below 1; all when ``None``.
        batch_size: Rows per batch, or ``"auto"``.
        num_fewshot: Solved examples in a prompt; those of the task when ``None``.
        max_length: Tokens that the model takes; its number of positions when ``None``.
        include_path: Folder of further tasks.
        metadata: Arguments of generated tasks, such as ``max_seq_lengths``.
        gen_kwargs: Arguments of ``generate``, such as ``"max_gen_toks=32"``.
    """

    names: Sequence[str]
    limit: float | None = None
    batch_size: int | str = 1
    num_fewshot: int | None = None
    max_length: int | None = None
    include_path: Path | None = None
    metadata: Mapping[str, Any] | None = None
    gen_kwargs: str | None = None

    def __post_init__(self) -> None:
        if importlib.util.find_spec("lm_eval") is None:
            raise ConfigError(
                "tasks are run by lm-evaluation-harness, which is not installed; "
                'pip install "attnzoo[eval]"'
            )
        if not self.names:
            raise ConfigError("tasks names no task; give some, such as attnzoo_ruler")
        if self.limit is not None and self.limit <= 0:
            raise ConfigError(f"limit must be above 0, got {self.limit}")
        if self.batch_size != "auto" and not (
            isinstance(self.batch_size, int) and self.batch_size > 0
        ):
            raise ConfigError(f"batch_size must be above 0, or 'auto', got {self.batch_size!r}")
        if self.include_path is not None and not self.include_path.is_dir():
            raise ConfigError(f"include_path: there is no folder {str(self.include_path)!r}")

    def manager(self, tokenizer: Path) -> Any:
        """Return lm_eval's index of tasks: attnzoo's, those of ``include_path``, and its own.

        Raises:
            ConfigError: A name is unknown.
        """
        from lm_eval.tasks import TaskManager

        folders = [task_folder(), *([self.include_path] if self.include_path else [])]
        metadata: dict[str, Any] = {"tokenizer": str(tokenizer)}
        if self.limit is not None and self.limit >= 1:
            metadata["num_samples"] = int(self.limit)  # no more prompts than are used
        metadata |= self.metadata or {}
        manager: Any = None
        for defaults in (False, True):  # the index of all of its tasks takes seconds
            manager = TaskManager(
                include_path=folders, include_defaults=defaults, metadata=metadata
            )
            unknown = [name for name in self.names if not manager.match_tasks([name])]
            if not unknown:
                return manager
        raise ConfigError(
            f"lm_eval has no task {unknown[0]!r}.{did_you_mean(unknown[0], manager.all_tasks)} "
            "`lm_eval ls tasks` lists its own, and attnzoo_ruler is the group of attnzoo's"
        )


@dataclass(frozen=True)
class Harness:
    """Runs tasks on models that have the same tokenizer.

    Args:
        tasks: The tasks.
        path: Folder of the tokenizer.

    Raises:
        ConfigError: A task is unknown.
    """

    tasks: HarnessTasks
    path: Path

    @cached_property
    def manager(self) -> Any:
        """lm_eval's index of tasks."""
        return self.tasks.manager(self.path)

    def run(self, model: Any) -> dict[str, dict[str, Any]]:
        """Return the metrics of every task and group by lm_eval's names, such as ``acc,none``.

        Args:
            model: A causal model on its device.

        Raises:
            ConfigError: A prompt is longer than the model's positions, or the data of a task
                cannot be loaded.
        """
        names = self.manager.match_tasks(list(self.tasks.names))
        try:
            with _errors_only(logging.getLogger("lm_eval")):
                found = self._evaluate(model, names)
        except OSError as error:
            raise ConfigError(
                f"The data of {', '.join(names)} cannot be loaded: {error} Check the connection "
                "to the Hugging Face Hub, or give tasks that need none, such as attnzoo_ruler"
            ) from error
        return {
            name: {key: value for key, value in metrics.items() if key not in NOT_METRICS}
            for name, metrics in found["results"].items()
        }

    def _evaluate(self, model: Any, names: list[str]) -> Any:
        from lm_eval import evaluator
        from lm_eval.models.huggingface import HFLM

        tasks = self.tasks
        harness = HFLM(
            model,
            tokenizer=load_tokenizer(self.path),
            max_length=tasks.max_length,
            batch_size=tasks.batch_size,
        )
        self._check_lengths(names, harness.max_length)
        # Its result has the revision of the working folder; git prints an error where there is none
        with patch.object(evaluator, "get_git_commit_hash", lambda: None, create=True):
            return evaluator.simple_evaluate(
                harness,
                tasks=names,
                num_fewshot=tasks.num_fewshot,
                limit=tasks.limit,
                gen_kwargs=tasks.gen_kwargs,
                task_manager=self.manager,
                log_samples=False,
            )

    def _check_lengths(self, names: list[str], limit: int) -> None:
        """Raise an error if a generated prompt would lose its beginning."""
        for name, task in self.manager.load(names)["tasks"].items():
            if not name.startswith("attnzoo_"):
                continue
            longest = max(task.eval_docs["max_length"])
            if longest > limit:
                raise ConfigError(
                    f"{name} has prompts of {longest} tokens, but the model takes {limit}; give "
                    'shorter ones (metadata {"max_seq_lengths": [' + str(limit) + "]}), or a "
                    "larger max_length for a model that extrapolates"
                )


@contextmanager
def _errors_only(logger: logging.Logger) -> Iterator[None]:
    """Context in which a logger is silent about warnings, which lm_eval repeats for every model."""
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
