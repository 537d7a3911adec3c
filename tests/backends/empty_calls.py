"""Calls every backend and every op that has a C++ kernel on empty inputs; run by test_empty.py.

In a process of its own: what is wrong here may kill the interpreter.
"""

from itertools import product
from typing import Any

import torch

from attnzoo.backends.gates.decays import GATES
from attnzoo.contract.backend import AttentionBackend
from attnzoo.contract.config import Geometry
from attnzoo.contract.masks import AttentionMask
from attnzoo.errors import UnsupportedError
from attnzoo.ops.features.functional import LEARNED
from attnzoo.ops.linear.api import linear_attention
from attnzoo.ops.linear.cpu.linear import cpp_reasons
from attnzoo.ops.lsh.api import lsh_attention, shared_qk_attention
from attnzoo.ops.lsh.cpu.lsh import LSH, PIVOTS
from attnzoo.ops.softmax.api import softmax_attention
from attnzoo.registry import build_backend
from attnzoo.runtime.cpp import unavailable_reason

HEADS, KEY_HEADS, SIZE, VALUE_SIZE = 4, 2, 6, 5
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("softmax", {}),
    ("softmax", {"window": 4}),
    ("flash", {}),
    ("flash", {"window": 4}),
    ("longformer", {"window": 4}),
    ("longformer", {"window": 4, "num_global": 2}),
    ("longformer", {"window": 4, "num_global": 2, "global_projections": True}),
    ("linformer", {}),
    ("linformer", {"block": 8}),
    ("block_sparse", {}),
    ("block_sparse", {"query_block": 4}),
    ("block_sparse", {"impl": "torch"}),
    ("block_sparse", {"impl": "reference"}),
    ("reformer", {}),
    ("reformer", {"impl": "torch"}),
    ("reformer", {"impl": "reference"}),
    ("performer", {}),
    ("performer", {"window": 4}),
    ("linear", {}),
    ("linear", {"window": 4}),
    ("linear", {"impl": "torch"}),
    ("linear", {"impl": "reference"}),
    ("gated_linear", {}),
    ("gated_linear", {"window": 4}),
    *(("gated_linear", {"gate": gate}) for gate in GATES),
    *(("linear", {"feature_map": name}) for name in LEARNED if name != "learned_linear"),
    ("linear", {"feature_map": "learned_linear", "normalize": False}),
    *(("linear", {"feature_map": name, "window": 4}) for name in ("hedgehog", "relu")),
    ("delta", {}),
    ("delta", {"window": 4}),
    ("delta", {"short_convolution": 3}),
)


def tensors(batch: int, length: int) -> list[torch.Tensor]:
    shapes = ((HEADS, SIZE), (KEY_HEADS, SIZE), (KEY_HEADS, VALUE_SIZE))
    return [torch.randn(batch, h, length, d, requires_grad=True) for h, d in shapes]


def masks(batch: int, length: int, causal: bool) -> list[AttentionMask]:
    real = torch.ones(batch, length, dtype=torch.bool)
    ids = torch.zeros(batch, length, dtype=torch.long)
    return [
        AttentionMask(causal=causal),
        AttentionMask(causal=causal, padding=real),
        AttentionMask(causal=causal, segment_ids=ids),
    ]


def check_gradients(out: torch.Tensor, inputs: list[torch.Tensor]) -> None:
    assert out.shape == (*inputs[0].shape[:3], VALUE_SIZE)
    out.sum().backward()
    assert all(x.grad is not None and x.grad.shape == x.shape for x in inputs)


def gradients(backend: AttentionBackend) -> dict[str, torch.Tensor]:
    return {name: x.grad for name, x in backend.named_parameters() if x.grad is not None}


def gradients_of(backend: AttentionBackend, batch: int, length: int, causal: bool) -> list[str]:
    """Return the names of the parameters to which a call with tokens gives a gradient."""
    backend.zero_grad()
    hidden, mask = torch.randn(batch, length, 16), AttentionMask(causal=causal)
    backend(*tensors(batch, length), mask=mask, hidden_states=hidden).out.sum().backward()
    return list(gradients(backend))


