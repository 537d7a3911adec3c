"""Generated tasks of lm-evaluation-harness: a program solves each of them from its prompt."""

import importlib.util
import random
import re
import string
from pathlib import Path

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


def variables_with_the_value(text, prefix):
    value = re.search(r"value (\d+)", prefix)[1]
    values = dict(re.findall(r"VAR (\w+) = (.+)", text.split("\n\n\n")[1]))

    def follow(name):
        return follow(values[name][4:]) if values[name].startswith("VAR") else values[name]

    return [name for name in values if follow(name) == value]


SOLVERS = {"vt": variables_with_the_value}


@pytest.mark.parametrize("name", ruler.KINDS)
@pytest.mark.parametrize("length", [4096, pytest.param(32768, marks=pytest.mark.exhaustive)])
def test_a_prompt_has_its_length_and_its_answer(name, length, tokenizer):
    documents = ruler.make_samples(name, tokenizer, length=length, count=4)
    solve = SOLVERS.get(name, needles_asked_for)
    for document in documents:
        text, prefix = document["input"], document["gen_prefix"]
        answer = solve(text, prefix)
        assert sorted(answer) == sorted(document["outputs"])
        tokens = len(tokenizer(f"{text} {prefix}")["input_ids"])
        generated = document["length"] - tokens
        assert generated == ruler.KINDS[name][1]
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
    solve = SOLVERS.get(name, needles_asked_for)
    (document,) = ruler.make_samples(name, tokenizer, length=least + 100, count=1)
    answer = solve(document["input"], document["gen_prefix"])
    assert sorted(answer) == sorted(document["outputs"])


def test_parts_of_an_answer_count():
    document = {"outputs": ["12", "34"], "max_length": 64}
    assert ruler.score(document, ["it is 12, 43"]) == {"score": 0.5, "64": 0.5}
    assert ruler.score(document, [""]) == {"score": 0.0, "64": 0.0}


@pytest.fixture(scope="module")
def peer():
    """Return a function that loads a module of lm_eval's own RULER tasks that needs no network."""
    pytest.importorskip("lm_eval", reason="lm_eval is not installed; it is the extra 'eval'")
    folder = Path(importlib.util.find_spec("lm_eval").origin).parent / "tasks" / "ruler"

    def load(name):
        spec = importlib.util.spec_from_file_location(f"peer_{name}", folder / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


def test_scores_are_those_of_lm_eval(peer):
    theirs = peer("common_utils")
    rng = random.Random(0)
    for _ in range(50):
        answers = ["".join(rng.choices("abAB12", k=2)) for _ in range(rng.randrange(1, 5))]
        said = "".join(rng.choices("abAB12 ,", k=12))
        document = {"outputs": answers, "max_length": 4096}
        expected = theirs.process_results(document, [said])["4096"]
        assert ruler.score(document, [said])["4096"] == pytest.approx(expected)


def test_prompts_are_those_of_lm_eval(peer):
    """Equal words around the variables."""
    text, names = peer("vt_utils").generate_input_output(12, 1, 4)
    own = ruler.variable_tracking(12, random.Random(0))
    task = f"{own.text} {own.prefix}".split("\n\n\n")[1]

    def words(text, names):
        for name in names:
            text = text.replace(name, "NAME")
        return sorted(re.sub(r"\d{5}", "12345", text).replace("assgined", "assigned").split())

    assert len(names) == len(own.answers) == 5
    assert words(task, own.answers) == words(text, names)
    assert set("".join(own.answers)) <= set(string.ascii_uppercase)
