"""Generated long-context tasks of lm-evaluation-harness in the form of RULER.

The prompts are those of RULER with a vocabulary of our own, so that nothing is downloaded: needles
in repeated sentences or among other needles, chains of variable assignments, and words to count.
A prompt fills ``max_seq_lengths`` tokens of the model's tokenizer with the tokens to generate.
Source: Hsieh et al., 2024, arXiv:2404.06654 (RULER).

The YAML files of this folder name the functions of this module.
"""

from __future__ import annotations

import math
import random
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

from attnzoo.errors import ConfigError

# Words of prompts: 4,096 pairs of an adjective and a noun, such as ``calm-river``
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

    @property
    def prompt(self) -> str:
        """The prompt with the beginning of the answer, as a model gets it."""
        return f"{self.text} {self.prefix}"


Build = Callable[[int, int, random.Random], Sample]  # of the size, the length and a generator


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of prompt.

    Attributes:
        build: Returns a prompt, given its size, its length in tokens, and a generator. More size
            is a longer prompt.
        least: Smallest size.
        most: Largest size.
        answer_tokens: Tokens that the model generates, ``max_gen_toks`` of the YAML file.
    """

    build: Build
    least: int
    answer_tokens: int
    most: int = 10**7


def _insert(sentences: list[str], needles: Sequence[str], rng: random.Random) -> list[str]:
    """Return the sentences with needles, in their order, at random places."""
    places = sorted(rng.randrange(len(sentences) + 1) for _ in needles)
    for needle, place in reversed(list(zip(needles, places, strict=True))):
        sentences.insert(place, needle)
    return sentences


def needles(
    size: int,
    length: int,
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
        length: Not used.
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
    if queries * values == 1:
        hidden, question = "A special magic number is", "What is the special magic number"
        answer = "The special magic number for {} mentioned in the provided text is"
    else:
        hidden, question = (
            "Some special magic numbers are",
            "What are all the special magic numbers",
        )
        answer = "The special magic numbers for {} mentioned in the provided text are"
    text = (
        f"{hidden} hidden within the following text. Make sure to memorize it. I will quiz you "
        f"about the {'number' if queries * values == 1 else 'numbers'} afterwards.\n{context}\n"
        f"{question} for {query} mentioned in the provided text?"
    )
    answers = [number for name in chosen for number in numbers[name]]
    return Sample(text=text, prefix=answer.format(query), answers=answers)


def _number(rng: random.Random, digits: int) -> str:
    return str(rng.randrange(10 ** (digits - 1), 10**digits))


def variable_tracking(size: int, length: int, rng: random.Random, *, hops: int = 4) -> Sample:
    """Return a prompt with one chain of assignments; a solved example precedes it.

    Args:
        size: Number of sentences around the assignments.
        length: Not used.
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


def common_words(
    size: int, length: int, rng: random.Random, *, short: bool = False, common: int = 10
) -> Sample:
    """Return a numbered list of words of which some are common; a solved example precedes it.

    Args:
        size: Number of different words.
        length: Not used.
        rng: Generator.
        short: Whether words are repeated less often, for short prompts.
        common: Number of common words.
    """
    example_counts, counts = ((3, 1), (6, 1)) if short else ((10, 3), (30, 3))
    words = rng.sample(WORDS, (20 if short else 40) + size)
    split = len(words) - size
    example = _word_list(words[:split], common, *example_counts, rng)
    task = _word_list(words[split:], common, *counts, rng)
    answer = " ".join(f"{i}. {word}" for i, word in enumerate(example.answers, 1))
    return Sample(
        text=f"{example.prompt} {answer}\n{task.text}", prefix=task.prefix, answers=task.answers
    )


def _word_list(
    words: Sequence[str], common: int, often: int, seldom: int, rng: random.Random
) -> Sample:
    listed = [*words[:common]] * often + [*words[common:]] * seldom
    rng.shuffle(listed)
    context = " ".join(f"{i}. {word}" for i, word in enumerate(listed, 1))
    return Sample(
        text=(
            "Below is a numbered list of words. In these words, some appear more often than "
            f"others. Memorize the ones that appear most often.\n{context}\nQuestion: What are the "
            f"{common} most common words in the above list?"
        ),
        prefix=(f"Answer: The top {common} words that appear most often in the list are:"),
        answers=[*words[:common]],
    )


