"""impl="fla": fla's naive functions in the place of its kernels, against the oracle in float64.

fla's kernels run on GPUs only. Its naive functions take the same tensors, but no packed sequences,
and some scale queries by D^-0.5.
"""

import sys
import warnings
from dataclasses import replace
from functools import partial
from itertools import product
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from attnzoo.contract import implementation as registry
from attnzoo.contract.states import DeltaState, LinearState
from attnzoo.errors import UnsupportedError
from attnzoo.ops import fla
from attnzoo.ops.delta.api import delta_attention
from attnzoo.ops.linear.api import linear_attention
from attnzoo.runtime import first_call
from tests.helpers import assert_within, gradients
from tests.ops.delta.ragged import make_sequences, nan_outside, row_length

DECAYS = ("none", "head", "token", "channel")
B, HKV, D, E, T = 2, 2, 6, 10, 21  # keys and values of different size
SCALE = 0.7  # not D^-0.5
BFLOAT16 = torch.bfloat16
EPS = torch.finfo(BFLOAT16).eps


@pytest.fixture
def calls(naive, monkeypatch):
    """Naive functions in the place of fla's; the names of those that are called."""
    made = []

    def fixed_scale(function):
        def scaled(q, *args, scale, **options):
            return function(q.float() * (scale * q.shape[-1] ** 0.5), *args, **options)

        return scaled

    def heads_first(function):
        def transposed(q, k, v, beta, **options):
            out, state = function(*(x.transpose(1, 2) for x in (q, k, v, beta)), **options)
            return out.transpose(1, 2), state

        return transposed

    def ungated(function):
        def run(q, k, v, g=None, **options):
            return function(q, k, v, q.new_zeros(q.shape[:3]) if g is None else g, **options)

        return run

    def renamed(function):
        return lambda q, k, v, g, **options: function(q, k, v, gk=g, **options)

    simple = naive("ops/simple_gla/naive.py").naive_recurrent_simple_gla
    gla = naive("ops/gla/naive.py").naive_recurrent_gla
    rule = naive("ops/delta_rule/naive.py").delta_rule_recurrence
    gated = naive("ops/gated_delta_rule/naive.py").naive_recurrent_gated_delta_rule
    kda = naive("ops/kda/naive.py").naive_recurrent_kda
    functions = {
        "simple_gla.chunk_simple_gla": ungated(simple),
        "gla.chunk_gla": fixed_scale(renamed(gla)),
        "delta_rule.chunk_delta_rule": fixed_scale(heads_first(rule)),
        "gated_delta_rule.chunk_gated_delta_rule": gated,
        "kda.chunk_kda": kda,
    }

    def in_terms_of_fla(name, function):
        """Check what the kernels demand, and run one sequence after another."""

        def run(q, k, v, initial_state=None, cu_seqlens=None, **options):
            made.append(name)
            assert q.shape == k.shape
            assert q.shape[:3] == v.shape[:3]
            assert q.dtype == k.dtype == v.dtype
            assert v.dtype in (torch.float16, BFLOAT16)
            per_token = {n: options.pop(n) for n in ("g", "beta") if n in options}
            if "g" in per_token:
                assert per_token["g"].shape == (
                    k.shape if "chunk_kda" in name or name == "gla.chunk_gla" else k.shape[:3]
                )
                assert per_token["g"].dtype == torch.float32
                assert per_token["g"].min() >= -100  # the kernels take differences of sums
            count = q.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
            if initial_state is not None:
                assert initial_state.shape == (count, *q.shape[2:], v.shape[3])
                assert initial_state.dtype == torch.float32
            if cu_seqlens is None:
                out, last = function(q, k, v, initial_state=initial_state, **per_token, **options)
                return out.to(v.dtype), last
            outs, states = [], []
            for i, (start, end) in enumerate(cu_seqlens.unfold(0, 2, 1).tolist()):
                part = {n: x[:, start:end] for n, x in per_token.items()}
                first = None if initial_state is None else initial_state[i : i + 1]
                tensors = (x[:, start:end] for x in (q, k, v))
                out, last = function(*tensors, initial_state=first, **part, **options)
                outs.append(out.to(v.dtype))
                states.append(last)
            return torch.cat(outs, 1), torch.cat(states) if options["output_final_state"] else None

        return run

    for name in ("fla", "fla.ops"):
        module = ModuleType(name)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    for path, function in functions.items():
        folder, name = path.split(".")
        module = ModuleType(f"fla.ops.{folder}")
        setattr(module, name, in_terms_of_fla(path, function))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for op in ("linear_attention", "delta_attention"):
        table = registry._NAMED[op]
        monkeypatch.setitem(table, "fla", replace(table["fla"], interpreted_on=("cpu",)))
    monkeypatch.setattr(fla, "_wrong_triton", lambda device: "")
    monkeypatch.setattr(first_call, "_FOUND", {})
    return made


