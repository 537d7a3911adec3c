"""Every token of vLLM equals that of ``generate()`` for the request alone."""

import models
import pytest
import torch
from vllm import SamplingParams

CASES = [  # model, dtype, prefix caching, without torch.compile
    ("qwen", torch.float32, True, True),
    ("qwen", torch.bfloat16, False, True),
    ("embedded", torch.float32, True, False),
    ("embedded", torch.bfloat16, False, False),
    ("granite", torch.float32, True, True),
    ("exaone", torch.float32, False, True),
    ("opt", torch.float32, True, True),
]
ALL = [
    (name, dtype, caching, eager)
    for name in models.MODELS
    for dtype in (torch.float32, torch.bfloat16)
    for caching in (True, False)
    for eager in (True, False)
]
PARAMETERS = [
    *CASES,
    *(pytest.param(*x, marks=pytest.mark.exhaustive) for x in ALL if x not in CASES),
]


def run(engine, asked):
    """Return the answers to all requests at once, and how many prompt tokens were cached."""
    given = [{"prompt_token_ids": x.prompt} for x in asked]
    options = {"temperature": 0, "ignore_eos": True, "logprobs": 0}
    sampling = [SamplingParams(max_tokens=x.count, **options) for x in asked]
    found = engine.generate(given, sampling, use_tqdm=False)
    return [x.outputs[0] for x in found], sum(x.num_cached_tokens for x in found)


def refuse_other_probabilities(answers, expected):
    """Assert that log-probabilities, which a factor of the logits changes, are equal."""
    for answer, reference in zip(answers, expected, strict=True):
        ours = [next(iter(x.values())).logprob for x in answer.logprobs]
        theirs = reference.logits.log_softmax(1).amax(1)
        torch.testing.assert_close(torch.tensor(ours), theirs, atol=1e-3, rtol=0)


def refuse_differences(found, expected, exact):
    """Assert that tokens are equal, in bfloat16 but for near ties.

    A near tie is a token whose logit in ``generate()`` is below the highest by at most twice the
    largest error of the logits of that step, measured against float32. No more requests may differ
    than those whose tokens ``generate()`` itself changes from float32 to bfloat16.

    Args:
        found: The tokens of each request.
        expected: The references in the engine's data type.
        exact: Those in float32.
    """
    differ = [(x, y) for x, y in zip(found, expected, strict=True) if x != y.tokens]
    rounded = sum(
        x.tokens != y.tokens for x, y in zip(expected, exact, strict=True)
    )  # 0 in float32
    assert len(differ) <= rounded, (rounded, [len(y.prompt) for _, y in differ])
    for ours, reference in differ:
        pairs = zip(ours, reference.tokens, strict=True)
        step = next(i for i, (x, y) in enumerate(pairs) if x != y)
        logits, error = reference.logits[step], reference.errors[step]
        margin = logits[reference.tokens[step]] - logits[ours[step]]
        assert margin <= 2 * error, (len(reference.prompt), step, float(margin), float(error))
    print(f"{len(differ)} of {len(expected)} requests differ, at near ties; by rounding {rounded}")


@pytest.mark.parametrize(("name", "dtype", "caching", "eager"), PARAMETERS, ids=str)
def test_every_token_equals_generate(name, dtype, caching, eager, folders, references, engine):
    """Six of 24 requests run at once, in steps of at most 128 tokens; pages are used again."""
    expected = references[name, dtype]
    options = {"enable_prefix_caching": caching, "enforce_eager": eager}
    options["skip_tokenizer_init"] = True  # some families have a tokenizer of their own class
    started = engine(folders[name], dtype=str(dtype).removeprefix("torch."), **options)
    for number in range(2):
        answers, cached = run(started, expected)
        found = [list(x.token_ids) for x in answers]
        refuse_differences(found, expected, references[name, torch.float32])
        if dtype == torch.float32:
            refuse_other_probabilities(answers, expected)
        assert (cached > 0) == caching
        assert number == 0 or not caching or cached > 1000


def test_the_tokens_are_those_of_no_other_model(references):
    """What the random model says differs from what it says with softmax, for each request."""
    for x, softmax in zip(references["qwen", torch.float32], references["softmax"], strict=True):
        assert softmax != x.tokens, len(x.prompt)
