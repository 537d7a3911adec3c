"""Features and hashes that are drawn again in training, under gradient checkpointing."""

import pytest
import torch

import attnzoo
from tests.helpers import tiny_llama

SPECS = {
    "performer": {"num_features": 16, "redraw": 1},
    "performer, window": {"num_features": 16, "redraw": 3, "window": 4},
    "performer, relu": {"num_features": 16, "redraw": 1, "kernel": "relu"},
    "reformer": {"num_hashes": 1, "chunk_size": 4, "window": 2, "first_tokens": 1, "redraw": 1},
}


def gradients(spec, reentrant):
    """Return gradients of a loss that compares two forward passes, as preference losses do."""
    model = tiny_llama()
    name = spec.split(",")[0]
    attnzoo.swap(model, attnzoo.AttentionSpec(name, **SPECS[spec]))
    model.train()
    if reentrant is not None:
        options = {"use_reentrant": reentrant}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        model.enable_input_require_grads()
    generator = torch.Generator().manual_seed(0)
    chosen, rejected = torch.randint(1, 99, (2, 2, 30), generator=generator)
    for _ in range(2):
        first, second = (model(ids, use_cache=False).logits for ids in (chosen, rejected))
        (first.logsumexp(-1).mean() - second.logsumexp(-1).square().mean()).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("spec", SPECS)
def test_two_forward_passes_before_one_backward_pass(spec, reentrant):
    expected, found = gradients(spec, None), gradients(spec, reentrant)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, msg=name)
