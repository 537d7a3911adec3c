"""Values of slots, sequences and positions that would become addresses outside of the tensors.

``python -m tools.sanitize`` shows that the kernels read and write nothing before they refuse.
"""

from contextlib import nullcontext
from functools import partial

import pytest
import torch

from attnzoo.backends.delta import ShortConvolution
from attnzoo.backends.parts.recurrent import count_tokens
from attnzoo.contract.inputs import AttentionInputs
from attnzoo.contract.masks import AttentionMask
from attnzoo.contract.sequences import Sequences
from attnzoo.contract.states import CountedLinearState, check_slots
from attnzoo.errors import UnsupportedError
from attnzoo.ops import (
    delta_attention,
    linear_attention,
    matrix_gated_attention,
    mlstm_attention,
    rwkv6_attention,
)
from attnzoo.ops.block_sparse.cpu import block_sparse
from attnzoo.ops.block_sparse.gather import SparseTensors
from attnzoo.ops.block_sparse.options import SparseOptions
from attnzoo.ops.block_sparse.selection import NO_BLOCK
from attnzoo.ops.hybrid.api import hybrid_attention
from attnzoo.ops.hybrid.parts import LinearBranch
from attnzoo.ops.window.band import LocalOptions
from attnzoo.ops.window.causal_window import causal_window_attention
from attnzoo.ops.window.cpu.band import band_attention_cpp
from attnzoo.ops.window.pattern import Band, GlobalIndices

SLOTS = ((0, 4), (-2, 1), (3, 2**62), (-(2**62), 0))  # some are no rows of a pool of 4 states
SEQUENCES = {  # starts, lengths and longest in a row of 64 tokens
    "past the end": ((0, 32), (32, 33), 64),
    "far": ((0, 10**9), (32, 32), 32),
    "before the row": ((-(10**8), 32), (32, 32), 32),
    "of a negative length": ((0, 32), (-5, 32), 32),
    "that overlap": ((0, 31), (32, 32), 32),
    "in another order": ((32, 0), (32, 32), 32),
    "whose ends overflow": ((2**62, 2**62), (2**62, 2**62), 2**62),
    "longer than longest": ((0, 32), (32, 32), 31),
}


def rows(batch, tokens):
    """Return q, k and v, and gates."""
    return *torch.rand(3, batch, 2, tokens, 16), torch.rand(batch, 2, tokens)


def of_linear(q, k, v, gates, **options):
    return linear_attention(q, k, v, log_decay=-gates, **options)


def of_delta(q, k, v, gates, **options):
    return delta_attention(q, k, v, gates, normalize_qk=True, **options)


def of_mlstm(q, k, v, gates, **options):
    return mlstm_attention(q, k, v, log_forget=-gates, log_input=gates, **options)


def of_rwkv6(q, k, v, gates, **options):
    return rwkv6_attention(q, k, v, log_decay=-k.abs(), bonus=k[0, :, 0], **options)


def of_hybrid(q, k, v, gates, **options):
    branch = LinearBranch(q.exp(), k.exp(), torch.zeros(()), -gates)
    return hybrid_attention(q, k, v, branch, window=4, scale=0.25, **options)


OPS = {
    "linear": of_linear,
    "delta": of_delta,
    "mlstm": of_mlstm,
    "rwkv6": of_rwkv6,
    "hybrid": of_hybrid,
}


def bad_slots(op, impl):
    """Yield steps of an op from slots that are no rows of a pool."""
    pool = OPS[op](*rows(4, 3), return_state=True).state
    options = {"state": pool, "impl": impl, "return_state": True, "reuse_state": True}
    for slots in SLOTS:
        step = partial(OPS[op], *rows(2, 1), slots=torch.tensor(slots), **options)
        yield torch.no_grad()(step)


def bad_sequences(op, impl):
    """Yield calls of an op with sequences that do not fit a row."""
    for starts, lengths, longest in SEQUENCES.values():
        sequences = Sequences(torch.tensor(starts), torch.tensor(lengths), longest)
        options = {"sequences": sequences, "impl": impl, "return_state": True}
        yield partial(OPS[op], *rows(1, 64), **options)


def message_of(call):
    with pytest.raises(UnsupportedError) as refused:
        call()
    return str(refused.value)


