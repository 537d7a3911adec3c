"""Every public op under one name; an op's module is imported when the op is first used.

An op is a pure function on tensors that computes one mechanism. It lives in
``attnzoo/backends/<mechanism>/op.py`` unless the table below says otherwise.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

_OPS = {
    "block_sparse_attention": "attnzoo.backends.block_sparse.op",
    "delta_attention": "attnzoo.backends.delta.op",
    "favor_attention": "attnzoo.backends.performer.op",
    "flash_attention": "attnzoo.backends.flash.op",
    "hybrid_attention": "attnzoo.backends.linear.window_hybrid",
    "linear_attention": "attnzoo.backends.linear.op",
    "linformer_attention": "attnzoo.backends.linformer.op",
    "linformer_block_attention": "attnzoo.backends.linformer.op",
    "longformer_attention": "attnzoo.backends.longformer.op",
    "lsh_attention": "attnzoo.backends.reformer.op",
    "matrix_gated_attention": "attnzoo.backends.gated_linear.op",
    "mlstm_attention": "attnzoo.backends.gated_linear.op",
    "rwkv6_attention": "attnzoo.backends.gated_linear.op",
    "shared_qk_attention": "attnzoo.backends.reformer.op",
    "softmax_attention": "attnzoo.backends.softmax.op",
}

if TYPE_CHECKING:
    from attnzoo.backends.block_sparse.op import block_sparse_attention
    from attnzoo.backends.delta.op import delta_attention
    from attnzoo.backends.flash.op import flash_attention
    from attnzoo.backends.gated_linear.op import (
        matrix_gated_attention,
        mlstm_attention,
        rwkv6_attention,
    )
    from attnzoo.backends.linear.op import linear_attention
    from attnzoo.backends.linear.window_hybrid import hybrid_attention
    from attnzoo.backends.linformer.op import linformer_attention, linformer_block_attention
    from attnzoo.backends.longformer.op import longformer_attention
    from attnzoo.backends.performer.op import favor_attention
    from attnzoo.backends.reformer.op import lsh_attention, shared_qk_attention
    from attnzoo.backends.softmax.op import softmax_attention

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
