"""Linear attention in C++ on bfloat16 inputs, which the kernel multiplies on AMX tiles."""

import os
from pathlib import Path

import pytest
import torch

from attnzoo.contract.states import LinearState
from attnzoo.ops.linear.api import linear_attention
from attnzoo.ops.linear.common import MapWeights
from attnzoo.ops.linear.cpu.call import LINEAR
from attnzoo.runtime import cpp
from tests.helpers import emulate_amx, nan_surrounded
from tests.ops.linear.test_cpp import PARTS, fill_gaps, make_sequences

ROOT = Path(__file__).resolve().parents[3]
EMULATED = "-DEMULATE_AMX" in os.environ.get("CXX", "")
REASON = cpp.unavailable_reason(LINEAR)
needs_amx = pytest.mark.skipif(
    bool(REASON) or not (EMULATED or torch.cpu._is_amx_tile_supported()),
    reason=REASON or "this CPU has no AMX",
)
H, HKV, D, E = 4, 2, 32, 32
BFLOAT16 = torch.bfloat16
ROUNDING = torch.finfo(BFLOAT16).eps / 2  # the largest relative error of rounding a result

# Changes to the default call: 150 tokens in two chunks of 64 and a short one, elu + 1, normalised
CASES = {
    "default": {},
    "not normalised": {"normalize": False},
    "one token": {"tokens": 1},
    "two tokens": {"tokens": 2},  # and one: too few for AMX
    "33 tokens": {"tokens": 33},
    "two spans": {"tokens": 700},
    "identity": {"feature_map": "identity"},
    "identity, not normalised": {"feature_map": "identity", "normalize": False},
    "odd sizes": {"feature_map": "identity", "sizes": (24, 20)},
    "odd sizes, not normalised": {
        "feature_map": "identity",
        "sizes": (33, 65),
        "normalize": False,
        "scale": 0.3,
    },
    "elu+1, 48 channels": {"sizes": (48, 48)},
    "hedgehog": {"feature_map": "hedgehog"},
    "hedgehog, not normalised": {"feature_map": "hedgehog", "normalize": False},
    "relu, decay per token": {"feature_map": "relu", "decay": "token", "sizes": (16, 40)},
    "scale": {"feature_map": "identity", "scale": 0.3},
    "decay per head": {"decay": "head"},
    "decay per head, not normalised": {"decay": "head", "normalize": False},
    "decay per token": {"decay": "token", "tokens": 700},
    "decay per token, identity": {
        "decay": "token",
        "feature_map": "identity",
        "scale": 0.3,
        "sizes": (24, 20),
        "normalize": False,
    },
    "decay per token, hedgehog": {"decay": "token", "feature_map": "hedgehog"},
    "packed": {"packed": True},
    "packed, decay per token": {"packed": True, "decay": "token", "tokens": 700, "state": True},
    "packed, not normalised": {"packed": True, "decay": "token", "normalize": False},
    "packed, hedgehog": {"packed": True, "feature_map": "hedgehog", "tokens": 700, "state": True},
    "state": {"state": True},
    "state, decay per head": {"state": True, "decay": "head", "normalize": False},
    "long, values of mean 1": {"tokens": 8192, "sizes": (16, 16), "heads": (2, 1), "mean": 1},
    "long, values of mean 1, decay per token": {
        "tokens": 8192,
        "sizes": (16, 16),
        "heads": (2, 1),
        "mean": 1,
        "decay": "token",
    },
}
EMULATED_CASES = ("odd sizes", "decay per token, identity", "packed", "hedgehog")
EMULATED_CASES += ("packed, decay per token", "packed, hedgehog")


# Sequences that are long enough for AMX on average; (145, ...) may have several spans
LONG_PARTS = (*PARTS[:2], (2, 2), (2, 67), (70, 140), (140, 145), (145, 10**6), (10**6, 10**6))


