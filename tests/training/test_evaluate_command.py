"""Where `attnzoo evaluate` runs a model."""

import torch

from attnzoo.evaluation.models import embedded_model_path
from attnzoo.training.evaluate_command import _load


def test_a_cuda_build_of_torch_runs_without_a_gpu(monkeypatch):
    """Such a build, the default on Linux, has an accelerator that is not available."""

    def current_accelerator(check_available=False):
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current_accelerator)
    assert _load(embedded_model_path()).device == torch.device("cpu")
