"""Kernels read tensors by address, so ops check shapes and devices, and convert dtypes."""

from functools import partial

import pytest
import torch

from attnzoo import ops
from attnzoo.contract.context_parallel import SequenceShard
from attnzoo.contract.masks import AttentionMask
from attnzoo.contract.states import DeltaState, LinearState, MatrixState, StabilizedState
from attnzoo.errors import UnsupportedError
from attnzoo.ops.features.functional import MapWeights
from attnzoo.ops.hybrid.parts import HybridState, LinearBranch
from attnzoo.ops.longformer.call import GlobalTokens

B, H, HKV, T, D, E, N = 3, 6, 3, 10, 8, 7, 16  # one less of each is not broadcastable either
CAUSAL = AttentionMask(causal=True)
GATE, CHANNELS, SCORES = (B, HKV, T), (B, HKV, T, D), (B, H, T, T)
ALL, ONE = (slice(None),), (..., slice(1), slice(None))  # tokens of q, k and v


def qkv(tokens=ALL):
    shapes = (B, H, T, D), (B, HKV, T, D), (B, HKV, T, E)
    return [torch.rand(shape)[tokens] for shape in shapes]


def hybrid(log_weight=None, log_decay=None, **features):
    q, k, v = qkv()
    log_weight = torch.zeros(()) if log_weight is None else log_weight
    branch = LinearBranch(
        *(features.get("q", q), features.get("k", k), log_weight, log_decay),
    )
    return ops.hybrid_attention(q, k, v, branch, window=4, scale=0.3)


def hybrid_step(**state):
    q, k, v = qkv(ONE)
    branch = LinearBranch(q, k, torch.zeros(()))
    return ops.hybrid_attention(q, k, v, branch, window=4, scale=0.3, state=HybridState(**state))


def mapped(name, **weights):
    q, k, v = qkv()
    weights = MapWeights(**weights)
    branch = LinearBranch(q, k, torch.zeros(()), feature_map=name, map_weights=weights)
    ops.linear_attention(q, k, v, feature_map=name, map_weights=weights)
    return ops.hybrid_attention(q, k, v, branch, window=4, scale=0.3)


MATRICES = {"q": (H, D, D), "k": (HKV, D, D)}
HYBRID_STATE = {
    **{"k": (B, HKV, 4, D), "v": (B, HKV, 4, E), "features": (B, HKV, 4, D)},
    **{"kv": (B, HKV, D, E + 1), "z": (B, HKV, D), "seen": (B,)},
}
CASES = {
    "softmax": (ops.softmax_attention, {"bias": SCORES, "sinks": (H,)}),
    "softmax with sinks per query": (ops.softmax_attention, {"sinks": (B, H, T, 1)}),
    "flash": (ops.flash_attention, {"bias": SCORES}),
    "flash with sinks": (ops.flash_attention, {"sinks": (H,)}),
    "longformer": (lambda *x, **y: ops.longformer_attention(*x, window=4, **y), {"bias": SCORES}),
    "global tokens": (
        lambda *x, tokens: ops.longformer_attention(*x, window=4, global_tokens=tokens > 0.5),
        {"tokens": (B, T)},
    ),
    "tensors of global tokens": (
        lambda *x, **y: ops.longformer_attention(
            *x, window=4, global_tokens=GlobalTokens(torch.arange(T)[None] < 2, **y)
        ),
        {"q": (B, H, T, D), "k": (B, HKV, T, D), "v": (B, HKV, T, E)},
    ),
    "lsh": (ops.lsh_attention, {"bias": SCORES}),
    "shared qk": (ops.shared_qk_attention, {"bias": SCORES}),
    "linformer": (ops.linformer_attention, {"key_rows": (1, N, 4), "value_rows": (1, N, 4)}),
    "indexer": (
        lambda *x, q, k, weights: ops.block_sparse_attention(
            *x, mask=CAUSAL, score="indexer", top_k=1, window=2, index=(q, k, weights)
        ),
        {"q": (B, 2, T, N), "k": (B, 1, T, N), "weights": (B, 2, T)},
    ),
    "linear": (ops.linear_attention, {"log_decay": CHANNELS}),
    "linear step": (
        lambda kv, k: ops.linear_attention(*qkv(ONE), state=LinearState(kv, k)),
        {"kv": (B, HKV, D, E), "k": (B, HKV, D)},
    ),
    "mlstm step": (
        lambda **x: ops.mlstm_attention(
            *qkv(ONE),
            log_forget=-torch.rand(B, HKV, 1),
            log_input=torch.rand(B, HKV, 1),
            state=StabilizedState(**x),
        ),
        {"kv": (B, HKV, D, E), "k": (B, HKV, D), "m": (B, HKV)},
    ),
    "rwkv6 step": (
        lambda **x: ops.rwkv6_attention(
            *qkv(ONE),
            log_decay=-torch.rand(B, HKV, 1, D),
            bonus=torch.rand(HKV, D),
            state=LinearState(**x),
        ),
        {"kv": (B, HKV, D, E), "k": (B, HKV, D)},
    ),
    "matrix step": (
        lambda **x: ops.matrix_gated_attention(
            *qkv(ONE),
            log_decay=lambda take: take(-torch.rand(B, HKV, 1, D, E), 2),
            state=MatrixState(**x),
        ),
        {"kv": (B, HKV, D, E), "k": (B, HKV, D, E)},
    ),
    "delta step": (
        lambda kv: ops.delta_attention(*qkv(ONE), torch.rand(B, HKV, 1), state=DeltaState(kv)),
        {"kv": (B, HKV, D, E)},
    ),
    "mlstm": (ops.mlstm_attention, {"log_forget": GATE, "log_input": GATE}),
    "rwkv6": (ops.rwkv6_attention, {"log_decay": CHANNELS, "bonus": (HKV, D)}),
    "delta": (
        lambda *x, beta, decay: ops.delta_attention(*x, beta, log_decay=decay),
        {"beta": GATE, "decay": GATE},
    ),
    "hybrid": (
        hybrid,
        {"q": (B, H, T, N), "k": (B, HKV, T, N), "log_weight": (B, H, T, 1), "log_decay": GATE},
    ),
    "hybrid step": (hybrid_step, HYBRID_STATE),
    "hedgehog": (lambda **x: mapped("hedgehog", **x), MATRICES),
    "hedgehog_exp": (
        lambda **x: mapped("hedgehog_exp", **x),
        {"q": (H, N, D), "k": (HKV, N, D), "q_bias": (H, N), "k_bias": (HKV, N)},
    ),
}  # fmt: skip
TAKES_QKV = {name for name in CASES if "step" not in name} - {
    *("hybrid", "hedgehog", "hedgehog_exp")
}
LOG_DECAYS = {"log_decay", "decay"}  # at most 0
FREE = {  # dims of any size
    *(("linformer", "key_rows", 1), ("linformer", "value_rows", 1)),
}


