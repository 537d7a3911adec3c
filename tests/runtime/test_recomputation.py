"""A draw belongs to its call, however gradient checkpointing repeats it."""

import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from attnzoo.errors import UnsupportedError
from attnzoo.runtime import recomputation
from attnzoo.runtime.recomputation import value_of_call


class Counter(nn.Module):
    """Multiplies by the number of the call."""

    calls = 0

    def draw(self):
        self.calls += 1
        return torch.tensor(float(self.calls))

    def forward(self, x):
        return x.sin() * x * value_of_call(self, "layer", self.draw)


class Own(torch.autograd.Function):
    """Checkpointing by another library, such as DeepSpeed."""

    @staticmethod
    def forward(context, run, x):
        context.run, context.state = run, torch.get_rng_state()
        context.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(context, d_out):
        (x,) = context.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad(), torch.random.fork_rng():
            torch.set_rng_state(context.state)
            return None, torch.autograd.grad(context.run(x), x, d_out)[0]


def reentrant(run, x):
    return checkpoint(run, x, use_reentrant=True)


def plain(run, x):
    return checkpoint(run, x, use_reentrant=False)


def without_rng(run, x):
    return checkpoint(run, x, use_reentrant=False, preserve_rng_state=False)


def offloaded(run, x):
    with torch.autograd.graph.save_on_cpu():
        return plain(run, x)


def nested(outer, inner):
    return lambda run, x: outer(lambda x: inner(run, x.cos()) + run(x), x)


WAYS = {
    "reentrant": reentrant,
    "not reentrant": plain,
    "offloaded": offloaded,
    "another library's": lambda run, x: Own.apply(run, x),
    **{
        f"{name} in {other}": nested(outer, inner)
        for other, outer in (("reentrant", reentrant), ("not reentrant", plain))
        for name, inner in (("reentrant", reentrant), ("not reentrant", plain))
    },
}


def gradient(way, layer, orders):
    """Run three forward passes, then backward passes in the given order."""
    x = torch.linspace(0.1, 1, 5, dtype=torch.float64, requires_grad=True)
    losses = [way(layer, x * n).sum() for n in (1, 2, 3)]
    found = []
    for order in orders:
        total = sum(losses[i] for i in order)
        total.backward(retain_graph=True)
        found.append(x.grad)
        x.grad = None
    return found


@pytest.mark.parametrize("orders", [((0, 1, 2),), ((1,), (0,), (2,)), ((0,), (0,), (1, 2))])
@pytest.mark.parametrize("way", WAYS)
def test_several_forward_passes_before_their_backward_passes(way, orders):
    def direct(outer):
        return lambda run, x: run(x)

    stored = nested(*(2 * [direct(None)])) if " in " in way else direct(None)
    one, other = Counter(), Counter()
    expected = gradient(stored, one, orders)
    found = gradient(WAYS[way], other, orders)
    torch.testing.assert_close(found, expected)
    assert one.calls == other.calls


@pytest.mark.parametrize("way", [reentrant, plain])
def test_a_region_that_calls_a_layer_twice(way):
    layers = Counter(), Counter()
    twice = [lambda x, layer=layer: layer(x) + layer(2 * x) for layer in layers]
    orders = ((0,), (0,), (2, 1))
    expected = gradient(lambda run, x: run(x), twice[0], orders)
    torch.testing.assert_close(gradient(way, twice[1], orders), expected)


def test_values_are_freed_with_the_layer_and_those_of_old_calls():
    gc.collect()
    before = len(recomputation._values)
    layer, x = Counter(), torch.ones(3, requires_grad=True)
    out = plain(layer, x)
    for _ in range(recomputation.KEPT):
        layer(x)
    assert len(recomputation._values[layer]) == recomputation.KEPT
    with pytest.raises(UnsupportedError, match="of its 256 latest calls"):
        out.sum().backward()
    del layer, out
    gc.collect()
    assert len(recomputation._values) == before


def test_a_call_in_a_backward_pass_that_repeats_nothing_is_refused():
    layer, x = Counter(), torch.ones(3, requires_grad=True)
    out = layer(x)
    out.register_hook(lambda grad: layer(grad))
    with pytest.raises(UnsupportedError, match=r"layer: .* is unknown.*or set redraw=None"):
        out.sum().backward()
    with pytest.raises(UnsupportedError, match="preserve_rng_state=True"):
        without_rng(layer, x).sum().backward()
