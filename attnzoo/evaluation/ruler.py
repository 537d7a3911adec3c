"""Generated long-context prompts in the form of RULER, which need no download.

Needles in repeated sentences or among other needles, and chains of variable assignments, with a
vocabulary of our own. A prompt fills a number of tokens of a tokenizer with the tokens to generate.
Source: Hsieh et al., 2024, arXiv:2404.06654 (RULER). lm_eval's own ``ruler`` has the other kinds.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from attnzoo.errors import ConfigError

# Words of prompts: pairs of an adjective and a noun, such as ``calm-river``
ADJECTIVES = """
able amber ancient bitter blank blue bold brave brief bright calm careful clever cold cool
crisp dark deep dry eager early empty fair famous fast final fine firm flat fresh gentle
giant glad golden grand green grey happy heavy hidden hollow honest huge humble kind late
lazy light lively lone loud lucky modest narrow neat noble odd pale plain proud quick quiet
rare round
"""
NOUNS = """
anchor apple arrow badge barrel basket beach bell boat bottle branch bread bridge brush
button cabin candle canyon castle chair circle cloud coast comet copper cradle desert engine
falcon feather field flame forest garden glacier hammer harbor island jacket kettle ladder
lantern lemon market meadow mirror mountain needle orchard paper pencil pillow planet pocket
river saddle shadow silver spoon statue thunder tunnel valley window
"""
WORDS = tuple(f"{adjective}-{noun}" for adjective in ADJECTIVES.split() for noun in NOUNS.split())
LENGTHS = (4096,)  # tokens, of prompt and answer
SAMPLES = 100  # per length
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic numbers for {key} is: {value}."


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One prompt.

    Attributes:
        text: The prompt without the beginning of the answer.
        prefix: The beginning of the answer.
        answers: Strings that the answer has to contain.
    """

    text: str
    prefix: str
    answers: list[str]


def needles(
    size: int,
    rng: random.Random,
    *,
    keys: int = 1,
    values: int = 1,
    queries: int = 1,
    among_needles: bool = False,
) -> Sample:
    """Return a prompt with numbers that the text gives to keys and then asks for.

    Args:
        size: Number of sentences around the needles.
        rng: Generator.
        keys: Number of keys.
        values: Numbers per key.
        queries: Number of keys that are asked for.
        among_needles: Whether the other sentences are needles with other keys.
    """
    names = rng.sample(WORDS, keys)
    numbers = {name: [_number(rng, 7) for _ in range(values)] for name in names}
    inserted = [NEEDLE.format(key=name, value=x) for name in names for x in numbers[name]]
    rng.shuffle(inserted)
    others = [word for word in WORDS if word not in numbers]
    sentences = [
        NEEDLE.format(key=rng.choice(others), value=_number(rng, 7)) if among_needles else NOISE
        for _ in range(size)
    ]
    context = "\n".join(_insert(sentences, inserted, rng))
    chosen = rng.sample(names, queries)
    query = chosen[0] if queries == 1 else f"{', '.join(chosen[:-1])}, and {chosen[-1]}"
    one = queries * values == 1
    hidden = "A special magic number is" if one else "Some special magic numbers are"
    asked = "What is the special magic number" if one else "What are all the special magic numbers"
    text = (
        f"{hidden} hidden within the following text. Make sure to memorize it. I will quiz you "
        f"about the {'number' if one else 'numbers'} afterwards.\n{context}\n"
        f"{asked} for {query} mentioned in the provided text?"
    )
    prefix = (
        f"The special magic number{'' if one else 's'} for {query} mentioned in the provided text "
        f"{'is' if one else 'are'}"
    )
    answers = [number for name in chosen for number in numbers[name]]
    return Sample(text=text, prefix=prefix, answers=answers)


def _insert(sentences: list[str], hidden: Sequence[str], rng: random.Random) -> list[str]:
    """Return the sentences with others, in their order, at random places."""
    places = sorted(rng.randrange(len(sentences) + 1) for _ in hidden)
    for sentence, place in reversed(list(zip(hidden, places, strict=True))):
        sentences.insert(place, sentence)
    return sentences


def _number(rng: random.Random, digits: int) -> str:
    return str(rng.randrange(10 ** (digits - 1), 10**digits))


def variable_tracking(size: int, rng: random.Random, *, hops: int = 4) -> Sample:
    """Return a prompt with one chain of assignments; a solved example precedes it.

    Args:
        size: Number of sentences around the assignments.
        rng: Generator.
        hops: Assignments of a variable to the next one.
    """
    example = _chain(3, 3, hops, rng)  # shorter names, so that no name is in both
    task = _chain(size, 5, hops, rng)
    solved = f"{example.text} {example.prefix} {' '.join(example.answers)}"
    return Sample(text=f"{solved}\n\n\n{task.text}", prefix=task.prefix, answers=task.answers)


