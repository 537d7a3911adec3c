"""Time to decode one token with the embedded model under several swaps, in alternation.

``python -m benchmarks.decoding [--tokens 256]``: one core; the table has
times relative to ``flash``.
"""

from __future__ import annotations

from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

import attnzoo
from attnzoo.evaluation.models import embedded_model_path
from attnzoo.evaluation.timing import Run, time_together
from attnzoo.hf.seam import cache_argument

SWAPS = {
    "flash": attnzoo.AttentionSpec("flash"),
    "linear": attnzoo.AttentionSpec("linear"),
    "gated_linear": attnzoo.AttentionSpec("gated_linear"),
    "linear, hedgehog, window 32": attnzoo.AttentionSpec(
        "linear", feature_map="hedgehog", window=32
    ),
    "gated_linear, window 32": attnzoo.AttentionSpec("gated_linear", window=32),
    "delta, window 32": attnzoo.AttentionSpec("delta", window=32),
}


@torch.no_grad()
def main(
    tokens: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 256,
    rounds: Annotated[int, typer.Option(help="Number of measurements of each model.")] = 9,
) -> None:
    """Time one token of each model in alternation, and print the medians."""
    torch.set_num_threads(1)
    prompt = torch.randint(0, 250, (1, tokens), generator=torch.Generator().manual_seed(0))
    runs = {name: decoder(spec, prompt) for name, spec in SWAPS.items()}
    timings = time_together(runs, rounds=rounds)
    table = Table("swap", "ms", "of flash")
    for name, timing in timings.items():
        share = 1 / timing.times_faster_than(timings["flash"])
        table.add_row(name, f"{timing.median_ms:.2f}", f"{share:.2f}")
    Console().print(table)


def decoder(spec: attnzoo.AttentionSpec, prompt: Tensor) -> Run:
    """Return a function that decodes the next token with the embedded model under a swap."""
    model = AutoModelForCausalLM.from_pretrained(embedded_model_path()).eval()
    attnzoo.swap(model, spec)
    cache = DynamicCache(config=model.config)
    model(prompt, **cache_argument(cache))
    return lambda: model(prompt[:, :1], **cache_argument(cache))


if __name__ == "__main__":
    typer.run(main)
