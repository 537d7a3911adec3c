"""What a run's model is judged against, kept beside its checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from attnzoo.report.whole import write_whole

LINES = "lines.json"


class Lines:
    """What a run's model is judged against, line by line; a resumed run judges none twice.

    Args:
        accelerator: Of the run.
        path: The file that keeps them.
        kind: What a line is: a dataclass.
    """

    def __init__(self, accelerator: Accelerator, path: Path, kind: Any) -> None:
        self.accelerator, self.path = accelerator, path
        found = [_read(path) if accelerator.is_main_process else None]
        (known,) = broadcast_object_list(found)
        self.known: dict[str, Any] = {name: kind(**line) for name, line in known.items()}

    def judge(self, name: str, judged: Callable[[], Any]) -> None:
        """Have a line, from the run's folder or by judging; all processes take part."""
        if name in self.known:
            return
        self.known[name] = judged()
        if self.accelerator.is_main_process:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lines = {name: asdict(line) for name, line in self.known.items()}
            write_whole(self.path, json.dumps(lines))


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return found
