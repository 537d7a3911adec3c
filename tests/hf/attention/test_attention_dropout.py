"""Models with attention dropout (GPT-2, BERT) train after a swap; evaluation does not change."""

from typing import Any

import pytest
import torch
import transformers as hf
from torch.testing import assert_close

import attnzoo

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
