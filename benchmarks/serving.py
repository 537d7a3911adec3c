"""Serve a model and its swaps with vLLM: tokens per second and memory, in one run.

    .nox/vllm/bin/python benchmarks/serving.py measure --out serving.jsonl
    .venv/bin/python benchmarks/serving.py draw serving.jsonl serving.png

Predictions for the Llama of 57M parameters (12 layers, 8 heads of size 64) in float32. A key and a
value of all layers are 48 KiB, so 8 requests of 16,384 tokens keep 6.4 GB, which one step reads
beside 0.23 GB of weights: the stock model should take 29 times as long as at a context of nearly
nothing. A window hybrid keeps 64 keys and values and a state of 64 (64 + 1) numbers per head, 4.6
MiB at any context, and reads them once: about 1.2 times the weights alone. On a machine whose
memory limits both, that is a ratio of 24 in decoding and of 160 in memory.

Each model is in a process of its own. All requests have different prompts of one length; prefix
caching is off. Decoding is timed by step, when all requests of all models have their first token;
the models then take turns of some steps, so that load on the machine meets all of them.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

VARIANTS: dict[str, tuple[str, dict[str, Any]] | None] = {
    "stock": None,
    "window hybrid": ("linear", {"window": 64, "num_sinks": 4}),
    "gated window hybrid": ("gated_linear", {"gate": "gla", "window": 64, "num_sinks": 4}),
    "delta": ("delta", {}),
}
GIB = 2**30


# -- models ---------------------------------------------------------------------------------------


def write_model(name: str, variant: str, folder: Path, tokens: int) -> None:
    """Write a model and its swap to a folder; its config allows ``tokens`` positions."""
    import torch
    import transformers as hf

    import attnzoo
    from attnzoo.evaluation.models import embedded_model_path

    torch.manual_seed(0)
    if name == "embedded":
        model = hf.AutoModelForCausalLM.from_pretrained(embedded_model_path())
    else:
        model = hf.LlamaForCausalLM(
            hf.LlamaConfig(
                vocab_size=32000,
                hidden_size=512,
                intermediate_size=1536,
                num_hidden_layers=12,
                num_attention_heads=8,
                tie_word_embeddings=True,
            )
        )
    model.config.max_position_embeddings = tokens
    swap = VARIANTS[variant]
    if swap is not None:
        attnzoo.swap(model, swap[0], **swap[1])
    model.save_pretrained(folder)


def prompts(number: int, tokens: int, vocabulary: int) -> list[list[int]]:
    """Return prompts of random tokens."""
    import torch

    generator = torch.Generator().manual_seed(number * tokens)
    return torch.randint(3, vocabulary, (number, tokens), generator=generator).tolist()


# -- engines, each in a process of its own --------------------------------------------------------


class Vllm:
    """vLLM's engine, stepped by hand."""

    def __init__(self, folder: str, dtype: str, tokens: int, requests: int, eager: bool) -> None:
        from vllm import LLM

        self.llm = LLM(
            folder,
            dtype=dtype,
            max_model_len=tokens,
            max_num_seqs=requests,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            enforce_eager=eager,
            disable_log_stats=True,
        )
        self.engine = self.llm.llm_engine
        self.count = 0

    def start(self, prompts: list[list[int]], most: int) -> float:
        """Return the seconds until all requests have a token; they go on for ``most`` more."""
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0,
            max_tokens=most + 4 * len(prompts) + 512,
            ignore_eos=True,
            detokenize=False,
        )
        self.names = []
        for prompt in prompts:
            self.count += 1
            self.names.append(str(self.count))
            self.engine.add_request(self.names[-1], {"prompt_token_ids": prompt}, params)
        waiting, start = set(self.names), time.perf_counter()
        while waiting:
            waiting -= {x.request_id for x in self.engine.step() if x.outputs[0].token_ids}
        return time.perf_counter() - start

    def decode(self, new: int) -> list[float]:
        """Return the seconds of each of some steps, which give a token to every request."""
        steps = []
        for _ in range(new):
            start = time.perf_counter()
            self.engine.step()
            steps.append(time.perf_counter() - start)
        return steps

    def stop(self) -> None:
        """End all requests."""
        self.engine.abort_request(self.names)
        while self.engine.has_unfinished_requests():
            self.engine.step()

    def bytes(self, tokens: int) -> int:
        """Return the bytes of the cache that one request of ``tokens`` tokens takes."""
        (layers,) = self.llm.collective_rpc("get_kv_cache_spec")
        total = 0
        for spec in layers.values():
            grows = "Mamba" not in type(spec).__name__
            total += spec.page_size_bytes * (-(-tokens // spec.block_size) if grows else 1)
        return total


class Generate:
    """transformers' ``generate`` with a batch of all requests."""

    def __init__(self, folder: str, dtype: str, tokens: int, requests: int, eager: bool) -> None:
        import torch
        import transformers as hf

        import attnzoo  # noqa: F401  loads the swap

        self.model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))

    def start(self, prompts: list[list[int]], most: int) -> float:
        """Return the seconds of the prompts and one token."""
        import torch

        self.ids, self.cache = torch.tensor(prompts), None
        start = time.perf_counter()
        return self.generate(1)[0] - start

    def generate(self, tokens: int) -> list[float]:
        """Generate tokens after those that are there; return the time after each."""
        import torch

        times = []

        def note(*_: Any, **__: Any) -> Any:
            times.append(time.perf_counter())
            return torch.zeros(len(self.ids), dtype=torch.bool)  # no sequence ends here

        result = self.model.generate(
            self.ids,
            attention_mask=torch.ones_like(self.ids),
            past_key_values=self.cache,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=[note],
            return_dict_in_generate=True,
        )
        self.ids, self.cache = result.sequences, result.past_key_values
        return times

    def decode(self, new: int) -> list[float]:
        """Return the seconds of each of some steps, which give a token to every request."""
        times = self.generate(1 + new)  # the first has what is done once a call
        return [after - before for before, after in itertools.pairwise(times)]

    def stop(self) -> None:
        """Forget the prompts."""
        del self.ids, self.cache

    def bytes(self, tokens: int) -> None:
        """Return nothing: the caches of both engines hold the same numbers."""