def frequent_words(size: int, length: int, rng: random.Random, *, alpha: float = 2.0) -> Sample:
    """Return a text of coded words whose frequencies follow Zipf's law, to find the top three.

    The k-th word occurs ``size * k**-alpha / zeta(alpha)`` times; the first is ``...``, noise.

    Args:
        size: Number of words, before rounding.
        length: L / 50 different words.
        rng: Generator.
        alpha: Exponent.
    """
    kinds = max(length // 50, 8)
    coded: dict[str, None] = {"...": None}
    while len(coded) < kinds:
        coded["".join(rng.choices(string.ascii_lowercase, k=6))] = None
    zeta = math.fsum(k**-alpha for k in range(1, 10_001)) + 10_000 ** (1 - alpha) / (alpha - 1)
    words = [w for k, w in enumerate(coded, 1) for _ in range(int(size * k**-alpha / zeta))]
    rng.shuffle(words)
    return Sample(
        text=(
            "Read the following coded text and track the frequency of each coded word. Find the "
            f"three most frequently appeared coded words. {' '.join(words)}\nQuestion: Do not "
            "provide any explanation. Please ignore the dots '....'. What are the three most "
            "frequently appeared words in the above coded text?"
        ),
        prefix=(
            "Answer: According to the coded text above, the three most frequently appeared words "
            "are:"
        ),
        answers=list(coded)[1:4],
    )


_CWE = partial(Kind, least=20, most=len(WORDS) - 40, answer_tokens=160)
KINDS = {
    "niah_single": Kind(build=needles, least=1, answer_tokens=128),
    "niah_multikey": Kind(build=partial(needles, among_needles=True), least=1, answer_tokens=128),
    "niah_multivalue": Kind(build=partial(needles, values=4), least=1, answer_tokens=128),
    "niah_multiquery": Kind(build=partial(needles, keys=4, queries=4), least=1, answer_tokens=128),
    "vt": Kind(build=variable_tracking, least=1, answer_tokens=60),
    "cwe": _CWE(build=common_words),
    # below 53, the fourth and the fifth word are equally frequent
    "fwe": Kind(build=frequent_words, least=53, answer_tokens=60),
}
SHORT = {"cwe": _CWE(build=partial(common_words, short=True))}  # where the first does not fit


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
    kind = KINDS[name]
    budget = length - kind.answer_tokens

    def build(size: int, index: int) -> tuple[Sample, int]:
        sample = kind.build(size, length, random.Random(f"{name} {length} {index}"))
        return sample, len(tokenizer(sample.prompt, verbose=False)["input_ids"])

    def fits(size: int) -> bool:
        return build(size, 0)[1] <= budget

    size = _largest(fits, kind)
    if size < kind.least and name in SHORT:
        kind = SHORT[name]
        size = _largest(fits, kind)
    documents = []
    for index in range(count):
        used = max(size, kind.least)
        sample, tokens = build(used, index)
        while tokens > budget and used > kind.least:
            used = max(kind.least, used - max(1, used // 64))
            sample, tokens = build(used, index)
        if tokens > budget:
            raise ConfigError(
                f"The shortest prompt of attnzoo_{name} has {tokens} tokens, and "
                f"{kind.answer_tokens} are generated, but max_seq_lengths has {length}; give at "
                f"least {tokens + kind.answer_tokens}"
            )
        documents.append(
            {
                "index": index,
                "input": sample.text,
                "gen_prefix": sample.prefix,
                "outputs": sample.answers,
                "length": tokens + kind.answer_tokens,
                "max_length": length,
            }
        )
    return documents


def _largest(fits: Callable[[int], bool], kind: Kind) -> int:
    """Return the largest size that fits, by bisection; below the smallest if none does."""
    low, high = kind.least - 1, kind.least
    while high <= kind.most and fits(high):
        low, high = high, 2 * high
    high = min(high, kind.most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


@lru_cache(maxsize=64)
def _dataset(name: str, tokenizer: str, lengths: tuple[int, ...], count: int) -> Any:
    import datasets
    from transformers import AutoTokenizer

    from attnzoo.hf.pretrained import load_pretrained

    loaded = load_pretrained(AutoTokenizer, tokenizer)
    documents = [
        document
        for length in lengths
        for document in make_samples(name, loaded, length=length, count=count)
    ]
    return datasets.Dataset.from_list(documents, split=datasets.Split.TEST)


def dataset(name: str, **given: Any) -> dict[str, Any]:
    """Return the test split of a task, as lm_eval's ``custom_dataset`` does.

    Args:
        name: One of ``KINDS``.
        given: lm_eval's ``--metadata`` and ``--model_args``: ``max_seq_lengths`` (tokens),
            ``num_samples`` (per length), and the name of the ``tokenizer``, or ``pretrained``.

    Raises:
        ConfigError: A value is invalid.
    """
    tokenizer = given.get("tokenizer") or given.get("pretrained")
    if not isinstance(tokenizer, str):
        raise ConfigError(
            f"attnzoo_{name} needs a tokenizer to measure its prompts; give the name or folder of "
            'one: --metadata \'{"tokenizer": "DIR"}\''
        )
    lengths, count = given.get("max_seq_lengths", LENGTHS), given.get("num_samples", SAMPLES)
    lengths = (lengths,) if isinstance(lengths, int) else tuple(lengths)
    for option, value in (("num_samples", count), *(("max_seq_lengths", x) for x in lengths)):
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"{option} takes integers above 0, got {value!r}")
    return {"test": _dataset(name, tokenizer, lengths, count)}


niah_single = partial(dataset, "niah_single")
niah_multikey = partial(dataset, "niah_multikey")
niah_multivalue = partial(dataset, "niah_multivalue")
niah_multiquery = partial(dataset, "niah_multiquery")
vt = partial(dataset, "vt")
cwe = partial(dataset, "cwe")
fwe = partial(dataset, "fwe")


def process_results(document: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Return the fraction of a document's answers that the model's text contains.

    It is ``score``, and also the metric that has the length as its name.
    """
    text = results[0].lower()
    answers = document["outputs"]
    score = sum(answer.lower() in text for answer in answers) / len(answers)
    return {"score": score, str(document["max_length"]): score}
