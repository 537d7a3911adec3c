"""Every public op under one name; an op's module is imported when the op is first used.

An op is a pure function on tensors that computes one mechanism. It lives in
``attnzoo/ops/<algorithm>/api.py``; the table below says which.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

_OPS = {
    "block_sparse_attention": "attnzoo.ops.block_sparse.api",
    "delta_attention": "attnzoo.ops.delta.api",
    "favor_attention": "attnzoo.ops.favor.api",
    "flash_attention": "attnzoo.ops.flash.api",
    "hybrid_attention": "attnzoo.ops.hybrid.api",
    "linear_attention": "attnzoo.ops.linear.api",
    "linformer_attention": "attnzoo.ops.linformer.api",
    "linformer_block_attention": "attnzoo.ops.linformer.api",
    "longformer_attention": "attnzoo.ops.longformer.api",
    "lsh_attention": "attnzoo.ops.lsh.api",
    "matrix_gated_attention": "attnzoo.ops.gated.api",
    "mlstm_attention": "attnzoo.ops.gated.api",
    "rwkv6_attention": "attnzoo.ops.gated.api",
    "shared_qk_attention": "attnzoo.ops.lsh.api",
    "softmax_attention": "attnzoo.ops.softmax.api",
}

if TYPE_CHECKING:
    from attnzoo.ops.block_sparse.api import block_sparse_attention
    from attnzoo.ops.delta.api import delta_attention
    from attnzoo.ops.favor.api import favor_attention
    from attnzoo.ops.flash.api import flash_attention
    from attnzoo.ops.gated.api import (
        matrix_gated_attention,
        mlstm_attention,
        rwkv6_attention,
    )
    from attnzoo.ops.hybrid.api import hybrid_attention
    from attnzoo.ops.linear.api import linear_attention
    from attnzoo.ops.linformer.api import linformer_attention, linformer_block_attention
    from attnzoo.ops.longformer.api import longformer_attention
    from attnzoo.ops.lsh.api import lsh_attention, shared_qk_attention
    from attnzoo.ops.softmax.api import softmax_attention

__all__ = [
    "block_sparse_attention",
    "delta_attention",
    "favor_attention",
    "flash_attention",
    "hybrid_attention",
    "linear_attention",
    "linformer_attention",
    "linformer_block_attention",
    "longformer_attention",
    "lsh_attention",
    "matrix_gated_attention",
    "mlstm_attention",
    "rwkv6_attention",
    "shared_qk_attention",
    "softmax_attention",
]


def __getattr__(name: str) -> Any:
    """Import an op's module when the op is first used."""
    if name not in _OPS:
        raise AttributeError(f"module 'attnzoo.ops' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_OPS[name]), name)
    return value


def __dir__() -> list[str]:
    """List the ops, loaded or not."""
    return sorted({*globals(), *_OPS})
