"""Teachers and adapters on weights in 4 bits; `nox --session bitsandbytes` installs the package."""

import importlib.util
from functools import partial

import pytest
import torch
import transformers as hf
from torch import nn

import attnzoo
from attnzoo.errors import ConfigError, UnsupportedError
from attnzoo.evaluation.memory import BYTES_OF_4_BITS
from attnzoo.hf.adapters.lora import with_adapters
from attnzoo.training import four_bits
from attnzoo.training.distil import distil_loss, predictions, softmax_teacher
from attnzoo.training.loop import LoopConfig, read_losses
from attnzoo.training.recover import RecoverConfig, recover
from tests.helpers import tiny_llama as tiny_llama_of

needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None,
    reason="needs bitsandbytes, which `nox --session bitsandbytes` installs",
)
pytestmark = pytest.mark.usefixtures("portable_4_bits")
TOKENS = torch.arange(5, 29).view(2, 12)
BATCH = {"input_ids": TOKENS, "labels": TOKENS}
# NF4's levels: Dettmers et al., 2023, arXiv:2305.14314, appendix E
LEVELS = torch.tensor(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ]
)


@pytest.fixture(scope="module")
def saved(saved_in_blocks):
    """The folder of the model that these tests train."""
    return saved_in_blocks


def tiny_llama(**changes):
    """Return a model with rows of whole blocks, as ``saved`` has."""
    return tiny_llama_of(**{"hidden_size": 64, "intermediate_size": 128, **changes})


def swapped(**changes):
    return attnzoo.swap(tiny_llama(**changes), "linear", feature_map="hedgehog", window=4)


def dequantized(layer):
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(layer.weight.data, layer.weight.quant_state)


def layers(model):
    """Return the linear layers of a model's decoder, by name."""
    return {n: m for n, m in model.model.named_modules() if isinstance(m, nn.Linear)}


@needs_bitsandbytes
@pytest.mark.parametrize("chunk", [None, 8])
def test_a_teacher_in_4_bits_is_the_model_with_dequantized_weights(chunk):
    model = swapped(attention_bias=True)
    outputs = partial(predictions, chunk=chunk)
    teach = softmax_teacher(model, weights_change=True, dtype="nf4", outputs=outputs)
    expected = tiny_llama(attention_bias=True).eval()
    for p in expected.parameters():  # buffers stay in float32, as from_pretrained has them
        p.data = p.data.bfloat16()
    for name, layer in layers(expected).items():
        layer.weight.data = dequantized(layers(teach.frozen)[name])
    found = teach(model, BATCH)
    with torch.no_grad():
        exact = expected(TOKENS, use_cache=False).logits
        logits = found.logits if chunk is None else found.head(found.hidden)
    torch.testing.assert_close(logits, exact, rtol=0.02, atol=0.02)
    full = tiny_llama(attention_bias=True).eval()(TOKENS).logits
    assert (logits - full).abs().max() > 0.05  # the weights are in 4 bits
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@needs_bitsandbytes
def test_weights_are_rounded_to_the_levels_of_nf4():
    """The largest value of each block of 64 weights is rounded to 8 bits (double quantization)."""
    teach = softmax_teacher(model := swapped(), weights_change=True, dtype="nf4")
    for name, layer in layers(teach.frozen).items():
        blocks = layers(model)[name].weight.detach().bfloat16().float().view(-1, 64)
        found = dequantized(layer).float().view(-1, 64)
        largest, scale = (x.abs().amax(1, keepdim=True) for x in (blocks, found))
        torch.testing.assert_close(scale, largest, rtol=0.1, atol=0)
        nearest = LEVELS[(blocks / largest).unsqueeze(-1).sub(LEVELS).abs().argmin(-1)]
        torch.testing.assert_close(found / scale, nearest, rtol=0.01, atol=1e-4)


@needs_bitsandbytes
def test_the_bytes_of_4_bits_are_those_that_memory_counts():
    big = {"hidden_size": 256, "intermediate_size": 512}
    teach = softmax_teacher(swapped(**big), weights_change=True, dtype="nf4")
    held = count = 0
    for layer in layers(teach.frozen).values():
        state = layer.weight.quant_state
        tensors = (layer.weight, state.absmax, state.state2.absmax)
        held += sum(x.numel() * x.element_size() for x in tensors)
        count += layer.in_features * layer.out_features
    assert held == pytest.approx(BYTES_OF_4_BITS * count, rel=0.001)


@needs_bitsandbytes
def test_distillation_from_4_bits_takes_steps_near_those_from_float32(saved, text, spec, tmp_path):
    found = []
    for dtype in (None, "nf4"):
        config = RecoverConfig(
            **{"transfer_steps": 0, "distil_steps": 4, "train": "full", "row_length": 32},
            judged_rows=2,
            teacher_dtype=dtype,
            loop=LoopConfig(batch_size=4),
        )
        recover(saved, spec, [text], out := tmp_path / str(dtype), config)
        found.append([x["loss"] for x in read_losses(out)])
    assert found[1] != found[0]
    assert found[1] == pytest.approx(found[0], rel=0.1)


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
    assert teach.frozen is None
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
    monkeypatch.setattr(four_bits, "find_spec", lambda name: None)
    config = RecoverConfig(train="full", teacher_dtype="nf4")
    with pytest.raises(UnsupportedError, match="pip install bitsandbytes"):
        recover(saved, spec, [text], tmp_path / "out", config)
    assert not (tmp_path / "out").exists()


def test_models_without_linear_layers_are_refused(monkeypatch):
    monkeypatch.setattr(four_bits, "find_spec", lambda name: name)
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 4, "vocab_size": 99}
    model = hf.GPT2LMHeadModel(hf.GPT2Config(**sizes))
    with pytest.raises(UnsupportedError, match="GPT2LMHeadModel has no linear layers"):
        softmax_teacher(model, weights_change=True, dtype="nf4")


def test_weights_in_4_bits_are_not_offloaded():
    with pytest.raises(ConfigError, match="leave one of them out"):
        RecoverConfig(train="full", teacher_dtype="nf4", offload_teacher=True)
    with pytest.raises(UnsupportedError, match="scales of weights in 4 bits"):
        softmax_teacher(tiny_llama(), weights_change=True, dtype="nf4", offload=True)
