r"""Continue training the embedded model on long contexts, with positions up to 16k tokens.

    python -m benchmarks.pretrain_long --out DIR  # the model that ships
    python -m benchmarks.pretrain_long --start DIR --rows 16384 --tokens 1.3e6 --lr 8e-4 \
        --quiz 0.8 --within 0.3 --answers 20 --query-scale 1.25 --out LONGER  # recalls more at 16k

It starts from the weights of the embedded model with another base of the rotary positions. Most
rows repeat text, and most contain numbers that are assigned to names and asked for later, so that
the model learns to recall at every distance. One CPU core with bfloat16 products takes 3,300
tokens per second in rows of 1,024, and 1,700 in rows of 4,096. A run that is stopped continues
from its last checkpoint when it is started again. docs/benchmarks.md has what was measured.
"""

from __future__ import annotations

import math
import random
import string
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from torch import Tensor
from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM

from attnzoo.evaluation.corpus import (
    BYTE_OFFSET,
    join,
)
from attnzoo.evaluation.generation import (
    make_recall_batch,
    measure_generation,
    measure_recall,
    with_reference,
)
from attnzoo.evaluation.models import EMBEDDED, model_path
from benchmarks.pretrain_tiny import make_optimizers
from tools.python_text import standard_library_files

POSITIONS = 16384
ROPE_THETA = 500_000.0
ROWS = [1024, 4096]  # tokens per row in the first and the second part of training
FIRST_PART = 0.4
STEP_TOKENS = 8192  # tokens per step; one row if it is longer
TOKENS = 7e6  # 45 minutes
ASSIGNMENTS = (  # templates: assign a value to a key; ask for the value
    ("\n{k} = {v}\n", "\n{k} = "),
    ('"{k}": "{v}", ', '"{k}": "'),
    ("\n# {k}: {v}\n", "\n# {k}: "),
    ("\nThe code of {k} is {v}.\n", "\nThe code of {k} mentioned above is "),
    ("\n    {k}={v},\n", "\nassert {k} == "),
    (
        "\nOne of the special magic numbers for {k} is: {v}.\n",
        "\nThe special magic number for {k} mentioned in the provided text is ",
    ),
)
QUIZ = len(ASSIGNMENTS) - 1
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


