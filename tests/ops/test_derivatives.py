"""Forward-mode and second derivatives of every op: right, or refused with an error."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from attnzoo import ops
from attnzoo.contract.masks import AttentionMask
from attnzoo.contract.sequences import Sequences
from attnzoo.errors import UnsupportedError
from attnzoo.ops.features.random_features import (
    key_shift,
    positive_keys,
    positive_queries,
)
from attnzoo.ops.hybrid.api import LinearBranch
from attnzoo.ops.linear.context_parallel import decayed_sums
from attnzoo.ops.linear.cpu.linear import LINEAR
from attnzoo.runtime import cpp
from tests.ops import table

LENGTH, SIZE = 20, 4
STEP = 1e-6  # of the central differences in float64
CAUSAL, FULL = AttentionMask(causal=True), AttentionMask()
PACKED = {"sequences": Sequences.from_cu_seqlens(torch.tensor([0, 9, 18, LENGTH]))}


class Case(NamedTuple):
    """An op with options as a function of tensors, and the tensors' shapes."""

    op: str
    run: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...] = ()  # of the inputs after q, k and v


def positive(*tensors):
    return [x.abs() + 0.1 for x in tensors]


def linear(q, k, v, g, **options):
    q, k, g = positive(q, k, g)
    decay = None if options.pop("plain", False) else -g
    options = {"log_decay": decay, "normalize": True, "chunk_size": 16, **options}
    return ops.linear_attention(q, k, v, **options).out


def delta(q, k, v, g, b, **options):
    beta, decay = b.sigmoid(), None if options.pop("plain", False) else -g.abs()
    return ops.delta_attention(
        q, k, v, beta, log_decay=decay, normalize_qk=True, chunk_size=16, **options
    ).out


def hybrid(q, k, v, q_features, k_features, **options):
    q_features, k_features = positive(q_features, k_features)
    branch = LinearBranch(q_features, k_features, torch.zeros(1, 1, 1, 1).to(q))
    return ops.hybrid_attention(q, k, v, branch, window=3, scale=0.5, **options).out


def mlstm(q, k, v, forget, gate, **options):
    return ops.mlstm_attention(
        q, k, v, log_forget=-forget.abs(), log_input=gate, chunk_size=16, **options
    ).out


def rwkv6(q, k, v, decay, bonus, **options):
    return ops.rwkv6_attention(
        q, k, v, log_decay=-decay.abs(), bonus=bonus, chunk_size=16, **options
    ).out


def matrix_gated(q, k, v, decay, **options):
    return ops.matrix_gated_attention(
        q, k, v, log_decay=lambda take: -take(decay, 2).abs(), **options
    ).out


def lsh(q, k, v, **options):
    return ops.lsh_attention(
        q, k, v, num_hashes=2, chunk_size=4, window=3, first_tokens=1, **options
    ).out


def shared_qk(q, k, v, **options):
    return ops.shared_qk_attention(q, k, v, num_hashes=2, chunk_size=4, **options).out


def random_features(q, k, v):
    projection = torch.linspace(-1, 1, 6 * SIZE, dtype=q.dtype).view(6, SIZE)
    shift = key_shift(projection)
    features = positive_queries(q, projection, shift, scale=0.5)
    return features @ positive_keys(k, projection, shift, scale=0.5).mT @ v


def state_summary(q, k, v, g):
    return torch.cat([x.flatten() for x in decayed_sums(k, v, -g.abs()[..., None])])


def with_mask(op, **fixed):
    return lambda *x, **options: op(*x, **fixed, **options).out


HEADS, ROWS, BLOCK = (1, 1, LENGTH), (1, LENGTH, 5), (1, 4, 2)
TOKENS = (1, 1, LENGTH, SIZE)
MASKS = {"causal": {"mask": CAUSAL}, "full": {"mask": FULL}}
BOTH, ALL = ("torch", "reference"), ("cpp", "torch", "reference")
# Name, op, function, shapes, variants, implementations; None if the op has no choice
TABLE = [
    ("random features", random_features, (), {"": {}}, None),
    ("state summary", state_summary, (HEADS,), {"": {}}, None),
    (
        "flash_attention",
        with_mask(ops.flash_attention),
        (),
        {**MASKS, "window": {"mask": AttentionMask(causal=True, window=(3, 0))}},
        ("sdpa",),
    ),
    (
        "flash_attention",
        with_mask(ops.flash_attention),
        (),
        {"window": {"mask": AttentionMask(causal=True, window=(3, 0))}},
        ("cpp",),
    ),
    ("softmax_attention", with_mask(ops.softmax_attention), (), MASKS, ("reference",)),
    (
        "linear_attention",
        linear,
        (HEADS,),
        {
            "chunk": {},
            "chunk without decay": {"plain": True},
            "parallel": {"chunk_size": LENGTH},
            "full": {"plain": True, "causal": False},
            "packed": {"plain": True, **PACKED},
            "packed full": {"plain": True, "causal": False, **PACKED},
        },
        ALL,
    ),
    (
        "delta_attention",
        delta,
        (HEADS, HEADS),
        {
            "chunk": {},
            "chunk without decay": {"plain": True},
            "packed": PACKED,
        },
        ALL,
    ),
    (
        "block_sparse_attention",
        with_mask(ops.block_sparse_attention, window=3, top_k=2, block_size=2, num_sinks=1),
        (),
        MASKS,
        ALL,
    ),
    (
        "hybrid_attention",
        hybrid,
        ((1, 2, LENGTH, SIZE), TOKENS),
        {"causal": {}, "packed": PACKED, "full": {"causal": False}},
        ALL,
    ),
    ("mlstm_attention", mlstm, (HEADS, HEADS), {"": {}}, ALL),
    ("rwkv6_attention", rwkv6, (TOKENS, (1, SIZE)), {"": {}}, ALL),
    ("matrix_gated_attention", matrix_gated, ((*TOKENS, SIZE),), {"": {}}, ("torch",)),
    (
        "linformer_attention",
        with_mask(ops.linformer_attention),
        (ROWS, ROWS),
        {"": {}, "pooling": {"pooling": True}},
        BOTH,
    ),
    (
        "linformer_block_attention",
        with_mask(ops.linformer_block_attention),
        (BLOCK, BLOCK),
        {"": {}, "pooling": {"pooling": True}},
        BOTH,
    ),
    ("longformer_attention", with_mask(ops.longformer_attention, window=3), (), MASKS, ALL),
    ("lsh_attention", lsh, (), MASKS, ALL),
    ("shared_qk_attention", shared_qk, (), MASKS, BOTH),
]
# Most C++ kernels are causal, and none has a parallel form
WITHOUT_CPP = {"parallel", "full", "packed full"}
FULL_IN_CPP = {"block_sparse_attention", "longformer_attention", "lsh_attention"}


