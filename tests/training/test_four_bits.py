"""Teachers and adapters on weights in 4 bits; `nox --session bitsandbytes` installs the package."""

import importlib.util

import pytest
import torch
import transformers as hf

import attnzoo
from attnzoo.errors import UnsupportedError
from attnzoo.hf.lora import with_adapters
from attnzoo.training import loading
from attnzoo.training.distil import distil_loss, softmax_teacher
from attnzoo.training.recover import recover
from tests.helpers import tiny_llama as tiny_llama_of
from tests.training.short_runs import arguments

needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None,
    reason="needs bitsandbytes, which `nox --session bitsandbytes` installs",
)
pytestmark = pytest.mark.usefixtures("portable_4_bits")
TOKENS = torch.arange(5, 29).view(2, 12)
BATCH = {"input_ids": TOKENS, "labels": TOKENS}


@pytest.fixture(scope="module")
def saved(saved_in_blocks):
    """The folder of the model that these tests train."""
    return saved_in_blocks


def tiny_llama(**changes):
    """Return a model with rows of whole blocks, as ``saved`` has."""
    return tiny_llama_of(**{"hidden_size": 64, "intermediate_size": 128, **changes})


@needs_bitsandbytes
def test_a_run_on_weights_in_4_bits_adds_what_it_trained_to_the_exact_ones(
    saved, text, spec, tmp_path
):
    args = arguments(tmp_path / "out", load_in_4bit=True, learning_rate=1e-2)
    results = recover(saved, spec, [text], args)
    assert [*results["losses"]] == ["transfer", "distil"]
    before, after = (
        hf.AutoModelForCausalLM.from_pretrained(x).state_dict() for x in (saved, tmp_path / "out")
    )
    assert torch.equal(before["model.norm.weight"], after["model.norm.weight"])
    moved = (before["lm_head.weight"], after["lm_head.weight"])
    assert torch.equal(*moved)
    name = "model.layers.0.self_attn.q_proj.weight"
    change = after[name] - before[name]
    assert change.abs().max() > 0
    assert int((torch.linalg.svdvals(change) > 1e-5).sum()) <= 16  # the rank of the adapters


@needs_bitsandbytes
def test_adapters_on_a_base_in_4_bits_share_it_with_their_teacher(tmp_path):
    """QLoRA in a loop of one's own: the teacher is the base without adapters, and no copy."""
    tiny_llama().save_pretrained(tmp_path)
    settings = hf.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    base = hf.AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=settings, dtype=torch.bfloat16
    )
    exact = base(TOKENS, use_cache=False).logits.detach()
    model = with_adapters(
        attnzoo.swap(base, "linear", feature_map="hedgehog", window=4), 4, "CAUSAL_LM"
    )
    teach = softmax_teacher(model, weights_change=False)
    torch.testing.assert_close(teach(model, BATCH).logits, exact, rtol=0, atol=0)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer, loss, losses = torch.optim.AdamW(trained, lr=1e-2), distil_loss(teach), []
    for _ in range(5):
        losses.append(loss(model, BATCH))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.8 * losses[0]
    torch.testing.assert_close(teach(model, BATCH).logits, exact, rtol=0, atol=0)


def test_without_bitsandbytes_4_bits_are_refused(monkeypatch, saved, text, spec, tmp_path):
    monkeypatch.setattr(loading, "find_spec", lambda name: None)
    args = arguments(tmp_path / "out", load_in_4bit=True)
    with pytest.raises(UnsupportedError, match="pip install bitsandbytes"):
        recover(saved, spec, [text], args)
    assert not (tmp_path / "out").exists()


def test_models_without_linear_layers_are_refused(monkeypatch):
    monkeypatch.setattr(loading, "find_spec", lambda name: name)
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 4, "vocab_size": 99}
    model = hf.GPT2LMHeadModel(hf.GPT2Config(**sizes))
    with pytest.raises(UnsupportedError, match="GPT2LMHeadModel has no linear layers"):
        loading.config_of_4_bits(model)