class RowMaker:
    """Makes rows of training text with repeated segments and needles.

    Args:
        text: The training text.
        seed: Seed of the random generator.
        quiz: Fraction of rows that end with questions about numbers given before.
        within: Fraction of such a row, from its start, that contains all these numbers.
    """

    def __init__(self, text: bytes, seed: int, quiz: float, within: float) -> None:
        self.text = text
        self.random = random.Random(seed)
        self.quiz, self.within = quiz, within
        self.answers: list[slice] = []  # in the last row, to the questions at its end

    def row(self, length: int) -> bytes:
        """Return one row; a third of the rows without a quiz is plain, the others interleaved."""
        kind, others = self.random.random(), 1 - self.quiz
        self.answers = []
        if kind < others / 3:
            return self._cut(length)
        return self._interleaved(length) if kind < others else self._quiz(length)

    def _cut(self, length: int) -> bytes:
        start = self.random.randrange(len(self.text) - length)
        return self.text[start : start + length]

    def _key(self) -> str:
        def word() -> str:
            return "".join(self.random.choices(string.ascii_lowercase, k=self.random.randint(3, 7)))

        joined = self.random.choice("-_").join([word(), word()])
        kind = self.random.random()
        if kind < 0.2:
            return joined.upper()
        return f"{joined}_{self.random.randrange(100)}" if kind < 0.4 else joined

    def _value(self) -> str:
        letters = self.random.choice([string.digits, string.digits, string.ascii_lowercase])
        return "".join(self.random.choices(letters, k=self.random.randint(5, 9)))

    def _distance(self, low: int, high: int) -> int:
        """Draw a distance whose logarithm is uniform."""
        return int(math.exp(self.random.uniform(math.log(low), math.log(high))))

    def _interleaved(self, length: int) -> bytes:
        """Return pieces of text mixed with repeated segments, assignments and questions."""
        draw, row = self.random, bytearray()
        source, place = self._cut(length), 0
        pending: list[tuple[int, bytes]] = []  # where a question is asked, and its text
        while len(row) < length:
            kind = draw.random()
            due = [item for item in pending if item[0] <= len(row)]
            if due:
                pending.remove(due[0])
                row += due[0][1]
            elif kind < 0.4 or len(row) < 128:
                size = draw.randint(24, 160)
                row += source[place : place + size]
                place += size
            elif kind < 0.65:
                size = draw.randint(16, 96)
                first = len(row) - self._distance(64, len(row))
                row += row[first : first + size]
            else:
                key, value = self._key(), self._value()
                given, asked = draw.choice(ASSIGNMENTS)
                row += given.format(k=key, v=value).encode()
                question = (asked.format(k=key) + value).encode()
                for _ in range(draw.randint(1, 2)):
                    pending.append((len(row) + self._distance(48, length), question))
        return bytes(row[:length])

    def _quiz(self, length: int) -> bytes:
        """Return sentences or text with needles, and questions about them to the end of the row."""
        draw = self.random
        given, asked = ASSIGNMENTS[QUIZ if draw.random() < 0.7 else draw.randrange(QUIZ)]
        facts = {self._key(): self._value() for _ in range(draw.choice([1, 4, 16, length // 128]))}
        needles = [given.format(k=key, v=value).strip("\n") for key, value in facts.items()]
        questions = [(asked.format(k=key), value) for key, value in facts.items()]
        draw.shuffle(questions)
        end = "".join(map("".join, questions))[: length // 2]
        place = length - len(end)
        for question, value in questions:
            self.answers.append(slice(place + len(question), place + len(question) + len(value)))
            place += len(question) + len(value)
        filler_length = length - len(end) - sum(len(needle) + 1 for needle in needles)
        filler = [NOISE] * (filler_length // (len(NOISE) + 1))
        if draw.random() < 0.5:
            filler = self._cut(max(filler_length, 1)).decode(errors="replace").split("\n")
        for needle in needles:
            filler.insert(draw.randint(0, int(len(filler) * self.within)), needle)
        row = ("\n".join(filler)).encode()[: length - len(end)] + end.encode()
        return row if len(row) == length else self._cut(length - len(row)) + row


def positions(count: int, length: int, draw: random.Random) -> Tensor:
    """Return positions ``[N, T]``; half of the rows have a gap, so that all positions occur."""
    rows = torch.arange(length).repeat(count, 1)
    for row in rows:
        if draw.random() < 0.5:
            row[draw.randrange(1, length) :] += draw.randrange(POSITIONS - length + 1)
    return rows


def batches(maker: RowMaker, length: int, weight: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows ``[N, T + 1]``, positions ``[N, T]`` and weights ``[N, T + 1]`` of one step."""
    count = max(1, STEP_TOKENS // length)
    tokens, weights = [], torch.ones(count, length + 1)
    for row in weights:
        tokens.append(torch.frombuffer(bytearray(maker.row(length + 1)), dtype=torch.uint8))
        for answer in maker.answers:
            row[answer] = weight
    rows = torch.stack(tokens).long() + BYTE_OFFSET
    return rows, positions(count, length, maker.random), weights


def step_loss(model: LlamaForCausalLM, rows: Tensor, at: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted mean cross-entropy in nats.

    The attention mask of ones states that a gap in the positions does not start another sequence.
    """
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model(
            rows[:, :-1], position_ids=at, attention_mask=torch.ones_like(at), use_cache=False
        )
    loss = F.cross_entropy(hidden.logits.float().transpose(1, 2), rows[:, 1:], reduction="none")
    return (loss * weights[:, 1:]).sum() / weights[:, 1:].sum()


def long_model(start: Path, query_scale: float) -> LlamaForCausalLM:
    """Return a model with positions up to 16k tokens, and scaled attention logits."""
    config = LlamaConfig.from_pretrained(start)
    config.max_position_embeddings = POSITIONS
    config.rope_parameters = {"rope_type": "default", "rope_theta": ROPE_THETA}
    model = LlamaForCausalLM.from_pretrained(start, config=config, dtype=torch.float32)
    for layer in model.model.layers:  # more keys need larger logits, as in YaRN
        layer.self_attn.q_proj.weight.data.mul_(query_scale)
    return model


def save(model: LlamaForCausalLM, out: Path) -> None:
    """Save the model in bfloat16 with its tokenizer."""
    half = LlamaForCausalLM(model.config).to(torch.bfloat16)
    half.load_state_dict(model.state_dict())
    half.save_pretrained(out)
    ByT5Tokenizer(model_max_length=POSITIONS).save_pretrained(out)


def report(out: Path, length: int = ROWS[-1]) -> Iterator[str]:
    """Yield lines about a saved model: loss, recall by distance and generation at one length."""
    model = LlamaForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    batch = make_recall_batch(out, None, length)
    for name, value in measure_recall(model, batch, length).items():
        yield f"{name}: {value}"
    assert batch.generation is not None
    yield str(measure_generation(model, with_reference(batch.generation, model)))


def main(
    out: Annotated[Path, typer.Option(help="folder for the trained model")],
    start: Annotated[str, typer.Option(help="name or folder of the first weights")] = EMBEDDED,
    rows: Annotated[list[int] | None, typer.Option(help="tokens per row; repeatable")] = None,
    tokens: Annotated[float, typer.Option(help="tokens to train on")] = TOKENS,
    minutes: Annotated[float, typer.Option(help="maximum wall-clock time")] = 90.0,
    lr: Annotated[float, typer.Option(help="peak learning rate")] = 2e-3,
    quiz: Annotated[float, typer.Option(help="fraction of rows that end with questions")] = 0.25,
    within: Annotated[float, typer.Option(help="first part of them, with the numbers")] = 1.0,
    answers: Annotated[float, typer.Option(help="weight of their answers in the loss")] = 1.0,
    query_scale: Annotated[float, typer.Option(help="initial factor of queries")] = 1.0,
    checkpoint: Annotated[Path, typer.Option(help="state of the run")] = Path("pretrain_long.pt"),
    seed: int = 0,
) -> None:
    """Train on a number of tokens, warming up and then decaying to zero; save in bfloat16."""
    torch.set_num_threads(1)
    text = join(path.read_bytes() for path in standard_library_files(held_out=False))
    model, lengths = long_model(model_path(start), query_scale), rows or ROWS
    optimizers = make_optimizers(model, "muon", lr)
    step, seen, before, smooth = 0, 0, 0.0, 0.0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        step, seen, before, smooth = state["at"]
        model.load_state_dict(state["model"])
        for optimizer, values in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(values)
    maker = RowMaker(text, seed + step, quiz, within)
    began, saved = time.monotonic() - before, time.monotonic()
    while (done := max(seen / tokens, (time.monotonic() - began) / (60 * minutes))) < 1:
        length = lengths[0] if done < FIRST_PART else lengths[-1]
        loss = step_loss(model, *batches(maker, length, answers))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * min(1.0, (step + 1) / 20) * (1 - done)
            optimizer.step()
            optimizer.zero_grad()
        step, seen = step + 1, seen + max(length, STEP_TOKENS)
        smooth = 0.95 * smooth + 0.05 * loss.item() if step > 1 else loss.item()
        if step % 10 == 0:
            cpu = time.process_time() / 60
            bits = smooth / math.log(2)
            spent = f"{seen / 1e6:.2f}M tokens, {cpu:.1f} CPU minutes"
            print(f"step {step} {done:.1%} {spent}, {bits:.3f} bits", flush=True)
        if time.monotonic() - saved > 240:
            saved = time.monotonic()
            torch.save(
                {
                    "at": [step, seen, saved - began, smooth],
                    "model": model.state_dict(),
                    "optimizers": [x.state_dict() for x in optimizers],
                },
                checkpoint,
            )
    save(model, out)
    print(f"{step} steps, {seen / 1e6:.1f}M tokens")
    for line in report(out):
        print(line, flush=True)


if __name__ == "__main__":
    typer.run(main)
