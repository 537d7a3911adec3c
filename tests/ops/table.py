"""Every public op, with its gates, weights and biases as inputs, and calls of it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnzoo import ops
from attnzoo.contract.implementation import implementations
from attnzoo.contract.masks import AttentionMask
from attnzoo.errors import UnsupportedError
from attnzoo.ops.features.functional import MapWeights
from attnzoo.ops.hybrid.api import LinearBranch
from attnzoo.ops.longformer.call import GlobalTokens
from attnzoo.runtime.kernel_calls import widen

H, HKV, D, E = 4, 2, 6, 5
SELF = [(0, 4, 4), (0, 1, 1), (0, 130, 130), (2, 0, 0), (0, 0, 0)]  # rows, queries, keys
PAIRS = [*SELF, (0, 3, 5), (2, 3, 0), (2, 0, 3)]


def gate(x: Tensor) -> Tensor:
    """Return a log decay, in float32 or wider as gates return it."""
    return -widen(x).abs()


def flash(q, k, v, *bias_and_sinks, **options):
    options |= dict(zip(("bias", "sinks"), bias_and_sinks, strict=False))
    return ops.flash_attention(q, k, v, **options)


def softmax(q, k, v, bias, sinks, **options):
    return ops.softmax_attention(q, k, v, bias=bias, sinks=sinks, **options)


def longformer_globals(q, k, v, global_q, global_k, global_v, **options):
    is_global = torch.ones(k.shape[0], k.shape[2], dtype=torch.bool)
    tokens = GlobalTokens(is_global, None, global_q, global_k, global_v)
    return ops.longformer_attention(q, k, v, window=3, global_tokens=tokens, **options)


def linear(q, k, v, decay, *, causal, **options):
    decay = gate(decay) if causal else None
    options |= {"causal": causal, "log_decay": decay, "normalize": True}
    return ops.linear_attention(q, k, v, **options)


def learned_linear(q, k, v, query_weights, key_weights, **options):
    options |= {"feature_map": "hedgehog", "map_weights": MapWeights(query_weights, key_weights)}
    return ops.linear_attention(q, k, v, **options)


def delta(q, k, v, beta, decay, **options):
    return ops.delta_attention(q, k, v, beta, log_decay=gate(decay), **options)


def hybrid(q, k, v, q_features, k_features, weight, decay, *, causal=True, num_sinks=0, **options):
    decay = gate(decay) if causal else None
    branch = LinearBranch(widen(q_features).abs(), widen(k_features).abs(), weight, decay)
    options |= {"window": 3, "scale": 1.0, "causal": causal, "num_sinks": num_sinks}
    return ops.hybrid_attention(q, k, v, branch, **options)


def learned_hybrid(q, k, v, weight, query_weights, key_weights, **options):
    weights = MapWeights(query_weights, key_weights)
    branch = LinearBranch(q, k, weight, feature_map="hedgehog", map_weights=weights)
    return ops.hybrid_attention(q, k, v, branch, window=3, scale=1.0, **options)


def mlstm(q, k, v, forget, write, **options):
    return ops.mlstm_attention(q, k, v, log_forget=gate(forget), log_input=write, **options)


def rwkv6(q, k, v, decay, bonus, **options):
    return ops.rwkv6_attention(
        q, k, v, log_decay=gate(decay), bonus=bonus, normalize=True, **options
    )


def matrix(q, k, v, decay, bias, **options):
    def log_decay(take):
        return gate(take(decay, 2)[..., None]) + gate(bias[:, None])

    return ops.matrix_gated_attention(q, k, v, log_decay=log_decay, **options)


class Case(NamedTuple):
    """An op, the shapes of its inputs after q, k and v, calls, and who computes them."""

    op: str
    run: Callable[..., Any]
    shapes: tuple[tuple[Any, ...], ...] = ()  # "B", "T" and "S" stand for rows, queries, keys
    variants: tuple[dict[str, Any], ...] = ({},)
    lengths: Any = SELF  # of its empty calls: rows, queries, keys
    masks: bool = False  # whether the op takes a mask, of both kinds
    states: bool = False


TOKENS, CHANNELS, MAPPED = ("B", HKV, "S"), ("B", HKV, "S", D), ("B", H, "T", D)
SCORES, ONE_LOGIT = ("B", H, "T", "S"), (1, 1, 1, 1)
MAP_WEIGHTS, ROWS, BLOCK = ((H, D, D), (HKV, D, D)), ((1, 140, 4),) * 2, ((1, 8, 2),) * 2
EACH_WAY = ({"causal": True}, {"causal": False})
WINDOWS = tuple(
    {"mask": AttentionMask(causal=causal, window=(3, 3), num_sinks=sinks)}
    for causal, sinks in ((True, 0), (True, 2), (False, 0))
)
POOLING = ({"pooling": True}, {"pooling": False})
CASES = {
    "softmax": Case("softmax_attention", softmax, (SCORES, (H,)), lengths=PAIRS, masks=True),
    "flash": Case("flash_attention", flash, lengths=PAIRS, masks=True),
    "flash, window": Case("flash_attention", flash, (), WINDOWS),
    "flash, bias": Case("flash_attention", flash, (SCORES,), lengths=PAIRS, masks=True),
    "flash, one bias": Case("flash_attention", flash, (ONE_LOGIT,), WINDOWS),
    "flash, sinks": Case("flash_attention", flash, (SCORES, (H,)), lengths=PAIRS, masks=True),
    "longformer": Case(
        "longformer_attention", ops.longformer_attention, (), ({"window": 3},), masks=True
    ),
    "longformer, bias": Case(
        "longformer_attention",
        lambda q, k, v, bias, **options: ops.longformer_attention(
            q, k, v, bias=bias, window=3, **options
        ),
        (SCORES,),
        masks=True,
    ),
    "longformer, globals": Case(
        "longformer_attention",
        longformer_globals,
        (("B", H, "S", D), CHANNELS, ("B", HKV, "S", E)),
        masks=True,
    ),
    "linformer": Case(
        "linformer_attention",
        lambda *x, **options: ops.linformer_attention(*x[:3], *x[3:], **options),
        ROWS,
        POOLING,
        PAIRS,
    ),
    "linformer, blocks": Case(
        "linformer_block_attention", ops.linformer_block_attention, BLOCK, POOLING, states=True
    ),
    "block_sparse": Case(
        "block_sparse_attention",
        ops.block_sparse_attention,
        (),
        (
            {"mask": AttentionMask(causal=True)},
            {"mask": AttentionMask(causal=True), "query_block": 4},
        ),
        states=True,
    ),
    "block_sparse, bidirectional": Case("block_sparse_attention", ops.block_sparse_attention),
    "lsh": Case("lsh_attention", ops.lsh_attention, masks=True),
    "lsh, bias": Case(
        "lsh_attention",
        lambda q, k, v, bias, **options: ops.lsh_attention(q, k, v, bias=bias, **options),
        (SCORES,),
    ),
    "shared_qk": Case("shared_qk_attention", ops.shared_qk_attention, masks=True),
    "linear": Case("linear_attention", linear, (TOKENS,), EACH_WAY[:1], states=True),
    "linear, channels": Case("linear_attention", linear, (CHANNELS,), EACH_WAY[:1], states=True),
    "linear, bidirectional": Case(
        "linear_attention",
        lambda q, k, v, **options: ops.linear_attention(q, k, v, causal=False, **options),
        (),
        ({}, {"normalize": True}),
        PAIRS,
    ),
    "linear, learned map": Case(
        "linear_attention", learned_linear, MAP_WEIGHTS, EACH_WAY, states=False
    ),
    "delta": Case("delta_attention", delta, (TOKENS, TOKENS), states=True),
    "kda": Case("delta_attention", delta, (TOKENS, CHANNELS), states=True),
    "hybrid": Case(
        "hybrid_attention",
        hybrid,
        (MAPPED, CHANNELS, ONE_LOGIT, TOKENS),
        ({}, {"num_sinks": 2}),
        states=True,
    ),
    "hybrid, bidirectional": Case(
        "hybrid_attention",
        lambda q, k, v, *branch, **options: hybrid(q, k, v, *branch, None, causal=False, **options),
        (MAPPED, CHANNELS, ONE_LOGIT),
    ),
    "hybrid, learned map": Case(
        "hybrid_attention", learned_hybrid, (ONE_LOGIT, *MAP_WEIGHTS), states=True
    ),
    "mlstm": Case("linear_attention", mlstm, (TOKENS, TOKENS), states=True),
    "rwkv6": Case("linear_attention", rwkv6, (CHANNELS, (HKV, D)), states=True),
    "matrix": Case("matrix_gated_attention", matrix, (CHANNELS, (HKV, D, E)), states=True),
}


def tensors(case: Case, rows: int, queries: int, keys: int) -> list[Tensor]:
    sizes = {"B": rows, "T": queries, "S": keys}
    shapes = ("B", H, "T", D), ("B", HKV, "S", D), ("B", HKV, "S", E), *case.shapes
    return [torch.randn([sizes.get(n, n) for n in shape], requires_grad=True) for shape in shapes]


def calls(case: Case, rows: int, queries: int, keys: int) -> list[dict[str, Any]]:
    masks: list[dict[str, Any]] = [{}]
    if case.masks:
        padding = torch.ones(rows, keys, dtype=torch.bool)
        masks = [{"mask": AttentionMask(padding=padding)}]
        if queries <= keys:
            masks += [{"mask": AttentionMask(causal=True, padding=padding)}]
    names = [each.name for each in implementations(case.op) if each.runs_on("cpu")]
    return [
        {**variant, **mask, "impl": impl}
        for variant, mask, impl in product(case.variants, masks, ["auto", *names])
    ]


def attempt(run: Callable[..., Any], x: list[Tensor], options: dict[str, Any]) -> Any:
    """Return the output, or None if the implementation refuses the call by name."""
    try:
        return run(*x, **options)
    except UnsupportedError as error:
        if options["impl"] == "auto" or "cannot run this call" not in str(error):
            raise
        return None