def of_matrix_gate(q, k, v, gates, *, reuse_state=False, **options):
    def log_decay(take):
        return -take(gates, 2)[..., None, None].expand(-1, -1, -1, k.shape[3], v.shape[3])

    return matrix_gated_attention(q, k, v, log_decay=log_decay, **options)


def impls(op, calls):
    """Return the implementations that a kind of calls of an op has."""
    if op == "matrix":
        return ["torch"]
    if op in ("mlstm", "rwkv6") and calls is bad_sequences:
        return ["auto", "torch"]
    return ["cpp", "torch"] + ["reference"] * (calls is bad_sequences)


@pytest.mark.parametrize("op", [*OPS, "matrix"])
@pytest.mark.parametrize("calls", [bad_slots, bad_sequences])
def test_all_implementations_refuse_with_the_same_words(op, calls, monkeypatch):
    monkeypatch.setitem(OPS, "matrix", of_matrix_gate)
    first, *others = ([message_of(x) for x in calls(op, impl)] for impl in impls(op, calls))
    assert all(messages == first for messages in others)
    if calls is bad_slots:
        for message, slots in zip(first, SLOTS, strict=True):
            at, slot = next((i, x) for i, x in enumerate(slots) if not -1 <= x < 4)
            assert message.startswith("slots must be below 4, the states of the pool, or -1")
            assert message.endswith(f"slot {at} is {slot}.")
        return
    assert len(first) == len(SEQUENCES)
    for message in first:
        assert message.startswith("sequences must follow one another within the 64 tokens of the")
    assert "sequence 1 has 33 tokens from 32 on, after one that ends at 32" in first[0]


@pytest.mark.parametrize("impl", ["cpp", "torch"])
@pytest.mark.parametrize("op", OPS)
def test_a_refused_step_leaves_the_pool_as_it_was(op, impl):
    state = OPS[op](*rows(4, 3), return_state=True).state
    before = [x.clone() for x in state]
    options = {"state": state, "impl": impl, "return_state": True, "reuse_state": True}
    with torch.no_grad(), pytest.raises(UnsupportedError, match="slots"):
        OPS[op](*rows(2, 1), slots=torch.tensor([0, 4]), **options)
    assert all(map(torch.equal, state, before))


@pytest.mark.parametrize("field", ["starts", "lengths"])
def test_starts_and_lengths_are_int64(field):
    """The kernels would read int32 numbers as int64."""
    tables = {"starts": torch.tensor([0, 32]), "lengths": torch.tensor([32, 32])}
    x = tables[field]
    for wrong in (x.int(), x.float(), x[:1], x[None]):
        sequences = Sequences(**{**tables, field: wrong}, longest=32)
        for attend in OPS.values():
            with pytest.raises(UnsupportedError, match=r"sequences.lengths must be \[S\] int64"):
                attend(*rows(1, 64), sequences=sequences)


def test_sequences_of_a_row_that_is_too_short():
    """They are checked once for the shortest row."""
    sequences = Sequences(torch.tensor([1, 5, 5, 9]), torch.tensor([4, 0, 3, 2]), 4)
    for tokens in (11, 20):
        assert sequences.index(tokens).shape == (tokens,)
    for read in (
        sequences.index,
        sequences.positions,
        lambda n: sequences.to_rows(torch.rand(1, 1, n, 2)),
    ):
        with pytest.raises(UnsupportedError, match="within the 10 tokens of the row"):
            read(10)


def test_what_reads_states_beside_the_ops_refuses_slots_too():
    x = torch.rand(2, 2, 1, 16)
    mask = AttentionMask(causal=True)
    inputs = AttentionInputs(x, x, x, mask, 0.3, slots=torch.tensor([1, 4]))
    convolution = ShortConvolution(96, 3)
    convolution.reset_parameters()
    message = "slots must be below 4"
    with pytest.raises(UnsupportedError, match=message):
        convolution(inputs, torch.rand(4, 2, 96))
    with pytest.raises(UnsupportedError, match=message):
        count_tokens(inputs._replace(state=CountedLinearState(x, x, torch.tensor([3, 1, 0, 2]))))
    window = causal_window_attention(
        *torch.rand(3, 4, 2, 3, 16), window=5, scale=0.3, return_state=True
    )[2]
    with pytest.raises(UnsupportedError, match=message):
        causal_window_attention(x, x, x, window=5, scale=0.3, state=window, slots=inputs.slots)


