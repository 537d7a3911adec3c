"""Students of stock classes with recurrent layers, beside sliding windows in the same layers.

    python -m benchmarks.pretrain_tiny --qk-norm --minutes 9 --lr 1e-3 --out tiny-qwen3
    python -m benchmarks.students windows --teacher tiny-qwen3 --out students.jsonl
    python -m benchmarks.students train --teacher tiny-qwen3 --seeds 0 --out students.jsonl
    python -m benchmarks.students train --teacher tiny-qwen3 --mechanism delta --out students.jsonl

The teacher is a Qwen 3 and becomes a Qwen 3.5 with Gated DeltaNet layers. Text: that of
benchmarks/recover.py. ``windows`` trains nothing: it evaluates the teacher with windows of several
sizes in some layers, and with the layers that a plan chooses. Each run of ``train`` is one JSON
line: the teacher converted and trained by the recipe ``student``, or swapped to ``delta`` without a
window in the same layers and trained as long. The gap is that between a window of 32 tokens in all
layers and softmax, on rows of 512 tokens; on longer rows, the loss in bits per byte is stated
alone, because the teacher was trained on rows of 512.
"""

from __future__ import annotations

import json
import sysconfig
import tempfile
import time
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM

import attnzoo
from attnzoo.evaluation.quality import EvalBatch, Quality, evaluate_rows
from attnzoo.hf.models.speed_up import speed_up
from attnzoo.hf.saving.files import read_config
from attnzoo.hf.stock.convert import convert_files
from attnzoo.hf.stock.gated_delta_net import FAMILY
from attnzoo.spec import AttentionSpec
from attnzoo.training.arguments import RecoveryArguments
from attnzoo.training.data import RowOptions, load_rows
from attnzoo.training.evaluator import as_dicts, rows_to_eval_batch
from attnzoo.training.plan import make_plan
from attnzoo.training.recover import recover
from benchmarks.recover import FOLDERS

ROWS = {512: 32, 4096: 8}  # rows that are evaluated, by their length
SHOWN = ("loss", "recall", "loss_share", "recall_share", "agreement")
EQUAL = 152  # keys of a window with the memory of a recurrent layer of the student
DELTA = {"feature_map": "hedgehog_exp", "short_convolution": 4, "output_gate": True}

STEPS = {"transfer_steps": 240, "max_steps": 100}
RECIPE = {  # those of the recipes student_transfer and student_distil, with rows of 2 in both
    "train": "full",
    "learning_rate": 1e-4,
    "extras_learning_rate": 4e-4,
    "transfer_learning_rate": 3e-3,
    "repeat_share": 0.5,
    "per_device_train_batch_size": 2,
}

app = typer.Typer(add_completion=False)
Teacher = Annotated[Path, typer.Option(help="folder of a Qwen 3 of four layers")]
Out = Annotated[Path | None, typer.Option(help="file to append JSON lines to")]


def data() -> list[Path]:
    """Return the folders of text."""
    return [Path(sysconfig.get_path("stdlib")) / name for name in FOLDERS]


