"""impl="auto" selects the Triton kernels only where they passed a check."""

import sys
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from attnzoo.errors import ConfigError
from attnzoo.ops import linear_attention
from attnzoo.ops.block_sparse.triton import check as check_sparse
from attnzoo.ops.delta.triton import check as check_delta
from attnzoo.ops.hybrid import api as window_hybrid
from attnzoo.ops.hybrid import decode as window_decode
from attnzoo.ops.hybrid.state import LinearBranch
from attnzoo.ops.hybrid.triton import check as check_hybrid
from attnzoo.ops.hybrid.triton import custom_op as hybrid_op
from attnzoo.ops.hybrid.triton import step as hybrid_step
from attnzoo.ops.hybrid.triton.check import HybridCase
from attnzoo.ops.linear import api as op
from attnzoo.ops.linear import gated_step
from attnzoo.ops.linear.triton import check as check_triton
from attnzoo.ops.linear.triton import launch
from attnzoo.ops.linear.triton import trust as triton_trust
from attnzoo.ops.linear.triton.check import CheckCase, wrong_results
from attnzoo.runtime import trust
from attnzoo.runtime.cache_folder import CACHE
from attnzoo.runtime.verdicts import FAILED, NOT_RUN, PASSED, Verdict
from tests.kernel_device import kernel_device

DEVICE = kernel_device()
X = torch.randn(1, 1, 20, 8, device=DEVICE)
GATES = -torch.rand(1, 1, 20, device=DEVICE)


class Gpu:
    """A device with a replaced name; ``verdict`` is the result of its check."""

    def __init__(self):
        self.identity = {"device": "NVIDIA Test"}
        self.verdict = Verdict(PASSED)
        self.checks = []

    def run_check(self, device, decay, size, op):
        self.checks.append((op, decay, size))
        return self.verdict

    def new_process(self):
        trust._VERDICTS.clear()
        trust._PASSED.clear()
        trust._WARNED.clear()


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    gpu = Gpu()
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    monkeypatch.delenv(triton_trust.TRUST, raising=False)
    monkeypatch.setattr(trust, "_VERDICTS", {})
    monkeypatch.setattr(trust, "_PASSED", {})
    monkeypatch.setattr(trust, "_WARNED", set())
    monkeypatch.setattr(triton_trust, "device_identity", lambda device: gpu.identity)
    monkeypatch.setattr(triton_trust, "run_check", gpu.run_check)
    monkeypatch.setitem(op.AUTOMATIC, ("chunk", False), op.AUTOMATIC["chunk", True])
    return gpu


def test_auto_selects_kernels_that_passed_and_checks_them_once(gpu):
    for _ in range(2):
        choice = linear_attention(X, X, X).impl
        assert choice.impl == "triton"
        assert choice.reason.endswith("compiled for this GPU; checked on NVIDIA Test")
    gpu.new_process()
    linear_attention(X, X, X)
    assert gpu.checks == [("linear", "none", 64)]


def test_each_decay_and_size_has_a_verdict(gpu):
    big = torch.randn(1, 1, 2, 100, device=DEVICE)
    linear_attention(X, X, X, log_decay=GATES)
    linear_attention(X, X, X, log_decay=GATES[0, :, 0])
    linear_attention(X, X, X, log_decay=-torch.rand(1, 1, 20, 8, device=DEVICE))
    linear_attention(big, big, X[:, :, :2])
    assert gpu.checks == [
        ("linear", "scalar", 64),
        ("linear", "vector", 64),
        ("linear", "none", 128),
    ]


def test_a_changed_identity_is_checked_again(gpu, monkeypatch):
    linear_attention(X, X, X)
    gpu.identity = {**gpu.identity, "ptxas": "99.1.5"}
    monkeypatch.setattr(triton_trust, "assembler", lambda device: "other")  # as torch.compile does
    linear_attention(X, X, X)
    assert len(gpu.checks) == 2


def test_auto_selects_torch_and_warns_once_if_kernels_failed(gpu):
    gpu.verdict = Verdict(FAILED, "dv differs from float64 by 3")
    with pytest.warns(UserWarning, match=r"NVIDIA Test: dv differs from float64 by 3.*doctor"):
        choice = linear_attention(X, X, X).impl
    assert choice.impl == "torch"
    assert "triton is skipped: they failed their check on NVIDIA Test: dv differs" in choice.reason
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert linear_attention(X, X, X).impl.impl == "torch"
        assert linear_attention(X, X, X, impl="triton").impl.impl == "triton"
    gpu.new_process()
    with pytest.warns(UserWarning, match="dv differs"):
        linear_attention(X, X, X)
    assert len(gpu.checks) == 1


