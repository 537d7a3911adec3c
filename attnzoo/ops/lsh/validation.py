"""Checks of the masks and lengths that LSH attention supports.

Letters: B batch, T queries, S keys.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from attnzoo.contract.masks import AttentionMask
from attnzoo.contract.validation import check_mask_fields, check_qkv, check_size
from attnzoo.errors import UnsupportedError
from attnzoo.ops.lsh.options import LSHOptions

MAX_HASHES = 2**10
MAX_BUCKETS = 2**16  # or of each factor; more cost more than full attention


def check_lsh_inputs(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, bias: Tensor | None
) -> None:
    """Raise ``UnsupportedError`` for inputs that no form of LSH attention supports."""
    check_qkv(q, k, v, mask, bias=bias)
    check_mask_fields("LSH attention", mask, "segment_ids", "q_offset")


def check_options(options: LSHOptions, factors: Sequence[int] = ()) -> None:
    """Raise ``UnsupportedError`` if a size is out of range."""
    check_size("num_hashes", options.num_hashes, maximum=MAX_HASHES)
    check_size("chunk_size", options.chunk_size)
    for name in ("num_buckets", "window", "first_tokens"):
        check_size(name, getattr(options, name), minimum=0)
    for factor in factors:
        check_size("num_buckets", factor, minimum=2, maximum=MAX_BUCKETS)
        if factor % 2:
            raise UnsupportedError(
                f"num_buckets must be even, or even factors of it, got {factor}: a rotation and "
                "its opposite have one bucket each."
            )


def check_lengths(q: Tensor, k: Tensor, mask: AttentionMask, *, shared_qk: bool) -> None:
    """Raise ``UnsupportedError`` if the numbers of queries and keys do not fit the form."""
    length, keys = q.shape[2], k.shape[2]
    given = f"{length} queries and {keys} keys are given"
    if shared_qk and length != keys:
        raise UnsupportedError(
            f"{given}; shared_qk_attention needs equally many. Pass the whole sequence, also to "
            "continue from cached keys."
        )
    if length > keys or (length < keys and not mask.causal):
        raise UnsupportedError(
            f"{given}; fewer queries than keys need a causal mask with q_offset, the position of "
            "the first query, and more queries than keys are not supported."
        )
    offset = mask.q_offset
    if mask.causal and isinstance(offset, int) and not 0 <= offset <= keys - length:
        raise UnsupportedError(
            f"{given} with a mask whose q_offset is {offset}; it must be between 0 and "
            f"{keys - length}, so that every query has a key at its position."
        )
