"""Reuse of transferred layers by a run of another plan.

Transfer trains every layer on softmax's inputs, so what a layer learned does not depend on which
other layers are swapped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from attnzoo.errors import SpecError
from attnzoo.training.loading import load_model
from attnzoo.training.planner import weights_fingerprint
from attnzoo.training.transfer import swapped_layers, trainable_layers


def reuse_transfer(model: PreTrainedModel, folder: Path, weights: str) -> list[str]:
    """Copy the extras of a saved model into the layers that have the same backend and options.

    One run over all layers serves every plan.

    Args:
        model: A swapped model.
        folder: A saved swap of the same model whose own weights were not trained.
        weights: Fingerprint of the model's weights.

    Returns:
        The names of the layers.

    Raises:
        SpecError: The saved model has other weights, or no layer in common.
    """
    saved: Any = load_model(folder, None, type(model))
    if weights_fingerprint(saved) != weights:
        raise SpecError(
            f"{str(folder)!r} has other weights than the model, whose layers it was trained to "
            "match; give a run of this model with transfer only (--max-steps 0, or --train "
            "extras)"
        )
    known = swapped_layers(saved)
    names = []
    for name in trainable_layers(model):
        backend, other = swapped_layers(model)[name], known.get(name)
        if other is not None and (other.name, other.config) == (backend.name, backend.config):
            backend.load_state_dict(other.state_dict())
            names.append(name)
    if not names:
        raise SpecError(
            f"No layer of {str(folder)!r} with parameters to train has the backend and the options "
            "of this swap; leave transfer_from out"
        )
    return names
