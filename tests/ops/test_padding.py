"""What keys, values and gates hold at padding, NaN included, has no effect.

The exact ops are not here: their masks give such keys the weight 0, and 0 times NaN is NaN.
"""

from functools import partial

import pytest
import torch

from attnzoo import ops
from attnzoo.contract.masks import AttentionMask
from attnzoo.ops.features.functional import MapWeights
from attnzoo.ops.hybrid.parts import LinearBranch
from tests.helpers import by_sequence

B, H, HKV, T, D, F = 2, 4, 2, 40, 16, 32
GENERATOR = torch.Generator().manual_seed(0)  # module code runs before the fixture that seeds tests
DECAY = torch.tensor([-0.1, -0.5])
TOKENS, CHANNELS, MATRICES = (B, HKV, T), (B, HKV, T, D), (B, HKV, T, D, D)
QUERIES, KEYS = (B, H, T, D), (B, HKV, T, D)
WEIGHTS = {"query weights": (H, D, D), "key weights": (HKV, D, D)}
BIASES = {"query bias": (H, D), "key bias": (HKV, D)}


@by_sequence
def linear(q, k, v, **options):
    return ops.linear_attention(q, k, v, normalize=True, **options)


@by_sequence
def learned(name, q, k, v, *weights, **options):
    weights = MapWeights(*weights)
    options = {"feature_map": name, "map_weights": weights, "normalize": True, **options}
    return ops.linear_attention(q, k, v, **options)


@by_sequence
def delta(q, k, v, gate, beta, **options):
    return ops.delta_attention(q, k, v, beta, log_decay=-gate, normalize_qk=True, **options)


@by_sequence
def hybrid(q, k, v, q_features, k_features, *gate, **options):
    decay = -gate[0] if gate else None
    branch = LinearBranch(q_features, k_features, torch.zeros(()), decay)
    return ops.hybrid_attention(q, k, v, branch, window=5, scale=0.3, **options)


@by_sequence
def learned_hybrid(q, k, v, x, y, *weights, **options):
    branch = LinearBranch(
        *(x, y, torch.zeros(())), feature_map="hedgehog", map_weights=MapWeights(*weights)
    )
    return ops.hybrid_attention(q, k, v, branch, window=5, scale=0.3, **options)


@by_sequence
def mlstm(q, k, v, gate, log_input, **options):
    return ops.mlstm_attention(q, k, v, log_forget=-gate, log_input=log_input, **options)


@by_sequence
def rwkv6(q, k, v, gate, bonus, **options):
    return ops.rwkv6_attention(q, k, v, log_decay=-gate, bonus=bonus, **options)


@by_sequence
def matrix_gated(q, k, v, gate, **options):
    return ops.matrix_gated_attention(q, k, v, log_decay=lambda take: -take(gate, 2), **options)


