"""Error of bfloat16 logits of a random Llama, under several attentions.

    python -m benchmarks.sixteen_bits flash linear reformer:chunk_size=16 block_sparse:top_k=4

Each argument is an attention in the syntax of ``--attention``. ``error`` is the norm of the
difference to the float32 logits, relative to their norm. ``same_selection`` is the error of
``block_sparse`` if its bfloat16 layers read the blocks that the float32 layers selected, and
``other_blocks`` is the fraction of queries and heads, by layer, that select other blocks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

import attnzoo
from attnzoo.commands.options import spec_of
from attnzoo.ops.block_sparse import custom_ops
from attnzoo.spec import AttentionSpec

SIZES: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
GAIN = 1.5  # standard deviation of the weights times the square root of the input size


@torch.no_grad()
def logits(spec: AttentionSpec, dtype: torch.dtype, tokens: int) -> Tensor:
    """Return the logits of two random rows; models of all dtypes have the same weights."""
    generator = torch.Generator().manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    for weight in model.parameters():
        if weight.ndim > 1:
            nn.init.normal_(weight, std=GAIN * weight.shape[-1] ** -0.5, generator=generator)
    model = model.to(dtype).eval()
    attnzoo.swap(model, spec)
    ids = torch.randint(1, SIZES["vocab_size"], (2, tokens), generator=generator)
    found: Tensor = model(ids, use_cache=False).logits.double()
    return found


@contextmanager
def selections(select: Callable[..., Tensor]) -> Iterator[None]:
    """Context manager that replaces the operator by which C++ selects blocks."""
    original = custom_ops.CPP.select
    custom_ops.CPP.select = select
    try:
        yield
    finally:
        custom_ops.CPP.select = original


def measure(spec: AttentionSpec, tokens: int) -> dict[str, Any]:
    """Return the errors of one attention."""
    original: Any = custom_ops.CPP.select
    kept: dict[torch.dtype, list[Tensor]] = {}
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        blocks = kept[dtype] = []

        def record(*args: Any, blocks: list[Tensor] = blocks) -> Tensor:
            blocks.append(original(*args))
            return blocks[-1]

        with selections(record):
            found[dtype] = logits(spec, dtype, tokens)
    exact = found[torch.float32]

    def error(x: Tensor) -> float:
        return round(float((x - exact).norm() / exact.norm()), 3)

    row: dict[str, Any] = {"error": error(found[torch.bfloat16])}
    if exact_blocks := kept[torch.float32]:
        pairs = zip(exact_blocks, kept[torch.bfloat16], strict=True)
        row["other_blocks"] = [round(float((a != b).any(-1).float().mean()), 2) for a, b in pairs]
        remaining = iter(exact_blocks)
        with selections(lambda *_: next(remaining)):
            row["same_selection"] = error(logits(spec, torch.bfloat16, tokens))
    return row


def main(
    attention: Annotated[list[str], typer.Argument(help="attentions")],
    tokens: Annotated[int, typer.Option(help="tokens of a row")] = 256,
) -> None:
    """Print a JSON line per attention."""
    for text in attention:
        print(json.dumps({"attention": text, **measure(spec_of(text), tokens)}), flush=True)


if __name__ == "__main__":
    typer.run(main)
