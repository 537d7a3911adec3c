"""Results of a training run: verdict, evaluation of every model, decoding cost."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from transformers import PreTrainedModel

from attnzoo.evaluation.decoding import measure_decoding
from attnzoo.evaluation.models import max_positions
from attnzoo.hf.convert import original_attention
from attnzoo.training.runs import Run

LENGTHS = (256, 1024, 4096)  # context lengths at which decoding is timed, in tokens
MARGIN = 16  # positions left free for the timed tokens


def collect_results(run: Run, model: PreTrainedModel, lines: dict[str, Any]) -> dict[str, Any]:
    """Return the content of ``recovery.json`` or ``finetuning.json``.

    Args:
        run: The run.
        model: The trained model, with all weights on this process.
        lines: Evaluation results by name: ``softmax``, ``window alone``, ``raw swap``, ``result``
            and any others.
    """
    decodes = not run.is_encoder and run.accelerator.is_main_process
    return {
        "verdict": run.verdict(lines),
        "window": run.window,
        "lines": run.as_dicts(lines),
        "decoding": decoding_cost(model, run) if decodes else {},
        **run.provenance,
    }


@torch.no_grad()
def decoding_cost(model: PreTrainedModel, run: Run) -> dict[str, Any]:
    """Return milliseconds per token and cache bytes by context length, for softmax and the swap."""
    model.eval()
    limit = max_positions(run.path)
    lengths = [n for n in LENGTHS if limit is None or n + MARGIN <= limit]
    text = run.eval_batch.stream
    stream = text.repeat(-(-LENGTHS[-1] // len(text))).to(model.device)
    costs = {}
    for name in ("softmax", "result"):
        with original_attention(model) if name == "softmax" else nullcontext():
            cost = measure_decoding(model, stream, lengths)
        costs[name] = {"milliseconds": cost.decode_ms, "cache_bytes": cost.cache_bytes}
    return costs
