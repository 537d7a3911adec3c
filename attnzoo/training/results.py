"""Complete a training run: its results are a verdict, evaluations, and decoding cost."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from typing import Any

import torch
from transformers import PreTrainedModel

from attnzoo.errors import AttnzooError
from attnzoo.evaluation.data import load_tokenizer
from attnzoo.evaluation.decoding import measure_together
from attnzoo.evaluation.equal_memory import EXACT, saved_cache_bytes
from attnzoo.evaluation.margins import mean_of
from attnzoo.evaluation.models import max_positions
from attnzoo.hf.configs import set_dropout
from attnzoo.hf.names import NAME
from attnzoo.hf.saving.companions import copy_companions, move_files
from attnzoo.hf.saving.dtype import cast_weights, rounded_weights
from attnzoo.hf.saving.files import read_config
from attnzoo.hf.swap.convert import original_attention
from attnzoo.report.atomic_write import atomic_write
from attnzoo.spec import AttentionSpec
from attnzoo.training.checkpoints import explain_write_errors
from attnzoo.training.head_entropy import make_entropy_log
from attnzoo.training.loop import read_losses
from attnzoo.training.lr_find import read_found
from attnzoo.training.report import write_pages
from attnzoo.training.runs import RESULTS, Run

LENGTHS = (256, 1024, 4096)  # context lengths at which decoding is timed, in tokens
MARGIN = 16  # positions left free for the timed tokens


def complete(
    run: Run, train: Callable[[Run], tuple[PreTrainedModel, dict[str, Any]]]
) -> dict[str, Any]:
    """Evaluate the baselines of a run, train, evaluate and save the result, and close the run.

    Args:
        run: The run; a finished one is closed only.
        train: Returns the trained model and further results.

    Returns:
        The content of ``recovery.json`` or ``finetuning.json``.
    """
    with closing(run):
        if run.finished is not None:
            return run.finished
        with run.shards.running(run.model):
            run.evaluate_baselines()
        run.loop.entropy_log = make_entropy_log(run)
        run.loop.keep_best, run.loop.make_judge, run.loop.log = run.keep_best, run.judge, run.log
        model, further = train(run)
        model = run.whole(model)
        with run.shards.running(model):
            lines = run.evaluate_result(model)
        results = {**_collect(run, model, lines), **further}
        save(run, model, results)
        return results


def save(run: Run, model: PreTrainedModel, results: Mapping[str, Any]) -> None:
    """Write model, tokenizer and results to a run's folder; called by all processes.

    The weights have the data type of the model that came in. The results are written last: they
    mark a finished run.
    """
    tokenizer = load_tokenizer(run.path)
    types = dict.fromkeys(rounded_weights(model, run.dtype), run.dtype)
    partial, files = run.out / "model.partial", run.out / "weights.partial"
    with explain_write_errors(run.checkpoints), run.shards.whole_on_disk(model, files, types):
        if run.accelerator.is_main_process:
            model.requires_grad_(True)
            cast_weights(model, run.dtype)
            set_dropout(model.config, read_config(run.path))
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
            copy_companions(run.path, partial)
            move_files(partial, run.out)
            write_pages(run.out, results, read_losses(run.out), run.command)
            text = json.dumps(results, indent=2, allow_nan=False)
            atomic_write(run.out / RESULTS[run.command], text)
    if run.accelerator.is_main_process:
        run.checkpoints.clear()
    run.shards.wait()
    for tracker in run.accelerator.trackers:
        tracker.finish()  # end_training would destroy the process group, which the caller may use
    run.accelerator.wait_for_everyone()


def _collect(run: Run, model: PreTrainedModel, lines: dict[str, Any]) -> dict[str, Any]:
    """Return the results of a trained model.

    Args:
        run: The run.
        model: The model.
        lines: Evaluation results by name: ``softmax``, ``window alone``, ``raw swap``, ``result``
            and any others.
    """
    decodes = not run.is_encoder and run.accelerator.is_main_process and run.teacher is None
    if decodes and run.shards.enabled:
        run.log(
            "decoding is not timed: each process has a part of the weights; `attnzoo compare` times"
            " the saved model"
        )
        decodes = False
    return {
        **run.conclude(lines),
        "decoding": decoding_cost(model, run) if decodes else {},
        **run.provenance,
        "about": run.about,
        "lr_find": read_found(run.checkpoints),
    }


@torch.no_grad()
def decoding_cost(model: PreTrainedModel, run: Run) -> dict[str, Any]:
    """Return milliseconds per token and cache bytes by context length, for softmax and the swap."""
    model.eval()
    limit = max_positions(run.path)
    lengths = [n for n in LENGTHS if limit is None or n + MARGIN <= limit]
    run.log("timing of decoding")
    text = run.eval_batch.stream
    stream = text.repeat(-(-LENGTHS[-1] // len(text))).to(model.device)
    contexts: Mapping[str, Callable[[], AbstractContextManager[Any]]] = {
        "softmax": lambda: original_attention(model),
        "result": nullcontext,
    }
    costs = measure_together(model, contexts, stream, lengths)
    sizes = _cache_sizes(model, run, lengths)
    return {
        name: {
            "milliseconds": cost.decode_ms,
            "milliseconds_error": {n: mean_of(ms).error for n, ms in cost.rounds_ms.items()},
            "busy": cost.busy,
            "cache_bytes": sizes.get(name, {}),
        }
        for name, cost in costs.items()
    }


def _cache_sizes(
    model: PreTrainedModel, run: Run, lengths: Sequence[int]
) -> dict[str, dict[int, int]]:
    """Return the bytes of the caches of softmax and the swap in the dtype that the run saves."""
    specs = {
        "softmax": AttentionSpec(EXACT),
        "result": AttentionSpec.from_dict(getattr(model.config, NAME)),
    }
    try:
        return {
            name: {
                n: sum(saved_cache_bytes(run.path, spec, n, run.dtype).values()) for n in lengths
            }
            for name, spec in specs.items()
        }
    except AttnzooError as error:
        run.log(f"the bytes of the cache are not computed: {error}")
        return {}
