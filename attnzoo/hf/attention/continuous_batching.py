"""Continuous batching of swapped models: ``generate_batch`` and ``transformers serve``.

transformers stores the keys and values of all requests in pages and passes the new tokens of all
requests in one row. A backend that keeps all keys attends to the keys of each request in turn; a
backend with a state is refused, because a state has no pages.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from attnzoo.contract.backend import AttentionBackend
from attnzoo.contract.masks import AttentionMask
from attnzoo.errors import UnsupportedError
from attnzoo.hf import seam
from attnzoo.hf.configs import read_field
from attnzoo.hf.names import NAME

INSTEAD = (
    "Call model.generate on a padded batch, or serve without --continuous-batching; "
    "model.set_attn_implementation('sdpa') runs the model's original attention instead"
)


def serves_swap(model: PreTrainedModel) -> bool:
    """Return whether continuous batching of a model runs a swap.

    Raises:
        UnsupportedError: A backend or another layer keeps a state, or transformers is too old.
    """
    if all(config._attn_implementation != NAME for config in seam.all_configs(model)):
        return False
    backends = {m.name: m for m in model.modules() if isinstance(m, AttentionBackend)}
    states = [name for name, backend in backends.items() if not backend.keeps_all_keys]
    what = "continuous batching (generate_batch, transformers serve --continuous-batching)"
    if states:
        raise UnsupportedError(
            f"{what} does not support this swap: backend {', '.join(map(repr, states))} keeps one "
            f"state per sequence, which has no pages. {INSTEAD}"
        )
    kinds = read_field(model.config.get_text_config(), "layer_types") or ()
    if others := sorted({*kinds} - seam.PAGED_KINDS):
        raise UnsupportedError(
            f"{what} has no pages for layers of the kind {', '.join(map(repr, others))}, which "
            f"{type(model).__name__} has. Call model.generate on a padded batch instead"
        )
    if seam.CACHE_ARGUMENT != "cache":
        raise UnsupportedError(
            f"{what} of a swapped model needs transformers {seam.PAGES_SINCE}: attention modules "
            f"of this version do not read the pages. {INSTEAD}"
        )
    return True


def paged_attention(
    module: Any,
    backend: AttentionBackend,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AttentionMask,
    borders: dict[str, Any],
    options: dict[str, Any],
) -> Tensor:
    """Attend from the new tokens of each request to all tokens of that request.

    Args:
        module: The attention module.
        backend: Its backend, which keeps all keys.
        query: ``[1, H, T, D]``, the new tokens of all requests, one request after the other.
        key: ``[1, Hkv, S, D]``, of the pages.
        value: ``[1, Hkv, S, E]``.
        mask: The model's mask of the row; its window is that of every request.
        borders: ``cu_seq_lens_q`` and ``cu_seq_lens_k``, cumulative lengths of the requests. A
            module with the keys of another layer gets those of the keys by kind of layer.
        options: The other arguments of the backend.

    Returns:
        The output, ``[1, H, T, E]``, zero at tokens that pad the row.

    Raises:
        UnsupportedError: The model has a mask function of its own.
    """
    if mask.function is not None:
        raise UnsupportedError(
            f"the mask is {mask.function_name}, which continuous batching does not support. "
            f"{INSTEAD}"
        )
    lengths = borders["cu_seq_lens_k"]
    if isinstance(lengths, dict):
        lengths = lengths[read_field(module.config, "layer_types")[module.layer_idx]]
    queries, keys = borders["cu_seq_lens_q"].tolist(), lengths.tolist()
    hidden = options.pop("hidden_states")
    out = query.new_zeros(*query.shape[:3], value.shape[3])
    for i in range(len(queries) - 1):
        new, seen = slice(*queries[i : i + 2]), slice(*keys[i : i + 2])
        length, size = new.stop - new.start, seen.stop - seen.start
        if not length:
            continue
        out[:, :, new] = backend(
            query[:, :, new],
            key[:, :, seen],
            value[:, :, seen],
            mask=AttentionMask(causal=True, window=mask.window, q_offset=size - length),
            hidden_states=None if hidden is None else hidden[:, new],
            **options,
        ).out
    return out
