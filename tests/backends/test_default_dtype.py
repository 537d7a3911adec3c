"""The default dtype of torch changes no output and no start value."""

import pytest
import torch

from attnzoo.contract.config import Geometry
from attnzoo.contract.masks import AttentionMask
from attnzoo.registry import build_backend

LENGTH, SIZE, HIDDEN = 40, 8, 16
HASHED = {"num_hashes": 2, "chunk_size": 2, "window": 3}
CASES = [
    ("softmax", {}),
    ("flash", {"window": 4}),
    ("longformer", {"window": 3, "num_global": 2, "dilation": 2}),
    ("linformer", {"block": 4, "num_rows": 2}),
    ("linformer", {"block": 4, "num_rows": 2, "pooling": False}),
    *(("reformer", {**HASHED, "impl": impl}) for impl in ("auto", "torch", "reference")),
    *(
        ("reformer", {"form": "shared_qk", "chunk_size": 4, "impl": impl})
        for impl in ("torch", "reference")
    ),
    *(
        ("block_sparse", {"window": 3, "top_k": 2, "block_size": 4, "impl": impl})
        for impl in ("auto", "torch", "reference")
    ),
    ("performer", {}),
    ("performer", {"window": 4}),
    ("linear", {"feature_map": "random"}),
    ("linear", {"feature_map": "hedgehog", "window": 4}),
    ("linear", {"feature_map": "cosine"}),
    ("gated_linear", {"gate": "gla", "window": 4}),
    ("gated_linear", {"gate": "mamba2"}),
    ("gated_linear", {"gate": "mlstm"}),
    ("gated_linear", {"gate": "rwkv6"}),
    ("delta", {"gate": "vector", "window": 4, "short_convolution": 3, "output_gate": True}),
]


@pytest.fixture(autouse=True)
def restored():
    """Restore the default dtype."""
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)


def build_in_default_dtype(name, options, causal):
    torch.manual_seed(0)
    geometry = Geometry(
        num_heads=4,
        num_key_heads=2,
        head_dim=SIZE,
        hidden_size=HIDDEN,
        causal=causal,
        max_length=64,
    )
    return build_backend(name, options, geometry).eval()


def outputs(backend, causal):
    generator = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(2, heads, LENGTH, SIZE, dtype=torch.float32, generator=generator)
        for heads in (4, 2, 2)
    )
    hidden = torch.randn(2, LENGTH, HIDDEN, dtype=torch.float32, generator=generator)
    padding = torch.arange(LENGTH).expand(2, -1) >= torch.tensor([[0], [7]])
    masks = (AttentionMask(causal=causal), AttentionMask(causal=causal, padding=padding))
    return [backend(q, k, v, mask=mask, hidden_states=hidden).out for mask in masks]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_the_default_dtype_changes_nothing(name, options, causal):
    if options.get("form") == "shared_qk" and causal:
        pytest.skip("the paper's form is bidirectional")
    if name in ("gated_linear", "delta") and not causal:
        pytest.skip("gates are causal")
    torch.set_default_dtype(torch.float32)
    expected = build_in_default_dtype(name, options, causal)
    found = outputs(expected, causal)
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        torch.set_default_dtype(dtype)
        backend = build_in_default_dtype(name, options, causal)
        state = expected.state_dict()
        for key, x in backend.state_dict().items():  # float64 start values have more digits
            rtol = 1e-6 if x.dtype == torch.float64 else 0
            torch.testing.assert_close(x, state[key].to(x.dtype), rtol=rtol, atol=rtol)
        backend.float().load_state_dict(state)
        for x, y in zip(outputs(backend, causal), found, strict=True):
            assert x.dtype == y.dtype
            assert torch.equal(x, y), dtype
