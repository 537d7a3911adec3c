"""A swapped Llama on the Triton kernels: fullgraph compilation, training and decoding."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import attnzoo
from tests.kernel_device import kernel_device


@pytest.fixture
def models():
    config = LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64,
    )  # fmt: skip
    models = []
    for impl in ("triton", "torch"):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        attnzoo.swap(model, attnzoo.AttentionSpec("gated_linear", gate="gla", impl=impl))
        models.append(model.eval().to(kernel_device()))
    return models


@pytest.mark.slow
@pytest.mark.exhaustive
def test_swapped_llama_compiles_with_fullgraph_and_matches_torch_gradients(models):
    triton, expected = models
    tokens = torch.randint(32, (1, 20), device=kernel_device())
    results = []
    for model in (torch.compile(triton, fullgraph=True, backend="aot_eager"), expected):
        out = model(input_ids=tokens, labels=tokens)
        out.loss.backward()
        results.append(out.logits)
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    for a, b in zip(triton.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-6)


def test_swapped_llama_generates_as_with_torch_and_describe_shows_the_impl(models):
    tokens = torch.randint(32, (1, 9), device=kernel_device())
    outputs = [
        m.generate(tokens, max_new_tokens=4, do_sample=False, pad_token_id=0) for m in models
    ]
    assert torch.equal(*outputs)
    (row,) = attnzoo.describe(models[0])
    assert row.impl == "triton"
    assert row.reason.startswith("one token")
