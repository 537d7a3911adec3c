"""Train small models with several attentions on a task, and tabulate the results.

All have the same config and budget, and several seeds.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel, SmolLM3Config, SmolLM3ForCausalLM

import attnzoo
from attnzoo.errors import SpecError
from attnzoo.evaluation.models import spec_label
from attnzoo.evaluation.presets import preset_options, preset_specs
from attnzoo.evaluation.results import FORMAT, Row, append, commit, open_results
from attnzoo.evaluation.timing import machine
from attnzoo.hf.swap.convert import swap
from attnzoo.report.table import Table
from attnzoo.spec import AttentionSpec
from attnzoo.tasks.recall import IGNORED, LabelledRows, Task, find_task
from attnzoo.training.transfer import extras

OnProgress = Callable[[str, float], None]  # the current run, and the completed fraction

BACKENDS = ("flash", "reformer", "longformer", "linear", "gated_linear", "delta", "performer")
TRAIN_HASHES = (1, 2, 4)  # hash rounds of Reformer in training on duplication, as in its paper
EVAL_HASHES = (1, 2, 4, 8)  # hash rounds of a trained Reformer in evaluation

WIDTH, LAYERS, HEADS = 64, 2, 2
KERNEL_SIZE = 3  # of the convolution before the first layer
MUON_LR = 0.02  # for the matrices inside the layers
ADAMW_LR = 3e-3  # for all other parameters
WARM_UP = 0.05  # fraction of the steps
SMALLEST_ONLY = 0.3  # fraction of the steps with the smallest size only
TEST_ROWS, TEST_BATCH = 256, 64


@dataclass(kw_only=True)
class TrainResult:
    """Result of one run."""

    accuracy: dict[int, float] = field(default_factory=dict)  # by size
    seconds: float = 0.0
    loss: float = math.nan  # nats per target, averaged over the last steps


class ConvolvedEmbedding(nn.Module):
    """Token embeddings plus a short causal depthwise convolution of them.

    Associative recall needs a key next to its value. Softmax attention learns to attend to the
    previous token, but linear attention hardly can, so published comparisons of recall add a
    convolution (arXiv:2312.04927). Without it, ``linear`` and every gate learn no pair.

    Args:
        embedding: The token embedding.
    """

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.embedding = embedding
        self.convolution = nn.Conv1d(WIDTH, WIDTH, KERNEL_SIZE, groups=WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the embeddings ``[B, T, WIDTH]`` of tokens ``[B, T]``."""
        x: Tensor = self.embedding(tokens)
        padded = F.pad(x.mT, (KERNEL_SIZE - 1, 0))
        mixed: Tensor = self.convolution(padded).mT
        return x + mixed


