"""LSH attention of one work item in PyTorch, block by block: ``impl="torch"``.

Other letters: U key heads of the work item.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnzoo.ops.lsh.asymmetric_plan import plan_rounds
from attnzoo.ops.lsh.block_softmax import (
    EMPTY_LSE,
    HIDDEN,
    BlockPlan,
    block_attention,
    block_attention_backward,
)
from attnzoo.ops.lsh.options import LSHInputs
from attnzoo.ops.lsh.shared_qk_plan import (
    default_bucket_factors,
    draw_rotations,
    plan_chunks,
    same_memory,
)
from attnzoo.ops.lsh.voronoi_hashing import HashRounds
from attnzoo.ops.lsh.work_items import (
    KEYS,
    QUERIES,
    WorkItem,
    to_rows,
)
from attnzoo.runtime.memory import empty_huge_pages


class BlockwiseTensors:
    """Queries, keys and values of a work item as rows, and its blocks.

    Args:
        item: The work item.
        inputs: Inputs of the call.

    Attributes:
        q: Scaled queries, ``[U G T + 1, D]``; the last row is padding.
        k: Keys, ``[U S, D]``; of unit length in the shared form.
        v: Values, ``[U S, E]``.
        norm: Norms of the keys in the shared form, ``[U S, 1]``.
    """

    def __init__(self, item: WorkItem, inputs: LSHInputs) -> None:
        x, shared_qk = inputs, inputs.options.shared_qk
        self.scale = x.scale
        self.bias = None if x.bias is None else item.pair_bias(x.bias, x.q, x.k)
        one_tensor = shared_qk and same_memory(x.q, x.k)
        q, self.v = item.gather(x.q, QUERIES), item.gather(x.v, KEYS).flatten(0, 2)
        k = q if one_tensor else item.gather(x.k, KEYS)
        self.plan = plan_blocks(item, x, q, k[:, 0])
        _, self.groups, self.length, _ = q.shape
        self.q = to_rows(q)
        self.k = self.q[:-1] if one_tensor else k.flatten(0, 2)
        self.norm: Tensor | None = None
        if shared_qk:
            norm = torch.linalg.vector_norm(self.k, dim=1, keepdim=True)
            self.norm = norm.square_().add_(1e-6 * self.k.shape[1]).sqrt_()
            self.k = torch.div(self.k, self.norm, out=empty_huge_pages(self.k, self.k.shape))
        if x.scale != 1:
            self.q.mul_(x.scale)

    def forward(self) -> tuple[Tensor, Tensor]:
        """Attend; in the shared form, a query that sees no other key attends to its own."""
        out, lse = block_attention(self.q, self.k, self.v, self.plan, self.bias)
        queries, keys = self._self_attending(lse)
        out[queries] = self.v[keys]
        return out[:-1], lse[:-1]

    def backward(
        self, d_out: Tensor, delta: Tensor, lse: Tensor, d_bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v; see :class:`WorkItemTensors`."""
        queries, keys = self._self_attending(lse)
        d_own = d_out[queries]
        d_out[queries] = 0
        inputs = (self.q, self.k, self.v, self.plan.batches, self.bias, d_bias)
        dq, dk, dv = block_attention_backward(d_out, delta, lse, *inputs)
        dv.index_add_(0, keys, d_own)
        if self.norm is not None:  # the gradient of k / norm
            along_k = (self.k * dk).sum(1, keepdim=True)
            dk.addcmul_(self.k, along_k, value=-1).div_(self.norm)
        return dq[:-1].mul_(self.scale) if self.scale != 1 else dq[:-1], dk, dv

    def _self_attending(self, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Return the query rows without other keys, and the rows of their own keys."""
        empty = (lse[:-1, 0] <= EMPTY_LSE / 2) & (self.norm is not None)
        queries = empty.nonzero()[:, 0]
        keys = queries // (self.groups * self.length) * self.length + queries % self.length
        if self.bias is not None:  # it may hide a query's own key too
            own = self.bias.query_offsets[queries] + self.bias.key_offsets[keys]
            visible = self.bias.values.take(own) > HIDDEN
            queries, keys = queries[visible], keys[visible]
        return queries, keys


def plan_blocks(item: WorkItem, inputs: LSHInputs, q: Tensor, k: Tensor) -> BlockPlan:
    """Hash queries ``[U, G, T, D]`` and keys ``[U, S, D]``, and return the blocks."""
    q, k, options, seed = q.float(), k.float(), inputs.options, tuple(inputs.seed.tolist())
    if not options.shared_qk:
        return plan_rounds(HashRounds(q, k, options, item.level, seed))
    length, size = k.shape[1:]
    chunk_size = min(options.chunk_size, length)
    factors = inputs.bucket_factors or default_bucket_factors(length, chunk_size)
    rotations = inputs.rotations
    if rotations is None:
        heads = item.key_heads
        rotations = draw_rotations(heads, size, options.num_hashes, factors, seed)
    rotations = rotations.to(k)[item.heads]
    rotations = rotations.repeat(k.shape[0] // len(rotations), 1, 1, 1)
    return plan_chunks(q, k, rotations, factors, chunk_size=chunk_size, causal=options.causal)
