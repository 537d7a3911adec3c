"""Every op with no rows, no queries, no keys or no tokens: zeros, with gradients of zeros.

Every implementation, with and without a state. A gradient that does not exist would let
DistributedDataParallel wait for ever.
"""

from itertools import product

import pytest
import torch
from torch import Tensor

from attnzoo import ops
from attnzoo.contract.implementation import impl_names
from attnzoo.contract.sequences import Sequences
from attnzoo.contract.states import AttentionOutput
from tests.ops.table import CASES, Case, E, attempt, calls, tensors


def test_the_table_has_every_op():
    reduced = {"mlstm_attention", "rwkv6_attention"}  # to linear_attention, which has the names
    assert {case.op for case in CASES.values()} | reduced == set(ops.__all__)
    assert {"mlstm", "rwkv6"} <= CASES.keys()


def check(x: list[Tensor], found: AttentionOutput, what: str) -> None:
    assert torch.equal(found.out, x[0].new_zeros(*x[0].shape[:3], E)), what
    gradients = torch.autograd.grad(found.out.sum(), x, allow_unused=True)
    for n, (leaf, gradient) in enumerate(zip(x, gradients, strict=True)):
        assert gradient is not None, f"{what}: no gradient of input {n}"
        assert torch.equal(gradient, torch.zeros_like(leaf)), what


@pytest.mark.parametrize("name", CASES)
def test_empty_calls(name):
    case, ran = CASES[name], 0
    for lengths in case.lengths:
        for options in calls(case, *lengths):
            x = tensors(case, *lengths)
            if (found := attempt(case.run, x, options)) is not None:
                check(x, found, f"{lengths} {options}")
                ran += 1
    assert ran


@pytest.mark.parametrize("name", CASES)
def test_one_token_gives_every_input_a_gradient(name):
    """Also those that cannot change its output, such as the decay of a state that is not read."""
    case = CASES[name]
    for options in calls(case, 2, 1, 1):
        if options["impl"] == "triton":
            continue
        x = tensors(case, 2, 1, 1)
        if (found := attempt(case.run, x, options)) is not None:
            gradients = torch.autograd.grad(found.out.sum(), x, allow_unused=True)
            missing = [n for n, gradient in enumerate(gradients) if gradient is None]
            assert not missing, f"{options}: no gradient of inputs {missing}"


def impl_of_states(case: Case) -> str:
    return "torch" if "torch" in impl_names(case.op) else "reference"


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.states])
def test_empty_calls_with_a_state(name):
    """An empty call returns the state that it got, or that before any token."""
    case = CASES[name]
    for options, (rows, tokens) in product(calls(case, 2, 3, 3), [(0, 3), (0, 0), (2, 0)]):
        options |= {"return_state": True}
        what = f"{options} {rows} rows of {tokens}"
        full = case.run(*tensors(case, 2, 9, 9), **{**options, "impl": impl_of_states(case)}).state
        empty = attempt(case.run, tensors(case, rows, tokens, tokens), options)
        if empty is None:
            continue
        first = empty.state
        for state in (first, type(first)(*(s[:rows] for s in full))):
            for more in (1, 0, 5) if rows == 0 else (0,):
                x = tensors(case, rows, more, more)
                found = case.run(*x, **options, state=state)
                check(x, found, what)
                with torch.no_grad():  # runs the step that decoding takes
                    again = case.run(*x, **options, state=state)
                assert torch.equal(again.out, found.out), what
                assert all(len(s) == rows for s in (*found.state, *again.state)), what
                assert rows == 0 or all(map(torch.equal, found.state, state)), what
        if rows and options["impl"] != "triton":  # it gives what no state gives
            x = tensors(case, rows, 9, 9)
            torch.testing.assert_close(
                case.run(*x, **options, state=first).out, case.run(*x, **options).out
            )


SEQUENCES = ("linear", "delta", "hybrid", "mlstm", "rwkv6", "matrix")


@pytest.mark.parametrize("name", SEQUENCES)
def test_no_slots(name):
    """A step of no sequence leaves a pool of states as it is."""
    case = CASES[name]
    for options in calls(case, 0, 1, 1):
        full = {**options, "return_state": True, "impl": impl_of_states(case)}
        pool = case.run(*tensors(case, 2, 9, 9), **full).state
        x, slots = tensors(case, 0, 1, 1), torch.zeros(0, dtype=torch.int64)
        options |= {"state": pool, "return_state": True, "slots": slots}
        if (found := attempt(case.run, x, options)) is not None:
            check(x, found, f"{options}")
            assert all(map(torch.equal, found.state, pool))


@pytest.mark.parametrize("name", SEQUENCES)
@pytest.mark.parametrize("tokens", [0, 4])
def test_empty_sequences(name, tokens):
    """Sequences without a token, in a row without tokens or with tokens of none."""
    case, empty = CASES[name], torch.zeros(3, dtype=torch.int64)
    for options in calls(case, 1, tokens, tokens):
        options |= {"sequences": Sequences(empty, empty, 1), "return_state": True}
        x = tensors(case, 1, tokens, tokens)
        found = attempt(case.run, x, options)
        if found is not None:
            check(x, found, f"{options}")
            assert all(len(s) == 3 for s in found.state)
