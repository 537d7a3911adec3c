"""Generated tasks of lm-evaluation-harness: a program solves each of them from its prompt."""

import random
import re

import pytest
import transformers as hf

from attnzoo.errors import ConfigError
from attnzoo.evaluation import ruler
from attnzoo.evaluation.models import embedded_model_path


@pytest.fixture(scope="module")
def tokenizer():
    return hf.AutoTokenizer.from_pretrained(embedded_model_path())


def needles_asked_for(text, prefix):
    found = re.findall(r"magic numbers for (\S+) is: (\d+)\.", text)
    names = re.findall(r"[a-z]+-[a-z]+", text.splitlines()[-1])
    assert names == re.findall(r"[a-z]+-[a-z]+", prefix)
    return [number for name in names for key, number in found if key == name]


@pytest.mark.parametrize("name", ruler.KINDS)
@pytest.mark.parametrize("length", [4096, pytest.param(32768, marks=pytest.mark.exhaustive)])
def test_a_prompt_has_its_length_and_its_answer(name, length, tokenizer):
    documents = ruler.make_samples(name, tokenizer, length=length, count=4)
    for document in documents:
        text, prefix = document["input"], document["gen_prefix"]
        answer = needles_asked_for(text, prefix)
        assert sorted(answer) == sorted(document["outputs"])
        tokens = len(tokenizer(f"{text} {prefix}")["input_ids"])
        generated = document["length"] - tokens
        assert generated == ruler.ANSWER_TOKENS
        assert generated >= len(tokenizer(", ".join(answer))["input_ids"])
        assert 0.95 * length < document["length"] <= document["max_length"] == length
        score = {"score": 1.0, str(length): 1.0}
        assert ruler.score(document, [f"x {', '.join(answer)}."]) == score
    texts = {document["input"] for document in documents}
    assert len(texts) == 4
    again = ruler.make_samples(name, tokenizer, length=length, count=2)
    assert again == documents[:2]


@pytest.mark.parametrize("name", ruler.KINDS)
def test_the_shortest_prompt(name, tokenizer):
    with pytest.raises(ConfigError, match=f"attnzoo_{name} has .* give at least") as refused:
        ruler.make_samples(name, tokenizer, length=200, count=1)
    least = int(str(refused.value).split()[-1])
    (document,) = ruler.make_samples(name, tokenizer, length=least + 100, count=1)
    answer = needles_asked_for(document["input"], document["gen_prefix"])
    assert sorted(answer) == sorted(document["outputs"])


def test_parts_of_an_answer_count():
    document = {"outputs": ["12", "34"], "max_length": 64}
    assert ruler.score(document, ["it is 12, 43"]) == {"score": 0.5, "64": 0.5}
    assert ruler.score(document, [""]) == {"score": 0.0, "64": 0.0}


def test_scores_are_those_of_lm_eval():
    pytest.importorskip("lm_eval", reason="lm_eval is not installed; it is the extra 'eval'")
    from lm_eval.tasks.ruler import common_utils as theirs

    rng = random.Random(0)
    for _ in range(50):
        answers = ["".join(rng.choices("abAB12", k=2)) for _ in range(rng.randrange(1, 5))]
        said = "".join(rng.choices("abAB12 ,", k=12))
        document = {"outputs": answers, "max_length": 4096}
        expected = theirs.process_results(document, [said])["4096"]
        assert ruler.score(document, [said])["4096"] == pytest.approx(expected)
