"""The account of a trained model: every line, each branch, what decoding costs, and the verdict."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from attnzoo.demo.measure import Result, measure_decoding
from attnzoo.demo.text import longest_context
from attnzoo.integrations.convert import own_attention
from attnzoo.training.runs import Run

LENGTHS = (256, 1024, 4096)  # tokens after which a step of decoding is timed


def account(run: Run, model: PreTrainedModel, lines: dict[str, Any]) -> dict[str, Any]:
    """Return all that is told of a run's result, as plain data.

    Args:
        run: The run.
        model: Its result, whole on this process.
        lines: ``softmax``, ``window alone``, ``raw swap``, ``result`` and what else was judged.
    """
    decodes = not run.encoder and run.accelerator.is_main_process
    return {
        "verdict": run.verdict(lines),
        "window": run.window,
        "lines": run.as_data(lines),
        "decoding": decoding(model, run) if decodes else {},
        **run.made_from,
    }


@torch.no_grad()
def decoding(model: PreTrainedModel, run: Run) -> dict[str, Any]:
    """Return milliseconds a token and bytes of cache after so many tokens, softmax and swap."""
    model.eval()
    longest = longest_context(run.path)
    lengths = [n for n in LENGTHS if longest is None or n + 16 <= longest]
    text = run.judged.stream
    stream = text.repeat(-(-LENGTHS[-1] // len(text))).to(model.device)
    found = {}
    for name in ("softmax", "result"):
        result = Result(label=name, spec={})
        if name == "softmax":
            with own_attention(model):
                measure_decoding(model, stream, lengths, result, lambda: None)
        else:
            measure_decoding(model, stream, lengths, result, lambda: None)
        found[name] = {"milliseconds": result.decode_ms, "cache_bytes": result.cache_bytes}
    return found
