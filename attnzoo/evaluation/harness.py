"""Tasks of lm-evaluation-harness on models in memory, and generated ones that need no download."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

from attnzoo.errors import ConfigError, did_you_mean
from attnzoo.evaluation import ruler
from attnzoo.evaluation.data import load_tokenizer

GROUP = "attnzoo_ruler"  # all generated tasks
GENERATED = {f"attnzoo_{kind}": kind for kind in ruler.KINDS}
NOT_METRICS = ("alias", "name", "sample_len", " ")


@dataclass(frozen=True, kw_only=True)
class HarnessTasks:
    """Tasks of lm-evaluation-harness, with its options.

    Attributes:
        names: Names of tasks, groups and tags, or patterns of lm_eval's.
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
            raise ConfigError(f"tasks names no task; give some, such as {GROUP}")
        if self.limit is not None and self.limit <= 0:
            raise ConfigError(f"limit must be above 0, got {self.limit}")
        size = self.batch_size
        if size != "auto" and not (isinstance(size, int) and size > 0):
            raise ConfigError(f"batch_size must be above 0, or 'auto', got {size!r}")
        if self.include_path is not None and not self.include_path.is_dir():
            raise ConfigError(f"include_path: there is no folder {str(self.include_path)!r}")


@dataclass(frozen=True)
class Harness:
    """Runs tasks on models that have the same tokenizer.

    Args:
        tasks: The tasks.
        path: Folder of the tokenizer.
    """

    tasks: HarnessTasks
    path: Path

    @property
    def lengths(self) -> Sequence[int]:
        """Tokens of generated prompts with their answers."""
        given = (self.tasks.metadata or {}).get("max_seq_lengths", ruler.LENGTHS)
        lengths = list(given) if isinstance(given, list | tuple) else [given]
        if not lengths or not all(isinstance(n, int) and n > 0 for n in lengths):
            raise ConfigError(f"max_seq_lengths takes integers above 0, got {given!r}")
        return lengths

    @cached_property
    def generated(self) -> list[dict[str, Any]]:
        """The generated tasks among the names, as configs of lm_eval."""
        limit = self.tasks.limit or 0
        count = int(limit) if limit >= 1 else ruler.SAMPLES  # no more prompts than are used
        return [
            ruler.task_config(kind, load_tokenizer(self.path), self.lengths, count)
            for name, kind in GENERATED.items()
            if {name, GROUP}.intersection(self.tasks.names)
        ]

    @cached_property
    def manager(self) -> Any:
        """lm_eval's index of tasks.

        Raises:
            ConfigError: A name is unknown.
        """
        from lm_eval.tasks import TaskManager

        metadata = {"tokenizer": str(self.path), **(self.tasks.metadata or {})}
        manager: Any = None
        for defaults in (False, True):  # the index of all of its tasks takes seconds
            manager = TaskManager(
                include_path=self.tasks.include_path, include_defaults=defaults, metadata=metadata
            )
            unknown = [name for name in self._named if not manager.match_tasks([name])]
            if not unknown:
                return manager
        known = [*manager.all_tasks, *GENERATED, GROUP]
        raise ConfigError(
            f"lm_eval has no task {unknown[0]!r}.{did_you_mean(unknown[0], known)} "
            f"`lm_eval ls tasks` lists its own, and {GROUP} is the group of attnzoo's"
        )

    @property
    def _named(self) -> list[str]:
        """The names of lm_eval's tasks."""
        return [name for name in self.tasks.names if name not in (GROUP, *GENERATED)]

    def run(self, model: Any) -> dict[str, dict[str, Any]]:
        """Return the metrics of every task and group by lm_eval's names, such as ``acc,none``.

        Args:
            model: A causal model on its device.

        Raises:
            ConfigError: A task is unknown, its data or packages cannot be loaded, or a generated
                prompt is longer than the model's positions.
        """
        from lm_eval import evaluator
        from lm_eval.models.huggingface import HFLM

        tasks, tokenizer = self.tasks, load_tokenizer(self.path)
        size = {"max_length": tasks.max_length, "batch_size": tasks.batch_size}
        harness = HFLM(pretrained=model, tokenizer=tokenizer, **size)
        self._check_lengths(harness.max_length)
        logging.getLogger("lm_eval").setLevel(logging.ERROR)  # else it repeats itself every time
        try:
            # git, asked for the revision of the folder, prints an error where there is none
            with patch.object(evaluator, "get_git_commit_hash", lambda: None, create=True):
                found: Any = evaluator.simple_evaluate(
                    harness,
                    tasks=[*self.manager.match_tasks(self._named), *self.generated],
                    num_fewshot=tasks.num_fewshot,
                    limit=tasks.limit,
                    gen_kwargs=tasks.gen_kwargs,
                    task_manager=self.manager,
                    log_samples=False,
                )
        except (ImportError, OSError) as error:  # of a task's packages or data
            raise ConfigError(
                f"The tasks {', '.join(tasks.names)} cannot be loaded: {error} Install what they "
                f"need, check the connection, or give tasks that need neither, such as {GROUP}"
            ) from error
        return {
            name: {key: value for key, value in metrics.items() if key not in NOT_METRICS}
            for name, metrics in found["results"].items()
        }

    def _check_lengths(self, limit: int) -> None:
        """Raise an error if a generated prompt would lose its beginning."""
        longest = max(self.lengths)
        if longest > limit and {GROUP, *GENERATED}.intersection(self.tasks.names):
            raise ConfigError(
                f"attnzoo's tasks have prompts of {longest} tokens, but the model takes {limit}; "
                f'give shorter ones (metadata {{"max_seq_lengths": [{limit}]}}), or a larger '
                "max_length for a model that extrapolates"
            )
