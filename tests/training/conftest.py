import importlib.util
import sys

import pytest
import torch
import transformers as hf

import attnzoo
from attnzoo.cli import main
from attnzoo.evaluation.models import embedded_model_path
from tests.training.short_runs import shorten_runs


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
        max_position_embeddings=128,  # fewer than the contexts at which commands time decoding
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    return hf.LlamaForCausalLM(config).eval()


@pytest.fixture
def model():
    """A tiny model with attention that is far from uniform."""
    model = tiny_llama()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    return model


@pytest.fixture(autouse=True, scope="module")
def _short_runs():
    with pytest.MonkeyPatch.context() as patch:
        shorten_runs(patch.setattr)
        yield


@pytest.fixture
def attnzoo_command(monkeypatch):
    """A function that runs a command, which must succeed, in this process."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["attnzoo", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        assert not stop.value.code

    return run


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """The folder of a tiny model with the embedded model's tokenizer; tests only read it."""
    path = tmp_path_factory.mktemp("model")
    tiny_llama().save_pretrained(path)
    hf.AutoTokenizer.from_pretrained(embedded_model_path()).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A folder of three files of words; tests only read it."""
    folder = tmp_path_factory.mktemp("text")
    generator = torch.Generator().manual_seed(0)
    words = ["alpha ", "beta ", "gamma ", "delta\n"]
    for name in "abc":
        picks = torch.randint(4, (150,), generator=generator).tolist()
        (folder / f"{name}.txt").write_text("".join(words[i] for i in picks))
    return folder


@pytest.fixture(scope="session")
def spec():
    return attnzoo.AttentionSpec("gated_linear", feature_map="hedgehog", window=4)


@pytest.fixture(scope="session")
def saved_in_blocks(tmp_path_factory):
    """The folder of a model whose layers have rows of whole blocks of 64 weights.

    Those of published models have. bitsandbytes 0.50 computes others wrongly on CPUs with AVX-512
    for bfloat16.
    """
    config = tiny_llama().config
    config.hidden_size, config.intermediate_size, config.head_dim = 64, 128, 16
    torch.manual_seed(0)
    hf.LlamaForCausalLM(config).save_pretrained(path := tmp_path_factory.mktemp("blocks"))
    hf.AutoTokenizer.from_pretrained(embedded_model_path()).save_pretrained(path)
    return path


@pytest.fixture
def portable_4_bits(monkeypatch):
    """bitsandbytes has its layers as on GPUs, on every CPU.

    On CPUs with AVX-512 for bfloat16 it packs weights in another order when a layer first runs
    without gradients, and rounds their scales to bfloat16.
    """
    if importlib.util.find_spec("bitsandbytes") is not None:
        from bitsandbytes.nn import modules

        monkeypatch.setattr(modules, "has_avx512bf16", lambda: False)
