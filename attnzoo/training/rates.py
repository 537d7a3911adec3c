r"""Learning rates of distillation, from how far the student is from its teacher.

Rates that suit a student far from its teacher undo what transfer has learned in one that is close:
the steps of Adam have the size of the rate, however small the gradient is, and their noise moves
the student away from its optimum. Rates are therefore multiplied by

.. math:: \min(1, (\mathrm{KL} / \mathrm{KL}_0)^{3/4})

with the KL of the student's predictions on held-out rows before the stage, and
:math:`\mathrm{KL}_0` = :data:`FAR` nats. The constants go through two students of the embedded
model: ``delta`` in all layers, 0.1 nats after transfer, for which the rates were found; and in two
of four layers, 0.005 nats, which full rates take to 0.007 nats and from 79% to 43% equal generated
tokens in five steps, and a tenth of them to neither.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from torch import nn

from attnzoo.evaluation.quality import contributions
from attnzoo.evaluation.rows import Rows, predictions
from attnzoo.hf.layers import attention_layers
from attnzoo.hf.swap.convert import original_attention
from attnzoo.report.atomic_write import atomic_write
from attnzoo.training.candidates import token_divergence
from attnzoo.training.checkpoints import FOLDER, explain_write_errors
from attnzoo.training.transfer import evaluation_mode, has_indexer, swapped_layers
from attnzoo.training.verdict import difference

FAR = 0.1  # nats
LEAST = 0.03  # smallest factor
JUDGED = 16  # held-out rows at most
CLOSE = 1e-3  # nats; a student that starts closer has little to learn from its teacher
FILE = "rates.json"  # in the folder of the checkpoints, for a resumed run


def rate_factor(kl: float) -> float:
    """Return the factor of the rates for a student with a KL in nats."""
    return min(1.0, max(LEAST, math.pow(max(kl, 0.0) / FAR, 0.75)))


@torch.no_grad()
def row_divergences(model: Any, rows: Rows, original: Any = None) -> list[float]:
    """Return the KL of a swapped model's predictions from those with softmax, in nats, of each row.

    Args:
        model: A swapped causal model, or any with ``original``.
        rows: Held-out rows.
        original: The model with softmax, where it is another one.

    Returns:
        The contribution of each row to the KL of all predictions, which is their mean.
    """
    found = []
    with evaluation_mode(model):
        for row in rows.split(1):
            with original_attention(model) if original is None else nullcontext():
                ((_, teacher),) = predictions(original or model, row, 1)
            ((_, student),) = predictions(model, row, 1)
            found.append(token_divergence(student, teacher)[row.counted.to(student.device)])
    return contributions(found)


def held_out_divergence(model: Any, rows: Rows, original: Any = None) -> float:
    """Return the mean KL of :func:`row_divergences`, in nats."""
    found = row_divergences(model, rows, original)
    return math.fsum(found) / len(found)


def why_not_trained(run: Any, model: Any) -> str:
    """Return why a run need not train, or ``""``: its student starts where the original model is.

    That is less than :data:`CLOSE` nats away on held-out rows of every length, and no difference
    to the original model is measured in loss, recall or generated tokens.

    Args:
        run: A :class:`attnzoo.training.runs.Run` of a causal model, with its baselines.
        model: The student before training.
    """
    indexers = [x.indexer for x in swapped_layers(model).values() if has_indexer(x)]
    if not all(indexer.is_trained for indexer in indexers if indexer is not None):
        return ""
    lines = run.baselines.results
    metrics = ("loss", "recall", "agreement")
    if any(difference(x, lines["raw swap"], lines["softmax"]).is_clear for x in metrics):
        return ""
    batches = (run.eval_batch, *run.long_batches.values())
    with run.shards.running(model):
        kl = [
            held_out_divergence(model, x.rows.select(slice(JUDGED)), run.teacher) for x in batches
        ]
    if max(kl) >= CLOSE:
        return ""
    loss = difference("loss", lines["raw swap"], lines["softmax"])
    return (
        f"nothing is trained: the model starts {max(kl):.1g} nats from softmax on this text, and "
        f"its loss, {loss} bits per byte above softmax's, is within the noise. It is saved as it "
        "is; give text with longer documents, or train all the same (--always-train)"
    )


def parameter_groups(
    model: nn.Module,
    added: list[nn.Parameter],
    weights: list[nn.Parameter],
    rates: Mapping[str, float],
) -> list[dict[str, Any]]:
    """Return parameters in groups with their learning rates, as torch's optimisers take them.

    Args:
        model: The model.
        added: Parameters that are not the original model's.
        weights: Adapters, or the model's own weights.
        rates: Learning rates of ``extras``, ``attention`` and ``weights``, as far as they train.
    """
    groups = [{"params": added, "lr": rates["extras"]}] if added else []
    if "attention" in rates:
        inside = {id(p) for x in attention_layers(model) for p in x.module.parameters()}
        groups.append({"params": [p for p in weights if id(p) in inside], "lr": rates["attention"]})
        weights = [p for p in weights if id(p) not in inside]
    if "weights" in rates:
        groups.append({"params": weights, "lr": rates["weights"]})
    return groups


def distillation_factor(run: Any, model: Any) -> float:
    """Return the factor of a run's distillation rates; a resumed run has the same one.

    Args:
        run: A :class:`attnzoo.training.runs.Run` of a causal model.
        model: The student before distillation.
    """
    path = run.checkpoints.out / FOLDER / FILE
    main = run.accelerator.is_main_process
    known = json.loads(path.read_text("utf-8")) if main and path.is_file() else None
    (known,) = broadcast_object_list([known])
    if known is None:
        rows = run.eval_batch.rows.select(slice(JUDGED))
        with run.shards.running(model):
            kl = held_out_divergence(model, rows, run.teacher)
        known = {"kl": kl, "factor": rate_factor(kl)}
        if main:
            with explain_write_errors(run.checkpoints):
                atomic_write(path, json.dumps(known, allow_nan=False))
    run.log(
        f"distillation starts {known['kl']:.4f} nats from softmax; its rates are multiplied by "
        f"{known['factor']:.2g}"
    )
    return float(known["factor"])