def shown(lines: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of some models that are printed, rounded."""
    return {
        name: {key: None if line[key] is None else round(line[key], 4) for key in SHOWN}
        for name, line in lines.items()
    }


def write(line: dict[str, Any], out: Path | None) -> None:
    """Print a JSON line and append it to a file."""
    print(json.dumps(line), flush=True)
    if out is not None:
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def held_out(teacher: Path, length: int) -> EvalBatch:
    """Return the held-out rows of the runs, or as much text in rows of another length."""
    rows = load_rows(teacher, data(), RowOptions(max_length=length))[1]
    return rows_to_eval_batch(rows, ROWS[length])


def planned(teacher: Path, window: int, keep: float) -> AttentionSpec:
    """Return a plan with windows of one size, which nothing was trained for."""
    rows = load_rows(teacher, data(), RowOptions(repeat_share=1.0))[0].select(slice(8))
    return make_plan(teacher, rows, [f"flash:window={window}"], keep_softmax=keep).spec


def layers_of(spec: AttentionSpec) -> str:
    """Return the layers with a window in a spec, such as ``"0,2"``."""
    return ",".join(spec.to_dict()["layers"])


def judge_windows(
    teacher: Path, specs: Mapping[str, AttentionSpec], length: int
) -> dict[str, Quality]:
    """Return the quality of the teacher under several specs, by name."""
    batch = held_out(teacher, length)
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32).eval()
    found: dict[str, Quality] = {}
    for name, spec in {
        "softmax": AttentionSpec("flash"),
        "window alone": AttentionSpec("flash", window=32),
        **specs,
    }.items():
        found[name] = evaluate_rows(attnzoo.swap(model, spec), batch)
        print(
            json.dumps({name: shown(as_dicts(found))[name]} if len(found) > 1 else name), flush=True
        )
    return found


def window_specs(teacher: Path, length: int) -> dict[str, AttentionSpec]:
    """Return windows that are compared, by name; the teacher has four layers."""
    equal = AttentionSpec("flash", layers={"1-2": f"flash:window={EQUAL}"})
    found = {f"1-2, window {EQUAL}": equal}
    if length == 512:
        for layers in combinations("0123", 2):
            options = dict.fromkeys(layers, "flash:window=64")
            found[f"{','.join(layers)}, window 64"] = AttentionSpec("flash", layers=options)
        for size in (32, 128):
            spec = AttentionSpec("flash", layers={"1-2": f"flash:window={size}"})
            found[f"1-2, window {size}"] = spec
    for size, kept in ((64, 2), (EQUAL, 1)):
        spec = planned(teacher, size, kept)
        found[f"{layers_of(spec)}, window {size}, planned"] = spec
    # all layers, with the memory of one full layer and three of EQUAL keys
    size = (length + 3 * EQUAL) // 4
    found[f"0-3, window {size}"] = AttentionSpec("flash", window=size)
    return found


@app.command()
def windows(
    teacher: Teacher,
    length: Annotated[int, typer.Option(help="tokens a row, 512 or 4096")] = 512,
    out: Out = None,
) -> None:
    """Evaluate windows in some layers of the teacher; nothing is trained."""
    torch.set_num_threads(1)
    lines = as_dicts(judge_windows(teacher, window_specs(teacher, length), length))
    family = read_config(teacher).model_type
    line = {"mechanism": "windows", "teacher": family, "length": length}
    write({**line, "lines": shown(lines)}, out)


@app.command()
def train(
    teacher: Teacher,
    layers: Annotated[str, typer.Option(help="layers that become recurrent")] = "1-2",
    mechanism: Annotated[
        str, typer.Option(help="stock (Gated DeltaNet), or delta (no window)")
    ] = "stock",
    seeds: Annotated[list[int] | None, typer.Option(help="seeds (repeatable)")] = None,
    times: Annotated[float, typer.Option(help="factor of the steps")] = 1,
    settings: Annotated[
        str, typer.Option(help="JSON: settings in place of the recipe's, such as steps and rates")
    ] = "{}",
    precision: Annotated[str, typer.Option(help="bf16, or no (float32)")] = "bf16",
    long_rows: Annotated[bool, typer.Option("--long", help="evaluate rows of 4,096 too")] = False,
    out: Out = None,
) -> None:
    """Convert, recover and evaluate students; print and append the results."""
    torch.set_num_threads(1)
    if mechanism not in ("stock", "delta"):
        raise typer.BadParameter(f"--mechanism must be stock or delta, got {mechanism!r}")
    given = {
        **{name: round(times * count) for name, count in STEPS.items()},
        **json.loads(settings),
    }
    for seed in seeds or [0]:
        start = time.monotonic()
        line = {"mechanism": mechanism, "layers": layers, "seed": seed, "times": times}
        with tempfile.TemporaryDirectory() as folder:
            line["teacher"] = read_config(teacher).model_type
            args = RecoveryArguments(
                str(Path(folder, "result")),
                bf16=precision == "bf16",
                use_cpu=not torch.accelerator.is_available(),
                seed=seed,
                **{**RECIPE, **given},
            )
            found = run(teacher, layers, mechanism, args)
            seconds = round(time.monotonic() - start)
            more = {"4096": long_loss(teacher, Path(folder, "result"))} if long_rows else {}
        line |= {**given, "precision": precision, "seconds": seconds}
        more |= {"equal_window": found["equal_window"], "verdict": found["verdict"]}
        write({**line, "lines": shown(found["lines"]), **more}, out)


def run(teacher: Path, layers: str, mechanism: str, args: RecoveryArguments) -> dict[str, Any]:
    """Train one student; return the content of ``recovery.json``."""

    def log(text: str) -> None:
        print(text, flush=True)

    if mechanism == "delta":
        options = {"backend": "delta", "options": DELTA}
        return recover(
            teacher, AttentionSpec("flash", layers={layers: options}), data(), args, log=log
        )
    student = Path(args.output_dir).with_name("student")
    convert_files(teacher, FAMILY, student, recurrent=layers)
    return recover(student, None, data(), args, teacher=teacher, log=log)


def long_loss(teacher: Path, result: Path) -> dict[str, float | None]:
    """Return the loss and recall of a trained student on rows of 4,096 tokens."""
    model = AutoModelForCausalLM.from_pretrained(result, dtype=torch.float32).eval()
    found = evaluate_rows(speed_up(model), held_out(teacher, 4096))
    return {"loss": found.loss, "recall": found.recall}


if __name__ == "__main__":
    app()
