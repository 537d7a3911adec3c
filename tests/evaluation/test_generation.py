"""Greedy generation, against a loop of whole forward passes and against counts made by hand."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import transformers as hf

from attnzoo.evaluation.generation import (
    COPY_ANSWER,
    GenerationBatch,
    continue_greedily,
    make_generation_batch,
    measure_generation,
    with_reference,
)
from attnzoo.evaluation.rows import Rows


def encode(text):
    return torch.tensor([byte % 64 for byte in text.encode()])


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "eos_token_id": 3},
    )
    return hf.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def text():
    return torch.randint(64, (700,), generator=torch.Generator().manual_seed(1))


class Speaker:
    """A model that returns prepared answers: one per prompt, one token per call."""

    config = hf.LlamaConfig(num_hidden_layers=1)

    def __init__(self, *answers):
        self.tokens = [token for answer in answers for token in answer.unbind(1)]

    def __call__(self, tokens, **_):
        logits = torch.nn.functional.one_hot(self.tokens.pop(0), 64).float()
        return SimpleNamespace(logits=logits[:, None])


def test_continuations_equal_a_loop_of_whole_passes(model):
    """No token ends a continuation, and the model's generation settings have no effect."""
    model.generation_config.update(do_sample=True, temperature=9.0, repetition_penalty=3.0)
    rows = prompts = torch.arange(30).view(3, 10)
    with torch.no_grad():
        for _ in range(12):
            rows = torch.cat([rows, model(rows).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(continue_greedily(model, Rows.of_documents(prompts), 12), rows[:, 10:])


def test_rows_end_with_copies_and_needles(text):
    batch = make_generation_batch([text], encode, 400)
    assert (batch.prompts.tokens.shape, batch.new_tokens) == ((16, 336), 64)
    copy, first = batch.copies.tokens[:, -48:], batch.copies.tokens[:, -48 - 256 : -256]
    assert torch.equal(copy, first)
    for row, needle in enumerate(batch.needles.tokens):
        number = needle[-batch.needle_answer :]
        at = len(needle) - len(encode(f"\nPASSKEY_{row} = ")) - 7 - 256
        given = needle[at : at + len(encode(f"\nPASSKEY_{row} = ")) + 7]
        assert torch.equal(given[-7:], number)


def test_short_rows_have_prompts_only(text):
    batch = make_generation_batch([text], encode, 100)
    assert batch.copies is None
    assert batch.needles is None
    assert (batch.prompts.length, batch.new_tokens) == (50, 50)


def test_fractions_of_equal_tokens():
    reference = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    batch = GenerationBatch(
        prompts=Rows.of_documents(torch.zeros(2, 3, dtype=torch.long)),
        copies=Rows.of_documents(torch.ones(2, 60, dtype=torch.long)),
        needles=Rows.of_documents(torch.ones(2, 60, dtype=torch.long)),
        needle_answer=2,
        new_tokens=4,
        reference=reference,
    )
    copied = torch.ones(2, COPY_ANSWER, dtype=torch.long)
    copied[0, :6] = 0
    speaker = Speaker(
        torch.tensor([[1, 2, 9, 4], [5, 6, 7, 8]]), copied, torch.tensor([[1, 0], [1, 1]])
    )
    found = measure_generation(speaker, batch)
    assert found["agreement"] == pytest.approx(7 / 8)
    assert found["equal_tokens"] == pytest.approx((2 + 4) / 2)
    assert found["copies"] == pytest.approx(1 - 6 / (2 * COPY_ANSWER))
    assert found["needles"] == 0.5
    short = measure_generation(Speaker(reference), replace(batch, copies=None, needles=None))
    assert (short["agreement"], short["copies"], short["needles"]) == (1, None, None)


def test_a_model_agrees_with_itself(model, text):
    batch = with_reference(make_generation_batch([text], encode, 40), model)
    assert measure_generation(model, batch)["equal_tokens"] == 20
