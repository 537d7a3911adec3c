"""A command that runs a model on a GPU first checks the kernels that have no verdict."""

import warnings
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import attnzoo
from attnzoo.compare.cases import CostCase, prepare
from attnzoo.compare.run import _gpu_cases, read_model_info
from attnzoo.compare.workers import check_case_kernels
from attnzoo.errors import UnsupportedError
from attnzoo.evaluation import kernel_checks
from attnzoo.evaluation.kernel_checks import check_model_kernels
from attnzoo.ops.linear.triton import verdicts as triton_verdicts
from attnzoo.runtime import kernel_groups
from attnzoo.runtime.cache_folder import CACHE
from attnzoo.runtime.verdicts import FAILED, Verdict
from tests.helpers import change_implementation
from tests.kernel_device import kernel_device

DEVICE = kernel_device()
KERNELS = "the Triton kernels of linear attention (decay none, sizes up to 64) on a GPU"


@pytest.fixture
def checked(monkeypatch, tmp_path):
    """This device is a GPU without verdicts, whose checks fail; the value has those that ran."""
    checks = []

    def run_check(device, decay, size, op):
        checks.append((op, decay, size))
        return Verdict(FAILED, "dv differs")

    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    monkeypatch.delenv(triton_verdicts.VARIABLE, raising=False)
    monkeypatch.setattr(kernel_groups, "_STATE", kernel_groups._State())
    monkeypatch.setattr(triton_verdicts, "device_identity", lambda device: {"device": "a GPU"})
    monkeypatch.setattr(triton_verdicts, "run_check", run_check)
    monkeypatch.setattr(kernel_checks, "ON_GPU", (DEVICE.type,))
    assert attnzoo.ops.linear_attention  # which registers its implementations
    assert attnzoo.ops.mlstm_attention
    for op in ("linear_attention", "linear_step", "gated_step"):
        change_implementation(monkeypatch, op, "triton", devices=(DEVICE.type,))
        change_implementation(monkeypatch, op, "cpp", automatic="")
    return checks


def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=384,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config).to(DEVICE)


INPUTS = {"input_ids": torch.ones(1, 40, dtype=torch.int64)}


@pytest.mark.parametrize("generate", [False, True])
def test_a_model_is_checked_for_prompts_and_for_generation(checked, generate):
    model, messages = attnzoo.swap(llama(), "gated_linear", gate="mlstm").train(), []
    state = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="impl='auto'")
        checks = check_model_kernels(model, INPUTS, messages.append, generate=generate)
    assert checked == [("linear", "scalar", 64)]
    assert len(messages) == 2 * len(checks) == 2 * len(checked)
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert check_model_kernels(model, INPUTS, messages.append, generate=generate)[0].stored
    assert len(messages) == 2 * len(checked)


def test_a_model_on_a_cpu_is_not_run(checked, monkeypatch):
    monkeypatch.setattr(kernel_checks, "ON_GPU", ())
    assert check_model_kernels(attnzoo.swap(llama(), "linear"), INPUTS, print) == []
    assert checked == []


def gpu_cases(levels, lengths, *names):
    specs = [attnzoo.AttentionSpec(name) for name in names]
    return [
        CostCase.of(spec, length, level=level, device="cuda")
        for level in levels
        for length in lengths
        for spec in specs
    ]


def test_compare_checks_the_shortest_case_of_the_whole_model():
    cases = gpu_cases(["op", "model"], [64, 16, 32], "flash", "linear")
    found = _gpu_cases(cases)
    assert sorted((x.attention, x.level, x.T) for x in found) == [
        ("flash", "model", 16),
        ("linear", "model", 16),
    ]


def test_cases_that_fail_do_not_stop_the_checks(checked, tmp_path):
    llama().save_pretrained(tmp_path)
    info = read_model_info(tmp_path)
    first, second = gpu_cases(["op", "model"], [16], "linear")
    refused = {"spec": first.spec | {"options": {"impl": "triton"}}, "dtype": "float64"}
    cases = [replace(x, device=DEVICE.type) for x in (replace(first, **refused), first, second)]
    with pytest.raises(UnsupportedError, match="float64"):
        prepare(cases[0], info)()
    lines = check_case_kernels(cases, info)["checks"]
    assert lines == [f"{KERNELS}: failed: dv differs (0 s)"]
    assert checked == [("linear", "none", 64)]
    assert check_case_kernels(cases, info) == {"checks": []}
