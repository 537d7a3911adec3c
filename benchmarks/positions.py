"""Loss by position before and after rotary positions are scaled, on the embedded model.

    python benchmarks/positions.py

The model was trained on rows of 512 bytes. Rows of 4096 held-out bytes show the loss of each method
within and beyond that length.
"""

from __future__ import annotations

import itertools
import math
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM

from attnzoo.evaluation.corpus import byte_tokens, cut_rows, held_out_files, join
from attnzoo.evaluation.models import embedded_model_path
from attnzoo.evaluation.rows import losses_of, predictions

BUCKETS = (0, 256, 512, 1024, 2048, 4096)


def main(
    rows: Annotated[int, typer.Option(help="held-out rows")] = 8,
    threads: Annotated[int, typer.Option(help="threads of torch")] = 1,
) -> None:
    """Print bits per byte by position, for the model as it is and extended by every method."""
    torch.set_num_threads(threads)
    text = byte_tokens(join(held_out_files()))
    chosen = cut_rows([text], rows, BUCKETS[-1], torch.Generator().manual_seed(0))
    table = Table("positions", *(f"to {end}" for end in BUCKETS[1:]))
    for method in (None, "linear", "dynamic", "yarn"):
        config = AutoConfig.from_pretrained(embedded_model_path())
        if method is not None:
            before = config.max_position_embeddings
            scaling = {"rope_type": method, "factor": BUCKETS[-1] / before}
            if method == "yarn":
                scaling["original_max_position_embeddings"] = before
            config.rope_parameters = config.rope_parameters | scaling
            if method != "dynamic":  # it reads the length of training from the config
                config.max_position_embeddings = BUCKETS[-1]
        model = AutoModelForCausalLM.from_pretrained(
            embedded_model_path(), config=config, dtype=torch.float32
        )
        predicted = predictions(model.eval(), chosen, 1)
        losses = torch.cat([losses_of(row, logits)[:, 1:] for row, logits in predicted])
        bits = [
            float(losses[:, start:end].mean()) / math.log(2)
            for start, end in itertools.pairwise(BUCKETS)
        ]
        table.add_row(method or "as it is", *(f"{value:.3f}" for value in bits))
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