def make(tokens=150, heads=(H, HKV), sizes=(D, E), mean=0, decay=None, state=False, **options):
    """Return the tensors of a call by name: q, k, v, log_decay, kv, z, and weights of the map.

    A call with ``packed`` is one row of sequences that end inside and at the end of chunks.
    """
    options = {"feature_map": "elu+1", "normalize": True} | options
    packed = options.pop("packed", False)
    sequences = make_sequences(tokens, LONG_PARTS) if packed else None
    batch, states = (1, sequences.count) if packed else (2, 2)
    (size, value_size), (queries, keys) = sizes, heads
    shapes = {"q": (queries, size), "k": (keys, size), "v": (keys, value_size)}
    leaves = {
        name: nan_surrounded(torch.randn(batch, n, tokens, width).to(BFLOAT16))
        for name, (n, width) in shapes.items()
    }
    leaves["v"].add_(mean)
    if options["feature_map"] == "identity" and options["normalize"]:
        leaves["q"].abs_(), leaves["k"].abs_()
    features = size
    if options["feature_map"] == "hedgehog":
        features = 2 * size
        leaves["q_weight"], leaves["k_weight"] = (
            torch.randn(n, size, size) * size**-0.5 for n in heads
        )
    if decay == "head":
        leaves["log_decay"] = -torch.rand(keys) / 20
    if decay == "token":
        leaves["log_decay"] = -torch.rand(batch, tokens, keys).transpose(1, 2) / 10
        leaves["log_decay"][:, :, tokens // 3] = -50
    if state:
        leaves["kv"], leaves["z"] = (
            torch.randn(states, keys, features, value_size),
            10 * torch.rand(states, keys, features),
        )
    if packed:
        gate = (leaves["log_decay"],) if decay == "token" else ()
        fill_gaps(sequences, leaves["q"], leaves["k"], leaves["v"], *gate)
        options["sequences"] = sequences
    return leaves, options


def run(leaves, options, impl, **more):
    """Return the output and the state."""
    given, x = dict(options), dict(leaves)
    if "q_weight" in x:
        given["map_weights"] = MapWeights(x.pop("q_weight"), x.pop("k_weight"))
    if "kv" in x:
        given["state"] = LinearState(x.pop("kv"), x.pop("z"))
    output = linear_attention(**x, **given, impl=impl, return_state=True, **more)
    return output.out, *output.state


def results(leaves, options, impl, d_results, **more):
    """Return the output, the state and the gradients of all tensors by name."""
    x = {name: leaf.detach().requires_grad_() for name, leaf in leaves.items()}
    outs = run(x, options, impl, **more)
    if d_results is None:
        d_results = [torch.randn_like(out) for out in outs]
        d_results[1:] = [0.1 * d for d in d_results[1:]]
        if "sequences" in options:
            fill_gaps(options["sequences"], d_results[0])
    grads = torch.autograd.grad(
        outs, list(x.values()), [d.to(out.dtype) for d, out in zip(d_results, outs, strict=True)]
    )
    named = dict(zip(("out", "last_kv", "last_z"), outs, strict=True))
    return named | {f"d_{name}": g for name, g in zip(x, grads, strict=True)}, d_results


@needs_amx
@pytest.mark.parametrize("name", EMULATED_CASES if EMULATED else CASES)
def test_errors_are_at_most_twice_those_of_torch(name):
    """In addition to rounding: the kernel rounds features, scores and their gradients."""
    leaves, options = make(**CASES[name])
    found, d_results = results(leaves, options, "cpp", None)
    clean = {n: x.nan_to_num() for n, x in leaves.items()}  # torch maps tokens of gaps too
    plain, _ = results(clean, options, "torch", d_results)
    wide = {n: x.double() for n, x in clean.items()}
    if leaves["q"].shape[2] <= 1000:
        exact, _ = results(wide, options, "reference", d_results, chunk_size=1000)
    else:  # the dense form would need gigabytes; test_cpp.py compares this one with it
        exact, _ = results(wide, options, "cpp", d_results)
    for key, right in exact.items():
        budget = 2 * (plain[key].double() - right).norm() + ROUNDING * right.norm()
        error = (found[key].double() - right).norm()
        assert error <= budget, f"{key}: error {error / right.norm():.1e}, {error / budget:.2f}"


@needs_amx
@pytest.mark.parametrize("decay", [None, "head", "token"])
@pytest.mark.parametrize("normalize", [True, False])
def test_gradients_do_not_depend_on_frozen_inputs(normalize, decay):
    leaves, options = make(decay=decay, normalize=normalize, state=True, packed=True)
    everything, d_results = results(leaves, options, "cpp", None)
    for needed in (("q",), ("k",), ("v",), ("log_decay",), ("kv", "z"), ("k", "v")):
        x = {n: leaf.detach().requires_grad_(n in needed) for n, leaf in leaves.items()}
        chosen = [x[n] for n in needed if n in x]
        if chosen:
            grads = torch.autograd.grad(run(x, options, "cpp"), chosen, d_results)
            for n, grad in zip((n for n in needed if n in x), grads, strict=True):
                assert torch.equal(grad, everything[f"d_{n}"]), (needed, n)


@needs_amx
@pytest.mark.parametrize("feature_map", ["elu+1", "hedgehog"])
@pytest.mark.parametrize("decay", [None, "token"])
@pytest.mark.parametrize(("tokens", "sizes"), [(70, (32, 65)), (2100, (48, 20))], ids=str)
def test_results_do_not_depend_on_the_number_of_threads(tokens, sizes, decay, feature_map):
    """Threads divide query heads and columns of 70 tokens, or the five spans of 2100 tokens."""
    shape = {"tokens": tokens, "sizes": sizes, "heads": (6, 1)}
    leaves, options = make(**shape, decay=decay, packed=True, state=True, feature_map=feature_map)
    d_results, found, num_threads = None, [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            result, d_results = results(leaves, options, "cpp", d_results)
            with torch.no_grad():  # does not keep states
                result |= dict(enumerate(run(leaves, options, "cpp")))
            found.append(result)
    finally:
        torch.set_num_threads(num_threads)
    for other in found[1:]:
        for name, first in found[0].items():
            assert torch.equal(other[name], first), name


@needs_amx
@pytest.mark.parametrize("value", [1.0, -3.0])
@pytest.mark.parametrize("decay", [None, "token"])
def test_equal_values_give_equal_outputs(decay, value):
    """Denominators are sums of the same rounded numbers as outputs."""
    leaves, options = make(tokens=700, decay=decay, feature_map="elu+1", eps=0.0)
    leaves["v"].fill_(value)
    out = linear_attention(**leaves, **options, impl="cpp").out
    assert torch.equal(out, torch.full_like(out, value))


@needs_amx
@pytest.mark.parametrize("decay", [None, "token"])
def test_gradients_of_outputs_in_float_are_not_rounded(decay):
    """Gradients that cancel would be wrong if those of outputs were rounded."""
    from attnzoo.ops.linear.cpu.linear import weighted_sums

    leaves, options = make(tokens=600, decay=decay, mean=1)
    log_decay = leaves.pop("log_decay", None)
    weight = torch.randn(2, H, 600, E)

    def gradients(dtype, attend):
        x = [leaf.to(dtype).detach().requires_grad_() for leaf in leaves.values()]
        gate = None if log_decay is None else log_decay.to(dtype)
        return torch.autograd.grad((attend(*x, gate) * weight).sum(), x)

    def divided_sums(q, k, v, gate):
        given = {"sequences": None, "state": None, "return_state": False, "chunk_size": None}
        values, totals, last = weighted_sums(q, k, v, log_decay=gate, feature_map="elu+1", **given)
        assert last is None
        return values / totals[..., None]

    def dense(q, k, v, gate):
        given = options | {"log_decay": gate, "chunk_size": 1000, "impl": "reference", "eps": 0.0}
        return linear_attention(q, k, v, **given).out

    found, exact = gradients(BFLOAT16, divided_sums), gradients(torch.double, dense)
    for ours, right in zip(found, exact, strict=True):
        assert (ours - right).norm() <= 6e-3 * right.norm()


@needs_amx
@pytest.mark.parametrize("decay", [None, "token"])
@pytest.mark.parametrize("sizes", [(48, 20), (64, 64)], ids=str)
def test_sequences_do_not_depend_on_others_in_the_row(sizes, decay):
    """Results equal those without NaN in the other sequences."""
    shape = {"tokens": 700, "sizes": sizes, "decay": decay, "state": True, "packed": True}
    leaves, options = make(**shape, feature_map="identity", normalize=False)
    found, d_results = results(leaves, options, "cpp", None)
    at = slice(*LONG_PARTS[4])
    for name in ("q", "k", "v", *(("log_decay",) if decay else ())):
        leaves[name][:, :, at] = torch.nan
    changed, _ = results(leaves, options, "cpp", d_results)
    for name in ("out", "d_q", "d_k", "d_v", *(("d_log_decay",) if decay else ())):
        x, y = (r[name].clone() for r in (found, changed))
        assert y[:, :, at].isnan().any()
        x[:, :, at], y[:, :, at] = 0, 0
        assert torch.equal(x, y), name
    for name in ("last_kv", "last_z", "d_kv", "d_z"):
        x, y = (torch.cat([r[name][:4], r[name][5:]]) for r in (found, changed))
        assert torch.equal(x, y), name


@needs_amx
def test_small_chunks_do_not_use_amx():
    leaves, options = make()
    narrow, wide = (run(leaves, options, "cpp", chunk_size=size)[0] for size in (8, None))
    assert not torch.equal(narrow, wide)
    torch.testing.assert_close(narrow, wide, atol=0.02, rtol=0.02)


@pytest.mark.skipif(EMULATED, reason="is the process that this test starts")
@pytest.mark.skipif(bool(REASON), reason=REASON)
@pytest.mark.skipif(
    torch.cpu._is_amx_tile_supported(), reason="this CPU has AMX, which runs the same algorithm"
)
def test_emulated_kernel(fresh_python, tmp_path):
    """The same tests, in a process that compiles the kernel without AMX instructions."""
    chosen = "errors_are or small_chunks or others_in"
    options = ["-q", "-p", "no:cacheprovider", "-k", chosen, __file__]
    program = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"
    environment = emulate_amx(tmp_path / "cache")
    found = fresh_python(program, *options, cwd=ROOT, path=(ROOT,), environment=environment)
    assert found.returncode == 0, found.stdout
    assert f"{len(EMULATED_CASES) + 5} passed" in found.stdout
