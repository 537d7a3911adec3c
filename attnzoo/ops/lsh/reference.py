r"""LSH attention with a dense matrix of attended keys: the oracle of the block-wise forms.

Computes, for every pair of a query and a key, in how many hash rounds the query attends to the key,
and then softmax attention over these counts. Time and memory O(R T S). Source: Kitaev et al., 2020,
arXiv:2001.04451; Daras et al., 2020, arXiv:2010.05315. Other letters: R hash rounds, P pivots of a
round.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from einops import rearrange, repeat
from torch import Tensor

from attnzoo.contract.padding import fill_padding
from attnzoo.ops.lsh.options import LSHInputs, LSHOptions, seeded_generator
from attnzoo.ops.softmax.api import softmax_attention
from attnzoo.runtime.kernel_calls import autocast_disabled


def reference_attention(inputs: LSHInputs) -> Tensor:
    """Compute LSH attention with dense scores, ``[B, H, T, E]``; differentiated by autograd."""
    x = inputs
    padding = None if x.key_segments is None else x.key_segments >= 0
    k, v = (fill_padding(t, padding) for t in (x.k, x.v))
    counts = count_attended_keys(
        x.q.detach(),
        k.detach(),
        x.query_segments,
        x.key_segments,
        x.rotations,
        x.seed,
        x.bucket_factors,
        [int(option) for option in x.options],
    )
    dtype = torch.promote_types(x.q.dtype, torch.float32)
    if x.bias is not None:
        counts = _hide_keys(counts, x.bias, x.options.shared_qk)
    bias = counts.clamp_min(1).to(dtype).log()  # a key attended to in n rounds has weight n
    if x.bias is not None:
        bias = bias + x.bias
    if x.options.shared_qk:
        k = k.to(dtype)
        k = k / (k.square().sum(-1, keepdim=True) + 1e-6 * k.shape[3]).sqrt()
    return softmax_attention(x.q, k, v, scale=x.scale, mask=counts > 0, bias=bias).out


def _hide_keys(counts: Tensor, bias: Tensor, shared_qk: bool) -> Tensor:
    """Return the counts without keys whose bias is -inf.

    In the shared form, a query that sees no other key attends to its own.
    """
    visible = bias != -torch.inf
    seen = counts.masked_fill(~visible, 0)
    if not shared_qk:
        return seen
    own = torch.eye(counts.shape[3], dtype=torch.bool, device=counts.device)
    alone = counts.any(-1, keepdim=True) & ~seen.any(-1, keepdim=True) & visible
    return seen + (alone & own)


@torch.library.custom_op("attnzoo::lsh_count_attended_keys", mutates_args=())
def count_attended_keys(
    q: Tensor,
    k: Tensor,
    query_segments: Tensor | None,
    key_segments: Tensor | None,
    rotations: Tensor | None,
    seed: Tensor,
    bucket_factors: list[int],
    options: list[int],
) -> Tensor:
    """Return in how many rounds each query attends to each key, ``[B, H, T, S]``.

    In the asymmetric form, a key counts once. Arguments are those of :class:`LSHInputs`.
    """
    lsh, numbers = LSHOptions.from_ints(options), tuple(seed.tolist())
    counts = q.new_zeros(*q.shape[:3], k.shape[2], dtype=torch.long)
    with autocast_disabled(q.device):
        for row, queries, keys in _sequences(q, k, query_segments, key_segments):
            q_row, k_row = q[row][:, queries].float(), k[row][:, keys].float()
            if lsh.shared_qk:
                found = _shared_qk_counts(q_row, k_row, lsh, numbers, rotations, bucket_factors)
            else:
                found = _asymmetric_mask(q_row, k_row, lsh, numbers).long()
            counts[row][:, queries[:, None], keys] = found
    return counts


@count_attended_keys.register_fake
def _(q: Tensor, k: Tensor, *options: object) -> Tensor:
    return q.new_empty(*q.shape[:3], k.shape[2], dtype=torch.long)


def _sequences(
    q: Tensor, k: Tensor, query_segments: Tensor | None, key_segments: Tensor | None
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield row, query indices and key indices of each sequence."""
    for row in range(q.shape[0]):
        if query_segments is None or key_segments is None:
            queries, keys = (torch.arange(x.shape[2], device=q.device) for x in (q, k))
            yield row, queries, keys
            continue
        for number in query_segments[row].unique().tolist():
            if number >= 0:
                queries, keys = (x[row] == number for x in (query_segments, key_segments))
                yield row, queries.nonzero()[:, 0], keys.nonzero()[:, 0]


