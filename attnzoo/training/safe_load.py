"""Load a training checkpoint without running code that its files bring.

``torch.load(weights_only=True)`` refuses pickles of anything but tensors and plain data. Accelerate
sets it, but ignores random states that it refuses. torch.distributed.checkpoint (FSDP) does not set
it for values that are not tensors, and reads ``.metadata`` with pickle; DeepSpeed never sets it.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from accelerate.utils import load as load_file
from torch.distributed.checkpoint.api import CheckpointException

from attnzoo.training.checkpoints import CheckpointError

_FORCE, _FORCE_NOT = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
# What the .metadata of torch.distributed.checkpoint consists of, beside dtypes
_METADATA = {
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
}


def load_state(accelerator: Accelerator, path: Path) -> None:
    """Load what ``accelerator.save_state`` wrote: tensors and plain data only.

    Args:
        accelerator: That prepared the model, the optimizer and the schedule.
        path: Folder of the checkpoint.

    Raises:
        CheckpointError: A file holds other objects, which could run code; none is made.
    """
    deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
    allowed = _deepspeed_classes() if deepspeed else []
    with _refused_pickles(path), _weights_only(), torch.serialization.safe_globals(allowed):
        for file in path.glob("*/*.metadata"):
            with file.open("rb") as stream:
                _MetadataUnpickler(stream).load()
        for file in path.glob("random_states_*.pkl"):
            load_file(file)  # Accelerate would go on without those that it cannot load
        accelerator.load_state(str(path))


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickles the metadata of torch.distributed.checkpoint, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not dtype and (module, name) not in _METADATA:
            raise pickle.UnpicklingError(f"Unsupported GLOBAL {module}.{name}")
        return super().find_class(module, name)


def _deepspeed_classes() -> list[Any]:
    """Return the classes that a checkpoint of ZeRO holds beside tensors and plain data."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]


@contextmanager
def _weights_only() -> Iterator[None]:
    """Make every ``torch.load`` weights-only, even where its caller passes ``False``."""
    before = {name: os.environ.pop(name, None) for name in (_FORCE, _FORCE_NOT)}
    os.environ[_FORCE] = "1"
    try:
        yield
    finally:
        os.environ.pop(_FORCE)
        os.environ.update({name: value for name, value in before.items() if value is not None})


@contextmanager
def _refused_pickles(path: Path) -> Iterator[None]:
    """Raise a :class:`CheckpointError` in place of what refuses a pickle."""
    try:
        yield
    except (pickle.UnpicklingError, CheckpointException) as error:
        causes = [cause for cause, _ in getattr(error, "failures", {0: (error, None)}).values()]
        if not all(isinstance(cause, pickle.UnpicklingError) for cause in causes):
            raise
        found = re.search(r"GLOBAL (\S+)", str(causes[0]))
        raise CheckpointError(
            f"The checkpoint {str(path)!r} holds {found[1] if found else 'an object'}, which is "
            "neither a tensor nor plain data and could run code; nothing was loaded. Remove this "
            "checkpoint if you did not expect that, and go on from an earlier one with --resume"
        ) from error
