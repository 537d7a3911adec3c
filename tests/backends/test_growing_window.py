"""The state of a wide window grows with the tokens that came; results are those of a full one."""

from itertools import pairwise

import pytest
import torch
from torch.testing import assert_close

import attnzoo
from attnzoo.contract import states
from attnzoo.errors import UnsupportedError
from attnzoo.hf.seam import output_cache
from attnzoo.testing import check_backend
from tests.helpers import build, hidden_states, qkv, tiny_llama

CASES = [
    ("linear", {"window": 21, "num_sinks": 3}),
    ("gated_linear", {"window": 37, "gate": "gla"}),
    ("performer", {"window": 37, "num_features": 8}),
    ("delta", {"window": 21, "num_sinks": 3, "short_convolution": 4}),
    ("longformer", {"window": [19, 7, 7, 3], "dilation": [1, 3, 1, 5], "num_global": 2}),
]
RULES = ["decoding", "batching", "padding", "packing"]


@pytest.fixture
def growing(monkeypatch):
    """States have their full size up to 4 keys."""
    monkeypatch.setattr(states, "FULL_STATE", 4)


def outputs(backend, cuts, x, hidden):
    """Return the outputs of a row in pieces, and the keys of the state after each."""
    found, state, sizes = [], None, []
    for begin, end in pairwise(cuts):
        piece = [y[:, :, begin:end] for y in x]
        given = {"hidden_states": hidden[:, begin:end], "state": state, "return_state": True}
        output = backend(*piece, **given)
        state = output.state
        found.append(output.out)
        sizes.append(state.k.shape[2])
    return torch.cat(found, 2), sizes


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_pieces_equal_those_with_a_full_state(name, options, monkeypatch):
    backend = build(name, noise=0.3, **options).double().eval()
    x = qkv(45, batch=2)
    hidden = hidden_states(45, batch=2)
    cuts = [0, 1, 3, *range(6, 12), 30, *range(31, 46)]
    expected, full = outputs(backend, cuts, x, hidden)
    monkeypatch.setattr(states, "FULL_STATE", 4)
    found, sizes = outputs(backend, cuts, x, hidden)
    assert_close(found, expected, atol=1e-12, rtol=1e-12)
    kept = options.get("num_sinks", 0)
    assert sizes[0] == 4 + kept < full[0]
    assert sizes[:3] == sorted(sizes[:3])
    assert sizes[-1] == full[-1]


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_it_conforms(name, options, growing):
    backend = type(build(name, **options))
    config = backend.config_class.from_options(name, options)
    report = check_backend(backend, config=config, rules=RULES, dtypes=[torch.float64])
    assert report.passed


def test_nine_tokens_take_the_memory_of_few(growing):
    model = attnzoo.swap(tiny_llama(), "longformer", window=2**10, dilation=2**10)
    ids = torch.arange(9)[None]
    layer = output_cache(model(ids, use_cache=True)).layers[0]
    assert layer.state.k.shape[2] == 16


def test_a_compiled_step_does_not_grow(growing, monkeypatch):
    backend = build("linear", window=21).eval()
    state = backend(*qkv(3), return_state=True).state
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(UnsupportedError, match="grows with the tokens beyond 4"):
        backend(*qkv(1), state=state, return_state=True)
