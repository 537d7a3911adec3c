"""The losses of distillation."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import transformers as hf
from accelerate.utils import DistributedType

import attnzoo
from attnzoo.errors import ConfigError
from attnzoo.hf import logits as logits_in_chunks
from attnzoo.hf.logits import chunk_reason
from attnzoo.hf.lora import with_adapters
from attnzoo.training.distil import (
    Predictions,
    chunk_of,
    distil_loss,
    divergence,
    predictions,
    softmax_teacher,
)

MASK = torch.ones(2, 5)


def logits(seed):
    return torch.randn(2, 5, 11, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_divergence():
    student, teacher = logits(0), logits(1)
    p, q = teacher.softmax(-1), student.softmax(-1)
    full = (p * (p / q).log()).sum(-1).mean()
    assert float(divergence(student, teacher, MASK)) == pytest.approx(float(full), rel=1e-5)
    assert float(divergence(teacher, teacher, MASK)) == pytest.approx(0, abs=1e-6)


def test_divergence_leaves_masked_tokens_out():
    student, teacher, mask = logits(0), logits(1), MASK.clone()
    mask[1] = 0
    expected = divergence(student[:1], teacher[:1], MASK[:1])
    torch.testing.assert_close(divergence(student, teacher, mask), expected)


def test_error_of_hidden_states(model):
    """Against the outputs of the decoder layers, read by hooks, in float64."""
    tokens = torch.arange(5, 17).view(2, 6)
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    batch["labels"][1, 4:] = -100  # predictions 3 to 5 of the row; the last token has none
    model = model.double()
    exact = outputs(model, batch)
    teacher = softmax_teacher(model, weights_change=True, outputs=predict)
    swapped = attnzoo.swap(model, "linear")
    found = outputs(swapped, batch)
    errors = [
        ((x - y).square().sum(-1) / y.square().sum(-1))[[0] * 5 + [1] * 3, [*range(5), *range(3)]]
        for x, y in zip(found, exact, strict=True)
    ]
    expected = 0.5 * float(torch.stack(errors).mean())
    with_error = distil_loss(teacher, hidden_states=0.5)(swapped, batch)
    plain = distil_loss(teacher)(swapped, batch)
    assert expected > 0.01
    assert float(with_error) - float(plain) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("weights_change", [True, False])
def test_teacher_of_a_swapped_model_is_the_model_before_the_swap(model, weights_change):
    """A copy keeps its weights while the model is trained; padding and packed rows included."""
    tokens = torch.arange(5, 29).view(2, 12)
    padded = torch.ones_like(tokens)
    padded[0, :5] = 0
    packed = torch.arange(12).remainder(7).expand(2, -1)
    batches = [
        {"input_ids": tokens},
        {"input_ids": tokens, "attention_mask": padded},
        {"input_ids": tokens, "position_ids": packed},
    ]
    model = model.double().eval()
    with torch.no_grad():
        exact = [model(**batch, use_cache=False).logits for batch in batches]
    swapped = attnzoo.swap(model, "linear", feature_map="hedgehog", window=4)
    teach = softmax_teacher(swapped, weights_change=weights_change)
    if weights_change:
        with torch.no_grad():
            for weight in swapped.parameters():
                weight.mul_(1.5)
    for batch, logits in zip(batches, exact, strict=True):
        found = teach(swapped, {**batch, "labels": tokens}).logits
        real = batch.get("attention_mask", torch.ones_like(tokens)).bool()
        torch.testing.assert_close(found[real], logits[real], rtol=1e-9, atol=1e-11)


SMALL = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "pad_token_id": 0,
}
UNCAPPED = {"layer_types": ["full_attention"] * 2, "attn_logit_softcapping": None}
NO_DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
MODELS = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL)),
    # the head divides or caps its logits, and has the weights of the embedding
    "granite": lambda: hf.GraniteForCausalLM(hf.GraniteConfig(**SMALL, logits_scaling=0.2)),
    "gemma2": lambda: hf.Gemma2ForCausalLM(
        hf.Gemma2Config(**SMALL, **UNCAPPED, final_logit_softcapping=5.0, tie_word_embeddings=True)
    ),
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=40, **NO_DROPOUT)
    ),
    "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**SMALL, num_local_experts=2)),
}
LOSSES = [{}, {"cross_entropy": 0.3, "hidden_states": 0.5}]


@pytest.mark.parametrize("train", ["full", "lora"])
@pytest.mark.parametrize(
    ("name", "options"), [("llama", x) for x in LOSSES] + [(n, LOSSES[1]) for n in [*MODELS][1:]]
)
def test_chunks_have_the_loss_and_the_gradients_of_all_logits(name, options, train):
    torch.manual_seed(0)
    model = attnzoo.swap(MODELS[name](), "linear", feature_map="hedgehog")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(12 if parameter.ndim > 1 else 1)
    if train == "lora":
        model = with_adapters(model, 2, "CAUSAL_LM")
        for key, parameter in model.named_parameters():
            if "lora_" in key:
                torch.nn.init.normal_(parameter, std=0.2)
    tokens = torch.randint(1, 40, (2, 12))
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    batch["labels"][1, 7:] = -100
    found = {}
    for chunk in (None, 7):  # the last chunk is shorter
        assert chunk is None or chunk_reason(model) == ""
        outputs = partial(predictions, with_layers="hidden_states" in options, chunk=chunk)
        teacher = softmax_teacher(model, weights_change=train == "full", outputs=outputs)
        model.zero_grad()
        loss = distil_loss(teacher, **options, chunk=chunk)(model, batch)
        loss.backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        found[chunk] = float(loss.detach()), gradients
    (exact, expected), (ours, gradients) = found.values()
    assert exact > 0.01
    assert ours == pytest.approx(exact, rel=1e-6)
    assert gradients.keys() == expected.keys()
    scale = max(float(x.abs().max()) for x in expected.values())
    for key, x in expected.items():
        torch.testing.assert_close(gradients[key], x, rtol=1e-4, atol=1e-6 * scale, msg=key)


def test_chunks_never_hold_the_logits_of_all_tokens(model):
    """Nor does the teacher; a call with fewer tokens than a chunk computes them at once."""
    attnzoo.swap(model, "linear")
    sizes = []
    model.lm_head.register_forward_hook(lambda m, args, out: sizes.append(out[..., 0].numel()))
    teacher = softmax_teacher(model, weights_change=False, outputs=partial(predictions, chunk=8))
    tokens = torch.arange(5, 29).view(2, 12)
    distil_loss(teacher, chunk=8)(model, {"input_ids": tokens, "labels": tokens}).backward()
    assert max(sizes) == 8
    sizes.clear()
    few = tokens[:1, :6]
    distil_loss(teacher, chunk=8)(model, {"input_ids": few, "labels": few}).backward()
    assert sizes == [6, 6]


def test_a_head_that_needs_more_than_hidden_states_holds_all_logits(model, monkeypatch):
    messages = []
    monkeypatch.setattr(logits_in_chunks, "CHUNK_LOGITS", 0)
    one = SimpleNamespace(distributed_type=DistributedType.NO)
    assert chunk_of(model, 65, one, messages.append) == 64
    assert chunk_of(model, 64, one, messages.append) is None  # all fit in one chunk
    assert not messages
    forward = type(model).forward

    def adds_the_embedding(self, input_ids=None, logits_to_keep=0, **kwargs):
        output = forward(self, input_ids=input_ids, logits_to_keep=logits_to_keep, **kwargs)
        if input_ids is not None:
            output.logits = output.logits + 1
        return output

    monkeypatch.setattr(type(model), "forward", adds_the_embedding)
    assert chunk_of(model, 65, one, messages.append) is None
    sharded = SimpleNamespace(distributed_type=DistributedType.FSDP)
    assert chunk_of(model, 65, sharded, messages.append) is None
    assert [message.partition(": ")[2] for message in messages] == [
        "the head of LlamaForCausalLM depends on more than the hidden states",
        "FSDP shards the head",
    ]


def predict(model, batch):
    return Predictions(model(batch["input_ids"]).logits, outputs(model, batch))


def outputs(model, batch):
    """Return the outputs of a Llama's layers, the last one after the final norm."""
    found, decoder = [], model.model
    modules = [*decoder.layers[:-1], decoder.norm]
    handles = [m.register_forward_hook(lambda m, args, out: found.append(out)) for m in modules]
    with torch.no_grad():
        model(batch["input_ids"], use_cache=False)
    for handle in handles:
        handle.remove()
    return tuple(found)