def make(op, decay, groups, *, batch=B, tokens=T, count=None, state=True, positive=False):
    """Return the tensors of a call by name, q, k and v in bfloat16."""
    q, k = torch.randn(batch, HKV * groups, tokens, D), torch.randn(batch, HKV, tokens, D)
    k = F.normalize(k, dim=-1)
    q, k = (q.abs(), k.abs()) if positive else (q, k)
    x = {"q": q, "k": k, "v": torch.randn(batch, HKV, tokens, E)}
    x = {name: y.to(BFLOAT16) for name, y in x.items()}
    shapes = {"head": (HKV,), "token": k.shape[:3], "channel": k.shape}
    if op == "delta":
        x["beta"] = 2 * torch.rand(k.shape[:3])
    if decay != "none":
        x["log_decay"] = -2 * torch.rand(shapes[decay])
    if state:
        x["kv"] = torch.randn(count or batch, HKV, D, E)
    if state and op == "linear":
        x["z"] = torch.rand(count or batch, HKV, D)
    return {name: y.requires_grad_() for name, y in x.items()}


def run(op, x, impl, **options):
    """Return output and state as a list."""
    options = {"scale": SCALE, "return_state": True, **options}
    tensors = {name: y for name, y in x.items() if name not in ("kv", "z")}
    if op == "linear":
        state = LinearState(x["kv"], x["z"]) if "kv" in x else None
        out, state, *_ = linear_attention(**tensors, state=state, impl=impl, **options)
    else:
        state = DeltaState(x["kv"]) if "kv" in x else None
        out, state, *_ = delta_attention(**tensors, state=state, impl=impl, **options)
    return [out, *(state or ())]


def check(op, x, *, train=True, **options):
    """Compare results and gradients with the oracle in float64."""
    exact = {name: y.detach().double().requires_grad_(train) for name, y in x.items()}
    leaves = {name: y.detach().requires_grad_(train) for name, y in x.items()}
    with torch.set_grad_enabled(train):
        ours, plain, oracle = (
            run(op, tensors, impl, **options)
            for tensors, impl in ((leaves, "fla"), (leaves, "torch"), (exact, "reference"))
        )
        for triple in zip(ours, plain, oracle, strict=True):
            assert_within(*triple, EPS)
            assert triple[0].dtype == triple[1].dtype
            assert triple[0].shape == triple[1].shape
        if train:
            given = ((ours, leaves), (plain, leaves), (oracle, exact))
            for triple in zip(*(gradients(y, z.values()) for y, z in given), strict=True):
                assert_within(*triple, EPS)


@pytest.mark.parametrize(("op", "decay"), [*product(("linear", "delta"), DECAYS)])
def test_results_and_gradients_are_those_of_the_oracle(op, decay, calls):
    check(op, make(op, decay, groups=3))
    function = {
        "linear": ("simple_gla.chunk_simple_gla", "gla.chunk_gla"),
        "delta": ("gated_delta_rule.chunk_gated_delta_rule", "kda.chunk_kda"),
    }[op][decay == "channel"]
    if (op, decay) == ("delta", "none"):
        function = "delta_rule.chunk_delta_rule"
    assert calls == [function]


@pytest.mark.parametrize(
    ("op", "decay"), [*product(("linear", "delta"), ("none", "head", "channel"))]
)
@pytest.mark.parametrize("state", [True, False])
def test_sequences_in_a_row_do_not_meet_and_what_is_between_them_is_not_read(
    op, decay, state, calls
):
    sequences = make_sequences([4, 9, 0, 1, 5])
    tokens = row_length(sequences)
    x = make(op, decay, 2, batch=1, tokens=tokens, count=sequences.count, state=state)
    x = {name: nan_outside(y, sequences) if name not in ("kv", "z") else y for name, y in x.items()}
    check(op, x, sequences=sequences)


def test_the_output_alone_takes_no_sums_of_weights(calls):
    x = make("linear", "token", 2, state=False)
    widths = []
    module = sys.modules["fla.ops.simple_gla"]
    function = module.chunk_simple_gla

    def record(**options):
        widths.append(options["v"].shape[3])
        return function(**options)

    module.chunk_simple_gla = record
    check("linear", x, return_state=False)
    assert widths == [E]
    check("linear", x)
    assert widths[1:] == [16]


