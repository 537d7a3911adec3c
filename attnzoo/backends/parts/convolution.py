r"""The short convolution of queries, keys and values, as in Gated DeltaNet and KDA.

Each channel of the queries, keys and values is convolved with the tokens just before, so that a key
may depend on the token that precedes its value, as an induction head's does. There is no
activation, and training starts at the identity: a pretrained layer starts with its own queries,
keys and values. Other letters: S sequences (B if rows are sequences), W width, X = H D + Hkv (D +
E) channels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from attnzoo.contract.context_parallel import latest_before
from attnzoo.contract.inputs import AttentionInputs
from attnzoo.contract.states import put_slots, read_slots
from attnzoo.ops.convolution import causal_convolution, last_tokens
from attnzoo.runtime.kernel_calls import widen


class EarlierTokens(NamedTuple):
    """The tokens before each row or sequence."""

    x: Tensor  # [B, W - 1, X]


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
        """Convolve the tokens of each sequence.

        Args:
            inputs: Queries, keys and values of rows or of one row of sequences.
            before: The W - 1 tokens before the first one, ``[S, W - 1, X]``, or a pool of them, of
                which the rows at ``inputs.slots`` are read and written.

        Returns:
            The inputs with other queries, keys and values, in float32 or wider, and the last W - 1
            tokens, if ``inputs.return_state``.
        """
        reach, sequences, slots = self.weight.shape[2] - 1, inputs.sequences, inputs.slots
        heads = [inputs.q, inputs.k, inputs.v]
        sizes = [x.shape[1] * x.shape[3] for x in heads]
        x = torch.cat([y.transpose(1, 2).flatten(2) for y in heads], 2)
        if inputs.shard is not None and reach:
            before = self._tokens_of_earlier_ranks(x, inputs)
        pool = before
        if before is not None:
            before = before if slots is None else read_slots((before,), slots)[0]
            before = before.to(x.dtype)
        earlier = None if before is None else widen(before)
        out = causal_convolution(widen(x), self.weight[:, 0], before=earlier, sequences=sequences)
        last: Tensor | None = None
        if inputs.return_state:
            last = last_tokens(x, reach, before=before, sequences=sequences)
            if slots is not None and pool is not None:
                in_place = inputs.reuse_state and not torch.is_grad_enabled()
                last = put_slots((pool,), slots, (last.to(pool.dtype),), in_place=in_place)[0]
        q, k, v = (
            y.unflatten(2, (z.shape[1], -1)).transpose(1, 2)
            for y, z in zip(out.split(sizes, 2), heads, strict=True)
        )
        return inputs._replace(q=q, k=k, v=v), last

    def _tokens_of_earlier_ranks(self, x: Tensor, inputs: AttentionInputs) -> Tensor:
        """Return the W - 1 tokens before this rank's, zeros if there are fewer."""
        assert inputs.shard is not None
        reach, rows = self.weight.shape[2] - 1, inputs.shard.rows(x[:, None])
        (latest,) = latest_before((rows,), inputs.shard, reach)
        seen = inputs.shard.tokens_before(rows.shape[0], x.device)
        is_filled = torch.arange(reach, device=x.device) >= reach - seen[:, None]
        earlier = EarlierTokens(latest[:, 0] * is_filled[..., None])
        return inputs.shard.states(earlier, inputs.sequences).x
