"""Entropy of attention heads during training, measured on a few held-out texts.

Other letters: B texts.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from attnzoo.contract.backend import AttentionBackend
from attnzoo.contract.states import AttentionOutput
from attnzoo.errors import UntrainedWarning
from attnzoo.evaluation.heads import entropy
from attnzoo.registry import build_backend
from attnzoo.report import charts
from attnzoo.report.charts import Axis, Plot, Series
from attnzoo.training.checkpoints import Checkpoints, explain_write_errors
from attnzoo.training.json_lines import append_line
from attnzoo.training.sharding import SHARDED
from attnzoo.training.transfer import evaluation_mode, swapped_layers

HEADS = "heads.jsonl"
TEXTS, TOKENS = 4, 128  # the texts that are measured
MEASUREMENTS = 10  # of a stage, besides the one at its end
ORIGINAL = "softmax"  # the name of the original model's entropies, in place of a stage
ByLayer = dict[str, list[float]]  # a number per head, by the name of the layer


@torch.no_grad()
def head_entropies(
    model: nn.Module, inputs: Mapping[str, Tensor], *, original: bool = False
) -> ByLayer:
    """Return the entropy of every head's attention weights in bits, a mean over real queries.

    Args:
        model: A swapped model, or a wrapper around one.
        inputs: Arguments of the model.
        original: Whether each layer computes softmax attention instead of its backend's.

    Returns:
        Numbers of the layers whose backends have one matrix of weights per head.
    """
    found: ByLayer = {}
    with ExitStack() as stack:
        stack.enter_context(evaluation_mode(model))
        for name, backend in swapped_layers(model).items():
            if not backend.capabilities.has_weights and not original:
                continue
            teacher = build_backend("softmax", {}, backend.geometry) if original else None
            stack.callback(
                backend.register_forward_pre_hook(
                    partial(_request_weights, original=original), with_kwargs=True
                ).remove
            )
            hook = partial(_record_entropy, found, name, teacher)
            stack.callback(backend.register_forward_hook(hook, with_kwargs=True).remove)
        model(**inputs)
    return found


def _request_weights(
    backend: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, original: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Request a backend's attention weights, unless softmax's are computed."""
    return args, {**kwargs, "return_weights": not original}


def _record_entropy(
    found: ByLayer,
    name: str,
    teacher: AttentionBackend | None,
    backend: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: AttentionOutput,
) -> AttentionOutput:
    """Record the entropy of a layer's weights, and return its output without them."""
    if teacher is not None:
        options = {k: x for k, x in kwargs.items() if k not in ("state", "return_state")}
        exact = teacher(*args, **{**options, "return_weights": True})
        output = output._replace(out=exact.out, weights=exact.weights)
    assert output.weights is not None
    bits = entropy(output.weights.float())  # [B, H, T]
    mask = kwargs.get("mask")
    valid = None if mask is None else mask.query_padding(*output.weights.shape[2:])
    rows = torch.ones_like(bits[:, 0]) if valid is None else valid.to(bits)
    mean = (bits * rows[:, None]).sum((0, 2)) / rows.sum().clamp(min=1)
    found[name] = [round(x, 4) for x in mean.tolist()]
    return output._replace(weights=None)


class EntropyLog:
    """Writes the entropy of every head to ``heads.jsonl`` while a model is trained.

    Args:
        checkpoints: The run's checkpoints, in whose folder the file is.
        inputs: Arguments of the model: a few held-out texts, on its device.
        every: Steps between measurements; a tenth of each stage when ``None``.
    """

    def __init__(
        self, checkpoints: Checkpoints, inputs: Mapping[str, Tensor], every: int | None
    ) -> None:
        self.checkpoints, self.path = checkpoints, checkpoints.out / HEADS
        self.inputs, self.every = inputs, every

    def record_original(self, model: nn.Module) -> None:
        """Write the entropies under softmax attention, unless a resumed run has them."""
        if not self.path.is_file():
            self._write(model, {"total": 0, "stage": ORIGINAL, "step": 0}, original=True)

    def record(self, model: nn.Module, stage: str, step: int, steps: int, total: int) -> None:
        """Write the entropies if they are due.

        Args:
            model: The model; nothing is written for one that is not swapped.
            stage: Name of the stage.
            step: Steps of the stage that are done.
            steps: Steps of the stage.
            total: The step of the run that repeats this measurement if it is repeated.
        """
        every = max(1, steps // MEASUREMENTS) if self.every is None else self.every
        if step in (0, steps) or step % every == 0:
            self._write(model, {"total": total, "stage": stage, "step": step})

    def _write(self, model: nn.Module, line: dict[str, Any], original: bool = False) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UntrainedWarning)  # no step was taken yet
            found = head_entropies(model, self.inputs, original=original)
        # A model that diverges has none; the loss of its next step explains that
        found = {name: bits for name, bits in found.items() if all(map(math.isfinite, bits))}
        if found:
            with explain_write_errors(self.checkpoints):
                append_line(self.path, {**line, "entropy": found})


