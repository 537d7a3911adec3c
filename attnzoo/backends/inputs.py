"""What one call of a backend is given, and what is checked and cleared before it runs.

Letters: B batch, H query heads, Hkv key heads, T queries, S keys, D key size, E value size,
M hidden size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnzoo.masks import AttentionMask
from attnzoo.ops.context_parallel import Shard

MASK_IN_BIAS = (
    "an additive mask is given to a causal layer, which does not tell causality from bias (give "
    "the model a 2-D padding mask, or none)"
)


class AttentionInputs(NamedTuple):
    """All that one call of a backend may be given."""

    q: Tensor  # [B, H, T, D]
    k: Tensor  # [B, Hkv, S, D]
    v: Tensor  # [B, Hkv, S, E]
    mask: AttentionMask
    scale: float  # multiplies query-key products
    state: Any | None = None  # what this backend returned for the earlier tokens
    hidden_states: Tensor | None = None  # [B, S, M]: what the keys were projected from
    bias: Tensor | None = None  # added to the scores, broadcastable to [B, H, T, S]
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)
    sinks: Tensor | None = None  # [H] or [B, H, T, 1]: logits in the softmax that have no value
    dropout: float = 0.0
    return_state: bool = False
    shard: Shard | None = None  # the share of the rows that this process holds, if not all


def shape_reasons(inputs: AttentionInputs, dtypes: frozenset[torch.dtype]) -> list[str]:
    """Say what is wrong with shapes and dtypes."""
    q, k, v = inputs.q, inputs.k, inputs.v
    takes = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
    reasons = [
        f"{name} is {x.dtype} (it takes {takes})"
        for name, x in (("q", q), ("k", k), ("v", v))
        if x.dtype not in dtypes
    ]
    if not q.ndim == k.ndim == v.ndim == 4:
        return [
            *reasons,
            f"q, k and v have {q.ndim}, {k.ndim} and {v.ndim} dimensions (4 each are needed)",
        ]
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        reasons.append(
            f"q, k and v have {q.shape[0]}, {k.shape[0]} and {v.shape[0]} rows (they must agree)"
        )
    if k.shape[1] != v.shape[1] or q.shape[1] % k.shape[1]:
        reasons.append(
            f"q has {q.shape[1]} heads, k {k.shape[1]} and v {v.shape[1]} "
            "(k and v need the same number, and q a multiple of it)"
        )
    if q.shape[3] != k.shape[3]:
        reasons.append(f"q has size {q.shape[3]} per head and k {k.shape[3]} (they must agree)")
    if k.shape[2] != v.shape[2]:
        reasons.append(f"k has {k.shape[2]} tokens and v {v.shape[2]} (they must agree)")
    for name, x in (("padding", inputs.mask.padding), ("segment_ids", inputs.mask.segment_ids)):
        if x is not None and (x.shape[0] not in (1, k.shape[0]) or x.shape[1] != k.shape[2]):
            reasons.append(
                f"the mask's {name} is {tuple(x.shape)} ({(k.shape[0], k.shape[2])} is needed)"
            )
    return reasons


def call_reasons(inputs: AttentionInputs, shard: Shard) -> list[str]:
    """Say what a call on a share of the rows cannot have, whatever the backend."""
    mask, lengths = inputs.mask, (inputs.q.shape[2], inputs.k.shape[2])
    reasons = []
    if lengths != (shard.length, shard.length):
        reasons.append(
            "{} queries and {} keys are given".format(*lengths)
            + f" (a share of the rows has {shard.length} tokens)"
        )
    for given, what in (
        (
            inputs.state is not None or inputs.return_state,
            "a cache is asked for (call the model with use_cache=False)",
        ),
        (mask.function is not None, f"the mask is {mask.function_name or 'arbitrary'}"),
        (inputs.bias is not None, "an additive bias is given"),
        (
            (mask.padding is not None and shard.padding is None)
            or (mask.segment_ids is not None and shard.segment_ids is None),
            "padding or packing of the share is given, but not of the whole rows (give "
            "attention_mask or position_ids with the batch)",
        ),
        (
            shard.segment_ids is not None and not mask.causal,
            "rows are packed without a causal mask",
        ),
    ):
        if given:
            reasons.append(f"{what}, while the rows lie on several processes")
    return reasons


def clear_padding(inputs: AttentionInputs, *, cross_attention: bool = False) -> AttentionInputs:
    """Put zeros where the mask says padding: nothing that stands there, NaN included, spreads.

    In cross-attention it speaks of the keys only, be the queries as many as they may.
    """
    real = inputs.mask.padding
    if real is None:
        return inputs
    gone = ~real[:, None, :, None]
    q, hidden = inputs.q, inputs.hidden_states
    real_queries = inputs.mask.query_padding(q.shape[2], inputs.k.shape[2])
    if real_queries is not None and not cross_attention:
        q = q.masked_fill(~real_queries[:, None, :, None], 0)
    if hidden is not None:
        hidden = hidden.masked_fill(~real[:, :, None], 0)
    return inputs._replace(
        q=q, k=inputs.k.masked_fill(gone, 0), v=inputs.v.masked_fill(gone, 0), hidden_states=hidden
    )
