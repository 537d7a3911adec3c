"""Which parameters of a model weight decay applies to, in transformers' Trainer and in our loop."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from attnzoo.contract.backend import AttentionBackend


def decayed_parameters(model: nn.Module) -> list[str]:
    """Return the names of the parameters that weight decay applies to.

    The rule is that of transformers' ``Trainer``, which exempts norms and biases, without the
    parameters that backends exempt: decay would change how far a swapped layer looks back.
    """
    from transformers import Trainer

    unused: Any = None  # the method does not read its trainer
    return Trainer.get_decay_parameter_names(unused, model)  # patched


def without_exempt(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Return names of parameters without those that set a decay or a mixture of a backend."""
    exempt = {
        f"{part_name}.{name}".removeprefix(".")
        for prefix, backend in model.named_modules(remove_duplicate=False)
        if isinstance(backend, AttentionBackend)
        for part_name, part in backend.named_modules(prefix=prefix)
        for name in getattr(part, "no_weight_decay", ())
    }
    return [name for name in names if name not in exempt]
