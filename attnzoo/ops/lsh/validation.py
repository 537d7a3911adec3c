"""Checks of the masks and lengths that LSH attention supports."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from attnzoo.contract.masks import AttentionMask
from attnzoo.contract.validation import check_lengths, check_mask_fields, check_qkv, check_size
from attnzoo.errors import UnsupportedError
from attnzoo.ops.lsh.options import LSHOptions

MAX_HASHES = 2**10
MAX_BUCKETS = 2**16  # or of each factor; more cost more than full attention


def check_inputs(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, bias: Tensor | None, *, shared_qk: bool
) -> None:
    """Raise ``UnsupportedError`` for inputs that a form of LSH attention does not support."""
    check_qkv(q, k, v, mask, bias=bias)
    check_mask_fields("LSH attention", mask, "segment_ids", "q_offset")
    if shared_qk and q.shape[2] != k.shape[2]:
        raise UnsupportedError(
            f"{q.shape[2]} queries and {k.shape[2]} keys are given; shared_qk_attention needs "
            "equally many. Pass the whole sequence, also to continue from cached keys."
        )
    check_lengths(q, k, mask)


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