@pytest.mark.parametrize("op", ["linear", "delta"])
@pytest.mark.parametrize("starts", [(0, 10**9), (-(10**8), 32)])
def test_sequences_that_change_before_the_backward_pass(op, starts):
    q, *others = rows(1, 64)
    sequences = Sequences(torch.tensor((0, 32)), torch.tensor((32, 32)), 32)
    out = OPS[op](q.clone().requires_grad_(), *others, sequences=sequences, impl="cpp").out
    sequences.starts.data.copy_(torch.tensor(starts))
    assert "sequences" in message_of(out.sum().backward)


@pytest.mark.parametrize("seen", [-1, -(2**63), 2**63 - 1])
def test_a_window_that_has_seen_an_impossible_number_of_tokens(seen):
    state = OPS["hybrid"](*rows(2, 3), return_state=True).state
    wrong = state._replace(seen=torch.tensor([3, seen]))
    step = partial(OPS["hybrid"], *rows(2, 1), impl="cpp", state=wrong, return_state=True)
    assert str(seen) in message_of(torch.no_grad()(step))


@pytest.mark.parametrize("position", [40, -1, 2**62])
def test_global_keys_outside_of_the_row(position):
    q, k, v, _ = rows(1, 40)
    indices = GlobalIndices(torch.tensor([[0, position]]), torch.ones(1, 2, dtype=torch.bool))
    options = LocalOptions(Band(3, 0, 1), True, 0.25, global_indices=indices)
    assert str(position) in message_of(lambda: band_attention_cpp(q, k, v, options))


@pytest.mark.parametrize("offset", [-9, 30])
def test_queries_of_a_window_outside_of_the_keys(offset):
    q, k, v, _ = rows(1, 40)
    options = LocalOptions(Band(3, 0, 1), True, 0.25, segment_ids=torch.zeros(1, 40))
    assert message_of(lambda: band_attention_cpp(q[:, :, :20], k, v, options, offset))


@pytest.mark.parametrize(("length", "count"), [(41, 40), (40, 41), (-1, -1), (8, 9), (2**62, 4)])
def test_more_keys_or_queries_than_the_row_has(length, count):
    q, k, v, _ = rows(1, 40)
    selected = torch.zeros(1, 2, 6, 2, dtype=torch.int32)
    options = SparseOptions(True, 4, 1, 2, 8, 8)
    numbers = torch.tensor([length]), torch.tensor([count])
    wrong = SparseTensors(q, k, v, selected, *numbers, 0.25, options)
    assert message_of(lambda: block_sparse.forward(wrong))


class OnGpu(torch.Tensor):
    """A tensor whose values may not be read, though assertions on its device read them."""

    is_cuda = True

    def tolist(self):
        raise AssertionError("waits for the device")

    __bool__ = item = tolist


def test_a_gpu_asserts_without_waiting():
    """``torch._assert_async`` is a ``RuntimeError`` on a CPU."""
    for slots, is_right in (([3, -1], True), ([3, 4], False), ([-2, 0], False)):
        with (
            nullcontext() if is_right else pytest.raises(RuntimeError, match="slots must be below")
        ):
            check_slots(torch.tensor(slots).as_subclass(OnGpu), 4)
    right = {"as they must be": ((0, 40), (32, 24), 32)}
    for name, (starts, lengths, longest) in (SEQUENCES | right).items():
        tables = (torch.tensor(x).as_subclass(OnGpu) for x in (starts, lengths))
        wrong = pytest.raises(RuntimeError, match="sequences must follow one another within the 64")
        with nullcontext() if name in right else wrong:
            Sequences(*tables, longest).check(64)


@pytest.mark.parametrize("block", [-1, -(2**31), 5, 2**29, 2**31 - 1])
def test_selected_blocks_outside_of_the_keys_have_no_keys(block):
    q, k, v = torch.randn(3, 1, 2, 40, 16)
    options = SparseOptions(True, 4, 1, 2, 8, 8)
    selected = torch.full((1, 2, 6, 2), NO_BLOCK, dtype=torch.int32)
    expected = block_sparse.forward(SparseTensors(q, k, v, selected, None, None, 0.25, options))
    wrong = torch.full_like(selected, block)
    found = block_sparse.forward(SparseTensors(q, k, v, wrong, None, None, 0.25, options))
    assert all(map(torch.equal, found, expected))
