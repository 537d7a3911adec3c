"""Train a small model on a task and evaluate it, with the same config and budget for all."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel, SmolLM3Config, SmolLM3ForCausalLM

from attnzoo.hf.swap.convert import swap
from attnzoo.spec import AttentionSpec
from attnzoo.tasks.base import IGNORED, LabelledRows, Task
from attnzoo.training.transfer import extras

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
        rows = task.draw(count, size, generator, False)
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
            losses(model, task.draw(TEST_BATCH, size, generator, True))[1]
            for _ in range(TEST_ROWS // TEST_BATCH)
        ]
        found[size] = float(torch.cat(correct).float().mean())
    return found
