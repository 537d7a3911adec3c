"""Upload of a trained model to the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

from attnzoo.errors import AttnzooError
from attnzoo.hf.saving.card import FILE
from attnzoo.report.atomic_write import atomic_write

NOT_UPLOADED = ("checkpoints/*", "*.partial/*")


class PublishError(AttnzooError):
    """A model cannot be uploaded to the Hub."""


def prepare_repo(name: str, *, private: bool | None = None) -> str:
    """Create a repository of a model unless it exists; return its full id.

    Called before training, so that a missing login is no surprise after it.

    Args:
        name: ``ORG/MODEL``, or ``MODEL`` for one of the user who is logged in.
        private: Whether a new repository is private; ``None`` for the default of its owner.

    Raises:
        PublishError: The repository cannot be created.
    """
    try:
        return HfApi().create_repo(name, private=private, exist_ok=True).repo_id
    except (HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OSError) as error:
        raise PublishError(
            f"The repository {name!r} cannot be created on the Hub: {_first_line(error)}. Log in "
            "with `hf auth login` and a token that may write, and give --hub-model-id ORG/MODEL; "
            "or leave --push-to-hub out"
        ) from error


def publish(folder: Path, repo: str) -> str:
    """Upload a trained model, its card and its results; return the address of the commit.

    Checkpoints and logs are not uploaded. The snippet of the card then loads the model by its id.

    Args:
        folder: Folder of the run.
        repo: Id of the repository.

    Raises:
        PublishError: The upload failed; the model in the folder is complete.
    """
    card = folder / FILE
    text = card.read_text("utf-8")
    atomic_write(card, text.replace(f'("{folder.resolve().name}")', f'("{repo}")'))
    try:
        commit = HfApi().upload_folder(
            repo_id=repo,
            folder_path=folder,
            ignore_patterns=[*NOT_UPLOADED],
            commit_message="Upload a model trained with attnzoo",
        )
    except (HfHubHTTPError, OSError) as error:
        raise PublishError(
            f"The upload to {repo!r} failed: {_first_line(error)}. The model in {str(folder)!r} is "
            "complete: run the same command with --resume-from-checkpoint True, which uploads it "
            "again"
        ) from error
    return str(commit.commit_url)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