ENGINES = {"vllm": Vllm, "generate": Generate}


def work(kind: str, options: str) -> None:
    """Answer requests for measurements on standard input; each is a line of JSON."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the engine prints is no answer
    engine = ENGINES[kind](**json.loads(options))
    print("ready", file=out, flush=True)
    for line in sys.stdin:
        name, given = json.loads(line)
        print(json.dumps(getattr(engine, name)(**given)), file=out, flush=True)


class Worker:
    """A process with an engine."""

    def __init__(self, kind: str, space: int, **options: Any) -> None:
        settings = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": str(space),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
        }
        self.process = subprocess.Popen(
            [sys.executable, __file__, "worker", kind, json.dumps(options)],
            env=os.environ | settings,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.read()

    def read(self) -> str:
        """Return the next line of the process."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"an engine ended with exit code {self.process.wait()}")
        return line

    def call(self, name: str, **given: Any) -> Any:
        """Let the process call a method of its engine."""
        assert self.process.stdin is not None
        print(json.dumps([name, given]), file=self.process.stdin, flush=True)
        return json.loads(self.read())

    def close(self) -> None:
        """End the process."""
        self.process.communicate()


# -- measurements ---------------------------------------------------------------------------------


def measure_all(
    workers: dict[str, Worker], cases: list[tuple[int, int]], new: int, rounds: int, vocabulary: int
) -> Iterator[dict[str, Any]]:
    """Yield a row for each case and model; models take turns in each round."""
    for tokens, requests in cases:
        asked = prompts(requests, tokens, vocabulary)
        prefill = {
            name: worker.call("start", prompts=asked, most=rounds * new)
            for name, worker in workers.items()
        }
        print(f"decoding {requests} requests of {tokens:,} tokens", file=sys.stderr, flush=True)
        medians: dict[str, list[float]] = {name: [] for name in workers}
        for _ in range(rounds):
            for name, worker in workers.items():
                medians[name].append(statistics.median(worker.call("decode", new=new)))
        for name, worker in workers.items():
            worker.call("stop")
            step = statistics.median(medians[name])
            yield {
                "variant": name,
                "context": tokens,
                "requests": requests,
                "prefill_tokens_per_s": requests * tokens / prefill[name],
                "decode_tokens_per_s": requests / step,
                "decode_spread": (max(medians[name]) - min(medians[name])) / step,
                "cache_bytes_per_request": worker.call("bytes", tokens=tokens),
            }


app = typer.Typer()


@app.command()
def worker(kind: str, options: str) -> None:
    """Run one engine; used by the benchmark itself."""
    work(kind, options)


