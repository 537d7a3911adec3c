"""FlexAttention on a CPU: unfused, with gradients; it ignores lists of blocks."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention

import attnzoo.ops.block_sparse.api
import attnzoo.ops.flash.api
import attnzoo.ops.hybrid.api
import attnzoo.ops.longformer.api  # noqa: F401
from attnzoo.ops.window import flex
from tests.helpers import change_implementation

OPS = ("flash", "longformer", "hybrid", "block_sparse")


@contextmanager
def flex_on_cpu(patch: pytest.MonkeyPatch, block: int = 8) -> Iterator[list[Any]]:
    """Let ops run FlexAttention on CPUs, in blocks of 8; collects the masks of the calls.

    The compiled kernels read the lists of blocks, so these must agree with the mask: keys that a
    query sees are in a listed block, and in a full one every query sees every key.
    """
    masks: list[Any] = []
    call = flex._call

    def checked(q, k, v, *, block_mask, **options):
        masks.append(block_mask)
        if not torch.compiler.is_compiling():
            check_lists(block_mask, q.shape[0], q.shape[1])
        return call(q, k, v, block_mask=block_mask, **options)

    patch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    patch.setattr(flex_attention, "_validate_device", lambda *x: None)
    patch.setattr(flex, "_call", checked)
    patch.setattr(flex, "BLOCK", block)
    for op in OPS:
        change_implementation(patch, f"{op}_attention", "flex", devices=("cpu",), priority=99)
    yield masks


def check_lists(mask: Any, batch: int, heads: int) -> None:
    """Compare the lists of a mask with its function."""
    queries, keys = mask.seq_lengths
    seen = flex_attention.create_mask(mask.mask_mod, batch, heads, queries, keys, "cpu")
    size = mask.BLOCK_SIZE[0]
    partial, full = (
        blocks.repeat_interleave(size, 2)
        for blocks in (
            dense_blocks(mask.kv_num_blocks, mask.kv_indices),
            dense_blocks(mask.full_kv_num_blocks, mask.full_kv_indices),
        )
    )
    partial, full = (x.repeat_interleave(size, 3) for x in (partial, full))
    assert not (partial & full).any()
    assert not full[:, :, queries:].any()
    assert not full[..., keys:].any()
    partial, full = (x[:, :, :queries, :keys] for x in (partial, full))
    assert not (seen & ~(partial | full)).any()
    assert (seen | ~full).all()


def dense_blocks(counts: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return the listed blocks, ``[B, H, M, N]`` bool."""
    listed = torch.arange(indices.shape[3]) < counts[..., None]
    return torch.zeros(indices.shape, dtype=torch.bool).scatter(3, indices.long(), listed)
