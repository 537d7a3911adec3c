# The public ops; attnzoo/ops/__init__.py reads them from here (see attnzoo/lazy_names.py)
from attnzoo.ops.block_sparse.api import block_sparse_attention as block_sparse_attention
from attnzoo.ops.delta.api import delta_attention as delta_attention
from attnzoo.ops.flash.api import flash_attention as flash_attention
from attnzoo.ops.gated.matrix_gate import matrix_gated_attention as matrix_gated_attention
from attnzoo.ops.gated.mlstm import mlstm_attention as mlstm_attention
from attnzoo.ops.gated.rwkv6 import rwkv6_attention as rwkv6_attention
from attnzoo.ops.hybrid.api import hybrid_attention as hybrid_attention
from attnzoo.ops.linear.api import linear_attention as linear_attention
from attnzoo.ops.linformer.api import linformer_attention as linformer_attention
from attnzoo.ops.linformer.api import linformer_block_attention as linformer_block_attention
from attnzoo.ops.longformer.api import longformer_attention as longformer_attention
from attnzoo.ops.lsh.api import lsh_attention as lsh_attention
from attnzoo.ops.lsh.api import shared_qk_attention as shared_qk_attention
from attnzoo.ops.softmax.api import softmax_attention as softmax_attention
