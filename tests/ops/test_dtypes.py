"""Queries, keys and values of different dtypes, as of a model whose cache has another dtype."""

from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attnzoo import ops
from attnzoo.backends.feature_maps.base import FEATURE_MAPS
from attnzoo.backends.gates.decays import GATES
from attnzoo.contract.config import Geometry
from attnzoo.contract.masks import AttentionMask
from attnzoo.ops.hybrid.parts import LinearBranch
from attnzoo.registry import build_backend
from tests.helpers import by_sequence
from tests.ops import table

B, H, HKV, T, D = 2, 4, 2, 70, 16
CAUSAL = AttentionMask(causal=True)
WINDOW = AttentionMask(causal=True, window=(20, 0))
PADDED = AttentionMask(causal=True, padding=torch.arange(T).expand(B, T) > 4)
GATE = torch.linspace(-0.2, 0, B * HKV * T).view(B, HKV, T)
CHANNELS = GATE[..., None] * torch.linspace(0.5, 1, D)


def hybrid(q, k, v, impl):
    branch = LinearBranch(q.abs(), k.abs(), torch.zeros(()), GATE)
    return ops.hybrid_attention(q, k, v, branch, window=20, scale=0.3, impl=impl)


def linear(q, k, v, **options):
    return by_sequence(ops.linear_attention)(q.abs(), k.abs(), v, mask=PADDED, **options)


def delta(q, k, v, **options):
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    return ops.delta_attention(q, k, v, GATE.exp(), **options)


def biased_flash(q, k, v, impl):
    bias = torch.linspace(-1, 1, T).expand(T, T)
    return ops.flash_attention(q, k, v, mask=PADDED, bias=bias, sinks=torch.ones(H), impl=impl)


def global_tokens(q, k, v, impl):
    first = torch.arange(T)[None] < 3
    return ops.longformer_attention(q, k, v, window=8, global_tokens=first, impl=impl)


CASES = {
    "softmax": (partial(ops.softmax_attention, mask=PADDED), (None,)),
    "flash": (partial(ops.flash_attention, mask=CAUSAL), ("sdpa", "cpp")),
    "flash with a mask": (partial(ops.flash_attention, mask=PADDED), ("sdpa", "cpp")),
    "flash with a bias": (biased_flash, ("sdpa",)),
    "flash with a window": (partial(ops.flash_attention, mask=WINDOW), ("sdpa", "cpp")),
    "longformer": (global_tokens, ("cpp", "torch", "reference")),
    "lsh": (partial(ops.lsh_attention, mask=CAUSAL), ("auto",)),
    "block_sparse": (
        partial(ops.block_sparse_attention, mask=CAUSAL, window=16, top_k=2),
        ("cpp", "torch", "reference"),
    ),
    "linear": (linear, ("cpp", "torch", "reference")),
    "gated linear": (partial(linear, log_decay=GATE), ("cpp", "torch", "reference")),
    "gated channels": (partial(linear, log_decay=CHANNELS), ("cpp", "torch", "reference")),
    "mlstm": (
        partial(ops.mlstm_attention, log_forget=GATE, log_input=-GATE),
        ("cpp", "torch", "reference"),
    ),
    "rwkv6": (
        partial(ops.rwkv6_attention, log_decay=CHANNELS, bonus=torch.ones(HKV, D)),
        ("cpp", "torch", "reference"),
    ),
    "delta": (delta, ("cpp", "torch", "reference")),
    "hybrid": (hybrid, ("cpp", "torch", "reference")),
}
DTYPES = (torch.bfloat16, torch.float32, torch.float64)


