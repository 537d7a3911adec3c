"""One swapped model in several threads: each thread's requests get their own results."""

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import attnzoo
from tests.helpers import tiny_llama

THREADS = 4
CALLS = 40  # with the arguments of a call kept on the module, 12 to 80 of 100 failed
BACKENDS = {
    "softmax": {},
    "flash, window": {"window": 4},
    "linear, window": {"window": 4},
    "delta": {"window": 4},
    "longformer": {"window": 4, "num_global": 2},
    "linformer": {"block": 5, "num_rows": 2},
    "block_sparse": {"window": 2, "top_k": 1, "block_size": 2},
    "reformer": {"num_hashes": 2, "chunk_size": 2, "window": 2, "decoding": "hashed"},
}


@pytest.fixture(params=BACKENDS)
def model(request) -> Any:
    """A tiny Llama with attention that is far from uniform, under one backend."""
    model = tiny_llama()
    attnzoo.swap(model, request.param.split(",")[0], **BACKENDS[request.param])
    return model


@pytest.fixture
def _switching():
    """Switch threads as often as the interpreter can, to provoke race conditions."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def generate(model: Any, prompt: Tensor) -> list[int]:
    tokens = model.generate(prompt, max_new_tokens=3, do_sample=False)
    return tokens[0, prompt.shape[1] :].tolist()


def outcome(model: Any, prompt: Tensor) -> list[int] | str:
    """Return the new tokens, or the error, so that all calls of a run are counted."""
    try:
        return generate(model, prompt)
    except (ValueError, RuntimeError, AttributeError, TypeError) as error:
        return f"{type(error).__name__}: {error}"


def generate_in_threads(model: Any, calls: int) -> None:
    """Compare every call, token for token, with the same call in a single thread."""
    prompts = [torch.randint(3, 99, (1, 6 + number)) for number in range(8)]
    expected = [generate(model, prompt) for prompt in prompts]
    assert len({tuple(tokens) for tokens in expected}) > 4
    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(lambda n: outcome(model, prompts[n % 8]), range(calls)))
    refused = [tokens for tokens in found if isinstance(tokens, str)]
    right = sum(tokens == expected[n % 8] for n, tokens in enumerate(found))
    silent = calls - right - len(refused)
    assert right == calls, f"{right} right, {silent} wrong, {len(refused)} refused: {refused[:1]}"


@pytest.mark.slow
@pytest.mark.usefixtures("_switching")
def test_generation(model):
    generate_in_threads(model, CALLS)
