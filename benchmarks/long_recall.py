"""Recall of numbers by the long embedded model, by distance, under several attentions.

    python -m benchmarks.long_recall softmax flash:window=256 block_sparse plan.json

Each argument is an attention in the syntax of ``--attention``, or a file of ``attnzoo plan``. The
model is not trained after the swap. A text assigns a number of seven digits to a name and asks for
it later. There is one JSON line per attention. ``numbers`` is the fraction of numbers that greedy
generation repeats without an error, by distance in tokens. ``digits`` is the fraction of correct
digits among those whose preceding digits are all correct. ``of_first`` is the ratio of repeated
numbers to those of the first attention, over all distances, with the 95% interval of a bootstrap
over rows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

from attnzoo.commands.options import spec_of
from attnzoo.evaluation.corpus import read_documents, string_tokenizer
from attnzoo.evaluation.generation import Needles, correct_tokens
from attnzoo.evaluation.models import EMBEDDED_LONG, load_swapped, model_path
from attnzoo.spec import AttentionSpec

DISTANCES = [1024, 2048, 4096]
BATCH = 16  # rows per batch
DRAWS = 10_000  # samples of the bootstrap


def read_attention(text: str) -> AttentionSpec:
    """Parse an attention, or read the one in a plan."""
    if text.endswith(".json"):
        return AttentionSpec.from_dict(json.loads(Path(text).read_text("utf-8"))["spec"])
    return spec_of(text)


def relative(right: Tensor, first: Tensor) -> list[float]:
    """Return the ratio of the means of two vectors ``[N]``, and its 95% interval."""
    generator = torch.Generator().manual_seed(0)
    draws = torch.randint(len(right), (DRAWS, len(right)), generator=generator)
    ratios = right[draws].mean(1) / first[draws].mean(1)
    bounds = ratios[ratios.isfinite()].quantile(torch.tensor([0.025, 0.975]))
    return [round(float(x), 3) for x in (right.mean() / first.mean(), *bounds)]


def main(
    attention: Annotated[list[str], typer.Argument(help="attentions, or files of a plan")],
    distance: Annotated[list[int] | None, typer.Option(help="tokens; repeatable")] = None,
    rows: Annotated[int, typer.Option(help="numbers per distance")] = 16,
    model: Annotated[str, typer.Option(help="name or folder of a model")] = EMBEDDED_LONG,
) -> None:
    """Print a JSON line per attention."""
    path = model_path(model)
    encode = string_tokenizer(path)
    tokens, needles = encode(read_documents(None)[0]), Needles(encode, rows)
    first = None
    for name in attention:
        swapped = load_swapped(path, read_attention(name))
        numbers, digits, found = {}, {}, []
        for length in distance or DISTANCES:
            prompts = needles.rows([tokens], length, torch.Generator().manual_seed(0))
            size = needles.answer_tokens
            parts = [correct_tokens(swapped, x, size) for x in prompts.split(BATCH)]
            right = torch.cat(parts)
            found.append(right.all(1).float())
            first_wrong = right.int().cumprod(1).sum(1)
            numbers[length] = round(float(right.all(1).float().mean()), 3)
            asked_digits = (first_wrong + 1).clamp(max=right.shape[1]).sum()
            digits[length] = round(float(first_wrong.sum() / asked_digits), 3)
        all_found = torch.cat(found)
        first = all_found if first is None else first
        ratio = relative(all_found, first)
        line = {"attention": name, "numbers": numbers, "digits": digits, "of_first": ratio}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    typer.run(main)