def test_a_check_that_could_not_run_is_repeated_in_the_next_process(gpu):
    gpu.verdict = Verdict(NOT_RUN, "out of memory")
    with pytest.warns(UserWarning, match="could not run: out of memory"):
        assert linear_attention(X, X, X).impl.impl == "torch"
    assert linear_attention(X, X, X).impl.impl == "torch"
    assert len(gpu.checks) == 1
    gpu.new_process()
    gpu.verdict = Verdict(PASSED)
    assert linear_attention(X, X, X).impl.impl == "triton"


def test_a_call_that_the_kernels_do_not_support_needs_no_check(gpu):
    x = X.double()
    choice = linear_attention(x, x, x).impl
    assert (choice.impl, gpu.checks) == ("torch", [])
    assert "triton cannot: an input is float64" in choice.reason


def test_no_check_runs_while_torch_compile_traces(gpu):
    reasons = []

    def attend(x):
        output = linear_attention(x, x, x)
        reasons.append(output.impl)
        return output.out

    def compiled():
        torch._dynamo.reset()
        return torch.compile(attend, backend="eager", fullgraph=False)(X)

    with pytest.warns(UserWarning, match="cannot run while torch.compile traces"):
        compiled()
    assert (reasons[-1].impl, gpu.checks) == ("torch", [])
    attend(X)
    assert (reasons[-1].impl, gpu.checks) == ("triton", [("linear", "none", 64)])
    gpu.new_process()  # the stored verdict is read while tracing
    compiled()
    assert (reasons[-1].impl, gpu.checks) == ("triton", [("linear", "none", 64)])


def test_no_check_runs_while_a_cuda_graph_is_captured(gpu, monkeypatch):
    monkeypatch.setattr(triton_trust, "assembler", lambda device: "")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    k = SimpleNamespace(device=torch.device("cuda", 0), shape=X.shape)
    with pytest.warns(UserWarning, match="cannot run while a CUDA graph is captured"):
        (reason,), _ = triton_trust.trust("linear", None, k, k)
    assert "run `attnzoo doctor`" in reason
    assert gpu.checks == []


@pytest.mark.parametrize(("value", "impl"), [("1", "triton"), ("0", "torch")])
def test_the_environment_variable_replaces_the_check(gpu, value, impl, monkeypatch):
    monkeypatch.setenv(triton_trust.TRUST, value)
    choice = linear_attention(X, X, X).impl
    assert (choice.impl, gpu.checks) == (impl, [])
    assert f"{triton_trust.TRUST}={value}" in choice.reason
    monkeypatch.setenv(triton_trust.TRUST, "yes")
    with pytest.raises(ConfigError, match=r"is 'yes'; set it to 1 .*, to 0 .*, or not at all"):
        linear_attention(X, X, X)


def test_the_identity_has_the_versions_of_kernels_and_compilers(monkeypatch):
    found = triton_trust.device_identity(torch.device("cpu"))
    assert {"attnzoo", "kernels", "torch", "triton"} < set(found)
    properties = SimpleNamespace(name="NVIDIA Test", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(trust, "driver_version", lambda: "580.1")
    triton_trust._identity.cache_clear()
    found = triton_trust._identity(torch.device("cuda", 0), "ptxas", "")
    assert found["ptxas"].count(".") == 2
    assert (found["device"], found["capability"]) == ("NVIDIA Test", "9.0")
    triton_trust._identity.cache_clear()


# -- the check itself -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"),
    [("linear", "bare"), pytest.param("hybrid", "plain", marks=pytest.mark.exhaustive)],
)
def test_the_check_passes_in_separate_processes(name, kind, monkeypatch):
    monkeypatch.setattr(triton_trust, "KINDS", {name: (kind,)})
    assert triton_trust.run_check(DEVICE, "none", 64, name)[:2] == (PASSED, "")


KINDS = [(decay, kind) for decay in ("none", "scalar", "vector") for kind in check_triton.KINDS]
QUICK = {("none", "mapped")}


def test_the_check_runs_all_kinds_of_calls():
    found = {"linear": check_triton.KINDS, "hybrid": check_hybrid.KINDS}
    found |= {"delta": check_delta.KINDS, "block_sparse": check_sparse.KINDS}
    assert found == triton_trust.KINDS