def entropy_plots(lines: Sequence[Mapping[str, Any]]) -> list[Plot]:
    """Return charts of the entropy by step: means of layers, and every head.

    Args:
        lines: Rows of ``heads.jsonl``.
    """
    if not any(line["stage"] != ORIGINAL for line in lines):
        return []
    layers = list(dict.fromkeys(name for line in lines for name in line["entropy"]))
    labels = [
        ORIGINAL if line["stage"] == ORIGINAL else f"{line['stage']} {line['step']}"
        for line in lines
    ]
    ticks = _few(dict(enumerate(labels)), 8)
    series = [
        Series(
            name=f"layer {index}",
            x=[i for i, line in enumerate(lines) if layer in line["entropy"]],
            y=[_mean(line["entropy"][layer]) for line in lines if layer in line["entropy"]],
            style=index,
        )
        for index, layer in enumerate(layers)
    ]
    rows: list[list[float]] = []
    names: dict[int, str] = {}
    for index, layer in enumerate(layers):
        heads = max(len(line["entropy"].get(layer, ())) for line in lines)
        names[len(rows)] = f"{index}"
        missing = [float("nan")] * heads
        values = [line["entropy"].get(layer, missing) for line in lines]
        rows += [[row[head] for row in values] for head in range(heads)]
    step = Axis(label="stage and step", ticks=ticks)
    return [
        Plot(
            name="entropy",
            title="Entropy of attention by layer",
            text=(
                "In bits, mean over heads, on held-out text: 0 is one key, 8 are 256 keys of "
                "equal weight. The first point is the original model."
            ),
            figure=charts.line_chart(series, x=step, y=Axis(label="bits")),
        ),
        Plot(
            name="head-entropy",
            title="Entropy of every head",
            text="One row per head, from the first layer's first; numbers are layers.",
            figure=charts.matrix_chart(
                rows, x=step, y=Axis(label="layer", ticks=_few(names, 16)), color_label="bits"
            ),
        ),
    ]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _few(ticks: Mapping[int, str], most: int) -> dict[float, str]:
    """Return at most so many of the ticks, equally spaced."""
    step = -(-len(ticks) // most)
    return dict(list(ticks.items())[::step])


def make_entropy_log(run: Any) -> EntropyLog | None:
    """Return the log of a run with the original model's entropies; ``None`` if it measures none.

    Heads are measured by the main process alone, which needs all weights and whole rows.

    Args:
        run: A :class:`attnzoo.training.runs.Run`.
    """
    every = run.config.loop.entropy_every
    if every == 0 or not run.accelerator.is_main_process:
        return None
    if run.accelerator.distributed_type in SHARDED or run.mesh is not None:
        run.log("the entropy of heads is not measured: weights or rows are split over processes")
        return None
    if run.teacher is not None:
        return None  # recurrent layers of stock classes have no weights of keys
    log = EntropyLog(run.checkpoints, _held_out_texts(run), every)
    log.record_original(run.model)
    return log


def _held_out_texts(run: Any) -> dict[str, Tensor]:
    """Return held-out texts of a run as arguments of its model, at most 4 of 128 tokens."""
    rows, columns = slice(TEXTS), slice(TOKENS)
    if run.is_encoder:
        found = {"input_ids": run.texts.tokens, "attention_mask": run.texts.attention_mask}
        longest = int(found["attention_mask"][rows].sum(1).max())
        columns = slice(min(TOKENS, longest)) if run.texts.attention_mask[:, 0].all() else columns
    else:
        held_out = run.eval_batch.rows
        found = {"input_ids": held_out.tokens, "position_ids": held_out.positions}
    device = run.accelerator.device
    return {name: x[rows, columns].to(device) for name, x in found.items()}
