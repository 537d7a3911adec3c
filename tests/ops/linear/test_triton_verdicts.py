"""impl="auto" selects the Triton kernels only where a check has left a verdict that they passed."""

import sys
import warnings
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from attnzoo.errors import ConfigError
from attnzoo.evaluation import kernel_checks
from attnzoo.evaluation.kernel_checks import check_kernels
from attnzoo.ops import linear_attention
from attnzoo.ops.block_sparse.triton import check as check_sparse
from attnzoo.ops.linear.triton import check as check_triton
from attnzoo.ops.linear.triton import launch
from attnzoo.ops.linear.triton import verdicts as triton_verdicts
from attnzoo.ops.linear.triton.check import CheckCase, wrong_results
from attnzoo.runtime import kernel_groups
from attnzoo.runtime.cache_folder import CACHE
from attnzoo.runtime.verdicts import FAILED, NOT_RUN, PASSED, Verdict, decide
from tests.helpers import change_implementation
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
        kernel_groups._STATE.__init__()


def on_this_device(monkeypatch, *ops):
    """Make triton the only automatic implementation for the device of these tests."""
    for op in ops:
        change_implementation(monkeypatch, op, "triton", devices=(DEVICE.type,))
        change_implementation(monkeypatch, op, "cpp", automatic="")


@pytest.fixture
def selectable(monkeypatch, tmp_path):
    """The kernels are a choice of ``impl="auto"`` on this device, which has no verdict."""
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    monkeypatch.delenv(triton_verdicts.VARIABLE, raising=False)
    monkeypatch.setattr(kernel_groups, "_STATE", kernel_groups._State())
    on_this_device(monkeypatch, "linear_attention")


@pytest.fixture
def gpu(monkeypatch, selectable):
    gpu = Gpu()
    monkeypatch.setattr(triton_verdicts, "device_identity", lambda device: gpu.identity)
    monkeypatch.setattr(triton_verdicts, "run_check", gpu.run_check)
    return gpu


def attend():
    """Return the implementation of a call without decay, and why."""
    return linear_attention(X, X, X).impl


def check(call=attend, **options):
    """Check the kernels that a call needs; returns each verdict, and whether it was stored."""
    return [(x.outcome, x.stored) for x in check_kernels(call, log=lambda text: None, **options)]


@pytest.mark.parametrize("outcome", [None, PASSED, FAILED])
def test_a_call_starts_no_process(selectable, outcome, monkeypatch):
    """It only reads a verdict; the check is not replaced here."""
    if outcome is not None:
        group = triton_verdicts.kernel_group(DEVICE, "linear", "none", 64)
        decide(group.name, group.identity(), lambda: Verdict(outcome, "dv differs"))
    linear_attention(X, X, X, impl="triton")  # Triton compiles the kernels on a GPU
    started = []

    def start(*args, **kwargs):
        started.append(args)
        raise OSError("a call starts a process")

    monkeypatch.setattr("subprocess.Popen", start)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert attend().impl == ("triton" if outcome == PASSED else "torch")
    assert started == []


def test_without_a_verdict_auto_selects_torch_and_says_once_how_to_get_one(gpu, monkeypatch):
    reads = []
    read = kernel_groups.stored_verdict
    monkeypatch.setattr(
        kernel_groups, "stored_verdict", lambda *args: reads.append(args) or read(*args)
    )
    reason = "they are not checked on NVIDIA Test yet; `attnzoo doctor` checks them, once"
    kernels = r"Triton kernels of linear attention \(decay none, sizes up to 64\)"
    with pytest.warns(UserWarning, match=f"select the {kernels}.* {reason}") as warned:
        choice = attend()
    assert len(warned) == 1
    assert (choice.impl, gpu.checks) == ("torch", [])
    assert f"triton is skipped: {reason}" in choice.reason
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert attend() == choice
        assert linear_attention(X, X, X, impl="triton").impl.impl == "triton"
    assert len(reads) == 1


