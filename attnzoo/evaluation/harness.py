"""Tasks of lm-evaluation-harness on models in memory, and generated ones that need no download."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from attnzoo.errors import ConfigError, did_you_mean
from attnzoo.evaluation import ruler
from attnzoo.evaluation.data import load_tokenizer

GROUP = "attnzoo_ruler"  # all generated tasks
GENERATED = {f"attnzoo_{kind}": kind for kind in ruler.KINDS}
NOT_METRICS = ("alias", "name", "sample_len", " ")


class Harness:
    """Runs tasks of lm-evaluation-harness on models that have the same tokenizer.

    Args:
        path: Folder of the tokenizer.
        names: Names of tasks, groups and tags, or patterns of lm_eval's.
        limit: Documents per task, or a fraction of them if below 1; all when ``None``.
        batch_size: Rows per batch, or ``"auto"``.
        num_fewshot: Solved examples in a prompt; those of the task when ``None``.
        max_length: Tokens that the model takes; its number of positions when ``None``.
        include_path: Folder of further tasks.
        metadata: Arguments of generated tasks, such as ``max_seq_lengths``.

    Raises:
        ConfigError: An argument is invalid, or a task is unknown.
    """

    def __init__(
        self,
        path: Path,
        names: Sequence[str],
        *,
        limit: float | None = None,
        batch_size: int | str = 1,
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
            raise ConfigError(f"tasks names no task; give some, such as {GROUP}")
        if limit is not None and limit <= 0:
            raise ConfigError(f"limit must be above 0, got {limit}")
        if batch_size != "auto" and not (isinstance(batch_size, int) and batch_size > 0):
            raise ConfigError(f"batch_size must be above 0, or 'auto', got {batch_size!r}")
        if include_path is not None and not include_path.is_dir():
            raise ConfigError(f"include_path: there is no folder {str(include_path)!r}")
        self.names, self.tokenizer = names, load_tokenizer(path)
        self.options = {"num_fewshot": num_fewshot, "limit": limit}
        self.size = {"max_length": max_length, "batch_size": batch_size}
        metadata = metadata or {}
        self.manager = self._manager(include_path, {"tokenizer": str(path), **metadata})
        kinds = [kind for name, kind in GENERATED.items() if {name, GROUP}.intersection(names)]
        lengths = metadata.get("max_seq_lengths", ruler.LENGTHS)
        lengths = list(lengths) if isinstance(lengths, list | tuple) else [lengths]
        if not lengths or not all(isinstance(n, int) and n > 0 for n in lengths):
            raise ConfigError(f"max_seq_lengths takes integers above 0, got {lengths!r}")
        self.longest = max(lengths) if kinds else 0
        count = int(limit) if limit and limit >= 1 else ruler.SAMPLES  # no more than are used
        self.generated = [ruler.task_config(x, self.tokenizer, lengths, count) for x in kinds]

    def _manager(self, include_path: Path | None, metadata: Mapping[str, Any]) -> Any:
        """Return lm_eval's index of tasks, of its own ones only if needed: that takes seconds."""
        from lm_eval.tasks import TaskManager

        self.named = [name for name in self.names if name not in (GROUP, *GENERATED)]
        for defaults in (False, True):
            manager: Any = TaskManager(
                include_path=include_path, include_defaults=defaults, metadata={**metadata}
            )
            unknown = [name for name in self.named if not manager.match_tasks([name])]
            if not unknown:
                return manager
        known = [*manager.all_tasks, *GENERATED, GROUP]
        raise ConfigError(
            f"lm_eval has no task {unknown[0]!r}.{did_you_mean(unknown[0], known)} "
            f"`lm_eval ls tasks` lists its own, and {GROUP} is the group of attnzoo's"
        )

    def run(self, model: Any) -> dict[str, dict[str, Any]]:
        """Return the metrics of every task and group by lm_eval's names, such as ``acc,none``.

        Args:
            model: A causal model on its device.

        Raises:
            ConfigError: The data or packages of a task cannot be loaded, or a generated prompt is
                longer than the model's positions.
        """
        from lm_eval import evaluator
        from lm_eval.models.huggingface import HFLM

        harness = HFLM(pretrained=model, tokenizer=self.tokenizer, **self.size)
        if self.longest > harness.max_length:  # the prompt would lose its beginning
            raise ConfigError(
                f"attnzoo's tasks have prompts of {self.longest} tokens, but the model takes "
                f'{harness.max_length}; give shorter ones (metadata {{"max_seq_lengths": '
                f"[{harness.max_length}]}}), or a larger max_length for a model that extrapolates"
            )
        logging.getLogger("lm_eval").setLevel(logging.ERROR)  # else it repeats itself every time
        try:
            # git, asked for the revision of the folder, prints an error where there is none
            with patch.object(evaluator, "get_git_commit_hash", lambda: None, create=True):
                found: Any = evaluator.simple_evaluate(
                    harness,
                    tasks=[*self.manager.match_tasks(self.named), *self.generated],
                    task_manager=self.manager,
                    log_samples=False,
                    **self.options,
                )
        except (ImportError, OSError) as error:  # of a task's packages or data
            raise ConfigError(
                f"The tasks {', '.join(self.names)} cannot be loaded: {error} Install what they "
                f"need, check the connection, or give tasks that need neither, such as {GROUP}"
            ) from error
        return {
            name: {key: value for key, value in metrics.items() if key not in NOT_METRICS}
            for name, metrics in found["results"].items()
        }