def inputs_of(case):
    """The function of a case, tensors of its shapes, and q, k and v if it takes them."""
    function, shapes = CASES[case]
    tensors = {name: torch.rand(shape) for name, shape in shapes.items()}
    for name in LOG_DECAYS & tensors.keys():
        tensors[name] = -tensors[name]
    if "seen" in tensors:
        tensors["seen"] = torch.full((B,), 4)
    return function, tensors, qkv() if case in TAKES_QKV else []


@pytest.mark.parametrize("case", CASES)
def test_tensors_of_other_shapes_are_refused(case):
    function, tensors, given = inputs_of(case)
    function(*given, **tensors)  # these fit
    for name, x in tensors.items():
        for dim in range(x.dim()):
            if (case, name, dim) in FREE:
                continue
            longer = torch.cat([x, x.narrow(dim, 0, 1)], dim)
            for other in (longer, x.narrow(dim, 1, x.shape[dim] - 1)):
                with pytest.raises(UnsupportedError, match=r"got .*\d"):
                    function(*given, **{**tensors, name: other})


@pytest.mark.parametrize("case", CASES)
def test_tensors_on_another_device_are_refused(case):
    function, tensors, given = inputs_of(case)
    for i in range(len(given)):
        moved = [x.to("meta") if i == j else x for j, x in enumerate(given)]
        with pytest.raises(UnsupportedError, match=r"must be on one device, got .*meta"):
            function(*moved, **tensors)
    for name, x in tensors.items():
        with pytest.raises(UnsupportedError, match="is on meta and q on cpu"):
            function(*given, **{**tensors, name: x.to("meta")})


@pytest.mark.parametrize("case", CASES)
def test_lazily_negated_tensors_give_the_result_of_copies(case):
    """A view such as ``z.conj().imag`` is negated when it is read, not in memory."""
    function, tensors, given = inputs_of(case)
    tensors = {n: -x if n in LOG_DECAYS else x for n, x in tensors.items()}
    negated = {n: x if n == "seen" else torch._neg_view(x) for n, x in tensors.items()}
    copies = {name: x.clone().resolve_neg() for name, x in negated.items()}
    views, found = [torch._neg_view(x) for x in given], []
    for call in (partial(function, *[x.clone().resolve_neg() for x in views], **copies),
                 partial(function, *views, **negated)):  # fmt: skip
        torch.manual_seed(0)  # some cases make q, k and v
        out = call()
        found.append(out if isinstance(out, torch.Tensor) else out.out)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("case", CASES)
def test_tensors_of_another_dtype_give_the_same_result(case):
    function, tensors, given = inputs_of(case)
    found = []
    for wide in ((), *((name,) for name in tensors), tuple(tensors)):
        torch.manual_seed(0)  # some cases make q, k and v
        options = {n: x.double() if n in wide and n != "seen" else x for n, x in tensors.items()}
        out = function(*given, **options)
        found.append(out if isinstance(out, torch.Tensor) else out.out)
    for out in found[1:]:
        torch.testing.assert_close(out, found[0])