@pytest.mark.parametrize("decay", ["none", "channel"])
def test_a_normalised_output_without_gradients(decay, calls):
    check("linear", make("linear", decay, 2, positive=True), train=False, normalize=True, eps=0.1)
    with pytest.raises(UnsupportedError, match="the output is normalised"):
        run("linear", make("linear", decay, 2), "fla", normalize=True)


def test_features_of_float32_modules_are_rounded_to_the_dtype_of_the_values(calls):
    x = make("linear", "token", 1)
    for feature_map in ("elu+1", "exp"):
        check("linear", x, feature_map=feature_map)
    wide = {**x, "q": x["q"].float(), "k": x["k"].float()}
    check("linear", wide)
    half = {**x, "v": x["v"].half()}
    with pytest.raises(UnsupportedError, match="queries and keys are not float16"):
        run("linear", half, "fla")
    half |= {name: half[name].half() for name in ("q", "k")}
    run("linear", half, "fla")
    with pytest.raises(UnsupportedError, match=r"features of elu\+1 may exceed float16"):
        run("linear", half, "fla", feature_map="elu+1")


def test_the_delta_rule_normalises_queries_and_keys(calls):
    x = make("delta", "token", 2)
    with torch.no_grad():
        x["k"] *= 3
    check("delta", x, normalize_qk=True)
    half = {name: y.half() if name in ("q", "k", "v") else y for name, y in x.items()}
    run("delta", {**half, "q": half["q"].float()}, "fla", normalize_qk=True)


@pytest.mark.parametrize("op", ["linear", "delta"])
def test_strong_gates_clear_the_state(op, calls):
    for decay in ("token", "channel"):
        x = make(op, decay, 1)
        with torch.no_grad():
            x["log_decay"][:, :, 5] = -torch.inf
            x["log_decay"][:, :, 7:12] = -1e6
        check(op, x)


def test_one_token_may_be_named(calls):
    for op in ("linear", "delta"):
        check(op, make(op, "token", 2, tokens=1))
        slots = torch.tensor([2, -1, 0])
        x = make(op, "token", 2, batch=3, tokens=1)
        check(op, x, train=False, slots=slots)


def test_gradients_have_no_derivative(calls):
    x = make("linear", "token", 1)
    (out, *_) = run("linear", x, "fla")
    (grad,) = torch.autograd.grad(out.sum(), x["q"], create_graph=True)
    with pytest.raises(UnsupportedError, match="first derivatives only"):
        grad.sum().backward()


@pytest.mark.parametrize("op", ["linear", "delta"])
def test_other_calls_are_refused_with_a_reason(op, calls, monkeypatch):
    x = make(op, "token", 1)
    cases = {
        "values are float32": {"v": x["v"].float()},
        "values are float64": {"v": x["v"].double()},
        "chunk_size is 16": {"chunk_size": 16},
        f"key size is 300 and value size {E}": {
            **{name: torch.randn(B, HKV, T, 300).to(BFLOAT16) for name in ("q", "k")},
            "kv": torch.zeros(B, HKV, 300, E),
            **({"z": torch.zeros(B, HKV, 300)} if op == "linear" else {}),
        },
    }
    if op == "linear":
        cases["bidirectional"] = {"causal": False}
        del x["log_decay"]
    for message, changes in cases.items():
        options = {n: changes.pop(n) for n in ("chunk_size", "causal") if n in changes}
        with pytest.raises(UnsupportedError, match=message):
            run(op, {**x, **changes}, "fla", **options)
    for packages, message in (
        ({}, r"flash-linear-attention is not installed \(pip install 'attnzoo\[fla\]'\)"),
        ({"fla-core": "0.5.2"}, r"fla-core 0\.5\.2 is installed \(0\.6 or later"),
    ):
        monkeypatch.setattr(fla.metadata, "version", partial(_version, packages))
        fla._missing.cache_clear()
        with pytest.raises(UnsupportedError, match=message):
            run(op, x, "fla")
    fla._missing.cache_clear()


def _version(packages, name):
    if name not in packages:
        raise fla.metadata.PackageNotFoundError(name)
    return packages[name]


