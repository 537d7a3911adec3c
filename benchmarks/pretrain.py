r"""Train an embedded model that answers questions over 4,096 tokens: a byte-level Llama.

    python -m benchmarks.pretrain --out DIR  # continues from its checkpoint
    python -m benchmarks.pretrain --out DIR --only-evaluate

The text is the source of the Python standard library. Rows are plain text, text with repeated
segments, and text with numbers and words that are given to names and asked for later, some of them
through another name. Rows grow from 512 to 4,096 tokens. Names and values of the evaluation are
held out by a hash, and its sentences do not occur in training.

Training takes about nine hours of one CPU core in float32. ``--minutes`` bounds a session, and the
next one continues. Muon (matrices) and AdamW (the rest) share one schedule: a constant rate, and a
linear decay over the last 30% of the tokens.
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
    add_repeats,
    byte_tokens,
    cut_rows,
    held_out_files,
    is_held_out,
    join,
)
from attnzoo.evaluation.rows import Rows
from tools.python_text import standard_library_files

CONTEXT = 4096
STAGES = ((512, 24e6), (1024, 6e6), (2048, 5e6), (4096, 7e6))  # tokens a row, tokens in all
STEP_TOKENS = 16384
ANSWER_WEIGHT = 6.0  # of the tokens of an answer in the loss
DECAY = 0.3  # share of the tokens over which the rate falls to zero

# Ways to give a value to a name, and to ask for it; {v} follows at the end of a question
CODE_FACTS = ("{k} = {v}", "{k}: int = {v}", "    {k}={v},", '"{k}": {v},', "#define {k} {v}",
              "{k}\t{v}", "set {k} {v}", "self.{k} = {v}", "# {k}: {v}")  # fmt: skip
CODE_QUESTIONS = ("assert {k} == ", ">>> {k}\n", "print({k})  # ", "{k} == ", "return {k}  # ")
PROSE_FACTS = ("The {n} of {k} is {v}.", "{k} has {n} {v}.", "For {k}, the {n} is {v}.",
               "Remember that {k} stands for {v}.", "{v} is the {n} of {k}.", "Use {v} for {k}.",
               "{k} got {v} as its {n}.", "We call {v} the {n} of {k}.",
               "{k}: {n} {v}.")  # fmt: skip
PROSE_QUESTIONS = ("What is the {n} of {k}? It is ", "The {n} of {k} given above is ",
                   "Question: {k}? Answer: ", "As said before, the {n} of {k} was ",
                   "Recall {k}: ", "Which {n} has {k}? ", "We read that {k} has {n} ")  # fmt: skip
NOUNS = ("code", "number", "price", "key", "size", "port", "weight", "secret", "index", "score")
FILLERS = ("The train is late. Rain falls on the roof. A dog sleeps near the door.",
           "Water is wet and stones are hard. Birds sing at dawn.",
           "One page follows another. Nobody reads them all.")  # fmt: skip


class RowMaker:
    """Makes rows of training text.

    Args:
        text: The training text.
        seed: Seed of the random generator.
    """

    def __init__(self, text: bytes, seed: int) -> None:
        self.text = text
        self.random = random.Random(seed)
        self.answers: list[slice] = []  # of the last row

    def row(self, length: int) -> bytes:
        """Return one row; :attr:`answers` says where its answers are."""
        self.answers = []
        kind = self.random.random()
        if kind < 0.3:
            return self._cut(length)
        return self._repeats(length) if kind < 0.5 else self._facts(length)

    def _cut(self, length: int) -> bytes:
        start = self.random.randrange(len(self.text) - length)
        return self.text[start : start + length]

    def _log_uniform(self, low: int, high: int) -> int:
        return int(math.exp(self.random.uniform(math.log(low), math.log(high))))

    def _repeats(self, length: int) -> bytes:
        """Return text in which segments occur again at every distance from 64 tokens."""
        draw, row = self.random, bytearray()
        source, place = self._cut(length), 0
        while len(row) < length:
            size = draw.randint(48, 200)
            row += source[place : place + size]
            place += size
            if len(row) > 192:
                first = len(row) - self._log_uniform(96, len(row))
                row += row[first : first + draw.randint(24, 140)]
        return bytes(row[:length])

    def name(self) -> str:
        """Draw a name of the training set."""
        draw = self.random

        def word() -> str:
            return "".join(draw.choices(string.ascii_lowercase, k=draw.randint(2, 7)))

        while True:
            name = word()
            if draw.random() < 0.6:
                name = draw.choice("-_").join([name, word()])
            if draw.random() < 0.15:
                name = name.upper()
            if not is_held_out(name):
                return name

    def value(self) -> str:
        """Draw a value of the training set."""
        draw = self.random
        while True:
            kind = draw.random()
            letters = string.digits if kind < 0.8 else string.ascii_lowercase
            value = "".join(draw.choices(letters, k=4 if kind < 0.55 else draw.randint(3, 8)))
            if not is_held_out(value):
                return value

    def _facts(self, length: int) -> bytes:
        """Return text with facts; questions follow at every distance, and at the end of the row."""
        draw, code = self.random, self.random.random() < 0.5
        facts, questions = (CODE_FACTS, CODE_QUESTIONS) if code else (PROSE_FACTS, PROSE_QUESTIONS)
        count = min(draw.choice([1, 2, 4, 8, 8, 12, 16]), length // 64)
        uniform = draw.random() < 0.6  # one sentence for all facts of a row, as needles have
        chains = draw.choice([0.0, 0.0, 0.4, 0.8])
        fact, noun = draw.choice(facts), draw.choice(NOUNS)
        given: list[tuple[str, str, str]] = []  # name, what it is set to, and its value
        for _ in range(count):
            earlier = draw.choice(given) if given and draw.random() < chains else None
            value = self.value() if earlier is None else earlier[2]
            given.append((self.name(), value if earlier is None else earlier[0], value))
        sentences = [
            (fact if uniform else draw.choice(facts)).format(k=name, v=shown, n=noun)
            for name, shown, _ in given
        ]
        asked = [
            (draw.choice(questions).format(k=name, n=noun), value)
            for name, _, value in draw.choices(given, k=min(2 * count, length // 128) + 1)
        ]
        return self._compose(length, sentences, [name for name, *_ in given], asked)

    def _compose(
        self, length: int, facts: list[str], names: list[str], asked: list[tuple[str, str]]
    ) -> bytes:
        """Return a row of filler with facts in order; a question comes after its fact."""
        draw = self.random
        size = sum(len(x) + 1 for x in facts) + sum(len(q) + len(v) + 1 for q, v in asked)
        filler_length = max(length - size, 0)
        if draw.random() < 0.25:
            sentence = draw.choice(FILLERS)
            filler = [sentence] * (filler_length // (len(sentence) + 1) + 1)
        else:
            filler = self._cut(filler_length + 1).decode(errors="replace").split("\n")
        within = draw.choice([0.2, 0.5, 0.9, 1.0])
        places = sorted(draw.randint(0, int(len(filler) * within)) for _ in facts)
        at_end = draw.random() < 0.6
        late = [
            len(filler) if at_end else draw.randint(places[self._fact_of(q, names)], len(filler))
            for q, _ in asked
        ]
        items: list[tuple[int, int, str, str]] = []
        items += [(p, 0, fact, "") for p, fact in zip(places, facts, strict=True)]
        items += [(p, 1, q, v) for p, (q, v) in zip(late, asked, strict=True)]
        items.sort(key=lambda item: item[:2])
        row, answers = bytearray(), []
        lines = iter([*items, (len(filler) + 1, 2, "", "")])
        following = next(lines)
        for number in range(len(filler) + 1):
            while following[0] == number:
                row += following[2].encode()
                if following[3]:
                    answers.append((len(row), len(following[3])))
                    row += following[3].encode()
                row += b"\n"
                following = next(lines)
            if number < len(filler):
                row += filler[number].encode() + b"\n"
        cut = max(len(row) - length, 0)  # the end of a row has its questions
        self.answers = [
            slice(start - cut, start - cut + size) for start, size in answers if start >= cut
        ]
        row = row[cut:]
        return bytes(row) + self._cut(length - len(row)) if len(row) < length else bytes(row)

    @staticmethod
    def _fact_of(question: str, names: list[str]) -> int:
        """Return the number of the last fact whose name the question has."""
        return max(number for number, name in enumerate(names) if name in question)


def positions(count: int, length: int, draw: random.Random) -> Tensor:
    """Return positions ``[N, T]``; a quarter of the rows have a gap."""
    rows = torch.arange(length).repeat(count, 1)
    for row in rows:
        if draw.random() < 0.25 and length < CONTEXT:
            row[draw.randrange(1, length) :] += draw.randrange(CONTEXT - length + 1)
    return rows


def batch(maker: RowMaker, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows ``[N, T + 1]``, positions ``[N, T]`` and weights ``[N, T + 1]`` of one step."""
    count = max(1, STEP_TOKENS // length)
    tokens, weights = [], torch.ones(count, length + 1)
    for row in weights:
        tokens.append(torch.frombuffer(bytearray(maker.row(length + 1)), dtype=torch.uint8))
        for answer in maker.answers:
            row[answer] = ANSWER_WEIGHT
    return (
        torch.stack(tokens).long() + BYTE_OFFSET,
        positions(count, length, maker.random),
        weights,
    )


def step_loss(model: LlamaForCausalLM, rows: Tensor, at: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted mean cross-entropy in nats; a gap in positions starts no document."""
    ones = torch.ones_like(at)
    logits = model(rows[:, :-1], position_ids=at, attention_mask=ones, use_cache=False).logits
    loss = F.cross_entropy(logits.transpose(1, 2), rows[:, 1:], reduction="none")
    return (loss * weights[:, 1:]).sum() / weights[:, 1:].sum()


def make_model() -> LlamaForCausalLM:
    """Return the model with random weights: 16 key heads in four layers, 2.95M parameters."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=384,
            hidden_size=256,
            intermediate_size=416,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=64,
            max_position_embeddings=CONTEXT,
            rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=1,
            pad_token_id=0,
        )
    )


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al., 2024) with its iteration in float32, for CPUs without bfloat16.

    The update has the root mean square of AdamW's (arXiv:2502.16982).
    """

    def __init__(self, matrices: list[torch.nn.Parameter], lr: float) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": 0.95})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the matrices."""
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                if "mean" not in state:
                    state["mean"] = torch.zeros_like(weight)
                state["mean"].lerp_(weight.grad, 1 - group["momentum"])
                update = weight.grad.lerp(state["mean"], group["momentum"])
                scale = 0.2 * math.sqrt(max(weight.shape))
                weight.mul_(1 - 0.01 * group["lr"])
                weight.add_(_orthogonal(update), alpha=-group["lr"] * scale)


