"""Memory of a GPU whose activations are in CPU memory; a CPU stands in for the GPU."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from attnzoo import AttentionSpec
from attnzoo.errors import ConfigError
from attnzoo.evaluation.memory import build_model, compute, measure
from attnzoo.evaluation.memory_case import MemoryCase
from attnzoo.evaluation.memory_tables import memory_table
from attnzoo.evaluation.timing import profile_allocations
from attnzoo.report.format import format_bytes
from attnzoo.runtime.activation_offload import offload_activations

pytestmark = pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable.:FutureWarning")
LAYERS = 2
SIZES = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": LAYERS}
RANDOM_STATE = 5056  # bytes that a checkpoint of a layer keeps on the CPU


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = LlamaConfig(
        **SIZES, vocab_size=200, num_attention_heads=2, architectures=["LlamaForCausalLM"]
    )
    config.save_pretrained(path := tmp_path_factory.mktemp("config"))
    return str(path)


def measured(case, *, checkpointing):
    """Return the peak of forward + backward, what is kept between, and the bytes of copies.

    Copies are in memory of NumPy, which torch's profiler does not see.
    """
    torch.manual_seed(0)
    model = build_model(case).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    tokens = torch.randint(100, (case.rows, case.length))
    copied = []

    def allocate(x):
        memory = torch.from_numpy(np.empty(x.nbytes, np.uint8)).view(x.dtype)
        copied.append(x.nbytes)
        return memory

    def forward():
        copied.clear()
        with offload_activations(model, torch.device("cpu"), allocate=allocate):
            return model(input_ids=tokens, labels=tokens, use_cache=False).loss

    def step():
        forward().backward()

    step()
    model.zero_grad()
    peak, _ = profile_allocations(step)
    model.zero_grad()
    _, kept = profile_allocations(forward)
    return peak, kept, sum(copied)


@pytest.mark.parametrize("attention", [None, "gated_linear"])
def test_the_gpu_has_the_activations_of_the_layer_that_runs(folder, attention):
    spec = None if attention is None else AttentionSpec(attention, window=16).to_dict()
    case = MemoryCase(path=folder, spec=spec, length=512, activation_offloading=True)
    use = compute(case)[0]
    for checkpointing in (False, True):
        end = "_checkpointed" if checkpointing else ""
        peak, kept, copied = measured(case, checkpointing=checkpointing)
        kept -= RANDOM_STATE * LAYERS * checkpointing
        assert getattr(use, f"backward{end}") == pytest.approx(peak, rel=0.02)
        assert getattr(use, f"activations{end}") == pytest.approx(kept, rel=0.01)
        assert getattr(use, f"offloaded{end}") == copied


def test_copies_are_in_the_memory_of_the_cpu(folder):
    options = {"path": folder, "length": 1024}
    both, gpu = (compute(MemoryCase(**options, activation_offloading=x))[0] for x in (True, False))
    assert gpu.offloaded == gpu.offloaded_checkpointed == 0
    assert both.activations < 0.2 * gpu.activations
    assert both.activations + both.offloaded == pytest.approx(gpu.activations, rel=0.01)
    assert both.training < gpu.training
    rows = [{"attention": "flash", "computed": use.to_dict()} for use in (both, gpu)]
    table = memory_table(rows)
    assert table.columns[-2:] == ["on the CPU", "checkpointed"]
    assert format_bytes(both.offloaded) == table.rows[0][-2] != table.rows[1][-2]
    assert "on the CPU" not in memory_table(rows[1:]).columns


def test_on_a_cpu_it_is_not_measured(folder):
    with pytest.raises(ConfigError, match="are already; leave it out, or compute"):
        measure(MemoryCase(path=folder, length=64, activation_offloading=True))
