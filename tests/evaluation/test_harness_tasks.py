"""Generated tasks of lm-evaluation-harness: a program solves each of them from its prompt."""

import importlib.util
import random
import re
import string
from collections import Counter
from pathlib import Path

import pytest
import transformers as hf
import yaml

from attnzoo.errors import ConfigError
from attnzoo.evaluation.harness import task_folder
from attnzoo.evaluation.harness_tasks import ruler
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


def most_common_listed(text, prefix):
    words = re.findall(r"\d+\. (\S+)", text.rpartition("Below is")[2])
    return [word for word, _ in Counter(words).most_common(10)]


def most_frequent_coded(text, prefix):
    words = text.partition("coded words. ")[2].partition("\n")[0].split()
    return [word for word, _ in Counter(words).most_common(4)][1:]


SOLVERS = {"vt": variables_with_the_value, "cwe": most_common_listed, "fwe": most_frequent_coded}


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
        assert generated == ruler.KINDS[name].answer_tokens
        assert generated >= len(tokenizer(", ".join(answer))["input_ids"])
        assert 0.95 * length < document["length"] <= document["max_length"] == length
        score = {"score": 1.0, str(length): 1.0}
        assert ruler.process_results(document, [f"x {', '.join(answer)}."]) == score
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
    assert ruler.process_results(document, ["it is 12, 43"]) == {"score": 0.5, "64": 0.5}
    assert ruler.process_results(document, [""]) == {"score": 0.0, "64": 0.0}


def test_yaml_files_agree_with_the_prompts():
    class Loader(yaml.SafeLoader):
        pass

    Loader.add_constructor("!function", lambda loader, node: node.value.rpartition("."))
    read = {p.stem: yaml.load(p.read_text(), Loader) for p in task_folder().glob("*.yaml")}
    base, group = read.pop("_base"), read.pop("ruler")
    assert sorted(group["task"]) == sorted(f"attnzoo_{name}" for name in ruler.KINDS)
    assert set(read) == set(ruler.KINDS)
    for name, task in read.items():
        task = {**base, **task}
        assert task["task"] == f"attnzoo_{name}"
        assert task["custom_dataset"][::2] == (ruler.__name__, name)
        generated = task["generation_kwargs"]["max_gen_toks"]
        assert generated == ruler.KINDS[name].answer_tokens
        assert getattr(ruler, name).args == (name,)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "needs a tokenizer"),
        ({"tokenizer": "x", "max_seq_lengths": [0]}, "max_seq_lengths takes integers above 0"),
        ({"tokenizer": "x", "num_samples": "3"}, "num_samples takes integers above 0, got '3'"),
    ],
)
def test_invalid_metadata_is_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        ruler.vt(**given)


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
        assert ruler.process_results(document, [said])["4096"] == pytest.approx(expected)


def test_prompts_are_those_of_lm_eval(peer, tokenizer):
    """Equal words around the variables and coded words, and equal frequencies of coded words."""
    theirs = peer("fwe_utils")
    size, length = 4000, 4096
    text, answers, _ = theirs.generate_input_output(10**6, tokenizer, size, vocab_size=length // 50)
    own = ruler.frequent_words(size, length, random.Random(0))

    def frequencies(text):
        return sorted(Counter(text.split()).values())

    assert frequencies(own.prompt) == frequencies(text)
    frame = re.sub(r"coded words\. .*\n", "coded words. \n", own.prompt)
    assert frame == re.sub(r"coded words\. .*\n", "coded words. \n", text)
    assert len(answers) == len(own.answers) == 3

    theirs = peer("vt_utils")
    text, names = theirs.generate_input_output(12, 1, 4)
    own = ruler.variable_tracking(12, 4096, random.Random(0))
    task = own.prompt.split("\n\n\n")[1]

    def words(text, names):
        for name in names:
            text = text.replace(name, "NAME")
        return sorted(re.sub(r"\d{5}", "12345", text).replace("assgined", "assigned").split())

    assert len(names) == len(own.answers) == 5
    assert words(task, own.answers) == words(text, names)
    assert set("".join(own.answers)) <= set(string.ascii_uppercase)