@pytest.mark.parametrize("case", ["softmax", "flash", "longformer", "lsh"])
def test_a_bias_that_is_a_mask_is_refused(case):
    with pytest.raises(
        UnsupportedError, match=r"bias is added to the scores.* pass what is masked"
    ):
        CASES[case][0](*qkv(), bias=torch.ones(SCORES).bool())


def test_weights_and_biases_that_a_map_does_not_have():
    weights = {name: torch.rand(shape) for name, shape in MATRICES.items()}
    with pytest.raises(UnsupportedError, match=r"has a bias, and map_weights.q_bias is missing"):
        mapped("hedgehog_exp", **weights)
    with pytest.raises(UnsupportedError, match=r"has no bias, and map_weights.k_bias is given"):
        mapped("hedgehog", **weights, k_bias=torch.rand(HKV, D))


def test_the_state_of_block_sparse():
    call = partial(ops.block_sparse_attention, mask=CAUSAL, query_block=4, top_k=1, window=2)
    state = call(*qkv(), return_state=True).state
    for token in (ALL, ONE):
        call(*qkv(token), state=state)
        for name, x in zip(state._fields, state, strict=True):
            with pytest.raises(UnsupportedError, match=f"state.{name} must be"):
                call(*qkv(token), state=state._replace(**{name: x[:1]}))
            with pytest.raises(UnsupportedError, match=f"state.{name} is on meta"):
                call(*qkv(token), state=state._replace(**{name: x.to("meta")}))


def test_masks_on_another_device_are_refused():
    for name in ("padding", "segment_ids"):
        ids = torch.ones(B, T, device="meta", dtype=torch.bool if name == "padding" else None)
        mask = AttentionMask(causal=True, **{name: ids if name == "padding" else ids.long()})
        with pytest.raises(UnsupportedError, match=f"{name} of the mask is on meta and q on cpu"):
            ops.flash_attention(*qkv(), mask=mask)


def test_global_tokens_that_are_numbers_are_refused():
    with pytest.raises(UnsupportedError, match=r"two dims and be bool, got 2 and torch.int64"):
        ops.longformer_attention(*qkv(), window=4, global_tokens=torch.ones(B, T).long())


def test_a_state_of_another_op_is_refused():
    state = LinearState(torch.zeros(B, HKV, D, E), torch.zeros(B, HKV, D))
    gates = {"log_forget": torch.zeros(GATE), "log_input": torch.zeros(GATE)}
    with pytest.raises(UnsupportedError, match=r"StabilizedState of kv, k, m, got LinearState"):
        ops.mlstm_attention(*qkv(), **gates, state=state)


SHARD = SequenceShard(group=None, rank=0, size=2, length=T)
MATRIX = torch.zeros(B, HKV, D, E)
GATED = {
    "linear": (ops.linear_attention, {"state": LinearState(MATRIX, MATRIX[..., 0])}),
    "rwkv6": (
        partial(ops.rwkv6_attention, log_decay=torch.zeros(CHANNELS), bonus=torch.zeros(HKV, D)),
        {"state": LinearState(MATRIX, MATRIX[..., 0])},
    ),
    "delta": (partial(ops.delta_attention, beta=torch.zeros(GATE)), {"state": DeltaState(MATRIX)}),
}


@pytest.mark.parametrize("case", GATED)
def test_a_shard_and_a_state_are_refused(case):
    function, options = GATED[case]
    with pytest.raises(UnsupportedError, match=r"shard and state are given.* leave state out"):
        function(*qkv(), shard=SHARD, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"causal": False, "return_state": True}, "given return_state.* need a causal"),
        ({"causal": False, "num_sinks": 2}, "given num_sinks.* need a causal"),
        ({"num_sinks": 2, "shard": SHARD}, "shard together with num_sinks"),
        ({"num_sinks": -1}, "num_sinks must be an integer from 0"),
        ({"state": "first", "causal": False}, "given state.* need a causal"),
        ({"state": "first", "shard": SHARD}, "shard and state are given"),
    ],
)
def test_inputs_that_a_hybrid_does_not_support_together(options, message):
    q, k, v = qkv()
    call = partial(
        ops.hybrid_attention, q, k, v, LinearBranch(q, k, torch.zeros(())), window=4, scale=0.3
    )
    if "state" in options:
        options["state"] = call(return_state=True).state
    with pytest.raises(UnsupportedError, match=message):
        call(**options)


@pytest.mark.parametrize("shape", [(T, T), (T,), (1, 1, 1, T), (H, 1, T)], ids=str)
def test_a_bias_is_broadcast(shape):
    given, bias = qkv(), torch.randn(shape)
    exact = ops.softmax_attention(*given, bias=bias.expand(SCORES)).out
    for function in (ops.softmax_attention, ops.flash_attention):
        torch.testing.assert_close(function(*given, bias=bias).out, exact)