@pytest.mark.parametrize("weights_change", [True, False])
def test_the_teacher_has_no_dropout(weights_change):
    model = hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=99))
    attnzoo.swap(model, "flash")
    tokens = torch.arange(5, 17).view(2, 6)
    expected = model.eval()(tokens).logits
    model.train()
    teach = softmax_teacher(model, weights_change=weights_change)
    found = teach(model, {"input_ids": tokens, "labels": tokens})
    torch.testing.assert_close(found.logits, expected)
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cross_entropy": 2}, "cross_entropy must be from 0 to 1"),
        ({"cross_entropy": -1}, "cross_entropy must be from 0 to 1"),
        ({"hidden_states": -1}, "hidden_states at least 0"),
        ({"chunk": 0}, "chunk must be at least 1"),
        ({"teacher": None}, "Without a teacher"),
        ({"teacher": None, "cross_entropy": 0.5}, "Without a teacher"),
        ({"teacher": None, "cross_entropy": 1, "hidden_states": 0.1}, "Without a teacher"),
        ({"hidden_states": 0.1}, "hidden_states compares layers"),
        ({"chunk": 8}, "another chunk"),
        ({}, "no labels"),
    ],
)
def test_losses_that_mean_nothing_are_refused(model, options, message):
    attnzoo.swap(model, "linear")
    tokens = torch.arange(5, 29).view(2, 12)
    batch = {"input_ids": tokens, **({"labels": tokens} if options else {})}
    teacher = softmax_teacher(model, weights_change=False)
    with pytest.raises(ConfigError, match=message):
        distil_loss(options.pop("teacher", teacher), **options)(model, batch)
