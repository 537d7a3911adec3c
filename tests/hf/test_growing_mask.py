"""A 2-D mask that grows by one column per step, with a static cache under torch.compile."""

import pytest
import torch
from torch._dynamo.utils import counters
from torch.testing import assert_close
from transformers import StaticCache

import attnzoo
from attnzoo.hf.seam import cache_argument
from tests.helpers import tiny_llama

PROMPT, LENGTH = 8, 12


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def decode(model, run, ids, mask):
    """Return the logits of a prompt, which is not compiled, and of single tokens after it."""
    cache = StaticCache(config=model.config, max_cache_len=LENGTH + 2)
    steps = [(0, PROMPT), *((t, t + 1) for t in range(PROMPT, LENGTH))]
    outs = []
    for start, stop in steps:
        seen = mask[:, :stop].clone()
        torch._dynamo.mark_dynamic(seen, 1)  # as it becomes at the second token
        given = {"attention_mask": seen, **cache_argument(cache)}
        outs.append((run if start else model)(ids[:, start:stop], use_cache=True, **given).logits)
    return torch.cat(outs, 1)


@pytest.mark.parametrize(
    ("name", "options"),
    [("linear", {"window": 4}), pytest.param("delta", {}, marks=pytest.mark.exhaustive)],
)
@torch.no_grad()
def test_it_does_not_break_the_graph(name, options):
    model = tiny_llama(num_hidden_layers=1)
    attnzoo.swap(model, name, **options)
    ids = torch.randint(1, 99, (2, LENGTH))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    compiled = torch.compile(model, backend="eager")
    expected = decode(model, model, ids, mask)
    found = decode(model, compiled, ids, mask)
    assert_close(found[mask.bool()], expected[mask.bool()], atol=1e-4, rtol=1e-4)
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 1
