"""The function that recovers a swapped model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attnzoo.spec import AttentionSpec
from attnzoo.training.arguments import RecoveryArguments
from attnzoo.training.loading import is_encoder
from attnzoo.training.recovery import EncoderRecovery, Log, Recovery
from attnzoo.training.student import StudentRecovery


def recover(
    path: Path | str,
    spec: AttentionSpec | None,
    data: Sequence[Path | str],
    args: RecoveryArguments,
    *,
    teacher: Path | str | None = None,
    weights: str | None = None,
    log: Log = lambda text: None,
) -> dict[str, Any]:
    """Swap a saved model, recover its quality, evaluate it, and save it to ``args.output_dir``.

    A causal model is evaluated by loss and recall; an encoder by the cosine similarity between its
    embeddings and those of the original model.

    Args:
        path: Folder of a saved model that is not swapped, a decoder or an encoder.
        spec: The swap; ``None`` with ``teacher``.
        data: Text files, JSON lines, parquet, folders of them, or data sets of the Hub.
        args: Arguments of the stages.
        teacher: Folder of the original model, if ``path`` holds a student of a stock class
            (:mod:`attnzoo.training.student`).
        weights: Fingerprint of the weights that the spec was planned for, if any.
        log: Called with progress messages.

    Returns:
        The content of ``recovery.json``.

    Raises:
        AttnzooError: An argument is invalid.
        DivergenceError: A loss, a gradient or an output is not finite.
    """
    path, paths = Path(path), [Path(x) for x in data]
    if teacher is not None:
        return StudentRecovery(path, None, paths, args, log, teacher=Path(teacher)).run()
    kind = EncoderRecovery if is_encoder(path) else Recovery
    return kind(path, spec, paths, args, log, weights).run()