def make_model(task: Task, spec: AttentionSpec, seed: int) -> PreTrainedModel:
    """Return the small model of a task: a Llama without rotary positions.

    Rotary positions would interfere with the feature maps; the causal mask and the convolution
    provide the order.

    Raises:
        AttnzooError: The spec does not fit the model.
    """
    config = SmolLM3Config(
        vocab_size=task.vocabulary,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        no_rope_layers=[0] * LAYERS,  # 0 disables rotary positions
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = SmolLM3ForCausalLM(config)
        model.set_input_embeddings(ConvolvedEmbedding(model.get_input_embeddings()))
        swap(model, spec)
    return model


def losses(model: PreTrainedModel, rows: LabelledRows) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cross-entropy of each target in nats, and whether argmax is correct, ``[M]``."""
    labelled = rows.labels != IGNORED
    hidden = model.model(rows.tokens, use_cache=False).last_hidden_state[labelled]
    logits, labels = model.lm_head(hidden), rows.labels[labelled]
    return F.cross_entropy(logits, labels, reduction="none"), logits.argmax(-1) == labels


def make_optimizers(model: PreTrainedModel) -> list[torch.optim.Optimizer]:
    """Return Muon for the linear layers inside the model's layers and AdamW for the rest.

    With AdamW only, exact attention does not learn to recall within the same steps. Parameters
    that a backend adds use AdamW: with Muon on their biases, ``[H, F]``, gates recall less than
    attention without gates instead of more.
    """
    added = {id(p) for p in extras(model).values()}
    layers = (m for name, m in model.named_modules() if ".layers." in name)
    linears = (m.weight for m in layers if isinstance(m, nn.Linear))
    matrices = [p for p in linears if id(p) not in added]
    known = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in known]
    return [
        torch.optim.Muon(matrices, lr=MUON_LR, momentum=0.95, weight_decay=0.0),
        torch.optim.AdamW(others, lr=ADAMW_LR, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def sizes_at(task: Task, done: float) -> tuple[int, ...]:
    """Return the sizes to train on: first the smallest, later one more at a time.

    With all sizes from the start, exact attention learns no associative recall in 2000 steps.
    Starting with 8 pairs, models learn it for two seeds of three, starting with 4 for all.

    Args:
        task: The task.
        done: Completed fraction of the steps.
    """
    others = len(task.train_sizes) - 1
    started = max(0.0, (done - SMALLEST_ONLY) / (1 - SMALLEST_ONLY))
    joined = math.ceil(started * others)
    return task.train_sizes[: 1 + joined]


def train(
    task: Task,
    spec: AttentionSpec,
    *,
    seed: int,
    steps: int | None = None,
) -> tuple[PreTrainedModel, TrainResult]:
    """Train a model from scratch and evaluate it.

    Args:
        task: The task.
        spec: The attention of all layers.
        seed: Seed of weights and rows; the rows do not depend on the spec.
        steps: Training steps; the task's own when ``None``.
    """
    steps, started = steps or task.steps, time.monotonic()
    model = make_model(task, spec, seed).train()
    optimizers = make_optimizers(model)
    rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    generator = torch.Generator().manual_seed(1_000 + seed)
    warm, smooth = max(1, round(WARM_UP * steps)), math.nan
    for step in range(steps):
        share = min((step + 1) / warm, 0.5 + 0.5 * math.cos(math.pi * step / steps))
        for optimizer, own in zip(optimizers, rates, strict=True):
            for group, rate in zip(optimizer.param_groups, own, strict=True):
                group["lr"] = rate * share
        sizes = sizes_at(task, step / steps)
        size = sizes[step % len(sizes)]
        count = max(1, task.batch * task.train_sizes[0] // size)
        rows = task.draw(count, size, generator)
        loss = losses(model, rows)[0].mean()
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        value = loss.item()
        smooth = value if math.isnan(smooth) else 0.95 * smooth + 0.05 * value
    accuracy, seconds = evaluate(model, task), time.monotonic() - started
    return model, TrainResult(accuracy=accuracy, seconds=seconds, loss=smooth)


@torch.no_grad()
def evaluate(
    model: PreTrainedModel, task: Task, sizes: tuple[int, ...] | None = None
) -> dict[int, float]:
    """Return the accuracy by size, on held-out rows that are the same for all models."""
    model.eval()
    found = {}
    for size in sizes or task.test_sizes:
        generator = torch.Generator().manual_seed(size)
        correct = [
            losses(model, task.draw(TEST_BATCH, size, generator))[1]
            for _ in range(TEST_ROWS // TEST_BATCH)
        ]
        found[size] = float(torch.cat(correct).float().mean())
    return found


def default_specs(names: Sequence[str] | None, task: str) -> list[AttentionSpec]:
    """Return the presets of the given backends, or the specs that a task compares by default.

    Raises:
        UnknownBackendError: A name is unknown.
    """
    if not names and task == "duplication":
        return [AttentionSpec("flash"), *hashing_specs()]
    return preset_specs(names or BACKENDS, "from_scratch")


def hashing_specs() -> list[AttentionSpec]:
    """Return Reformer with each number of hash rounds of ``TRAIN_HASHES``."""
    (options,) = preset_options("reformer", "from_scratch")
    return [AttentionSpec("reformer", **{**options, "num_hashes": n}) for n in TRAIN_HASHES]


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """Options of a run.

    Attributes:
        task: Name of the task.
        specs: The attentions; the task's defaults when ``None``.
        seeds: Number of runs per attention.
        steps: Training steps; the task's own when ``None``.
        out: Folder of results.
        fresh: Whether to start over instead of resuming from earlier results.
    """

    task: str
    out: Path
    specs: Sequence[AttentionSpec] | None = None
    seeds: int = 3
    steps: int | None = None
    fresh: bool = False


def run_tasks(
    config: TaskConfig, on_progress: OnProgress = lambda name, fraction: None
) -> list[Row]:
    """Train every model that has no row in the results folder; return the rows of this run.

    Raises:
        AttnzooError: An option is invalid; nothing is trained then.
    """
    task = find_task(config.task)
    specs = list(config.specs or default_specs(None, task.name))
    if config.seeds < 1 or (config.steps is not None and config.steps < 1):
        raise SpecError(f"seeds and steps must be 1 or more, got {config.seeds} and {config.steps}")
    for spec in specs:
        make_model(task, spec, 0)  # refuses an unsupported spec before anything is trained
    earlier = {row.get("key"): row for row in open_results(config.out, fresh=config.fresh)}
    about = {
        "format": FORMAT,
        "attnzoo": attnzoo.__version__,
        "commit": commit(),
        "machine": machine(),
        "status": "ok",
        "kind": "task",
    }
    steps = config.steps or task.steps
    runs = [(seed, spec) for seed in range(config.seeds) for spec in specs]
    rows = []
    for number, (seed, spec) in enumerate(runs):
        key = f"{task.name} {steps} {seed} {spec.to_dict()}"
        row = earlier.get(key)
        if row is None:
            on_progress(f"{task.name}, {spec_label(spec)}, seed {seed}", number / len(runs))
            result = _train_and_evaluate(task, spec, seed, steps)
            row = append(config.out, {**about, "key": key, **result})
        rows.append(row)
    return rows


def _train_and_evaluate(task: Task, spec: AttentionSpec, seed: int, steps: int) -> Row:
    """Train and evaluate one model."""
    model, trained = train(task, spec, seed=seed, steps=steps)
    row: Row = {
        "task": task.name,
        "attention": spec_label(spec),
        "spec": spec.to_dict(),
        "seed": seed,
        "steps": steps,
        "parameters": sum(p.numel() for p in model.parameters()),
        "accuracy": trained.accuracy,
        "loss": trained.loss,
        "seconds": round(trained.seconds, 1),
    }
    if task.name == "duplication" and spec.default.backend == "reformer":
        options = dict(spec.default.options)
        row["by_rounds"] = {}
        for rounds in EVAL_HASHES:
            swap(model, "reformer", **(options | {"num_hashes": rounds}))
            longest = task.test_sizes[-1]
            row["by_rounds"][rounds] = evaluate(model, task, (longest,))[longest]
    return row


@dataclass(frozen=True, kw_only=True)
class SeedStatistics:
    """Results of several seeds in one cell of a table."""

    values: tuple[float, ...]

    def __str__(self) -> str:
        """Return mean ± half the range, in percent."""
        half = (max(self.values) - min(self.values)) / 2
        return f"{100 * mean(self.values):.0f} ± {100 * half:.0f}"


def tabulate(task: Task, rows: Sequence[Row]) -> Table:
    """Return accuracy in percent by size, mean over seeds ± half the range."""
    columns = ["attention", *(f"{size} {task.size_unit}" for size in task.test_sizes), "s per run"]
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        found[row["attention"]].append(row)
    body = [
        [
            name,
            *(
                str(SeedStatistics(values=tuple(run["accuracy"][str(size)] for run in runs)))
                for size in task.test_sizes
            ),
            f"{mean(run['seconds'] for run in runs):.0f}",
        ]
        for name, runs in found.items()
    ]
    return Table(columns=columns, rows=body, title=f"{task.name}: {task.about}")


def tabulate_hash_rounds(rows: Sequence[Row]) -> Table | None:
    """Return accuracy by hash rounds in training and in evaluation, as in the Reformer paper."""
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if "by_rounds" in row:
            found[row["attention"]].append(row)
    if not found:
        return None
    body = [
        [
            name,
            *(
                str(SeedStatistics(values=tuple(run["by_rounds"][str(rounds)] for run in runs)))
                for rounds in EVAL_HASHES
            ),
        ]
        for name, runs in found.items()
    ]
    return Table(
        columns=["trained with", *(f"evaluated with {rounds}" for rounds in EVAL_HASHES)],
        rows=body,
        title="Hash rounds, the longest words",
    )