# -- the asymmetric form ---------------------------------------------------------------------------


def _asymmetric_mask(q: Tensor, k: Tensor, options: LSHOptions, seed: tuple[int, ...]) -> Tensor:
    """Return which keys each query of one sequence attends to, ``[H, T, S]`` bool.

    Args:
        q: Queries, ``[H, T, D]``: the last T positions.
        k: Keys, ``[Hkv, S, D]``.
        options: Options.
        seed: Integers.
    """
    causal, length = options.causal, k.shape[1]
    keys = torch.arange(length, device=q.device)
    positions = keys[length - q.shape[1] :]
    distance = positions[:, None] - keys
    full = options.num_hashes * options.chunk_size + options.first_tokens
    full += options.window if causal else 2 * options.window + 1
    near = (distance.abs() < options.window + (not causal)) | (keys < options.first_tokens)
    if causal:
        near = (near | (positions[:, None] < full)) & (distance >= 0)
    else:
        near = near | (length <= full)
    mask = repeat(near, "t s -> h t s", h=q.shape[0]).clone()
    past = full if causal else length  # pivots are drawn from the first `past` keys
    while past < length or (full < past == length and not causal):
        rows = (positions >= past) & (positions < 2 * past) if causal else positions >= 0
        mask[:, rows] |= _bucket_mask(q[:, rows], k, distance[rows], past, options, seed)
        past *= 2
    return mask


def _bucket_mask(
    q: Tensor, k: Tensor, distance: Tensor, past: int, options: LSHOptions, seed: tuple[int, ...]
) -> Tensor:
    """Return which keys queries attend to in some hash round, ``[H, T, S]`` bool.

    Args:
        q: Queries, ``[H, T, D]``.
        k: Keys, ``[Hkv, S, D]``.
        distance: Query position minus key position, ``[T, S]``.
        past: Number of leading keys from which pivots are drawn.
        options: Options.
        seed: Integers.
    """
    chunk, groups = options.chunk_size, q.shape[0] // k.shape[0]
    mask = torch.zeros(q.shape[0], *distance.shape, dtype=torch.bool, device=q.device)
    center = k[:, :past].mean(1, keepdim=True)
    q = rearrange(q, "(hkv g) t d -> hkv (g t) d", g=groups)
    rounds, bits = _pivot_indices(past, options, seed)
    for index in rounds:
        pivots = k[:, index.to(k.device)] - center
        offset = (pivots * (center + pivots / 2)).sum(-1)
        key_bucket = _best_pivot(k @ pivots.mT - offset[:, None], bits)
        query_bucket = _best_pivot(q @ pivots.mT, bits)
        query_bucket = rearrange(query_bucket, "hkv (g t) -> (hkv g) t", g=groups)
        same = query_bucket[:, :, None] == key_bucket.repeat_interleave(groups, 0)[:, None]
        same[:, :, : options.first_tokens] = False
        if options.causal:  # the latest keys before the window
            same &= distance >= options.window
            mask |= same & (same.flip(2).cumsum(2).flip(2) <= chunk)
        else:  # the keys around the query's position
            rank, size = same.cumsum(2) - 1, same.sum(2, keepdim=True)
            begin = (same & (distance >= 0)).sum(2, keepdim=True) - chunk // 2
            begin = torch.minimum(begin, size - chunk).clamp_min(0)
            mask |= same & (rank >= begin) & (rank < begin + chunk)
    return mask