def _chain(size: int, letters: int, hops: int, rng: random.Random) -> Sample:
    names: list[str] = []
    while len(names) <= hops:
        name = "".join(rng.choices(string.ascii_uppercase, k=letters))
        if name not in names:
            names.append(name)
    value = _number(rng, 5)
    assignments = [f"VAR {names[0]} = {value}"]
    assignments += [f"VAR {b} = VAR {a}" for a, b in pairwise(names)]
    context = "\n".join(_insert([NOISE] * size, assignments, rng))
    return Sample(
        text=(
            "Memorize and track the chain(s) of variable assignment hidden in the following text."
            f"\n\n{context}\nQuestion: Find all variables that are assigned the value {value} in "
            "the text above."
        ),
        prefix=(
            "Answer: According to the chain(s) of variable assignment in the text above, "
            f"{len(names)} variables are assigned the value {value}, they are:"
        ),
        answers=names,
    )


# By name: a function of the number of sentences around what is hidden, and the tokens to generate.
KINDS: dict[str, tuple[Callable[[int, random.Random], Sample], int]] = {
    "niah_single": (needles, 128),
    "niah_multikey": (partial(needles, among_needles=True), 128),
    "niah_multivalue": (partial(needles, values=4), 128),
    "niah_multiquery": (partial(needles, keys=4, queries=4), 128),
    "vt": (variable_tracking, 60),
}


def make_samples(
    name: str, tokenizer: Any, *, length: int, count: int = SAMPLES
) -> list[dict[str, Any]]:
    """Return the documents of a task, each of at most ``length`` tokens with its answer.

    Args:
        name: One of ``KINDS``.
        tokenizer: Any tokenizer of transformers.
        length: Tokens of the prompt and of the tokens to generate.
        count: Number of documents.

    Raises:
        ConfigError: The shortest prompt is longer.
    """
    draw, answer_tokens = KINDS[name]
    budget = length - answer_tokens

    def build(size: int, index: int) -> tuple[Sample, int]:
        sample = draw(size, random.Random(f"{name} {length} {index}"))
        prompt = f"{sample.text} {sample.prefix}"
        return sample, len(tokenizer(prompt, verbose=False)["input_ids"])

    low, high = 1, 2  # the largest size that fits, by bisection
    while build(high, 0)[1] <= budget:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if build(middle, 0)[1] <= budget else (low, middle)
    documents = []
    for index in range(count):
        size = low
        sample, tokens = build(size, index)
        while tokens > budget and size > 1:
            size = max(1, size - max(1, size // 64))
            sample, tokens = build(size, index)
        if tokens > budget:
            raise ConfigError(
                f"The shortest prompt of attnzoo_{name} has {tokens} tokens, and "
                f"{answer_tokens} are generated, but max_seq_lengths has {length}; give at least "
                f"{tokens + answer_tokens}"
            )
        documents.append(
            {
                "input": sample.text,
                "gen_prefix": sample.prefix,
                "outputs": sample.answers,
                "length": tokens + answer_tokens,
                "max_length": length,
            }
        )
    return documents


def task_config(
    name: str, tokenizer: Any, lengths: Sequence[int], count: int = SAMPLES
) -> dict[str, Any]:
    """Return a task of lm_eval with the documents of some lengths.

    Args:
        name: One of ``KINDS``.
        tokenizer: Any tokenizer of transformers.
        lengths: Tokens of prompt and answer; each is also the name of a metric.
        count: Number of documents of each length.

    Raises:
        ConfigError: A length is shorter than the shortest prompt.
    """
    from datasets import Dataset

    documents = [x for n in lengths for x in make_samples(name, tokenizer, length=n, count=count)]
    mean = {"aggregation": "mean", "higher_is_better": True}
    generation = {"do_sample": False, "temperature": 0.0, "until": []}
    return {
        "task": f"attnzoo_{name}",
        "output_type": "generate_until",
        "custom_dataset": lambda **_: {"test": Dataset.from_list(documents)},
        "test_split": "test",
        "doc_to_text": "{{input}}",
        "doc_to_target": "{{outputs}}",
        "gen_prefix": "{{gen_prefix}}",
        "target_delimiter": " ",
        "process_results": score,
        "metric_list": [{"metric": str(metric), **mean} for metric in ("score", *lengths)],
        "generation_kwargs": generation | {"max_gen_toks": KINDS[name][1]},
    }


def score(document: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Return the fraction of a document's answers that the model's text contains.

    It is ``score``, and also the metric that has the length as its name.
    """
    text = results[0].lower()
    answers = document["outputs"]
    found = sum(answer.lower() in text for answer in answers) / len(answers)
    return {"score": found, str(document["max_length"]): found}
