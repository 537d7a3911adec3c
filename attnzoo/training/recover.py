"""The function that recovers a swapped model, and uploads it to the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import PartialState
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from attnzoo.errors import AttnzooError
from attnzoo.hf.saving.card import FILE
from attnzoo.report.atomic_write import atomic_write
from attnzoo.spec import AttentionSpec
from attnzoo.training.arguments import RecoveryArguments
from attnzoo.training.encoder import is_encoder
from attnzoo.training.recovery import EncoderRecovery, Log, Recovery
from attnzoo.training.student import StudentRecovery

NOT_UPLOADED = ["checkpoints/*", "*.partial/*"]


class PublishError(AttnzooError):
    """A model cannot be uploaded to the Hub."""


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
    path, paths, out, repo = Path(path), [Path(x) for x in data], Path(str(args.output_dir)), None
    if args.push_to_hub and PartialState().is_main_process:  # before anything is trained
        name = args.hub_model_id or out.resolve().name
        with _hub_errors(name):
            hub = HfApi()
            repo = hub.create_repo(name, private=args.hub_private_repo, exist_ok=True).repo_id
    if teacher is not None:
        results = StudentRecovery(path, None, paths, args, log, teacher=Path(teacher)).run()
    else:
        kind = EncoderRecovery if is_encoder(path) else Recovery
        results = kind(path, spec, paths, args, log, weights).run()
    if repo is not None:
        card = out / FILE
        text = card.read_text("utf-8").replace(f'("{out.resolve().name}")', f'("{repo}")')
        atomic_write(card, text)  # its example loads the model by its id
        with _hub_errors(repo):
            found = hub.upload_folder(repo_id=repo, folder_path=out, ignore_patterns=NOT_UPLOADED)
        log(f"Hub:    {found.commit_url}")
    return results


@contextmanager
def _hub_errors(name: str) -> Iterator[None]:
    """Context in which errors of the Hub say what to do."""
    try:
        yield
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise PublishError(
            f"{name!r} cannot be written on the Hub: {error}. Log in with `hf auth login` and a "
            "token that may write, and give --hub-model-id ORG/MODEL. A finished run is uploaded "
            "by the same command with --resume-from-checkpoint True"
        ) from error
