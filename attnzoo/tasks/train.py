"""Trains one small model on one task, and judges it: the same config and budget for all."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel, SmolLM3Config, SmolLM3ForCausalLM

from attnzoo.integrations.convert import swap
from attnzoo.spec import AttentionSpec
from attnzoo.tasks.base import ASKED_NOTHING, Rows, Task
from attnzoo.training.transfer import extras

WIDTH, LAYERS, HEADS = 64, 2, 2
KERNEL = 3  # tokens that the convolution before the first layer sees
MATRIX_RATE = 0.02  # of Muon, for the matrices inside the layers
RATE = 3e-3  # of AdamW, for all else
WARM_UP = 0.05  # of the steps
ALONE = 0.3  # of the steps on the smallest size alone; the others join one by one
TESTED, PIECE = 256, 64  # rows to judge on, in all and at a time


@dataclass(kw_only=True)
class Trained:
    """What came of one run."""

    accuracy: dict[int, float] = field(default_factory=dict)  # by size: share of right answers
    seconds: float = 0.0
    loss: float = math.nan  # of the last steps, nats an answer


class ConvolvedEmbedding(nn.Module):
    """Embeddings, each with a mix of those before it added: a short causal convolution.

    To recall, a layer must meet a key beside its value. Softmax attention learns to look one token
    back; sums over all keys hardly can, so that the published comparisons of recall convolve
    (arXiv:2312.04927). Without it ``linear`` and every gate learned no pair at all.

    Args:
        embedding: What is convolved.
    """

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.embedding = embedding
        self.convolution = nn.Conv1d(WIDTH, WIDTH, KERNEL, groups=WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        """Embed ``[B, T]`` as ``[B, T, WIDTH]``."""
        x: Tensor = self.embedding(tokens)
        padded = F.pad(x.mT, (KERNEL - 1, 0))
        mixed: Tensor = self.convolution(padded).mT
        return x + mixed


def make_model(task: Task, spec: AttentionSpec, seed: int) -> PreTrainedModel:
    """Make the small model of a task: a Llama without rotary positions, whatever its attention.

    Rotation would turn features away from each other that products of queries and keys compare;
    order comes from causality and the convolution.

    Raises:
        AttnzooError: The spec does not fit.
    """
    config = SmolLM3Config(
        vocab_size=task.vocabulary,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        no_rope_layers=[0] * LAYERS,  # 0 is "no"
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


def losses(model: PreTrainedModel, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cross-entropy of every answer in nats, and whether each is right, ``[M]``."""
    asked = rows.labels != ASKED_NOTHING
    hidden = model.model(rows.tokens, use_cache=False).last_hidden_state[asked]
    logits, labels = model.lm_head(hidden), rows.labels[asked]
    return F.cross_entropy(logits, labels, reduction="none"), logits.argmax(-1) == labels


def make_optimizers(model: PreTrainedModel) -> list[torch.optim.Optimizer]:
    """Muon for the linear layers inside the model's layers, AdamW for all else.

    With AdamW alone, exact attention did not learn to recall within the same steps. What a backend
    adds is not Muon's: gates whose biases, ``[H, F]``, it took for matrices recalled less than
    attention without gates, where they recall more.
    """
    added = {id(p) for p in extras(model).values()}
    layers = (m for name, m in model.named_modules() if ".layers." in name)
    linears = (m.weight for m in layers if isinstance(m, nn.Linear))
    matrices = [p for p in linears if id(p) not in added]
    known = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in known]
    return [
        torch.optim.Muon(matrices, lr=MATRIX_RATE, momentum=0.95, weight_decay=0.0),
        torch.optim.AdamW(others, lr=RATE, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def sizes_at(task: Task, done: float) -> tuple[int, ...]:
    """Return the sizes that are trained on: the smallest first, then one more at a time.

    Among all sizes from the start, exact attention had learned nothing of associative recall after
    2000 steps. From 8 pairs, gates and no gates learned it on two seeds of three, from 4 on all.

    Args:
        task: What is trained.
        done: Share of the steps.
    """
    others = len(task.train_sizes) - 1
    joined = math.ceil((done - ALONE) / (1 - ALONE) * others) if done > ALONE else 0
    return task.train_sizes[: 1 + joined]


def train(
    task: Task,
    spec: AttentionSpec,
    *,
    seed: int,
    steps: int | None = None,
) -> tuple[PreTrainedModel, Trained]:
    """Train from scratch.

    Args:
        task: What on.
        spec: The attention of all layers.
        seed: Of weights and rows: the same rows whatever the spec.
        steps: The task's own when ``None``.
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
    trained = Trained(accuracy=judge(model, task), seconds=time.monotonic() - started, loss=smooth)
    return model, trained


@torch.no_grad()
def judge(
    model: PreTrainedModel, task: Task, sizes: tuple[int, ...] | None = None
) -> dict[int, float]:
    """Return the share of right answers by size, on rows of their own, the same for all models."""
    model.eval()
    found = {}
    for size in sizes or task.test_sizes:
        generator = torch.Generator().manual_seed(size)
        right = [
            losses(model, task.draw(PIECE, size, generator, True))[1]
            for _ in range(TESTED // PIECE)
        ]
        found[size] = float(torch.cat(right).float().mean())
    return found
