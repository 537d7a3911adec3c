"""A plan under a budget of bytes: what is chosen fits, counted in a real cache."""

import pytest
import torch
from transformers import DynamicCache

import attnzoo
from attnzoo.demo.measure import cache_bytes
from attnzoo.errors import ConfigError
from attnzoo.training.budget import CacheBudget, layer_sizes, read_size
from attnzoo.training.plan import Planner

ROWS = torch.randint(3, 300, (2, 40), generator=torch.Generator().manual_seed(2))

CANDIDATES = {
    "near": attnzoo.AttentionSpec("longformer", window=16),
    "linear": attnzoo.AttentionSpec("linear"),
    "lsh": attnzoo.AttentionSpec("reformer", chunk_size=8),
}


def kept(model, spec, length):
    """Return the bytes that a swapped model keeps after so many tokens."""
    attnzoo.swap(model, spec)
    cache = DynamicCache(config=model.config)
    tokens = ROWS.flatten().repeat(length)[:length][None]
    model(tokens, past_key_values=cache, use_cache=True)
    attnzoo.restore(model)
    return cache_bytes(cache)


@pytest.fixture
def planner(model):
    return Planner(model, ROWS, CANDIDATES, window=5)


@pytest.mark.parametrize("length", [300, 3000])
def test_sizes_are_those_of_a_cache(planner, model, length):
    for name in CANDIDATES:
        sizes = layer_sizes(planner, name, length)
        spec = planner.spec_of(dict.fromkeys((0, 1), name))
        assert sum(sizes.values()) == kept(model, spec, length)
    assert sum(layer_sizes(planner, "flash", length).values()) == kept(model, "flash", length)


def test_what_is_chosen_fits(planner, model):
    measures = planner.measure()
    exact = kept(model, "flash", 600)
    for share in (0.05, 0.3, 0.52, 1.0):
        budget = CacheBudget(bytes=int(share * exact), length=600)
        chosen = budget.choose(planner, measures)
        assert kept(model, planner.spec_of(chosen), 600) <= budget.bytes
        assert len(chosen) == {0.05: 2, 0.3: 2, 0.52: 1, 1.0: 0}[share]
    with pytest.raises(ConfigError, match=r"smallest candidates keep .* more than the 10 of"):
        CacheBudget(bytes=10, length=600).choose(planner, measures)


def test_sizes_are_read():
    given = ("10", "64KiB", "1.5 MiB", "16k", "2GiB")
    assert [read_size(x, "--x") for x in given] == [10, 2**16, 3 * 2**19, 2**14, 2**31]
    for wrong in ("", "MiB", "-1", "0", "3 apples", "1e3"):
        with pytest.raises(ConfigError, match="--cache-bytes is a size such as 1MiB"):
            read_size(wrong, "--cache-bytes")