def cases():
    for op, run, shapes, variants, impls in TABLE:
        for variant, options in variants.items():
            for impl in impls or ("",):
                if impl == "cpp" and variant in WITHOUT_CPP and op not in FULL_IN_CPP:
                    continue
                given = {**options, **({"impl": impl} if impl else {})}
                yield pytest.param(
                    lambda *x, run=run, given=given: run(*x, **given),
                    shapes,
                    impl,
                    id=" ".join(filter(None, (op, variant, impl))),
                )


def draw(shapes):
    generator = torch.Generator().manual_seed(1)
    shapes = ((1, 2, LENGTH, SIZE), TOKENS, TOKENS, *shapes)
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]


def dual(run, inputs, tangents):
    with forward_ad.dual_level():
        duals = map(forward_ad.make_dual, inputs, tangents)
        return forward_ad.unpack_dual(run(*duals)).tangent


def gradients(run, inputs):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    found = torch.autograd.grad(run(*leaves).sum(), leaves, materialize_grads=True)
    return torch.cat([x.flatten() for x in found])


def hessian_vector(run, inputs, tangents):
    product = torch.autograd.functional.hvp(
        lambda *x: run(*x).sum(), tuple(inputs), tuple(tangents)
    )[1]
    return torch.cat([x.flatten() for x in product])


def test_the_table_has_every_op():
    assert {op for op, *_ in TABLE if "_attention" in op} == set(ops.__all__)


def check(derivative, run, inputs, tangents, expected, impl):
    """Check that a derivative equals its finite difference, or raises and names what to use."""
    refused = ""
    try:
        found = derivative(run, inputs, tangents)
    except (UnsupportedError, NotImplementedError, RuntimeError) as error:
        refused = str(error)
    if refused:
        assert impl != "reference", refused
        # Torch names its own kernel, as it has no such derivative
        assert any(x in refused for x in ("impl='reference'", "one rank", "scaled_dot_product"))
        return
    assert expected.abs().max() > 0.01  # zeros are wrong
    assert found is not None
    torch.testing.assert_close(found, expected, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize(("run", "shapes", "impl"), list(cases()))
def test_derivatives_are_right_or_refused(run, shapes, impl):
    if impl == "cpp" and cpp.unavailable_reason(LINEAR):
        pytest.skip(cpp.unavailable_reason(LINEAR))
    inputs, tangents = draw(shapes), [x.cos() for x in draw(shapes)]
    plus, minus = (
        [x + sign * STEP * t for x, t in zip(inputs, tangents, strict=True)] for sign in (1, -1)
    )
    first = (run(*plus) - run(*minus)) / (2 * STEP)
    check(dual, run, inputs, tangents, first, impl)
    second = (gradients(run, plus) - gradients(run, minus)) / (2 * STEP)
    check(hessian_vector, run, inputs, tangents, second, impl)


@pytest.mark.parametrize("compiled", [False, True])
def test_transforms_of_torch_func_are_refused(compiled):
    def jvp(q, tangent):
        return torch.func.jvp(lambda q: lsh(q, q, q, impl="torch"), (q,), (tangent,))

    run = torch.compile(jvp, backend="eager") if compiled else jvp
    q = torch.randn(1, 2, LENGTH, SIZE)
    with pytest.raises(UnsupportedError, match="forward-mode"):
        run(q, q)
    if not compiled:
        with pytest.raises(UnsupportedError, match=r"torch\.func"):
            torch.func.grad(lambda q: lsh(q, q, q, impl="torch").sum())(q)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of custom operators
@pytest.mark.parametrize("name", table.CASES)
def test_vmap_is_right_or_refused_by_name(name):
    case = table.CASES[name]
    for options in table.calls(case, 1, 20, 20):
        if options["impl"] == "triton":
            continue

        def run(*inputs, options=options):
            return case.run(*inputs, **options).out

        inputs = [x.detach().double() for x in table.tensors(case, 1, 20, 20)]
        pairs = [torch.stack([x, 2 * x]) for x in inputs]
        try:
            expected = torch.stack([run(*(x[i] for x in pairs)) for i in range(2)])
            found = torch.vmap(run)(*pairs)
        except UnsupportedError as error:
            if not str(error).startswith(("impl=", "This implementation of")):
                raise
            continue
        torch.testing.assert_close(found, expected)
