"""Generated long-context prompts in the form of RULER, which need no download.

Needles in repeated sentences or among other needles, with a vocabulary of our own. A prompt fills a
number of tokens of a tokenizer with the tokens to generate.
Source: Hsieh et al., 2024, arXiv:2404.06654 (RULER). lm_eval's own ``ruler`` has the other kinds.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
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
ANSWER_TOKENS = 128  # to generate
SAMPLES = 100  # per length
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic numbers for {key} is: {value}."


# By task: the number of keys, of numbers per key and of keys that are asked for, and whether the
# other sentences are needles with other keys
KINDS: Mapping[str, tuple[int, int, int, bool]] = {
    "niah_single": (1, 1, 1, False),
    "niah_multikey": (1, 1, 1, True),
    "niah_multivalue": (1, 4, 1, False),
    "niah_multiquery": (4, 1, 4, False),
}


def draw_prompt(kind: str, size: int, rng: random.Random) -> dict[str, Any]:
    """Return a prompt with numbers that the text gives to keys and then asks for.

    Args:
        kind: One of ``KINDS``.
        size: Number of sentences around the needles.
        rng: Generator.

    Returns:
        ``input``, the prompt; ``gen_prefix``, the beginning of the answer; and ``outputs``, the
        strings that the answer has to contain.
    """
    keys, values, queries, among_needles = KINDS[kind]
    names = rng.sample(WORDS, keys)
    numbers = {name: [_number(rng) for _ in range(values)] for name in names}
    inserted = [NEEDLE.format(key=name, value=x) for name in names for x in numbers[name]]
    rng.shuffle(inserted)
    others = [word for word in WORDS if word not in numbers]
    sentences = [
        NEEDLE.format(key=rng.choice(others), value=_number(rng)) if among_needles else NOISE
        for _ in range(size)
    ]
    places = sorted(rng.randrange(len(sentences) + 1) for _ in inserted)
    for sentence, place in reversed(list(zip(inserted, places, strict=True))):
        sentences.insert(place, sentence)
    context = "\n".join(sentences)
    chosen = rng.sample(names, queries)
    query = chosen[0] if queries == 1 else f"{', '.join(chosen[:-1])}, and {chosen[-1]}"
    one = queries * values == 1
    hidden = "A special magic number is" if one else "Some special magic numbers are"
    asked = "What is the special magic number" if one else "What are all the special magic numbers"
    return {
        "input": (
            f"{hidden} hidden within the following text. Make sure to memorize it. I will quiz you "
            f"about the {'number' if one else 'numbers'} afterwards.\n{context}\n"
            f"{asked} for {query} mentioned in the provided text?"
        ),
        "gen_prefix": (
            f"The special magic number{'' if one else 's'} for {query} mentioned in the provided "
            f"text {'is' if one else 'are'}"
        ),
        "outputs": [number for name in chosen for number in numbers[name]],
    }


def _number(rng: random.Random) -> str:
    return str(rng.randrange(10**6, 10**7))


def make_samples(
    kind: str, tokenizer: Any, *, length: int, count: int = SAMPLES
) -> list[dict[str, Any]]:
    """Return the documents of a task, each of at most ``length`` tokens with its answer.

    Args:
        kind: One of ``KINDS``.
        tokenizer: Any tokenizer of transformers.
        length: Tokens of the prompt and of the tokens to generate.
        count: Number of documents.

    Raises:
        ConfigError: The shortest prompt is longer.
    """
    budget = length - ANSWER_TOKENS

    def build(size: int, index: int) -> tuple[dict[str, Any], int]:
        found = draw_prompt(kind, size, random.Random(f"{kind} {length} {index}"))
        prompt = f"{found['input']} {found['gen_prefix']}"
        return found, len(tokenizer(prompt, verbose=False)["input_ids"])

    low, high = 1, 2  # the largest size that fits, by bisection
    while build(high, 0)[1] <= budget:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if build(middle, 0)[1] <= budget else (low, middle)
    documents = []
    for index in range(count):
        size = low
        found, tokens = build(size, index)
        while tokens > budget and size > 1:
            size = max(1, size - max(1, size // 64))
            found, tokens = build(size, index)
        if tokens > budget:
            raise ConfigError(
                f"The shortest prompt of attnzoo_{kind} has {tokens} tokens, and {ANSWER_TOKENS} "
                f"are generated, but max_seq_lengths has {length}; give at least "
                f"{tokens + ANSWER_TOKENS}"
            )
        documents.append({**found, "length": tokens + ANSWER_TOKENS, "max_length": length})
    return documents


def task_config(
    kind: str, tokenizer: Any, lengths: Sequence[int], count: int = SAMPLES
) -> dict[str, Any]:
    """Return a task of lm_eval with the documents of some lengths.

    Args:
        kind: One of ``KINDS``.
        tokenizer: Any tokenizer of transformers.
        lengths: Tokens of prompt and answer; each is also the name of a metric.
        count: Number of documents of each length.

    Raises:
        ConfigError: A length is shorter than the shortest prompt.
    """
    from datasets import Dataset

    documents = [x for n in lengths for x in make_samples(kind, tokenizer, length=n, count=count)]
    mean = {"aggregation": "mean", "higher_is_better": True}
    generation = {"do_sample": False, "temperature": 0.0, "until": []}
    return {
        "task": f"attnzoo_{kind}",
        "output_type": "generate_until",
        "custom_dataset": lambda **_: {"test": Dataset.from_list(documents)},
        "test_split": "test",
        "doc_to_text": "{{input}}",
        "doc_to_target": "{{outputs}}",
        "gen_prefix": "{{gen_prefix}}",
        "target_delimiter": " ",
        "process_results": score,
        "metric_list": [{"metric": str(metric), **mean} for metric in ("score", *lengths)],
        "generation_kwargs": generation | {"max_gen_toks": ANSWER_TOKENS},
    }


def score(document: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Return the fraction of a document's answers that the model's text contains.

    It is ``score``, and also the metric that has the length as its name.
    """
    text = results[0].lower()
    answers = document["outputs"]
    found = sum(answer.lower() in text for answer in answers) / len(answers)
    return {"score": found, str(document["max_length"]): found}
