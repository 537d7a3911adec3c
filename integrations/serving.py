"""Refuse continuous batching of swapped models."""

from __future__ import annotations

from transformers import PreTrainedModel

from attnzoo.backends.base import AttentionBackend
from attnzoo.errors import UnsupportedError
from attnzoo.integrations import compat
from attnzoo.integrations.patches import NAME


def refuse_continuous_batching(model: PreTrainedModel) -> None:
    """Raise if a model runs a swap; continuous batching reads keys and values in pages.

    Raises:
        UnsupportedError: The model runs a swap.
    """
    if all(config._attn_implementation != NAME for config in compat.all_configs(model)):
        return
    backends = {m.name: m for m in model.modules() if isinstance(m, AttentionBackend)}
    states = [name for name, backend in backends.items() if not backend.keeps_all_keys]
    reason = (
        f"{', '.join(map(repr, states))} keeps one state per sequence, which has no pages"
        if states
        else f"{', '.join(map(repr, backends))} does not read keys and values in pages"
    )
    raise UnsupportedError(
        "continuous batching (generate_batch, transformers serve --continuous-batching) does not "
        f"support this swap: backend {reason}. Call model.generate on a padded batch, or serve "
        "without --continuous-batching; model.set_attn_implementation('sdpa') runs the model's "
        "original attention instead"
    )
