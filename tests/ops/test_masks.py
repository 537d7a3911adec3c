"""Masks whose tensors do not fit the keys are refused: kernels read them by their addresses."""

import pytest
import torch

from attnzoo import ops
from attnzoo.contract.masks import AttentionMask
from attnzoo.errors import UnsupportedError
from attnzoo.ops.hybrid.api import LinearBranch
from tests.helpers import by_sequence

B, H, T, D = 2, 2, 40, 8
GENERATOR = torch.Generator().manual_seed(0)  # module code runs before the fixture that seeds tests
q, k, v = torch.randn(3, B, H, T, D, generator=GENERATOR)
GATES = torch.rand(B, H, T, generator=GENERATOR).log()
BRANCH = LinearBranch(q.exp(), k.exp(), torch.zeros(1, 1, 1, 1))


def log_decay(take):
    return take(torch.zeros(B, T, H, D, D)).transpose(1, 2)


OPS = {
    "block_sparse_attention": {},
    "delta_attention": {"beta": GATES.exp()},
    "flash_attention": {},
    "hybrid_attention": {"branch": BRANCH, "window": 3, "scale": 1.0},
    "linear_attention": {},
    "linformer_attention": dict.fromkeys(("key_rows", "value_rows"), torch.rand(1, T, 4)),
    "linformer_block_attention": dict.fromkeys(("key_rows", "value_rows"), torch.rand(1, 8, 2)),
    "longformer_attention": {"window": 3},
    "lsh_attention": {},
    "matrix_gated_attention": {"log_decay": log_decay},
    "mlstm_attention": {"log_forget": GATES, "log_input": GATES},
    "rwkv6_attention": {"log_decay": -q.abs(), "bonus": torch.ones(H, D)},
    "shared_qk_attention": {},
    "softmax_attention": {},
}
PADDING = {
    "fewer tokens": torch.ones(B, T - 3, dtype=torch.bool),
    "more tokens": torch.ones(B, T + 3, dtype=torch.bool),
    "more rows": torch.ones(3, T, dtype=torch.bool),
    "one row": torch.ones(1, T, dtype=torch.bool),
    "one dimension": torch.ones(T, dtype=torch.bool),
    "integers": torch.ones(B, T, dtype=torch.long),
    "a list": [[True] * T] * B,
}
BIDIRECTIONAL = ("linformer_attention",)
PACKED = ("flash", "longformer", "lsh", "shared_qk", "softmax")
BY_SEQUENCE = {
    x for x in OPS if x.split("_")[-2] in ("linear", "delta", "hybrid", "mlstm", "rwkv6", "gated")
}


def test_every_op_is_here():
    assert set(OPS) == set(ops.__all__)


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("op", sorted(OPS.keys() - BY_SEQUENCE))
def test_padding_that_does_not_fit_is_refused(op, padding):
    mask = AttentionMask(causal=op not in BIDIRECTIONAL, padding=PADDING[padding])
    with pytest.raises(UnsupportedError, match=r"padding of the mask must be (\[B, S\]|bool|a te)"):
        getattr(ops, op)(q, k, v, mask=mask, **OPS[op])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 5}, r"window of the mask must be \(before, after\), got 5 \(n keys"),
        ({"window": (5,)}, r"must be \(before, after\), got \(5,\)"),
        ({"window": (5.0, 0)}, r"window of the mask must be integers, got \(5.0, 0\)"),
        ({"q_offset": 1.0}, "q_offset of the mask must be an integer, got 1.0"),
    ],
)
@pytest.mark.parametrize("op", ["flash_attention", "softmax_attention", "longformer_attention"])
def test_windows_and_offsets_are_integers(op, options, message):
    with pytest.raises(UnsupportedError, match=message):
        getattr(ops, op)(q, k, v, mask=AttentionMask(causal=True, **options), **OPS[op])


@pytest.mark.parametrize("op", PACKED)
def test_segments_that_do_not_fit_are_refused(op):
    for ids in (torch.zeros(B, T - 3).long(), torch.zeros(B, T), torch.zeros(B, 1, T).long()):
        mask = AttentionMask(causal=True, segment_ids=ids)
        with pytest.raises(UnsupportedError, match="segment_ids of the mask must be"):
            getattr(ops, f"{op}_attention")(q, k, v, mask=mask, **OPS[f"{op}_attention"])


UNREAD = {  # by op: fields that restrict attention and that it does not read
    "linformer": ("window", "function", "segment_ids"),
    **dict.fromkeys(("linformer_block", "block_sparse"), ("window", "function", "segment_ids")),
    **dict.fromkeys(("lsh", "shared_qk"), ("window", "function")),
}
FIELDS = {
    "window": ((3, 0), r"the mask is a sliding window of \(3, 0\)"),
    "function": (lambda: torch.eye(T).bool()[None, None], "the mask is arbitrary"),
    "segment_ids": (torch.zeros(B, T).long(), "the mask is of packed segments"),
}


@pytest.mark.parametrize(
    ("op", "field"), [(op, x) for op, fields in UNREAD.items() for x in fields]
)
def test_fields_that_an_op_does_not_read_are_refused(op, field):
    value, message = FIELDS[field]
    name = f"{op}_attention"
    mask = AttentionMask(causal=name not in BIDIRECTIONAL, **{field: value})
    with pytest.raises(UnsupportedError, match=f"{message}.*Use softmax_attention"):
        getattr(ops, name)(q, k, v, mask=mask, **OPS[name])


@pytest.mark.parametrize("op", ["linear_attention", "delta_attention", "rwkv6_attention"])
def test_decays_above_1_are_refused(op):
    options = {**OPS[op], "log_decay": torch.full((B, H, T, D), 0.9)}
    with pytest.raises(UnsupportedError, match=r"log_decay is up to 0.9, but .* pass decay.log"):
        getattr(ops, op)(q, k, v, **options)


@pytest.mark.parametrize("impl", ["cpp", "torch", "reference"])
def test_nan_in_padding_does_not_spread(impl):
    real = torch.ones(B, T, dtype=torch.bool)
    real[:, 10] = False
    mask, hidden = AttentionMask(causal=True, padding=real), ~real[:, None, :, None]
    outs = [
        by_sequence(ops.linear_attention)(
            *(x.masked_fill(hidden, fill) for x in (q, k, v)), mask=mask, impl=impl
        )
        for fill in (0.0, torch.nan)
    ]
    assert torch.equal(*(x.out.transpose(1, 2)[real] for x in outs))


def test_the_first_token_of_one_packed_token():
    mask = AttentionMask(
        causal=True, window=(6, 0), num_sinks=4, segment_ids=torch.zeros(B, 1).long()
    )
    x = [y[:, :, :1] for y in (q, k, v)]
    for op in (ops.flash_attention, ops.softmax_attention):
        torch.testing.assert_close(op(*x, mask=mask).out, x[2])


@pytest.mark.parametrize("op", ["flash_attention", "softmax_attention", "longformer_attention"])
def test_dropout_is_a_probability(op):
    for dropout in (-0.1, 1.5, torch.nan):
        with pytest.raises(UnsupportedError, match="dropout must be a probability from 0 to 1"):
            getattr(ops, op)(q, k, v, dropout=dropout, **OPS[op])
