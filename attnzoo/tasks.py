"""Multi-query associative recall (arXiv:2312.04927): small models with several attentions compared.

All have the same config and budget, and several seeds. A row has pairs of a key and a value, and
then the keys again, whose values are to be predicted. There are too many different rows to
memorise, so held-out rows are drawn in the same way.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import IterableDataset
from transformers import (
    PreTrainedModel,
    PrinterCallback,
    SmolLM3Config,
    SmolLM3ForCausalLM,
    Trainer,
    TrainingArguments,
)

from attnzoo.errors import SpecError
from attnzoo.evaluation.models import spec_label
from attnzoo.evaluation.presets import preset_specs
from attnzoo.evaluation.results import Results, Row
from attnzoo.hf.swap import swap
from attnzoo.report.table import Table
from attnzoo.spec import AttentionSpec
from attnzoo.training.transfer import extras

BACKENDS = ("flash", "reformer", "longformer", "linear", "gated_linear", "delta", "performer")
WIDTH, LAYERS, HEADS = 64, 2, 2
KERNEL_SIZE = 3  # of the convolution before the first layer
MUON_LR = 0.02  # for the matrices inside the layers
ADAMW_LR = 3e-3  # for all other parameters
WARM_UP = 0.05  # fraction of the steps
SMALLEST_ONLY = 0.3  # fraction of the steps with the smallest size only
TEST_ROWS, TEST_BATCH = 256, 64
IGNORED = -100  # label of positions without a target, as in cross-entropy
KEYS = 32  # number of key tokens, and of value tokens
TRAIN_SIZES = (4, 8, 16, 32)  # pairs of a row; small rows help to learn the large ones
TEST_SIZES = (8, 16, 32)
STEPS = 1200
BATCH = 128  # rows per step of the smallest size; larger ones have as many tokens
LabelledRows = tuple[Tensor, Tensor]  # tokens, and the token to predict after each or IGNORED


def draw(count: int, size: int, generator: Generator) -> LabelledRows:
    """Draw ``size`` key-value pairs, then all of them again in another order.

    Each of the ``KEYS`` keys occurs in at most one pair; there are as many values. The target
    after the second occurrence of a key is its value.
    """
    keys = torch.rand(count, KEYS, generator=generator).argsort(1)[:, :size]
    values = KEYS + torch.randint(KEYS, (count, size), generator=generator)
    order = torch.rand(count, size, generator=generator).argsort(1)
    first = torch.stack([keys, values], 2).flatten(1)
    second = torch.stack([keys.gather(1, order), values.gather(1, order)], 2).flatten(1)
    tokens = torch.cat([first, second], 1)
    labels = torch.full_like(tokens, IGNORED)
    labels[:, 2 * size :: 2] = values.gather(1, order)
    return tokens, labels


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


def make_model(spec: AttentionSpec, seed: int) -> PreTrainedModel:
    """Return the small model: a Llama without rotary positions.

    Rotary positions would interfere with the feature maps; the causal mask and the convolution
    provide the order.

    Raises:
        AttnzooError: The spec does not fit the model.
    """
    config = SmolLM3Config(
        vocab_size=2 * KEYS,
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


def losses(model: Any, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy of each target in nats, and whether argmax is correct, ``[M]``."""
    labelled = labels != IGNORED
    hidden = model.model(tokens, use_cache=False).last_hidden_state[labelled]
    logits, targets = model.lm_head(hidden), labels[labelled]
    return F.cross_entropy(logits, targets, reduction="none"), logits.argmax(-1) == targets


class TaskOptimizer(Optimizer):
    """Muon for the linear layers inside the model's layers and AdamW for the rest, as one.

    With AdamW only, exact attention does not learn to recall within the same steps. Parameters
    that a backend adds use AdamW: with Muon on their biases, ``[H, F]``, gates recall less than
    attention without gates instead of more.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        added = {id(p) for p in extras(model).values()}
        layers = (m for name, m in model.named_modules() if ".layers." in name)
        linears = (m.weight for m in layers if isinstance(m, nn.Linear))
        matrices = [p for p in linears if id(p) not in added]
        known = {id(p) for p in matrices}
        others = [p for p in model.parameters() if id(p) not in known]
        self.both = (
            Muon(matrices, lr=MUON_LR, momentum=0.95, weight_decay=0.0),
            AdamW(others, lr=ADAMW_LR, betas=(0.9, 0.95), weight_decay=0.0),
        )
        super().__init__([group for one in self.both for group in one.param_groups], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step of both, at the learning rates of this optimizer's groups."""
        for optimizer, group in zip(self.both, self.param_groups, strict=True):
            optimizer.param_groups = [group]
            optimizer.step(closure)


def sizes_at(done: float) -> tuple[int, ...]:
    """Return the sizes to train on: first the smallest, later one more at a time.

    With all sizes from the start, exact attention learns no associative recall in 2000 steps.
    Starting with 8 pairs, models learn it for two seeds of three, starting with 4 for all.

    Args:
        done: Completed fraction of the steps.
    """
    others = len(TRAIN_SIZES) - 1
    started = max(0.0, (done - SMALLEST_ONLY) / (1 - SMALLEST_ONLY))
    joined = math.ceil(started * others)
    return TRAIN_SIZES[: 1 + joined]


