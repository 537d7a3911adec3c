"""torch.compile of layers in training steps."""

import pytest
import torch

from attnzoo.errors import ConfigError
from attnzoo.training import compiled
from attnzoo.training.loop import LoopConfig, read_losses
from attnzoo.training.recover import RecoverConfig, recover

STEPS = 3


def config(**loop):
    return RecoverConfig(
        **{"transfer_steps": STEPS, "distil_steps": STEPS, "row_length": 32, "judged_rows": 2},
        loop=LoopConfig(batch_size=4, **loop),
    )


def test_steps_are_compiled_and_evaluation_is_not(saved, text, spec, tmp_path, monkeypatch):
    calls = []

    def compile_and_count(call):
        traced = torch.compile(call, backend="aot_eager")  # inductor takes a minute

        def run(*args, **kwargs):
            calls.append(torch.is_grad_enabled())
            return traced(*args, **kwargs)

        return run

    recover(saved, spec, [text], tmp_path / "eager", config())
    monkeypatch.setattr(compiled, "compile_layer", compile_and_count)
    recover(saved, spec, [text], out := tmp_path / "compiled", config(torch_compile=True))
    eager, found = ([x["loss"] for x in read_losses(x)] for x in (tmp_path / "eager", out))
    assert found == pytest.approx(eager, rel=1e-5)
    # two layers: of a step of transfer, and of one of distillation with its teacher
    assert len(calls) == 2 * STEPS + 2 * 2 * STEPS
    assert calls.count(True) == 2 * 2 * STEPS


def test_layers_run_as_they_are_out_of_the_context(model):
    layers = compiled.CompiledLayers(model)
    with layers:
        assert all(x._compiled_call_impl is not None for x in model.model.layers)
    assert all(x._compiled_call_impl is None for x in model.model.layers)


def test_layers_of_context_parallelism_are_not_compiled():
    with pytest.raises(ConfigError, match="exchange states between processes"):
        LoopConfig(torch_compile=True, cp_size=2)
