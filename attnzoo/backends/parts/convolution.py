r"""The short convolution of queries, keys and values, as in Gated DeltaNet and KDA.

Each channel of the queries, keys and values is convolved with the tokens just before, so that a
key may depend on the token that precedes its value, as an induction head's does. There is no
activation, and training starts at the identity: a pretrained layer starts with its own queries,
keys and values.
Letters: B batch, H query heads, Hkv key heads, T tokens, D key size, E value size, W width,
X = H D + Hkv (D + E) channels.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attnzoo.contract.context_parallel import latest_before
from attnzoo.contract.inputs import AttentionInputs
from attnzoo.contract.padding import gather_tokens
from attnzoo.ops.convolution import causal_convolution
from attnzoo.ops.features.functional import widen
from attnzoo.ops.window.causal_window import is_filled, padding_last


class ShortConvolution(nn.Module):
    """Causal depthwise convolution of queries, keys and values.

    Args:
        channels: X.
        width: W, in tokens, with the token itself.

    Attributes:
        weight: ``[X, 1, W]``, as that of ``nn.Conv1d``; the last column multiplies the token.
    """

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width))

    def reset_parameters(self) -> None:
        """Initialise to the identity."""
        with torch.no_grad():
            self.weight.zero_()[..., -1] = 1

    def forward(
        self, inputs: AttentionInputs, before: Tensor | None
    ) -> tuple[AttentionInputs, Tensor | None]:
        """Convolve the real tokens of each sequence.

        Args:
            inputs: Queries, keys and values are zero at padding.
            before: The W - 1 real tokens before the first one, ``[B, W - 1, X]``.

        Returns:
            The inputs with other queries, keys and values, in float32 or wider, and the last W - 1
            real tokens, if ``inputs.return_state``.
        """
        mask, reach = inputs.mask, self.weight.shape[2] - 1
        heads = [inputs.q, inputs.k, inputs.v]
        sizes = [x.shape[1] * x.shape[3] for x in heads]
        x = torch.cat([y.transpose(1, 2).flatten(2) for y in heads], 2)
        padding_mask, ids, order = mask.padding, mask.segment_ids, None
        if inputs.shard is not None and reach:
            (before,) = latest_before((x[:, None],), inputs.shard, reach)
            seen = inputs.shard.tokens_before(len(x), x.device)
            before = before[:, 0] * is_filled(seen, reach)[..., None]
        if padding_mask is not None:
            order, padding_mask, ids = padding_last(padding_mask, ids)
            x = _gather(x, order)
        before = x.new_zeros(len(x), reach, x.shape[2]) if before is None else before.to(x.dtype)
        out = causal_convolution(widen(x), self.weight[:, 0], before=widen(before), segment_ids=ids)
        last = _last_tokens(x, before, padding_mask, ids) if inputs.return_state else None
        if order is not None:
            out = _gather(out, order.argsort(1)).masked_fill(~mask.padding[..., None], 0)  # type: ignore[index]
        q, k, v = (
            y.unflatten(2, (z.shape[1], -1)).transpose(1, 2)
            for y, z in zip(out.split(sizes, 2), heads, strict=True)
        )
        return inputs._replace(q=q, k=k, v=v), last


def _gather(x: Tensor, index: Tensor) -> Tensor:
    """Gather the tokens at ``[B, N]`` from ``[B, T, X]``."""
    return gather_tokens(x[:, None], index)[:, 0]


def _last_tokens(
    x: Tensor, before: Tensor, padding_mask: Tensor | None, segment_ids: Tensor | None
) -> Tensor:
    """Return the last W - 1 real tokens of the last sequence, the newest last, else zeros.

    Args:
        x: Tokens whose padding is at the end, ``[B, T, X]``.
        before: The W - 1 tokens before them.
        padding_mask: ``[B, T]``, true at real tokens.
        segment_ids: ``[B, T]``.
    """
    reach, tokens = before.shape[1], torch.cat([before, x], 1)
    if segment_ids is not None:
        ids = torch.cat([segment_ids[:, :1].expand(-1, reach), segment_ids], 1)
        tokens = tokens * (ids == ids[:, -1:])[..., None]
    if padding_mask is None:
        return tokens[:, x.shape[1] :].clone()
    index = padding_mask.sum(1, keepdim=True) + torch.arange(reach, device=x.device)
    return _gather(tokens, index)
