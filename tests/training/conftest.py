import pytest
import torch
import transformers as hf

import attnzoo
from attnzoo.demo.text import embedded_model_path


def tiny_llama():
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=384,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    return hf.LlamaForCausalLM(config).eval()


@pytest.fixture
def model():
    """Return a tiny model whose attention is far from uniform."""
    model = tiny_llama()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    return model


@pytest.fixture
def saved(tmp_path):
    """Return the folder of a tiny model with the embedded model's tokenizer."""
    path = tmp_path / "model"
    tiny_llama().save_pretrained(path)
    hf.AutoTokenizer.from_pretrained(embedded_model_path()).save_pretrained(path)
    return path


@pytest.fixture
def text(tmp_path):
    """Return a folder of three files of words."""
    folder = tmp_path / "text"
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    words = ["alpha ", "beta ", "gamma ", "delta\n"]
    for name in "abc":
        picks = torch.randint(4, (150,), generator=generator).tolist()
        (folder / f"{name}.txt").write_text("".join(words[i] for i in picks))
    return folder


@pytest.fixture
def spec():
    return attnzoo.AttentionSpec("gated_linear", feature_map="hedgehog", window=4)