class TaskBatches(IterableDataset[Mapping[str, Tensor]]):
    """The rows of each step, which depend on the steps and the seed only."""

    def __init__(self, steps: int, seed: int) -> None:
        self.steps, self.seed = steps, seed

    def __iter__(self) -> Iterator[Mapping[str, Tensor]]:
        """Draw rows of all sizes of a step in turn; larger sizes have as many tokens."""
        generator = Generator().manual_seed(1_000 + self.seed)
        for step in range(self.steps):
            sizes = sizes_at(step / self.steps)
            size = sizes[step % len(sizes)]
            count = max(1, BATCH * TRAIN_SIZES[0] // size)
            tokens, labels = draw(count, size, generator)
            yield {"tokens": tokens, "labels": labels}


class TaskTrainer(Trainer):
    """Trainer whose labels are those of the next token already."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Return the cross-entropy of the targets."""
        return losses(model, **inputs)[0].mean()


def train(
    spec: AttentionSpec, *, seed: int, steps: int, out: Path
) -> tuple[PreTrainedModel, float]:
    """Train a model from scratch, on the CPU; return it with the mean loss of the last steps.

    Args:
        spec: The attention of all layers.
        seed: Seed of weights and rows; the rows do not depend on the spec.
        steps: Training steps.
        out: An existing folder; nothing is written.
    """
    model = make_model(spec, seed)
    optimizer, warm = TaskOptimizer(model), max(1, round(WARM_UP * steps))

    def share(step: int) -> float:
        return min((step + 1) / warm, 0.5 + 0.5 * math.cos(math.pi * step / steps))

    arguments = TrainingArguments(
        output_dir=str(out),
        max_steps=steps,
        per_device_train_batch_size=1,  # an item of the data is a batch
        seed=seed,
        use_cpu=True,
        remove_unused_columns=False,
        save_strategy="no",
        logging_steps=max(1, steps // 20),
        logging_nan_inf_filter=False,  # a NaN is no mean of the other losses
        report_to="none",
        disable_tqdm=True,
    )
    with torch.random.fork_rng(devices=[]):
        trainer = TaskTrainer(
            model,
            arguments,
            train_dataset=TaskBatches(steps, seed),
            data_collator=lambda items: items[0],
            optimizers=(optimizer, LambdaLR(optimizer, share)),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return model, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry][-1]


@torch.no_grad()
def evaluate(model: PreTrainedModel) -> dict[int, float]:
    """Return the accuracy by size, on held-out rows that are the same for all models."""
    model.eval()
    found = {}
    for size in TEST_SIZES:
        generator = Generator().manual_seed(size)
        correct = [
            losses(model, *draw(TEST_BATCH, size, generator))[1]
            for _ in range(TEST_ROWS // TEST_BATCH)
        ]
        found[size] = float(torch.cat(correct).float().mean())
    return found


def default_specs(names: Sequence[str] | None = None) -> list[AttentionSpec]:
    """Return the presets of the given backends, or of those that are compared by default.

    Raises:
        UnknownBackendError: A name is unknown.
    """
    return preset_specs(names or BACKENDS, "from_scratch")


def run_tasks(
    out: Path,
    *,
    specs: Sequence[AttentionSpec] | None = None,
    seeds: int = 3,
    steps: int = STEPS,
    fresh: bool = False,
    on_progress: Callable[[str, float], None] = lambda name, fraction: None,
) -> list[Row]:
    """Train every model that has no row in the results folder; return the rows of this run.

    Args:
        out: Folder of results.
        specs: The attentions; :func:`default_specs` when ``None``.
        seeds: Number of runs per attention.
        steps: Training steps.
        fresh: Whether to start over instead of resuming from earlier results.
        on_progress: Called with the current run and the completed fraction.

    Raises:
        AttnzooError: An option is invalid; nothing is trained then.
    """
    specs = list(specs or default_specs())
    if seeds < 1 or steps < 1:
        raise SpecError(f"seeds and steps must be 1 or more, got {seeds} and {steps}")
    for spec in specs:
        make_model(spec, 0)  # refuses an unsupported spec before anything is trained
    results = Results(out, fresh=fresh, kind="task", task="mqar", steps=steps)
    runs = [(seed, spec) for seed in range(seeds) for spec in specs]
    rows = []
    for number, (seed, spec) in enumerate(runs):
        on_progress(f"{spec_label(spec)}, seed {seed}", number / len(runs))
        what = {"attention": spec_label(spec), "spec": spec.to_dict(), "seed": seed}
        rows.append(results.row(what, partial(_measure, spec, seed=seed, steps=steps, out=out)))
    return rows


def _measure(spec: AttentionSpec, **options: Any) -> Row:
    started = time.monotonic()
    model, loss = train(spec, **options)
    return {
        "status": "ok",
        "parameters": sum(p.numel() for p in model.parameters()),
        "accuracy": evaluate(model),
        "loss": loss if math.isfinite(loss) else None,
        "seconds": round(time.monotonic() - started, 1),
    }


def tabulate(rows: Sequence[Row]) -> Table:
    """Return accuracy in percent by size, mean over seeds ± half the range."""
    columns = ["attention", *(f"{size} pairs" for size in TEST_SIZES), "s per run"]
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        found[row["attention"]].append(row)
    body = [
        [
            name,
            *(over_seeds([run["accuracy"][str(size)] for run in runs]) for size in TEST_SIZES),
            f"{mean(run['seconds'] for run in runs):.0f}",
        ]
        for name, runs in found.items()
    ]
    return Table(
        columns=columns, rows=body, title="multi-query associative recall (arXiv:2312.04927)"
    )


def over_seeds(values: Sequence[float]) -> str:
    """Return mean ± half the range, in percent."""
    return f"{100 * mean(values):.0f} ± {50 * (max(values) - min(values)):.0f}"
