"""Block-sparse attention: quality on the embedded model, time against SDPA, and decoding.

    python -m benchmarks.block_sparse quality
    python -m benchmarks.block_sparse indexer     # train an indexer for 64 of 512 keys; minutes
    python -m benchmarks.block_sparse prefill     # against SDPA at 4k, 16k, and 64k (one head)
    python -m benchmarks.block_sparse sizes       # block sizes, forward, at 16k tokens
    python -m benchmarks.block_sparse decode      # one token after 16k and 64k, in a model

Quality is the fraction of the gap between a 32-token window and softmax that a selection closes;
only ``indexer`` trains. Each timed query attends to at most 963 keys, or 978 with query blocks of
16. The calls of a comparison are timed in alternation.
"""

from __future__ import annotations

import itertools
import json
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import typer
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import attnzoo
from attnzoo.contract.masks import AttentionMask
from attnzoo.evaluation.models import embedded_model_path, load_swapped
from attnzoo.evaluation.quality import evaluate_rows, make_eval_batch
from attnzoo.evaluation.timing import time_together
from attnzoo.hf.seam import cache_argument
from attnzoo.ops.block_sparse.api import block_sparse_attention
from attnzoo.ops.block_sparse.cpu import block_sparse as cpp
from attnzoo.ops.block_sparse.index_keys import pack_queries
from attnzoo.ops.block_sparse.options import (
    IndexTensors,
    SelectionOptions,
    SparseCall,
    SparseOptions,
)
from attnzoo.ops.block_sparse.selection import MEAN, select_blocks, summarize
from attnzoo.spec import AttentionSpec
from attnzoo.training.arguments import RecoveryArguments
from attnzoo.training.loading import load_causal
from attnzoo.training.recover import recover
from benchmarks.recover import data

LONG: dict[str, Any] = {"window": 64, "block_size": 64, "top_k": 13}  # at most 963 keys per query
SIZES = [(64, 13), (32, 27), (8, 64), (8, 32), (8, 12)]  # block_size and top_k
INDEXER: dict[str, Any] = {  # 62 keys per query on average
    **{"score": "indexer", "block_size": 1, "top_k": 50, "window": 16, "num_sinks": 0}
}
ROWS = 24
QUALITY: tuple[tuple[str, dict[str, Any]], ...] = (
    ("block_sparse", {}),
    ("block_sparse", {"top_k": 10}),
    ("block_sparse", {"top_k": 8}),
    ("block_sparse", {"top_k": 10, "score": "mean"}),
    ("block_sparse", {"top_k": 10, "score": "bounds"}),
    ("block_sparse", {"top_k": 10, "per_key_head": True}),
    ("block_sparse", {"top_k": 10, "query_block": 2}),
    ("block_sparse", {"top_k": 10, "query_block": 4}),
    ("block_sparse", {"top_k": 16, "coverage": 0.9}),
    ("block_sparse", {"top_k": 5, "block_size": 16}),
    ("reformer", {"chunk_size": 16}),
    ("flash", {"window": 32, "num_sinks": 1}),
    ("flash", {"window": 32, "num_sinks": 4}),
    ("flash", {"window": 28, "num_sinks": 4}),
    ("flash", {"window": 36}),
)
app = typer.Typer()


@torch.no_grad()
def attended_keys(model: Any, tokens: torch.Tensor) -> float:
    """Return the average number of attended keys per query."""
    weights = model(tokens, output_attentions=True, use_cache=False).attentions
    return float(torch.stack([(w > 0).sum(-1).float().mean() for w in weights]).mean())


class Evaluation:
    """Evaluates models on held-out rows, relative to softmax and to a 32-token window."""

    def __init__(self) -> None:
        self.path = embedded_model_path()
        self.batch = make_eval_batch(self.path, None, rows=ROWS, row_length=512)
        (self.softmax, _), (self.window, keys) = (
            self.measure(load_swapped(self.path, AttentionSpec(name, **options)))
            for name, options in (("softmax", {}), ("flash", {"window": 32}))
        )
        lines = (("softmax", self.softmax), (f"window 32, {keys:.0f} keys", self.window))
        for name, (loss, recall) in lines:
            print(f"{name}: {loss:.3f} bits per byte, {recall:.3f} in copies")

    def measure(self, model: Any) -> tuple[list[float], float]:
        """Return the losses on plain rows and on copies, and the attended keys per query."""
        found = evaluate_rows(model, self.batch)
        assert found.recall is not None
        keys = attended_keys(model, self.batch.rows.tokens[:4])
        return [found.loss, found.recall], keys

    def show(self, name: str, options: dict[str, Any], model: Any) -> None:
        """Print the fractions of the gaps in loss and in recall that a model closes."""
        found, keys = self.measure(model)
        lines = zip(self.window, found, self.softmax, strict=True)
        loss, recall = ((w - x) / (w - s) for w, x, s in lines)
        print(
            f"{name} {options}: {keys:.0f} keys, loss {loss:.1%}, recall {recall:.1%}", flush=True
        )


@app.command()
def quality() -> None:
    """Print the fractions of the gaps in loss and in recall that each selection closes."""
    evaluation = Evaluation()
    for name, options in QUALITY:
        model = load_swapped(evaluation.path, AttentionSpec(name, **options))
        evaluation.show(name, options, model)


