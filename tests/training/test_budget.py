"""Plans with a limit on the cache: the choice fits in it, by the size of an actual cache."""

import pytest
import torch
from transformers import DynamicCache

import attnzoo
from attnzoo.errors import ConfigError
from attnzoo.evaluation.decoding import cache_bytes
from attnzoo.evaluation.rows import Rows
from attnzoo.hf.seam import cache_argument
from attnzoo.training.budget import CacheBudget, layer_sizes, parse_size
from attnzoo.training.plan import Planner

TOKENS = torch.randint(3, 300, (2, 40), generator=torch.Generator().manual_seed(2))

CANDIDATES = {
    "near": attnzoo.AttentionSpec("longformer", window=16),
    "linear": attnzoo.AttentionSpec("linear"),
    "lsh": attnzoo.AttentionSpec("reformer", chunk_size=8),
}


def actual_bytes(model, spec, length):
    """Return the bytes of a swapped model's cache after a number of tokens."""
    attnzoo.swap(model, spec)
    cache = DynamicCache(config=model.config)
    tokens = TOKENS.flatten().repeat(length)[:length][None]
    model(tokens, **cache_argument(cache), use_cache=True)
    attnzoo.restore(model)
    return cache_bytes(cache)


@pytest.fixture
def planner(model):
    return Planner(model, Rows.of_documents(TOKENS), CANDIDATES, window=5)


@pytest.mark.parametrize("length", [300, 3000])
def test_layer_sizes_equal_those_of_a_cache(planner, model, length):
    for name in CANDIDATES:
        sizes = layer_sizes(planner, name, length)
        spec = planner.make_spec(dict.fromkeys((0, 1), name))
        assert sum(sizes.values()) == actual_bytes(model, spec, length)
    assert sum(layer_sizes(planner, "flash", length).values()) == actual_bytes(
        model, "flash", length
    )


def test_choice_fits_in_the_limit(planner, model):
    measures = planner.measure()
    exact = actual_bytes(model, "flash", 600)
    for share in (0.05, 0.3, 0.52, 1.0):
        budget = CacheBudget(bytes=int(share * exact), length=600)
        chosen = budget.choose(planner, measures)
        assert actual_bytes(model, planner.make_spec(chosen), 600) <= budget.bytes
        assert len(chosen) == {0.05: 2, 0.3: 2, 0.52: 1, 1.0: 0}[share]
    with pytest.raises(ConfigError, match=r"smallest candidates use .* more than the limit of 10"):
        CacheBudget(bytes=10, length=600).choose(planner, measures)


def test_parse_size():
    given = ("10", "64KiB", "1.5 MiB", "16k", "2GiB")
    assert [parse_size(x, "--x") for x in given] == [10, 2**16, 3 * 2**19, 2**14, 2**31]
    for wrong in ("", "MiB", "-1", "0", "3 apples", "1e3"):
        with pytest.raises(ConfigError, match="--cache-bytes must be a size such as 1MiB"):
            parse_size(wrong, "--cache-bytes")