def test_the_message_names_the_command_that_checks_a_size(gpu):
    x = torch.randn(1, 1, 2, 200, device=DEVICE)
    with pytest.warns(UserWarning, match="sizes up to 256.*yet; `attnzoo doctor --all` checks"):
        linear_attention(x, x, x)
    sizes = {group.size for group in kernel_checks.device_groups(DEVICE)}
    assert sizes == {64, 128}
    sizes = {group.size for group in kernel_checks.device_groups(DEVICE, full=True)}
    assert sizes == {64, 128, 256}


def test_auto_selects_kernels_that_passed_a_check(gpu):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a check that follows needs no warning
        assert check() == [(PASSED, False)]
    for _ in range(2):
        assert attend().impl == "triton"
        assert attend().reason.endswith("compiled for this GPU; checked on NVIDIA Test")
        gpu.new_process()
    assert check() == [(PASSED, True)]
    assert gpu.checks == [("linear", "none", 64)]
    assert check(fresh=True) == [(PASSED, False)]
    assert len(gpu.checks) == 2


def test_each_decay_and_size_has_a_verdict(gpu):
    big = torch.randn(1, 1, 2, 100, device=DEVICE)

    def attend():
        linear_attention(X, X, X, log_decay=GATES)
        linear_attention(X, X, X, log_decay=GATES[0, :, 0])
        linear_attention(X, X, X, log_decay=-torch.rand(1, 1, 20, 8, device=DEVICE))
        linear_attention(big, big, X[:, :, :2])

    check(attend)
    assert gpu.checks == [
        ("linear", "scalar", 64),
        ("linear", "vector", 64),
        ("linear", "none", 128),
    ]


def test_a_verdict_holds_for_one_identity(gpu, monkeypatch):
    check()
    gpu.identity = {**gpu.identity, "ptxas": "99.1.5"}
    monkeypatch.setattr(triton_verdicts, "assembler", lambda device: "other")  # torch.compile
    with pytest.warns(UserWarning, match="not checked"):
        assert attend().impl == "torch"
    assert check() == [(PASSED, False)]
    assert attend().impl == "triton"


def test_auto_selects_torch_and_warns_once_if_kernels_failed(gpu):
    gpu.verdict = Verdict(FAILED, "dv differs from float64 by 3")
    check()
    with pytest.warns(UserWarning, match=r"NVIDIA Test: dv differs from float64 by 3.*--fresh"):
        choice = attend()
    assert choice.impl == "torch"
    assert "triton is skipped: they failed their check on NVIDIA Test: dv differs" in choice.reason
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert attend().impl == "torch"
        assert linear_attention(X, X, X, impl="triton").impl.impl == "triton"
    gpu.new_process()
    with pytest.warns(UserWarning, match="dv differs"):
        attend()
    assert len(gpu.checks) == 1


def test_a_check_that_could_not_run_is_repeated(gpu):
    gpu.verdict = Verdict(NOT_RUN, "out of memory")
    assert check() == [(NOT_RUN, False)]
    with pytest.warns(UserWarning, match="could not run: out of memory"):
        assert attend().impl == "torch"
    gpu.verdict = Verdict(PASSED)
    assert check() == [(PASSED, False)]
    assert attend().impl == "triton"


def test_messages_name_kernels_device_and_result(gpu):
    messages = []
    gpu.verdict = Verdict(FAILED, "dv differs", 12.3)
    (found,) = check_kernels(attend, log=messages.append)
    kernels = "the Triton kernels of linear attention (decay none, sizes up to 64) on NVIDIA Test"
    assert messages == [
        f"Checking {kernels}, once; it takes up to a minute",
        f"{kernels}: failed: dv differs (12 s)",
    ]
    assert str(found) == messages[1]


def test_without_a_gpu_there_is_nothing_to_check(gpu):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU, whose checks take minutes")
    assert check(lambda: linear_attention(X, X, X, impl="torch")) == []


def test_a_call_that_the_kernels_do_not_support_needs_no_check(gpu):
    x = X.double()
    assert check(lambda: linear_attention(x, x, x)) == []
    choice = linear_attention(x, x, x).impl
    assert (choice.impl, gpu.checks) == ("torch", [])
    assert "triton cannot: an input is float64" in choice.reason