@pytest.mark.parametrize(
    ("version", "capability", "is_wrong"),
    [
        ("3.6.0", 9, True),
        ("3.4.0", 9, True),
        ("3.7.1", 9, False),
        ("3.3.1", 9, False),
        ("3.6.0", 8, False),
    ],
)
def test_gradients_of_gates_on_hopper_need_a_newer_triton(
    version, capability, is_wrong, monkeypatch
):
    monkeypatch.setattr(fla.metadata, "version", lambda name: version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
    fla._wrong_triton.cache_clear()
    x = make("delta", "token", 1)
    tensors = (x["q"], x["k"], x["v"], x["beta"])
    inputs = fla.delta.DeltaInputs(*tensors, x["log_decay"], None, 1.0, None)
    assert bool(fla.delta_reasons(inputs)) == is_wrong
    assert fla.delta_reasons(inputs._replace(log_decay=None)) == []
    with torch.no_grad():
        assert fla.delta_reasons(inputs) == []
    fla._wrong_triton.cache_clear()


# -- impl="auto" on CUDA ---------------------------------------------------------------------------


@pytest.fixture
def fake_gpu(calls, monkeypatch):
    """Calls on the CPU select as those on a GPU without a verdict of attnzoo's own kernels."""
    monkeypatch.setattr("attnzoo.runtime.gpu_verdicts.stored_verdicts", lambda device: ())
    for name in ("linear_attention", "delta_attention"):
        for op in (name, name.replace("attention", "step")):
            table = {**registry._automatic(registry._NAMED[op].values())}
            monkeypatch.setitem(
                registry._AUTOMATIC, op, {**table, "cpu": table.get("cuda", table[""])}
            )


@pytest.mark.parametrize(("op", "decay"), [*product(("linear", "delta"), DECAYS)])
def test_a_gpu_without_a_verdict_runs_fla(op, decay, fake_gpu, calls):
    x = make(op, decay, groups=2)
    function = linear_attention if op == "linear" else delta_attention
    found = function(**{name: y for name, y in x.items() if name not in ("kv", "z")})
    assert found.impl.impl == "fla"
    assert found.impl.reason.startswith(
        "chunk form; flash-linear-attention is installed; compared with torch on cpu"
    )
    assert ("triton is skipped: `attnzoo doctor` has not" in found.impl.reason) == (op == "linear")
    assert len(calls) == 2  # one is the comparison
    function(**{name: y for name, y in x.items() if name not in ("kv", "z")})
    assert len(calls) == 3


def test_what_fla_does_not_support_runs_in_torch_and_describe_says_why(fake_gpu, calls):
    x = make("linear", "none", groups=2, state=False)
    choice = linear_attention(**{**x, "v": x["v"].float()}).impl
    assert choice.impl == "torch"
    assert "fla cannot: values are float32 (fla multiplies in 16 bits, or in TF32)" in choice.reason
    choice = linear_attention(**x, normalize=True).impl
    assert choice.impl == "torch"
    assert "its gradients lose digits" in choice.reason
    with torch.no_grad():
        assert linear_attention(**x, normalize=True).impl.impl == "fla"
    token = {name: y[:, :, :1].detach() for name, y in x.items()}
    calls.clear()
    assert linear_attention(**token).impl.impl == "torch"  # one token is a step
    compiled = torch.compile(lambda: linear_attention(**x).impl, backend="eager")
    assert "torch.compile records the call" in compiled().reason
    assert calls == []


# -- the comparison of the first call --------------------------------------------------------------


def selected(op, x, **options):
    """Return the verdict about a call on the CPU."""
    call = {}
    verdict = getattr(fla, f"{op}_verdict")
    name = f"{op}_attention"
    table = registry._NAMED[name]
    table["fla"] = replace(
        table["fla"], run=lambda inputs: call.update(x=inputs) or table["torch"].run(inputs)
    )
    run(op, x, "fla", **options)
    return verdict(call["x"])


@pytest.mark.parametrize(("op", "decay"), [*product(("linear", "delta"), DECAYS)])
@pytest.mark.parametrize("train", [False, True])
def test_the_comparison_passes_what_is_right_and_finds_what_is_wrong(op, decay, train, calls):
    x = {name: y.detach().requires_grad_(train) for name, y in make(op, decay, 2).items()}
    sequences = make_sequences([9, 7]) if decay == "token" else None
    if sequences is not None:
        x = make(op, decay, 2, batch=1, tokens=row_length(sequences), count=2)
        x = {name: y.detach().requires_grad_(train) for name, y in x.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert selected(op, x, sequences=sequences) == ("", "compared with torch on cpu")
    modules = [m for name, m in sys.modules.items() if name.startswith("fla.ops.")]
    for module in modules:
        for name, function in list(vars(module).items()):
            if name.startswith("chunk_"):
                setattr(module, name, _wrong(function, train))
    first_call._FOUND.clear()
    with pytest.warns(UserWarning, match="does not select flash-linear-attention"):
        refusal, _ = selected(op, x, sequences=sequences)
    assert ("d_q differs" if train else "out differs") in refusal


def _wrong(function, in_gradients):
    """Return a function with an error of a tenth, as fla's normalised gradients have."""

    def run(q, **options):
        if in_gradients:
            q = q * 1.1 - 0.1 * q.detach()
        out, last = function(q=q, **options)
        return (out if in_gradients else out * 1.1), last

    return run
