"""Where the splits of sequences are, for the kernels of the delta rule."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def locate_split(
    n, b, starts, lengths, boundary_sequences, tokens, split_size, num_splits, num_sequences,
    VARLEN: tl.constexpr,
):  # fmt: skip
    """Return where the split of program ``n`` of a head is.

    Args:
        n: From 0 to ``num_splits``.
        b: Row.
        starts: First token of each sequence, ``[S]``.
        lengths: Tokens of each sequence, ``[S]``.
        boundary_sequences: See above, ``[J]``.
        tokens: T.
        split_size: Tokens of a split that is not the last one.
        num_splits: Programs of a head.
        num_sequences: S, 1 in a full row.
        VARLEN: Whether the row has sequences; else each row is one.

    Returns:
        The index of its sequence, int64; its first token, and the token after its last, int32;
        whether it is the first split of the sequence, and the last. The split after a boundary that
        is in no sequence has no tokens.
    """
    is_first = n < num_sequences
    if VARLEN:
        boundary = n - num_sequences
        sequence = tl.load(boundary_sequences + boundary, mask=boundary >= 0, other=0)
        sequence = tl.where(is_first, n, sequence.to(tl.int64))
        first = tl.load(starts + sequence).to(tl.int32)
        sequence_end = first + tl.load(lengths + sequence).to(tl.int32)
        tokens_before = tl.maximum((boundary + 1) * split_size - first, 0).to(tl.int32)
        splits_before = tl.where(is_first, 0, (tokens_before + split_size - 1) // split_size)
        start = first + splits_before * split_size
        end = tl.minimum(start + split_size, sequence_end)
        is_last = end == sequence_end
        end = tl.where(is_first | (splits_before > 0), end, start)
    else:
        sequence = b
        start = (n * split_size).to(tl.int32)
        end = tl.minimum(start + split_size, tokens)
        is_last = n == num_splits - 1
    return sequence, start, end, is_first, is_last