@pytest.mark.parametrize(
    ("decay", "kind"),
    [pytest.param(*x, marks=() if x in QUICK else pytest.mark.exhaustive) for x in KINDS],
)
def test_the_kernels_pass_their_check(decay, kind):
    for case in check_triton.cases(decay, 64, kind, small=DEVICE.type != "cuda"):
        assert list(wrong_results(case, DEVICE)) == []


HYBRID_KINDS = [
    (decay, kind) for decay in ("none", "scalar", "vector") for kind in check_hybrid.KINDS
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("decay", "kind"), HYBRID_KINDS)
def test_the_kernels_of_the_hybrid_pass_their_check(decay, kind):
    for case in check_hybrid.cases(decay, 64, kind, small=DEVICE.type != "cuda"):
        assert list(check_hybrid.wrong_results(case, DEVICE)) == []


HYBRID = HybridCase(
    decay="none", d=16, e=16, features=16, B=1, Hkv=1, T=30, W=8, dtype=torch.float32
)


@pytest.mark.parametrize(
    ("function", "result", "broken"),
    [
        ("launch_window", 0, {"out"}),
        ("merge", 1, {"d_q", "d_k", "d_v", "d_log_weight"}),
        ("launch_window_backward", 1, {"d_k"}),
        ("merge_backward", 3, {"d_q_features", "d_k_features"}),
    ],
)
def test_a_broken_kernel_of_the_hybrid_fails_the_check(function, result, broken, monkeypatch):
    run = getattr(hybrid_op, function)

    def scaled(*args):
        results = list(run(*args))
        results[result] = results[result] * 1.1
        return tuple(results)

    assert list(check_hybrid.wrong_results(HYBRID, DEVICE)) == []
    monkeypatch.setattr(hybrid_op, function, scaled)
    wrong = {text.split()[0] for text in check_hybrid.wrong_results(HYBRID, DEVICE)}
    assert broken <= wrong
    assert "kv" not in wrong


def test_a_broken_decoding_step_of_the_hybrid_fails_the_check(monkeypatch):
    run = hybrid_step.launch_hybrid_step

    def without_store(*args):
        seen = args[14].clone()
        out = run(*args)
        args[14].copy_(seen)  # so that the next token overwrites the same row
        return out

    monkeypatch.setattr(hybrid_step, "launch_hybrid_step", without_store)
    wrong = {text.partition(" differs")[0] for text in check_hybrid.wrong_results(HYBRID, DEVICE)}
    assert {"out after decoding", "k after decoding"} <= wrong
    assert "out" not in wrong


def test_auto_selects_the_kernels_of_the_hybrid_only_if_they_passed(gpu, monkeypatch):
    triton, _, torch_form, _ = window_hybrid.IMPLEMENTATIONS
    monkeypatch.setitem(window_hybrid.AUTOMATIC, False, (triton, torch_form))
    monkeypatch.setitem(window_decode.AUTOMATIC_STEPS, False, window_decode.STEPS)
    x, features = X[:, :, :4], torch.rand(1, 1, 4, 100, device=DEVICE)
    branch = LinearBranch(features, features, torch.zeros(1, 1, 1, 1, device=DEVICE), -features)
    call = partial(window_hybrid.hybrid_attention, x, x, x, branch, window=4, scale=1.0)
    choice = call().impl
    assert choice.impl == "triton"
    assert choice.reason.endswith("checked on NVIDIA Test")
    assert gpu.checks == [("hybrid", "vector", 128)]  # 100 features
    token_branch = branch._replace(log_decay=-features[:, :, :1])
    token_branch = token_branch._replace(q=features[:, :, :1], k=features[:, :, :1])
    state = call(return_state=True).state
    monkeypatch.setattr(window_decode, "supports_step_cpp", lambda *_: False)
    new, options = (y[:, :, :1] for y in (x, x, x)), {"window": 4, "scale": 1.0, "state": state}
    token = partial(window_hybrid.hybrid_attention, *new, token_branch, **options)
    with torch.no_grad():
        choice = token().impl
    assert (choice.impl, "one token" in choice.reason) == ("triton", True)
    assert choice.reason.endswith("checked on NVIDIA Test")
    gpu.new_process()
    gpu.identity, gpu.verdict = {"device": "Other"}, Verdict(FAILED, "d_k differs by 3")
    with pytest.warns(UserWarning, match="kernels of the window hybrid: they failed .*d_k differs"):
        assert call().impl.impl == "torch"
    with torch.no_grad():
        assert token().impl.impl == "torch"
    assert call(impl="triton").impl.impl == "triton"