def _pivot_indices(
    past: int, options: LSHOptions, seed: tuple[int, ...]
) -> tuple[list[Tensor], int]:
    """Draw the positions of each round's pivots, ``[P]``; also return the bits of the largest P.

    Even rounds have half a pivot per chunk of keys, odd rounds one. The keys are cut into P equal
    ranges, and each range gives one pivot.
    """
    first, indices, bits = options.first_tokens, [], 0
    length = 2 * past if options.causal else past
    for parity, pivots_per_chunk in enumerate((0.5, 1.0)):
        rounds = len(range(parity, options.num_hashes, 2))
        count = int(pivots_per_chunk * length) // options.chunk_size
        count = min(options.num_buckets or min(max(count, 1), 256), past - first)
        generator = seeded_generator(*seed, past, parity)
        draw = torch.rand(rounds, count, generator=generator, dtype=torch.float32).double()
        edges = torch.tensor([first + (past - first) * i // count for i in range(count + 1)])
        indices += list(edges[:-1] + (draw * edges.diff()).long())
        bits = max(bits, (count - 1).bit_length())
    return indices, bits


def _best_pivot(scores: Tensor, bits: int) -> Tensor:
    """Return the highest-scoring pivot, ``[Hkv, T]``, of float32 scores ``[Hkv, T, P]``.

    By definition, the pivot's index replaces the last ``bits`` bits of a score.
    """
    index = torch.arange(scores.shape[2], dtype=torch.int32, device=scores.device)
    tagged = scores.contiguous().view(torch.int32) & -(1 << bits) | index
    return tagged.view(torch.float32).argmax(2)


# -- the shared form -------------------------------------------------------------------------------


def _shared_qk_counts(
    q: Tensor,
    k: Tensor,
    options: LSHOptions,
    seed: tuple[int, ...],
    rotations: Tensor | None,
    factors: list[int],
) -> Tensor:
    """Return in how many rounds each query of one sequence attends to each key, ``[H, T, T]``.

    Args:
        q: Queries, ``[H, T, D]``.
        k: Keys, ``[Hkv, T, D]``.
        options: Options.
        seed: Integers.
        rotations: ``[Hkv, D, R, F / 2]``; ``None`` draws them.
        factors: The product is the number of buckets, the sum is F; empty for the default.
    """
    (key_heads, length, size), chunk = k.shape, options.chunk_size
    single, groups = length <= chunk, q.shape[0] // key_heads
    factors = factors or _default_factors(length, chunk)
    if rotations is None:
        shape = (key_heads, size, options.num_hashes, sum(factors) // 2)
        rotations = torch.randn(shape, generator=seeded_generator(*seed), dtype=torch.float32)
    rotations = rotations.to(k)[:, :, : 1 if single else None]
    num_rounds, num_chunks = rotations.shape[2], -(-length // chunk)
    key_chunk = _chunk_ids(k, rotations, factors, chunk).repeat_interleave(groups, 0)
    query_chunk = _chunk_ids(q, rotations.repeat_interleave(groups, 0), factors, chunk)
    previous = (query_chunk - 1) % (num_rounds * num_chunks)  # chunk 0 continues the round before
    counts = torch.zeros(q.shape[0], length, length, dtype=torch.long, device=q.device)
    for keys in key_chunk.unbind(1):
        for own, before in zip(query_chunk.unbind(1), previous.unbind(1), strict=True):
            counts += keys[:, None] == own[:, :, None]
            if not single:
                counts += keys[:, None] == before[:, :, None]
    position = torch.arange(length, device=q.device)
    hidden = position[:, None] == position
    if options.causal:
        hidden = hidden | (position[:, None] < position)
    counts = counts.masked_fill(hidden, 0)
    no_other = counts.sum(2, keepdim=True) == 0  # such a query attends to its own key
    return counts + no_other * torch.eye(length, dtype=torch.long, device=q.device)


def _chunk_ids(x: Tensor, rotations: Tensor, factors: list[int], chunk: int) -> Tensor:
    """Return the chunk of each token in each round, ``[H, R, T]``, numbered over all rounds."""
    rotated = torch.einsum("htd,hdrf->hrtf", x, rotations)
    bucket, product = torch.zeros_like(rotated[..., 0], dtype=torch.long), 1
    for factor, part in zip(factors, rotated.split([f // 2 for f in factors], 3), strict=True):
        bucket += product * torch.cat([part, -part], 3).argmax(3)
        product *= factor
    num_rounds, length = bucket.shape[1:]
    rank = bucket.argsort(stable=True).argsort()
    round_index = torch.arange(num_rounds, device=x.device)[:, None]
    return rank // chunk + round_index * -(-length // chunk)


def _default_factors(length: int, chunk: int) -> list[int]:
    """Return factors of the default number of buckets, about two per chunk."""
    power = max((2 * (length // chunk)).bit_length() - 1, 1)
    small = 2**power <= 2 * max(chunk, 8)
    return [2**power] if small else [2 ** (power // 2), 2 ** (power - power // 2)]