@app.command()
def measure(
    model: Annotated[str, typer.Option(help="llama60m (random weights) or embedded")] = "llama60m",
    engine: Annotated[str, typer.Option(help="vllm or generate")] = "vllm",
    variant: Annotated[list[str] | None, typer.Option(help=f"of {', '.join(VARIANTS)}")] = None,
    context: Annotated[list[int] | None, typer.Option(help="tokens of each prompt")] = None,
    requests: Annotated[list[int] | None, typer.Option(help="requests at once")] = None,
    new: Annotated[int, typer.Option(help="steps of decoding in a round")] = 8,
    rounds: Annotated[int, typer.Option(help="turns of each model")] = 5,
    dtype: str = "float32",
    eager: Annotated[bool, typer.Option(help="vLLM without torch.compile")] = False,
    out: Annotated[Path | None, typer.Option(help="JSON lines are appended to it")] = None,
) -> None:
    """Print the table of one model, its variants in turns."""
    from rich.console import Console
    from rich.table import Table

    names = variant or ["stock", "window hybrid"]
    contexts, counts = context or [1024, 4096, 16384], requests or [1, 8]
    longest = max(contexts) + new * rounds + 4 * max(counts) + 600
    with tempfile.TemporaryDirectory() as folder:
        workers = {}
        for name in names:
            place = Path(folder, name)
            write_model(model, name, place, longest)
            config = json.loads((place / "config.json").read_text("utf-8"))
            keys = 4 * 2 * config["num_hidden_layers"] * config["hidden_size"]
            space = max(1, -(-keys * longest * max(counts) // GIB)) if name == "stock" else 2
            options = {"tokens": longest, "requests": max(counts), "eager": eager, "dtype": dtype}
            workers[name] = Worker(engine, space, folder=str(place), **options)
        cases = [(tokens, count) for tokens in contexts for count in counts]
        table = Table("context", "requests", "model", "prefill, tokens/s", "decode, tokens/s")
        table.add_column("spread")
        table.add_column("cache per request")
        for row in measure_all(workers, cases, new, rounds, config["vocab_size"]):
            row = {"model": model, "engine": engine, "dtype": dtype, **row}
            if out is not None:
                with out.open("a", encoding="utf-8") as lines:
                    print(json.dumps(row), file=lines)
            size = row["cache_bytes_per_request"]
            table.add_row(
                f"{row['context']:,}",
                str(row["requests"]),
                row["variant"],
                f"{row['prefill_tokens_per_s']:,.0f}",
                f"{row['decode_tokens_per_s']:,.1f}",
                f"{row['decode_spread']:.0%}",
                "" if size is None else f"{size / 2**20:,.1f} MiB",
            )
            Console(width=110, stderr=True).print(row)
        for one in workers.values():
            one.close()
    Console(width=110).print(table)


@app.command()
def draw(rows: Path, figure: Path) -> None:
    """Draw decoding over the context, a panel for each number of requests; bars are the spread."""
    import matplotlib.pyplot as plt

    found = [json.loads(line) for line in rows.read_text("utf-8").splitlines()]
    counts = sorted({x["requests"] for x in found})
    drawing, axes = plt.subplots(1, len(counts), figsize=(4 * len(counts), 3.8), squeeze=False)
    for axis, count in zip(axes[0], counts, strict=True):
        for name in dict.fromkeys((x["engine"], x["variant"]) for x in found):
            own = [
                x for x in found if (x["engine"], x["variant"]) == name and x["requests"] == count
            ]
            middle = [x["decode_tokens_per_s"] for x in own]
            axis.errorbar(
                [x["context"] for x in own],
                middle,
                yerr=[x["decode_spread"] / 2 * y for x, y in zip(own, middle, strict=True)],
                marker="o",
                capsize=3,
                label=f"{name[1]}, {'vLLM' if name[0] == 'vllm' else 'generate()'}",
            )
        contexts = sorted({x["context"] for x in found})
        axis.set_xscale("log", base=2)
        axis.set_ylim(bottom=0)
        axis.set_xticks(contexts, [f"{x:,}" for x in contexts])
        axis.set_xlabel("tokens of context")
        axis.set_title(f"{count} request{'s' if count > 1 else ''} at once")
    axes[0][0].set_ylabel("decoded tokens per second, all requests")
    drawing.tight_layout(rect=(0, 0, 1, 0.92))
    drawing.legend(*axes[0][0].get_legend_handles_labels(), loc="upper center", ncols=4)
    figure.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(figure, dpi=120)


if __name__ == "__main__":
    app()
