"""Attention dropout: what it drops, what stays exact, and what is refused when a layer is built."""

import pytest
import torch
from torch.testing import assert_close

from attnzoo.contract.inputs import AttentionInputs, drop_keys
from attnzoo.contract.masks import AttentionMask
from attnzoo.errors import ConfigError, UnsupportedError
from attnzoo.spec import AttentionSpec
from tests import helpers

B, H, HKV, T, D = 2, 4, 2, 11, 8
CASES = {  # backends that drop keys
    "linear": ("linear", {}),
    "linear, unnormalised": ("linear", {"normalize": False}),
    "linear, window": ("linear", {"window": 4}),
    "gated_linear": ("gated_linear", {"gate": "retnet"}),
    "gated_linear, window": ("gated_linear", {"gate": "retnet", "window": 4}),
    "delta, window": ("delta", {"window": 4}),
    "mlstm": ("gated_linear", {"gate": "mlstm"}),
    "performer": ("performer", {"num_features": 16}),
    "reformer": ("reformer", {"num_hashes": 2, "chunk_size": 4}),
    "block_sparse": ("block_sparse", {"window": 2, "top_k": 1, "block_size": 2}),
    "softmax, keys": ("softmax", {"attention_dropout": "keys"}),
    "flash, keys": ("flash", {"attention_dropout": "keys"}),
    "longformer, keys": ("longformer", {"window": 4, "attention_dropout": "keys"}),
    "linformer, keys": ("linformer", {"block": 4, "attention_dropout": "keys"}),
}
WEIGHTS = {
    "softmax": ("softmax", {}),
    "flash": ("flash", {}),
    "longformer": ("longformer", {"window": 4}),
    "linformer": ("linformer", {"block": 4}),
}


def build_layer(name, options, **changes):
    return helpers.build(name, sizes={"value_dim": D, "hidden_size": 16, **changes}, **options)


@pytest.fixture
def x():
    q = torch.randn(B, H, T, D, dtype=torch.float64)
    k, v = torch.randn(2, B, HKV, T, D, dtype=torch.float64)
    return {"q": q, "k": k, "v": v, "hidden_states": torch.randn(B, T, 16, dtype=torch.float64)}


def draw(p, rows=B, tokens=T):
    """The factors of seed 7, by the documented formula."""
    torch.manual_seed(7)
    return (torch.rand(rows, HKV, tokens, 1) >= p).double() / (1 - p)


def masks():
    """Padding on the left, and packed sequences."""
    real = torch.arange(T) >= torch.tensor([[0], [3]])
    ids = (torch.arange(T) >= 4).long().expand(B, -1)
    plain = AttentionMask(causal=True)
    return {
        "plain": plain,
        "padding": AttentionMask(causal=True, padding=real),
        "packing": AttentionMask(causal=True, segment_ids=ids),
    }


@pytest.mark.parametrize("mask", masks())
@pytest.mark.parametrize("case", CASES)
def test_a_dropped_key_has_no_value_and_kept_ones_are_scaled(case, mask, x):
    backend, mask = build_layer(*CASES[case]), masks()[mask]
    expected = backend(**{**x, "v": x["v"] * draw(0.4)}, mask=mask)
    torch.manual_seed(7)
    found = backend(**x, mask=mask, dropout=0.4)
    assert_close(found.out, expected.out, rtol=0, atol=0)
    assert not torch.equal(found.out, backend(**x, mask=mask).out)


@pytest.mark.parametrize("case", [*CASES, *WEIGHTS])
def test_the_expected_output_is_exact(case, x):
    """The mean of many draws is within 5 standard errors; unnormalised, it is the numerator."""
    backend, draws, p = build_layer(*{**CASES, **WEIGHTS}[case]), 400, 0.3
    first = {name: t[:1] for name, t in x.items()}
    plain = backend(**first).out.detach()[0]
    rows = {name: t.expand(draws, *t.shape[1:]) for name, t in first.items()}
    outs = backend(**rows, dropout=p).out.detach()
    error, bound = (outs.mean(0) - plain).abs(), 5 * outs.std(0) / draws**0.5
    assert bound.max() < 0.5 * plain.abs().max()
    assert (error <= bound + 1e-12).all()


@pytest.mark.parametrize("case", [*CASES, *WEIGHTS])
def test_no_dropout_draws_nothing(case, x):
    name, options = {**CASES, **WEIGHTS}[case]
    backend = build_layer(name, options)
    plain = backend(**x).out
    before = torch.get_rng_state()
    assert torch.equal(backend(**x, dropout=0.0).out, plain)
    disabled = build_layer(name, {**options, "attention_dropout": "off"})
    disabled.load_state_dict(backend.state_dict())
    before = torch.get_rng_state()
    assert torch.equal(disabled(**x, dropout=0.5).out, plain)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_state_lacks_dropped_values_and_has_all_keys(x):
    """Dropping a key removes its product from the state, not its normaliser term or its decay."""
    backend = build_layer("gated_linear", {"gate": "retnet"})
    full = backend(**x, return_state=True).state
    kept = backend(**{**x, "v": x["v"] * draw(0.4)}, return_state=True).state
    torch.manual_seed(7)
    found = backend(**x, return_state=True, dropout=0.4).state
    sums = [
        name for name in found._fields if not torch.equal(getattr(found, name), getattr(full, name))
    ]
    assert len(sums) == 1  # the sum of products; the normaliser is that of all keys
    for name in found._fields:
        assert torch.equal(getattr(found, name), getattr(kept, name))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_factors_are_not_rounded_to_the_dtype_of_the_values(dtype):
    """1 / 0.9 in bfloat16 is 0.15% off, in every value."""
    v = torch.full((1, 1, 4096, 1), 0.9, dtype=dtype)
    inputs = AttentionInputs(v, v, v, AttentionMask(), 1.0)
    dropped, factors = drop_keys(inputs, 0.1)
    assert dropped.v.dtype == dtype
    kept = dropped.v[dropped.v != 0]
    assert (kept == (v[0, 0, 0, 0].float() / 0.9).to(dtype)).all()
    assert 0.85 < (factors != 0).float().mean() < 0.95
    everything, _ = drop_keys(inputs, 1.0)
    assert (everything.v == 0).all()


def test_options():
    spec = AttentionSpec.from_dict({"version": 1, "backend": "linear"})  # as saved before
    assert spec.default.config.attention_dropout == "auto"
    with pytest.raises(ConfigError, match=r"attention_dropout must be 'auto' or .* got 'values'"):
        AttentionSpec("linear", attention_dropout="values")
    assert build_layer("linear", {}).dropout_form == "keys"
    assert build_layer("flash", {}).dropout_form == "weights"
    assert build_layer("longformer", {}).dropout_form == "weights"


def test_refused_when_it_is_built():
    for name in ("linear", "gated_linear", "performer", "reformer", "block_sparse"):
        with pytest.raises(UnsupportedError, match="does not compute single weights"):
            build_layer(name, {"attention_dropout": "weights"})
    own = {"window": 4, "num_global": 1, "global_projections": True}
    build_layer("longformer", own, dropout=0.1)
    with pytest.raises(UnsupportedError, match="values of their own"):
        build_layer("longformer", {**own, "attention_dropout": "keys"})
