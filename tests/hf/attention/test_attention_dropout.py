"""Models with attention dropout (GPT-2, BERT) train after a swap; evaluation does not change."""

from typing import Any

import pytest
import torch
import transformers as hf
from torch.testing import assert_close

import attnzoo
from attnzoo.errors import UnsupportedError
from attnzoo.hf.layers import attention_dropout, attention_layers
from attnzoo.training.transfer import Transfer

BACKENDS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "flash": {},
    "linear": {},
    "gated_linear": {"window": 4},
    "longformer": {"window": 4},
    "linformer": {"block": 4},
    "performer": {"num_features": 16},
    "reformer": {"num_hashes": 2, "chunk_size": 4},
}


def gpt2(p: float = 0.3, **options: Any) -> Any:
    torch.manual_seed(0)
    config = hf.GPT2Config(
        vocab_size=50,
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=32,
        attn_pdrop=p,
        resid_pdrop=0,
        embd_pdrop=0,
        bos_token_id=1,
        eos_token_id=2,
        **options,
    )
    return hf.GPT2LMHeadModel(config)


def bert(p: float = 0.3) -> Any:
    torch.manual_seed(0)
    config = hf.BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=32,
        attention_probs_dropout_prob=p,
        hidden_dropout_prob=0,
    )
    return hf.BertForMaskedLM(config)


def swapped(make: Any, backend: str, p: float = 0.3) -> Any:
    options = BACKENDS[backend]
    if make is bert:
        options = {name: x for name, x in options.items() if name not in ("block",)}
    model = make(p)
    attnzoo.swap(model, backend, **options)
    return model


@pytest.fixture
def ids():
    return torch.randint(3, 50, (2, 12))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("make", [gpt2, bert])
def test_one_step(make, backend, ids):
    if make is bert and backend == "gated_linear":
        pytest.skip("gated_linear is causal only")
    model, without = swapped(make, backend), swapped(make, backend, p=0.0)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    given = {"input_ids": ids, "labels": ids, "attention_mask": mask}
    plain = without.eval()(**given).logits
    assert torch.equal(model.eval()(**given).logits, plain)
    model.train()
    torch.manual_seed(3)
    output = model(**given)
    assert not torch.equal(output.logits, plain)
    output.loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    torch.manual_seed(3)
    assert torch.equal(model(**given).logits, output.logits)
    assert torch.equal(model.eval()(**given).logits, plain)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable.:FutureWarning")
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("backend", ["linear", "gated_linear", "reformer"])
def test_gradient_checkpointing_repeats_the_draw(backend, reentrant, ids):
    gradients = []
    for checkpointing in (False, True):
        model = swapped(gpt2, backend).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        torch.manual_seed(3)
        model(ids, labels=ids, use_cache=False).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert_close(gradients[1], gradients[0])


@pytest.mark.exhaustive
def test_compiled(ids):
    model = swapped(gpt2, "linear").train()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.manual_seed(3)
    expected = model(ids, use_cache=False).logits
    torch.manual_seed(3)
    assert torch.equal(compiled(ids, use_cache=False).logits, expected)


def test_describe():
    model = gpt2()
    attnzoo.swap(model, "linear", layers={"0": "flash"})
    assert attnzoo.describe(model).dropout == (
        "In training, attention dropout of 0.3 drops single attention weights in layers 0",
        "In training, attention dropout of 0.3 drops whole keys of a head in layers 1",
    )
    attnzoo.swap(model, "linear", attention_dropout="off")
    (line,) = attnzoo.describe(model).dropout
    assert line in str(attnzoo.describe(model))
    assert line.endswith("is disabled (attention_dropout='off')")
    for layer in attention_layers(model):
        layer.module.attn_dropout.p = 0.0  # as TRL's disable_dropout does
    assert attnzoo.describe(model).dropout == ()


def test_unsupported_forms_are_refused_by_swap():
    model = gpt2()
    with pytest.raises(UnsupportedError, match=r"does not compute single weights.*1 more layer"):
        attnzoo.swap(model, "linear", attention_dropout="weights")
    assert not hasattr(model.config, "attnzoo")


def test_option_is_saved(tmp_path):
    model = gpt2()
    attnzoo.swap(model, "linear", attention_dropout="off")
    model.save_pretrained(tmp_path)
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert {m.config.attention_dropout for m in backends(again)} == {"off"}
    del again.config.attnzoo["options"]  # a spec from before the option
    again.config.save_pretrained(tmp_path)
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert {m.config.attention_dropout for m in backends(again)} == {"auto"}


def backends(model: Any) -> list[Any]:
    return [layer.module.attnzoo for layer in attention_layers(model)]


@pytest.mark.parametrize(
    ("config", "cls", "p"),
    [
        (hf.LlamaConfig(attention_dropout=0.2), hf.LlamaModel, 0.2),
        (hf.T5Config(dropout_rate=0.2), hf.T5Model, 0.2),
        (hf.ViTConfig(attention_probs_dropout_prob=0.2), hf.ViTModel, 0.2),
        (hf.BartConfig(attention_dropout=0.2, dropout=0.5), hf.BartModel, 0.2),
        (hf.ModernBertConfig(attention_dropout=0.2), hf.ModernBertModel, 0.2),
        (hf.GPTNeoXConfig(attention_dropout=0.2), hf.GPTNeoXModel, 0.2),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_rate_is_read_from_the_layers(config, cls, p):
    with torch.device("meta"):
        model = cls(config)
    assert {attention_dropout(layer.module) for layer in attention_layers(model)} == {p}


def test_transfer_has_no_attention_dropout(ids):
    """Its teacher would drop other weights than the student."""
    model = gpt2(0.5).train()
    attnzoo.swap(model, "linear", feature_map="hedgehog")
    losses = []
    with Transfer(model) as transfer:
        for seed in (3, 4):
            torch.manual_seed(seed)
            model(ids, use_cache=False)
            losses.append(transfer.loss())
    assert torch.equal(*losses)