def _orthogonal(x: Tensor) -> Tensor:
    """Return about the nearest matrix with orthogonal rows (five Newton-Schulz iterations)."""
    tall = x.shape[0] > x.shape[1]
    x = x.mT if tall else x
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.mT if tall else x


def make_optimizers(model: LlamaForCausalLM, lr: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the layers, and AdamW for the rest."""
    inner = {n: p for n, p in model.named_parameters() if p.ndim == 2 and ".layers." in n}
    others = [p for n, p in model.named_parameters() if n not in inner]
    adamw = torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    return [Muon(list(inner.values()), lr), adamw]


def row_length(seen: float) -> int:
    """Return the tokens of a row after ``seen`` tokens of training."""
    for length, tokens in STAGES:
        if seen < tokens:
            return length
        seen -= tokens
    return CONTEXT


def save(model: LlamaForCausalLM, out: Path) -> None:
    """Save the model in bfloat16 with its tokenizer."""
    half = LlamaForCausalLM(model.config).to(torch.bfloat16)
    half.load_state_dict(model.state_dict())
    half.save_pretrained(out)
    ByT5Tokenizer(model_max_length=CONTEXT).save_pretrained(out)


# --- Evaluation: names, values and sentences that training does not have


def _held_out(draw: random.Random, letters: str, low: int, high: int) -> str:
    while True:
        word = "".join(draw.choices(letters, k=draw.randint(low, high)))
        if is_held_out(word):
            return word


def question_row(text: str, length: int, keys: int, hops: int, draw: random.Random) -> bytes:
    """Return a row that ends with a question and its answer of four digits.

    Args:
        text: Held-out text.
        length: Tokens of the row.
        keys: Number of names with a value.
        hops: 1: the value of a name is asked for; 2: that of a name that was set to another one.
        draw: The random generator.
    """
    values = [_held_out(draw, string.digits, 4, 4) for _ in range(keys)]
    names = [_held_out(draw, string.ascii_lowercase, 5, 9) for _ in range(keys)]
    facts = [f"VAR {name} := {value}" for name, value in zip(names, values, strict=True)]
    if hops == 1:
        facts = [
            f"One of the special magic numbers for {name} is: {value}."
            for name, value in zip(names, values, strict=True)
        ]
    chosen = draw.randrange(keys)
    name = names[chosen]
    if hops == 2:
        others = [_held_out(draw, string.ascii_lowercase, 5, 9) for _ in range(keys)]
        facts += [f"VAR {other} := {name}" for other, name in zip(others, names, strict=True)]
        name = others[chosen]
    question = (
        f"\nThe special magic number for {name} mentioned in the provided text is: "
        if hops == 1
        else f"\nThe variable {name} contains the value "
    )
    size = length - len(question) - 4 - sum(len(fact) + 1 for fact in facts)
    start = draw.randrange(len(text) - size)
    lines = text[start : start + size].split("\n")
    for place, fact in reversed(list(zip(
        sorted(draw.randint(0, len(lines)) for _ in facts), facts, strict=True
    ))):  # fmt: skip
        lines.insert(place, fact)
    row = "\n".join(lines).encode("latin-1", "replace")
    return row[: length - len(question) - 4] + question.encode() + values[chosen].encode()


@torch.no_grad()
def answers(model: LlamaForCausalLM, length: int, keys: int, hops: int, count: int) -> float:
    """Return the fraction of questions whose four digits are the most probable ones, greedily."""
    text = join(held_out_files()).decode("latin-1")
    draw, right = random.Random(f"{length} {keys} {hops}"), 0
    for _ in range(count):
        row = torch.tensor([list(question_row(text, length, keys, hops, draw))]) + BYTE_OFFSET
        hidden = model.model(row[:, :-1], use_cache=False).last_hidden_state[:, -4:]
        right += bool((model.lm_head(hidden).argmax(-1) == row[:, -4:]).all())
    return right / count


@torch.no_grad()
def bits(model: LlamaForCausalLM, length: int, rows: int) -> tuple[float, float]:
    """Return bits per byte of held-out rows, and of second copies in rows with a repeat."""
    generator = torch.Generator().manual_seed(1)
    plain = cut_rows([byte_tokens(join(held_out_files()))], rows, length, generator).tokens
    twice = Rows.of_documents(plain.clone())
    repeats = add_repeats(twice, generator)

    def losses(batch: Tensor) -> Tensor:
        parts = []
        for row in batch.split(max(1, 8192 // length)):
            logits = model(row[:, :-1], use_cache=False).logits
            parts.append(F.cross_entropy(logits.mT, row[:, 1:], reduction="none"))
        return torch.cat(parts) / math.log(2)

    copies = [
        loss[r.second : r.second + r.length - 1]
        for loss, r in zip(losses(twice.tokens), repeats, strict=True)
        if r is not None
    ]
    return float(losses(plain).mean()), float(torch.cat(copies).mean())


def report(model: LlamaForCausalLM, length: int, questions: int) -> Iterator[str]:
    """Yield lines about loss, recall and answers at lengths up to ``length``."""
    model.eval()
    for tokens in sorted({512, length}):
        plain, copies = bits(model, tokens, max(16, 65536 // tokens))
        yield f"{tokens} tokens: {plain:.3f} bits per byte, second copies {copies:.3f}"
        for keys, hops in ((1, 1), (8, 1), (1, 2), (4, 2)):
            right = answers(model, tokens, keys, hops, questions)
            yield f"{tokens} tokens: {keys} keys, {hops} hops: {right:.1%} of {questions}"
    model.train()


def main(
    out: Annotated[Path, typer.Option(help="folder for the trained model")],
    minutes: Annotated[float, typer.Option(help="maximum wall-clock time of this session")] = 600.0,
    lr: Annotated[float, typer.Option(help="peak learning rate")] = 4e-3,
    questions: Annotated[int, typer.Option(help="questions a task in the evaluation")] = 512,
    only_evaluate: Annotated[bool, typer.Option(help="evaluate the checkpoint")] = False,
    checkpoint: Annotated[Path | None, typer.Option(help="default: OUT/checkpoint.pt")] = None,
    seed: int = 0,
) -> None:
    """Train until the tokens of all stages are seen; save in bfloat16 and evaluate."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    text = join(path.read_bytes() for path in standard_library_files(held_out=False))
    model, total = make_model(), sum(tokens for _, tokens in STAGES)
    optimizers = make_optimizers(model, lr)
    step, seen, cpu, smooth = 0, 0.0, 0.0, 0.0
    checkpoint = checkpoint or out / "checkpoint.pt"
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        step, seen, cpu, smooth = state["at"]
        model.load_state_dict(state["model"])
        for optimizer, values in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(values)
    maker = RowMaker(text, seed + step)
    began, saved, spent = time.monotonic(), time.monotonic(), cpu - time.process_time() / 3600
    while seen < total and time.monotonic() - began < 60 * minutes and not only_evaluate:
        length = row_length(seen)
        loss = step_loss(model, *batch(maker, length))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        rate = lr * min(1.0, (step + 1) / 50, (total - seen) / (DECAY * total))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()
        step, seen = step + 1, seen + max(length, STEP_TOKENS)
        smooth = 0.95 * smooth + 0.05 * loss.item() if step > 1 else loss.item()
        cpu = spent + time.process_time() / 3600
        if step % 10 == 0:
            at = f"step {step}, {seen / 1e6:.2f}M tokens, {cpu:.2f} core hours"
            print(f"{at}, {smooth / math.log(2):.3f} bits", flush=True)
        if time.monotonic() - saved > 300 or seen >= total:
            saved = time.monotonic()
            _write_checkpoint(checkpoint, [step, seen, cpu, smooth], model, optimizers)
        if step % 200 == 0:
            for line in report(model, length, 32):
                print(f"    {line}", flush=True)
    if not only_evaluate:
        _write_checkpoint(checkpoint, [step, seen, cpu, smooth], model, optimizers)
        save(model, out)
    for line in report(
        LlamaForCausalLM.from_pretrained(out, dtype=torch.float32), CONTEXT, questions
    ):
        print(line, flush=True)


def _write_checkpoint(
    path: Path, at: list[float], model: LlamaForCausalLM, optimizers: list[torch.optim.Optimizer]
) -> None:
    state = {
        "at": at,
        "model": model.state_dict(),
        "optimizers": [x.state_dict() for x in optimizers],
    }
    torch.save(state, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


if __name__ == "__main__":
    typer.run(main)
