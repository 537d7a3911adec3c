"""A swapped Llama on the kernels, interpreted: traced whole, trained, and decoded."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import attnzoo


@pytest.fixture
def models():
    config = LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64,
    )  # fmt: skip
    made = []
    for impl in ("triton", "torch"):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        attnzoo.swap(model, attnzoo.AttentionSpec("gated_linear", gate="gla", impl=impl))
        made.append(model.eval())
    return made


@pytest.fixture
def _any_memory():
    torch.use_deterministic_algorithms(False)  # transformers' embedding has no such gradient here


@pytest.mark.slow
@pytest.mark.usefixtures("_any_memory")
def test_a_swapped_llama_is_traced_whole_and_trains_alike(models):
    ours, plain = models
    tokens = torch.randint(32, (1, 20))
    results = []
    for model in (torch.compile(ours, fullgraph=True, backend="aot_eager"), plain):
        out = model(input_ids=tokens, labels=tokens)
        out.loss.backward()
        results.append(out.logits)
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-6)


@pytest.mark.usefixtures("_any_memory")
def test_a_swapped_llama_decodes_alike_and_says_what_ran(models):
    tokens = torch.randint(32, (1, 9))
    made = [m.generate(tokens, max_new_tokens=4, do_sample=False, pad_token_id=0) for m in models]
    assert torch.equal(*made)
    (row,) = attnzoo.describe(models[0])
    assert row.impl == "triton"
    assert "elu+1 fused" in row.reason