def call_backend(name: str, options: dict[str, Any], causal: bool, batch: int, length: int) -> None:
    geometry = Geometry(
        num_heads=HEADS,
        num_key_heads=KEY_HEADS,
        head_dim=SIZE,
        value_dim=VALUE_SIZE,
        hidden_size=16,
        causal=causal,
        max_length=128,
    )
    backend = build_backend(name, options, geometry)
    trained = set(gradients_of(backend, 2, 9, causal))
    if batch == length == 0:
        assert trained == set(gradients_of(backend, 2, 1, causal)), "one token"
    hidden = torch.randn(batch, length, 16)
    for mask in masks(batch, length, causal):
        backend.zero_grad()
        inputs = tensors(batch, length)
        if backend.layer_capabilities().additive_bias:
            inputs.append(torch.randn(batch, HEADS, length, length, requires_grad=True))
        bias = {"bias": inputs[3]} if inputs[3:] else {}
        check_gradients(backend(*inputs[:3], mask=mask, hidden_states=hidden, **bias).out, inputs)
        found = gradients(backend)
        assert set(found) == trained  # data-parallel training waits for those of other ranks
        assert not any(gradient.any() for gradient in found.values())
    no_matrix = options.get("gate") == "matrix", "short_convolution" in options
    if not any(no_matrix) and not options.get("global_projections"):
        call = {"hidden_states": hidden, "return_weights": True}
        weights = backend(*tensors(batch, length), **call).weights
        assert weights is not None
        assert weights.shape == (batch, HEADS, length, length)
    if not (backend.capabilities.recurrent and causal):
        return
    with torch.no_grad():
        call = {"hidden_states": hidden, "return_state": True}
        first = backend(*tensors(batch, length), **call).state
        again = backend(*tensors(batch, length), state=first, **call)
        assert again.out.shape == (batch, HEADS, length, VALUE_SIZE)
        assert type(again.state) is type(first)
        assert all(len(x) == batch for x in again.state)
        if length or not batch:
            return
        assert all(map(torch.equal, again.state, first))  # which is that before any token
        inputs, hidden = tensors(batch, 9), torch.randn(batch, 9, 16)
        after = backend(*inputs, state=first, hidden_states=hidden).out
        torch.testing.assert_close(after, backend(*inputs, hidden_states=hidden).out)


def call_ops(causal: bool, batch: int, length: int) -> None:
    inputs = tensors(batch, length)
    compiled = [] if cpp_reasons(causal=causal) else ["cpp"]
    for impl, decay in product(["torch", "reference", *compiled], [None, -torch.rand(KEY_HEADS)]):
        if causal or (impl != "cpp" and decay is None):
            inputs = tensors(batch, length)
            options = {"impl": impl, "causal": causal, "return_state": True}
            result = linear_attention(*inputs, log_decay=decay, normalize=True, **options)
            assert result.state.kv.shape == (batch, KEY_HEADS, SIZE, VALUE_SIZE)
            assert not result.state.kv.any()
            check_gradients(result.out, inputs)
    compiled = [] if unavailable_reason(LSH) or unavailable_reason(PIVOTS) else ["cpp"]
    mask = AttentionMask(causal=causal)
    for impl in ["torch", "reference", *compiled]:
        inputs = tensors(batch, length)
        check_gradients(lsh_attention(*inputs, mask=mask, impl=impl).out, inputs)
    for impl in ("torch", "reference"):
        inputs = tensors(batch, length)
        check_gradients(shared_qk_attention(*inputs, mask=mask, impl=impl).out, inputs)
    inputs = tensors(batch, length)
    check_gradients(softmax_attention(*inputs).out, inputs)


def main() -> None:
    for (batch, length), causal in product([(0, 20), (2, 0), (0, 0)], [True, False]):
        print(f"ops {batch=} {length=} {causal=}", flush=True)
        call_ops(causal, batch, length)
        for name, options in CASES:
            # the last line names what went wrong
            print(f"{name} {options} {batch=} {length=} {causal=}", flush=True)
            try:
                call_backend(name, options, causal, batch, length)
            except UnsupportedError as error:
                if "cannot serve it" not in str(error):
                    raise
    print("done")


if __name__ == "__main__":
    main()
