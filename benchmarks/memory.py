"""Compare computed with measured memory: ten configurations, training and decoding.

    python benchmarks/memory.py            # about three minutes on one core
    python benchmarks/memory.py --only 3   # one configuration

The table is that of docs/memory.md.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from attnzoo.compare.workers import OK, Workers
from attnzoo.evaluation.memory import (
    TOTALS,
    MemoryEstimator,
    MemoryUse,
    enable_checkpointing,
    inference,
    training_loss,
)
from attnzoo.evaluation.models import embedded_model_path
from attnzoo.evaluation.timing import profile_allocations
from attnzoo.report.table import Table, format_bytes, format_length
from attnzoo.spec import AttentionSpec

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "vocab_size": 8192,
}
GROUPED: dict[str, Any] = {**SIZES, "num_key_value_heads": 2, "head_dim": 32}
FAMILIES = {
    "GPT-2": (GPT2LMHeadModel, GPT2Config(n_embd=256, n_layer=4, n_head=8, vocab_size=8192)),
    "BERT": (BertForMaskedLM, BertConfig(**SIZES)),
    "Mistral": (MistralForCausalLM, MistralConfig(**GROUPED, sliding_window=512)),
    "Qwen3-MoE": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(**GROUPED, moe_intermediate_size=128, num_experts=8, num_experts_per_tok=2),
    ),
}


class Configuration(NamedTuple):
    """One row of the table."""

    model: str
    attention: str | None
    options: dict[str, Any]
    length: int
    batch: int
    dtype: str = "float32"


CONFIGURATIONS = (
    Configuration("embedded", "flash", {}, 2048, 4),
    Configuration("embedded", "linear", {}, 16384, 1),
    Configuration("embedded", "longformer", {"window": 256}, 8192, 1),
    Configuration("embedded", "gated_linear", {"gate": "gla", "window": 32}, 2048, 2, "bfloat16"),
    Configuration("embedded", "reformer", {}, 8192, 2),
    Configuration("embedded", "block_sparse", {}, 8192, 1),
    Configuration("GPT-2", "softmax", {}, 1024, 2),
    Configuration("BERT", "linformer", {"num_rows": 64}, 512, 8),
    Configuration("Mistral", None, {}, 4096, 1),
    Configuration("Qwen3-MoE", "delta", {}, 2048, 1, "bfloat16"),
)


def make_estimator(row: Configuration, folder: Path) -> MemoryEstimator:
    """Return what computes a row; write the config of its family to the folder, no weights."""
    path = embedded_model_path()
    if row.model in FAMILIES:
        cls, config = FAMILIES[row.model]
        config.architectures = [cls.__name__]
        path = folder / row.model
        config.save_pretrained(path)
    spec = None if row.attention is None else AttentionSpec(row.attention, **row.options)
    return MemoryEstimator(path=path, spec=spec, batch=row.batch, dtype=row.dtype)


def measure(estimator: MemoryEstimator, length: int, computed: MemoryUse) -> dict[str, int | None]:
    """Return the computed memory with what this process really allocates in its place.

    The weights are random, and the optimizer does not run.
    """
    torch.manual_seed(0)
    model = estimator.build(length)
    tokens = torch.randint(model.config.vocab_size, (estimator.batch, length))
    for _ in range(2):  # the first call allocates persistent buffers
        prompt, cache, step = inference(
            model.eval(), tokens, estimator.longest, lambda run: profile_allocations(run)[0]
        )
    forward = training_loss(model.train(), tokens, estimator.bf16)
    kept, peak = measure_training(model, forward)
    again = measure_training(model, forward) if enable_checkpointing(model) else None
    use = replace(
        computed,
        **{"activations": kept, "peaks": (peak,), "prompt": prompt, "cache": cache, "step": step},
        activations_checkpointed=again and again[0],
        peaks_checkpointed=again and (again[1],),
    )
    return use.to_dict()


def measure_training(model: PreTrainedModel, forward: Callable[[], Tensor]) -> tuple[int, int]:
    """Return the bytes that a forward pass keeps, and the peak of forward + backward."""
    for _ in range(2):  # the profiler counts only those blocks as freed that it saw before
        model.zero_grad(set_to_none=True)
        kept = profile_allocations(forward)[1]
        peak = profile_allocations(lambda: forward().backward())[0]
    return kept, peak


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", type=int, help="number of a configuration, from 1")
    only = parser.parse_args().only
    rows = []
    for number, row in enumerate(CONFIGURATIONS, 1):
        if only not in (None, number):
            continue
        with tempfile.TemporaryDirectory() as folder:
            estimator = make_estimator(row, Path(folder))
            use = estimator.at(row.length)
            computed = use.to_dict()
            workers = Workers(timeout=600, memory_bytes=12 * 2**30)
            result = workers.run(measure, estimator, row.length, use)
        name = f"{row.model}, {estimator.attention}"
        size = f"{format_length(row.length)} x {row.batch}, {row.dtype}"
        if result["status"] != OK:
            raise SystemExit(f"{name}, {size}: {result}")
        real = result
        cells = [
            "-"
            if computed[key] is None
            else f"{format_bytes(real[key])}, {ratio(computed, real, key)}"
            for key in ("activations", *TOTALS)
        ]
        rows.append([name, size, *cells])
        print(rows[-1], flush=True)
    columns = ["model, attention", "tokens x rows", "activations", *TOTALS]
    print(Table(columns=columns, rows=rows).markdown())


def ratio(computed: dict[str, Any], real: dict[str, Any], key: str) -> str:
    """Return computed / measured."""
    return f"{computed[key] / real[key]:.3f}"


if __name__ == "__main__":
    main()