def results(attend, inputs, impl):
    """Return the output and the gradients of the inputs."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    found = attend(*leaves) if impl is None else attend(*leaves, impl=impl)
    out = found if isinstance(found, torch.Tensor) else found.out
    (out * torch.linspace(-1, 1, T, dtype=out.dtype)[:, None]).sum().backward()
    return [out, *(x.grad for x in leaves)]


@pytest.mark.parametrize("first", range(3))
@pytest.mark.parametrize(
    ("name", "impl"), [(name, impl) for name, (_, impls) in CASES.items() for impl in impls]
)
def test_the_output_has_the_dtype_of_v(name, impl, first):
    attend = CASES[name][0]
    dtypes = DTYPES[first:] + DTYPES[:first]
    generator = torch.Generator().manual_seed(0)
    shapes = (B, H, T, D), (B, HKV, T, D), (B, HKV, T, D)
    inputs = [torch.randn(x, generator=generator).bfloat16().double() for x in shapes]
    expected = results(attend, inputs, impl)
    mixed = [x.to(dtype) for x, dtype in zip(inputs, dtypes, strict=True)]
    found = results(attend, mixed, impl)
    assert [x.dtype for x in found] == [dtypes[2], *dtypes]
    for ours, right in zip(found, expected, strict=True):
        assert (ours.double() - right).norm() < 0.01 * right.norm()


@pytest.mark.parametrize(
    ("dtype", "expected"), [(torch.bfloat16, torch.bfloat16), (torch.float64, torch.float32)]
)
def test_sdpa_with_a_key_of_another_dtype_under_autocast(dtype, expected):
    q, k, v = torch.randn(3, B, H, T, D)
    with torch.autocast("cpu", torch.bfloat16):
        assert ops.flash_attention(q, k.to(dtype), v, impl="sdpa").out.dtype == expected


# -- what implementations compute in -------------------------------------------------------------

ARITHMETIC = {
    *("add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_", "neg", "addcmul", "addcmul_"),
    *("bmm", "mm", "addmm", "baddbmm", "baddbmm_", "sum", "mean", "cumsum", "sqrt", "rsqrt"),
    *("exp", "exp_", "log", "_softmax", "sigmoid", "tanh"),
}


PROBE = 6  # a feature map of a row of zeros of D numbers gives its number of features


class Dtypes(TorchDispatchMode):
    """Records the operators of torch that compute in a dtype, and where."""

    def __init__(self, dtypes, names=None):
        super().__init__()
        self.dtypes, self.names, self.found = dtypes, names, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.__name__.split(".")[0]
        for x in out if isinstance(out, tuple | list) else [out]:
            is_counted = self.names is None or name in self.names
            if is_counted and isinstance(x, torch.Tensor) and x.dtype in self.dtypes:
                self.found |= {name} if x.numel() > PROBE else set()
        return out


@pytest.mark.parametrize("name", table.CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_ops_compute_in_their_dtype(dtype, name):
    """Nothing is narrower than float64 in its calls; nothing is multiplied in 16 bits."""
    case, ran = table.CASES[name], 0
    narrow, names = (torch.bfloat16, torch.float16), ARITHMETIC
    if dtype == torch.float64:
        narrow, names = (*narrow, torch.float32), None
    for options in table.calls(case, 2, 24, 24):
        if options["impl"] in ("triton", "reference"):
            continue
        inputs = [x.detach().to(dtype) for x in table.tensors(case, 2, 24, 24)]
        with Dtypes(narrow, names) as mode:
            found = table.attempt(case.run, inputs, options)
        assert not mode.found, f"{options}: {mode.found}"
        ran += found is not None
    assert ran


def map_cases():
    for name, feature_map in FEATURE_MAPS.items():
        yield "linear", {"feature_map": name, "normalize": not feature_map.signed}
    for name in GATES:
        yield "gated_linear", {"gate": name}


@pytest.mark.parametrize(("name", "options"), list(map_cases()))
def test_feature_maps_and_gates_compute_in_float64(name, options):
    geometry = Geometry(num_heads=4, num_key_heads=2, head_dim=PROBE, hidden_size=16, max_length=64)
    backend = build_backend(name, options, geometry).double()
    q, k, v = (torch.randn(2, heads, 24, PROBE, dtype=torch.float64) for heads in (4, 2, 2))
    hidden = torch.randn(2, 24, 16, dtype=torch.float64)
    with Dtypes((torch.float32, torch.bfloat16, torch.float16)) as mode:
        backend(q, k, v, mask=CAUSAL, hidden_states=hidden)
    assert not mode.found