@app.command()
def indexer(
    steps: int = 100,
    block_size: int = 1,
    top_k: int = 50,
    window: int = 16,
    lr: float = 1e-2,
    heads: int = 4,
    out: Path | None = None,
) -> None:
    """Train an indexer on the text of ``benchmarks/recover.py``, and print its quality."""
    options = {**INDEXER, "block_size": block_size, "top_k": top_k, "window": window}
    options |= {} if heads == 4 else {"index_heads": heads}
    evaluation, started = Evaluation(), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        saved = out or Path(folder) / "out"
        args = RecoveryArguments(
            str(saved),
            transfer_steps=steps,
            max_steps=0,
            transfer_learning_rate=lr,
            repeat_share=0.5,
            use_cpu=True,
        )
        spec = AttentionSpec("block_sparse", **options)
        recover(evaluation.path, spec, data(), args)
        seconds = time.process_time() - started
        evaluation.show(f"{steps} steps, {seconds:.0f} s", options, load_causal(saved, None).eval())


@app.command()
def prefill(rounds: int = 3, longest: int = 65536) -> None:
    """Print forward and forward + backward times against SDPA, and the selection's share."""
    torch.set_num_threads(1)
    for length in (4096, 16384, longest):
        torch.manual_seed(0)
        heads = 8 if length < longest else 1  # SDPA takes a minute for 8 heads of 64k tokens
        q, k, v, d = (torch.randn(1, heads, length, 64) for _ in range(4))
        mask, scale = AttentionMask(causal=True), 64**-0.5

        def sdpa(*x: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(*x, is_causal=True)

        calls: dict[str, Any] = {"sdpa": torch.no_grad()(lambda x=(q, k, v): sdpa(*x))}
        scores = ("moments", "mean", "indexer") if heads == 8 else ("moments", "mean")
        cases = list(itertools.product(scores, (1, 16)))  # 16: at most 978 keys
        shapes = (1, 4, length, 32), (1, 1, length, 32), (1, 4, length)
        index = IndexTensors(*map(torch.randn, shapes))
        for case in cases:
            score, query_block = case
            options: dict[str, Any] = {"score": score, "query_block": query_block, **LONG}
            sizes = SparseOptions(causal=True, num_sinks=4, query_block=query_block, **LONG)
            choice = SelectionOptions(score, None, False)
            call = SparseCall(q, k, v, None, None, None, None, scale, sizes, choice)
            if score == "indexer":
                options["index"] = index
                summary = summarize(index.k, None, sizes, MEAN)
                call = call._replace(index_q=pack_queries(index), summary=summary)
            attend = partial(block_sparse_attention, q, k, v, mask=mask, **options)
            calls[f"{case}"] = torch.no_grad()(attend)
            calls[f"{case} selection"] = partial(select_blocks, call, cpp.best_blocks)
        taken = time_together(calls, rounds=rounds if length < longest else 1)
        for case in cases:
            ours, selection = taken[f"{case}"], taken[f"{case} selection"]
            score, query_block = case
            print(
                f"{length} {score}, query_block={query_block}: {ours.min_ms:.0f} ms, "
                f"{ours.times_faster_than(taken['sdpa']):.1f}x SDPA, "
                f"selection {1 / selection.times_faster_than(ours):.0%}",
                flush=True,
            )
        if length == longest:
            continue

        def ours(*x: torch.Tensor, mask: AttentionMask = mask) -> torch.Tensor:
            return block_sparse_attention(*x, mask=mask, **LONG).out

        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        taken = time_together(
            {
                name: lambda f=f, x=leaves, d=d: torch.autograd.grad(f(*x), x, d)
                for name, f in (("sdpa", sdpa), ("ours", ours))
            },
            rounds=rounds,
        )
        faster = taken["ours"].times_faster_than(taken["sdpa"])
        print(
            f"{length} forward + backward: {taken['ours'].min_ms:.0f} ms, {faster:.1f}x SDPA",
            flush=True,
        )


@app.command()
@torch.no_grad()
def sizes(length: int = 16384, rounds: int = 3) -> None:
    """Print forward times by block size, number of selected blocks and score."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x = torch.randn(3, 1, 8, length, 64).unbind()
    calls: dict[str, Any] = {"sdpa": lambda: F.scaled_dot_product_attention(*x, is_causal=True)}
    for (block_size, top_k), score in itertools.product(SIZES, ("moments", "bounds")):
        options: Any = {"block_size": block_size, "top_k": top_k, "score": score}
        mask = AttentionMask(causal=True)
        calls[json.dumps(options)] = partial(block_sparse_attention, *x, mask=mask, **options)
    taken = time_together(calls, rounds=rounds)
    for name, timing in taken.items():
        faster = timing.times_faster_than(taken["sdpa"])
        print(f"{length} {name}: {timing.min_ms:.0f} ms, {faster:.1f}x SDPA")


@app.command()
@torch.no_grad()
def decode(tokens: int = 12, layers: int = 1) -> None:
    """Print the time to decode one token with a model, against ``flash``."""
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=2**17,
    )
    model = LlamaForCausalLM(config).eval()
    for length in (16384, 65536):
        text = torch.randint(256, (1, length + tokens), generator=torch.Generator().manual_seed(0))
        cache = DynamicCache(config=config)
        for layer in range(layers):
            k, v = (torch.randn(1, 8, length, 64) for _ in range(2))
            cache.update(k, v, layer)
        runs = {}
        for name, options in (("flash", {}), ("block_sparse", LONG)):
            attnzoo.swap(model, name, **options)
            if name == "block_sparse":
                cache = DynamicCache(config=config)
                for start in range(0, length, 8192):
                    part = text[:, start : start + 8192]
                    model(part, **cache_argument(cache), logits_to_keep=1)
            taken = time_together(
                {name: lambda cache=cache, x=text[:, -1:]: model(x, **cache_argument(cache))},
                rounds=tokens,
                seconds=0.0,
            )
            runs[name] = taken[name]
            print(f"{length} {name}: {runs[name].median_ms:.2f} ms", flush=True)
        print(f"{length}: {runs['flash'].median_ms / runs['block_sparse'].median_ms:.1f}x flash")


if __name__ == "__main__":
    app()