CAUSAL, FULL, EITHER = (True,), (False,), (True, False)
TORCH, CPP = ("torch", "reference"), ("cpp", "torch", "reference")
LSH = {"num_hashes": 2, "chunk_size": 8}
# The op, the shapes of inputs after q, k and v, which masks, and implementations. Inputs with
# "query" in their names belong to queries, those with three dims or less of other sizes to none.
CASES = {
    "linear": (linear, {}, EITHER, CPP),
    "linear, elu+1": (partial(linear, feature_map="elu+1"), {}, EITHER, CPP),
    "linear, decay": (partial(linear, log_decay=DECAY), {}, CAUSAL, CPP),
    "learned_linear": (partial(learned, "learned_linear"), WEIGHTS, EITHER, CPP),
    "hedgehog": (partial(learned, "hedgehog"), WEIGHTS, EITHER, CPP),
    "hedgehog_exp": (partial(learned, "hedgehog_exp"), {**WEIGHTS, **BIASES}, EITHER, CPP),
    "delta": (delta, {"gate": CHANNELS, "beta": TOKENS}, CAUSAL, CPP),
    "hybrid": (hybrid, {"query features": QUERIES, "features": KEYS}, EITHER, CPP),
    "hybrid, decay": (
        hybrid,
        {"query features": QUERIES, "features": KEYS, "gate": TOKENS},
        CAUSAL,
        CPP,
    ),
    "hybrid, sinks": (
        partial(hybrid, num_sinks=2),
        {"query features": QUERIES, "features": KEYS, "gate": CHANNELS},
        CAUSAL,
        CPP,
    ),
    "hybrid, learned": (
        learned_hybrid,
        {"queries of a map": QUERIES, "keys of a map": KEYS, **WEIGHTS},
        EITHER,
        CPP,
    ),
    "mlstm": (mlstm, {"gate": TOKENS, "log_input": TOKENS}, CAUSAL, CPP),
    "rwkv6": (rwkv6, {"gate": CHANNELS, "bonus": (HKV, D)}, CAUSAL, CPP),
    "rwkv6, normalised": (
        partial(rwkv6, normalize=True),
        {"gate": CHANNELS, "bonus": (HKV, D)},
        CAUSAL,
        CPP,
    ),
    "matrix gate": (matrix_gated, {"gate": MATRICES}, CAUSAL, ("torch",)),
    "matrix gate, weights": (
        partial(matrix_gated, normalize=True),
        {"gate": MATRICES},
        CAUSAL,
        ("torch",),
    ),
    "lsh": (partial(ops.lsh_attention, window=4, **LSH), {}, EITHER, CPP),
    "shared_qk": (partial(ops.shared_qk_attention, **LSH), {}, FULL, TORCH),
    "block_sparse": (
        partial(ops.block_sparse_attention, window=8, top_k=2, block_size=4, num_sinks=1),
        {},
        EITHER,
        CPP,
    ),
    "linformer": (
        ops.linformer_attention,
        {"key rows": (1, T, 6), "value rows": (1, T, 6)},
        FULL,
        TORCH,
    ),
    "linformer, causal": (
        ops.linformer_block_attention,
        {"key rows": (1, 8, 3), "value rows": (1, 8, 3)},
        CAUSAL,
        TORCH,
    ),
}
PADDINGS = {"left": slice(0, 9), "right": slice(30, T), "inside": slice(12, 21)}
WITH_STATE = ("linear", "delta", "mlstm", "rwkv6", "matrix", "hybrid", "hedgehog", "learned")


def draw(shapes):
    """Return q, k, v and other inputs, all but the first three between 0 and 1."""
    qkv = [torch.randn(x, generator=GENERATOR) for x in (QUERIES, KEYS, KEYS)]
    return [*qkv, *(torch.rand(x, generator=GENERATOR) for x in shapes.values())]


def results(attend, inputs, padded, fill, options):
    """Return output and state, and the gradients of inputs, with ``fill`` at padding."""
    padding = options["mask"].padding
    leaves = []
    for x, has_padding in zip(inputs, padded, strict=True):
        x = x.clone()
        if has_padding:
            x.transpose(1, 2)[~padding] = fill
        leaves.append(x.requires_grad_())
    found = attend(*leaves, **options)
    out, state = (found, None) if isinstance(found, torch.Tensor) else (found.out, found.state)
    state = [x for x in state or () if x.is_floating_point()]
    out = out.masked_fill(~padding[:, None, :, None], 0)
    total = sum((x * torch.linspace(-1, 1, x.numel()).view(x.shape)).sum() for x in (out, *state))
    return [out, *state], torch.autograd.grad(total, leaves, materialize_grads=True)


@pytest.mark.parametrize(
    ("case", "causal", "impl", "where"),
    [
        (case, causal, impl, where)
        for case, (_, _, masks, impls) in CASES.items()
        for causal in masks
        for impl in impls
        for where in (PADDINGS if impl == "cpp" or impls != CPP else ("inside",))
        if causal or impl != "cpp" or case.startswith(("hybrid", "lsh", "block"))
    ],
)
def test_keys_values_and_gates_at_padding_have_no_effect(case, causal, impl, where):
    attend, shapes, _, _ = CASES[case]
    inputs = draw(shapes)
    padded = [False, True, True, *(x[2:3] == (T,) and "quer" not in n for n, x in shapes.items())]
    padding = torch.ones(B, T, dtype=torch.bool)
    padding[0, PADDINGS[where]] = False
    options = {"mask": AttentionMask(causal=causal, padding=padding), "impl": impl}
    if causal and case.startswith(WITH_STATE):
        options["return_state"] = True
    expected, expected_gradients = results(attend, inputs, padded, 0.5, options)
    found, gradients = results(attend, inputs, padded, torch.nan, options)
    for ours, right in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, right, rtol=0, atol=0)
    for ours, right, has_padding in zip(gradients, expected_gradients, padded, strict=True):
        torch.testing.assert_close(ours, right, rtol=0, atol=0)
        if has_padding:
            assert not ours.transpose(1, 2)[~padding].any()
