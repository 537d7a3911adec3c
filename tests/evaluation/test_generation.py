"""Greedy generation, against a loop of whole forward passes and against counts made by hand."""

from types import SimpleNamespace

import pytest
import torch
import transformers as hf

from attnzoo.evaluation.generation import (
    GenerationBatch,
    Needles,
    continue_greedily,
    copy_rows,
    correct_tokens,
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

    def parameters(self):
        yield torch.zeros(1)

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
    draw = torch.Generator().manual_seed(0)
    for copy in copy_rows([text], 256, draw).tokens:
        assert torch.equal(copy[-48:], copy[-48 - 256 : -256])
    needles = Needles(encode, 3)
    for row, needle in enumerate(needles.rows([text], 256, draw).tokens):
        number = needle[-needles.answer_tokens :]
        question = len(encode(f"\nPASSKEY_{row} = ")) + 7
        at = len(needle) - question - 256
        assert torch.equal(needle[at : at + question][-7:], number)


def test_prompts_of_short_documents(text):
    batch = make_generation_batch([text[:100], text[100:150]], 400)
    assert (batch.prompts.tokens.shape, batch.new_tokens) == ((2, 25), 25)
    assert make_generation_batch([text[:1]], 400) is None


def test_fractions_of_equal_tokens():
    reference = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    prompts = Rows.of_documents(torch.zeros(2, 3, dtype=torch.long))
    batch = GenerationBatch(prompts=prompts, new_tokens=4, reference=reference)
    found = measure_generation(Speaker(torch.tensor([[1, 2, 9, 4], [5, 6, 7, 8]])), batch)
    assert found["agreement"] == pytest.approx(7 / 8)
    assert found["agreement_rows"] == [0.75, 1.0]
    assert found["equal_tokens"] == pytest.approx((2 + 4) / 2)
    answers = Rows.of_documents(torch.ones(2, 6, dtype=torch.long))
    right = correct_tokens(Speaker(torch.tensor([[1, 0], [1, 1]])), answers, 2)
    assert right.tolist() == [[True, False], [True, True]]


def test_a_model_agrees_with_itself(model, text):
    batch = with_reference(make_generation_batch([text], 40), model)
    assert measure_generation(model, batch)["equal_tokens"] == 20