def test_the_identity_depends_on_the_sources_of_the_hybrid(tmp_path, monkeypatch):
    before = triton_trust._source_hash("")
    read = Path.read_bytes
    for name in ("window/triton/window.py", "hybrid/triton/check.py", "hybrid/triton/merge.py"):
        triton_trust._source_hash.cache_clear()
        changed = lambda path, name=name: read(path) + b"#" * path.as_posix().endswith(name)  # noqa: E731
        monkeypatch.setattr(Path, "read_bytes", changed)
        assert triton_trust._source_hash("") != before
    triton_trust._source_hash.cache_clear()


CASE = CheckCase(decay="scalar", d=16, e=16, B=1, Hkv=1, T=70)


@pytest.mark.parametrize(
    ("result", "broken"),
    [
        *(pytest.param(*x, marks=pytest.mark.exhaustive) for x in ((0, "dq"), (1, "dk"))),
        (2, "dv"),
        (3, "d_log_decay"),
        pytest.param(4, "dkv", marks=pytest.mark.exhaustive),
    ],
)
def test_a_broken_kernel_fails_the_check_and_auto_selects_torch(gpu, result, broken, monkeypatch):
    backward = launch.KernelLauncher.backward

    def scaled(self, *args):
        grads = list(backward(self, *args))
        grads[result] = grads[result] * 1.1
        return tuple(grads)

    monkeypatch.setattr(launch.KernelLauncher, "backward", scaled)
    wrong = list(wrong_results(CASE, DEVICE))
    assert [text.split()[0] for text in wrong] == [broken]
    gpu.verdict = Verdict(FAILED, wrong[0])
    with pytest.warns(UserWarning, match=f"{broken} differs from float64 by"):
        assert linear_attention(X, X, X, log_decay=GATES).impl.impl == "torch"


def test_results_that_change_between_calls_and_unwritten_memory_fail_the_check(monkeypatch):
    forward = launch.KernelLauncher.forward

    def unstable(self):
        out, *last = forward(self)
        return (out + 1e-6 * torch.randn_like(out), *last)

    monkeypatch.setattr(launch.KernelLauncher, "forward", unstable)
    case = CheckCase(decay="none", d=16, e=16, B=1, Hkv=1, T=20, dtype=torch.float32)
    assert list(wrong_results(case, DEVICE)) == [f"out differs between two equal calls in {case}"]

    def unwritten(self):
        out, *last = forward(self)
        return (torch.empty_like(out), *last)

    monkeypatch.setattr(launch.KernelLauncher, "forward", unwritten)
    (text,) = wrong_results(case, DEVICE)
    assert text.startswith("out differs from float64 by nan")
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_step_kernel_is_checked(monkeypatch):
    monkeypatch.setattr("attnzoo.ops.linear.triton.step.launch_step", _wrong_step)
    case = CheckCase(decay="none", d=16, e=16, B=1, Hkv=1, T=1)
    assert [text.split()[0] for text in wrong_results(case, DEVICE)] == ["out", "kv", "z"]


@pytest.mark.parametrize(("decay", "name"), [("scalar", "mlstm"), ("vector", "rwkv6")])
def test_the_step_of_gates_is_checked(decay, name, monkeypatch):
    case = CheckCase(decay=decay, d=16, e=18, B=1, Hkv=2, T=1, groups=2)
    assert list(wrong_results(case, DEVICE)) == []
    run = gated_step._run_triton
    monkeypatch.setattr(gated_step, "_run_triton", lambda x, gate: run(x._replace(k=x.k * 3), gate))
    wrong = {text.partition(" differs")[0] for text in wrong_results(case, DEVICE)}
    assert wrong == {f"{result} of {name}" for result in ("out", "kv", "z")}


def _wrong_step(q, k, v, log_decay, kv, z, *options):
    return v.repeat(1, q.shape[1] // v.shape[1], 1, 1) * 0, kv + 1, z + 1


def test_a_program_without_an_interpreter_cannot_check(monkeypatch):
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert triton_trust.run_check(DEVICE, "none", 64).outcome == NOT_RUN
