"""The variants of benchmarks/mamba2_start.py change what their names say, and nothing else."""

import copy

import pytest
import torch
import torch.nn.functional as F

from attnzoo.hf import seam
from attnzoo.hf.stock.layer_inputs import measure_layers
from benchmarks import mamba2_start as module
from tests.hf.stock.test_convert import TOKENS, model_of
from tests.hf.stock.test_recurrent import state_space

pytestmark = pytest.mark.skipif(
    not seam.granite_normalizes_groups(), reason="convert refuses this transformers"
)
X, B, C = (slice(n * 64, n * 64 + 64) for n in (1, 2, 3))  # rows of in_proj


@pytest.fixture(scope="module")
def model():
    return model_of("llama")


@pytest.fixture(scope="module")
def layer(model):
    return module.starting_layer(model, 1)


@torch.no_grad()
def changed(layer, change):
    """Return the weights before and after, by name, of those that a variant changes."""
    before, after = layer.state_dict(), change(copy.deepcopy(layer)).state_dict()
    return {k: (x.clone(), after[k]) for k, x in before.items() if not torch.equal(x, after[k])}


def test_the_error_is_relative_and_squared(model, layer):
    measured = measure_layers(model, [1], TOKENS)[1]
    out = state_space(layer, measured.hidden.view(2, 24, 32))
    expected = F.mse_loss(out, measured.out.double()) / measured.out.double().square().mean()
    assert module.error(layer, measured) == pytest.approx(float(expected), rel=1e-4)


def test_variants_of_values_and_decays(layer):
    assert not changed(layer, module.VARIANTS["both signs, size 1: what `convert` writes"])
    small = changed(layer, module.small_values)
    (before, after) = small.pop("in_proj.weight")
    assert not small
    before[X] *= 0.3
    torch.testing.assert_close(after, before)
    slow = changed(layer, module.slow)
    (_, decays) = slow.pop("A_log")
    assert not slow
    torch.testing.assert_close(decays[[0, -1]].exp(), torch.tensor([1 / 512, 1 / 4]))


def test_a_variant_has_the_same_sign_in_both_heads(layer):
    found = changed(layer, module.one_sign)
    (before, after), (out, same) = found.pop("in_proj.weight"), found.pop("out_proj.weight")
    assert not found
    for old, new, size in ((before[X], after[X], 0.3), (out.T, same.T, 1)):
        first, second = new.unflatten(0, (4, 2, 8)).unbind(1)
        assert torch.equal(first, second)
        torch.testing.assert_close(first, size * old.unflatten(0, (4, 2, 8))[:, 0])
    before[X] = after[X]
    assert torch.equal(before, after)


def test_heads_of_a_pair_share_one_state(model, layer):
    """By hand: the terms of both heads add up to the output of each, before the gate."""
    shared = module.shared_states(copy.deepcopy(layer))
    hidden = measure_layers(model, [1], TOKENS)[1].hidden.view(2, 24, 32)
    found = []
    for one in (layer, shared):
        w = {name: x.double() for name, x in one.state_dict().items()}
        projected = hidden.double() @ w["in_proj.weight"].T
        scale = 1 if one is shared else 0.7
        x = F.silu(projected[..., X]).unflatten(2, (8, 8))
        b, c = (F.silu(scale * projected[..., part]).unflatten(2, (8, 8)) for part in (B, C))
        products = torch.einsum("bihn,bjhn->bijh", c, b)
        if one is layer:  # both heads of a pair attend with the sum of their products
            products = products.unflatten(3, (4, 2)).sum(4).repeat_interleave(2, 3)
        else:
            pairs = [t.reshape(2, 24, 4, 16) for t in (c, b)]
            products = torch.einsum("bihn,bjhn->bijh", *pairs).repeat_interleave(2, 3)
        found.append((products, x))
    for first, second in zip(*found, strict=True):
        torch.testing.assert_close(first, second)
    assert shared.n_groups == 4
    assert shared.ssm_state_size == 16
    rates = shared.A_log.exp() * F.softplus(shared.dt_bias)
    assert torch.equal(rates[::2], rates[1::2])
    torch.testing.assert_close(rates[[0, -1]], torch.tensor([1 / 512, 1 / 2]))
    with torch.no_grad():
        out = shared(hidden)
    exact = state_space(shared, hidden)
    assert (out - exact).abs().max() < 5e-5 * exact.abs().max()
