"""A model that the tests of block_sparse share."""

import pytest
import torch
import transformers as hf


@pytest.fixture
def llama():
    """A tiny Llama whose attention matters."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    model = hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=99, **sizes, **heads)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
    return model
