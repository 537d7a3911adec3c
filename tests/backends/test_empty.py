"""Empty batches and sequences, which give empty outputs; and invalid shapes."""

from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from attnzoo.contract.config import Geometry
from attnzoo.errors import UnsupportedError
from attnzoo.ops.linear.api import linear_attention
from attnzoo.ops.lsh.api import lsh_attention
from attnzoo.registry import available_backends, build_backend

SCRIPT = Path(__file__).with_name("empty_calls.py")


def test_empty_inputs_give_empty_outputs(fresh_python):
    ran = fresh_python(SCRIPT)
    assert ran.stdout.endswith("done\n"), f"exit {ran.returncode}: {ran.stdout}{ran.stderr}"
    assert ran.returncode == 0


@pytest.mark.parametrize("name", ["flash", "linear", "performer", "linformer", "softmax"])
def test_without_keys_the_output_is_zero(name):
    shape = Geometry(num_heads=4, num_key_heads=2, head_dim=6, causal=False, max_length=16)
    backend = build_backend(name, {}, shape)
    q, kv = torch.randn(2, 4, 3, 6), torch.randn(2, 2, 0, 6)
    assert torch.equal(backend(q, kv, kv).out, torch.zeros_like(q))


NO_CALL = {
    "no heads": ((2, 0, 5, 6), (2, 0, 5, 6), (2, 0, 5, 6)),
    "no key heads": ((2, 4, 5, 6), (2, 0, 5, 6), (2, 0, 5, 6)),
    "no key size": ((2, 4, 5, 0), (2, 2, 5, 0), (2, 2, 5, 6)),
    "no value size": ((2, 4, 5, 6), (2, 2, 5, 6), (2, 2, 5, 0)),
}


@pytest.mark.parametrize("shapes", NO_CALL.values(), ids=NO_CALL)
@pytest.mark.parametrize("name", available_backends())
def test_no_heads_and_no_sizes_are_refused(name, shapes):
    options = {"block": 8} if name == "linformer" else {}
    shape = Geometry(num_heads=4, num_key_heads=2, head_dim=6, hidden_size=8, max_length=16)
    backend = build_backend(name, options, shape)
    with pytest.raises(UnsupportedError, match=r"heads and sizes per head must be at least 1"):
        backend(*map(torch.randn, shapes), hidden_states=torch.randn(2, 5, 8))


@pytest.mark.parametrize("shapes", NO_CALL.values(), ids=NO_CALL)
@pytest.mark.parametrize("op", [linear_attention, lsh_attention])
def test_ops_with_kernels_refuse_them_too(op, shapes):
    with pytest.raises(UnsupportedError, match=r"at least 1|multiple of the number of key heads"):
        op(*map(torch.randn, shapes))


@pytest.mark.parametrize(
    ("k", "v"),
    [
        ((2, 2, 5, 9), (2, 2, 5, 6)),
        ((2, 2, 5, 6), (2, 2, 4, 6)),
        ((1, 2, 5, 6), (1, 2, 5, 6)),
        ((2, 3, 5, 6), (2, 3, 5, 6)),
        ((2, 2, 5), (2, 2, 5)),
    ],
    ids=["key size", "length", "batch", "heads", "dimensions"],
)
@pytest.mark.parametrize("op", [linear_attention, lsh_attention])
def test_tensors_that_do_not_fit_do_not_reach_a_kernel(op, k, v):
    with pytest.raises(
        UnsupportedError, match=r"must agree|multiple of the number of key heads|must be \["
    ):
        op(torch.randn(2, 4, 5, 6), torch.randn(k), torch.randn(v))


@pytest.mark.parametrize("impl", ["auto", "torch"])
@pytest.mark.parametrize("op", [linear_attention, lsh_attention])
def test_views_give_what_their_copies_give(op, impl):
    """Views as ``expand``, ``flip`` and ``transpose`` make them, of any stride."""
    q = torch.randn(2, 4, 16, 180, dtype=torch.float64).mT[:, :, ::2]
    k = torch.randn(1, 2, 1, 16, dtype=torch.float64).expand(2, 2, 90, 16)
    v = torch.randn(2, 90, 2, 5, dtype=torch.float64).transpose(1, 2).flip(2)
    copies = [x.clone(memory_format=torch.contiguous_format) for x in (q, k, v)]
    options = {"num_hashes": 2, "chunk_size": 8, "window": 4} if op is lsh_attention else {}
    seen, expected = (op(*x, impl=impl, **options).out for x in ((q, k, v), copies))
    assert_close(seen, expected)