def test_torch_compile_reads_a_verdict_while_it_traces(gpu):
    reasons = []

    def call(x):
        output = linear_attention(x, x, x)
        reasons.append(output.impl)
        return output.out

    def compiled():
        torch._dynamo.reset()
        return torch.compile(call, backend="eager", fullgraph=False)(X)

    with pytest.warns(UserWarning, match="not checked on NVIDIA Test yet"):
        compiled()
    assert (reasons[-1].impl, gpu.checks) == ("torch", [])
    check()
    gpu.new_process()
    compiled()
    assert reasons[-1].impl == "triton"


@pytest.mark.parametrize(("value", "impl"), [(PASSED, "triton"), (FAILED, "torch")])
def test_the_environment_variable_replaces_the_verdict(gpu, value, impl, monkeypatch):
    monkeypatch.setenv(triton_verdicts.VARIABLE, value)
    assert (attend().impl, check()) == (impl, [])
    assert f"{triton_verdicts.VARIABLE}={value}" in attend().reason
    monkeypatch.setenv(triton_verdicts.VARIABLE, "yes")
    with pytest.raises(ConfigError, match=r"is 'yes'; set it to passed .* to failed .* not at all"):
        attend()


def test_the_identity_has_the_versions_of_kernels_and_compilers(monkeypatch):
    found = triton_verdicts.device_identity(torch.device("cpu"))
    assert {"attnzoo", "kernels", "torch", "triton"} < set(found)
    properties = SimpleNamespace(name="NVIDIA Test", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(kernel_groups, "driver_version", lambda: "580.1")
    triton_verdicts._identity.cache_clear()
    found = triton_verdicts._identity(torch.device("cuda", 0), "ptxas")
    assert found["ptxas"].count(".") == 2
    assert (found["device"], found["capability"]) == ("NVIDIA Test", "9.0")
    triton_verdicts._identity.cache_clear()


# -- the check itself -----------------------------------------------------------------


def test_the_check_passes_in_a_separate_process(monkeypatch):
    monkeypatch.setattr(triton_verdicts, "KINDS", {"linear": ("bare",)})
    assert triton_verdicts.run_check(DEVICE, "none", 64, "linear")[:2] == (PASSED, "")


KINDS = [(decay, kind) for decay in ("none", "scalar", "vector") for kind in check_triton.KINDS]
QUICK = {("none", "mapped")}


def test_the_check_runs_all_kinds_of_calls():
    found = {"linear": check_triton.KINDS, "block_sparse": check_sparse.KINDS}
    assert found == triton_verdicts.KINDS


@pytest.mark.parametrize(
    ("decay", "kind"),
    [pytest.param(*x, marks=() if x in QUICK else pytest.mark.exhaustive) for x in KINDS],
)
def test_the_kernels_pass_their_check(decay, kind):
    for case in check_triton.cases(decay, 64, kind, small=DEVICE.type != "cuda"):
        assert list(wrong_results(case, DEVICE)) == []


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
    call = partial(linear_attention, X, X, X, log_decay=GATES)
    check(call)
    with pytest.warns(UserWarning, match=f"{broken} differs from float64 by"):
        assert call().impl.impl == "torch"


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
    run = check_triton.run_step_triton
    broken = lambda step: run(step._replace(x=step.x._replace(k=step.x.k * 3)))  # noqa: E731
    monkeypatch.setattr(check_triton, "run_step_triton", broken)
    wrong = {text.partition(" differs")[0] for text in wrong_results(case, DEVICE)}
    assert wrong == {f"{result} of {name}" for result in ("out", "kv", "z")}


def _wrong_step(q, k, v, log_decay, kv, z, *options):
    return v.repeat(1, q.shape[1] // v.shape[1], 1, 1) * 0, kv + 1, z + 1


def test_a_program_without_an_interpreter_cannot_check(monkeypatch):
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert triton_verdicts.run_check(DEVICE, "none", 64).outcome == NOT_RUN
