"""Gates under torch.compile in training: gradients are those of eager calls."""

import pytest
import torch

from tests.helpers import build, hidden_states, qkv

CASES = [
    ("gated_linear", {"gate": "mamba2", "window": 4}),
    ("gated_linear", {"gate": "hgrn2"}),
    ("gated_linear", {"gate": "rwkv6"}),
    ("gated_linear", {"gate": "mlstm"}),
    ("delta", {"gate": "vector", "window": 4, "short_convolution": 4, "output_gate": True}),
]


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_gradients_equal_those_of_eager_calls(name, options):
    torch._dynamo.reset()
    backend = build(name, torch.float32, noise=0.1, **options)
    inputs = [x.requires_grad_() for x in qkv(20, dtype=torch.float32)]
    if backend.capabilities.needs_hidden_states:
        inputs.append(hidden_states(20, dtype=torch.float32).requires_grad_())

    def attend(q, k, v, hidden_states=None):
        return backend(q, k, v, hidden_states=hidden_states).out

    found = []
    for run in (attend, torch.compile(attend, backend="aot_eager", fullgraph=True)):
        out = run(*inputs)
        leaves = [*inputs, *backend.parameters()]
        options = {"allow_unused": True, "materialize_grads": True}
        found.append(torch.autograd.grad(out.square().sum(), leaves, **options))
    torch.testing.assert_close(found[1], found[0])
