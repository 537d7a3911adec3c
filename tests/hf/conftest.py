"""Small random models with attention that is far from uniform, and padded batches."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import attnzoo
from attnzoo.hf.cache.state_layer import add_states
from tests.helpers import redrawn, tiny_llama, tiny_llama_config

transformers.logging.set_verbosity_error()

RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("linear", {}),
    "gated_linear": ("gated_linear", {"gate": "gla"}),
    "delta": ("delta", {}),
    "window": ("flash", {"window": 4}),
    "longformer": ("longformer", {"window": 4, "num_global": 2}),
    "performer": ("performer", {"num_features": 16}),
    "hybrid": ("linear", {"window": 4}),
    "linformer": ("linformer", {"block": 5, "num_rows": 2}),
}


@pytest.fixture(scope="session")
def redraw() -> Callable[..., Any]:
    return redrawn


@pytest.fixture(scope="session")
def llama() -> Callable[..., Any]:
    """Return a function that makes a Llama with eager attention and fixed weights."""
    return tiny_llama


@pytest.fixture(scope="session")
def llama_config() -> Callable[..., Any]:
    """Return a function that makes the config of :func:`tiny_llama`."""
    return tiny_llama_config


@pytest.fixture(params=RECURRENT)
def model(request: pytest.FixtureRequest, llama: Callable[..., Any]) -> Any:
    """Return a Llama for each kind of recurrent state; modules may define another ``model``."""
    model = llama()
    backend, options = RECURRENT[request.param]
    attnzoo.swap(model, backend, **options)
    return model


@pytest.fixture(params=["dynamic", "static"])
def cache(request: pytest.FixtureRequest, llama_config: Callable[..., Any]) -> Any:
    """Return an empty cache for :func:`llama`."""
    if request.param == "dynamic":
        return transformers.DynamicCache(config=llama_config())
    return transformers.StaticCache(config=llama_config(), max_cache_len=20)


def recording_cache() -> Any:
    """Return an empty cache that records past tokens, as generation prepares it."""
    cache = transformers.DynamicCache()
    add_states(cache)
    cache.activate_past_recording()
    return cache


@pytest.fixture(scope="session")
def ids() -> Tensor:
    """Three rows of twelve tokens, none of them special."""
    return torch.randint(3, 99, (3, 12), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="session")
def padding() -> Callable[..., Tensor]:
    """Return a function that masks all but 12, 7 and 1 tokens, or others, on one side."""

    def make(side: str, lengths: tuple[int, ...] = (12, 7, 1), total: int = 12) -> Tensor:
        steps = torch.arange(total)
        real = torch.tensor(lengths)[:, None]
        if side == "left":
            return (steps >= total - real).long()
        return (steps < (real if side == "right" else total)).long().expand(len(lengths), -1)

    return make


@pytest.fixture(scope="session")
def positions() -> Callable[[Tensor], Tensor]:
    """Return a function from padding to positions, as generation counts them."""
    return lambda mask: (mask.cumsum(1) - 1).clamp(min=0)
